"""The compiler's numbers and ours: constants are ints here, and integer expressions are `Symbolic` values."""

from __future__ import annotations

from typing import Any

from tvm_axe.layout.axes import check_number
from tvm_axe.layout.symbolic import Number, Symbolic


def from_expression(what: str, value: Any) -> Number:
    """Return a number of the compiler's, or raise LayoutError that calls it `what`; a constant holds its `value`."""
    constant = getattr(value, "value", value)
    return constant if type(constant) is int else check_number(what, value)


def to_expression(value: Number) -> Any:
    """Return what the compiler takes for a number."""
    return value.expr if isinstance(value, Symbolic) else value
