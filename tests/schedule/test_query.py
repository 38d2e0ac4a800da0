"""The questions that the rules ask: which blocks are plain sums and copies, and what comes first."""

import pytest
from tvm import s_tir
from tvm.script import tirx as T

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
    assert query.is_sum(block_of(statement, init)) is expected


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
    assert query.is_copy(sch.get(sch.get_sblock("b"))) is expected


def test_reduction_is_no_copy():
    assert not query.is_copy(block_of(lambda A, X, i, k: X[i] + A[i, k]))


def test_precedes_and_among(schedule):
    sch = schedule()
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    assert query.precedes(sch, mm, epi) and not query.precedes(sch, epi, mm)
    assert query.among(sch, sch.get_sblock("epi"), [mm, epi]) and not query.among(sch, epi, [mm])


def test_predicate(schedule):
    sch = schedule(5, 3, 8)
    mm = sch.get_sblock("mm")
    assert query.predicate(sch, mm) is None
    sch.split(sch.get_loops(mm)[0], [2, None])
    assert str(query.predicate(sch, mm)) == "i_0 * 3 + i_1 < 5"
