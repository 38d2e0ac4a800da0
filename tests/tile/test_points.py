"""What is known of expressions without running the program."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.nodes import Copy, Parallel
from tvm_axe.tile.points import accesses, evaluate, scoped

I, J = tirx.Var("i", "int32"), tirx.Var("j", "int32")
OPERATORS = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a // (b * b + 1),
    lambda a, b: a % (b * b + 1),
    lambda a, b: a ^ b,
    lambda a, b: (a < b, b, a),
]


def both(operator, a, b):
    """The operator on expressions, and on numpy's arrays; a triple is a choice."""
    found = operator(a[0], b[0]), operator(a[1], b[1])
    if isinstance(found[0], tuple):
        return tirx.if_then_else(*found[0]), np.where(*found[1])
    return found


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-3, 3)), min_size=1, max_size=5))
def test_evaluate(steps):
    """An expression's values are those of the same operators in numpy."""
    i, j = np.indices((4, 5)).reshape(2, -1)
    pair = (I + 0, i)
    for number, constant in steps:
        pair = both(OPERATORS[number], pair, (J + constant, j + constant))
    np.testing.assert_array_equal(evaluate(pair[0], {I: i, J: j}), pair[1])


def test_unknown():
    buffer = tirx.decl_buffer((4,), "int32", "b")
    assert evaluate(buffer[I] + 1, {I: np.arange(4)}) is None
    assert evaluate(I + J, {I: np.arange(4)}) is None
    assert evaluate(I // J, {I: np.asarray(1), J: np.asarray(0)}) is None
    assert evaluate(tirx.const(1.5, "float32"), {}) is None


@T.prim_func
def nest(A: T.Buffer((64, 64), "float32"), N: T.Buffer((1,), "int32")):
    with tile.kernel(4) as m:
        a = tile.shared((8, 8), "float32")
        for k in range(m, 6):
            if k > 1:
                tile.copy(A[m * 8, k * 8], a)
        for l in range(N[0]):
            tile.copy(A[m * 8, l * 8], a)
        with tile.parallel(8, 8) as (i, j):
            row = T.min(m * 8 + i, 40)
            if i < j and N[0] > 3:
                A[row, j] = a[i, j]


def test_corners_are_iterations_that_there_are():
    found = [(node, scope) for node, scope in scoped(tile.read(nest)) if isinstance(node, Copy)]
    known, unknown = [[{v.name: int(x) for v, x in c.items()} for c in s.corners()] for _, s in found]
    assert known == [{"m": 0, "k": 5}, {"m": 3, "k": 3}, {"m": 3, "k": 5}]
    assert unknown == [{"m": 0, "l": 0}, {"m": 0}, {"m": 3, "l": 0}, {"m": 3}]


def test_accesses():
    (parallel,) = (node for node in tile.read(nest).nodes() if isinstance(node, Parallel))
    (grid, _), *_ = tile.read(nest).grid
    (grid,) = (var for var in accesses(parallel)[-1].vars if var.name == "m")
    number, load, store = accesses(parallel, {grid: np.asarray(5)})
    assert [str(access) for access in (number, load, store)] == ["N[0]", "a[i, j]", "A[row, j]"]
    assert store.known and not store.guard.exact and load.guard.mask.sum() == 28
    assert (store.where[0] == 40).all() and sorted(var.name for var in store.vars) == ["i", "j", "m"]
    assert not accesses(parallel, {})[-1].known


def test_a_chain_of_names_that_stand_twice_in_the_next(tmp_path):
    """What is known of a name is found once: with values in the place of names there would be 2**40 of the first."""

    @T.prim_func
    def func(X: T.Buffer((64,), "int32"), H: T.Buffer((8,), "int32")):
        with tile.kernel(2) as b, tile.parallel(32) as i:
            at = X[b * 32 + i]
            for k in range(40):
                if at > k:
                    at = at - at // 3
            tile.atomic_add(1, H[at % 8])

    x, counts = np.random.default_rng(0).integers(0, 10**6, 64).astype("int32"), np.zeros(8, "int32")
    tile.compile(func, "llvm", Cache(tmp_path))(x, counts)
    for k in range(40):
        x = np.where(x > k, x - x // 3, x)
    np.testing.assert_array_equal(counts, np.bincount(x % 8, minlength=8))
