"""Arithmetic of 16-bit floats in float32, whose result is rounded once.

To round every intermediate costs digits, and conversions before and behind each quotient and exponential of a GPU. What
a program rounds itself, by a cast, stays rounded.
"""

from __future__ import annotations

from tvm import ir, tirx

from tvm_axe.analysis.expressions import is_choice, is_float, is_value
from tvm_axe.layout.dtypes import dtype_bits

__all__ = ["rounded_once"]

_WIDE = "float32"
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max)
_PAIRS = (
    *_ARITHMETIC, tirx.FloorDiv, tirx.FloorMod, tirx.Mod,
    tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.And, tirx.Or,
)  # fmt: skip
_FUNCTIONS = frozenset(
    f"tirx.{name}"
    for name in (
        "exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "sinh", "cosh",
        "sin", "cos", "tan", "asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2", "erf", "pow", "fabs",
    )
)  # fmt: skip


def rounded_once(value: tirx.Expr) -> tirx.Expr:
    """Return an expression whose 16-bit floats are computed in float32, each result rounded where it is used otherwise.

    Sums, products, quotients, extremes, choices and functions of 16-bit floats are; what is compared, stored, cast, or
    an argument of another function, is a result. One that is cast to float32 isn't rounded before.

    >>> x = tirx.Var("x", "bfloat16")
    >>> print(rounded_once(x * x + x))
    T.Cast("bfloat16", T.Cast("float32", x) * T.Cast("float32", x) + T.Cast("float32", x))
    """
    if _is_computed(value):
        return tirx.Cast(str(value.ty.dtype), _wide(value))
    if isinstance(value, tirx.Cast):
        if str(value.ty.dtype) == _WIDE and _is_computed(value.value):
            return _wide(value.value)
        return tirx.Cast(str(value.ty.dtype), rounded_once(value.value))
    return _with_operands(value)


def _is_narrow(value: tirx.Expr) -> bool:
    return is_float(value) and dtype_bits(str(value.ty.dtype)) == 16


def _is_computed(value: tirx.Expr) -> bool:
    """Return whether a value is of 16-bit floats, and computed of such."""
    if not isinstance(value, tirx.Expr) or not _is_narrow(value):
        return False
    if isinstance(value, ir.Call):
        return is_choice(value) or (isinstance(value.op, ir.Op) and value.op.name in _FUNCTIONS)
    return isinstance(value, (*_ARITHMETIC, tirx.Select))


def _wide(value: tirx.Expr) -> tirx.Expr:
    """Return a 16-bit float as float32, computed in it."""
    if isinstance(value, tirx.FloatImm):
        return tirx.FloatImm(_WIDE, value.value)
    if not _is_computed(value):
        return tirx.Cast(_WIDE, rounded_once(value))
    if isinstance(value, _ARITHMETIC):
        return type(value)(_wide(value.a), _wide(value.b))
    if isinstance(value, tirx.Select):
        return tirx.Select(rounded_once(value.condition), _wide(value.true_value), _wide(value.false_value))
    args = [_wide(arg) if _is_narrow(arg) else rounded_once(arg) for arg in value.args]
    return ir.Call(value.op, args, ret_ty=_WIDE)


def _with_operands(value: tirx.Expr) -> tirx.Expr:
    """Return the same of operands that are rounded once."""
    if isinstance(value, _PAIRS):
        a, b = rounded_once(value.a), rounded_once(value.b)
        return value if a.same_as(value.a) and b.same_as(value.b) else type(value)(a, b)
    if isinstance(value, tirx.Not):
        return tirx.Not(rounded_once(value.a))
    if isinstance(value, tirx.Select):
        return tirx.Select(*map(rounded_once, (value.condition, value.true_value, value.false_value)))
    if isinstance(value, ir.Call) and is_value(value):
        args = [rounded_once(arg) if isinstance(arg, tirx.Expr) else arg for arg in value.args]
        return ir.Call(value.op, args, value.attrs, value.ty_args, ret_ty=value.ty)
    return value
