"""Counter-based dropout: Random123's known answers; the same bits in kernels and numpy, on slices and the whole."""

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.layout import Mesh
from tvm_axe.programs import dropout, dropped, philox
from tvm_axe.schedule import Schedule


# The lines "philox2x32 10" of tests/kat_vectors in Random123: counter, key, expected.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0x00000000, 0x00000000), 0x00000000, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_known_answers(counter, key, expected):
    words = philox(*(np.array([word], "uint64") for word in (*counter, key)))
    assert tuple(int(word[0]) for word in words) == expected


def kernel(rows: int, columns: int, first: int, rate: float):
    """Dropout of x, whose element (0, 0) is element `first` of a larger tensor."""

    @T.prim_func(s_tir=True)
    def drop(
        x: T.Buffer((rows, columns), "float32"),
        seed: T.Buffer((1,), "uint32"),
        y: T.Buffer((rows, columns), "float32"),
    ):
        for i, j in T.grid(rows, columns):
            with T.sblock("drop"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = dropped(x[vi, vj], seed[0], T.int64(columns) * vi + vj + T.int64(first), rate)

    return drop


def run(mod, x: np.ndarray, seed: np.ndarray) -> np.ndarray:
    """The kernel's result on `x`, its output full of NaN before."""
    y = tvm.runtime.tensor(np.full_like(x, np.nan))
    tvm.compile(mod, target="llvm")["drop" if isinstance(mod, tvm.tirx.PrimFunc) else "main"](
        tvm.runtime.tensor(x), tvm.runtime.tensor(seed), y
    )
    return y.numpy()


@pytest.mark.parametrize("first", [0, (1 << 32) - 20, 5 << 32])
def test_kernel_and_numpy_agree_bit_for_bit(first):
    """On both sides of 2^32 elements, and beyond."""
    rng = np.random.default_rng()
    x, seed = rng.standard_normal((7, 13), dtype="float32"), rng.integers(1 << 32, size=1, dtype="uint32")
    index = first + np.arange(x.size).reshape(x.shape)
    np.testing.assert_array_equal(run(kernel(7, 13, first, 0.4), x, seed), dropout(x, seed, index, 0.4))


def test_unrolled_kernel_agrees():
    """Unrolling writes the expression several times: variables in it would be bound several times."""
    rng = np.random.default_rng()
    x, seed = rng.standard_normal((4, 3), dtype="float32"), np.array([5], "uint32")
    sch = Schedule(kernel(4, 3, 0, 0.5), mesh=Mesh({"tp": 1}))
    for loop in sch.get_loops(sch.get_sblock("drop")):
        sch.unroll(loop)
    np.testing.assert_array_equal(run(sch.mod, x, seed), dropout(x, seed, np.arange(12).reshape(4, 3), 0.5))


@pytest.mark.parametrize("devices", [2, 3])
def test_slices_and_whole_agree_bit_for_bit(devices):
    rng = np.random.default_rng()
    x, seed = rng.standard_normal((7, 5), dtype="float32"), rng.integers(1 << 32, size=1, dtype="uint32")
    sch = Schedule(kernel(7, 5, 0, 0.3), mesh=Mesh({"tp": devices}))
    block = sch.get_sblock("drop")
    sch.shard(sch.get_loops(block)[0], "tp")
    sch.cache_write(block, 0, "global")  # what is gathered
    exe = axe.compile(sch, work_dir=None)
    with axe.launch(sch.mesh, engine="threads") as workers:
        sliced = exe.run(workers, x, seed)
    np.testing.assert_array_equal(sliced, run(kernel(7, 5, 0, 0.3), x, seed))


def test_expression_survives_printing_and_json():
    mod = tvm.IRModule({"main": kernel(4, 3, 0, 0.5)})
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(mod)), mod)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_rate_and_mean(rate):
    """The share that is dropped is the rate, and the mean stays: both within 5 standard deviations."""
    count = 200_000
    kept = dropout(np.ones(count), np.array([1234], "uint32"), np.arange(count), rate)
    assert abs((kept == 0).mean() - rate) <= 5 * np.sqrt(rate * (1 - rate) / count)
    assert set(np.unique(kept)) <= {0, 1 / (1 - rate)}
    assert kept.dtype == np.float64


def test_another_seed_is_another_mask():
    masks = [dropout(np.ones(1000), np.array([seed], "uint32"), np.arange(1000), 0.5) > 0 for seed in (1, 2)]
    assert 400 < (masks[0] != masks[1]).sum() < 600
