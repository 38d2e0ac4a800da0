"""Special functions, shifts of bits and searches in order, which upstream's importer of ``torch.export`` doesn't know.

The formulas are as those of `tvm_axe._tvm.torch_formulas`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tvm import relax
from tvm.relax import op

from tvm_axe._tvm.formulas import Emit, number, shifted, wide

__all__ = ["SPECIAL"]

_NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip
"""Polynomials of the inverse error function (Giles, Approximating the erfinv function, GPU Computing Gems, 2011), the
highest power first: around w = 2.5, and of the root of w around 3, where w = -log(1 - x x)."""

_LANCZOS = (
    0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip
"""Lanczos' coefficients of the logarithm of the gamma function, for g = 7."""


def _polynomial(emit: Emit, x: relax.Expr, powers: Sequence[float]) -> relax.Expr:
    found: relax.Expr = number(powers[0], x)
    for power in powers[1:]:
        found = emit(op.add(op.multiply(found, x), number(power, x)))
    return found


def _erfinv(emit: Emit, self: relax.Expr) -> relax.Expr:
    """By Giles' polynomials, and of float64 two steps of Newton's method more."""
    (x,) = wide(emit, self)
    one = number(1, x)
    w = emit(op.negative(op.log(op.multiply(op.subtract(one, x), op.add(one, x)))))
    near = _polynomial(emit, emit(op.subtract(w, number(2.5, w))), _NEAR)
    far = _polynomial(emit, emit(op.subtract(op.sqrt(w), number(3, w))), _FAR)
    found = emit(op.multiply(op.where(op.less(w, number(5, w)), near, far), x))
    for _ in range(2 if str(x.ty.dtype) == "float64" else 0):
        slope = op.multiply(op.exp(op.negative(op.multiply(found, found))), number(2 / math.sqrt(math.pi), x))
        found = emit(op.subtract(found, op.divide(op.subtract(op.erf(found), x), slope)))
    return op.where(op.equal(op.abs(x), one), op.multiply(x, number(math.inf, x)), found)


def _lgamma(emit: Emit, self: relax.Expr) -> relax.Expr:
    """By Lanczos' series in float64, of numbers below a half by its reflection."""
    x = emit(op.astype(self, "float64"))
    half, one = number(0.5, x), number(1, x)
    below = emit(op.less(x, half))
    z = emit(op.subtract(op.where(below, op.subtract(one, x), x), one))
    series: relax.Expr = number(_LANCZOS[0], x)
    for at, factor in enumerate(_LANCZOS[1:], 1):
        series = emit(op.add(series, op.divide(number(factor, x), op.add(z, number(at, x)))))
    t = emit(op.add(z, number(7.5, x)))
    found = op.multiply(op.add(z, half), op.log(t))
    found = emit(op.add(op.subtract(found, t), op.add(op.log(series), number(math.log(2 * math.pi) / 2, x))))
    part = emit(op.subtract(x, op.floor(x)))
    sine = op.abs(op.sin(op.multiply(part, number(math.pi, x))))
    turned = op.subtract(op.subtract(number(math.log(math.pi), x), op.log(sine)), found)
    found = op.where(below, turned, found)
    infinite = emit(op.isinf(x))
    return op.where(infinite, number(math.inf, x), found)


def _searched(
    emit: Emit,
    self: relax.Expr,
    sorted_sequence: relax.Expr,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: relax.Expr | None = None,
) -> relax.Expr:
    """How many of the row that belongs to each are before it; no number is behind all."""
    if sorter is not None:
        sorted_sequence = emit(op.gather_elements(sorted_sequence, sorter, axis=-1))
    rank = len(sorted_sequence.ty.shape)
    row = emit(op.expand_dims(sorted_sequence, -2 if rank > 1 else 0))
    value = emit(op.expand_dims(self, -1))
    behind = op.less_equal if right or side == "right" else op.less
    before = emit(behind(row, value))
    if "float" in str(self.ty.dtype):
        before = emit(op.logical_or(before, op.isnan(value)))
    return op.sum(emit(op.astype(before, "int32" if out_int32 else "int64")), -1)


def _is_in(
    emit: Emit, elements: relax.Expr, test_elements: relax.Expr, assume_unique: bool = False, invert: bool = False
) -> relax.Expr:
    tested = emit(op.reshape(test_elements, (-1,)))
    same = emit(op.astype(op.equal(emit(op.expand_dims(elements, -1)), tested), "int32"))
    found = emit(op.greater(op.max(same, -1), relax.const(0, "int32")))
    return op.logical_not(found) if invert else found


def _shifted(left: bool, emit: Emit, self: relax.Expr, other: Any) -> relax.Expr:
    by = number(int(other), self) if isinstance(other, int | float) else other
    return shifted(emit, self, by, left)


SPECIAL: Mapping[str, Callable[..., Any]] = {
    "bucketize.Tensor": lambda emit, self, boundaries, **options: _searched(emit, self, boundaries, **options),
    "erfinv.default": _erfinv,
    "isin.Tensor_Scalar": lambda emit, elements, test_element, **options: _is_in(
        emit, elements, number(test_element, elements), **options
    ),
    "isin.Tensor_Tensor": _is_in,
    "lgamma.default": _lgamma,
    "searchsorted.Tensor": _searched,
    **{
        name: partial(_shifted, left)
        for word, left in (("l", True), ("r", False))
        for name in (
            f"__{word}shift__.Scalar",
            f"__{word}shift__.Tensor",
            f"bitwise_{'left' if left else 'right'}_shift.Tensor",
            f"bitwise_{'left' if left else 'right'}_shift.Tensor_Scalar",
        )
    },
}
