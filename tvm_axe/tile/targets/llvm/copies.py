"""Copies and fills: loops over what lies inside of the tensors, by vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvm_axe.tile.nodes import Copy, Fill
from tvm_axe.tile.regions import Region
from tvm_axe.tile.strides import has_rows
from tvm_axe.tile.targets.llvm.atomics import join
from tvm_axe.tile.targets.llvm.conversions import compute_dtype, convert
from tvm_axe.tile.targets.llvm.transposes import transpose
from tvm_axe.tile.targets.llvm.writer import Writer, points

Span = tuple[Any, Any]


def write_fill(writer: Writer, node: Fill) -> None:
    """Set every element of the region."""
    value = convert(writer.expr(node.value), compute_dtype(node.dst.tile.dtype))
    dst = _Side(writer, node.dst)
    lanes = writer.plan.machine.lanes("float32")
    _points(writer, [dst], dst.inside(), lanes, lambda point: writer.store(node.dst.tile, dst.at(point), value))


def write_copy(writer: Writer, node: Copy) -> None:
    """Copy what lies inside of both sides; of what lies outside of the source, zeros."""
    dst, src = _Side(writer, node.dst), _Side(writer, node.src)
    dtype = compute_dtype(node.dst.tile.dtype)
    exact = node.src.tile.dtype == node.dst.tile.dtype

    def element(point: list[Any]) -> None:
        value = writer.load(node.src.tile, src.at(point))
        if node.atomic:
            join(writer, node.atomic, node.dst.tile, dst.at(point), convert(value, dtype))
        else:
            writer.store(node.dst.tile, dst.at(point), convert(value, dtype), exact=exact)

    def zero(point: list[Any]) -> None:
        writer.store(node.dst.tile, dst.at(point), tirx.const(0, dtype), exact=True)

    sides, lanes = [dst, src], 1 if node.atomic else writer.plan.machine.lanes("float32")
    whole = [(0, extent) for extent in node.dst.shape]
    across = None if node.atomic else _across(writer, dst, src)

    def all_of_it() -> None:
        if across is None:
            return _points(writer, sides, whole, lanes, element)
        rows, columns = node.dst.shape
        transpose(
            rows,
            columns,
            across,
            lambda r, c: convert(writer.load(node.src.tile, src.at([r, T.Ramp(c, 1, across)])), dtype),
            lambda r, c, v: writer.store(node.dst.tile, dst.at([T.Ramp(r, 1, across), c]), v, exact=exact),
        )
        below, beside = rows // across * across, columns // across * across
        _points(writer, sides, [(below, rows), (0, columns)], lanes, element)
        _points(writer, sides, [(0, below), (beside, columns)], lanes, element)
        return None

    complete = [side.complete for side in sides if side.complete is not None]
    if not complete:
        return all_of_it()
    with T.If(tirx.all(*complete)):
        with T.Then():
            all_of_it()
        with T.Else():
            if src.complete is not None and not node.atomic:
                _points(writer, [dst], dst.inside(), lanes, zero)
            _points(writer, sides, _common(dst.inside(), src.inside()), lanes, element)
    return None


class _Side:
    """A region as one side of a copy, whose dimensions are those of `Region.shape`.

    Attributes
    ----------
    complete : Expr or None
        The condition under which all of the region is inside of its tensor; None where that is proved.
    """

    def __init__(self, writer: Writer, region: Region) -> None:
        self.region = region
        self._start = writer.exprs(region.start)
        self._overruns = region.overruns(writer.analyzer) if region.tile.scope == "global" else ()
        ends = [self._start[dim] + region.extents[dim] <= region.tile.shape[dim] for dim in self._overruns]
        self.complete = tirx.all(*ends) if ends else None

    def at(self, point: Sequence[Any]) -> list[Any]:
        """The indices of the element at a point of the shape."""
        indices = list(self._start)
        for dim, offset in zip(self.region.dimensions, point):
            indices[dim] = _plus(indices[dim], offset)
        return indices

    def inside(self) -> list[Span]:
        """The part of the shape that is inside of the tensor: none of it where the region lies beside the tensor."""
        region = self.region
        spans: dict[int, Span] = {dim: (0, extent) for dim, extent in zip(region.dimensions, region.shape)}
        beside = [dim for dim in self._overruns if dim not in spans]
        for dim in self._overruns:
            if dim in spans:
                left = region.tile.shape[dim] - self._start[dim]
                spans[dim] = (0, T.Bind(T.max(T.min(left, region.extents[dim]), 0)))
        found = list(spans.values())
        if beside:
            inside = tirx.all(*(self._start[dim] < region.tile.shape[dim] for dim in beside))
            extent = found[0][1]
            nothing = 0 if isinstance(extent, int) else tirx.const(0, str(extent.ty))
            found[0] = (0, T.Bind(T.Select(inside, extent, nothing)))
        return found


def _across(writer: Writer, dst: _Side, src: _Side) -> int | None:
    """The lanes of vectors that a copy of two dimensions transposes by: from rows to panels of columns."""
    to, held = writer.plan.storage.get(dst.region.tile), writer.plan.storage.get(src.region.tile)
    if to is None or to.panel is None or len(dst.region.shape) != 2:
        return None
    if to.panel[0] != dst.region.dimensions[0] or src.region.dimensions[1] != len(src.region.tile.shape) - 1:
        return None
    if not (has_rows(src.region.tile) if held is None else held.contiguous(src.region.dimensions[1])):
        return None
    return writer.plan.machine.lanes(to.dtype)


def _points(writer: Writer, sides: Sequence[_Side], spans: Sequence[Span], lanes: int, element: Any) -> None:
    """The points of the spans, the dimension that vectors of the first side lie along innermost."""
    tile = sides[0].region.tile
    dimensions = sides[0].region.dimensions
    storages = [writer.plan.storage.get(side.region.tile) for side in sides]
    if any(storage is not None and storage.annotated for storage in storages):
        lanes = 1
    panel = storages[0].panel if storages[0] is not None else None
    last = len(tile.shape) - 1 if panel is None else panel[0]
    inner = dimensions.index(last) if last in dimensions else len(spans) - 1
    order = [dim for dim in range(len(spans)) if dim != inner] + [inner]
    width = panel[1] if panel is not None and last in dimensions else _panel_of(storages, sides)

    def body(point: list[Any]) -> None:
        element([point[order.index(dim)] for dim in range(len(spans))])

    points(writer, [spans[dim] for dim in order], lanes, body, width)


def _panel_of(storages: Sequence[Any], sides: Sequence[_Side]) -> int | None:
    """The width of the source's panels, where they lie along the last dimension."""
    for storage, side in zip(storages[1:], sides[1:]):
        if storage is not None and storage.panel is not None and storage.panel[0] == side.region.dimensions[-1]:
            return int(storage.panel[1])
    return None


def _common(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """The intersection of two boxes that start at 0."""
    return [(0, stop if stop is last else T.Bind(T.min(stop, last))) for (_, stop), (_, last) in zip(a, b)]


def _plus(start: Any, offset: Any) -> Any:
    if isinstance(offset, tirx.Ramp):
        return T.Ramp(start + offset.base, 1, offset.lanes)
    return offset if isinstance(start, (int, tirx.IntImm)) and int(start) == 0 else start + offset
