"""The paper's statements on slicing (Axe, arXiv:2601.19092, appendix E), over all small blocks and all their parts.

Algorithm 4 is written out as the paper has it, and judged, like the package's `slice`, by enumeration.
"""

import itertools
import math

import pytest

from tvm_axe.layout import Iter, Layout, LayoutError


def digits_of(block, index):
    found = []
    for it in reversed(block):
        found.insert(0, index % it.extent)
        index //= it.extent
    return found


def peel(block, begin, length):
    """The pivot's place k, -1 if all is peeled, and what is left of the length; the iters after k are kept whole."""
    digits, k = digits_of(block, begin), len(block) - 1
    while k >= 0 and digits[k] == 0 and length % block[k].extent == 0:
        length //= block[k].extent
        k -= 1
    return k, length


def slice_block(block, begin, length):
    """Algorithm 4, to the letter: (its form, (extent, move by axis) of each iter), or None where it fails."""
    digits, (k, left) = digits_of(block, begin), peel(block, begin, length)
    kept = [(it.extent, {it.axis: it.stride}) for it in block[k + 1 :]]
    if k < 0:
        return "whole", kept
    it, digit = block[k], digits[k]
    if digit + left <= it.extent:
        return "no wrap", [(left, {it.axis: it.stride}), *kept]
    if left % 2 == 0 and digit + left // 2 == it.extent and (k == 0 or digits[k - 1] + 1 <= block[k - 1].extent):
        half, step = left // 2, {it.axis: (left // 2 - it.extent) * it.stride}
        if k > 0:
            step[block[k - 1].axis] = step.get(block[k - 1].axis, 0) + block[k - 1].stride
        return "one wrap", [(2, step), (half, {it.axis: it.stride}), *kept]
    return None


def image(iters, start):
    """The points, in order, that moves of iters lead to from a start, each as (m, lane)."""
    points = [start]
    for extent, moves in iters:
        points = [
            (m + k * moves.get("m", 0), lane + k * moves.get("lane", 0)) for m, lane in points for k in range(extent)
        ]
    return points


def points_of(block):
    return image([(it.extent, {it.axis: it.stride}) for it in block], (0, 0))


def cases():
    """Every canonical block of up to three iters from a few, with every part of it."""
    parts = [Iter(e, s, a) for e, s in ((2, 1), (2, 5), (3, 2), (4, -3), (4, 10)) for a in ("m", "lane")]
    for count in (1, 2, 3):
        for block in itertools.product(parts, repeat=count):
            if block == Layout(block).canonicalize().D and block[-1].axis == "m":
                size = math.prod(it.extent for it in block)
                for begin in range(0, size, 1 if size < 20 else 3):
                    for length in range(1, size - begin + 1, 1 if size < 20 else 2):
                        yield block, begin, length


CASES = list(cases())


def our_points(block, begin, length):
    """The points of the part by the package's slice, or None where it refuses it."""
    layout = Layout(block)
    try:
        part = layout.slice((layout.size(),), [(begin, begin + length)])
    except LayoutError:
        return None
    start = (part.O["m"], part.O["lane"])
    return image([(it.extent, {it.axis: it.stride}) for it in part.D], start)


def is_an_iter(moves):
    """Whether moves by axis are a stride: not 0, and along one axis."""
    return sum(move != 0 for move in moves.values()) == 1


def test_lemma_e_1_no_wrap():
    """The part of the pivot's run, and what is peeled: the map on the part, and ours is the same iters."""
    seen = 0
    for block, begin, length in CASES:
        found = slice_block(block, begin, length)
        if found and found[0] in ("whole", "no wrap"):
            points = points_of(block)
            assert image(found[1], points[begin]) == points[begin : begin + length]
            ours = Layout(block).slice((len(points),), [(begin, begin + length)])
            expected = Layout([Iter(e, stride, axis) for e, moves in found[1] for axis, stride in moves.items()])
            assert ours.D == expected.canonicalize().D and (ours.O["m"], ours.O["lane"]) == points[begin]
            seen += 1
    assert seen > 1000


def test_lemma_e_2_symmetric_one_wrap():
    """Where the digit to the left has room for the carry, the two halves are the map; on one axis, they are iters."""
    seen = 0
    for block, begin, length in CASES:
        found, (k, _) = slice_block(block, begin, length), peel(block, begin, length)
        if found and found[0] == "one wrap" and digits_of(block, begin)[k - 1] + 1 < block[k - 1].extent:
            points = points_of(block)
            assert image(found[1], points[begin]) == points[begin : begin + length]
            assert (our_points(block, begin, length) is not None) == is_an_iter(found[1][0][1])
            seen += is_an_iter(found[1][0][1])
    assert seen > 100


def test_departure_e_2_the_carry_needs_room():
    """With d + 1 <= E, which every digit has, algorithm 4 is wrong where the next digit is at its last, and only there.

    From 14, the last of digits 0, 3, 2 wraps at 16, and with it the one before, to 1, 0, 0: from 23 and 24 to 100.
    """
    block = (Iter(2, 100, "m"), Iter(4, 7, "m"), Iter(4, 1, "m"))
    form, iters = slice_block(block, 14, 4)
    assert form == "one wrap" and [m for m, _ in image(iters, (23, 0))] == [23, 24, 28, 29]
    assert [m for m, _ in points_of(block)[14:18]] == [m for m, _ in our_points(block, 14, 4)] == [23, 24, 100, 101]
    wrong = 0
    for block, begin, length in CASES:
        found, points = slice_block(block, begin, length), points_of(block)
        if found and image(found[1], points[begin]) != points[begin : begin + length]:
            k, _ = peel(block, begin, length)
            assert found[0] == "one wrap" and digits_of(block, begin)[k - 1] + 1 == block[k - 1].extent
            wrong += 1
    assert wrong > 10


@pytest.mark.parametrize(
    ("text", "region"),
    [("S[(4, 8) : (1@lane, 1)]", (6, 10)), ("S[(2, 2) : (1, 1)]", (1, 3))],
)
def test_departure_e_2_the_step_between_the_halves_may_be_no_stride(text, region):
    """On two axes, or 0: no iter of definition 2.1 is that, and a part so has no layout; ours says so."""
    layout = Layout.parse(text)
    form, iters = slice_block(layout.D, region[0], region[1] - region[0])
    assert form == "one wrap" and not is_an_iter(iters[0][1])
    with pytest.raises(LayoutError, match="it moves by no single stride on one axis"):
        layout.slice((layout.size(),), [region])


def test_departure_algorithm_4_rem_is_never_0():
    """It ends at 1 where all is peeled, which is then the whole block; and the first iter never wraps inside of it."""
    for block, begin, length in CASES:
        k, left = peel(block, begin, length)
        assert left >= 1 and (k >= 0 or (left, begin, length) == (1, 0, len(points_of(block))))
        if k == 0:
            assert digits_of(block, begin)[0] + left <= block[0].extent


def test_theorem_e_3_and_algorithm_4_find_no_more_than_ours():
    """Every part that algorithm 4 gets right, as iters, ours has as well; and every part that ours has is right."""
    more = 0
    for block, begin, length in CASES:
        points = points_of(block)
        ours, found = our_points(block, begin, length), slice_block(block, begin, length)
        assert ours is None or ours == points[begin : begin + length]
        if found and image(found[1], points[begin]) == points[begin : begin + length]:
            assert ours is not None or not is_an_iter(found[1][0][1])
        more += ours is not None and found is None
    assert more > 50
    # Rows that are off by half of one are an example: 3 to 10 of pairs that are 5 apart.
    block = (Iter(8, 5, "m"), Iter(2, 1, "m"))
    assert slice_block(block, 3, 8) is None and our_points(block, 3, 8) == points_of(block)[3:11]
