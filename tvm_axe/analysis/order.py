"""In what order blocks write and read: whether what is read has been written.

A block that stands under loops together with one that writes what it reads sees what these iterations have left, no
more: a sum that such a loop still goes on with isn't one yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx
from tvm.sym import Analyzer, IntervalSet, estimate_region_lower_bound, estimate_region_upper_bound

from tvm_axe.analysis.blocks import NestedBlock, ranges_of
from tvm_axe.analysis.expressions import substitute, uses

__all__ = ["reads_what_is_written", "shared_loops", "unfinished_loop"]


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
    read = _regions(reader, buffer, reader.block.reads)
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
