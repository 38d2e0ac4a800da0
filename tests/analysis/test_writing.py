"""What has been written of a buffer when a block reads it."""

import pytest
from tvm.script import tirx as T

from tvm_axe.analysis.blocks import nested_blocks
from tvm_axe.analysis.writing import first_unwritten


def of(func):
    """What is found in a function: the block, the buffer, and the element; None if nothing."""
    found = first_unwritten(nested_blocks(func.body.block.body), list(func.params))
    return found and (str(found.reader.block.name_hint), str(found.buffer.name), found.part)


def padded(first: int, extent: int, guarded: bool = False):
    """Y = A[first:first + extent], through a copy B of A, of which only the elements 2 to 5 are written."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4,), "float32"), Y: T.Buffer((extent,), "float32")):
        A, B = T.sblock_alloc_buffer((8,)), T.sblock_alloc_buffer((8,))
        for i in range(4):
            with T.sblock("a"):
                v = T.axis.spatial(4, i)
                A[v + 2] = X[v]
        for i in range(8):
            with T.sblock("b"):
                v = T.axis.spatial(8, i)
                B[v] = A[v]
        for i in range(extent):
            with T.sblock("y"):
                v = T.axis.spatial(extent, i)
                Y[v] = T.if_then_else(v + first < 6, B[v + first], T.float32(0)) if guarded else B[v + first]

    return func


@pytest.mark.parametrize(
    ("first", "extent", "expected"),
    [(2, 4, None), (3, 2, None), (1, 4, ("y", "B", (1,))), (2, 5, ("y", "B", (6,))), (0, 8, ("y", "B", (0,)))],
)
def test_a_part_through_a_copy(first, extent, expected):
    assert of(padded(first, extent)) == expected


def test_on_a_condition():
    assert of(padded(2, 5, guarded=True)) is None


@pytest.mark.parametrize("more", [False, True])
def test_two_blocks_together(more):
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((6,), "float32"), Y: T.Buffer((6,), "float32")):
        A = T.sblock_alloc_buffer((6,))
        for i in range(3):
            with T.sblock("even"):
                v = T.axis.spatial(3, i)
                A[v * 2] = X[v * 2]
        for i, j in T.grid(2, 2):
            with T.sblock("odd"):
                v = T.axis.spatial(3, i * 2 + j)
                T.where(i * 2 + j < (3 if more else 2))
                A[v * 2 + 1] = X[v * 2 + 1]
        for i in range(6):
            with T.sblock("y"):
                v = T.axis.spatial(6, i)
                Y[v] = A[v]

    assert of(func) == (None if more else ("y", "A", (5,)))


def test_a_sum_over_what_nobody_wrote():
    @T.prim_func(s_tir=True)
    def func(Y: T.Buffer((3,), "float32")):
        A = T.sblock_alloc_buffer((3, 4))
        for i, j in T.grid(3, 4):
            with T.sblock("y"):
                v, k = T.axis.remap("SR", [i, j])
                with T.init():
                    Y[v] = T.float32(0)
                Y[v] = Y[v] + A[v, k]

    assert of(func) == ("y", "A", ())


# ---- What a loop carries from step to step ---------------------------------------------------------------------------


def steps(first: int, reads_before: bool = False):
    """State of four steps: the first is written, or none; a block makes a step of the one before, or of itself."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((3,), "float32"), Y: T.Buffer((3,), "float32")):
        U, V = T.sblock_alloc_buffer((5, 3)), T.sblock_alloc_buffer((4, 3))
        for i in range(3):
            with T.sblock("first"):
                v = T.axis.spatial(3, i)
                U[first, v] = X[v]
        for t in range(4):
            for i in range(3):
                with T.sblock("step"):
                    s, v = T.axis.remap("SS", [t, i])
                    V[s, v] = U[s + 1 if reads_before else s, 2 - v] * T.float32(2)
            for i in range(3):
                with T.sblock("next"):
                    s, v = T.axis.remap("SS", [t, i])
                    U[s + 1, v] = V[s, v]
        for i in range(3):
            with T.sblock("y"):
                v = T.axis.spatial(3, i)
                Y[v] = U[4, v]

    return func


@pytest.mark.parametrize(
    ("first", "reads_before", "expected"),
    [(0, False, None), (1, False, ("step", "U", (0, 0))), (1, True, ("step", "U", (2, 0)))],
    ids=["carried", "the first step missing", "read before it is written"],
)
def test_what_steps_carry(first, reads_before, expected):
    assert of(steps(first, reads_before)) == expected


@pytest.mark.parametrize(("extent", "expected"), [(4, None), (5, ("y", "B", (1, 2)))])
def test_a_part_through_a_move(extent, expected):
    """Of B, whose rows are halves of A, what A had; A[6:] was never written."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((6,), "float32"), Y: T.Buffer((extent,), "float32")):
        A, B = T.sblock_alloc_buffer((8,)), T.sblock_alloc_buffer((2, 4))
        for i in range(6):
            with T.sblock("a"):
                v = T.axis.spatial(6, i)
                A[v] = X[v]
        for i, j in T.grid(2, 4):
            with T.sblock("b"):
                v, w = T.axis.remap("SS", [i, j])
                B[v, w] = A[v * 4 + w]
        for i in range(extent):
            with T.sblock("y"):
                v = T.axis.spatial(extent, i)
                Y[v] = B[(v + 2) // 4, (v + 2) % 4]

    assert of(func) == expected
