"""Blocks that run under a condition between their loops: each gets a nest of its own, and the condition goes into it.

    for i, j in grid(n, 8):                          for i, j in grid(n, 8):
        if taken[i] != -1:                               block p:
            block p: ..                      ->              if taken[i] != -1: ..
            block q: ..                              for i, j in grid(n, 8):
                                                         block q:
                                                             if taken[i] != -1: ..

Upstream's rules for GPUs bind such loops as they stand, and what is in front of a block isn't guarded by its predicate:
threads behind the last element would look at conditions that aren't there; or they leave the condition out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tvm import ir, s_tir, tirx

from tvm_axe.analysis.blocks import element, statements
from tvm_axe.analysis.expressions import loads_in, substitute, variables_of

__all__ = ["with_conditions_inside"]


class _Guarded(NamedTuple):
    """A block, the loops around it, and the conditions between them."""

    loops: tuple[tirx.For, ...]
    conditions: tuple[tirx.Expr, ...]
    realize: s_tir.SBlockRealize


class _Other(Exception):
    """There is something else than loops, conditions and blocks."""


def with_conditions_inside(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with blocks whose conditions are theirs; the same one if none has any, or one can't go inside.

    Parameters
    ----------
    func : PrimFunc
        A function of blocks.
    """
    root = func.body.block
    nests: list[tirx.Stmt] = []
    changed = False
    try:
        for stmt in statements(root.body):
            blocks = [*_blocks(stmt, (), ())]
            if any(each.conditions for each in blocks):
                _check_apart(blocks)
                changed = True
                nests += map(_inside, blocks)
            else:
                nests.append(stmt)
    except _Other:
        return func
    if not changed:
        return func
    body = nests[0] if len(nests) == 1 else tirx.SeqStmt(nests)
    block = s_tir.SBlock([], root.reads, root.writes, root.name_hint, body, alloc_buffers=root.alloc_buffers)
    return func.with_body(s_tir.SBlockRealize([], True, block))


def _blocks(stmt: tirx.Stmt, loops: tuple[tirx.For, ...], conditions: tuple[tirx.Expr, ...]) -> Iterator[_Guarded]:
    if isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.SERIAL and not stmt.annotations:
        yield from _blocks(stmt.body, (*loops, stmt), conditions)
    elif isinstance(stmt, tirx.SeqStmt):
        for each in stmt.seq:
            yield from _blocks(each, loops, conditions)
    elif isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None:
        yield from _blocks(stmt.then_case, loops, (*conditions, stmt.condition))
    elif isinstance(stmt, s_tir.SBlockRealize):
        yield _Guarded(loops, conditions, stmt)
    else:
        raise _Other


def _inside(own: _Guarded) -> tirx.Stmt:
    """The nest of a block with its conditions in it."""
    block = own.realize.block
    values = {value: each.var for each, value in zip(block.iter_vars, own.realize.iter_values)}
    bound = {loop.loop_var: values[loop.loop_var] for loop in own.loops if loop.loop_var in values}
    conditions = [substitute(each, bound) for each in own.conditions]
    if block.init is not None or any(variables_of(each) & _variables(own.loops) for each in conditions):
        raise _Other
    reads = [element(load.source, load.indices) for each in conditions for load in loads_in(each)]
    body = block.body
    for condition in reversed(conditions):
        body = tirx.IfThenElse(condition, body, None)
    inner = s_tir.SBlock(
        block.iter_vars, [*block.reads, *reads], block.writes, block.name_hint, body, None, block.alloc_buffers,
        block.match_buffers, block.annotations,
    )  # fmt: skip
    own_loops = {loop.loop_var: tirx.Var(loop.loop_var.name, loop.loop_var.ty) for loop in own.loops}
    places = [substitute(value, own_loops) for value in own.realize.iter_values]
    nest: tirx.Stmt = s_tir.SBlockRealize(places, substitute(own.realize.predicate, own_loops), inner)
    for loop in reversed(own.loops):
        first, extent = (substitute(each, own_loops) for each in (loop.min, loop.extent))
        nest = tirx.For(own_loops[loop.loop_var], first, extent, tirx.ForKind.SERIAL, nest)
    return nest


def _variables(loops: Sequence[tirx.For]) -> set[tirx.Var]:
    return {loop.loop_var for loop in loops}


def _check_apart(blocks: Sequence[_Guarded]) -> None:
    """Check that blocks may run one after the other: none touches what another, or a condition, is made of."""
    looked_at = [load.source for own in blocks for condition in own.conditions for load in loads_in(condition)]
    for own in blocks:
        others = [other.realize.block for other in blocks if other is not own]
        touched = [region for block in others for region in (*block.reads, *block.writes)]
        for region in own.realize.block.writes:
            if any(region.source.same_as(source) for source in looked_at):
                raise _Other
            if any(region.source.same_as(other.source) and not _differ(region, other) for other in touched):
                raise _Other


def _differ(one: ir.TensorRegion, other: ir.TensorRegion) -> bool:
    """Whether two regions of a buffer are at different numbers in some dimension."""
    return any(
        isinstance(mine.min, tirx.IntImm)
        and isinstance(theirs.min, tirx.IntImm)
        and all(isinstance(each.extent, tirx.IntImm) and int(each.extent) == 1 for each in (mine, theirs))
        and int(mine.min) != int(theirs.min)
        for mine, theirs in zip(one.region, other.region)
    )
