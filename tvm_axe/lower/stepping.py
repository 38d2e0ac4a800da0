"""Step: a loop around what devices exchange becomes a nest for each of its iterations.

A loop that carries state from step to step is one nest, and a nest is one kernel, in which no barrier stands. Where a
step reads what other devices wrote in the one before, each step is a nest of its own, in front of which copies can
stand::

    for t: for i: U[t + 1, i] = U[t, i - 1] + U[t, i + 1]   ->   for i: U[1, i] = U[0, i - 1] + U[0, i + 1]
                                                                 for i: U[2, i] = U[1, i - 1] + U[1, i + 1]
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from tvm import s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import NestedBlock, nested_blocks
from tvm_axe.analysis.expressions import substitute, uses
from tvm_axe.analysis.patterns import SPATIAL

__all__ = ["MOST", "in_steps"]

MOST = 256
"""Nests that a loop becomes at most: each is compiled by itself."""


def in_steps(nest: tirx.Stmt) -> list[tirx.Stmt] | None:
    """Return the iterations of a nest's outermost loop as nests, in their order, each as the nests of its body.

    None where the loop is none of steps: it says something of devices or chunks, isn't serial, is of no known extent,
    or a block sums over it; and where these would be more than `MOST`.
    """
    if not isinstance(nest, tirx.For) or nest.annotations or nest.kind != tirx.ForKind.SERIAL:
        return None
    if not isinstance(nest.extent, tirx.IntImm) or not isinstance(nest.min, tirx.IntImm):
        return None
    blocks, body = nested_blocks(nest), nest.body
    parts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    if int(nest.extent) * len(parts) > MOST or not all(_steps(block, nest.loop_var) for block in blocks):
        return None
    first = int(nest.min)
    return [
        _of_step(substitute(part, {nest.loop_var: tirx.IntImm(str(nest.loop_var.ty), step)}), step)
        for step in range(first, first + int(nest.extent))
        for part in parts
    ]


def _steps(block: NestedBlock, loop: tirx.Var) -> bool:
    """Whether a loop drives no iterator of the block but data-parallel ones."""
    pairs = zip(block.block.iter_vars, block.realize.iter_values)
    return all(iterator.iter_type == SPATIAL for iterator, value in pairs if uses(value, loop))


def _of_step(part: tirx.Stmt, step: int) -> tirx.Stmt:
    """The part of one step: its blocks named for it, in variables of their own."""
    own = _tvm.structural_map(
        part, [(tirx.For, _own_variable), (s_tir.SBlockRealize, lambda realize: _own_block(realize, step))]
    )
    return _tvm.structural_map(own, [(kind, functools.partial(_folded, fold)) for kind, fold in _FOLDED.items()])


_FOLDED = {tirx.Add: operator.add, tirx.Sub: operator.sub, tirx.Mul: operator.mul}


def _folded(fold: Callable[[tirx.Expr, tirx.Expr], tirx.Expr], expr: tirx.Expr) -> tirx.Expr:
    """A number for an operation on two integers."""
    known = isinstance(expr.a, tirx.IntImm) and isinstance(expr.b, tirx.IntImm)
    return fold(expr.a, expr.b) if known else expr


def _own_variable(loop: tirx.For) -> tirx.For:
    var = tirx.Var(loop.loop_var.name, loop.loop_var.ty)
    body = substitute(loop.body, {loop.loop_var: var})
    return tirx.For(var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)


def _own_block(realize: s_tir.SBlockRealize, step: int) -> s_tir.SBlockRealize:
    """A block without the iterators that are a number in its step."""
    block = realize.block
    replaced: dict[tirx.Var, tirx.Expr] = {}
    left: list[tuple[tirx.IterVar, tirx.Expr]] = []
    for iterator, value in zip(block.iter_vars, realize.iter_values):
        if isinstance(value, tirx.IntImm):
            replaced[iterator.var] = value
            continue
        var = tirx.Var(iterator.var.name, iterator.var.ty)
        replaced[iterator.var] = var
        left.append((tirx.IterVar(iterator.dom, var, iterator.iter_type), value))
    kept = s_tir.SBlock(
        [iterator for iterator, _ in left],
        [substitute(region, replaced) for region in block.reads],
        [substitute(region, replaced) for region in block.writes],
        f"{block.name_hint}_{step}",
        substitute(block.body, replaced),
        None if block.init is None else substitute(block.init, replaced),
        annotations=dict(block.annotations),
    )
    return s_tir.SBlockRealize([value for _, value in left], realize.predicate, kept)
