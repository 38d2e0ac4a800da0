"""Upstream's maps of iterators, kept from what they get wrong.

They write indices in terms of the loops' variables, and lose part of what is added to these before a division:
``(i + 5) // 4 % 4`` becomes ``(i + 4) % 16 // 4``, and ``(i + n) % 24`` becomes ``i`` where ``i`` is one of 24.
Flattening of buffers simplifies addresses so. There a pass hides such sums, and another shows them again behind it: all
other passes see what they saw. Who asks for a map gets none.

Source: upstream's ``src/arith/iter_affine_map.cc``, where a dividend is padded to a multiple of the divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.sym import detect_iter_map

from tvm_axe._tvm.simplifying import masked
from tvm_axe._tvm.structural import body_pass, is_zero, put_around, structural_map, variables_of

__all__ = ["iter_map", "keep_sums"]

_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def keep_sums() -> None:
    """Have upstream's flattening keep what is added before a division, in every pipeline of this process.

    There is no other place between the pass that brings loops into indices and this one.
    """

    def passes(flattens: Callable[[], ir.transform.Pass]) -> list[ir.transform.Pass]:
        return [body_pass("HideSums", _hidden), flattens(), body_pass("ShowSums", _shown)]

    put_around(tirx.transform, "FlattenBuffer", passes)


def iter_map(indices: Sequence[Any], ranges: Mapping[tirx.Var, ir.Range], predicate: Any = True) -> list[Any]:
    """Upstream's `detect_iter_map`: a sum of parts of iterators for each index, or nothing where it sees no map.

    Nothing, too, where a sum of a variable and something else is divided.
    """
    loops, found = {*ranges}, list[Any]()

    def look(division: Any) -> None:
        if _divides_sum(division, loops, set()):
            found.append(division)

    for value in (*indices, predicate):
        if not isinstance(value, bool | int):
            tvm_ffi.structural_walk(value, (_DIVISIONS, look))
    return [] if found else list(detect_iter_map(list(indices), ranges, predicate).indices)


def _hidden(body: tirx.Stmt) -> tirx.Stmt:
    """A body whose divisions of sums of a loop's variable and something else are hidden."""
    loops, moving = set[tirx.Var](), set[tirx.Var]()
    tvm_ffi.structural_walk(body, (tirx.For, lambda loop: loops.add(loop.loop_var)))
    tvm_ffi.structural_walk(body, (tirx.AttrStmt, lambda attr: _thread(attr, loops)))
    tvm_ffi.structural_walk(body, (tirx.Bind, lambda bind: moving.add(bind.var)))

    def rule(division: Any) -> Any:
        if not _divides_sum(division, loops, moving):
            return division
        return type(division)(masked(division.a), division.b)

    return structural_map(body, (_DIVISIONS, rule))


def _divides_sum(division: Any, loops: set[tirx.Var], moving: set[tirx.Var]) -> bool:
    """Whether a sum of a loop's variable, or of what may be made of one, and something else is divided."""
    if not str(division.a.ty.dtype).startswith("int"):
        return False
    terms = _terms(division.a)
    used = [variables_of(term) for term in terms]
    apart = any(not names & loops and not is_zero(term) for term, names in zip(terms, used))
    return len(terms) > 1 and apart and any(names & (loops | moving) for names in used)


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
