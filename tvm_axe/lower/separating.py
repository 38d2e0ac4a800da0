"""Separate: a nest of several blocks becomes a nest for each of them, which do the same one after another.

What one kernel can't do, because a barrier would have to stand inside it or because it communicates over two mesh axes,
several can. ::

    for i: P[i] = .. ; Q[i] = 2 * P[i]   ->   for i: P[i] = ..
                                              for i: Q[i] = 2 * P[i]

Blocks that went on in turn then go on one after the other, which is the same where each element that one leaves to
another has one value all along, and has it when it is read.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from tvm_axe.analysis.blocks import NestedBlock, nested_blocks
from tvm_axe.analysis.elements import one_to_one
from tvm_axe.analysis.expressions import substitute, variables_of
from tvm_axe.analysis.order import reads_what_is_written
from tvm_axe.analysis.patterns import REDUCE, SPATIAL

__all__ = ["separated"]


def separated(nest: tirx.Stmt) -> list[tirx.Stmt] | None:
    """Return a nest for each block of `nest`, in their order; None where they aren't seen to do the same."""
    blocks = nested_blocks(nest)
    if len(blocks) < 2 or not all(map(_is_closed, blocks)):
        return None
    if not all(_can_follow(later, first) for at, later in enumerate(blocks) for first in blocks[:at]):
        return None
    return [part for block in blocks if (part := _alone(nest, block.realize)) is not None]


def _is_closed(block: NestedBlock) -> bool:
    """Whether the block is one store whose bindings and mask are in variables of its loops."""
    own = {loop.loop_var for loop in block.loops}
    used = variables_of([*block.realize.iter_values, block.realize.predicate])
    return isinstance(block.block.body, tirx.BufferStore) and used <= own


def _can_follow(later: NestedBlock, first: NestedBlock) -> bool:
    """Whether `later` may do all of its iterations behind all of `first`'s."""
    given, taken = first.block.body.buffer, later.block.body.buffer
    if given.same_as(taken) or _reads(first, taken):
        return False
    return not _reads(later, given) or (_has_one_value(first) and reads_what_is_written(first, later, given))


def _has_one_value(block: NestedBlock) -> bool:
    """Whether an element has the same value whenever the block stores it: that of the one point that it is of."""
    kinds = {iv.iter_type for iv in block.block.iter_vars}
    extents = {iv.var: int(iv.dom.extent) for iv in block.block.iter_vars if iv.iter_type == SPATIAL}
    if not kinds <= {SPATIAL, REDUCE} or not one_to_one(block.block.body, extents):
        return False
    return block.block.init is not None if REDUCE in kinds else not _reads(block, block.block.body.buffer)


def _reads(block: NestedBlock, buffer: tirx.Buffer) -> bool:
    return any(region.source.same_as(buffer) for region in block.block.reads)


def _alone(stmt: tirx.Stmt, realize: s_tir.SBlockRealize) -> tirx.Stmt | None:
    """The nest with no block but one, in loops of its own."""
    if isinstance(stmt, tirx.For):
        body = _alone(stmt.body, realize)
        if body is None:
            return None
        var = tirx.Var(stmt.loop_var.name, stmt.loop_var.ty)  # a variable is one loop's
        body = substitute(body, {stmt.loop_var: var})
        return tirx.For(var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations)
    if isinstance(stmt, tirx.SeqStmt):
        return next((part for part in (_alone(each, realize) for each in stmt.seq) if part is not None), None)
    return stmt if stmt.same_as(realize) else None
