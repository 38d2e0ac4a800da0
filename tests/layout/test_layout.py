"""Layouts: sizes, canonical forms, equality, and what is refused.

What the paper states of the map and of canonical forms is in test_paper_examples, test_paper_shard and
test_paper_copies.
"""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Coordinate, Iter, Layout, LayoutError

strides = st.integers(-6, 8).filter(bool)
iters = st.builds(Iter, st.integers(1, 4), strides, st.sampled_from(["m", "tp", "laneid"]))
offsets = st.dictionaries(st.sampled_from(["m", "dp", "warpid"]), st.integers(-5, 5), max_size=2)
layouts = st.builds(Layout, st.lists(iters, max_size=4), st.lists(iters, max_size=3), offsets)
quick = settings(derandomize=True, max_examples=100, deadline=None)


@quick
@given(layouts)
def test_size_and_admits(layout):
    assert layout.size() == math.prod(it.extent for it in layout.D)
    assert layout.admits((layout.size(),)) and layout.admits((1, layout.size(), 1))
    assert not layout.admits((layout.size() + 1,)) and not layout.admits((2, layout.size()))


@quick
@given(layouts)
def test_canonicalize_keeps_the_map_and_is_idempotent(whole_map, layout):
    canonical = layout.canonicalize()
    assert whole_map(canonical) == whole_map(layout)
    assert canonical.canonicalize() == canonical
    assert len(canonical.D) <= len(layout.D) and len(canonical.R) <= len(layout.R)
    assert all(it.extent > 1 for it in (*canonical.D, *canonical.R)) and all(it.stride > 0 for it in canonical.R)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("S[(4, 1, 8) : (8, 5@tp, 1)]", "S[32 : 1]"),
        ("S[(4, 8) : (8@tp, 1)]", "S[(4, 8) : (8@tp, 1)]"),
        ("S[(4, 8) : (-8, -1)]", "S[32 : -1]"),
        ("S[(1, 1) : (3, 1@tp)] + 0@dp", "S[() : ()]"),
        ("S[2 : 1] + R[(1, 2) : (4@dp, 1@dp)]", "S[2 : 1] + R[2 : 1@dp]"),
        ("S[2 : 1] + R[4 : -1@dp] + 3@dp", "S[2 : 1] + R[4 : 1@dp]"),
        ("S[2 : 1] + R[(2, 3) : (3@dp, 1@dp)]", "S[2 : 1] + R[6 : 1@dp]"),
        ("S[2 : 1] + R[(2, 3) : (1@dp, 1@dp)]", "S[2 : 1] + R[4 : 1@dp]"),
        ("S[2 : 1] + R[(4, 3) : (2@dp, 4@dp)]", "S[2 : 1] + R[8 : 2@dp]"),
        ("S[2 : 1] + R[(2, 2) : (1@dp, 3@dp)]", "S[2 : 1] + R[(2, 2) : (1@dp, 3@dp)]"),
        ("S[2 : 1] + R[(2, 2) : (1@tp, 2@dp)]", "S[2 : 1] + R[(2, 2) : (2@dp, 1@tp)]"),
    ],
)
def test_canonical_forms(text, canonical):
    assert str(Layout.parse(text).canonicalize()) == canonical


@quick
@given(layouts)
def test_repr_and_pickle_give_the_layout_back(layout):
    names = {"Layout": Layout, "Iter": Iter, "Coordinate": Coordinate}
    for copy in (eval(repr(layout), names), pickle.loads(pickle.dumps(layout))):
        assert copy == layout and hash(copy) == hash(layout)


def test_replicas_are_a_multiset_and_the_shard_is_a_tuple():
    one, two = Iter(2, 1, "tp"), Iter(3, 1, "dp")
    assert Layout([], [one, two]) == Layout([], [two, one]) != Layout([], [one, two, two])
    assert Layout([one, two]) != Layout([two, one])
    assert Layout([one], O={"m": 0}) == Layout([one])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, "m"), "an iter's extent must be at least 1, not 0"),
        ((2.0, 1, "m"), "an iter's extent must be an int, not 2.0 of type float"),
        ((True, 1, "m"), "an iter's extent must be an int, not True of type bool"),
        ((np.int64(2), 1, "m"), "an iter's extent must be an int, .* of type int64"),
        ((2, 0, "m"), "an iter's stride must not be 0, in 2 : 0; to say that data is replicated, use R"),
        ((2, "1", "m"), "an iter's stride must be an int, not '1' of type str"),
        ((2, 1, ""), "an iter's axis must be an ASCII identifier"),
        ((2, 1, "1tp"), "an iter's axis must be an ASCII identifier"),
        ((2, 1, None), "an iter's axis must be an ASCII identifier"),
        ((2, 2**63, "m"), "an iter's stride must fit in 64 bits, and an int of 64 bits doesn't"),
    ],
)
def test_malformed_iter_is_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        Iter(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([(4, 1, "m")],), r"D must hold Iter\(extent, stride, axis\), not \(4, 1, 'm'\)"),
        (("S[4 : 1]",), "D must be a sequence of Iter, not 'S"),
        (([], 3), "R must be a sequence of Iter, not 3"),
        (([], [], {"1": 2}), "an axis of a coordinate must be an ASCII identifier"),
        (([], [], {"m": 2.5}), "the position on axis 'm' must be an int, not 2.5"),
        (([], [], [("m", 2)]), "must be a mapping from axis to int"),
        (([Iter(2**40, 1, "m"), Iter(2**40, 1, "m")],), "D: the product of its extents must fit in 64 bits"),
        (([], [Iter(2**32, 1, "m")] * 2), "R: the product of its extents must fit in 64 bits"),
        (([Iter(3, 2**62, "tp")],), "the coordinates on axis 'tp' must fit in 64 bits"),
        (([Iter(3, -(2**61), "tp")], [], {"tp": -(2**62)}), "the coordinates on axis 'tp' must fit in 64 bits"),
    ],
)
def test_malformed_layout_is_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        Layout(*arguments)


def test_indices_outside_the_layout_are_refused():
    layout = Layout.parse("S[(2, 3) : (1@tp, 1)]")
    for index in (-1, 6):
        with pytest.raises(LayoutError, match=rf"index \({index},\) is not inside \(6,\)"):
            layout.apply(index)
    with pytest.raises(LayoutError, match=r"index \(2, 0\) is not inside \(2, 3\)"):
        layout.apply(2, 0, shape=(2, 3))
    with pytest.raises(LayoutError, match=r"index needs one int for each dimension of \(6,\), not \(1, 2\)"):
        layout.apply(1, 2)
    with pytest.raises(LayoutError, match=r"places 6 elements, and shape \(2, 4\) has 8"):
        layout.apply(1, 2, shape=(2, 4))
    with pytest.raises(LayoutError, match=r"shape\[1\] must be an int"):
        layout.apply(1, 2, shape=(2, 3.0))
    with pytest.raises(LayoutError, match="shape must be a sequence of ints"):
        layout.admits(6)


def test_a_coordinate_has_one_form():
    point = Coordinate({"tp": 1, "m": 0, "dp": -2})
    assert point == Coordinate({"dp": -2, "tp": 1}) and hash(point) == hash(Coordinate({"dp": -2, "tp": 1}))
    assert dict(point) == {"dp": -2, "tp": 1} and len(point) == 2
    assert point["tp"] == 1 and point["m"] == 0 and "m" not in point
    assert eval(repr(point), {"Coordinate": Coordinate}) == point
    assert point != Coordinate({"tp": 1}) and point != 3
