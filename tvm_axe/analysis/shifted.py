"""Maxima that exponentials are shifted by: whether it matters there that a maximum keeps a NaN.

A softmax takes from each element the largest of its row, and divides exponentials by their sum:

    m[i] = max(m[i], x[i, k])
    e[i, j] = exp(x[i, j] - m[i])
    s[i] = s[i] + e[i, k]
    y[i, j] = e[i, j] / s[i]

If one of x[i] is a NaN, so is its exponential, whatever m[i] is, and so is the sum. All that m[i] or e[i] goes into is
computed of s[i], too, by arithmetic that passes a NaN on, so the whole row is NaN with either maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe.analysis.blocks import all_blocks
from tvm_axe.analysis.expressions import alike, loads_in
from tvm_axe.analysis.patterns import joined

__all__ = ["sums_show_nan"]

_EXP = tirx.exp(tirx.Var("x", "float32")).op
_PASSING = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Cast, tirx.FloatImm, tirx.IntImm, tirx.Var)
_PASSING_CALLS = tuple(function(tirx.Var("x", "float32")).op for function in (tirx.exp, tirx.log, tirx.sqrt))


def sums_show_nan(func: tirx.PrimFunc) -> bool:
    """Return whether a function that nobody scheduled has maxima, and gives the same if they drop a NaN."""
    realized: list[s_tir.SBlockRealize] = []
    extremes: list[tirx.Expr] = []
    tvm_ffi.structural_walk(
        func.body, [(s_tir.SBlockRealize, realized.append), ((tirx.Max, tirx.Min), extremes.append)]
    )
    if not extremes or not all(isinstance(one.predicate, tirx.IntImm) and one.predicate.value for one in realized):
        return False
    blocks = [block for block in all_blocks(func.body) if block.iter_vars]
    if not all(isinstance(block.body, tirx.BufferStore) for block in blocks):
        return False
    if len({block.body.buffer for block in blocks}) != len(blocks):
        return False  # what is read isn't what was stored first
    peaks = [block for block in blocks if isinstance(block.body.value, tirx.Max)]
    if len(peaks) != len(extremes) or {peak.body.buffer for peak in peaks} & set(func.params):
        return False
    return all(_shows(set(func.params), blocks, peak) for peak in peaks)


def _shows(params: set[tirx.Var], blocks: Sequence[s_tir.SBlock], peak: s_tir.SBlock) -> bool:
    of = joined(peak, tirx.Max)
    rows = _rows(peak, of)
    if of is None or rows is None:
        return False
    x, m = of.source, peak.body.buffer
    if x in params and any(block.body.buffer.same_as(x) for block in blocks):
        return False  # the exponentials may be of others

    def is_exponential(value: tirx.Expr) -> bool:
        """Return whether it is exp(x[...] - m[...]) of an element and its row's maximum."""
        if not isinstance(value, ir.Call) or not value.op.same_as(_EXP) or not isinstance(value.args[0], tirx.Sub):
            return False
        a, b = value.args[0].a, value.args[0].b
        loads = all(isinstance(each, ir.TensorLoad) for each in (a, b))
        return loads and a.source.same_as(x) and b.source.same_as(m) and alike([a.indices[n] for n in rows], b.indices)

    exponentials = {
        block.body.buffer
        for block in blocks
        if is_exponential(block.body.value)
        and _is_whole(block)
        and alike(block.body.value.args[0].a.indices, block.body.indices)
    } - params
    sums: set[tirx.Expr] = set()
    for block in blocks:
        term = joined(block, tirx.Add)
        if term is None:
            continue
        term = term.value if isinstance(term, tirx.Cast) else term
        inside = term.args[0].a if is_exponential(term) else term
        known = is_exponential(term) or (isinstance(term, ir.TensorLoad) and term.source in exponentials)
        if known and _rows(block, inside) == rows:
            sums.add(block.body.buffer)

    def passes(block: s_tir.SBlock) -> bool:
        """Return whether what a block computes of a maximum or an exponential is NaN where the row's sum is."""
        loads = loads_in(block.body)
        own = [
            load.indices if load.source.same_as(m) else [load.indices[n] for n in rows]
            for load in loads
            if load.source.same_as(m) or load.source in exponentials
        ]
        total = [load.indices for load in loads if load.source in sums]
        return not own or (_passes(block.body.value) and all(any(alike(row, given) for given in total) for row in own))

    made = {m, *exponentials, *sums}
    return bool(sums) and all(passes(block) for block in blocks if block.body.buffer not in made)


def _rows(block: s_tir.SBlock, load: object) -> tuple[int, ...] | None:
    """Return which dimensions of a tensor a reduction leaves; None if it isn't one of all elements, in their order."""
    if not isinstance(load, ir.TensorLoad) or block.init is None:
        return None
    variables = [iterator.var for iterator in block.iter_vars]
    left = [iterator.var for iterator in block.iter_vars if iterator.iter_type == tirx.IterVar.DataPar]
    store = block.body
    if len(load.indices) != len(variables) or not alike(store.indices, left):
        return None
    places = [n for var in variables for n, index in enumerate(load.indices) if index.same_as(var)]
    if len(places) != len(variables):
        return None
    if not all(_goes_over(iterator, load.source.shape[place]) for iterator, place in zip(block.iter_vars, places)):
        return None
    rows = tuple(place for place, var in zip(places, variables) if any(var.same_as(each) for each in left))
    return rows if list(rows) == sorted(rows) else None


def _is_whole(block: s_tir.SBlock) -> bool:
    """Return whether a block stores each element of a tensor, its iterators being the indices."""
    store = block.body
    return alike(store.indices, [iterator.var for iterator in block.iter_vars]) and all(
        _goes_over(iterator, extent) for iterator, extent in zip(block.iter_vars, store.buffer.shape)
    )


def _goes_over(iterator: tirx.IterVar, extent: tirx.Expr) -> bool:
    return alike([iterator.dom.min, iterator.dom.extent], [tirx.const(0, iterator.dom.min.ty.dtype), extent])


def _passes(value: tirx.Expr) -> bool:
    """Return whether a NaN of any element is passed on to the result."""
    if isinstance(value, ir.TensorLoad):
        return True
    if isinstance(value, ir.Call):
        return any(value.op.same_as(op) for op in _PASSING_CALLS) and all(map(_passes, value.args))
    parts = [getattr(value, name) for name in ("a", "b", "value") if isinstance(getattr(value, name, None), tirx.Expr)]
    return isinstance(value, _PASSING) and all(map(_passes, parts))
