"""Loops that upstream is told to take apart, and would take apart wrongly, stay whole.

Upstream's partition of loops, which a hint asks for (`tvm_axe.machines.narrowing`), finds where in a loop a comparison
changes, and makes a loop of each part.

- Where one iteration is left, it puts an int32 in the place of the loop's variable, and fails if that has 64 bits.
- Where the place depends on what is around the loop, as that of ``j <= i - 20`` in a loop over j within one over i,
  it takes it to lie within the loop: of row 0 it wrote 20 places in front of the row, and of the tensor.

Such loops have their hint taken; the condition that the last vector isn't whole is in all of their iterations then.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import variables_of
from tvm_axe.machines.narrowing import HINT

__all__ = ["whole_loops"]

_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


@tirx.transform.prim_func_pass(opt_level=0)
def whole_loops(func: tirx.PrimFunc, _mod: ir.IRModule, _context: ir.transform.PassContext) -> tirx.PrimFunc:
    """The pass that takes the hint of loops that upstream would take apart wrongly."""
    loops: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, loops.append))
    hinted = [loop for loop in loops if HINT in loop.annotations]
    made = _behind_iterators(func) if hinted else {}
    whole = {loop.loop_var for loop in hinted if str(loop.loop_var.ty) != "int32" or _is_compared(loop, made)}

    def without_hint(loop: tirx.For) -> tirx.For:
        if loop.loop_var not in whole:
            return loop
        annotations = {name: value for name, value in loop.annotations.items() if name != HINT}
        own = loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding
        return tirx.For(loop.loop_var, *own, annotations, loop.step)

    return func.with_body(_tvm.structural_map(func.body, (tirx.For, without_hint))) if whole else func


def _behind_iterators(func: tirx.PrimFunc) -> dict[tirx.Var, set[tirx.Var]]:
    """The loops' variables, or parameters, that each block's iterators are made of."""
    made: dict[tirx.Var, set[tirx.Var]] = {}

    def on_block(realize: s_tir.SBlockRealize) -> None:
        for iterator, value in zip(realize.block.iter_vars, realize.iter_values):
            made[iterator.var] = {source for var in variables_of(value) for source in made.get(var, {var})}

    tvm_ffi.structural_walk(func.body, (s_tir.SBlockRealize, on_block), order="pre")
    return made


def _is_compared(loop: tirx.For, made: Mapping[tirx.Var, set[tirx.Var]]) -> bool:
    """Whether what is written in a loop is chosen by its variable beside what varies around it, or is loaded."""
    own = {loop.loop_var}
    stores: list[tirx.BufferStore] = []
    compared: list[tirx.Expr] = []
    on_loop = (tirx.For, lambda each: own.add(each.loop_var))
    tvm_ffi.structural_walk(loop.body, [on_loop, (tirx.BufferStore, stores.append)])
    tvm_ffi.structural_walk([store.value for store in stores], (_COMPARISONS, compared.append))

    def is_between(comparison: tirx.Expr) -> bool:
        loads: list[ir.TensorLoad] = []
        variables: set[tirx.Var] = set()

        def on_load(load: ir.TensorLoad) -> tvm_ffi.WalkResult:
            loads.append(load)
            return tvm_ffi.WalkResult.SKIP

        tvm_ffi.structural_walk(comparison, [(ir.TensorLoad, on_load), (tirx.Var, variables.add)], order="pre")
        sources = {source for var in variables for source in made.get(var, {var})}
        return loop.loop_var in sources and (bool(loads) or not sources <= own)

    return any(map(is_between, compared))
