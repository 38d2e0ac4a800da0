"""Tiling: a layout repeated by another, as the Kronecker product repeats a matrix; and taking such a product apart.

Source: Axe (arXiv:2601.19092), section 3.3 and appendices C and D.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from tvm_axe.errors import LayoutError
from tvm_axe.layout.image import axes_of, span
from tvm_axe.layout.iters import Iter, make_iter, merge_shard
from tvm_axe.layout.shapes import check_extents, check_same_rank, show
from tvm_axe.layout.symbolic import Number

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout


def tile(layout: Layout, outer: Layout, outer_shape: Sequence[Number], inner_shape: Sequence[Number]) -> Layout:
    """Return the layout of a tensor of tiles: `outer` places the tiles, this layout the elements in each.

    Law: with w[a] the span of this layout on axis a, the points of element ``o * inner_shape + i`` (dimension by
    dimension) of the shape ``outer_shape * inner_shape`` are all p * w + q, axis by axis, with p in
    ``outer.apply(*o, shape=outer_shape)`` and q in ``layout.apply(*i, shape=inner_shape)``. So D, R and O of the outer
    layout are all scaled, and tiles never overlap where the outer layout's points differ. The result is in canonical
    form.

    >>> lanes = Layout.parse("S[(8, 4, 2) : (4@laneid, 1@laneid, 1)]")
    >>> print(lanes.tile(Layout.parse("S[(2, 2) : (1@warpid, 1)] + R[2 : 2@warpid] + 1"), (2, 2), (8, 8)))
    S[(2, 8, 2, 4, 2) : (1@warpid, 4@laneid, 2, 1@laneid, 1)] + R[2 : 2@warpid] + 2

    Parameters
    ----------
    outer : Layout
        The layout of the tiles.
    outer_shape, inner_shape : Sequence[int]
        The tiles, and the elements of one, in each dimension; as many dimensions each.

    Raises
    ------
    LayoutError
        If the shapes' dimensions differ in number, a layout can't be grouped by its shape, or a coordinate of the
        result may exceed 64 bits.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), appendix C, Algorithm 2 and Theorem C.2.
    """
    outer_extents, inner_extents = check_extents(outer_shape, "outer_shape"), check_extents(inner_shape, "inner_shape")
    check_same_rank(outer_shape=outer_extents, inner_shape=inner_extents)
    a, a_seps = outer.canonicalize().group(outer_extents)
    b, b_seps = layout.canonicalize().group(inner_extents)
    spans = {axis: span(b, axis) for axis in axes_of(b)}
    scaled = _scale(a.D, spans)
    shard: list[Iter] = []
    for dim in range(len(outer_extents)):
        shard += scaled[a_seps[dim] : a_seps[dim + 1]]
        shard += b.D[b_seps[dim] : b_seps[dim + 1]]
    offset = dict(b.O.items())
    for axis, amount in a.O.items():
        offset[axis] = offset.get(axis, 0) + amount * spans.get(axis, 1)
    return layout._like(merge_shard(tuple(shard)), (*_scale(a.R, spans), *b.R), offset).canonicalize()


def _scale(iters: Sequence[Iter], factors: dict[str, Number]) -> list[Iter]:
    return [make_iter(it.extent, it.stride * factors[it.axis], it.axis) if it.axis in factors else it for it in iters]


def tile_to(layout: Layout, to_shape: Sequence[Number], current_shape: Sequence[Number]) -> Layout:
    """Return the layout repeated through linear memory until it fills a larger shape, its tiles row-major.

    Law: ``layout.tile(grid, n, current_shape)``, with n the tiles in each dimension and `grid` row-major in them.

    >>> print(Layout.parse("S[(2, 4) : (1@laneid, 1)]").tile_to((4, 8), (2, 4)))
    S[(2, 2, 8) : (8, 1@laneid, 1)]

    Parameters
    ----------
    to_shape, current_shape : Sequence[int]
        The shape to fill, and the shape the layout places.

    Raises
    ------
    LayoutError
        If `current_shape` doesn't divide `to_shape` in each dimension; or as `tile`.
    """
    to, current = check_extents(to_shape, "to_shape"), check_extents(current_shape, "current_shape")
    check_same_rank(to_shape=to, current_shape=current)
    grid = divide_shape("to_shape", to, "current_shape", current)
    steps: list[Iter] = []
    stride: Number = 1
    for extent in reversed(grid):
        steps.append(make_iter(extent, stride, "m"))
        stride *= extent
    return layout.tile(layout._like(tuple(reversed(steps)), (), {}), grid, current)


def is_tile_inner(
    layout: Layout, tile_layout: Layout, tiled_shape: Sequence[Number], inner_shape: Sequence[Number]
) -> Layout | None:
    """Return the outer layout with which `tile` makes `tile_layout` of this layout, or None if there is none.

    Law: ``layout.tile(result, tiled_shape / inner_shape, inner_shape).equivalent(tile_layout)``; its D is the only one.

    >>> inner, outer = Layout.parse("S[(2, 4) : (4, 1)]"), Layout.parse("S[(2, 2) : (1@tp, 1)]")
    >>> print(inner.is_tile_inner(inner.tile(outer, (2, 2), (2, 4)), (4, 8), (2, 4)))
    S[(2, 2) : (1@tp, 1)]

    Parameters
    ----------
    tile_layout : Layout
        The layout to take apart.
    tiled_shape, inner_shape : Sequence[int]
        The shape of `tile_layout`, and the shape of one tile.

    Raises
    ------
    LayoutError
        If `inner_shape` doesn't divide `tiled_shape`, or this layout can't be grouped by `inner_shape`.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), appendix D. Algorithm 3 looks for the inner iters in the canonical ones, where an
    outer one may have been merged with them; here those are grouped by the interleaved shape first.
    """
    tiled, inner = check_extents(tiled_shape, "tiled_shape"), check_extents(inner_shape, "inner_shape")
    check_same_rank(tiled_shape=tiled, inner_shape=inner)
    grid = divide_shape("tiled_shape", tiled, "inner_shape", inner)
    mine, mine_seps = layout.canonicalize().group(inner)
    blocks = split_blocks(tile_layout, grid, inner)
    if blocks is None or any(
        merge_shard(block) != merge_shard(mine.D[mine_seps[d] : mine_seps[d + 1]])
        for d, block in enumerate(blocks[1::2])
    ):
        return None
    spans = {axis: span(mine, axis) for axis in axes_of(mine)}
    shard = _unscale([it for block in blocks[::2] for it in block], spans)
    coarse, _ = _part_replicas(tile_layout, spans)
    replica = None if coarse is None else _unscale(coarse, spans)
    offset = {}
    whole, start = tile_layout.canonicalize().O, layout.canonicalize().O
    for axis in {*whole, *start}:
        moved, width = whole[axis] - start[axis], spans.get(axis, 1)
        if moved % width != 0:
            return None
        offset[axis] = moved // width
    if shard is None or replica is None:
        return None
    outer = layout._like(merge_shard(tuple(shard)), replica, offset)
    return outer if layout.tile(outer, grid, inner).equivalent(tile_layout) else None


def is_tile_outer(
    layout: Layout, tile_layout: Layout, tiled_shape: Sequence[Number], outer_shape: Sequence[Number]
) -> Layout | None:
    """Return the inner layout of which `tile` with this layout makes `tile_layout`, or None if there is none.

    Law: ``result.tile(layout, outer_shape, tiled_shape / outer_shape).equivalent(tile_layout)``; its D is the only one.
    (Spans multiply, so the inner layout's are known before it is.)

    >>> inner, outer = Layout.parse("S[(2, 4) : (4, 1)]"), Layout.parse("S[(2, 2) : (1@tp, 1)]")
    >>> print(outer.is_tile_outer(inner.tile(outer, (2, 2), (2, 4)), (4, 8), (2, 2)))
    S[8 : 1]

    Parameters
    ----------
    tile_layout : Layout
        The layout to take apart.
    tiled_shape, outer_shape : Sequence[int]
        The shape of `tile_layout`, and the number of tiles in each dimension.

    Raises
    ------
    LayoutError
        If `outer_shape` doesn't divide `tiled_shape`, or this layout can't be grouped by `outer_shape`.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), after appendix D, which has the outer factor alone.
    """
    tiled, grid = check_extents(tiled_shape, "tiled_shape"), check_extents(outer_shape, "outer_shape")
    check_same_rank(tiled_shape=tiled, outer_shape=grid)
    inner = divide_shape("tiled_shape", tiled, "outer_shape", grid)
    layout.canonicalize().group(grid)
    blocks = split_blocks(tile_layout, grid, inner)
    if blocks is None:
        return None
    spans = {}
    for axis in axes_of(tile_layout):
        whole, own = span(tile_layout, axis), span(layout, axis)
        if whole % own != 0:
            return None
        spans[axis] = whole // own
    coarse, fine = _part_replicas(tile_layout, spans)
    if coarse is None:
        return None
    whole_offset, own_offset = tile_layout.canonicalize().O, layout.canonicalize().O
    offset = {a: whole_offset[a] - own_offset[a] * spans.get(a, 1) for a in {*whole_offset, *own_offset}}
    shard = merge_shard(tuple(it for block in blocks[1::2] for it in block))
    found = layout._like(shard, fine, offset)
    return found if found.tile(layout, grid, inner).equivalent(tile_layout) else None


def divide_shape(what: str, shape: tuple[Number, ...], by: str, parts: tuple[Number, ...]) -> tuple[Number, ...]:
    """Return the quotients of two shapes, or raise LayoutError that names both arguments."""
    for dim, (extent, part) in enumerate(zip(shape, parts)):
        if extent % part != 0:
            raise LayoutError(
                f"{by} must divide {what} in every dimension, and {part} does not divide {extent} in dimension {dim} "
                f"of {show(parts)} and {show(shape)}"
            )
    return tuple(extent // part for extent, part in zip(shape, parts))


def split_blocks(layout: Layout, outer: Sequence[Number], inner: Sequence[Number]) -> list[tuple[Iter, ...]] | None:
    """Return the iters of D that stand for outer[0], inner[0], outer[1], ... or None if it can't be grouped so."""
    interleaved = [extent for pair in zip(outer, inner) for extent in pair]
    try:
        grouped, seps = layout.canonicalize().group(interleaved)
    except LayoutError:
        return None
    return [grouped.D[start:stop] for start, stop in pairwise(seps)]


def _unscale(iters: Sequence[Iter], factors: dict[str, Number]) -> list[Iter] | None:
    """Return the iters with strides divided, without unit iters; None where one can't be divided."""
    divided = []
    for it in iters:
        factor = factors.get(it.axis, 1)
        if it.extent == 1:
            continue
        if it.stride % factor != 0:
            return None
        divided.append(make_iter(it.extent, it.stride // factor, it.axis))
    return divided


def _part_replicas(layout: Layout, spans: dict[str, Number]) -> tuple[list[Iter] | None, list[Iter]]:
    """Part the replicas of a tiled layout into those between tiles and those within one, which is `spans` wide.

    A run that goes beyond a tile in steps smaller than one was absorbed from a run within and one between; (None, ...)
    if no tile can end where one does.
    """
    coarse: list[Iter] = []
    fine: list[Iter] = []
    for it in layout.canonicalize().R:
        width = spans.get(it.axis, 1)
        if it.stride % width == 0:
            coarse.append(it)
        elif it.stride * (it.extent - 1) < width:
            fine.append(it)
        elif width % it.stride == 0 and it.extent % (width // it.stride) == 0:
            within = width // it.stride
            fine.append(make_iter(within, it.stride, it.axis))
            coarse.append(make_iter(it.extent // within, width, it.axis))
        else:
            return None, []
    return coarse, fine
