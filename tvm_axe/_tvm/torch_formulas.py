"""Operators of PyTorch that upstream's importer doesn't know, or makes something else, in operators of Relax.

A formula takes what emits a value that is read more than once, and the operator's arguments by their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tvm import relax, tirx
from tvm.relax import op

from tvm_axe.errors import InputError

__all__ = ["FORMULAS", "number"]

_Emit = Callable[[relax.Expr], relax.Var]


def number(value: float, like: relax.Expr) -> relax.Expr:
    """A number in the type of a value."""
    return relax.const(value, str(like.ty.dtype))


def _elu(emit: _Emit, self: relax.Expr, alpha: float, scale: float, input_scale: float) -> relax.Expr:
    below = op.subtract(op.exp(op.multiply(self, number(input_scale, self))), number(1, self))
    above = op.multiply(self, number(scale, self))
    return op.where(op.greater(self, number(0, self)), above, op.multiply(below, number(alpha * scale, self)))


def _along(
    function: Callable[..., relax.Expr], emit: _Emit, self: relax.Expr, dim: Any = None, keepdim: bool = False
) -> relax.Expr:
    return function(self, dim or None, keepdim) if len(self.ty.shape) else self


def _least(emit: _Emit, self: relax.Expr, dim: int, keepdim: bool) -> tuple[relax.Expr, relax.Expr]:
    if not len(self.ty.shape):
        return self, relax.const(0, "int64")
    return op.min(self, dim, keepdim), op.argmin(self, dim, keepdim)


def _logsumexp(emit: _Emit, self: relax.Expr, dim: Any, keepdim: bool) -> relax.Expr:
    if not len(self.ty.shape):
        return self
    largest = emit(op.max(self, dim or None, True))
    # Of infinities alone the sum is that infinity; minus itself it would be no number.
    far = emit(op.where(op.isfinite(largest), largest, op.zeros_like(largest)))
    sums = op.add(op.log(op.sum(op.exp(op.subtract(self, far)), dim or None, True)), far)
    return sums if keepdim else op.squeeze(sums, dim or None)


def _or_other(function: Callable[..., relax.Expr], emit: _Emit, self: relax.Expr, other: relax.Expr) -> relax.Expr:
    """What a function makes of two, or the one that is a number."""
    both = function(self, other)
    return op.where(op.isnan(self), other, op.where(op.isnan(other), self, both))


def _copysign(emit: _Emit, self: relax.Expr, other: relax.Expr) -> relax.Expr:
    zero = number(0, other)
    size, inverse = emit(op.abs(self)), op.divide(number(1, other), other)  # of a zero the sign is seen at its inverse
    return op.where(op.logical_or(op.less(other, zero), op.less(inverse, zero)), op.negative(size), size)


def _hypot(emit: _Emit, self: relax.Expr, other: relax.Expr) -> relax.Expr:
    """By the ratio of the smaller one to the larger, whose square doesn't overflow."""
    one, two = emit(op.abs(self)), emit(op.abs(other))
    large, small = emit(op.maximum(one, two)), op.minimum(one, two)
    total = emit(op.add(one, two))
    plain = emit(op.logical_and(op.greater(total, number(0, self)), op.isfinite(large)))
    ratio = emit(op.divide(small, op.where(plain, large, op.ones_like(large))))
    found = op.multiply(large, op.sqrt(op.add(op.multiply(ratio, ratio), number(1, self))))
    infinite = op.logical_or(op.isinf(one), op.isinf(two))
    sized = op.where(plain, found, total)  # nothing, or no number
    return op.where(infinite, number(math.inf, self), sized)


def _var_mean(
    emit: _Emit, self: relax.Expr, dim: Any, correction: float | None, keepdim: bool
) -> tuple[relax.Expr, relax.Expr]:
    axes = dim if dim else [*range(len(self.ty.shape))]
    extents = [self.ty.shape[axis] for axis in axes]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        raise InputError("var_mean: along a dimension that isn't known it isn't imported; take var and mean apart")
    count, less = math.prod(map(int, extents)), 1 if correction is None else correction
    factor = count / (count - less) if count > less else math.nan
    return op.multiply(op.variance(self, axes, keepdim), number(factor, self)), op.mean(self, axes, keepdim)


def _masked_scatter(emit: _Emit, self: relax.Expr, mask: relax.Expr, source: relax.Expr) -> relax.Expr:
    """Where the mask holds, the elements of the source one after the other."""
    shape = [*self.ty.shape]
    wide = emit(op.broadcast_to(mask, shape))
    flat = emit(op.reshape(emit(op.astype(wide, "int64")), (math.prod(shape),)))
    count = emit(op.cumsum(flat, 0))
    places = emit(op.maximum(op.subtract(count, relax.const(1, "int64")), relax.const(0, "int64")))
    given = emit(op.reshape(source, (math.prod(source.ty.shape),)))
    taken = emit(op.reshape(emit(op.take(given, places, axis=0, mode="clip")), shape))
    return op.where(wide, taken, self)


def _between(emit: _Emit, self: relax.Expr, min: relax.Expr | None, max: relax.Expr | None) -> relax.Expr:
    above = self if min is None else op.maximum(self, min)
    return above if max is None else op.minimum(above, max)


FORMULAS: Mapping[str, Callable[..., Any]] = {
    "amax.default": partial(_along, op.max),
    "amin.default": partial(_along, op.min),
    "clamp.Tensor": _between,
    "copysign.Scalar": lambda emit, self, other: _copysign(emit, self, number(other, self)),
    "copysign.Tensor": _copysign,
    "elu.default": _elu,
    "exp2.default": lambda emit, self: op.exp(op.multiply(self, number(math.log(2), self))),
    "fmax.default": partial(_or_other, op.maximum),
    "fmin.default": partial(_or_other, op.minimum),
    "hypot.default": _hypot,
    "logsumexp.default": _logsumexp,
    "masked_scatter.default": _masked_scatter,
    "min.dim": _least,
    "var_mean.correction": _var_mean,
}
