"""The judge of the lowerings, judged: by hand-written numpy, and by programs that it must not accept."""

import numpy as np
import pytest
from generator import Maker
from interpreter import Fault, TooLarge, interpret
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.tile.reading import Reader


@T.prim_func
def matmul(A: T.Buffer((50, 30), "float16"), B: T.Buffer((20, 30), "float16"), C: T.Buffer((50, 20), "float32")):
    with tile.kernel(4, 2) as (m, n):
        a = tile.shared((16, 8), "float16")
        b = tile.shared((16, 8), "float16")
        c = tile.fragment((16, 16), "float32")
        row = tile.fragment((16,), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(4):
            tile.copy(A[m * 16, k * 8], a)
            tile.copy(B[n * 16, k * 8], b)
            tile.gemm(a, b, c, transpose_b=True)
        tile.max(c, row)
        with tile.parallel(16, 16) as (i, j):
            z = c[i, j] - row[i]
            if i != j:
                c[i, j] = T.if_then_else(z < T.float32(-1), T.exp(z), T.abs(z))
        tile.copy(c, C[m * 16, n * 16])


def test_matmul():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype("float16") for shape in [(50, 30), (20, 30)])
    poison = np.full((50, 20), np.nan, "float32")
    found = interpret(matmul, a, b, poison)
    product = np.zeros((64, 32))
    product[:50, :20] = a.astype("float64") @ b.T.astype("float64")
    for block in (product[m : m + 16, n : n + 16] for m in range(0, 64, 16) for n in (0, 16)):
        z = block - block.max(axis=1, keepdims=True)
        block[...] = np.where(np.eye(16, dtype=bool), block, np.where(z < -1, np.exp(z), np.abs(z)))
    np.testing.assert_allclose(found[2], product[:50, :20], rtol=1e-12, atol=1e-12)
    assert np.isnan(poison).all() and found[0].dtype == "float64"


@T.prim_func
def scalars(N: T.Buffer((3,), "int32"), A: T.handle, S: T.Buffer((8,), "int32")):
    n = T.int32()
    X = T.match_buffer(A, (3, n), "int8")
    with tile.kernel(3) as m:
        x = tile.fragment((8,), "int8")
        count = tile.local((1,), "int32")
        count[0] = 0
        for k in range(N[m]):
            if k % 2 == 0:
                count[0] = count[0] + k
        tile.copy(X[m, 0:8], x)
        with tile.parallel(8) as i:
            x[i] = x[i] * T.cast(100, "int8") + T.cast(count[0], "int8")
        tile.copy(x, S, atomic="add")


def test_scalars_and_atomics():
    x = np.arange(15, dtype="int8").reshape(3, 5)
    found = interpret(scalars, np.array([0, 3, 6], "int32"), x, np.arange(8, dtype="int32"))
    padded = np.pad(x, ((0, 0), (0, 3))).astype("int64")
    terms = (padded * 100 + np.array([[0], [2], [6]])).astype("int8")  # each block's wrap; their sum doesn't
    np.testing.assert_array_equal(found[2], np.arange(8) + terms.astype("int32").sum(axis=0))


def faulty(case: str):
    @T.prim_func
    def func(A: T.Buffer((16,), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(2) as m:
            a = tile.shared((16,), "float32")
            x = tile.local((1,), "int32")
            if case == "read outside":
                tile.copy(a[index[0] : index[0] + 4], A[0:4])
            elif case == "negative":
                tile.copy(A[index[1] - 20], a)
            elif case == "scattered":
                with tile.parallel(16) as i:
                    a[index[i]] = T.float32(1)
            elif case == "store outside":
                with tile.parallel(16) as i:
                    A[m * 8 + i] = T.float32(1)
            elif case == "neighbour":
                with tile.parallel(8) as i:
                    a[i * 2] = a[i + 1]
            elif case == "blocks":
                tile.fill(a, 0)
                tile.copy(a, A)
            elif case == "unwritten":
                with tile.parallel(4) as i:
                    if x[0] > 3:
                        a[i] = T.float32(0)
            else:
                with tile.parallel(4) as i:
                    a[i] = T.float32(1000)

    return func


@pytest.mark.parametrize(
    "case, message",
    [
        ("read outside", r"a\[.*leaves shared a"),
        ("negative", "leaves global A"),
        ("scattered", "two points store one element"),
        ("store outside", r"index \[16 17.* of 16"),
        ("neighbour", "two points touch one element, and one of them stores it"),
        ("blocks", "two blocks touch one element"),
        ("unwritten", "never written"),
    ],
)
def test_faults(case, message):
    unchecked = Reader(faulty(case)).program()
    with pytest.raises(Fault, match=message):
        interpret(unchecked, np.zeros(16, "float32"), np.full(16, 13, "int32"))


def test_too_large():
    arrays = np.zeros(16, "float32"), np.zeros(16, "int32")
    with pytest.raises(TooLarge, match=r"1000\.0 is stored as float32"):
        interpret(faulty("large"), *arrays, largest={"float32": 999})
    interpret(faulty("large"), *arrays, largest={"float32": 1000})


def test_blocks_run_in_no_order():
    """Blocks of which each adds its own atomically give the same in every order."""
    arrays = np.array([0, 3, 6], "int32"), np.ones((3, 5), "int8"), np.zeros(8, "int32")
    found = [interpret(scalars, *arrays, rng=np.random.default_rng(seed))[2] for seed in range(3)]
    assert all((one == found[0]).all() for one in found)


def test_generator():
    """Every choice that the generator has leads to a program that can be interpreted."""
    rng = np.random.default_rng(1)
    words, seen = ("gemm", "parallel", "pipelined", "if ", "atomic", "sum("), set()
    for _ in range(30):
        made = Maker(lambda options: list(options)[rng.integers(len(options))]).make()
        interpret(made.func, *made.arrays)
        seen |= {word for word in words if word in made.source}
    assert seen == set(words)
