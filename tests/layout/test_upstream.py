"""Beside the compiler's own layouts: the same wherever those follow the paper, and each departure with its reason."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.tirx.layout import Axis as PeerAxis
from tvm.tirx.layout import ComposeLayout as PeerComposed
from tvm.tirx.layout import Iter as PeerIter
from tvm.tirx.layout import R, S, TileLayout

from tvm_axe.layout import ComposeLayout, Iter, Layout, LayoutError

AXES = ["m", "laneid", "warpid"]
quick = settings(derandomize=True, max_examples=120, deadline=None)


def to_peer(layout):
    shard, replica = ([PeerIter(it.extent, it.stride, it.axis) for it in part] for part in (layout.D, layout.R))
    return TileLayout.from_iters(shard, replica, dict(layout.O))


def from_peer(peer):
    shard, replica = (
        [Iter(int(i.extent), int(i.stride), i.axis.name) for i in part] for part in (peer.shard, peer.replica)
    )
    return Layout(shard, replica, {axis.name: int(amount) for axis, amount in peer.offset.items()})


def point(peer, *index, shape):
    """The compiler's point of an element, without zeros."""
    found = peer.apply(*index, shape=list(shape)) if len(shape) > 1 else peer.apply(*index)
    return {axis: int(amount) for axis, amount in found.items() if int(amount)}


@st.composite
def layouts(draw, rank=2, signs=(1, -1), replicas=False, offsets=True):
    """A layout that can be grouped by a shape, and the shape."""
    axes, strides = st.sampled_from(AXES), st.integers(1, 6)
    extents = st.integers(1, 4)
    dims = draw(st.lists(st.lists(extents, min_size=1, max_size=2), min_size=1, max_size=rank))
    shard = [Iter(e, draw(st.sampled_from(signs)) * draw(strides), draw(axes)) for dim in dims for e in dim]
    replica = draw(st.lists(st.builds(Iter, st.integers(2, 3), strides, axes), max_size=1)) if replicas else []
    offset = draw(st.dictionaries(axes, st.integers(1, 4), max_size=2)) if offsets else {}
    return Layout(shard, replica, offset), tuple(math.prod(dim) for dim in dims)


# What is the same.


@quick
@given(layouts())
def test_apply(case):
    layout, shape = case
    for index in itertools.product(*map(range, shape)):
        assert {frozenset(p.items()) for p in layout.apply(*index, shape=shape)} == {
            frozenset(point(to_peer(layout), *index, shape=shape).items())
        }


@quick
@given(layouts())
def test_canonicalize(case):
    layout, _ = case
    theirs = from_peer(to_peer(layout).canonicalize())
    if layout.canonicalize().D:
        assert layout.canonicalize() == theirs
    else:  # they keep one iter of extent 1
        assert [it.extent for it in theirs.D] == [1] and layout.canonicalize().O == theirs.O


@quick
@given(layouts(), st.data())
def test_group_and_group_many(case, data):
    layout, shape = case
    shapes = [shape, (layout.size(),), tuple(it.extent for it in layout.D)]
    for one in shapes:
        grouped, seps = layout.group(one)
        theirs, their_seps = to_peer(layout).group(list(one))
        assert (grouped, seps) == (from_peer(theirs), list(their_seps))
    grouped, seps = layout.group_many(shapes)
    theirs, their_seps = to_peer(layout).group_many(shapes)
    assert (grouped, seps) == (from_peer(theirs), [list(s) for s in their_seps])


@quick
@given(st.lists(st.integers(1, 6), max_size=3), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_group_refuses_the_same(extents, shape):
    layout = Layout([Iter(extent, 3**k, "m") for k, extent in enumerate(extents)])
    try:
        to_peer(layout).group(shape)
        grouped = True
    except Exception:
        grouped = False
    if extents or shape != [1] * len(shape):  # of no iter at all they make no unit dimension
        if grouped:
            layout.group(shape)
        else:
            with pytest.raises(LayoutError):
                layout.group(shape)


@quick
@given(layouts(), st.data())
def test_permutations(case, data):
    layout, shape = case
    perm = data.draw(st.permutations(range(len(layout.D))))
    assert layout.permute_dims(perm) == from_peer(to_peer(layout).permute_dims(perm))
    grouped, seps = layout.group(shape)
    perm = data.draw(st.permutations(range(len(shape))))
    assert grouped.permute_by_groups(seps, perm) == from_peer(to_peer(grouped).permute_by_groups(seps, perm))


@quick
@given(layouts(signs=(1,), replicas=True, offsets=False))
def test_sizes_and_spans_by_axis(case):
    layout, _ = case
    for axis in AXES:
        assert layout.size(axis) == int(to_peer(layout).size(axis)) and layout.span(axis) == int(
            to_peer(layout).span(axis)
        )
    assert layout.size() == int(to_peer(layout).size())


@st.composite
def products(draw):
    """An outer layout and an inner one, with shapes of as many dimensions, without copies and offsets in the outer."""
    rank = draw(st.integers(1, 2))
    inner, inner_shape = draw(layouts(rank, signs=(1,), offsets=False).filter(lambda case: len(case[1]) == rank))
    outer, outer_shape = draw(layouts(rank, offsets=False).filter(lambda case: len(case[1]) == rank))
    return outer, list(outer_shape), inner, list(inner_shape)


def same(ours, theirs):
    return ours.canonicalize() == from_peer(theirs).canonicalize()


@quick
@given(products())
def test_tile_and_both_recoveries(case):
    outer, outer_shape, inner, inner_shape = case
    shape = [a * b for a, b in zip(outer_shape, inner_shape)]
    tiled = inner.tile(outer, outer_shape, inner_shape)
    theirs = to_peer(inner).tile(to_peer(outer), outer_shape, inner_shape)
    assert same(tiled, theirs)
    assert same(inner.tile_to(shape, inner_shape), to_peer(inner).tile_to(shape, inner_shape))
    # Theirs also finds none where a unit iter on another thread axis changes the scope it takes a layout to be of.
    found = to_peer(inner).is_tile_inner(theirs, shape, inner_shape)
    assert same(inner.is_tile_inner(tiled, shape, inner_shape), found or to_peer(outer))
    found = to_peer(outer).is_tile_outer(theirs, shape, outer_shape)
    assert same(outer.is_tile_outer(tiled, shape, outer_shape), found or to_peer(inner))


@quick
@given(products(), st.dictionaries(st.sampled_from(AXES), st.integers(-3, 3), max_size=2))
def test_direct_sum_and_both_recoveries(case, offset):
    left, left_shape, right, right_shape = case
    right = Layout(right.D, [Iter(2, 100, "m")], offset)
    total = right.direct_sum(left, left_shape, right_shape)
    theirs = to_peer(right).direct_sum(to_peer(left), left_shape, right_shape)
    assert same(total, theirs)
    interleaved = [extent for pair in zip(left_shape, right_shape) for extent in pair]
    found = to_peer(right).is_direct_sum_right(theirs, interleaved, right_shape)
    assert found is not None and same(right.is_direct_sum_right(total, interleaved, right_shape), found)
    found = to_peer(left).is_direct_sum_left(theirs, interleaved, left_shape)
    assert found is not None and same(left.is_direct_sum_left(total, interleaved, left_shape), found)


@quick
@given(layouts(), st.data())
def test_slice_where_they_have_one(case, data):
    layout, shape = case
    region = []
    for extent in shape:
        begin = data.draw(st.integers(0, extent - 1))
        region.append((begin, data.draw(st.integers(begin + 1, extent))))
    theirs = to_peer(layout).slice(list(shape), region)
    if theirs is not None:
        assert same(layout.slice(shape, region), theirs)


@quick
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.booleans(), st.integers(1, 40), st.integers(0, 9))
def test_swizzles(per_element, length, more, inner, stride, offset):
    tile = Layout([Iter(8, stride, "m"), Iter(4, 1, "m")], (), {"m": offset})
    ours = ComposeLayout(per_element, length, length + more, tile, inner)
    theirs = PeerComposed(per_element, length, length + more, to_peer(tile), inner)
    for x in range(32):
        assert next(iter(ours.apply(x)))["m"] == int(theirs.apply(x)["m"])
    assert ComposeLayout.parse(str(theirs)) == ours
    assert str(ComposeLayout.parse(str(theirs))) == str(ours)


@quick
@given(layouts(replicas=True))
def test_their_text_is_read(case):
    layout, _ = case
    assert Layout.parse(str(to_peer(layout))) == layout


# What departs, and why.


def test_departure_apply_gives_all_copies():
    """A layout is a set-valued map; theirs leaves the replicas to the operations that use a layout."""
    layout = Layout.parse("S[4 : 1@laneid] + R[2 : 4@laneid]")
    assert len(layout.apply(1)) == 2 and point(to_peer(layout), 1, shape=(4,)) == {"laneid": 1}


def test_departure_canonical_replicas():
    """R's copies are a set: negative strides, units and absorbed runs are rewritten; theirs stay."""
    layout = Layout.parse("S[4 : 1] + R[(2, 3, 1) : (-12, 4, 5)]")
    assert str(layout.canonicalize()) == "S[4 : 1] + R[6 : 4] + -12"
    assert from_peer(to_peer(layout).canonicalize()).R == layout.R
    assert layout.equivalent(layout.canonicalize())


def test_departure_tile_scales_copies_and_offset_of_the_outer_layout():
    """Without it, copies and offsets land within a tile: their product has two elements at one place."""
    inner, outer = Layout.parse("S[8 : 1@laneid]"), Layout.parse("S[2 : 1@laneid] + R[2 : 2@laneid] + 1@laneid")
    assert str(inner.tile(outer, (2,), (8,))) == "S[16 : 1@laneid] + R[2 : 16@laneid] + 8@laneid"
    theirs = from_peer(to_peer(inner).tile(to_peer(outer), [2], [8]))
    assert str(theirs) == "S[16 : 1@laneid] + R[2 : 2@laneid] + 1@laneid" and not theirs.is_injective()


def test_departure_span_is_the_width_of_the_image():
    """Theirs adds the offset and signed strides, and of all memory axes together if none is named."""
    layout = Layout.parse("S[(4, 8) : (-8, 1)] + 30")
    assert layout.span("m") == 32 and int(to_peer(layout).span("m")) == 14
    assert Layout.parse("S[(4, 8) : (1@laneid, 1)]").span() == 8
    both = Layout.parse("S[(4, 8) : (1@P, 1@F)]")
    assert int(to_peer(both).span()) == 11
    with pytest.raises(LayoutError, match="axis_name is needed"):
        both.span()


def test_departure_a_slice_carries_and_is_refused_with_the_reason():
    """Theirs adds the next digit's stride even where that digit is at its last, and gives None without a reason."""
    layout = Layout.parse("S[(2, 4, 4) : (100, 7, 1)]")
    theirs = from_peer(to_peer(layout).slice([32], [(14, 18)]))
    right = [next(iter(layout.apply(x)))["m"] for x in range(14, 18)]
    assert [next(iter(layout.slice((32,), [(14, 18)]).apply(x)))["m"] for x in range(4)] == right
    assert [next(iter(theirs.apply(x)))["m"] for x in range(4)] != right
    assert to_peer(layout).slice([32], [(13, 18)]) is None
    with pytest.raises(LayoutError, match="it wraps around 4 : 1 after 3 of 5"):
        layout.slice((32,), [(13, 18)])


def test_departure_unpack_and_pack_scale_memory_alone_and_all_of_it():
    """Theirs scales the strides of threads, which hold no addresses, and neither copies nor offsets, which do."""
    layout = Layout.parse("S[(32, 4) : (1@laneid, 1)] + R[2 : 4] + 8")
    theirs = from_peer(to_peer(layout).unpack(2))
    assert str(theirs) == "S[(32, 4, 2) : (2@laneid, 2, 1)] + R[2 : 4] + 8"
    assert str(layout.unpack(2)) == "S[(32, 4, 2) : (1@laneid, 2, 1)] + R[2 : 8] + 16"
    assert layout.unpack(2).pack(2).equivalent(layout)


def test_departure_broadcast_copies():
    """Theirs puts a stride of 0 into D, which the paper forbids; copies are what R is for."""
    layout = Layout.parse("S[4 : 1]")
    with pytest.raises(LayoutError, match="stride must not be 0"):
        from_peer(to_peer(layout).broadcast(2))
    assert str(layout.broadcast(2, "m")) == "S[4 : 1] + R[2 : 4]"


def test_departure_what_is_malformed_is_refused():
    """Theirs cuts iters without a partner off silently, and takes layouts where two elements meet for well formed."""
    assert len(TileLayout(S[(8, 2) : (1, 2, 3)]).shard) == 2
    with pytest.raises(LayoutError, match="as many strides as extents needed"):
        Layout.parse("S[(8, 2) : (1, 2, 3)]")
    assert TileLayout(S[(4, 4) : (1, 1)]).verify_well_formed() and not Layout.parse("S[(4, 4) : (1, 1)]").is_injective()


def test_departure_axes_of_devices():
    """Theirs can create an axis, and then can't canonicalize what is on it."""
    devices = TileLayout(S[(2, 8) : (1 @ PeerAxis.get("tp"), 1)] + R[2 : 1 @ PeerAxis.get("dp")])
    assert str(from_peer(devices).canonicalize()) == "S[(2, 8) : (1@tp, 1)] + R[2 : 1@dp]"
    with pytest.raises(RuntimeError, match=r"."):
        devices.canonicalize()
