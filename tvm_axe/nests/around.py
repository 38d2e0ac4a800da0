"""The pointwise blocks before and behind a contraction, which its schedule takes along."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.analysis.patterns import goes_on_with, is_pointwise, stays_small
from tvm_axe.schedule import query

__all__ = ["epilogue", "inline_made", "producer_of"]


def inline_made(sch: s_tir.Schedule) -> set[str]:
    """Inline what is made of parameters alone for pointwise blocks, such as a batch norm's factors; returns the names.

    A block in a contraction's nest may have no producer outside of it, and what LLVM sees to be the same for a tile it
    computes once.
    """
    taken = set()
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        stmt, readers = sch.get(block), sch.get_consumers(block)
        made = is_pointwise(stmt) and not sch.get_producers(block) and not query.is_parameter(sch, stmt.body.buffer)
        if not made or not readers:
            continue
        if not all(is_pointwise(sch.get(reader)) and stays_small(stmt, sch.get(reader)) for reader in readers):
            continue
        try:
            sch.compute_inline(block)
        except s_tir.ScheduleError:  # as of one that isn't written at its iterators alone
            continue
        taken.add(str(stmt.name_hint))
    return taken


def epilogue(sch: s_tir.Schedule, block: SBlockRV) -> list[SBlockRV]:
    """The pointwise blocks that follow one another from a block on, each the only reader of the one before."""
    found = [block]
    while len(readers := sch.get_consumers(found[-1])) == 1 and _follows(sch, readers[0], found[-1]):
        found.append(readers[0])
    return found[1:]


def _follows(sch: s_tir.Schedule, reader: SBlockRV, last: SBlockRV) -> bool:
    """Whether `reader` can go on with each element as `last` leaves it, and needs no other block for that."""
    buffer, stmt = sch.get(last).body.buffer, sch.get(reader)
    if query.is_parameter(sch, buffer) or not goes_on_with(stmt, buffer):
        return False
    # `reverse_compute_at` wants all of a block's producers in the nest.
    return len(stmt.body.indices) == len(stmt.iter_vars) and len(sch.get_producers(reader)) == 1


def producer_of(sch: s_tir.Schedule, block: SBlockRV, buffer: str) -> SBlockRV | None:
    """The pointwise block that makes an operand of parameters alone, which nothing else reads."""
    for producer in sch.get_producers(block):
        stmt = sch.get(producer)
        alone = len(sch.get_consumers(producer)) == 1 and not sch.get_producers(producer)
        if alone and is_pointwise(stmt) and str(stmt.body.buffer.name) == buffer:
            return producer
    return None
