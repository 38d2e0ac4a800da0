"""Slicing: the part's elements stay where they were, and a part is refused only if it has no layout at all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Coordinate, Iter, Layout, LayoutError

AXES = ["m", "tp"]
iters = st.builds(Iter, st.integers(1, 5), st.integers(-6, 8).filter(bool), st.sampled_from(AXES))
quick = settings(derandomize=True, max_examples=250, deadline=None)


@st.composite
def cases(draw, rank):
    """A layout that can be grouped by a shape, the shape, and a region of it."""
    dims = draw(st.lists(st.lists(iters, max_size=3), min_size=1, max_size=rank))
    replica = draw(st.lists(st.builds(Iter, st.integers(1, 2), st.just(7), st.just("dp")), max_size=1))
    offset = draw(st.dictionaries(st.sampled_from(AXES), st.integers(-4, 4), max_size=2))
    shape = tuple(int(np.prod([it.extent for it in dim], dtype=int)) for dim in dims)
    region = []
    for extent in shape:
        begin = draw(st.integers(0, extent - 1))
        region.append((begin, draw(st.integers(begin + 1, extent))))
    return Layout([it for dim in dims for it in dim], replica, offset), shape, region


def has_layout(points):
    """Whether a list of points, in order, is one that iters reach: D read off from the innermost run outwards.

    The innermost iter of a canonical D is the longest run that the points start with, and the others take its steps.
    """
    table = np.array([[p[axis] for axis in AXES] for p in points])
    while len(table) > 1:
        step = table[1] - table[0]
        if np.count_nonzero(step) != 1:
            return False
        run = 1
        while run < len(table) and (table[run] - table[0] == run * step).all():
            run += 1
        if len(table) % run:
            return False
        rows = table.reshape(-1, run, len(AXES))
        if (rows - rows[:, :1] != np.arange(run)[:, None] * step).any():
            return False
        table = rows[:, 0]
    return True


@quick
@given(cases(rank=2))
def test_a_slice_leaves_every_element_where_it_was(case):
    layout, shape, region = case
    try:
        part = layout.slice(shape, region)
    except LayoutError:
        return
    extents = [end - begin for begin, end in region]
    for index in np.ndindex(*extents):
        whole = [begin + i for (begin, _), i in zip(region, index)]
        assert part.apply(*index, shape=extents) == layout.apply(*whole, shape=shape)


@st.composite
def parts_without_coincidences(draw):
    """A layout whose strides are too far apart for one to continue another by chance, and a part of its elements."""
    apart = draw(st.permutations([1, 17, 301, 5003]))
    signs = st.sampled_from([1, -1])
    shard = [
        Iter(draw(st.integers(1, 5)), draw(signs) * stride, draw(st.sampled_from(AXES)))
        for stride in apart[: draw(st.integers(1, 3))]
    ]
    layout = Layout(shard)
    begin = draw(st.integers(0, layout.size() - 1))
    return layout, begin, draw(st.integers(begin + 1, layout.size()))


@settings(derandomize=True, max_examples=400, deadline=None)
@given(parts_without_coincidences())
def test_a_slice_is_refused_only_if_no_layout_has_its_map(case):
    layout, begin, end = case
    points = [next(iter(layout.apply(x))) for x in range(begin, end)]
    if has_layout(points):
        part = layout.slice((layout.size(),), [(begin, end)])
        assert [next(iter(part.apply(x))) for x in range(part.size())] == points
    else:
        with pytest.raises(LayoutError, match="has no layout"):
            layout.slice((layout.size(),), [(begin, end)])


def test_the_oracle_knows_what_has_a_layout():
    assert has_layout([Coordinate({"m": v}) for v in (3, 5, 0, 2)])
    assert not has_layout([Coordinate({"m": v}) for v in (0, 1, 2, 4)])
    assert not has_layout([Coordinate({"m": v, "tp": v}) for v in range(2)])


@pytest.mark.parametrize(
    ("text", "region", "expected"),
    [
        ("S[(4, 8) : (16, 1)]", (8, 24), "S[(2, 8) : (16, 1)] + 16"),  # whole iters are kept
        ("S[(4, 8) : (16, 1)]", (9, 12), "S[3 : 1] + 17"),  # no wrap: a run of one iter
        ("S[(4, 8) : (16, 1)]", (6, 10), "S[(2, 2) : (10, 1)] + 6"),  # one wrap, in the middle
        ("S[(2, 2, 8) : (64, 16, 1)]", (12, 20), "S[(2, 4) : (44, 1)] + 20"),  # the wrap carries
        ("S[(8, 2) : (5, 1)]", (3, 11), "S[(4, 2) : (5, 4)] + 6"),  # rows that are off by half an iter
        ("S[(2, 2, 4) : (5, 1, 1)]", (6, 9), "S[3 : 1] + 3"),  # the wrap goes on as the run did
        ("S[(4, 8) : (1@tp, 1)]", (8, 16), "S[8 : 1] + 1@tp"),
    ],
)
def test_slices_by_hand(text, region, expected):
    layout = Layout.parse(text)
    assert str(layout.slice((layout.size(),), [region])) == expected


def test_a_wrap_carries_beyond_the_next_digit():
    # From 14 the last digit wraps at 16, and the digit before it, at its last, wraps with it.
    layout = Layout.parse("S[(2, 4, 4) : (100, 7, 1)]")
    part = layout.slice((32,), [(14, 18)])
    assert [p["m"] for x in range(4) for p in part.apply(x)] == [23, 24, 100, 101]


@pytest.mark.parametrize(
    ("shape", "region", "message"),
    [
        ((4, 8), [(0, 4)], r"region must have a pair \(begin, end\) for each dimension of \(4, 8\)"),
        ((4, 8), [(0, 4), 3], r"region\[1\] must be a pair \(begin, end\), not 3"),
        ((4, 8), [(0, 4), (3, 3)], r"region\[1\] must have 0 <= begin < end <= 8, .* not \(3, 3\)"),
        ((4, 8), [(-1, 4), (3, 4)], r"region\[0\] must have 0 <= begin < end <= 4, .* not \(-1, 4\)"),
        ((4, 8), [(0, 5), (3, 4)], r"region\[0\] must have 0 <= begin < end <= 4"),
        ((4, 9), [(0, 4), (3, 4)], r"can not be grouped by \(4, 9\)"),
        ((32,), [(5, 12)], r"region \[5, 12\) .* has no layout: it wraps around 8 : 1 after 3 of 7"),
        ((32,), [(6, 10)], r"has no layout: where it wraps around 8 : 1 it moves by no single stride on one axis"),
    ],
)
def test_what_is_refused(shape, region, message):
    with pytest.raises(LayoutError, match=message):
        Layout.parse("S[(4, 8) : (1@tp, 1)]").slice(shape, region)
