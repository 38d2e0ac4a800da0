"""Formulas in operators of Relax that importers share.

A formula takes what emits a value that is read more than once.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.relax import op

__all__ = ["Emit", "elu", "expm1", "less_zero_point", "number", "shifted", "wide"]

Emit = Callable[[relax.Expr], relax.Var]


def number(value: float, like: relax.Expr) -> relax.Expr:
    """A number in the type of a value."""
    return relax.const(value, str(like.ty.dtype))


def wide(emit: Emit, *values: relax.Expr) -> list[relax.Var]:
    """Values of 16 bits in float32; others as they are."""
    halves = ("float16", "bfloat16")
    return [emit(op.astype(each, "float32") if str(each.ty.dtype) in halves else each) for each in values]


def expm1(emit: Emit, value: relax.Expr) -> relax.Expr:
    """exp(x) - 1, by the hyperbolic tangent of the half where the exponential is near 1, and would cancel it."""
    (x,) = wide(emit, value)
    one = number(1, x)
    half = emit(op.tanh(op.multiply(x, number(0.5, x))))
    near = op.divide(op.multiply(half, number(2, x)), op.subtract(one, half))
    return op.where(op.less(op.abs(x), one), near, op.subtract(op.exp(x), one))


def elu(emit: Emit, value: relax.Expr, alpha: float, scale: float, input_scale: float) -> relax.Expr:
    """The value times scale where it is positive, alpha * scale * (exp(value * input_scale) - 1) where it isn't."""
    (x,) = wide(emit, value)
    below = expm1(emit, emit(op.multiply(x, number(input_scale, x))))
    above = op.multiply(x, number(scale, x))
    return op.where(op.greater(x, number(0, x)), above, op.multiply(below, number(alpha * scale, x)))


def shifted(emit: Emit, x: relax.Expr, y: relax.Expr, left: bool) -> relax.Expr:
    """Integers with their bits shifted; by as many as the type has, or more, nothing is left, or their sign."""
    dtype = str(x.ty.dtype)
    bits, signed = int("".join(filter(str.isdigit, dtype))), not dtype.startswith("uint")
    beyond = op.greater_equal(y, number(bits, y))
    if signed:
        beyond = op.logical_or(beyond, op.less(y, number(0, y)))
    beyond = emit(beyond)
    by = emit(op.where(beyond, number(0, y), y))
    if left:
        return op.where(beyond, number(0, x), op.left_shift(x, by))
    rest = op.where(op.less(x, number(0, x)), number(-1, x), number(0, x)) if signed else number(0, x)
    return op.where(beyond, rest, op.right_shift(x, by))


def less_zero_point(emit: Emit, value: relax.Expr, zero_point: relax.Expr | None) -> relax.Var:
    """What is quantized as int32, less its zero point, which is broadcast to it; None is zero."""
    whole = emit(op.astype(value, "int32"))
    return whole if zero_point is None else emit(op.subtract(whole, emit(op.astype(zero_point, "int32"))))
