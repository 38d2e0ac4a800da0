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

from tvm_axe._tvm.formulas import Emit, elu, expm1, number, wide
from tvm_axe.errors import InputError

__all__ = ["FORMULAS", "PRODUCTS", "group_norm"]


def _log1p(emit: Emit, self: relax.Expr) -> relax.Expr:
    """By the series of the inverse hyperbolic tangent of x / (2 + x), near zero, where 1 + x would lose digits."""
    (x,) = wide(emit, self)
    part = emit(op.divide(x, op.add(x, number(2, x))))
    squared = emit(op.multiply(part, part))
    last = 21 if str(x.ty.dtype) == "float64" else 11  # of 1 / 7, the largest part, less than the type's rounding
    series = number(1 / last, x)
    for power in range(last - 2, 0, -2):
        series = op.add(op.multiply(series, squared), number(1 / power, x))
    near = op.multiply(op.multiply(part, number(2, x)), series)
    return op.where(op.less(op.abs(x), number(0.25, x)), near, op.log(op.add(x, number(1, x))))


def _along(
    function: Callable[..., relax.Expr], emit: Emit, self: relax.Expr, dim: Any = None, keepdim: bool = False
) -> relax.Expr:
    return function(self, dim or None, keepdim) if len(self.ty.shape) else self


def _least(emit: Emit, self: relax.Expr, dim: int, keepdim: bool) -> tuple[relax.Expr, relax.Expr]:
    if not len(self.ty.shape):
        return self, relax.const(0, "int64")
    return op.min(self, dim, keepdim), op.argmin(self, dim, keepdim)


def _largest(emit: Emit, self: relax.Expr, dim: int, keepdim: bool = False) -> tuple[relax.Expr, relax.Expr]:
    """The largest elements and their places. Upstream takes both from a `topk`, which loses a NaN."""
    if not len(self.ty.shape):
        return self, relax.const(0, "int64")
    return op.max(self, dim, keepdim), op.argmax(self, dim, keepdim)


def _logsumexp(emit: Emit, self: relax.Expr, dim: Any, keepdim: bool) -> relax.Expr:
    if not len(self.ty.shape):
        return self
    largest = emit(op.max(self, dim or None, True))
    # Of infinities alone the sum is that infinity; minus itself it would be no number.
    far = emit(op.where(op.isfinite(largest), largest, op.zeros_like(largest)))
    sums = op.add(op.log(op.sum(op.exp(op.subtract(self, far)), dim or None, True)), far)
    return sums if keepdim else op.squeeze(sums, dim or None)


def _or_other(function: Callable[..., relax.Expr], emit: Emit, self: relax.Expr, other: relax.Expr) -> relax.Expr:
    """What a function makes of two, or the one that is a number."""
    both = function(self, other)
    return op.where(op.isnan(self), other, op.where(op.isnan(other), self, both))


def _copysign(emit: Emit, self: relax.Expr, other: relax.Expr) -> relax.Expr:
    zero = number(0, other)
    size, inverse = emit(op.abs(self)), op.divide(number(1, other), other)  # of a zero the sign is seen at its inverse
    return op.where(op.logical_or(op.less(other, zero), op.less(inverse, zero)), op.negative(size), size)


def _hypot(emit: Emit, self: relax.Expr, other: relax.Expr) -> relax.Expr:
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
    emit: Emit, self: relax.Expr, dim: Any, correction: float | None, keepdim: bool
) -> tuple[relax.Expr, relax.Expr]:
    axes = dim if dim else [*range(len(self.ty.shape))]
    extents = [self.ty.shape[axis] for axis in axes]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        raise InputError("var_mean: along a dimension that isn't known it isn't imported; take var and mean apart")
    count, less = math.prod(map(int, extents)), 1 if correction is None else correction
    factor = count / (count - less) if count > less else math.nan
    return op.multiply(op.variance(self, axes, keepdim), number(factor, self)), op.mean(self, axes, keepdim)


def _masked_scatter(emit: Emit, self: relax.Expr, mask: relax.Expr, source: relax.Expr) -> relax.Expr:
    """Where the mask holds, the elements of the source one after the other."""
    shape = [*self.ty.shape]
    wide = emit(op.broadcast_to(mask, shape))
    flat = emit(op.reshape(emit(op.astype(wide, "int64")), (math.prod(shape),)))
    count = emit(op.cumsum(flat, 0))
    places = emit(op.maximum(op.subtract(count, relax.const(1, "int64")), relax.const(0, "int64")))
    given = emit(op.reshape(source, (math.prod(source.ty.shape),)))
    taken = emit(op.reshape(emit(op.take(given, places, axis=0, mode="clip")), shape))
    return op.where(wide, taken, self)


def _between(emit: Emit, self: relax.Expr, min: relax.Expr | None, max: relax.Expr | None) -> relax.Expr:
    above = self if min is None else op.maximum(self, min)
    return above if max is None else op.minimum(above, max)


def _batch_norm(
    emit: Emit,
    input: relax.Expr,
    weight: relax.Expr | None,
    bias: relax.Expr | None,
    eps: float,
    running_mean: relax.Expr | None = None,
    running_var: relax.Expr | None = None,
    training: bool = True,
    momentum: float = 0.0,
) -> tuple[relax.Expr, ...]:
    """The batch's norm, mean and inverse of the deviation; and what a share of them makes of the running statistics."""
    (x,) = wide(emit, input)
    axes = [0, *range(2, len(x.ty.shape))]
    turned = [1 if axis in axes else x.ty.shape[axis] for axis in range(len(x.ty.shape))]
    if not training:
        mean, variance = wide(emit, running_mean, running_var)
    else:
        mean, variance = emit(op.mean(x, axes)), emit(op.variance(x, axes))
    inverse = emit(op.rsqrt(op.add(variance, number(eps, variance))))
    found = op.multiply(op.subtract(x, op.reshape(mean, turned)), op.reshape(inverse, turned))
    for function, given in ((op.multiply, weight), (op.add, bias)):
        found = found if given is None else function(found, op.reshape(*wide(emit, given), turned))
    if running_mean is None or not training:
        return found, mean, inverse
    count = math.prod(int(input.ty.shape[axis]) for axis in axes)
    unbiased = op.multiply(variance, number(count / (count - 1) if count > 1 else math.nan, variance))
    kept = number(1 - momentum, mean)
    running = [
        op.add(op.multiply(old, kept), op.multiply(new, number(momentum, mean)))
        for old, new in zip(wide(emit, running_mean, running_var), (mean, unbiased))
    ]
    return found, mean, inverse, *running


def group_norm(
    emit: Emit, input: relax.Expr, weight: Any, bias: Any, N: Any, C: Any, HxW: Any, group: int, eps: float
) -> tuple[relax.Expr, ...]:
    """Of groups of channels, with or without weights."""
    (x,) = wide(emit, input)
    shape = [*x.ty.shape]
    rows = emit(op.reshape(x, (shape[0], group, -1)))
    mean, variance = emit(op.mean(rows, [2], True)), emit(op.variance(rows, [2], True))
    inverse = emit(op.rsqrt(op.add(variance, number(eps, variance))))
    found = op.reshape(op.multiply(op.subtract(rows, mean), inverse), shape)
    turned = [1, shape[1], *[1] * (len(shape) - 2)]
    for function, given in ((op.multiply, weight), (op.add, bias)):
        found = found if given is None else function(found, op.reshape(*wide(emit, given), turned))
    return found, op.squeeze(mean, [2]), op.squeeze(inverse, [2])


def _product(
    function: Callable[..., relax.Expr], emit: Emit, self: relax.Expr, *, beta: float, alpha: float, **factors: Any
) -> relax.Expr:
    """A product with a share of it, and a share of what is added to it."""
    made = emit(function(*wide(emit, *factors.values())))
    made = emit(op.multiply(made, number(alpha, made)))
    return made if beta == 0 else op.add(op.multiply(*wide(emit, self), number(beta, made)), made)


def _linear(emit: Emit, input: relax.Expr, weight: relax.Expr, bias: relax.Expr | None) -> relax.Expr:
    made = op.matmul(input, op.permute_dims(weight))
    return made if bias is None else op.add(made, bias)


def _product_along(emit: Emit, self: relax.Expr, dim: int, keepdim: bool, dtype: Any) -> relax.Expr:
    wanted = str(dtype).removeprefix("torch.") if dtype is not None else str(self.ty.dtype)
    if dtype is None and ("int" in wanted or wanted == "bool"):
        wanted = "int64"
    return op.prod(emit(op.astype(self, wanted)), [dim], keepdim)


def _any(emit: Emit, self: relax.Expr) -> relax.Expr:
    numbers = op.astype(op.astype(self, "bool"), "int32")
    return op.astype(op.max(numbers), "bool")


FORMULAS: Mapping[str, Callable[..., Any]] = {
    "_native_batch_norm_legit.no_stats": _batch_norm,
    "_native_batch_norm_legit_functional.default": _batch_norm,
    "addbmm.default": partial(_product, lambda one, two: op.sum(op.matmul(one, two), 0)),
    "addmv.default": partial(_product, op.matmul),
    "amax.default": partial(_along, op.max),
    "amin.default": partial(_along, op.min),
    "any.default": _any,
    "clamp.Tensor": _between,
    "copysign.Scalar": lambda emit, self, other: _copysign(emit, self, number(other, self)),
    "copysign.Tensor": _copysign,
    "elu.default": lambda emit, self, **factors: elu(emit, self, **factors),
    "expm1.default": lambda emit, self: expm1(emit, self),
    "log1p.default": _log1p,
    "prod.dim_int": _product_along,
    "exp2.default": lambda emit, self: op.exp(op.multiply(self, number(math.log(2), self))),
    "fmax.default": partial(_or_other, op.maximum),
    "fmin.default": partial(_or_other, op.minimum),
    "hypot.default": _hypot,
    "logsumexp.default": _logsumexp,
    "masked_scatter.default": _masked_scatter,
    "max.dim": _largest,
    "min.dim": _least,
    "remainder.Scalar_Tensor": lambda emit, self, other: op.floor_mod(number(self, other), other),
    "var_mean.correction": _var_mean,
}

PRODUCTS: Mapping[str, Callable[..., Any]] = {
    "addmm.default": partial(_product, op.matmul),
    "baddbmm.default": partial(_product, op.matmul),
    "bmm.default": lambda emit, self, mat2: op.matmul(self, mat2),
    "linear.default": _linear,
    "matmul.default": lambda emit, self, other: op.matmul(self, other),
    "mm.default": lambda emit, self, mat2: op.matmul(self, mat2),
}
"""Of integers."""
