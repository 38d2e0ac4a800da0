"""Symbolic extents of functions: the variables that sizes are counted in, and a function at one size.

>>> from tvm import tirx
>>> n = tirx.Var("n", "int64")
>>> number(n * 2 + 1, {n: 64})
129
>>> number(n, {}) is None
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from tvm import tirx
from tvm_ffi import structural_equal

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import variables_of
from tvm_axe.analysis.values import values

__all__ = [
    "Extent",
    "Sizes",
    "are_same",
    "at_sizes",
    "is_symbolic",
    "number",
    "sides",
    "size_variables",
    "unknown_extents",
]

Extent: TypeAlias = "int | tirx.Expr"
"""An extent: a number, or an expression where it isn't known."""

Sizes = Mapping[tirx.Var, int]
"""The values of variables that extents are counted in."""

_FOLDED = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)


def is_symbolic(extent: object) -> bool:
    """Return whether an extent isn't a number."""
    return not isinstance(extent, int | tirx.IntImm)


def sides(shape: Sequence[Extent]) -> list[Extent]:
    """Return a shape's extents: numbers, and expressions where they aren't known."""
    return [int(extent) if isinstance(extent, int | tirx.IntImm) else extent for extent in shape]


def are_same(some: Sequence[Extent], others: Sequence[Extent]) -> bool:
    """Return whether two shapes have the same extents, as they are written."""
    return len(some) == len(others) and all(
        one == other if isinstance(one, int) and isinstance(other, int) else structural_equal(one, other)
        for one, other in zip(sides(some), sides(others))
    )


def number(extent: tirx.Expr, sizes: Sizes) -> int | None:
    """Return what an extent is at some sizes; None if it is made of other variables, or no arithmetic."""
    if isinstance(extent, tirx.IntImm):
        return int(extent)
    found = values(extent, {variable: np.asarray(size) for variable, size in sizes.items()})
    return None if found is None else int(found)


def size_variables(func: tirx.PrimFunc) -> tuple[tirx.Var, ...]:
    """Return the variables that a function's parameters are counted in or are, in the order in which they appear."""
    each = [_in_shape(param) if tirx.is_buffer_var(param) else [param] for param in func.params]
    return tuple(dict.fromkeys(variable for own in each for variable in own))


def unknown_extents(func: tirx.PrimFunc) -> tuple[tirx.Var, ...]:
    """Return those of them that shapes are made of."""
    buffers = filter(tirx.is_buffer_var, func.params)
    return tuple(dict.fromkeys(variable for buffer in buffers for variable in _in_shape(buffer)))


def _in_shape(buffer: tirx.Buffer) -> list[tirx.Var]:
    """Return the variables of a shape, those of one extent in the order of their names."""
    return [var for extent in buffer.shape for var in sorted(variables_of(extent), key=lambda var: str(var.name))]


def at_sizes(func: tirx.PrimFunc, sizes: Sizes) -> tirx.PrimFunc:
    """Return the function that a function is at some sizes; parameters that are sizes by themselves are none of its."""
    if not sizes:
        return func
    numbers: dict[tirx.Var, tirx.Expr] = {var: tirx.const(size, str(var.ty)) for var, size in sizes.items()}
    params = [param for param in func.params if param not in numbers]

    def folded(expr: tirx.Expr) -> tirx.Expr:
        known = values(expr, {}) if isinstance(expr.a, tirx.IntImm) and isinstance(expr.b, tirx.IntImm) else None
        return expr if known is None else tirx.const(int(known), str(expr.ty))

    def rounded(expr: tirx.Cast) -> tirx.Expr:
        known = values(expr, {}) if str(expr.value.ty) == "float64" else None
        return tirx.const(int(known), str(expr.ty)) if known is not None and known.dtype.kind == "i" else expr

    return _tvm.structural_map(
        tirx.PrimFunc(params, func.body, func.ret_type, func.attrs),
        [
            (tirx.Var, lambda var: numbers.get(var, var)),
            *((kind, folded) for kind in _FOLDED),
            (tirx.Cast, rounded),
        ],
    )
