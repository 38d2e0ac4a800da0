"""Bounds, spans, collisions, covering and equality of maps: against enumeration, and against islpy."""

import itertools
import math

import islpy as isl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Iter, Layout, LayoutError

strides = st.integers(-6, 9).filter(bool)
axes = st.sampled_from(["m", "tp"])
iters = st.builds(Iter, st.integers(1, 5), strides, axes)
replicas = st.lists(st.builds(Iter, st.integers(1, 4), strides, axes), max_size=2)
offsets = st.dictionaries(axes, st.integers(-5, 5), max_size=2)
layouts = st.builds(Layout, st.lists(iters, max_size=3), replicas, offsets)
quick = settings(derandomize=True, max_examples=250, deadline=None)


def whole_map(layout):
    return [layout.apply(x) for x in range(layout.size())]


def isl_map(layout):
    """The layout as islpy's relation from the element to its points on m and tp."""
    digits = [f"d{k}" for k in range(len(layout.D))]
    copies = [f"r{k}" for k in range(len(layout.R))]
    weights = [math.prod(it.extent for it in layout.D[k + 1 :]) for k in range(len(layout.D))]
    ranges = [f"0 <= {v} < {it.extent}" for v, it in zip(digits + copies, layout.D + layout.R)]
    x = " + ".join(["0", *(f"{w}*{v}" for w, v in zip(weights, digits))])
    places = []
    for axis in ("m", "tp"):
        terms = [f"{it.stride}*{v}" for v, it in zip(digits + copies, layout.D + layout.R) if it.axis == axis]
        places.append(" + ".join([str(layout.O[axis]), *terms]))
    bound = ", ".join(digits + copies)
    exists = f"exists {bound} : " if bound else ""
    where = " and ".join([f"x = {x}", f"m = {places[0]}", f"tp = {places[1]}", *ranges])
    return isl.Map(f"{{ [x] -> [m, tp] : {exists}{where} }}")


@quick
@given(layouts)
def test_bounds_and_span_are_the_extremes_of_all_points(layout):
    reached = [p for points in whole_map(layout) for p in points]
    for axis in ("m", "tp", "laneid"):
        low, high = min(p[axis] for p in reached), max(p[axis] for p in reached)
        assert layout.bounds(axis) == (low, high) and layout.span(axis) == high - low + 1


@quick
@given(layouts)
def test_is_injective_iff_no_two_elements_share_a_point(layout):
    table = whole_map(layout)
    assert layout.is_injective() == all(a.isdisjoint(b) for a, b in itertools.combinations(table, 2))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(layouts)
def test_is_injective_agrees_with_islpy(layout):
    assert layout.is_injective() == bool(isl_map(layout).is_injective())


@quick
@given(layouts, st.integers(1, 12), st.integers(1, 6))
def test_covers_iff_every_point_of_the_box_is_reached(layout, wide, deep):
    reached = {(p["m"], p["tp"]) for points in whole_map(layout) for p in points}
    assert layout.covers({"m": wide, "tp": deep}) == (reached >= set(itertools.product(range(wide), range(deep))))
    assert layout.covers({"m": wide}) == (reached >= {(m, 0) for m in range(wide)})


@quick
@given(layouts, layouts, st.randoms(use_true_random=False))
def test_equivalent_iff_the_maps_are_equal(layout, other, random):
    assert layout.equivalent(layout.canonicalize()) and layout.canonicalize().equivalent(layout)
    same = Layout(layout.group([it.extent for it in layout.D])[0].D, layout.R, layout.O)
    assert layout.equivalent(same)
    assert layout.equivalent(other) == (whole_map(layout) == whole_map(other))
    copies = Layout(layout.D, random.sample(layout.R, len(layout.R)) + list(other.R), layout.O)
    others = Layout(layout.D, layout.R, other.O)
    assert copies.equivalent(others) == (whole_map(copies) == whole_map(others))


def test_sets_of_copies_are_compared_where_the_canonical_form_is_not_unique():
    # Both copy to 0, 2 to 11 and 13. The copies meet, so that the gap condition doesn't hold.
    one, two = Layout.parse("S[2 : 1@tp] + R[(3, 4) : (2, 3)]"), Layout.parse("S[2 : 1@tp] + R[(6, 2) : (2, 3)]")
    assert one.canonicalize() != two.canonicalize()
    assert one.apply(1) == two.apply(1) and one.equivalent(two)
    assert not one.equivalent(Layout(two.D, two.R, {"m": 1}))
    assert not one.equivalent(Layout.parse("S[2 : 1@tp] + R[14 : 1]"))
    assert not one.equivalent(Layout.parse("S[2 : 2@tp] + R[(3, 4) : (2, 3)]"))


def test_collisions_are_searched_exactly_where_strides_interleave():
    # 21 steps of 100 beside 100 steps of 21: they meet at 2100 only, which is just out of reach.
    assert Layout.parse("S[(21, 100) : (100, 21)]").is_injective()
    assert not Layout.parse("S[(22, 101) : (100, 21)]").is_injective()
    # A replica may bring two elements together that D keeps apart.
    assert not Layout.parse("S[(4, 2) : (8, 1)] + R[2 : 1]").is_injective()
    assert Layout.parse("S[(4, 2) : (8, 2)] + R[2 : 1]").is_injective()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: Layout.parse("S[(4, 8) : (1@P, 1@F)]").span(), "axis_name is needed: .* has a span on each of P, F"),
        (lambda x: x.covers({"m": 0}), r"box\['m'\] must be at least 1, not 0"),
        (lambda x: x.covers(["m"]), "box must be a mapping from axis to size"),
        (
            lambda x: Layout.parse("S[(3, 2) : (536870911, 268435456)]").covers({"m": 5}),
            "reaches over .* positions; up to 134217728 can be listed",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call(Layout.parse("S[(4, 8) : (1@tp, 1)]"))


def test_span_is_that_of_memory_where_no_axis_is_given():
    assert Layout.parse("S[(4, 8) : (16, 1)] + 3").span() == 56
    assert Layout.parse("S[(4, 8, 2) : (1@P, 2@tp, 1@laneid)]").span() == 4
    assert Layout.parse("S[4 : 1@tp]").span() == Layout.parse("S[() : ()]").span() == 1
