"""Loops of 64-bit numbers that are to be partitioned count in 32 bits.

Relax has extents of int64. Upstream narrows their loops to int32 before it partitions those that have a hint, but what
it has made of the hint by then keeps the name of the loop's old variable. So no loop of a Relax model was partitioned,
and where a tile doesn't divide the rows, every operand of every tile had a condition: 197 tokens took 1.4 times as long
as 198. Functions with a hint are narrowed before anything else instead, if all their wide numbers are indices that fit.
"""

from __future__ import annotations

from math import prod

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from tvm_axe.analysis.sizes import unknown_extents
from tvm_axe.machines.registry import backend_of

__all__ = ["HINT", "narrow_loops"]

HINT = "pragma_loop_partition_hint"
"""The annotation of a loop that upstream takes apart where a condition in it changes."""

_WIDE = ("int64", "uint64")
_LIMIT = 1 << 31
_GROWING = (tirx.IntImm, tirx.Add, tirx.Sub, tirx.Mul, tirx.Cast, ir.Call)


@tirx.transform.prim_func_pass(opt_level=0)
def narrow_loops(func: tirx.PrimFunc, _mod: ir.IRModule, _context: ir.transform.PassContext) -> tirx.PrimFunc:
    """The pass that gives a host's function with a hint numbers of int32, where those of int64 are indices alone."""
    target = func.attrs.get("target") if func.attrs else None
    if target is not None and not backend_of(target).on_host:
        return func
    loops: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, loops.append))
    hinted = any(HINT in loop.annotations and str(loop.loop_var.ty) in _WIDE for loop in loops)
    if not hinted or unknown_extents(func) or not _fits(func, loops):
        return func
    (narrow,) = tirx.transform.ForceNarrowIndexToInt32()(ir.IRModule({"main": func})).functions.values()
    return narrow


def _fits(func: tirx.PrimFunc, loops: list[tirx.For]) -> bool:
    """Whether no wide number is an element of a buffer, and none that is computed is larger than int32 holds."""
    blocks: list[s_tir.SBlock] = []
    numbers: list[tirx.Expr] = []

    def on_number(number: tirx.Expr) -> None:
        if str(number.ty) in _WIDE:
            numbers.append(number)

    tvm_ffi.structural_walk(func.body, [(s_tir.SBlock, blocks.append), *((kind, on_number) for kind in _GROWING)])
    buffers = [param for param in func.params if tirx.is_buffer_var(param)]
    scalars = [param for param in func.params if not tirx.is_buffer_var(param)]
    buffers += [buffer for block in blocks for buffer in block.alloc_buffers]
    if any(str(buffer.dtype) in _WIDE or prod(map(int, buffer.shape)) >= _LIMIT for buffer in buffers):
        return False
    if any(str(param.ty) in _WIDE for param in scalars):
        return False
    analyzer = Analyzer()
    for loop in loops:
        analyzer.bind(loop.loop_var, Range.from_min_extent(loop.min, loop.extent))
    for block in blocks:
        for iterator in block.iter_vars:
            analyzer.bind(iterator.var, iterator.dom)
    bounds = map(analyzer.const_int_bound, numbers)
    return all(bound.min_value >= -_LIMIT and bound.max_value < _LIMIT for bound in bounds)
