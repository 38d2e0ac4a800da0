"""Which results are partial where devices do a share of a reduction each: what is linear in partial sums is one."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx

from tvm_axe.analysis.accesses import LeafBlock
from tvm_axe.analysis.expressions import is_choice, is_float, loads_in

__all__ = ["partial_buffers"]


def partial_buffers(
    blocks: Sequence[LeafBlock],
    reducing: set[int],
    spatial: set[int],
    combiner: str,
    given: Sequence[tirx.Buffer],
) -> list[tirx.Buffer] | None:
    """Return the buffers whose values of all devices make the true ones, by `combiner`; None where others are spoiled.

    Parameters
    ----------
    blocks : Sequence[LeafBlock]
        All blocks.
    reducing : set[int]
        The numbers of those whose reduction is shared.
    spatial : set[int]
        The numbers of those whose iterations are shared in another way.
    combiner : str
        What the reductions combine with.
    given : Sequence[Buffer]
        The buffers that hold something before, whole on every device.
    """
    return _carried(blocks, reducing, spatial, combiner, given, [])


def carries_terms(blocks: Sequence[LeafBlock], source: tirx.Buffer, targets: Sequence[tirx.Buffer]) -> bool:
    """Return whether a function of terms of a sum is terms of the function of the sum: whether it is linear in it.

    Parameters
    ----------
    blocks : Sequence[LeafBlock]
        All blocks of the function.
    source : Buffer
        The parameter that devices have terms of; all others are whole on every device.
    targets : Sequence[Buffer]
        What the function writes.
    """
    found = _carried(blocks, set(), set(), "sum", [], [source])
    return found is not None and all(_among(target, found) for target in targets)


def _carried(
    blocks: Sequence[LeafBlock],
    reducing: set[int],
    spatial: set[int],
    combiner: str,
    given: Sequence[tirx.Buffer],
    terms: Sequence[tirx.Buffer],
) -> list[tirx.Buffer] | None:
    """Return the buffers with terms where some have, and where reductions leave some; None where others are spoiled."""
    partial: list[tirx.Buffer] = [*terms]
    makers = set(reducing)
    before = -1
    while before != (before := len(partial) + len(makers)):
        partial += [b for k in makers for b in blocks[k].written if not _among(b, partial)]
        for k, block in enumerate(blocks):
            if _reads(block, partial):
                if k in reducing or k in spatial or not _follows(block, partial, combiner):
                    return None
                makers.add(k)
    # A buffer that is also written in another way, or held something before, would count that on every device.
    others = [b for k, block in enumerate(blocks) if k not in makers for b in block.written]
    return None if any(_among(b, others) or _among(b, given) for b in partial) else partial


def _among(buffer: object, buffers: Sequence[tirx.Buffer]) -> bool:
    return any(other.same_as(buffer) for other in buffers)


def _reads(block: LeafBlock, partial: Sequence[tirx.Buffer]) -> bool:
    """Return whether a block reads one of `partial`; of a reduction's own result, which it goes on with, not."""
    own = block.written if block.combiner else []
    return any(not a.is_store and _among(a.buffer, partial) and not _among(a.buffer, own) for a in block.accesses)


def _follows(block: LeafBlock, partial: Sequence[tirx.Buffer], combiner: str) -> bool:
    """Return whether a block's result is partial if what it reads is."""
    if block.value is None:
        return False
    if combiner != "sum":  # of these only a copy is
        return block.combiner is None and isinstance(_bare(block.value), ir.TensorLoad)
    return block.combiner in (None, "sum") and _degree(block.value, partial) == 1


def _bare(expr: tirx.Expr) -> tirx.Expr:
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return expr


def _degree(expr: tirx.Expr, partial: Sequence[tirx.Buffer]) -> int | None:
    """Return 0 if `expr` reads nothing partial, 1 if it is linear with no constant term, None if neither."""
    if not any(_among(load.source, partial) for load in loads_in(expr)):
        return 0
    if isinstance(expr, ir.TensorLoad):
        inside = [_degree(index, partial) for index in expr.indices]
        return 1 if not any(degree != 0 for degree in inside) else None
    if isinstance(expr, tirx.Cast):
        return _degree(expr.value, partial) if is_float(expr) else None
    if isinstance(expr, tirx.Select):
        return _choice([expr.condition, expr.true_value, expr.false_value], partial)
    if is_choice(expr):
        return _choice(list(expr.args), partial)
    if isinstance(expr, (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div)):
        a, b = _degree(expr.a, partial), _degree(expr.b, partial)
        if isinstance(expr, (tirx.Add, tirx.Sub)):
            return 1 if a == b == 1 else None
        if isinstance(expr, tirx.Mul):
            return 1 if (a, b) in ((0, 1), (1, 0)) else None
        return 1 if (a, b) == (1, 0) and is_float(expr) else None  # an integer's quotient is rounded
    return None


def _choice(parts: Sequence[tirx.Expr], partial: Sequence[tirx.Buffer]) -> int | None:
    condition, *values = parts
    kept = [value for value in values if not (isinstance(value, ir.Constant) and float(value.value) == 0)]
    fits = _degree(condition, partial) == 0 and all(_degree(value, partial) == 1 for value in kept)
    return 1 if fits else None
