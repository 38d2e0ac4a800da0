"""Seeing a layout through a shape: its iters cut, so that each dimension has some of its own, and reordered.

Source: Axe (arXiv:2601.19092), appendix B: the split and fuse rules (Lemma B.1, Corollary B.2) and Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cmp_to_key
from typing import TYPE_CHECKING

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, check_int
from tvm_axe.layout.iters import Iter, make_iter
from tvm_axe.layout.shapes import check_extents, show
from tvm_axe.layout.symbolic import Number, Symbolic

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout


def group(layout: Layout, shape: Sequence[Number]) -> tuple[Layout, list[int]]:
    """Cut D so that each dimension of `shape` has iters of its own.

    Law: the result has the same map, and for every dimension d the extents of ``D[seps[d]:seps[d + 1]]`` multiply to
    ``shape[d]``. Iters are cut, never merged or reordered; one of extent 1 is dropped, unless it is all that a
    dimension of extent 1 has. So ``layout.canonicalize().group(shape)`` has the fewest iters there are.

    >>> grouped, seps = Layout.parse("S[(4, 32) : (1@tp, 1)]").group((2, 16, 4))
    >>> print(grouped, seps)
    S[(2, 2, 8, 4) : (2@tp, 1@tp, 4, 1)] [0, 1, 3, 4]

    Parameters
    ----------
    shape : Sequence[int]
        The shape to see it through, which the layout must admit.

    Returns
    -------
    tuple[Layout, list[int]]
        The grouped layout, and the positions in D at which the dimensions start, with the length of D at the end.

    Raises
    ------
    LayoutError
        If the layout doesn't admit the shape, or a boundary between two dimensions falls inside an iter that it
        doesn't cut evenly.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), appendix B, Algorithm 1.
    """
    shape = check_extents(shape)
    if math.prod(shape) != layout.size():
        raise LayoutError(
            f"layout {layout} can not be grouped by {show(shape)}: it places {layout.size()} elements, "
            f"and the shape has {math.prod(shape)}"
        )
    shard: list[Iter] = []
    seps = [0]
    dim, rank = 0, len(shape)
    have: Number = 1  # of dimension `dim`: what the iters before have given, times what is left of this one
    for it in layout.D:
        extent, stride, axis = it.extent, it.stride, it.axis
        have *= extent
        while dim < rank and have % shape[dim] == 0:
            inner = have // shape[dim]
            if extent % inner != 0:
                raise _falls_inside(layout, shape, dim + 1, it)
            shard.append(it if inner == 1 and extent is it.extent else make_iter(extent // inner, stride * inner, axis))
            extent = have = inner
            dim += 1
            seps.append(len(shard))
        if extent != 1:
            if dim == rank:
                raise _falls_inside(layout, shape, dim, it)
            shard.append(it if extent is it.extent else make_iter(extent, stride, axis))
    for extent in shape[dim:]:
        if extent != 1:
            raise _falls_inside(layout, shape, len(seps), layout.D[-1])
        shard.append(make_iter(1, 1, LINEAR_MEMORY))
        seps.append(len(shard))
    return layout._regrouped(tuple(shard)), seps


def _falls_inside(layout: Layout, shape: Sequence[Number], dim: int, it: Iter) -> LayoutError:
    known = all(type(e) is int for e in (*shape, *(i.extent for i in layout.D)))
    return LayoutError(
        f"layout {layout} can not be grouped by {show(shape)}: the boundary before dimension {dim} falls inside {it}, "
        f"{'and' if known else 'and it was not proved that it'} {'does not cut' if known else 'cuts'} it evenly"
    )


def group_many(layout: Layout, shapes: Sequence[Sequence[Number]]) -> tuple[Layout, list[list[int]]]:
    """Cut D so that it is grouped by several shapes at once, at the boundaries of all of them.

    Law: the result has the same map, and for every k and d the extents of ``D[seps[k][d]:seps[k][d + 1]]`` multiply to
    ``shapes[k][d]``. A dimension of extent 1 has a unit iter of its own; the shapes share theirs where they can.

    >>> grouped, seps = Layout.parse("S[24 : 1]").group_many([(4, 6), (2, 1, 12)])
    >>> print(grouped, seps)
    S[(2, 1, 2, 6) : (12, 12, 6, 1)] [[0, 3, 4], [0, 1, 2, 4]]

    Parameters
    ----------
    shapes : Sequence[Sequence[int]]
        At least one shape; the layout must admit each.

    Returns
    -------
    tuple[Layout, list[list[int]]]
        The grouped layout, and for each shape the positions in D at which its dimensions start, with the length of D.

    Raises
    ------
    LayoutError
        If there is no shape, the layout doesn't admit one, or two boundaries have no common refinement: neither of the
        products before them divides the other.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), appendix B; by several shapes at once as `tvm.tirx` has it.
    """
    if isinstance(shapes, str) or not isinstance(shapes, Sequence) or not shapes:
        raise LayoutError(f"shapes must be a sequence of at least one shape, such as [(4, 6), (8, 3)], not {shapes!r}")
    checked = [check_extents(shape, f"shapes[{k}]") for k, shape in enumerate(shapes)]
    for k, shape in enumerate(checked):
        if not shape or math.prod(shape) != layout.size():
            raise LayoutError(
                f"layout {layout} places {layout.size()} elements, and shapes[{k}] = {show(shape)} has "
                f"{math.prod(shape) if shape else 'no dimension'}"
            )
    sequences = [_boundaries(extents) for extents in (*checked, tuple(it.extent for it in layout.D) or (1,))]
    found: dict[Number, int] = {}
    for sequence in sequences:
        for boundary in dict.fromkeys(sequence):
            found[boundary] = max(found.get(boundary, 0), sequence.count(boundary))
    try:
        ordered = sorted(found, key=cmp_to_key(_before))
    except LayoutError as error:
        shown = " and ".join(map(show, checked))
        raise LayoutError(f"layout {layout} can not be grouped by {shown}: {error}") from None
    common = [boundary for boundary in ordered for _ in range(found[boundary])]
    starts = {boundary: common.index(boundary) for boundary in ordered}
    *places, cuts = [_places(sequence, starts, found, len(common)) for sequence in sequences]
    shard = []
    for it, first, last in zip(layout.D or (make_iter(1, 1, LINEAR_MEMORY),), cuts, cuts[1:]):
        for place in range(first, last):
            extent, inner = common[place + 1] // common[place], common[last] // common[place + 1]
            shard.append(make_iter(extent, it.stride * inner, it.axis))
    return layout._regrouped(tuple(shard)), places


def _boundaries(extents: Sequence[Number]) -> list[Number]:
    """Return the products of the first 0, 1, 2, ... extents."""
    products: list[Number] = [1]
    for extent in extents:
        products.append(products[-1] * extent)
    return products


def _before(a: Number, b: Number) -> int:
    """Order two boundaries, of which the one before divides the one after."""
    if a == b:
        return 0
    if b % a == 0:
        return -1
    if a % b == 0:
        return 1
    raise LayoutError(
        f"of the products before two boundaries, neither {a} nor {b} divides the other, as far as is known"
    )


def _places(sequence: list[Number], starts: dict[Number, int], counts: dict[Number, int], length: int) -> list[int]:
    """Return where the boundaries of one shape stand among all, those of unit dimensions one after the other."""
    seen: dict[Number, int] = dict.fromkeys(starts, 0)
    places = []
    for boundary in sequence:
        places.append(starts[boundary] + seen[boundary])
        seen[boundary] += 1
    # What a shape doesn't cut at the two ends belongs to its first and its last dimension.
    last = sequence[-1]
    places[-1] = starts[last] + counts[last] - 1
    return places


def permute(layout: Layout, shape: Sequence[Number], order: Sequence[int]) -> Layout:
    """Return the layout of the tensor with its dimensions in another order, every element where it was.

    Law: ``permuted.apply(*(i[d] for d in order), shape=[shape[d] for d in order]) == layout.apply(*i, shape=shape)``.

    >>> print(Layout.parse("S[(4, 8) : (1@tp, 1)]").permute((4, 8), (1, 0)))
    S[(8, 4) : (1, 1@tp)]

    Parameters
    ----------
    shape : Sequence[int]
        The tensor's shape.
    order : Sequence[int]
        The dimensions in their new order.

    Raises
    ------
    LayoutError
        If `group` refuses the shape, or `order` doesn't name every dimension once.
    """
    grouped, seps = layout.group(shape)
    return permute_by_groups(grouped, seps, order)


def permute_dims(layout: Layout, perm: Sequence[int]) -> Layout:
    """Return the layout with the iters of D in another order.

    Law: iter k of the result's D is iter ``perm[k]`` of the layout's.

    >>> print(Layout.parse("S[(4, 8, 2) : (1@tp, 2, 1)]").permute_dims((1, 0, 2)))
    S[(8, 4, 2) : (2, 1@tp, 1)]

    Raises
    ------
    LayoutError
        If `perm` doesn't name every iter once.
    """
    order = _check_order("perm", perm, len(layout.D), "iter of D")
    return layout._regrouped(tuple(layout.D[k] for k in order))


def permute_by_groups(layout: Layout, seps: Sequence[int], perm: Sequence[int]) -> Layout:
    """Return the layout with groups of D's iters in another order.

    Law: the iters are those of ``D[seps[g]:seps[g + 1]]`` for g in `perm`.

    >>> grouped, seps = Layout.parse("S[(4, 8, 2) : (1@tp, 2, 1)]").group((4, 16))
    >>> print(grouped.permute_by_groups(seps, (1, 0)))
    S[(8, 2, 4) : (2, 1, 1@tp)]

    Parameters
    ----------
    seps : Sequence[int]
        The positions in D where the groups start, with the length of D at the end, as `group` returns them.
    perm : Sequence[int]
        The groups in their new order.

    Raises
    ------
    LayoutError
        If `seps` doesn't cut D into groups, or `perm` doesn't name every group once.
    """
    cuts = [check_int(f"seps[{k}]", sep, 0) for k, sep in enumerate(seps)]
    if not cuts or cuts != sorted(cuts) or cuts[0] != 0 or cuts[-1] != len(layout.D):
        raise LayoutError(f"seps must ascend from 0 to the {len(layout.D)} iters of D, in {layout}, not {list(seps)}")
    order = _check_order("perm", perm, len(cuts) - 1, "group")
    return layout._regrouped(tuple(it for g in order for it in layout.D[cuts[g] : cuts[g + 1]]))


def _check_order(what: str, order: Sequence[int], count: int, of: str) -> list[int]:
    if isinstance(order, (str, Symbolic)) or not isinstance(order, Sequence) or sorted(order) != list(range(count)):
        raise LayoutError(f"{what} must name every {of} once, from 0 to {count - 1}, not {order!r}")
    return list(order)
