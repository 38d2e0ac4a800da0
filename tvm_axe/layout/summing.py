"""Direct sums: two layouts side by side in the domain, their points added without scaling; and taking one apart.

Source: Axe (arXiv:2601.19092), appendix F.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm_axe.errors import LayoutError
from tvm_axe.layout.iters import Iter, make_iter, merge_shard
from tvm_axe.layout.shapes import check_extents, check_same_rank, show
from tvm_axe.layout.symbolic import Number
from tvm_axe.layout.tiling import split_blocks

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout


def direct_sum(layout: Layout, left: Layout, left_shape: Sequence[Number], right_shape: Sequence[Number]) -> Layout:
    """Return `left` + this layout over the tiles of a tensor: as `tile`, but without scaling.

    Law: the points of element ``l * right_shape + r`` (dimension by dimension) of the shape
    ``left_shape * right_shape`` are all p + q with p in ``left.apply(*l, shape=left_shape)`` and q in
    ``layout.apply(*r, shape=right_shape)``. The result is in canonical form.

    >>> right = Layout.parse("S[(4, 8) : (8, 1)]")
    >>> print(right.direct_sum(Layout.parse("S[(2, 2) : (64, 32)] + 5"), (2, 2), (4, 8)))
    S[(2, 4, 2, 8) : (64, 8, 32, 1)] + 5

    Parameters
    ----------
    left : Layout
        The layout of the tiles.
    left_shape, right_shape : Sequence[int]
        The tiles, and the elements of one, in each dimension; as many dimensions each.

    Raises
    ------
    LayoutError
        If the shapes' dimensions differ in number, a layout can't be grouped by its shape, or a coordinate of the
        result may exceed 64 bits.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), appendix F.1 and F.2, Proposition F.1.
    """
    left_extents, right_extents = check_extents(left_shape, "left_shape"), check_extents(right_shape, "right_shape")
    check_same_rank(left_shape=left_extents, right_shape=right_extents)
    a, a_seps = left.canonicalize().group(left_extents)
    b, b_seps = layout.canonicalize().group(right_extents)
    shard: list[Iter] = []
    for dim in range(len(left_extents)):
        shard += a.D[a_seps[dim] : a_seps[dim + 1]]
        shard += b.D[b_seps[dim] : b_seps[dim + 1]]
    offset = {axis: a.O[axis] + b.O[axis] for axis in {*a.O, *b.O}}
    return layout._like(merge_shard(tuple(shard)), (*a.R, *b.R), offset).canonicalize()


def is_direct_sum_right(
    layout: Layout, sum_layout: Layout, interleaved_shape: Sequence[Number], right_shape: Sequence[Number]
) -> Layout | None:
    """Return a left addend with which `direct_sum` makes `sum_layout` of this layout, or None if there is none.

    Law: ``layout.direct_sum(result, left_shape, right_shape).equivalent(sum_layout)``, with `left_shape` the even
    dimensions of `interleaved_shape`. Its D and O are the only ones; its R need not be, as sets of copies that differ
    can add up to the same. Where copies of the two addends meet, none may be found although there is one.

    >>> left, right = Layout.parse("S[(2, 2) : (64, 32)]"), Layout.parse("S[(4, 8) : (8, 1)]")
    >>> print(right.is_direct_sum_right(right.direct_sum(left, (2, 2), (4, 8)), (2, 4, 2, 8), (4, 8)))
    S[4 : 32]

    Parameters
    ----------
    sum_layout : Layout
        The layout to take apart.
    interleaved_shape : Sequence[int]
        The shapes of the addends by turns: left[0], right[0], left[1], right[1], ...
    right_shape : Sequence[int]
        The shape of this layout.

    Raises
    ------
    LayoutError
        If `interleaved_shape` doesn't have `right_shape` in its odd dimensions, or this layout can't be grouped by it.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), appendix F.4, what direct sums are recognized for.
    """
    left_shape = _other_half(layout, "right_shape", interleaved_shape, right_shape, own=1)
    found = _subtract(layout, sum_layout, left_shape, check_extents(right_shape, "right_shape"), own=1)
    if found is None or not layout.direct_sum(found, left_shape, right_shape).equivalent(sum_layout):
        return None
    return found


def is_direct_sum_left(
    layout: Layout, sum_layout: Layout, interleaved_shape: Sequence[Number], left_shape: Sequence[Number]
) -> Layout | None:
    """Return a right addend of which `direct_sum` with this layout makes `sum_layout`, or None if there is none.

    Law: ``result.direct_sum(layout, left_shape, right_shape).equivalent(sum_layout)``, with `right_shape` the odd
    dimensions of `interleaved_shape`. Its D and O are the only ones; its R need not be, nor
    need it be found where copies meet, as in `is_direct_sum_right`.

    >>> left, right = Layout.parse("S[(2, 2) : (64, 32)]"), Layout.parse("S[(4, 8) : (8, 1)]")
    >>> print(left.is_direct_sum_left(right.direct_sum(left, (2, 2), (4, 8)), (2, 4, 2, 8), (2, 2)))
    S[32 : 1]

    Parameters
    ----------
    sum_layout : Layout
        The layout to take apart.
    interleaved_shape : Sequence[int]
        The shapes of the addends by turns: left[0], right[0], left[1], right[1], ...
    left_shape : Sequence[int]
        The shape of this layout.

    Raises
    ------
    LayoutError
        If `interleaved_shape` doesn't have `left_shape` in its even dimensions, or this layout can't be grouped by it.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), appendix F.4, as `is_direct_sum_right`.
    """
    right_shape = _other_half(layout, "left_shape", interleaved_shape, left_shape, own=0)
    found = _subtract(layout, sum_layout, check_extents(left_shape, "left_shape"), right_shape, own=0)
    if found is None or not found.direct_sum(layout, left_shape, right_shape).equivalent(sum_layout):
        return None
    return found


def _other_half(
    layout: Layout, what: str, interleaved_shape: Sequence[Number], shape: Sequence[Number], own: int
) -> tuple[Number, ...]:
    """Return the other addend's dimensions, or raise LayoutError if `shape` isn't every second one from `own` on."""
    interleaved, extents = check_extents(interleaved_shape, "interleaved_shape"), check_extents(shape, what)
    if len(interleaved) != 2 * len(extents) or interleaved[own::2] != extents:
        raise LayoutError(
            f"interleaved_shape must have {what} = {show(extents)} in its {('even', 'odd')[own]} dimensions, counted "
            f"from 0, and as many others between them, not {show(interleaved)}"
        )
    layout.canonicalize().group(extents)
    return interleaved[1 - own :: 2]


def _subtract(
    layout: Layout,
    sum_layout: Layout,
    left_shape: tuple[Number, ...],
    right_shape: tuple[Number, ...],
    own: int,
) -> Layout | None:
    """Return what is left of a sum without one addend, of which the blocks from `own` on are; None if they are not."""
    blocks = split_blocks(sum_layout, left_shape, right_shape)
    mine, seps = layout.canonicalize().group((left_shape, right_shape)[own])
    if blocks is None or any(
        merge_shard(block) != merge_shard(mine.D[start:stop])
        for block, start, stop in zip(blocks[own::2], seps, seps[1:])
    ):
        return None
    total = sum_layout.canonicalize()
    replica = list(total.R)
    for it in mine.R:
        if not _take(replica, it):
            return None
    offset = {axis: total.O[axis] - mine.O[axis] for axis in {*total.O, *mine.O}}
    rest = merge_shard(tuple(it for block in blocks[1 - own :: 2] for it in block))
    return layout._like(rest, replica, offset)


def _take(replica: list[Iter], gone: Iter) -> bool:
    """Take one run out of the runs of a sum, in which it stands as it is or was absorbed; whether it was there."""
    if gone in replica:
        replica.remove(gone)
        return True
    for k, it in enumerate(replica):
        if it.axis != gone.axis or gone.stride % it.stride != 0:
            continue
        times = gone.stride // it.stride
        if times == 1 and it.extent % gone.extent == 0:
            replica[k] = make_iter(it.extent // gone.extent, it.stride * gone.extent, it.axis)
            return True
        left = it.extent - times * (gone.extent - 1)
        if left >= max(times, 1):
            replica[k] = make_iter(left, it.stride, it.axis)
            return True
    return False
