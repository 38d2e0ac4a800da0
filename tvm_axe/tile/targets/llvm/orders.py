"""Order within the lines of a tile: their first elements and places, and sums up to each element, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvm_axe.tile import keys
from tvm_axe.tile.nodes import Scan, Sort
from tvm_axe.tile.regions import Region
from tvm_axe.tile.targets.llvm.conversions import compute_dtype, convert
from tvm_axe.tile.targets.llvm.writer import Writer, nest


def write_sort(writer: Writer, node: Sort) -> None:
    """Emit the first elements of each line, by its keys (`tvm_axe.tile.keys`)."""
    src, results = _Lines(writer, node.src, node.axis), []
    for region in node.results:
        results.append((region, _Lines(writer, region, len(region.extents) - 1 if node.keeps_axis else None)))
    with nest(src.spans) as line:
        held = T.alloc_buffer((node.length,), keys.KEY, scope="local")
        with T.serial(node.length) as at:
            value = writer.load(node.src.tile, src.at(line, at))
            T.buffer_store(held, keys.key(node, value, T.Cast("int32", at)), [at])

        def give(number: Any, found: Any) -> None:
            for region, lines in results:
                is_values = region is node.values
                dtype = compute_dtype(region.tile.dtype)
                value = keys.element(node, found, dtype) if is_values else keys.place(found)
                writer.store(region.tile, lines.at(line, number), value)

        if keys.by_passes(node):
            _by_passes(node, held, give)
        else:
            _by_network(node.length, held)
            with T.serial(node.count) as number:
                give(number, T.Bind(held[number]))


def _by_passes(node: Sort, held: Any, give: Any) -> None:
    """Each result is the largest key that is less than the one before."""
    best = T.alloc_buffer((node.count,), keys.KEY, scope="local")
    for number in range(node.count):
        T.buffer_store(best, keys.least(), [number])
        with T.serial(node.length) as at:
            found = held[at]
            if number:
                found = tirx.Select(found < best[number - 1], found, keys.least())
            T.buffer_store(best, T.max(best[number], found), [number])
        give(number, best[number])


def _by_network(length: int, held: Any) -> None:
    for half, mirrored in keys.stages(length):
        with T.serial(keys.pairs(length)) as number:
            front, back = keys.pair(number, half, mirrored)
            with T.If(back < length), T.Then():
                a, b = T.Bind(held[front]), T.Bind(held[back])
                T.buffer_store(held, T.max(a, b), [front])
                T.buffer_store(held, T.min(a, b), [back])


def write_scan(writer: Writer, node: Scan) -> None:
    """Emit the sums of each line, one after the other."""
    src = _Lines(writer, node.src, node.axis)
    dst = _Lines(writer, node.dst, _matching(node))
    length, dtype = node.src.extents[node.axis], compute_dtype(node.dst.tile.dtype)
    with nest(src.spans) as line:
        total = T.alloc_buffer((1,), dtype, scope="local")
        T.buffer_store(total, tirx.const(0, dtype), [0])
        with T.serial(length) as step:
            at = length - 1 - step if node.reverse else step
            before = T.Bind(total[0])
            value = convert(writer.load(node.src.tile, src.at(line, at)), dtype)
            after = T.Bind(before + value)
            T.buffer_store(total, after, [0])
            writer.store(node.dst.tile, dst.at(line, at), before if node.exclusive else after)


def _matching(node: Scan) -> int | None:
    """The dimension of `dst` that is the axis of `src`; None if the axis has one element, and perhaps no dimension."""
    wide = [d for d, extent in enumerate(node.src.extents) if extent != 1]
    own = [d for d, extent in enumerate(node.dst.extents) if extent != 1]
    return own[wide.index(node.axis)] if node.axis in wide else None


class _Lines:
    """A region as lines along an axis; without one, or where it has one element, each line is an element.

    Attributes
    ----------
    spans : list of (int, int)
        The lines, a span for each other dimension that has an extent.
    """

    def __init__(self, writer: Writer, region: Region, axis: int | None) -> None:
        self._start, self._axis = writer.exprs(region.start), axis
        self._kept = [d for d, extent in enumerate(region.extents) if d != axis and extent != 1]
        self.spans = [(0, region.extents[d]) for d in self._kept]

    def at(self, line: Sequence[Any], along: Any) -> list[Any]:
        """The indices of an element of the tile."""
        indices = list(self._start)
        for dimension, step in zip(self._kept, line, strict=True):
            indices[dimension] = indices[dimension] + step
        if self._axis is not None:
            indices[self._axis] = indices[self._axis] + along
        return indices
