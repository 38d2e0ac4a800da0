"""To and from Triton's linear layouts: their law, by enumeration over every place and every element."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import ComposeLayout, Iter, Layout, LayoutError, named
from tvm_axe.layout.convert import from_triton, to_triton

quick = settings(derandomize=True, max_examples=120, deadline=None)
AXES = {"register": "m", "offset": "m", "lane": "laneid", "warp": "warpid", "block": "cbx"}


def elements(bases, rank):
    """Every place, by axis, and the element there: the exclusive or of the bases of its bits."""
    names = list(bases)
    for place in itertools.product(*(range(2 ** len(bases[name])) for name in names)):
        index = [0] * rank
        for name, number in zip(names, place):
            for bit, basis in enumerate(bases[name]):
                if number >> bit & 1:
                    index = [a ^ b for a, b in zip(index, basis)]
        yield {AXES[name]: number for name, number in zip(names, place) if number}, tuple(index)


def check(layout, bases, shape):
    """The places that the linear layout gives each element are those of the layout."""
    held = {index: set() for index in np.ndindex(*shape)}
    for place, index in elements(bases, len(shape)):
        held[index].add(frozenset(place.items()))
    for index, places in held.items():
        assert {frozenset(p.items()) for p in layout.apply(*map(int, index), shape=shape)} == places


@st.composite
def distributed(draw):
    """A layout that takes each bit of an index to a bit of a register, lane, warp or block; others hold copies."""
    bits = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    widths = [draw(st.integers(0, 3)) for _ in range(4)]
    widths[0] += max(0, sum(bits) - sum(widths))
    places = [(axis, n) for axis, width in zip(("m", "laneid", "warpid", "cbx"), widths) for n in range(width)]
    places = draw(st.permutations(places))
    iters = [Iter(2, 2**n, axis) for axis, n in places]
    return Layout(iters[: sum(bits)], iters[sum(bits) :]), tuple(2**b for b in bits)


@quick
@given(distributed())
def test_a_distributed_layout_and_its_bases(case):
    layout, shape = case
    bases = to_triton(layout, shape)
    assert list(bases) == ["register", "lane", "warp", "block"]
    check(layout, bases, shape)
    assert from_triton(bases, shape).equivalent(layout)


@quick
@given(distributed())
def test_bases_read_back_as_they_were(case):
    layout, shape = case
    bases = to_triton(layout, shape)
    assert to_triton(from_triton(bases, shape), shape) == bases


@st.composite
def shared(draw):
    """A swizzled layout of 2**n addresses, its bits in any order."""
    bits = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    order = draw(st.permutations(range(sum(bits))))
    length = draw(st.integers(1, 3))
    inner = draw(st.booleans())
    atom = length + draw(st.integers(0, 2))
    fine = draw(st.integers(0, 2))
    tile = Layout([Iter(2, 2**k, "m") for k in order])
    return ComposeLayout(fine, length, atom, tile, inner), tuple(2**b for b in bits)


@quick
@given(shared())
def test_a_swizzled_layout_and_its_bases(case):
    layout, shape = case
    try:
        bases = to_triton(layout, shape)
    except LayoutError as error:
        assert not layout.swizzle_inner and "the swizzle" in str(error)
        return
    assert list(bases) == ["offset", "block"]
    check(layout, bases, shape)
    back = from_triton(bases, shape)
    check(back, bases, shape)
    assert layout.equivalent(back)


def test_the_fragment_of_an_mma_accumulator():
    # Triton's own, of NVIDIA's mma version 2 with one warp: 2 columns a lane, 4 lanes a row, then 8 rows; rows 8 apart.
    bases = to_triton(named.mma_c(), (16, 8))
    assert bases["register"] == [[0, 1], [8, 0]]
    assert bases["lane"] == [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    assert bases["warp"] == bases["block"] == []
    assert from_triton(bases, (16, 8)) == named.mma_c().canonicalize()


def test_threads_of_a_warpgroup_are_lanes_and_warps():
    layout = named.wgmma_c(16)
    bases = to_triton(layout, (64, 16))
    assert bases["warp"] == [[16, 0], [32, 0]] and len(bases["lane"]) == 5
    back = from_triton(bases, (64, 16))
    for index in np.ndindex(64, 16):
        (ours,), (theirs,) = (it.apply(*map(int, index), shape=(64, 16)) for it in (layout, back))
        assert ours["tid_in_wg"] == theirs["laneid"] + 32 * theirs["warpid"] and ours["m"] == theirs["m"]


def test_shared_memory_of_wgmma():
    # A row of 64 halves: the pieces of 8 in row r of 8 are at the piece XOR r.
    bases = to_triton(named.wgmma_shared((8, 64), "float16"), (8, 64))
    assert bases["offset"] == [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    assert from_triton(bases, (8, 64)).equivalent(named.wgmma_shared((8, 64), "float16"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_triton(Layout.parse("S[(2, 8) : (1@tp, 1)]"), (16,)), "places on m, laneid, .* is on axis 'tp'"),
        (lambda: to_triton(Layout.parse("S[6 : 1]"), (6,)), "powers of two as extents and strides, .* has 6 : 1"),
        (lambda: to_triton(Layout.parse("S[8 : -1] + 7"), (8,)), "element 0 at place 0"),
        (lambda: to_triton(Layout.parse("S[8 : 3]"), (8,)), "powers of two"),
        (lambda: to_triton(Layout.parse("S[(4, 4) : (1, 2)]"), (16,)), "two iters on bit 1 of the register"),
        (
            lambda: to_triton(Layout.parse("S[8 : 4@laneid]"), (8,)),
            "none on bit 0 of the lane",
        ),
        (
            lambda: to_triton(ComposeLayout(0, 1, 1, Layout.parse("S[(8, 4) : (1@laneid, 1)]")), (32,)),
            "of shared memory, and layout .* is on the lane too",
        ),
        (
            lambda: to_triton(ComposeLayout(0, 1, 3, Layout.parse("S[4 : 1]"), False), (4,)),
            "goes beyond its addresses",
        ),
        (lambda: from_triton([], (4,)), "bases must be a mapping"),
        (lambda: from_triton({"lane": 3}, (4,)), r"bases\['lane'\] must be a sequence with a basis for each bit"),
        (lambda: from_triton({"lane": [3]}, (4,)), r"bases\['lane'\]\[0\] must have an int for each"),
        (lambda: from_triton({"thread": []}, (4,)), "the dimensions of places are register, offset, lane"),
        (lambda: from_triton({"lane": [[1], [2]]}, (6,)), r"shape\[0\] must be a power of two"),
        (lambda: from_triton({"lane": [[1, 0]]}, (2,)), r"bases\['lane'\]\[0\] must have an int for each of \(2,\)"),
        (lambda: from_triton({"lane": [[4]]}, (4,)), r"= \[4\] is not inside shape \(4,\)"),
        (lambda: from_triton({"lane": [[1]]}, (4,)), "bit 1 of dimension 0 is in no basis"),
        (lambda: from_triton({"lane": [[1]], "warp": [[1]]}, (2,)), "two places have one basis"),
        (lambda: from_triton({"lane": [[1], [3]]}, (4,)), "bit 1 of laneid flips 2 bits of the index: only a swizzle"),
        (lambda: from_triton({"lane": [[1]], "register": [[3]]}, (4,)), "bit 0 of m flips 2 bits"),
        (lambda: from_triton({"offset": [[1], [2], [7]]}, (8,)), "bit 2 of m flips 3 bits"),
        (lambda: from_triton({"register": [[1]], "offset": [[2]]}, (4,)), "has register and offset"),
        (
            lambda: from_triton({"offset": [[1], [2], [4], [9], [20]]}, (32,)),
            r"a swizzle has neighbouring bits of an address flip as many .* not {3: 0, 4: 2}",
        ),
        (lambda: from_triton({"offset": [[1], [2], [5], [8], [17]]}, (32,)), "not {2: 0, 4: 0}"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call()
