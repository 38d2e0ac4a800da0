"""Blocks as they stand in a function: which there are, and whether their iterators stay in their domains."""

import pytest
from tvm import ir, s_tir, tirx
from tvm.script import tirx as T

from tvm_axe.analysis.blocks import all_blocks, covers, nested_blocks, ranges_of, statements, stays_in


def loops(*extents: int) -> list[tirx.For]:
    return [tirx.For(tirx.Var(f"i{n}", "int32"), 0, extent, 0, tirx.Evaluate(0)) for n, extent in enumerate(extents)]


TRUE = tirx.IntImm("bool", 1)


@pytest.mark.parametrize(
    ("extents", "value", "condition", "extent", "expected"),
    [
        ((8,), lambda i: i, None, 8, True),
        ((9,), lambda i: i, None, 8, False),
        ((9,), lambda i: i, lambda i: i < 8, 8, True),
        ((3, 3), lambda i, j: i * 3 + j, None, 8, False),
        ((3, 3), lambda i, j: i * 3 + j, lambda i, j: i * 3 + j < 8, 8, True),
        ((3, 3), lambda i, j: i * 3 + j, lambda i, j: i * 3 + j < 9, 8, False),
        ((8,), lambda i: i ^ 5, None, 8, True),
        ((8,), lambda i: i ^ 9, None, 8, False),
        ((8,), lambda i: i - 1, None, 8, False),
        ((8,), lambda i: i - 1, lambda i: i >= 1, 8, True),
        ((5,), lambda i: i * i, lambda i: i * i < 10, 10, True),
    ],
)
def test_stays_in(extents, value, condition, extent, expected):
    nest = loops(*extents)
    variables = [loop.loop_var for loop in nest]
    holds = TRUE if condition is None else condition(*variables)
    assert stays_in(value(*variables), ir.Range(0, extent), ranges_of(nest), holds) is expected


@T.prim_func(s_tir=True)
def two(A: T.Buffer((8, 6), "float32"), B: T.Buffer((8, 6), "float32")):
    C = T.sblock_alloc_buffer((8, 6))
    for i in range(8):
        for j in range(6):
            with T.sblock("c"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj]
        for j in range(6):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = C[vi, vj]


def test_nested_blocks():
    found = nested_blocks(two.body.block.body)
    assert [block.block.name_hint for block in found] == ["c", "b"]
    assert [[loop.loop_var.name for loop in block.loops] for block in found] == [["i", "j"], ["i", "j"]]
    assert found[0].loops[0].same_as(found[1].loops[0]) and not found[0].loops[1].same_as(found[1].loops[1])
    assert [block.name_hint for block in all_blocks(two)] == ["c", "b", "root"]
    assert len(statements(two.body.block.body)) == 1


@pytest.mark.parametrize(("factors", "expected"), [([2, 4], True), ([3, 3], True), (None, True)])
def test_covers(factors, expected):
    """Also behind a split that doesn't divide: its mask cuts only what is beyond; of some of the loops not."""
    sch = s_tir.Schedule(two)
    if factors:
        sch.split(sch.get_loops("c")[0], factors)
    first = nested_blocks(sch.mod["main"].body.block.body)[0]
    assert covers(first.realize, first.loops) is expected
    assert not covers(first.realize, first.loops[1:])
