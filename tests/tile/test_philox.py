"""Random numbers by counters: the paper's own, and the same bits from the interpreter, the CPU and CUDA's source."""

import shutil

import numpy as np
import pytest
import tvm
import tvm_ffi
from expressions import philox
from on_cpu import agree, poison, run
from tvm.error import DiagnosticError
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines.cache import Cache

TARGETS = ("cuda:sm_80", "cuda:sm_90a")


@T.prim_func
def drawing(seed: T.int64, S: T.Buffer((2,), "int32"), Y: T.Buffer((3, 64), "uint32"), U: T.Buffer((3, 64), "float32")):
    with tile.kernel(1):
        y = tile.shared((3, 64), "uint32")
        u = tile.fragment((3, 64), "float32")
        first = tile.random(3, 5, dtype="uint32")
        with tile.parallel(1, 64) as (i, j):
            y[i, j] = tile.random(seed, j, dtype="uint32")
            y[i + 1, j] = tile.random(S[1], T.cast(j, "int64") * T.int64(123456789012345), dtype="uint32")
            y[i + 2, j] = first
        with tile.parallel(3, 64) as (i, j):
            u[i, j] = T.if_then_else(j < 60, tile.random(seed, i * 64 + j), T.float32(0))
        tile.copy(y, Y[0, 0])
        tile.copy(u, U[0, 0])


def wanted(seed: int, second: int) -> list[np.ndarray]:
    j = np.arange(64)
    words = [philox(seed, j)[0], philox(second, j * 123456789012345)[0], np.full(64, philox(3, 5)[0])]
    uniform = (philox(seed, np.arange(192))[0] >> 8).reshape(3, 64) * 2.0**-24
    uniform[:, 60:] = 0
    return [np.stack(words), uniform]


SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]


def test_the_papers_numbers():
    """The known answers of the authors' library, Random123, ``kat_vectors``."""
    assert [int(w) for w in philox(0, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in philox(-1, -1, -1)] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [np.uint64(n).astype("int64") for n in (0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E)]
    assert [int(w) for w in philox(*pi)] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("seed", SEEDS)
def test_on_a_cpu(tmp_path, seed):
    arrays = [np.array([7, -9], "int32"), poison((3, 64), "uint32"), poison((3, 64))]
    tile.compile(drawing, "llvm", Cache(tmp_path))(seed, *arrays)
    for found, want in zip(arrays[1:], wanted(seed, -9), strict=True):
        np.testing.assert_array_equal(found, want)


def test_the_interpreter_says_so():
    @T.prim_func
    def mine(S: T.Buffer((64,), "int32"), Y: T.Buffer((64,), "float32"), Z: T.Buffer((64,), "uint32")):
        with tile.kernel(4) as b, tile.parallel(16) as i:
            Y[b * 16 + i] = tile.random(S[b * 16 + i], b * 16 + i)
            Z[b * 16 + i] = tile.random(5, S[b * 16 + i], dtype="uint32") >> T.uint32(3)

    arrays = np.arange(-20, 44).astype("int32"), poison((64,)), poison((64,), "uint32")
    agree(mine, *arrays, epsilon=0)
    assert 0.3 < run(mine, *arrays)[1].mean() < 0.7


def test_uniform_numbers_are_uniform():
    """All are in [0, 1), every sixteenth of it has as many as chance explains (chi squared, 15 degrees, p = 1e-6)."""
    bits = philox(42, np.arange(1 << 16))[0]
    counts = np.bincount((bits >> 28).astype(int), minlength=16)
    assert ((counts - 4096.0) ** 2 / 4096).sum() < 56
    neighbours = np.corrcoef(bits[:-1], bits[1:])[0, 1]
    assert abs(neighbours) < 5 / 256


def test_round_trip():
    parsed = tvm.script.from_source(drawing.script())
    assert tvm_ffi.structural_equal(parsed, drawing)


@T.prim_func
def dropped(
    X: T.Buffer((128, 128), "float16"), W: T.Buffer((128, 128), "float16"), Y: T.Buffer((128, 128), "float16"),
    seed: T.int32,
):  # fmt: skip
    """A product whose epilogue leaves elements out, by a seed that every role knows."""
    with tile.kernel(1) as m:
        x = tile.shared((128, 64), "float16")
        w = tile.shared((128, 64), "float16")
        c = tile.fragment((128, 128), "float32")
        key = tile.random(seed, m, dtype="uint32")
        tile.fill(c, 0)
        for k in tile.pipelined(2):
            tile.copy(X[m * 128, k * 64], x)
            tile.copy(W[0, k * 64], w)
            tile.gemm(x, w, c, transpose_b=True)
        with tile.parallel(128, 128) as (i, j):
            c[i, j] = T.Select(tile.random(key, i * 128 + j) < T.float32(0.5), c[i, j] * T.float32(2), T.float32(0))
        tile.copy(c, Y[m * 128, 0])


def test_dropout_of_a_product(tmp_path):
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-2, 3, (128, 128)).astype("float16") for _ in range(2))
    y = poison((128, 128), "float16")
    tile.compile(dropped, "llvm", Cache(tmp_path))(x, w, y, 11)
    kept = (philox(philox(11, 0)[0], np.arange(128 * 128))[0] >> 8).reshape(128, 128) < 2**23
    np.testing.assert_array_equal(y, np.where(kept, x.astype("float32") @ w.T.astype("float32") * 2, 0))


@pytest.mark.parametrize("target", TARGETS)
def test_on_cuda_it_compiles(tmp_path, target):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    assert ("producer warp" in tile.explain(dropped, target)) == target.endswith("a")
    for executable in tile.compile_all([drawing, dropped], target, Cache(tmp_path)):
        assert "__umulhi" in executable.source


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_on_a_gpu(cuda, tmp_path, seed):
    arrays = [np.array([7, -9], "int32"), poison((3, 64), "uint32"), poison((3, 64))]
    tile.compile(drawing, "cuda", Cache(tmp_path))(seed, *arrays)
    for found, want in zip(arrays[1:], wanted(seed, -9), strict=True):
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("given, message", [
    ("0, i, dtype='int32'", "dtype is 'uint32' or 'float32', got 'int32'"),
    ("1.5, i", "the seed is an integer, got float"),
    ("0, Y[i]", "the counter is an integer, got float32"),
])  # fmt: skip
def test_refused(given, message):
    source = f"""@T.prim_func
def func(Y: T.Buffer((8,), "float32")):
    with tile.kernel(1):
        with tile.parallel(8) as i:
            Y[i] = tile.random({given})
"""
    with pytest.raises(DiagnosticError, match=message):
        tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


def test_a_random_index_may_be_anybodys():
    @T.prim_func
    def func(Y: T.Buffer((8,), "float32")):
        with tile.kernel(1), tile.parallel(8) as i:
            Y[tile.random(0, i, dtype="uint32") % T.uint32(8)] = T.float32(1)

    with pytest.raises(TileError, match="the index is data, which may be equal there"):
        tile.read(func)
