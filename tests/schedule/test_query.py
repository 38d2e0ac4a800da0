"""The questions that the rules ask: which blocks are plain sums and copies, and what comes first."""

import pytest
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import covers
from tvm_axe.analysis.patterns import is_copy, is_sum, shift_of, summed
from tvm_axe.analysis.tree import is_one_of
from tvm_axe.schedule import query


def block_of(statement, init=0.0):
    """The block `X[i] = statement(A, X, i, k)` with an init."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 4), "float32"), X: T.Buffer((4,), "float32")):
        for i, k in T.grid(4, 4):
            with T.sblock("b"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    X[vi] = T.float32(init)
                X[vi] = statement(A, X, vi, vk)

    sch = s_tir.Schedule(program)
    return sch.get(sch.get_sblock("b"))


SUMS = {
    "sum": (lambda A, X, i, k: X[i] + A[i, k], 0.0, True),
    "turned round": (lambda A, X, i, k: A[i, k] + X[i], 0.0, True),
    "from one": (lambda A, X, i, k: X[i] + A[i, k], 1.0, False),
    "of a product": (lambda A, X, i, k: X[i] + A[i, k] * A[k, i], 0.0, False),
    "maximum": (lambda A, X, i, k: T.max(X[i], A[i, k]), 0.0, False),
    "doubled": (lambda A, X, i, k: X[i] + X[i], 0.0, False),
}


@pytest.mark.parametrize("name", SUMS)
def test_is_sum(name):
    statement, init, expected = SUMS[name]
    assert is_sum(block_of(statement, init)) is expected


COPIES = {
    "copy": (lambda A, i, j: A[i, j], True),
    "transposed": (lambda A, i, j: A[j, i], False),
    "shifted": (lambda A, i, j: A[i, 3 - j], False),
    "scaled": (lambda A, i, j: A[i, j] * T.float32(2), False),
    "constant": (lambda A, i, j: T.float32(2), False),
}


@pytest.mark.parametrize("name", COPIES)
def test_is_copy(name):
    statement, expected = COPIES[name]

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
        for i, j in T.grid(4, 4):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = statement(A, vi, vj)

    sch = s_tir.Schedule(program)
    assert is_copy(sch.get(sch.get_sblock("b"))) is expected


def test_reduction_is_no_copy():
    assert not is_copy(block_of(lambda A, X, i, k: X[i] + A[i, k]))


def test_precedes_and_one_of(schedule):
    tree = query.tree(schedule())
    mm, epi = tree.named("mm"), tree.named("epi")
    assert tree.precedes(mm, epi) and not tree.precedes(epi, mm)
    assert is_one_of(epi, [mm, epi]) and not is_one_of(epi, [mm])


def test_mask(schedule):
    sch = schedule(5, 3, 8)
    mm = sch.get_sblock("mm")
    assert query.nest_of(sch, mm).mask is None
    sch.split(sch.get_loops(mm)[0], [2, None])
    assert str(query.nest_of(sch, mm).mask) == "i_0 * 3 + i_1 < 5"


def copying(statement, extents=(3, 4)):
    """The block `B[i, j] = statement(A, i, j)`."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((3, 4), "float32"), B: T.Buffer(extents, "float32")):
        for i, j in T.grid(*extents):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = statement(A, vi, vj)

    sch = s_tir.Schedule(program)
    return sch.get(sch.get_sblock("b"))


SHIFTS = {
    "none": (lambda A, i, j: A[i, j], 0),
    "to the next": (lambda A, i, j: A[(i + 2) % 3, j], 1),
    "from the next": (lambda A, i, j: A[(i + 1) % 3, j], 2),
    "by a negative": (lambda A, i, j: A[(i - 1) % 3, j], 1),
    "by more than once around": (lambda A, i, j: A[(i + 7) % 3, j], 2),
    "mirrored": (lambda A, i, j: A[2 - i, j], None),
    "past the end": (lambda A, i, j: A[i + 1, j], None),
    "of another period": (lambda A, i, j: A[(i + 1) % 4, j], None),
    "both dimensions": (lambda A, i, j: A[(i + 1) % 3, (j + 1) % 4], None),
    "scaled": (lambda A, i, j: A[(i + 1) % 3, j] * T.float32(2), None),
    "constant": (lambda A, i, j: T.float32(2), None),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_shift_of(name):
    statement, expected = SHIFTS[name]
    assert shift_of(copying(statement)) == expected


def test_shift_of_another_number_of_stages():
    assert shift_of(copying(lambda A, i, j: A[(i + 1) % 3, j], (2, 4))) is None


SUMMED = {
    "sum": (lambda A, X, i, k: X[i] + A[i, k], True),
    "of a cast": (lambda A, X, i, k: X[i] + T.Cast("float32", T.Cast("float16", A[i, k])), False),
    "of a product": (lambda A, X, i, k: X[i] + A[i, k] * A[k, i], False),
    "doubled": (lambda A, X, i, k: X[i] + X[i], False),
    "maximum": (lambda A, X, i, k: T.max(X[i], A[i, k]), False),
}


@pytest.mark.parametrize("name", SUMMED)
def test_summed(name):
    statement, expected = SUMMED[name]
    load = summed(block_of(statement))
    assert (load is not None and load.source.name == "A") is expected


def covered(transform, extents=(6, 4)):
    """Whether the loops of a copy take it through all of its domain after `transform(sch, block)`."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer(extents, "float32"), B: T.Buffer(extents, "float32")):
        for i, j in T.grid(*extents):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj]

    sch = s_tir.Schedule(program)
    block = sch.get_sblock("b")
    transform(sch, block)
    return covers(_tvm.block_realize(sch, block), [sch.get(loop) for loop in sch.get_loops(block)])


WHOLE = {
    "as it is": lambda sch, block: None,
    "split": lambda sch, block: sch.split(sch.get_loops(block)[0], [3, None]),
    "split with a tail": lambda sch, block: sch.split(sch.get_loops(block)[0], [4, None]),
    "split twice": lambda sch, block: sch.split(sch.split(sch.get_loops(block)[0], [4, None])[1], [None, 3]),
    "both split": lambda sch, block: [sch.split(loop, [4, None]) for loop in sch.get_loops(block)],
    "fused": lambda sch, block: sch.fuse(*sch.get_loops(block)),
}


@pytest.mark.parametrize("extents", [(6, 4), (5, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_transformed_loops_cover_a_block(name, extents):
    """A mask that cuts only what is beyond an extent is none."""
    assert covered(WHOLE[name], extents)


PARTS = {
    "masked": ((6, 6), lambda i, j: i < 5, lambda i: i),
    "masked by both": ((6, 6), lambda i, j: i + j < 5, lambda i: i),
    "some of the rows": ((5, 6), lambda i, j: i < 6, lambda i: i),
    "every other row": ((3, 6), lambda i, j: i < 6, lambda i: i * 2),
    "from the second row": ((5, 6), lambda i, j: i < 6, lambda i: i + 1),
}


@pytest.mark.parametrize("name", PARTS)
def test_part_of_a_block(name):
    (rows, columns), mask, binding = PARTS[name]

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((6, 6), "float32"), B: T.Buffer((6, 6), "float32")):
        for i, j in T.grid(rows, columns):
            with T.sblock("b"):
                vi = T.axis.spatial(6, binding(i))
                vj = T.axis.spatial(6, j)
                T.where(mask(i, j))
                B[vi, vj] = A[vi, vj]

    sch = s_tir.Schedule(program)
    block = sch.get_sblock("b")
    loops = [sch.get(loop) for loop in sch.get_loops(block)]
    assert not covers(_tvm.block_realize(sch, block), loops)
