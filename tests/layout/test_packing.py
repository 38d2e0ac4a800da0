"""Packing, unpacking and copies: the laws by enumeration."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Coordinate, Iter, Layout, LayoutError

AXES = st.sampled_from(["m", "tp", "F"])
strides = st.integers(-4, 6).filter(bool)
iters = st.builds(Iter, st.integers(1, 4), strides, AXES)
layouts = st.builds(
    Layout,
    st.lists(iters, max_size=3),
    st.lists(iters, max_size=2),
    st.dictionaries(AXES, st.integers(-4, 4), max_size=2),
)
quick = settings(derandomize=True, max_examples=100, deadline=None)


def shifted(points, axis, by):
    return {Coordinate({**p, axis: p[axis] + by}) for p in points}


@quick
@given(layouts, st.integers(1, 4), st.sampled_from(["m", "F"]))
def test_unpack_puts_the_narrow_elements_side_by_side(layout, num, axis):
    unpacked = layout.unpack(num, axis)
    assert unpacked.size() == layout.size() * num
    for x in range(layout.size()):
        wide = {Coordinate({**p, axis: p[axis] * num}) for p in layout.apply(x)}
        for j in range(num):
            assert unpacked.apply(x * num + j) == shifted(wide, axis, j)


@quick
@given(layouts, st.integers(1, 4), st.sampled_from(["m", "F"]))
def test_pack_is_the_inverse_of_unpack(layout, num, axis):
    assert layout.unpack(num, axis).pack(num, axis).equivalent(layout)


@quick
@given(layouts, st.integers(2, 3))
def test_pack_keeps_the_map_or_refuses(layout, num):
    try:
        packed = layout.pack(num)
    except LayoutError:
        return
    assert packed.unpack(num).equivalent(layout)


@quick
@given(layouts, st.integers(1, 3), AXES)
def test_broadcast_puts_copies_side_by_side(layout, num, axis):
    copied = layout.broadcast(num, axis)
    width = layout.span(axis)
    for x in range(layout.size()):
        assert copied.apply(x) == set().union(*(shifted(layout.apply(x), axis, r * width) for r in range(num)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.unpack(0), "num must be at least 1, not 0"),
        (lambda x: x.unpack(2, "tp"), "axis must be a memory axis, one of m, P, F, .*, not 'tp'"),
        (lambda x: x.pack(3), "innermost iter of D to be a multiple of 3 elements next to each other on axis 'm'"),
        (lambda x: x.pack(2, "F"), "on axis 'F', and that of .* is 8 : 1"),
        (
            lambda x: Layout.parse("S[(4, 8) : (9, 1)]").pack(2),
            "strides on axis 'm' that are multiples of 2, unlike 4 : 9",
        ),
        (lambda x: Layout.parse("S[8 : 1] + R[2 : 9]").pack(2), "multiples of 2, unlike 2 : 9"),
        (lambda x: Layout.parse("S[8 : 1] + 3").pack(2), "an offset on axis 'm' that is a multiple of 2, not 3"),
        (lambda x: x.broadcast(0, "dp"), "num must be at least 1, not 0"),
        (lambda x: x.broadcast(2, "d p"), "axis must be an ASCII identifier"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call(Layout.parse("S[(4, 8) : (1@tp, 1)]"))
