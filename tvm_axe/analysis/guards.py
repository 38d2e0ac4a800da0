"""The loads of an expression, with the conditions under which each happens."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx

from tvm_axe.analysis.expressions import is_choice, is_value

__all__ = ["COMPARISONS", "guarded_loads"]

COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
"""The nodes that compare two numbers."""

_PAIRS = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max, *COMPARISONS,
)  # fmt: skip
_LEAVES = (tirx.Var, tirx.IntImm, tirx.FloatImm, ir.StringImm)
_Loads = list[tuple[ir.TensorLoad, tuple[tirx.Expr, ...]]]


def guarded_loads(expr: tirx.Expr, guards: tuple[tirx.Expr, ...] = ()) -> _Loads | None:
    """Return the loads of an expression, each with the conditions under which it happens, in the order of use.

    Those in conditions and indices are among them. The other side of `and` and `or` may rely on the first one. None of
    what is no plain number, such as a vector, a name for a value, or a place in memory.
    """
    if isinstance(expr, _LEAVES):
        return []
    if isinstance(expr, ir.TensorLoad):
        within = _all([(index, guards) for index in expr.indices])
        return None if within is None else [*within, (expr, guards)]
    if isinstance(expr, _PAIRS):
        return _all([(expr.a, guards), (expr.b, guards)])
    if isinstance(expr, tirx.And):
        return _all([(expr.a, guards), (expr.b, (*guards, expr.a))])
    if isinstance(expr, tirx.Or):
        return _all([(expr.a, guards), (expr.b, (*guards, tirx.Not(expr.a)))])
    if isinstance(expr, tirx.Not):
        return guarded_loads(expr.a, guards)
    if isinstance(expr, tirx.Cast):
        return guarded_loads(expr.value, guards)
    if isinstance(expr, tirx.Select) or is_choice(expr):
        condition, true, false = (
            (expr.condition, expr.true_value, expr.false_value) if isinstance(expr, tirx.Select) else expr.args
        )
        sides = [(true, (*guards, condition)), (false, (*guards, tirx.Not(condition)))]
        return _all([(condition, guards), *sides])
    if isinstance(expr, ir.Call) and is_value(expr):
        return _all([(each, guards) for each in expr.args])
    return None


def _all(parts: Sequence[tuple[tirx.Expr, tuple[tirx.Expr, ...]]]) -> _Loads | None:
    found: _Loads = []
    for part, guards in parts:
        within = guarded_loads(part, guards)
        if within is None:
            return None
        found += within
    return found
