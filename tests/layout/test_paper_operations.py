"""The paper's statements on the operations (Axe, arXiv:2601.19092, appendices B to D and F).

The paper's algorithms are written out here as it has them, and judged, like the package's, by `whole_map`, which
enumerates the definition of a layout.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Iter, Layout, LayoutError

AXES = ("m", "lane")
quick = settings(derandomize=True, max_examples=100, deadline=None)
strides = st.integers(-4, 6).filter(bool)


@st.composite
def factors(draw, rank, least=1):
    """A layout that can be grouped by a shape, and the shape; iters have at least the extent `least`."""
    dims = draw(st.lists(st.lists(st.integers(least, 3), max_size=2), min_size=rank, max_size=rank))
    shard = [Iter(extent, draw(strides), draw(st.sampled_from(AXES))) for dim in dims for extent in dim]
    replica = draw(st.lists(st.builds(Iter, st.integers(1, 3), strides, st.sampled_from(AXES)), max_size=2))
    offset = draw(st.dictionaries(st.sampled_from(AXES), st.integers(-4, 4), max_size=2))
    return Layout(shard, replica, offset), tuple(math.prod(dim) for dim in dims)


@st.composite
def pairs(draw, least=1):
    rank = draw(st.integers(1, 2))
    return draw(factors(rank, least)), draw(factors(rank, least))


def factorizations(size):
    """Every way to write a size as a product of extents of at least 2, in order."""
    if size == 1:
        yield ()
    for first in range(2, size + 1):
        if size % first == 0:
            for rest in factorizations(size // first):
                yield (first, *rest)


# ---- B: grouping -------------------------------------------------------------------------------------------------


@quick
@given(st.lists(st.builds(Iter, st.integers(1, 6), strides, st.sampled_from(AXES)), min_size=1, max_size=3), st.data())
def test_lemma_b_1_split_rule_and_corollary_b_2_fuse_rule(whole_map, shard, data):
    k = data.draw(st.integers(0, len(shard) - 1))
    it = shard[k]
    outer = data.draw(st.sampled_from([d for d in range(1, it.extent + 1) if it.extent % d == 0]))
    inner = it.extent // outer
    split = [Iter(outer, inner * it.stride, it.axis), Iter(inner, it.stride, it.axis)]
    parted = Layout([*shard[:k], *split, *shard[k + 1 :]])
    assert whole_map(parted) == whole_map(Layout(shard))
    assert parted.canonicalize() == Layout(shard).canonicalize()
    if 1 < outer < it.extent:
        assert Layout([it]).group((outer, inner))[0] == Layout(split)


def group_by_shape(shard, shape):
    """Algorithm 1: the blocks of iters for each dimension, or None. (Line 19 is read as e_tail > 1.)"""
    left, blocks = list(shard), []
    for target in shape:
        current, block = 1, []
        while current < target:
            if not left:
                return None
            it, rest = left[0], target // current
            head = math.gcd(it.extent, rest)
            if head == 1:
                return None
            tail = it.extent // head
            block.append(Iter(head, tail * it.stride, it.axis))
            current *= head
            left[:1] = [Iter(tail, it.stride, it.axis)] if tail > 1 else []
        blocks.append(block)
    return blocks


def fewest_iters(extents, shape):
    """The least number of iters into which extents can be split so that blocks of them make the shape, or None.

    By all refinements there are. (Runs that could be fused aren't there in a canonical D.)
    """
    found = []
    for refined in itertools.product(*map(factorizations, extents)):
        parts = list(itertools.chain(*refined))
        products = list(itertools.accumulate(parts, initial=1, func=lambda a, b: a * b))
        if all(boundary in products for boundary in itertools.accumulate(shape, initial=1, func=lambda a, b: a * b)):
            found.append(len(parts))
    return min(found, default=None)


@pytest.mark.parametrize("extents", [(6,), (8,), (12,), (4, 6), (6, 4), (2, 6, 2), (3, 8), (6, 6), (4, 9)])
def test_algorithm_1_groups_iff_it_can_be_done_and_with_the_fewest_iters(whole_map, extents):
    layout = Layout([Iter(extent, 100 - 7 * k, "m") for k, extent in enumerate(extents)])
    assert layout.canonicalize() == layout
    for shape in factorizations(math.prod(extents)):
        blocks, fewest = group_by_shape(layout.D, shape), fewest_iters(extents, shape)
        if blocks is None:
            assert fewest is None
            with pytest.raises(LayoutError, match=r"can not be grouped by .* falls inside"):
                layout.group(shape)
            continue
        grouped, seps = layout.group(shape)
        assert [list(grouped.D[a:b]) for a, b in itertools.pairwise(seps)] == blocks
        assert len(grouped.D) == fewest and whole_map(grouped) == whole_map(layout)


def test_departure_algorithm_1_wants_the_canonical_list():
    """A unit iter ends it, for no gcd with 1 goes on, and runs that could be fused are not: ours skips the former.

    For the fewest iters of all, group the canonical form. A dimension of 1 has an empty block there, and a unit iter
    here, so that every dimension has an iter.
    """
    layout = Layout.parse("S[(1, 2, 1, 2) : (9, 2, 5, 1)]")
    assert group_by_shape(layout.D, (2, 2)) is None
    assert str(layout.group((2, 2))[0]) == "S[(2, 2) : (2, 1)]"
    assert len(layout.group((4,))[0].D) == 2 and len(layout.canonicalize().group((4,))[0].D) == 1
    assert group_by_shape(layout.canonicalize().D, (4, 1)) == [[Iter(4, 1, "m")], []]
    assert str(layout.canonicalize().group((4, 1))[0]) == "S[(4, 1) : (1, 1)]"


# ---- C: tiling ---------------------------------------------------------------------------------------------------


@quick
@given(factors(2))
def test_lemma_c_1_axis_wise_span(whole_map, case):
    """1 + the sum of |s| (e - 1) over D and R, of strides of any sign; the image of a layout has it too."""
    layout, _ = case
    reached = [dict(p) for points in whole_map(layout) for p in points]
    for axis in AXES:
        closed = 1 + sum(abs(it.stride) * (it.extent - 1) for it in (*layout.D, *layout.R) if it.axis == axis)
        values = [p.get(axis, 0) for p in reached]
        assert layout.span(axis) == closed == max(values) - min(values) + 1


def tile_layouts(a, a_shape, b, b_shape, scaled=True):
    """Algorithm 2: the tiled layout as it is emitted, not canonical. Not `scaled`, it is the direct sum of F.2."""
    width = dict.fromkeys(AXES, 1)
    if scaled:
        for it in (*b.D, *b.R):
            width[it.axis] += abs(it.stride) * (it.extent - 1)
    shard = []
    for outer, inner in zip(group_by_shape(a.D, a_shape), group_by_shape(b.D, b_shape)):
        shard += [Iter(it.extent, width[it.axis] * it.stride, it.axis) for it in outer] + inner
    replica = [*(Iter(it.extent, width[it.axis] * it.stride, it.axis) for it in a.R), *b.R]
    return Layout(shard, replica, {axis: a.O[axis] * width[axis] + b.O[axis] for axis in AXES})


def combined(whole_map, case, width):
    """What the definition of the product, or with widths of 1 of the direct sum, says of each element, row-major."""
    (a, a_shape), (b, b_shape) = case
    outer, inner = whole_map(a), whole_map(b)
    shape = [m * n for m, n in zip(a_shape, b_shape)]
    for index in np.ndindex(*shape):
        x = np.ravel_multi_index([i // n for i, n in zip(index, b_shape)], a_shape)
        y = np.ravel_multi_index([i % n for i, n in zip(index, b_shape)], b_shape)
        found = set()
        for p, q in itertools.product(map(dict, outer[x]), map(dict, inner[y])):
            point = {axis: p.get(axis, 0) * width[axis] + q.get(axis, 0) for axis in AXES}
            found.add(frozenset((axis, position) for axis, position in point.items() if position))
        yield frozenset(found)


@quick
@given(pairs(least=2))
def test_algorithm_2_and_theorem_c_2_soundness(whole_map, case):
    (a, a_shape), (b, b_shape) = case
    expected = tuple(combined(whole_map, case, {axis: b.span(axis) for axis in AXES}))
    emitted, tiled = tile_layouts(a, a_shape, b, b_shape), b.tile(a, a_shape, b_shape)
    assert whole_map(emitted) == whole_map(tiled) == expected
    assert tiled == emitted.canonicalize()


@quick
@given(pairs())
def test_proposition_c_3_a_tile_is_grouped_by_the_interleaved_shape(case):
    (a, a_shape), (b, b_shape) = case
    tiled = b.tile(a, a_shape, b_shape)
    interleaved = [extent for pair in zip(a_shape, b_shape) for extent in pair]
    grouped, seps = tiled.group(interleaved)
    blocks = [grouped.D[x:y] for x, y in itertools.pairwise(seps)]
    assert [math.prod(it.extent for it in block) for block in blocks] == interleaved
    for which, layout, shape in ((0, a, a_shape), (1, b, b_shape)):
        own, own_seps = layout.canonicalize().group(shape)
        for block, (x, y) in zip(blocks[which::2], itertools.pairwise(own_seps)):
            scaled = [Iter(it.extent, it.stride * (1 if which else b.span(it.axis)), it.axis) for it in own.D[x:y]]
            assert Layout(block).canonicalize() == Layout(scaled).canonicalize()


# ---- D: tile of --------------------------------------------------------------------------------------------------


def scan_block(block, inner, width):
    """Algorithm 3, for one dimension: the outer iters left when those of `inner` are matched greedily, or None."""
    outer, at = [], 0
    for it in block:
        if at < len(inner) and it == inner[at]:
            at += 1
        elif it.stride % width[it.axis] == 0:
            outer.append(Iter(it.extent, it.stride // width[it.axis], it.axis))
        else:
            return None
    return outer if at == len(inner) else None


@quick
@given(pairs(least=2))
def test_theorem_d_1_and_algorithm_3_on_a_list_that_is_a_tile_s(case):
    """Greedy as it is, it never takes an iter of C for one of B: scaled, C's strides are wider than all of B's."""
    (c, c_shape), (b, b_shape) = case
    width = {axis: b.span(axis) for axis in AXES}
    for outer, inner in zip(group_by_shape(c.D, c_shape), group_by_shape(b.D, b_shape)):
        emitted = [Iter(it.extent, it.stride * width[it.axis], it.axis) for it in outer] + inner
        assert scan_block(emitted, inner, width) == outer
    tiled = tile_layouts(c, c_shape, b, b_shape)
    found = b.is_tile_inner(tiled, [m * n for m, n in zip(c_shape, b_shape)], b_shape)
    assert found is not None and found.canonicalize().D == c.canonicalize().D and found.equivalent(c)


def test_departure_d_1_needs_c_before_b():
    """The scan lets B's iters come before C's, which is another map than C (x) B: ours cuts the block between them."""
    a, b = Layout.parse("S[(2, 2) : (1, 2)]"), Layout.parse("S[2 : 1]")
    assert scan_block(a.D, b.D, {"m": 2}) == [Iter(2, 1, "m")]
    assert not b.tile(Layout.parse("S[2 : 1]"), (2,), (2,)).equivalent(a)
    assert b.is_tile_inner(a, (4,), (2,)) is None


def test_departure_algorithm_3_is_of_no_use_for_what_is_merged():
    """Four contiguous elements are two times two, but one iter when canonical: ours groups by the interleaved shape."""
    a, b = Layout.parse("S[4 : 1]"), Layout.parse("S[2 : 1]")
    assert scan_block(a.D, b.D, {"m": 2}) is None
    assert b.is_tile_inner(a, (4,), (2,)) == b == b.is_tile_outer(a, (4,), (2,))


def test_algorithm_3_finds_a_factor_iff_there_is_one(whole_map):
    """Every D of four elements by every B of two: the map of C (x) B for some stride of C, or None."""
    inner, steps = [s for s in range(-4, 5) if s], [s for s in range(-12, 13) if s]
    whole = [[Iter(4, s, "m")] for s in inner]
    whole += [[Iter(2, s, "m"), Iter(2, t, "m")] for s in steps for t in inner]
    for step in inner:
        b, width = Layout([Iter(2, step, "m")]), abs(step) + 1
        tiles = {whole_map(Layout([Iter(2, s * width, "m"), Iter(2, step, "m")])): s for s in steps}
        for shard in whole:
            found, stride = b.is_tile_inner(Layout(shard), (4,), (2,)), tiles.get(whole_map(Layout(shard)))
            assert found == (None if stride is None else Layout([Iter(2, stride, "m")]))


@quick
@given(pairs(), st.integers(-7, 7))
def test_theorem_d_4_offsets(case, moved):
    """O_C is (O_A - O_B) / W, axis by axis, and where W doesn't divide there is no C."""
    (c, c_shape), (b, b_shape) = case
    c, b = Layout(c.D, (), c.O), Layout(b.D, (), b.O)
    tiled = b.tile(c, c_shape, b_shape)
    shape, width = [m * n for m, n in zip(c_shape, b_shape)], b.span("m")
    a = Layout(tiled.D, (), {**tiled.O, "m": tiled.O["m"] + moved})
    found = b.is_tile_inner(a, shape, b_shape)
    assert (found is None) == (moved % width != 0)
    if found is not None:
        assert found.O["m"] == c.O["m"] + moved // width and found.O["lane"] == c.O["lane"]


def test_theorem_d_4_replication(whole_map):
    """A's copies are the sums of B's and of C's times the span: found for all R of up to two iters, absorbed or not."""
    parts = [Iter(e, s, "m") for e in (2, 3) for s in (-2, 1, 2, 3)]
    lists = [r for n in range(3) for r in itertools.combinations_with_replacement(parts, n)]
    for own, outer in itertools.product(lists, repeat=2):
        b, c = Layout([Iter(2, 3, "m")], own), Layout([], outer)
        emitted = Layout(b.D, [*own, *(Iter(it.extent, it.stride * b.span("m"), "m") for it in outer)])
        found = b.is_tile_inner(emitted, (2,), (2,))
        assert found is not None and whole_map(found) == whole_map(c)
    # The copies 0 and 1 are within the tile here, and no multiple of its span 3 added to 0 and 2 gives them.
    assert Layout.parse("S[2 : 2]").is_tile_inner(Layout.parse("S[2 : 2] + R[2 : 1]"), (2,), (2,)) is None


# ---- F: direct sums ----------------------------------------------------------------------------------------------


@quick
@given(pairs(least=2))
def test_proposition_f_1_correctness_of_the_direct_sum(whole_map, case):
    (a, a_shape), (b, b_shape) = case
    expected = tuple(combined(whole_map, case, dict.fromkeys(AXES, 1)))
    emitted, total = tile_layouts(a, a_shape, b, b_shape, scaled=False), b.direct_sum(a, a_shape, b_shape)
    assert whole_map(emitted) == whole_map(total) == expected
    assert total == emitted.canonicalize()


@quick
@given(pairs())
def test_appendix_f_3_a_tile_is_a_direct_sum_with_the_scaled_layout(case):
    """With all of A scaled by the span of B: D, R and O, as C.3 has it."""
    (a, a_shape), (b, b_shape) = case
    shard, replica = ([Iter(it.extent, it.stride * b.span(it.axis), it.axis) for it in part] for part in (a.D, a.R))
    scaled = Layout(shard, replica, {axis: o * b.span(axis) for axis, o in a.O.items()})
    assert b.direct_sum(scaled, a_shape, b_shape) == b.tile(a, a_shape, b_shape)


def test_departure_f_3_copies_and_offset_are_scaled_too():
    """F.3 keeps R and O of A as they are, against algorithm 2, and two tiles would then have an address in common."""
    a, b = Layout.parse("S[2 : 1] + R[2 : 2] + 1"), Layout.parse("S[8 : 1]")
    tiled = b.tile(a, (2,), (8,))
    assert str(tiled) == "S[16 : 1] + R[2 : 16] + 8" and tiled.is_injective()
    kept = b.direct_sum(Layout.parse("S[2 : 8] + R[2 : 2] + 1"), (2,), (8,))
    assert not kept.equivalent(tiled) and not kept.is_injective()
