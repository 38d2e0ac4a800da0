"""In what order blocks write and read: whether what is read has been written.

A block that stands under loops together with one that writes what it reads sees what these iterations have left, no
more: a sum that such a loop still goes on with isn't one yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import ir, tirx
from tvm.sym import (
    Analyzer,
    IntervalSet,
    detect_linear_equation,
    estimate_region_lower_bound,
    estimate_region_upper_bound,
)

from tvm_axe.analysis.blocks import NestedBlock, ranges_of, reads_of
from tvm_axe.analysis.expressions import substitute, uses

__all__ = ["begins_first", "reads_its_iteration", "reads_what_is_written", "shared_loops", "unfinished_loop"]


def shared_loops(first: NestedBlock, second: NestedBlock) -> list[tirx.For]:
    """Return the loops that stand around both blocks, outermost first."""
    return [loop for loop, other in zip(first.loops, second.loops) if loop.same_as(other)]


def unfinished_loop(writer: NestedBlock, reader: NestedBlock) -> tirx.For | None:
    """Return a loop around both blocks over which the reduction `writer` still goes on, or None."""
    pairs = list(zip(writer.block.iter_vars, writer.realize.iter_values))
    for loop in shared_loops(writer, reader):
        if any(iv.iter_type == tirx.IterVar.CommReduce and uses(value, loop.loop_var) for iv, value in pairs):
            return loop
    return None


def begins_first(nested: NestedBlock) -> bool:
    """Return whether the first iteration of a block is the one in which its reduction takes its initial value.

    That is the one in which all that it reduces over is at its least. Of a block that was moved to a loop which goes
    through that backwards it is the last, and what was summed before is lost.
    """
    first = {loop.loop_var: loop.min for loop in nested.loops}
    analyzer = Analyzer()
    return nested.block.init is None or all(
        analyzer.can_prove_equal(substitute(value, first), iterator.dom.min)
        for iterator, value in zip(nested.block.iter_vars, nested.realize.iter_values)
        if iterator.iter_type == tirx.IterVar.CommReduce
    )


def reads_its_iteration(writer: NestedBlock, reader: NestedBlock, buffer: tirx.Buffer) -> bool:
    """Return whether `reader` reads of `buffer` only elements that `writer` visits in the same iteration.

    The iteration is that of the loops around both. False also where that can't be seen: of an index that goes through
    them in another way than the writer's does, as a rolled one. Masks aren't looked at: they are the domains' own.
    """
    shared = shared_loops(writer, reader)
    written = _regions(writer, buffer, writer.block.writes)
    return len(written) == 1 and all(
        _goes_along(there.min, here, shared, (writer, reader))
        for region in _regions(reader, buffer, reads_of(reader.block))
        for there, here in zip(written[0], region)
    )


def _goes_along(
    written: tirx.Expr, read: ir.Range, shared: Sequence[tirx.For], blocks: tuple[NestedBlock, NestedBlock]
) -> bool:
    """Return whether an index that is read goes through the shared loops as the written one, and in its reach."""
    once = {
        loop.loop_var: loop.min for loop in shared if isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1
    }
    loops = [loop.loop_var for loop in shared if loop.loop_var not in once]
    written, first = substitute(written, once), substitute(read.min, once)
    parts = [detect_linear_equation(index, loops) for index in (written, first)] if loops else []
    if loops and not all(len(part) == len(loops) + 1 for part in parts):
        return False
    if loops and not tvm_ffi.structural_equal(list(parts[0])[:-1], list(parts[1])[:-1]):
        if any(not isinstance(step, tirx.IntImm) or int(step) for step in list(parts[0])[:-1]):
            return False
        parts = []
    rests = [part[len(loops)] for part in parts] or [written, first]
    bounds = []
    for rest, block in zip(rests, blocks):
        analyzer = Analyzer()
        for var, span in ranges_of(block.loops).items():
            analyzer.bind(var, span)
        bounds.append(analyzer.const_int_bound(analyzer.simplify(rest)))
    extent = int(read.extent) if isinstance(read.extent, tirx.IntImm) else None
    if extent is None:
        return False
    within = bounds[0].min_value <= bounds[1].min_value
    return bool(within and bounds[1].max_value + extent - 1 <= bounds[0].max_value)


def reads_what_is_written(writer: NestedBlock, reader: NestedBlock, buffer: tirx.Buffer) -> bool:
    """Return whether all that `reader` reads of `buffer` was written by `writer`, in the iterations around both.

    False also where that can't be seen. `writer` comes first.
    """
    if unfinished_loop(writer, reader) is not None:
        return False
    shared = shared_loops(writer, reader)
    analyzer = Analyzer()
    for loop in shared:
        analyzer.bind(loop.loop_var, ir.Range(0, loop.extent))
    written = _regions(writer, buffer, writer.block.writes)
    read = _regions(reader, buffer, reads_of(reader.block))
    if len(written) != 1:
        return False
    inside = estimate_region_lower_bound(*_bounds(writer, written[0], len(shared)))
    if inside is None:
        return False
    for region in read:
        outside = estimate_region_upper_bound(*_bounds(reader, region, len(shared)))
        for within, beyond in zip(inside, outside):
            if not (isinstance(within, IntervalSet) and isinstance(beyond, IntervalSet)):
                return False
            if not analyzer.can_prove(within.min_value <= beyond.min_value):
                return False
            if not analyzer.can_prove(beyond.max_value <= within.max_value):
                return False
    return True


def _regions(block: NestedBlock, buffer: tirx.Buffer, regions: Sequence[ir.TensorRegion]) -> list[list[ir.Range]]:
    """Return the regions of `buffer` among a block's, in loop variables."""
    bound = block.bound
    return [
        [ir.Range.from_min_extent(substitute(span.min, bound), span.extent) for span in region.region]
        for region in regions
        if region.source.same_as(buffer)
    ]


def _bounds(
    block: NestedBlock, region: list[ir.Range], shared: int
) -> tuple[list[ir.Range], dict[tirx.Var, ir.Range], tirx.Expr]:
    return region, ranges_of(block.loops[shared:]), block.realize.predicate
