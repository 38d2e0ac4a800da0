"""Variables in expressions and statements: which there are, and others in their place."""

from __future__ import annotations

from collections.abc import Mapping

import tvm_ffi
from tvm import tirx

__all__ = ["substitute", "uses", "variables_of"]


def uses(expr: object, var: tirx.Var) -> bool:
    """Return whether `var` occurs in `expr`."""
    if isinstance(expr, tirx.Var):
        return expr.same_as(var)
    found: list[bool] = []
    tvm_ffi.structural_walk(expr, (tirx.Var, lambda v: found.append(True) if v.same_as(var) else None))
    return bool(found)


def variables_of(expr: object) -> set[tirx.Var]:
    """Return the variables that occur in `expr`."""
    if isinstance(expr, tirx.Var):
        return {expr}
    found: set[tirx.Var] = set()
    tvm_ffi.structural_walk(expr, (tirx.Var, found.add))
    return found


def substitute(value: tirx.Expr, replacements: Mapping[tirx.Var, tirx.Expr]) -> tirx.Expr:
    """Return `value` with variables replaced."""
    return tvm_ffi.structural_map(value, (tirx.Var, lambda var: replacements.get(var, var)))
