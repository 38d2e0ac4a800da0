"""The values that expressions of integers take, point by point: what is known for certain where no algebra reaches.

>>> import numpy as np
>>> from tvm import tirx
>>> v = tirx.Var("v", "int32")
>>> values((v + 3) % 8, {v: np.arange(4)})
array([3, 4, 5, 6])
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
from tvm import tirx

from tvm_axe.analysis.expressions import is_choice, variables_of

__all__ = ["LIMIT", "points", "values"]

LIMIT = 1 << 20
"""Points that are enumerated at most."""

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Div: lambda a, b: np.trunc(a / b).astype("int64"),
    tirx.Mod: np.fmod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
    tirx.BitwiseXor: operator.xor,
    tirx.BitwiseAnd: operator.and_,
    tirx.BitwiseOr: operator.or_,
    tirx.LShift: operator.lshift,
    tirx.RShift: operator.rshift,
}


_EXACT = "float64"
"""The type of fractions whose arithmetic is numpy's."""


def values(expr: tirx.Expr, at: Mapping[tirx.Var, np.ndarray]) -> np.ndarray | None:
    """Return the values of `expr` where its variables have the values `at`, arrays that broadcast to one shape.

    None where `expr` holds something else than arithmetic on these variables, as an index that was loaded. Fractions
    are of float64, as sizes that PyTorch computes have them.
    """
    if isinstance(expr, tirx.IntImm):
        return np.asarray(int(expr))
    if isinstance(expr, tirx.FloatImm) and str(expr.ty) == _EXACT:
        return np.asarray(float(expr))
    if isinstance(expr, tirx.Var):
        return at.get(expr)
    parts: list[tirx.Expr]
    combine: Callable[..., Any]
    if type(expr) in _BINARY:
        parts, combine = [expr.a, expr.b], _BINARY[type(expr)]
    elif isinstance(expr, tirx.Not):
        parts, combine = [expr.a], np.logical_not
    elif isinstance(expr, tirx.Select):
        parts, combine = [expr.condition, expr.true_value, expr.false_value], np.where
    elif isinstance(expr, tirx.Cast) and "int" in str(expr.ty):
        parts, combine = [expr.value], _rounded
    elif isinstance(expr, tirx.Cast) and str(expr.ty) == _EXACT:
        parts, combine = [expr.value], partial(np.asarray, dtype=_EXACT)
    elif is_choice(expr):
        parts, combine = list(expr.args), np.where
    else:
        return None
    found: list[Any] = [values(part, at) for part in parts]
    return None if any(part is None for part in found) else np.asarray(combine(*found))


def _rounded(found: np.ndarray) -> np.ndarray:
    """Integers as a conversion makes them: of fractions what is in front of the point."""
    return np.asarray(found).astype("int64") if np.asarray(found).dtype.kind == "f" else np.asarray(found)


def points(exprs: Sequence[tirx.Expr], extents: Mapping[tirx.Var, int]) -> dict[tirx.Var, np.ndarray] | None:
    """Return every point of the variables that `exprs` use, each from 0 to its extent; None if these are too many.

    Each variable has a dimension of its own, so that the arrays broadcast to all the points.
    """
    used = [var for var in extents if any(var in variables_of(expr) for expr in exprs)]
    if prod(extents[var] for var in used) > LIMIT:
        return None
    grid = np.ix_(*(np.arange(extents[var], dtype="int64") for var in used))
    return dict(zip(used, grid))
