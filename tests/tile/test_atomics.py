"""Atomics: of tiles and of elements, the same types on every target, refused with one message elsewhere."""

import shutil

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np
import pytest
import tvm
import tvm_ffi
from interpreter import interpret
from on_host import run
from tvm import tirx
from tvm.error import DiagnosticError
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.atomics import SWAPPED
from tvm_axe.tile.checks import ATOMIC

TARGETS = ("llvm", "cuda:sm_80", "cuda:sm_90a")


KINDS = {"add": np.add, "max": np.maximum, "min": np.minimum}


def joining(kind: str, dtype: str) -> tirx.PrimFunc:
    """Each of three blocks joins A with C, as a tile, and with four elements of D, each element of A by itself."""
    source = f"""@T.prim_func
def joining_{kind}_{dtype}(
    A: T.Buffer((16, 64), "{dtype}"), B: T.Buffer((16,), "int32"), C: T.Buffer((16, 64), "{dtype}"),
    D: T.Buffer((4,), "{dtype}"), E: T.Buffer((4, 64), "{dtype}"), F: T.Buffer((8,), "{dtype}"),
):
    with tile.kernel(3) as m:
        a = tile.fragment((16, 64), "{dtype}")
        row = tile.fragment((16,), "{dtype}")
        tile.copy(A[0, 0], a)
        tile.copy(A[0:16, 0], row)
        tile.atomic_{kind}(a, C[0, 0])
        with tile.parallel(16, 64) as (i, j):
            if j < 50:
                tile.atomic_{kind}(a[i, j], D[B[i]])
            tile.atomic_{kind}(a[i, j], E[i % 4, j])
        with tile.parallel(16) as i:
            tile.atomic_{kind}(row[i], F[0])
        with tile.parallel(16, 1, 3) as (i, j, k):
            tile.atomic_{kind}(A[i, k], F[k + 1])
"""
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


def in_shared(kind: str, dtype: str) -> tirx.PrimFunc:
    """Two blocks join values with a tile of their own, at places that are data, then with each other's."""
    source = f"""@T.prim_func
def in_shared_{kind}_{dtype}(
    X: T.Buffer((2048,), "int32"), A: T.Buffer((2048,), "{dtype}"), Y: T.Buffer((2, 50), "{dtype}"),
    H: T.Buffer((50,), "{dtype}"),
):
    with tile.kernel(2, threads=64) as b:
        own = tile.shared((50,), "{dtype}")
        row = tile.fragment((50,), "{dtype}")
        with tile.parallel(50) as i:
            own[i] = A[i]
        for k in range(2):
            with tile.parallel(512) as i:
                if X[i] < 40:
                    tile.atomic_{kind}(A[b * 1024 + k * 512 + i], own[X[b * 1024 + k * 512 + i]])
        tile.copy(A[50:100], row)
        tile.atomic_{kind}(row, own)
        tile.copy(own, Y[b, 0])
        tile.atomic_{kind}(own, H)
"""
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


def given(kind: str, dtype: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Arguments of `in_shared`, and what is expected of the last two."""
    rng, join = np.random.default_rng(len(kind + dtype)), KINDS[kind]
    low = 0 if dtype.startswith("u") else -3
    x = rng.integers(0, 50, 2048).astype("int32")
    a = (rng.integers(low, 4, 2048) * (rng.random(2048) < 0.1)).astype(dtype)
    wide = a.astype("float64")
    y, h = np.tile(wide[:50], (2, 1)), np.zeros(50)
    for block in range(2):
        part = slice(block * 1024, block * 1024 + 1024)
        some = np.tile(x[:512] < 40, 2)
        join.at(y[block], x[part][some], wide[part][some])
        y[block] = join(y[block], wide[50:100])
        h = join(h, y[block])
    return [x, a, np.full((2, 50), 77, dtype), np.zeros(50, dtype)], [y, h]


def judged_in_shared(kind: str, dtype: str, target: str, store: Cache) -> None:
    arrays, wants = given(kind, dtype)
    tile.compile(in_shared(kind, dtype), target, store)(*arrays)
    for found, want in zip(arrays[2:], wants):
        np.testing.assert_array_equal(found.astype("float64"), want)


@pytest.mark.parametrize("kind, dtype", [("add", "int32"), ("max", "bfloat16"), ("min", "float32")])
def test_in_shared_memory_on_a_cpu_and_in_the_interpreter(tmp_path, kind, dtype):
    judged_in_shared(kind, dtype, "llvm", Cache(tmp_path))
    arrays, wants = given(kind, dtype)
    for found, want in zip(interpret(in_shared(kind, dtype), *arrays)[2:], wants):
        np.testing.assert_array_equal(found, want)


def test_in_shared_memory_in_the_source_for_cuda(tmp_path):
    arrays, wants = given("add", "int32")
    source = tile.compile(in_shared("add", "int32"), "cuda:sm_80", Cache(tmp_path)).source
    run(source, 2, dict(zip("XAYH", arrays)), tmp_path)
    for found, want in zip(arrays[2:], wants):
        np.testing.assert_array_equal(found, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ATOMIC)
@pytest.mark.parametrize("kind", KINDS)
def test_in_shared_memory_on_a_gpu(cuda, tmp_path, kind, dtype):
    judged_in_shared(kind, dtype, "cuda", Cache(tmp_path))


def judged(kind: str, dtype: str, target: str, store: Cache) -> None:
    rng = np.random.default_rng(len(kind + dtype))
    few = dtype in ("float16", "bfloat16") and kind == "add"  # sums up to 256 are exact in bfloat16
    low = 0 if few or dtype.startswith("u") else -9
    a = (rng.integers(low, 2, (16, 64)) * (rng.random((16, 64)) < (0.02 if few else 1))).astype(dtype)
    b = rng.integers(0, 4, 16).astype("int32")
    outputs = [rng.integers(low, 2, shape).astype(dtype) for shape in ((16, 64), (4,), (4, 64), (8,))]
    wide = [output.astype("float64") for output in outputs]
    join = KINDS[kind]
    for _ in range(3):
        wide[0] = join(wide[0], a.astype("float64"))
        join.at(wide[1], np.repeat(b, 50), a[:, :50].astype("float64").reshape(-1))
        join.at(wide[2], np.arange(16) % 4, a.astype("float64"))
        join.at(wide[3], np.zeros(16, int), a[:, 0].astype("float64"))
        join.at(wide[3], np.tile([1, 2, 3], 16), a[:, :3].astype("float64").reshape(-1))
    func = joining(kind, dtype)
    for part, found in zip(wide, interpret(func, a, b, *outputs)[2:]):
        np.testing.assert_array_equal(found, part)
    tile.compile(func, target, store)(a, b, *outputs)
    for found, part in zip(outputs, wide):
        np.testing.assert_array_equal(found.astype("float64"), part)


@pytest.mark.parametrize("dtype", ATOMIC)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cpu(tmp_path, kind, dtype):
    judged(kind, dtype, "llvm", Cache(tmp_path))


def claiming(dtype: str) -> tirx.PrimFunc:
    """Two blocks put keys into a table and count them, the first of each residue claims a place, and one block wins."""
    source = f"""@T.prim_func
def claiming_{dtype}(
    X: T.Buffer((512,), "{dtype}"), K: T.Buffer((1024,), "{dtype}"), C: T.Buffer((1024,), "int32"),
    S: T.Buffer((5,), "{dtype}"), O: T.Buffer((2, 64), "{dtype}"), W: T.Buffer((2, 256), "{dtype}"),
    F: T.Buffer((2, 16), "{dtype}"), L: T.Buffer((2,), "{dtype}"),
):
    with tile.kernel(2, threads=64) as b:
        own = tile.shared((64,), "{dtype}")
        before = tile.shared((1,), "{dtype}")
        won = tile.fragment((256,), "{dtype}")
        few = tile.fragment((16,), "{dtype}")
        tile.fill(own, 0)
        before[0] = tile.atomic_cas(0, T.cast(b + 1, "{dtype}"), S[4])
        L[b] = before[0]
        with tile.parallel(256) as i:
            key = X[b * 256 + i]
            done = False
            for probe in range(8):
                place = (T.cast(key, "int32") * 37 + probe) % 1024
                if not done:
                    held = tile.atomic_cas(0, key, K[place])
                    if held == 0 or held == key:
                        done = True
                        tile.atomic_add(1, C[place])
            won[i] = tile.atomic_cas(0, T.cast(i + 1, "{dtype}"), own[T.cast(key, "int32") % 64])
        with tile.parallel(16) as i:  # several threads hold an element of it
            few[i] = tile.atomic_cas(0, 1, S[i % 4])
        tile.copy(own, O[b, 0])
        tile.copy(won, W[b, 0])
        tile.copy(few, F[b, 0])
"""
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


def keys_and_places(dtype: str) -> list[np.ndarray]:
    keys = np.random.default_rng(5).integers(1, 300, 512)
    shapes = {"K": 1024, "C": 1024, "S": 5, "O": (2, 64), "W": (2, 256), "F": (2, 16), "L": 2}
    begin = [np.full(shape, 0 if name in "KCS" else 77) for name, shape in shapes.items()]
    return [array.astype("int32" if at == 2 else dtype) for at, array in enumerate([keys, *begin])]


def judge_claims(keys: np.ndarray, table: np.ndarray, counts: np.ndarray, *places: np.ndarray) -> None:
    """Each key stands once with its number, and of all who want a place, one finds it free and the others find him."""
    found, numbers = np.unique(keys, return_counts=True)
    order = np.argsort(table)[-len(found) :]
    np.testing.assert_array_equal(table[order], found)
    np.testing.assert_array_equal(counts[order], numbers)
    assert counts.sum() == 512 and np.count_nonzero(table) == len(found)
    flags, own, won, few, before = places
    for block in range(2):
        residues = keys.reshape(2, 256)[block] % 64
        for residue in range(64):
            those = np.flatnonzero(residues == residue)
            first = int(own[block, residue])
            assert first - 1 in those if len(those) else first == 0
            np.testing.assert_array_equal(won[block, those], np.where(those == first - 1, 0, first))
    assert [int((few[:, i::4] == 0).sum()) for i in range(4)] == [1] * 4 and set(few.ravel().tolist()) == {0, 1}
    assert flags[:4].tolist() == [1] * 4 and sorted(before.tolist()) == [0, flags[4]]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_compare_and_swap_on_a_cpu_and_in_the_interpreter(tmp_path, dtype):
    arrays = keys_and_places(dtype)
    judge_claims(arrays[0], *interpret(claiming(dtype), *arrays)[1:])
    tile.compile(claiming(dtype), "llvm", Cache(tmp_path))(*arrays)
    judge_claims(*arrays)


def test_compare_and_swap_in_the_source_for_cuda(tmp_path):
    arrays = keys_and_places("int32")
    source = tile.compile(claiming("int32"), "cuda:sm_80", Cache(tmp_path)).source
    run(source, 2, dict(zip("XKCSOWFL", arrays)), tmp_path)
    judge_claims(*arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SWAPPED)
def test_compare_and_swap_on_a_gpu(cuda, tmp_path, dtype):
    arrays = keys_and_places(dtype)
    tile.compile(claiming(dtype), "cuda", Cache(tmp_path))(*arrays)
    judge_claims(*arrays)


def test_compare_and_swap_is_refused_on_amd():
    with pytest.raises(TileError, match="gfx942 has no atomic cas of int32; valid is add of int32 and float32"):
        tile.lower(claiming("int32"), "rocm:gfx942")


@pytest.mark.parametrize("target", TARGETS[1:])
def test_on_cuda_all_of_them_compile(tmp_path, target):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    programs = [joining(kind, dtype) for kind in KINDS for dtype in ATOMIC]
    programs += [in_shared(kind, dtype) for kind in KINDS for dtype in ("int32", "float16", "bfloat16")]
    programs += [claiming(dtype) for dtype in SWAPPED]
    assert len(tile.compile_all(programs, target, Cache(tmp_path))) == len(programs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ATOMIC)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(cuda, tmp_path, kind, dtype):
    judged(kind, dtype, "cuda", Cache(tmp_path))


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_nan_stays(tmp_path, kind, dtype):
    a = np.ones((16, 64), dtype)
    a[3, 5] = np.nan
    outputs = [np.zeros(shape, dtype) for shape in ((16, 64), (4,), (4, 64), (8,))]
    outputs[0][7, 7] = np.nan
    tile.compile(joining(kind, dtype), "llvm", Cache(tmp_path))(a, np.zeros(16, "int32"), *outputs)
    nan = [np.argwhere(np.isnan(output.astype("float64"))).tolist() for output in outputs]
    assert nan == [[[3, 5], [7, 7]], [[0]], [[3, 5]], []]


def test_reads_as_it_is_written():
    func = joining("max", "float32")
    text = str(tile.read(func))
    assert "copy a to C, the larger atomically" in text and "parallel 16 x 64 into D, E" in text
    parsed = tvm.script.from_source(func.script())
    assert tvm_ffi.structural_equal(parsed, func)
    assert str(tile.read(parsed)) == text


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn"])
def test_other_types_are_refused_alike(target, dtype):
    with pytest.raises(TileError, match=f"into global C: {dtype}.*; valid are tensors of float16, .* uint32"):
        tile.lower(joining("add", dtype), target)


HEAD = """@T.prim_func
def func(A: T.Buffer((16,), "int32"), H: T.Buffer((16,), "int32"), C: T.Buffer((16,), "float32")):
    with tile.kernel(4) as m:
        a = tile.fragment((16,), "int32")
        s = tile.shared((16,), "int32")
        tile.copy(A[0], a)
        tile.fill(s, 0)
"""
IN = "        with tile.parallel(16) as i:\n"

REFUSED = {
    "a read beside it": (
        f"{IN}            tile.atomic_add(1, H[a[i]])\n{IN}            s[i] = H[i]\n",
        r"joins values with global H.* atomically, and `parallel 16 into s` reads or stores it, .*; valid is another",
    ),
    "a read in its body": (f"{IN}            tile.atomic_add(H[15 - i], H[i])\n", "reads or stores it, in no order"),
    "a store beside it": (
        f"        if m == 0:\n            tile.fill(H, 0)\n{IN}            tile.atomic_max(1, H[i])\n",
        "and `fill H with 0` reads or stores it",
    ),
    "a store in its body": (
        f"{IN}            tile.atomic_add(1, H[i])\n            H[i] = 3\n",
        "and `parallel 16 into H` reads or stores it",
    ),
    "a scalar": (
        "        tile.atomic_add(a, H[0])\n        for k in range(H[3]):\n            tile.fill(s, 1)\n"
        "        n = H[2]\n",
        "reads or stores it",
    ),
    "a copy from it": ("        tile.copy(H[0], s)\n        tile.atomic_min(a, H[0])\n", "`copy H to s` reads or"),
    "two kinds": (
        f"        tile.atomic_add(a, H[0])\n{IN}            tile.atomic_max(1, H[i])\n",
        "by add, and `parallel 16 into H` by another; .* valid is one of add, max, min and cas",
    ),
    "in registers": (
        f"{IN}            tile.atomic_add(1, a[s[i]])\n",
        "atomically into fragment a.*; valid are a tensor in global memory and a tile.shared",
    ),
    "a tensor on chip": ("        tile.atomic_add(A, s)\n", "into shared s.*, from a tensor; valid is a tile.fragment"),
    "a read on chip": (f"{IN}            tile.atomic_add(s[i], s[a[i]])\n", "valid is a `parallel` of its own before"),
    "two kinds on chip": (
        f"{IN}            tile.atomic_add(1, s[a[i]])\n            tile.atomic_max(1, s[i])\n",
        "joins values with shared s.* by .* by another",
    ),
    "compare and swap, read": (
        f"{IN}            s[i] = tile.atomic_cas(0, 1, H[i]) + H[i]\n",
        "reads or stores it, in no order",
    ),
    "compare and swap, added to": (
        f"{IN}            s[i] = tile.atomic_cas(0, 1, H[i])\n            tile.atomic_add(1, H[i])\n",
        "by cas, and .* by another",
    ),
    "compare and swap, chosen": (
        f"{IN}            s[i] = T.if_then_else(a[i] > 0, tile.atomic_cas(0, 1, H[i]), 0)\n",
        r"H\[i\] is compared and swapped by atomic_cas in a side of T.if_then_else; valid is an `if` around",
    ),
    "what was found is a place": (
        f"{IN}            found = tile.atomic_cas(0, 1, H[0])\n            s[found] = 1\n",
        "is stored at i=0 and at i=1, in no order, and the index is data",
    ),
    "compare and swap by all": (
        "        old = tile.atomic_cas(0, 1, H[0])\n",
        r"outside of a `parallel`, where every thread would do it; valid is a store .* tile.shared\(\(1,\), 'int32'\)",
    ),
    "outside": (f"{IN}            tile.atomic_add(1, H[i + 1])\n", "is element 16 of dimension 0 of global H"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    lines, message = REFUSED[name]
    with pytest.raises(TileError, match=message):
        tile.read(tvm.script.from_source(HEAD + lines, extra_vars={"tile": tile, "T": T}))


@pytest.mark.parametrize("line, message", [
    ("tile.atomic_add(1.5 + C[i], H[i])", 'the value is float32, .* is int32; valid is T.cast'),
    ("tile.atomic_add(1, H[0:4])", "a value is joined with an element of a tensor"),
    ("tile.atomic_cas(T.int32(0), 1.5 + C[i], H[i])", 'the value is float32, .* is int32; valid is T.cast'),
    ("s[i] = tile.atomic_cas(0, 1, C[i])", "is float32; valid are int32, int64, uint32.* T.reinterpret"),
    ("s[i] = tile.atomic_cas(0, 1, H[0:4])", "atomic_cas: a value is joined with an element of a tensor"),
    ('tile.copy(a, H[0], atomic="xor")', "atomic is 'add', 'max' or 'min', got 'xor'"),
])  # fmt: skip
def test_refused_where_it_is_written(line, message):
    with pytest.raises(DiagnosticError, match=message):
        tvm.script.from_source(f"{HEAD}{IN}            {line}\n", extra_vars={"tile": tile, "T": T})
