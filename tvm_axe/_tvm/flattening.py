"""Upstream's flattening of buffers, kept from what it simplifies wrongly.

It writes an element's address as a map of the loops' variables, and loses part of what is added to these before a
division: ``(i + 5) // 4 % 4`` becomes ``(i + 4) % 16 // 4``, and ``(i + n) % 24`` becomes ``i`` where ``i`` is one of
24. So a pass hides such sums from it, and shows them again behind it: all other passes see what they saw.

Source: upstream's ``src/arith/iter_affine_map.cc``, where a dividend is padded to a multiple of the divisor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import IRModule

from tvm_axe._tvm.structural import structural_map

__all__ = ["keep_sums"]

_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def keep_sums() -> None:
    """Have upstream's flattening keep what is added before a division, in every pipeline of this process.

    Pipelines are upstream's functions, which make this pass by its name when they run: there is no other place between
    the one that brings loops into indices and this.
    """
    flattens = tirx.transform.FlattenBuffer
    if flattens.__module__ == __name__:
        return

    def FlattenBuffer() -> ir.transform.Pass:
        passes = [_each_function("HideSums", _hidden), flattens(), _each_function("ShowSums", _shown)]
        return ir.transform.Sequential(passes)

    tirx.transform.FlattenBuffer = FlattenBuffer


def _each_function(name: str, rewritten: Callable[[tirx.Stmt], tirx.Stmt]) -> ir.transform.Pass:
    def run(mod: IRModule, _context: ir.transform.PassContext) -> IRModule:
        mod = mod.clone()
        for variable, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc):
                mod[variable] = func.with_body(rewritten(func.body))
        return mod

    return ir.transform.module_pass(run, opt_level=0, name=name)


def _hidden(body: tirx.Stmt) -> tirx.Stmt:
    """A body whose divisions of sums of a loop's variable and something else are hidden."""
    loops, moving = set[tirx.Var](), set[tirx.Var]()
    tvm_ffi.structural_walk(body, (tirx.For, lambda loop: loops.add(loop.loop_var)))
    tvm_ffi.structural_walk(body, (tirx.AttrStmt, lambda attr: _thread(attr, loops)))
    tvm_ffi.structural_walk(body, (tirx.Bind, lambda bind: moving.add(bind.var)))

    def rule(division: Any) -> Any:
        if not str(division.a.ty.dtype).startswith("int"):
            return division
        terms = _terms(division.a)
        used = [_variables(term) for term in terms]
        apart = any(not names & loops and not _is_zero(term) for term, names in zip(terms, used))
        if len(terms) < 2 or not apart or not any(names & (loops | moving) for names in used):
            return division
        return type(division)(tirx.BitwiseAnd(division.a, tirx.const(-1, division.a.ty.dtype)), division.b)

    return structural_map(body, (_DIVISIONS, rule))


def _shown(body: tirx.Stmt) -> tirx.Stmt:
    """A body with what `_hidden` has hidden; no bit is lost by it, wherever it stood before."""

    def rule(value: Any) -> Any:
        return value.a if isinstance(value.b, tirx.IntImm) and int(value.b) == -1 else value

    return structural_map(body, (tirx.BitwiseAnd, rule))


def _thread(attr: tirx.AttrStmt, loops: set[tirx.Var]) -> None:
    if isinstance(attr.node, tirx.IterVar):
        loops.add(attr.node.var)


def _terms(value: Any) -> list[Any]:
    """What is added up in a value; a product by a constant is its factor's terms."""
    if isinstance(value, tirx.Add | tirx.Sub):
        return [*_terms(value.a), *_terms(value.b)]
    if isinstance(value, tirx.Mul) and isinstance(value.b, tirx.IntImm):
        return _terms(value.a)
    return [value]


def _is_zero(value: Any) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == 0


def _variables(value: Any) -> set[tirx.Var]:
    found: set[tirx.Var] = set()
    if isinstance(value, tirx.Var):
        return {value}
    tvm_ffi.structural_walk(value, (tirx.Var, found.add))
    return found
