"""The compiler's own layouts, `tvm.tirx.TileLayout` and `ComposeLayout`, which know the axes of one device.

>>> from tvm_axe.layout import Layout
>>> tile = to_tile_layout(Layout.parse("S[(8, 4, 2) : (4@laneid, 1@laneid, 1)] + 3@warpid"))
>>> print(tile)
T.TileLayout(T.S[(8, 4, 2):(4 @ Axis.laneid, 1 @ Axis.laneid, 1)] + 3 @ Axis.warpid)
>>> print(from_tile_layout(tile))
S[(8, 4, 2) : (4@laneid, 1@laneid, 1)] + 3@warpid
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import THREAD_AXES, is_mesh_axis
from tvm_axe.layout.convert.expressions import from_expression, to_expression
from tvm_axe.layout.image import axes_of
from tvm_axe.layout.iters import Iter
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.swizzle import ComposeLayout

_INNERMOST_FIRST = ("thread", "warp", "warpgroup", "cta", "cluster")


def to_tile_layout(layout: Layout | ComposeLayout) -> Any:
    """Return the compiler's layout with the same D, R and O, and the same swizzle.

    Law: ``from_tile_layout(to_tile_layout(layout)) == layout``.

    Returns
    -------
    tvm.tirx.layout.TileLayout or tvm.tirx.layout.ComposeLayout

    Raises
    ------
    LayoutError
        If the layout names a mesh axis: the compiler knows none, and all of its operations refuse them. What lies on
        one device is ``layout.project(...)``. Or if its thread axes are not a chain of scopes, each within the last,
        such as warpid (of a warp in a block) and laneid (of a thread in a warp): the compiler refuses them, or, of bx
        with tx, never ends its check (0.27.0.post1).
    """
    from tvm.tirx import layout as tirx

    if isinstance(layout, ComposeLayout):
        tile = to_tile_layout(layout.tile_layout)
        return tirx.ComposeLayout(
            layout.per_element, layout.swizzle_len, layout.atom_len, tile, swizzle_inner=layout.swizzle_inner
        )
    for axis in axes_of(layout):
        if is_mesh_axis(axis):
            raise LayoutError(
                f"a TileLayout has thread and memory axes, and layout {layout} is on mesh axis {axis!r}; "
                "project it on the axes of a device"
            )
    _check_scopes(layout)
    offset = {axis: to_expression(amount) for axis, amount in layout.O.items()}
    return tirx.TileLayout.from_iters(_their_iters(layout.D), _their_iters(layout.R), offset)


def _check_scopes(layout: Layout) -> None:
    """Raise LayoutError unless the scopes of the thread axes are one chain, as the compiler wants them."""
    from tvm.tirx.layout import Axis

    named = [axis for axis in axes_of(layout) if axis in THREAD_AXES]
    scopes = {(Axis.get(axis).get_subscope().name, Axis.get(axis).get_scope().name) for axis in named}
    within = dict(scopes)
    scope = min(within, key=_INNERMOST_FIRST.index, default="")
    length = 0
    while scope in within and length <= len(scopes):
        scope, length = within[scope], length + 1
    if length != len(scopes):
        raise LayoutError(
            f"the thread axes of a TileLayout are a chain of scopes, such as warpid and laneid, and layout {layout} "
            f"has {', '.join(named)}"
        )


def _their_iters(iters: Iterable[Iter]) -> list[Any]:
    from tvm.tirx.layout import Iter as TheirIter

    return [TheirIter(to_expression(it.extent), to_expression(it.stride), it.axis) for it in iters]


def from_tile_layout(tile: Any) -> Layout | ComposeLayout:
    """Return the layout with the D, R and O of the compiler's, and its swizzle.

    Law: ``from_tile_layout(tile).apply(x)`` is ``tile.apply(x)``, and where there are replicas, which the compiler's
    `apply` leaves out, their points as well.

    Parameters
    ----------
    tile : tvm.tirx.layout.TileLayout or tvm.tirx.layout.ComposeLayout
        A layout whose extents and strides are integers or integer expressions.

    Raises
    ------
    LayoutError
        If `tile` is neither; or if it has a stride of 0, as the compiler's `broadcast` puts there: no element of a
        layout shares its place with another, copies are in R.
    """
    if hasattr(tile, "tile_layout"):
        inner = from_tile_layout(tile.tile_layout)
        if isinstance(inner, ComposeLayout):
            raise LayoutError(f"a swizzle is over a TileLayout, not over another swizzle: {tile}")
        bits = (int(tile.per_element), int(tile.swizzle_len), int(tile.atom_len))
        return ComposeLayout(*bits, inner, bool(tile.swizzle_inner))
    if not all(hasattr(tile, part) for part in ("shard", "replica", "offset")):
        raise LayoutError(f"tile must be a TileLayout or a ComposeLayout of tvm.tirx.layout, not {tile!r}")
    offset = {str(axis.name): from_expression("an offset", amount) for axis, amount in tile.offset.items()}
    return Layout(_iters(tile.shard), _iters(tile.replica), offset)


def _iters(iters: Iterable[Any]) -> list[Iter]:
    found = []
    for it in iters:
        extent, stride = from_expression("an extent", it.extent), from_expression("a stride", it.stride)
        # One step has no direction, and may have been given a stride of 0.
        found.append(Iter(extent, 1 if extent == 1 and stride == 0 else stride, str(it.axis.name)))
    return found
