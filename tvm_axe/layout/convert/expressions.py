"""The compiler's numbers and ours: constants are ints here, and integer expressions are `Symbolic` values."""

from __future__ import annotations

from typing import Any

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import check_number
from tvm_axe.layout.symbolic import Number, Symbolic


def from_expression(what: str, value: Any) -> Number:
    """Return a number of the compiler's, or raise LayoutError that calls it `what`; a constant holds its `value`."""
    constant = getattr(value, "value", value)
    return constant if type(constant) is int else check_number(what, value)


def to_expression(value: Number, dtype: str | None = None) -> Any:
    """Return what the compiler takes for a number, or raise LayoutError if it is an expression of another type."""
    if not isinstance(value, Symbolic):
        return value
    if dtype is not None and str(value.expr.ty) != dtype:
        raise LayoutError(f"{value} is of type {value.expr.ty}, and its context of {dtype}: all must be of one type")
    return value.expr
