"""Composition and inverses: the laws by enumeration, and against islpy."""

import math

import islpy as isl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Iter, Layout, LayoutError

quick = settings(derandomize=True, max_examples=250, deadline=None)
small = st.integers(1, 4)


def strides(draw):
    return draw(st.integers(-6, 8).filter(bool))


@st.composite
def outers(draw):
    axes = st.sampled_from(["m", "tp", "laneid"])
    shard = [
        Iter(draw(st.sampled_from([1, 2, 3, 4, 6])), strides(draw), draw(axes)) for _ in range(draw(st.integers(1, 3)))
    ]
    replica = draw(st.lists(st.builds(Iter, small, st.just(1), st.just("dp")), max_size=1))
    return Layout(shard, replica, draw(st.dictionaries(axes, st.integers(-4, 4), max_size=1)))


@st.composite
def compositions(draw):
    """A layout, and one whose addresses are its elements."""
    outer = draw(outers())
    shard, room = [], outer.size()
    for _ in range(draw(st.integers(0, 3))):
        if room < 2:
            break
        stride = draw(st.sampled_from([d for d in range(1, room) if outer.size() % d == 0 or d < 3]))
        extent = draw(st.integers(1, (room - 1) // stride + 1))
        room -= stride * (extent - 1)
        shard.append(Iter(extent, draw(st.sampled_from([stride, stride, -stride])), "m"))
    shard = draw(st.permutations(shard))
    copies = draw(st.integers(0, 1)) if shard else 0
    low = sum((it.extent - 1) * it.stride for it in shard if it.stride < 0)
    offset = {"m": draw(st.integers(0, room - 1)) - low, "tp": draw(st.integers(-2, 2))}
    device = [Iter(draw(small), 1, "tp")] if draw(st.booleans()) else []
    return outer, Layout(device + shard[copies:], shard[:copies], offset)


def moved(points, by):
    """The points moved by what another point has on other axes than m."""
    return {frozenset((a, v) for a in {*p, *by} if (v := p[a] + (by[a] if a != "m" else 0))) for p in points}


@quick
@given(compositions())
def test_composition_is_one_after_the_other(case):
    outer, inner = case
    try:
        composed = outer.compose(inner)
    except LayoutError:
        return
    assert composed.size() == inner.size()
    for x in range(inner.size()):
        expected = set().union(*(moved(outer.apply(y["m"]), y) for y in inner.apply(x)))
        assert {frozenset(p.items()) for p in composed.apply(x)} == expected


def test_most_generated_compositions_are_layouts():
    count = {True: 0, False: 0}

    @settings(derandomize=True, max_examples=200, deadline=None, database=None)
    @given(compositions())
    def run(case):
        outer, inner = case
        try:
            outer.compose(inner)
            count[True] += 1
        except LayoutError as error:
            assert "is no layout" in str(error)
            count[False] += 1

    run()
    assert count[True] > count[False] > 0


def affine(layout):
    """The map of a layout on m without replicas, as islpy sees it: an expression with floors of the element."""
    terms, weight = [str(layout.O["m"])], 1
    for it in reversed(layout.D):
        terms.append(f"{it.stride}*(floor(x/{weight}) mod {it.extent})")
        weight *= it.extent
    return isl.Map(f"{{ [x] -> [{' + '.join(terms)}] : 0 <= x < {layout.size()} }}")


@st.composite
def bijections(draw):
    """A layout onto 0, 1, ..., n - 1: digits in any order, some counted downwards."""
    extents = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(extents))))
    shard, offset = [], 0
    for k, extent in enumerate(extents):
        stride = math.prod(extents[j] for j in range(len(extents)) if order[j] < order[k])
        down = draw(st.booleans())
        offset += (extent - 1) * stride if down else 0
        shard.append(Iter(extent, -stride if down else stride, "m"))
    return Layout(shard, (), {"m": offset})


@settings(derandomize=True, max_examples=60, deadline=None)
@given(bijections(), st.data())
def test_inverse_and_composition_agree_with_islpy(layout, data):
    assert affine(layout.inverse()).is_equal(affine(layout).reverse())
    other = Layout([Iter(layout.size(), 1, "m")]) if data.draw(st.booleans()) else layout.inverse()
    composed = layout.compose(other)
    assert affine(composed).is_equal(affine(other).apply_range(affine(layout)))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(bijections())
def test_a_bijection_and_its_inverse_are_the_identity(layout):
    identity = Layout([Iter(layout.size(), 1, "m")])
    assert layout.inverse().compose(layout).equivalent(identity)
    assert layout.compose(layout.inverse()).equivalent(identity)
    assert layout.inverse().inverse().equivalent(layout)


@st.composite
def nested(draw):
    """An injective layout over several axes whose iters nest, with gaps, offsets and negative strides."""
    filled = dict.fromkeys(["m", "tp", "laneid"], 1)
    shard = []
    for axis in draw(st.lists(st.sampled_from(list(filled)), max_size=4)):
        stride, extent = filled[axis] * draw(st.integers(1, 3)), draw(st.integers(1, 3))
        filled[axis] = stride * extent if extent > 1 else filled[axis]
        shard.append(Iter(extent, draw(st.sampled_from([stride, -stride])), axis))
    offset = draw(st.dictionaries(st.sampled_from(list(filled)), st.integers(-4, 4), max_size=2))
    box = {axis: filled[axis] * draw(st.integers(1, 2)) for axis in draw(st.permutations(list(filled)))}
    return Layout(draw(st.permutations(shard)), (), offset), box


@quick
@given(nested())
def test_inverse_gives_the_element_at_each_place(case):
    layout, box = case
    inverse = layout.inverse(box)
    assert inverse.size() == math.prod(box.values())
    there = {}
    for place in np.ndindex(*box.values()):
        (point,) = inverse.apply(*place, shape=tuple(box.values()))
        assert set(point) <= {"m"}
        there[place] = point["m"]
    lows = [layout.bounds(axis)[0] for axis in box]
    held = {}
    for x in range(layout.size()):
        (point,) = layout.apply(x)
        held[tuple(point[axis] - low for axis, low in zip(box, lows))] = x
    assert all(there[place] == x for place, x in held.items())
    assert all(x >= layout.size() for place, x in there.items() if place not in held)


def test_the_default_box_has_the_axes_in_the_order_of_the_shard():
    layout = Layout.parse("S[(2, 4, 3) : (1@tp, 2, 1@laneid)] + 5@tp")
    assert layout.inverse() == layout.inverse({"tp": 2, "m": 8, "laneid": 3})


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("S[(4, 2) : (1, 1)]", {"m": 4}),
        ("S[(3, 4, 2) : (1, 2, 1)]", {"m": 8}),
        ("S[(2, 4, 2, 3) : (4, -1, 8, 1)] + 3", {"m": 16}),
        ("S[(2, 4, 6, 3) : (1@tp, 1, 1, 1@tp)]", {"tp": 2, "m": 6}),
        ("S[(2, 4, 6, 3) : (1@tp, 1, 1, 1@tp)]", {"m": 3, "tp": 3}),
    ],
)
def test_a_section_gives_one_of_the_elements_at_each_place(text, box):
    layout = Layout.parse(text)
    inverse = layout.inverse(box)
    assert not layout.is_injective() and inverse.size() == math.prod(box.values())
    for place in np.ndindex(*box.values()):
        (found,) = inverse.apply(*place, shape=tuple(box.values()))
        (point,) = layout.apply(found["m"])
        assert [point[axis] - layout.bounds(axis)[0] for axis in box] == list(place)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.inverse({"m": 8}), r"box must have every axis that .* moves along, and tp is missing"),
        (lambda x: x.inverse({"m": 12, "tp": 4}), r"box\['m'\] must be a multiple of 8, .* not 12"),
        (lambda x: x.inverse("m"), "box must be a mapping from axis to size"),
        (
            lambda x: x.broadcast(2, "dp").inverse(),
            "has replicas, and the element at several places would need a stride",
        ),
        (
            lambda x: Layout.parse("S[(4, 4) : (1, 1)]").inverse(),
            "its inverse is a section, which needs a box to cover",
        ),
        (
            lambda x: Layout.parse("S[(4, 4) : (1, 1)]").inverse({"m": 5}),
            "no iters of D by themselves cover 5 positions",
        ),
        (lambda x: Layout.parse("S[(2, 2) : (2, 3)]").inverse(), "there is none over whose run all others step"),
        (
            lambda x: x.compose(Layout.parse("S[4 : 11]")),
            r"inner must have its addresses in \[0, 32\), .* in \[0, 34\)",
        ),
        (lambda x: x.compose(Layout.parse("S[4 : 1] + -1")), r"in \[-1, 3\)"),
        (lambda x: x.compose(Layout.parse("S[4 : 3]")), "iter 4 : 3 of inner can't be cut into its digits"),
        (lambda x: x.compose(Layout.parse("S[(2, 4) : (2, 2)]")), "digit 8 : 1 of the first carries"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call(Layout.parse("S[(4, 8) : (1@tp, 1)]"))
