"""Which parameters are given, and which are left with a result."""

import pytest
from tvm import relax, tirx
from tvm.script import tirx as T

from tvm_axe.analysis.directions import Direction, directions

IN, OUT, BOTH = Direction(True, False), Direction(False, True), Direction(True, True)


def storing(shape, store) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((8, 4), "float32"), Y: T.Buffer(shape, "float32")):
        for i, j in T.grid(8, 4):
            with T.sblock("put"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[store(vi, vj)] = X[vi, vj]

    return func


WHOLE = {
    "identity": ((8, 4), lambda i, j: (i, j)),
    "reversed": ((8, 4), lambda i, j: (7 - i, j)),
    "rolled": ((8, 4), lambda i, j: ((i + 3) % 8, j)),
    "interleaved": ((8, 4), lambda i, j: (i % 4 * 2 + i // 4, j)),
    "xor": ((8, 4), lambda i, j: (i ^ 5, j)),
    "flattened": ((32,), lambda i, j: (i * 4 + j,)),
    "unflattened": ((2, 4, 4), lambda i, j: (i // 4, i % 4, j)),
    "skewed": ((8, 4), lambda i, j: ((i + j) % 8, j)),
}
PART = {
    "at an offset": ((16, 4), lambda i, j: (i + 8, j)),
    "strided": ((16, 4), lambda i, j: (i * 2, j)),
    "diagonal": ((11, 4), lambda i, j: (i + j, j)),
    "rows of two": ((8, 4), lambda i, j: (i // 4, j)),
    "a plane": ((2, 8, 4), lambda i, j: (1, i, j)),
}


def split(parts) -> tirx.PrimFunc:
    """A function of as many nests as it has outputs."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((parts, 8), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.split(x, parts)))
    (func,) = [
        func
        for _, func in relax.transform.LegalizeOps()(builder.get()).functions_items()
        if isinstance(func, tirx.PrimFunc)
    ]
    return func


def test_work_grows_with_the_parameters(python_calls):
    found = []
    few, many, more = (python_calls(lambda n=n: found.append(directions(split(n)))) for n in (16, 32, 64))
    assert found[2] == (IN, *[OUT] * 64)
    assert more - many < 2.3 * (many - few)


@pytest.mark.parametrize("name", WHOLE)
def test_written_whole(name):
    assert directions(storing(*WHOLE[name])) == (IN, OUT)


@pytest.mark.parametrize("name", PART)
def test_written_in_part(name):
    """As rows that are appended to a cache: what is left of it is what was given."""
    assert directions(storing(*PART[name])) == (IN, BOTH)


@pytest.mark.parametrize(("second", "expected"), [(8, OUT), (7, BOTH), (9, BOTH)])
def test_halves_of_two_blocks(second, expected):
    """Two blocks write one output whole between them, unless a row is left out."""
    extent = 8 + max(second, 8)

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((8, 4), "float32"), B: T.Buffer((8, 4), "float32"), Y: T.Buffer((extent, 4), "float32")):
        for i, j in T.grid(8, 4):
            with T.sblock("a"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = A[vi, vj]
        for i, j in T.grid(8, 4):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi + second, vj] = B[vi, vj]

    assert directions(func) == (IN, IN, expected)


@pytest.mark.parametrize(("first", "expected"), [("write", OUT), ("read", BOTH)])
def test_read_before_or_behind(first, expected):
    @T.prim_func(s_tir=True)
    def behind(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32"), Z: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("y"):
                vi = T.axis.spatial(8, i)
                Y[vi] = X[vi]
        for i in range(8):
            with T.sblock("z"):
                vi = T.axis.spatial(8, i)
                Z[vi] = Y[7 - vi]

    @T.prim_func(s_tir=True)
    def before(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32"), Z: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("z"):
                vi = T.axis.spatial(8, i)
                Z[vi] = Y[7 - vi]
        for i in range(8):
            with T.sblock("y"):
                vi = T.axis.spatial(8, i)
                Y[vi] = X[vi]

    assert directions(behind if first == "write" else before) == (IN, expected, OUT)


@pytest.mark.parametrize(("shift", "expected"), [(0, OUT), (1, BOTH), (7, BOTH)])
def test_read_in_the_same_nest(shift, expected):
    """At the element just written, or at one that isn't written yet."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32"), Z: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("y"):
                vi = T.axis.spatial(8, i)
                Y[vi] = X[vi]
            with T.sblock("z"):
                vi = T.axis.spatial(8, i)
                Z[vi] = Y[(vi + shift) % 8]

    assert directions(func) == (IN, expected, OUT)


def test_sums_updates_and_scatters():
    """A sum starts at its init and is an output; an update reads what was given; a scatter may leave elements."""

    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((8, 4), "float32"),
        index: T.Buffer((8,), "int32"),
        total: T.Buffer((4,), "float32"),
        state: T.Buffer((8, 4), "float32"),
        rows: T.Buffer((8, 4), "float32"),
    ):
        for j, i in T.grid(4, 8):
            with T.sblock("total"):
                vj, vi = T.axis.remap("SR", [j, i])
                with T.init():
                    total[vj] = T.float32(0)
                total[vj] = total[vj] + A[vi, vj]
        for i, j in T.grid(8, 4):
            with T.sblock("state"):
                vi, vj = T.axis.remap("SS", [i, j])
                state[vi, vj] = state[vi, vj] + A[vi, vj]
        for i, j in T.grid(8, 4):
            with T.sblock("rows"):
                vi, vj = T.axis.remap("SS", [i, j])
                rows[index[vi], vj] = A[vi, vj]

    assert directions(func) == (IN, IN, OUT, BOTH, BOTH)


def test_what_a_block_stores_without_saying_so():
    """As upstream's operators do whose blocks state no regions: the parameter is left with a result."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")):
        with T.sblock("all"):
            T.reads()
            T.writes()
            for i in range(8):
                Y[i] = X[i]

    assert directions(func) == (IN, BOTH)


@pytest.mark.parametrize(("given", "expected"), [(False, OUT), (True, BOTH)])
def test_a_sum_of_other_elements_of_what_it_writes(given, expected):
    """Upstream leaves these out of what a reduction says that it reads; another block writes them, or does so late."""
    early, late = 0 if not given else 1, 0 if given else 1

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 4), "float32"), Y: T.Buffer((2, 4), "float32")):
        for i in range(4):
            with T.sblock("early"):
                v = T.axis.spatial(4, i)
                Y[early, v] = X[0, v]
        for i, k in T.grid(4, 4):
            with T.sblock("sum"):
                v, r = T.axis.remap("SR", [i, k])
                with T.init():
                    Y[1, v] = T.float32(0)
                Y[1, v] = Y[1, v] + X[v, r] * Y[0, r]
        for i in range(4):
            with T.sblock("late"):
                v = T.axis.spatial(4, i)
                Y[late, v] = X[1, v]

    assert directions(func) == (IN, expected)
