"""Which terms of a reduction, and which rows that are looked up, are a device's own to count.

What several devices have is counted by one of them, and what none but another has by that one: the others leave the
combiner's identity in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm import s_tir, tirx

from tvm_axe.analysis.patterns import REDUCE
from tvm_axe.layout.shares import Share
from tvm_axe.lower.numbering import Iterated
from tvm_axe.lower.told import table

__all__ = ["counted", "holds", "masked", "owns"]

_IDENTITIES = {"sum": 0, "prod": 1}
"""What a term becomes that another device counts. That a maximum is taken of one twice changes nothing."""


def masked(
    body: tirx.Stmt, combiner: str | None, term: tirx.Expr, condition: tirx.Expr, identity: int = 0
) -> tirx.Stmt:
    """The store of a term, or of a reduction with it, that has the identity in its place where a condition fails."""
    chosen = tirx.if_then_else(condition, term, tirx.const(identity, str(term.ty)))
    if combiner is None:
        return tirx.BufferStore(body.buffer, chosen, body.indices)
    sides = [chosen if side.same_as(term) else side for side in (body.value.a, body.value.b)]
    return tirx.BufferStore(body.buffer, type(body.value)(*sides), body.indices)


def holds(rank: tirx.Var, index: tirx.Expr, share: Share) -> tirx.Expr:
    """Whether an index is the device's own; one out of range is the first's or the last's."""
    (run,), dtype, last = share.runs, str(index.ty), share.devices - 1
    starts = [(start + owned) * run.inner for start, owned in zip(run.starts, run.owned())]
    stops = [(start + run.size) * run.inner for start in run.starts]
    cast = rank if str(rank.ty) == dtype else tirx.Cast(dtype, rank)
    above = tirx.Or(cast <= tirx.const(0, dtype), index >= table(rank, starts, dtype))
    stop = table(rank, [number - stops[0] for number in stops], dtype) + tirx.const(stops[0], dtype)
    return tirx.And(above, tirx.Or(cast >= tirx.const(last, dtype), index < stop))


def counted(
    rank: tirx.Var, body: tirx.Stmt, combiner: str, term: tirx.Expr, block: s_tir.SBlock, pieces: Sequence[Iterated]
) -> tirx.Stmt:
    """The body of a reduction that leaves out the terms that are another device's, though this one has them too."""
    if combiner not in _IDENTITIES:
        return body
    conditions = []
    for piece, iv in zip(pieces, block.iter_vars):
        if iv.iter_type == REDUCE and not piece.share.is_whole and any(any(run.owned()) for run in piece.share.runs):
            conditions.append(owns(rank, piece.var, piece.share))
    if not conditions:
        return body
    return masked(body, combiner, term, functools.reduce(tirx.And, conditions), _IDENTITIES[combiner])


def owns(rank: tirx.Var, index: tirx.Expr, share: Share) -> tirx.Expr:
    """Whether one of the indices that a device holds, counted among these, is its own."""
    dtype = str(index.ty)
    found: tirx.Expr = tirx.IntImm("bool", 1)
    for run, (_, begin) in reversed(list(zip(share.runs, share.begins()))):
        at = (index - tirx.const(begin, dtype)) // tirx.const(run.inner, dtype) % tirx.const(run.size, dtype)
        owned = table(rank, run.owned(), dtype)
        inside = tirx.GE(at, owned) if any(run.owned()) else tirx.IntImm("bool", 1)
        last = tirx.LT(index, tirx.const(begin + run.local, dtype))
        found = tirx.Or(tirx.And(last, inside), tirx.And(tirx.Not(last), found)) if len(share.runs) > 1 else inside
    return found
