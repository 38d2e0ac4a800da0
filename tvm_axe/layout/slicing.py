"""Slicing: the layout of a part of a tensor, every element where it was.

Source: Axe (arXiv:2601.19092), section 3.3 and appendix E, Lemmas E.1 and E.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import check_number
from tvm_axe.layout.iters import Iter, make_iter, merge_shard
from tvm_axe.layout.shapes import check_extents, show
from tvm_axe.layout.symbolic import Number

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout


def slice_region(layout: Layout, shape: Sequence[Number], region: Sequence[tuple[Number, Number]]) -> Layout:
    """Return the layout of a part of a tensor.

    Law: with (b, e) the region, ``part.apply(*i, shape=e - b) == layout.apply(*(b + i), shape=shape)`` for all i in the
    shape e - b.

    In each dimension, of iters outermost to innermost, the innermost are kept whole as long as the part starts and
    ends where they do. The next is cut to a run, if the part stays within it. If the part wraps around it, it must do
    so once, in its middle: then it is a run of two halves; or it takes rows that are all off by half an iter; or the
    wrap happens to go on as the run did. Any other part is refused: it has no layout, unless strides coincide so that
    several rows go on where those before them end.

    >>> layout = Layout.parse("S[(2, 4, 8) : (1@tp, 1@laneid, 1)]")
    >>> print(layout.slice((2, 32), [(1, 2), (8, 24)]))
    S[(2, 8) : (1@laneid, 1)] + 1@laneid + 1@tp
    >>> print(Layout.parse("S[(4, 4) : (1, 8)]").slice((16,), [(2, 6)]))
    S[(2, 2) : (-15, 8)] + 16
    >>> layout.slice((64,), [(3, 9)])
    Traceback (most recent call last):
        ...
    tvm_axe.errors.LayoutError: region [3, 9) of dimension 0 of (64,) has no layout: it wraps around 8 : 1 after 5 of 6

    Parameters
    ----------
    shape : Sequence[int]
        The tensor's shape, which the layout must admit.
    region : Sequence[tuple[int, int]]
        The first position of the part and the one after its last, in each dimension.

    Raises
    ------
    LayoutError
        If the layout can't be grouped by the shape, the region is empty or not inside it, or the part has no layout;
        for what is symbolic, if that it has one was not proved.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), appendix E, Theorem E.3. Algorithm 4's step over a wrap takes it that the next digit
    has room for the carry; here it carries on. The last two of these forms are not in the paper.
    """
    extents = check_extents(shape)
    if isinstance(region, str) or not isinstance(region, Sequence) or len(region) != len(extents):
        raise LayoutError(f"region must have a pair (begin, end) for each dimension of {show(extents)}, not {region!r}")
    grouped, seps = layout.canonicalize().group(extents)
    shard: list[Iter] = []
    offset: dict[str, Number] = defaultdict(int, grouped.O.items())
    for dim, extent in enumerate(extents):
        begin, end = _check_range(region[dim], dim, extents)
        iters = merge_shard(grouped.D[seps[dim] : seps[dim + 1]])
        if begin == 0 and end == extent:
            shard += iters
        elif not _slice_group(iters, begin, end - begin, shard, offset):
            raise LayoutError(_why_not(iters, begin, end, dim, extents))
    return layout._like(merge_shard(tuple(shard)), grouped.R, offset)


def _check_range(pair: object, dim: int, extents: tuple[Number, ...]) -> tuple[Number, Number]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise LayoutError(f"region[{dim}] must be a pair (begin, end), not {pair!r}")
    begin, end = (check_number(f"region[{dim}][{k}]", bound) for k, bound in enumerate(pair))
    if not (begin >= 0 and begin < end and end <= extents[dim]):
        raise LayoutError(
            f"region[{dim}] must have 0 <= begin < end <= {extents[dim]}, the extent of dimension {dim}, not {pair!r}"
        )
    return begin, end


def _slice_group(
    iters: tuple[Iter, ...], begin: Number, length: Number, shard: list[Iter], offset: dict[str, Number]
) -> bool:
    """Append the iters of [begin, begin + length) of one dimension to `shard`, and add up its offset, if it has any."""
    digits = _digits(iters, begin)
    for it, digit in zip(iters, digits):
        offset[it.axis] += digit * it.stride
    at = len(iters) - 1
    while at >= 0 and digits[at] == 0 and length % iters[at].extent == 0:
        length //= iters[at].extent
        at -= 1
    if at < 0:
        shard += iters
        return True
    cut = _cut(iters[: at + 1], digits[: at + 1], length)
    shard += [*cut, *iters[at + 1 :]]
    return bool(cut)


def _cut(iters: tuple[Iter, ...], digits: list[Number], length: Number) -> list[Iter]:
    """Return the iters of `length` steps from `digits` on, over what can't be kept whole; none if there are none."""
    last, left = iters[-1], iters[-1].extent - digits[-1]
    if length <= left:
        return [make_iter(length, last.stride, last.axis)]
    moves = _wrap(iters, digits)
    if len(moves) != 1:
        return []
    ((axis, step),) = moves.items()
    if length == left * 2:
        return [make_iter(2, step, axis), make_iter(left, last.stride, last.axis)]
    straight = last.stride * left
    if axis == last.axis and step == straight and length <= left + last.extent:
        return [make_iter(length, last.stride, last.axis)]  # the wrap goes on as the run did
    rows, outer = length // last.extent, iters[-2]
    if last.extent == left * 2 and length % last.extent == 0 and digits[-2] + rows < outer.extent:
        halves = make_iter(2, step, axis), make_iter(left, last.stride, last.axis)
        return [make_iter(rows, outer.stride, outer.axis), *halves]
    return []


def _digits(iters: tuple[Iter, ...], index: Number) -> list[Number]:
    digits: list[Number] = []
    for it in reversed(iters[1:]):
        digits.append(index % it.extent)
        index //= it.extent
    return [index, *reversed(digits)]


def _wrap(iters: tuple[Iter, ...], digits: list[Number]) -> dict[str, Number]:
    """Return the move, by axis, from `digits` to where the last of them is 0 and the one before is one more.

    Where that one is at its last, it becomes 0 as well, and carries further.
    """
    moves: dict[str, Number] = defaultdict(int)
    moves[iters[-1].axis] -= digits[-1] * iters[-1].stride
    for it, digit in zip(reversed(iters[:-1]), reversed(digits[:-1])):
        if digit + 1 < it.extent:
            moves[it.axis] += it.stride
            break
        moves[it.axis] -= digit * it.stride
    return {axis: move for axis, move in moves.items() if move != 0}


def _why_not(iters: tuple[Iter, ...], begin: Number, end: Number, dim: int, extents: tuple[Number, ...]) -> str:
    """Return the message for a part that has no layout."""
    start = f"region [{begin}, {end}) of dimension {dim} of {show(extents)} has no layout: "
    length, digits, at = end - begin, _digits(iters, begin), len(iters) - 1
    while digits[at] == 0 and length % iters[at].extent == 0:
        length //= iters[at].extent
        at -= 1
    left = iters[at].extent - digits[at]
    if length == left * 2:
        return start + f"where it wraps around {iters[at]} it moves by no single stride on one axis"
    return start + f"it wraps around {iters[at]} after {left} of {length}"
