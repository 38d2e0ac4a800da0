"""Tiles and direct sums: the laws that define them by enumeration, and the recoveries of either factor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Iter, Layout, LayoutError

AXES = ["m", "tp", "laneid"]
strides = st.integers(-4, 6).filter(bool)
quick = settings(derandomize=True, max_examples=100, deadline=None)


@st.composite
def factors(draw, rank):
    """A layout that can be grouped by a shape, and the shape."""
    dims = draw(st.lists(st.lists(st.integers(1, 3), max_size=2), min_size=rank, max_size=rank))
    axes = st.sampled_from(AXES)
    shard = [Iter(extent, draw(strides), draw(axes)) for dim in dims for extent in dim]
    replica = draw(st.lists(st.builds(Iter, st.integers(1, 3), strides, axes), max_size=2))
    offset = draw(st.dictionaries(axes, st.integers(-4, 4), max_size=2))
    return Layout(shard, replica, offset), tuple(int(np.prod(dim, dtype=int)) for dim in dims)


@st.composite
def pairs(draw):
    rank = draw(st.integers(1, 2))
    return draw(factors(rank)), draw(factors(rank))


def combine(outer_points, inner_points, scale):
    axes = {axis for p in (*outer_points, *inner_points) for axis in p}
    return {
        frozenset((a, v) for a in axes if (v := p[a] * scale.get(a, 1) + q[a]))
        for p in outer_points
        for q in inner_points
    }


def check_product(product, outer, outer_shape, inner, inner_shape, scale):
    shape = [a * b for a, b in zip(outer_shape, inner_shape)]
    for o in np.ndindex(*outer_shape):
        for i in np.ndindex(*inner_shape):
            there = product.apply(*(a * n + b for a, n, b in zip(o, inner_shape, i)), shape=shape)
            expected = combine(outer.apply(*o, shape=outer_shape), inner.apply(*i, shape=inner_shape), scale)
            assert {frozenset(p.items()) for p in there} == expected


@quick
@given(pairs())
def test_tile_is_the_kronecker_product(case):
    (outer, outer_shape), (inner, inner_shape) = case
    tiled = inner.tile(outer, outer_shape, inner_shape)
    check_product(tiled, outer, outer_shape, inner, inner_shape, {axis: inner.span(axis) for axis in AXES})
    assert tiled == tiled.canonicalize()


@quick
@given(pairs())
def test_tiles_of_injective_layouts_never_meet_and_spans_multiply(case):
    (outer, outer_shape), (inner, inner_shape) = case
    tiled = inner.tile(outer, outer_shape, inner_shape)
    if outer.is_injective() and inner.is_injective():
        assert tiled.is_injective()
    assert all(tiled.span(axis) == outer.span(axis) * inner.span(axis) for axis in AXES)


@quick
@given(pairs())
def test_tile_to_is_tile_by_a_row_major_grid(case):
    (_, grid), (inner, inner_shape) = case
    strides = [int(np.prod(grid[d + 1 :], dtype=int)) for d in range(len(grid))]
    row_major = Layout([Iter(extent, stride, "m") for extent, stride in zip(grid, strides)])
    to_shape = [a * b for a, b in zip(grid, inner_shape)]
    assert inner.tile_to(to_shape, inner_shape) == inner.tile(row_major, grid, inner_shape)


@quick
@given(pairs())
def test_both_factors_of_a_tile_are_recovered(case):
    (outer, outer_shape), (inner, inner_shape) = case
    tiled = inner.tile(outer, outer_shape, inner_shape)
    shape = [a * b for a, b in zip(outer_shape, inner_shape)]
    found = inner.is_tile_inner(tiled, shape, inner_shape)
    assert found is not None and found.equivalent(outer)
    found = outer.is_tile_outer(tiled, shape, outer_shape)
    assert found is not None and found.equivalent(inner)


@quick
@given(pairs(), pairs())
def test_what_is_taken_for_a_tile_is_one(case, other):
    (outer, outer_shape), (inner, inner_shape) = case
    (stranger, _), _ = other
    shape = [a * b for a, b in zip(outer_shape, inner_shape)]
    tiled = inner.tile(outer, outer_shape, inner_shape)
    if stranger.admits(inner_shape):
        try:
            found = stranger.is_tile_inner(tiled, shape, inner_shape)
        except LayoutError:  # the stranger can't be grouped by the shape
            return
        assert found is None or stranger.tile(found, outer_shape, inner_shape).equivalent(tiled)
        if found is None and inner.equivalent(stranger):
            raise AssertionError("an equal inner layout was not recognised")


@quick
@given(pairs())
def test_direct_sum_adds_points(case):
    (left, left_shape), (right, right_shape) = case
    total = right.direct_sum(left, left_shape, right_shape)
    check_product(total, left, left_shape, right, right_shape, {})
    assert total == total.canonicalize()


@quick
@given(pairs())
def test_both_addends_of_a_direct_sum_are_recovered_unless_their_copies_meet(case):
    (left, left_shape), (right, right_shape) = case
    total = right.direct_sum(left, left_shape, right_shape)
    interleaved = [extent for pair in zip(left_shape, right_shape) for extent in pair]
    found_left = right.is_direct_sum_right(total, interleaved, right_shape)
    found_right = left.is_direct_sum_left(total, interleaved, left_shape)
    if len(total.apply(0)) == len(left.apply(0)) * len(right.apply(0)):
        assert found_left is not None and found_right is not None
    if found_left is not None:
        assert right.direct_sum(found_left, left_shape, right_shape).equivalent(total)
        assert found_left.canonicalize().D == left.canonicalize().D
    if found_right is not None:
        assert found_right.direct_sum(left, left_shape, right_shape).equivalent(total)
        assert found_right.canonicalize().D == right.canonicalize().D


def test_replicas_and_offsets_of_the_outer_layout_are_scaled_too():
    inner = Layout.parse("S[(8, 4) : (4@laneid, 1)] + 3@laneid + 1")
    outer = Layout.parse("S[2 : 1@warpid] + R[2 : 2@warpid]")
    assert (
        str(inner.tile(outer, (1, 2), (8, 4)))
        == "S[(8, 2, 4) : (4@laneid, 1@warpid, 1)] + R[2 : 2@warpid] + 3@laneid + 1"
    )
    outer = Layout.parse("S[2 : 1@laneid] + R[3 : 2@laneid] + 5 + 1@laneid")
    assert str(inner.tile(outer, (1, 2), (8, 4))) == (
        "S[(8, 2, 4) : (4@laneid, 29@laneid, 1)] + R[3 : 58@laneid] + 32@laneid + 21"
    )


def test_no_factor_is_found_where_there_is_none():
    tiled = Layout.parse("S[(2, 4, 2, 8) : (64, 8, 32, 1)]")
    assert Layout.parse("S[(4, 8) : (16, 1)]").is_tile_inner(tiled, (8, 16), (4, 8)) is None
    assert Layout.parse("S[(2, 2) : (1, 2)]").is_tile_outer(tiled, (8, 16), (2, 2)) is None
    assert Layout.parse("S[(4, 8) : (16, 1)]").is_direct_sum_right(tiled, (2, 4, 2, 8), (4, 8)) is None
    assert Layout.parse("S[(2, 2) : (2, 1)]").is_direct_sum_left(tiled, (2, 4, 2, 8), (2, 2)) is None
    copied = Layout.parse("S[(4, 8) : (8, 1)] + R[2 : 1@dp]")
    assert copied.is_tile_inner(tiled, (8, 16), (4, 8)) is None
    assert copied.is_direct_sum_right(tiled, (2, 4, 2, 8), (4, 8)) is None
    assert copied.is_tile_inner(Layout.parse("S[7 : 1]"), (4, 8), (4, 8)) is None


INNER, OUTER = Layout.parse("S[(4, 8) : (8, 1)]"), Layout.parse("S[(2, 2) : (2, 1)]")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: INNER.tile(OUTER, (4,), (4, 8)),
            r"outer_shape and inner_shape must have as many dimensions: \(4,\) has 1, and \(4, 8\) has 2",
        ),
        (lambda: INNER.tile(OUTER, (2, 2), (8, 8)), r"can not be grouped by \(8, 8\)"),
        (lambda: INNER.tile(Layout.parse("S[4 : 1152921504606846976]"), (2, 2), (4, 8)), "must fit in 64 bits"),
        (
            lambda: INNER.tile_to((8, 12), (4, 8)),
            r"current_shape must divide to_shape in every dimension, and 8 does not divide 12 in dimension 1",
        ),
        (lambda: INNER.is_tile_inner(OUTER, (8, 12), (4, 8)), "inner_shape must divide tiled_shape"),
        (lambda: INNER.is_tile_outer(OUTER, (8, 12), (4, 8)), "outer_shape must divide tiled_shape"),
        (lambda: INNER.is_tile_inner(OUTER, (8, 16), (4, 16)), r"can not be grouped by \(4, 16\)"),
        (lambda: INNER.direct_sum(OUTER, (2,), (4, 8)), "left_shape and right_shape must have as many dimensions"),
        (
            lambda: INNER.is_direct_sum_right(OUTER, (2, 4, 2, 4), (4, 8)),
            r"interleaved_shape must have right_shape = \(4, 8\) in its odd dimensions, counted from 0",
        ),
        (lambda: OUTER.is_direct_sum_left(INNER, (2, 4), (2, 2)), r"left_shape = \(2, 2\) in its even dimensions"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call()
