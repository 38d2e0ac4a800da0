"""Grouping and permuting: the map stays, each dimension has its own iters, and what can't be cut is refused."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Iter, Layout, LayoutError

strides = st.integers(-6, 8).filter(bool)
iters = st.builds(Iter, st.integers(1, 6), strides, st.sampled_from(["m", "tp", "laneid"]))
replicas = st.lists(st.builds(Iter, st.integers(1, 3), strides, st.sampled_from(["m", "dp"])), max_size=2)
offsets = st.dictionaries(st.sampled_from(["m", "warpid"]), st.integers(-5, 5), max_size=2)
layouts = st.builds(Layout, st.lists(iters, max_size=4), replicas, offsets)
quick = settings(derandomize=True, max_examples=150, deadline=None)


def whole_map(layout):
    return [layout.apply(x) for x in range(layout.size())]


@st.composite
def shapes_of(draw, size):
    """Any shape of a size, with units here and there."""
    shape = []
    while size > 1:
        extent = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        shape.append(extent)
        size //= extent
    return tuple(shape + [1] * draw(st.integers(0, 1)))


def cuts_evenly(extents, boundary):
    """Whether the product of the innermost dimensions falls on, or evenly into, one of the extents."""
    inner = 1
    for extent in reversed(extents):
        if boundary % inner == 0 and inner * extent % boundary == 0:
            return True
        inner *= extent
    return boundary == inner


def groups(layout, seps):
    return [math.prod(it.extent for it in layout.D[a:b]) for a, b in itertools.pairwise(seps)]


@quick
@given(layouts, st.data())
def test_group_keeps_the_map_and_gives_each_dimension_its_iters(layout, data):
    shape = data.draw(shapes_of(layout.size()))
    extents = [it.extent for it in layout.D]
    if all(cuts_evenly(extents, math.prod(shape[d:])) for d in range(1, len(shape))):
        grouped, seps = layout.group(shape)
        assert whole_map(grouped) == whole_map(layout)
        assert seps[0] == 0 and seps[-1] == len(grouped.D) and groups(grouped, seps) == list(shape)
        assert all(stop > start for start, stop in itertools.pairwise(seps))
        assert grouped.group(shape) == (grouped, seps)
    else:
        with pytest.raises(LayoutError, match=r"can not be grouped by .* falls inside"):
            layout.group(shape)


@quick
@given(layouts, st.data())
def test_group_many_is_grouped_by_each_shape(layout, data):
    shapes = [shape for shape in data.draw(st.lists(shapes_of(layout.size()), min_size=1, max_size=3)) if shape]
    if not shapes:
        return
    sequences = [*shapes, tuple(it.extent for it in layout.D)]
    products = sorted({math.prod(s[:k]) for s in sequences for k in range(len(s) + 1)})
    if any(after % before for before, after in itertools.pairwise(products)):
        with pytest.raises(LayoutError, match=r"of the products before two boundaries, neither"):
            layout.group_many(shapes)
        return
    grouped, all_seps = layout.group_many(shapes)
    assert whole_map(grouped) == whole_map(layout)
    assert len(all_seps) == len(shapes)
    for shape, seps in zip(shapes, all_seps):
        assert seps[0] == 0 and seps[-1] == len(grouped.D) and groups(grouped, seps) == list(shape)


@quick
@given(layouts, st.data())
def test_permute_is_the_layout_of_the_transposed_tensor(layout, data):
    grouped, seps = layout.group([it.extent for it in layout.D])
    shape = [it.extent for it in grouped.D]
    order = data.draw(st.permutations(range(len(shape))))
    permuted = layout.permute(shape, order)
    for index in np.ndindex(*shape):
        there = permuted.apply(*(index[d] for d in order), shape=[shape[d] for d in order])
        assert there == layout.apply(*index, shape=shape)
    assert permuted == grouped.permute_dims(order) == grouped.permute_by_groups(seps, order)


def test_permute_by_groups_keeps_the_order_within_a_group():
    grouped, seps = Layout.parse("S[(2, 3, 5, 7) : (1, 2, 3, 4)]").group((2, 15, 7))
    assert str(grouped.permute_by_groups(seps, (2, 1, 0))) == "S[(7, 3, 5, 2) : (4, 2, 3, 1)]"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.group((3, 8)), r"can not be grouped by \(3, 8\): it places 32 elements, and the shape has 24"),
        (lambda x: x.group((16, 0)), r"shape\[1\] must be at least 1, not 0"),
        (lambda x: x.group(32), "shape must be a sequence of ints"),
        (lambda x: x.group_many([]), "shapes must be a sequence of at least one shape"),
        (lambda x: x.group_many([(32,), ()]), r"places 32 elements, and shapes\[1\] = \(\) has no dimension"),
        (lambda x: x.group_many([(32,), (3,)]), r"places 32 elements, and shapes\[1\] = \(3,\) has 3"),
        (lambda x: x.permute_dims((0, 0)), r"perm must name every iter of D once, from 0 to 1, not \(0, 0\)"),
        (lambda x: x.permute((4, 8), (0,)), r"perm must name every group once, from 0 to 1, not \(0,\)"),
        (lambda x: x.permute_by_groups([0, 1], (0,)), "seps must ascend from 0 to the 2 iters of D"),
        (lambda x: x.permute_by_groups([0, 2, 1, 2], (0,)), "seps must ascend from 0 to the 2 iters of D"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call(Layout.parse("S[(4, 8) : (1@tp, 1)]"))
