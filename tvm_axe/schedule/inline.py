"""Fewer nests: what only renames or combines elements is computed where it is read.

``LegalizeOps`` writes a linear layer as a transpose, a matmul and an addition, and an activation as up to six nests.
After `inline_pointwise` the transpose of a weight is a matter of indices, and what follows a matmul up to the next one
is one nest, its *epilogue*.
"""

from __future__ import annotations

from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.analysis.patterns import is_pointwise, loads_of

# x * f(x) reads x twice; in a chain of such nests the reads, and the inlined expression, would double each time.
_MAX_READS = 32


def inline_pointwise(sch: s_tir.Schedule) -> None:
    """Inline each block of ``main`` that renames elements, or that is pointwise and has one reader, pointwise too.

    Last blocks first, so that a chain is folded into its last block. What is returned is always computed as it is.
    """
    for block in reversed(sch.get_child_blocks(sch.get_sblock("root"))):
        consumers = sch.get_consumers(block)
        if not consumers or not is_pointwise(sch.get(block)):
            continue
        if not _is_renaming(sch.get(block)) and not (len(consumers) == 1 and _can_take(sch, consumers[0], block)):
            continue
        try:
            sch.compute_inline(block)
        except s_tir.ScheduleError:
            continue  # as for a block whose result is returned too; it stays a nest of its own, which is always valid


def _is_renaming(block: s_tir.SBlock) -> bool:
    """Return whether `block` is ``B[i, j] = A[j, i]``, ``B[i, j] = A[j]`` or the like: only indices."""
    load = block.body.value
    return isinstance(load, ir.TensorLoad) and all(isinstance(i, tirx.Var | tirx.IntImm) for i in load.indices)


def _can_take(sch: s_tir.Schedule, reader: SBlockRV, block: SBlockRV) -> bool:
    """Return whether `reader` may compute what `block` does wherever it reads it."""
    if not is_pointwise(sch.get(reader)):
        return False
    stmt = sch.get(block)
    times = len(loads_of(sch.get(reader), stmt.body.buffer))
    reads = sum(len(loads_of(stmt, region.source)) for region in stmt.reads)
    return times * reads <= _MAX_READS
