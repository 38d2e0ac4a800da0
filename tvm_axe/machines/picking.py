"""A sum of which one term counts is that term.

A gather from several places is said as a sum over them, of which a condition leaves one::

    D[r] = sum over s of if_then_else(place[r] == s, X[s, r], 0)
    D[r] = if_then_else(0 <= place[r] < S, X[place[r], r], 0)      # the same

So nobody loops over places, and the guard stays around the load. A sum whose one iterator goes is no sum any more: its
element is the term itself, also if that is -0.0, of which a sum that starts from 0 makes +0.0. Both are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm import s_tir, tirx

from tvm_axe.analysis.blocks import element, nested_blocks
from tvm_axe.analysis.expressions import is_choice, is_zero, loads_in, substitute, uses
from tvm_axe.analysis.patterns import REDUCE, added

__all__ = ["picked"]


def picked(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function without the loops over terms of which a condition leaves one.

    The condition is that an expression, which doesn't depend on the loop, equals its variable; others may be beside it.

    Parameters
    ----------
    func : PrimFunc
        A function of blocks.
    """
    root = func.body.block
    body = _picked(root.body)
    if body.same_as(root.body):
        return func
    block = s_tir.SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, root.alloc_buffers,
        root.match_buffers, root.annotations,
    )  # fmt: skip
    return func.with_body(s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, block))


def _picked(stmt: tirx.Stmt) -> tirx.Stmt:
    if isinstance(stmt, tirx.SeqStmt):
        parts = [_picked(part) for part in stmt.seq]
        same = all(part.same_as(old) for part, old in zip(parts, stmt.seq))
        return stmt if same else tirx.SeqStmt(parts)
    if not isinstance(stmt, tirx.For):
        return stmt
    blocks = nested_blocks(stmt)
    realize = blocks[0].realize if len(blocks) == 1 else None
    if realize is not None and stmt.kind == tirx.ForKind.SERIAL and (rest := _without(stmt, realize)) is not None:
        return _picked(_replaced(stmt.body, rest))
    body = _picked(stmt.body)
    if body.same_as(stmt.body):
        return stmt
    return tirx.For(
        stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations, stmt.step
    )


def _replaced(stmt: tirx.Stmt, realize: s_tir.SBlockRealize) -> tirx.Stmt:
    """The loops of a statement that is one block's with this one in it."""
    if not isinstance(stmt, tirx.For):
        return realize
    return tirx.For(
        stmt.loop_var, stmt.min, stmt.extent, stmt.kind, _replaced(stmt.body, realize), stmt.thread_binding,
        stmt.annotations, stmt.step,
    )  # fmt: skip


def _without(loop: tirx.For, realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize | None:
    """The block without the loop, whose terms are 0 but for one; None if they aren't."""
    block = realize.block
    number = _iterator(loop, realize)
    term = None if number is None else added(block)
    if number is None or term is None:
        return None
    store = block.body
    iterator = block.iter_vars[number].var
    if any(load.source.same_as(store.buffer) for load in loads_in(term)):
        return None
    left = _left(term, iterator, int(loop.extent))
    if left is None:
        return None
    iterators = [iv for n, iv in enumerate(block.iter_vars) if n != number]
    values = [value for n, value in enumerate(realize.iter_values) if n != number]
    summed = any(iv.iter_type == REDUCE for iv in iterators)
    value = tirx.Add(tirx.BufferLoad(store.buffer, store.indices), left) if summed else left
    body, init = tirx.BufferStore(store.buffer, value, store.indices), block.init if summed else None
    reads = [element(load.source, load.indices) for load in loads_in(left)]
    made = s_tir.SBlock(iterators, reads, block.writes, block.name_hint, body, init, annotations=block.annotations)
    return s_tir.SBlockRealize(values, realize.predicate, made)


def _iterator(loop: tirx.For, realize: s_tir.SBlockRealize) -> int | None:
    """Which of the block's iterators the loop runs through, a sum's, from 0 on and for nothing else; None if none."""
    block = realize.block
    if block.match_buffers or block.alloc_buffers or uses(realize.predicate, loop.loop_var):
        return None
    driven = [n for n, value in enumerate(realize.iter_values) if uses(value, loop.loop_var)]
    if len(driven) != 1 or not realize.iter_values[driven[0]].same_as(loop.loop_var):
        return None
    iterator = block.iter_vars[driven[0]]
    spans = [(loop.min, loop.extent), (iterator.dom.min, iterator.dom.extent)]
    if not all(is_zero(first) and isinstance(extent, tirx.IntImm) for first, extent in spans):
        return None
    same = int(loop.extent) == int(iterator.dom.extent)
    return driven[0] if same and iterator.iter_type == REDUCE else None


def _left(term: tirx.Expr, var: tirx.Var, extent: int) -> tirx.Expr | None:
    """What a sum of a term over `var` from 0 to `extent` is, if one of them alone may be other than 0."""
    if isinstance(term, tirx.Cast):
        inner = _left(term.value, var, extent)
        return None if inner is None else tirx.Cast(str(term.ty), inner)
    if not is_choice(term) or not is_zero(term.args[2]):
        return None
    condition, value, zero = term.args
    parts = _joined(condition)
    picks = [(n, place) for n, part in enumerate(parts) if (place := _equal(part, var)) is not None]
    if not picks:
        # What chooses may be an element that is there under this condition alone, so it must be the same for all.
        inner = None if uses(condition, var) else _left(value, var, extent)
        return None if inner is None else tirx.if_then_else(condition, inner, zero)
    number, place = picks[0]
    inside = tirx.And(tirx.LE(tirx.const(0, str(place.ty)), place), tirx.LT(place, tirx.const(extent, str(place.ty))))
    guards = [inside if n == number else part for n, part in enumerate(parts) if n == number or not uses(part, var)]
    # The others may load what is there for a number from 0 to `extent` alone: they are asked within the guard.
    within = [substitute(part, {var: place}) for n, part in enumerate(parts) if n != number and uses(part, var)]
    value = substitute(value, {var: place})
    if within:
        value = tirx.if_then_else(functools.reduce(tirx.And, within), value, zero)
    return tirx.if_then_else(functools.reduce(tirx.And, guards), value, zero)


def _joined(condition: tirx.Expr) -> Sequence[tirx.Expr]:
    """The conditions that all hold where this one does."""
    if isinstance(condition, tirx.And):
        return [*_joined(condition.a), *_joined(condition.b)]
    return [condition]


def _equal(condition: tirx.Expr, var: tirx.Var) -> tirx.Expr | None:
    """What a condition says that the variable equals, without the variable in it; None if it says something else."""
    if not isinstance(condition, tirx.EQ):
        return None
    for one, other in ((condition.a, condition.b), (condition.b, condition.a)):
        if one.same_as(var) and not uses(other, var):
            return other
    return None
