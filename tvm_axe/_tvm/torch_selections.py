"""Operators of PyTorch that read elements along a dimension, or at places, in operators of Relax.

The formulas are as those of `tvm_axe._tvm.torch_formulas`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from tvm_axe._tvm.formulas import Emit
from tvm_axe._tvm.torch_sizes import size_of
from tvm_axe.errors import InputError

__all__ = ["SELECTIONS"]


def _extents(name: str, value: relax.Expr) -> list[int]:
    """A tensor's extents, which have to be known."""
    shape = value.ty.shape
    if not all(isinstance(extent, tirx.IntImm) for extent in shape):
        raise InputError(f"{name}: of shape {shape} it isn't imported; export the model with extents that are known")
    return [int(extent) for extent in shape]


def _sorted(
    emit: Emit, self: relax.Expr, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[relax.Expr, relax.Expr]:
    places = _order(emit, self, dim, descending)
    return op.gather_elements(self, places, axis=dim), places


def _order(
    emit: Emit, self: relax.Expr, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> relax.Expr:
    """The places of sorted elements, with NaN as the largest."""
    return emit(op.argsort(_key(emit, self), dim, descending, dtype="int64"))


def _key(emit: Emit, self: relax.Expr) -> relax.Expr:
    """What elements are ordered by, of which NaN is the largest.

    Upstream compares floats as they are, so that of a row with a NaN nothing is where it belongs. In float64 there is
    room between what is finite in the other types and infinity, for their own infinity; in float64 itself that and the
    largest number are one.
    """
    if "float" not in str(self.ty.dtype):
        return self
    infinity, beyond = (relax.const(value, "float64") for value in (math.inf, np.finfo("float64").max))
    wide = emit(op.astype(self, "float64"))
    # Of NaN no comparison holds; vectors have no isnan.
    last = emit(op.where(op.equal(wide, infinity), beyond, infinity))
    return emit(op.where(op.less(wide, infinity), wide, last))


def _first(
    emit: Emit, self: relax.Expr, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[relax.Expr, relax.Expr]:
    """The `k` largest or least elements and their places, in order whether or not that is asked for."""
    places = emit(op.topk(_key(emit, self), k, dim, "indices", largest, "int64"))
    return op.gather_elements(self, places, axis=dim), places


def _kth(emit: Emit, self: relax.Expr, k: int, dim: int, keepdim: bool) -> tuple[relax.Expr, relax.Expr]:
    return _at_rank(emit, self, relax.const([k - 1], "int64"), dim, keepdim)


def _at_rank(emit: Emit, self: relax.Expr, rank: relax.Expr, dim: int, keepdim: bool) -> tuple[relax.Expr, relax.Expr]:
    found = [op.take(emit(each), rank, dim) for each in _sorted(emit, self, dim, False)]
    values, places = (each if keepdim else op.squeeze(emit(each), [dim]) for each in found)
    return values, places


def _median(emit: Emit, self: relax.Expr, dim: int, keepdim: bool = False) -> tuple[relax.Expr, relax.Expr]:
    """The element in the middle, the lower of two, and its place; of a row with a NaN the first of these."""
    last = op.subtract(size_of(self.ty.shape[dim]), relax.const(1, "int64"))
    middle = emit(op.reshape(op.floor_divide(last, relax.const(2, "int64")), (1,)))
    values, places = map(emit, _at_rank(emit, self, middle, dim, keepdim))
    if "float" not in str(self.ty.dtype):
        return values, places
    largest = emit(op.max(self, dim, keepdim))  # NaN, if there is one
    none = emit(op.isnan(largest))
    return op.where(none, largest, values), op.where(none, op.argmax(self, dim, keepdim), places)


def _median_of_all(emit: Emit, self: relax.Expr) -> relax.Expr:
    return _median(emit, emit(op.reshape(self, (-1,))), 0)[0]


def _stepwise(
    name: str,
    joined: Callable[[Sequence[relax.Expr], Sequence[relax.Expr]], Sequence[relax.Expr]],
    emit: Emit,
    dim: int,
    values: Sequence[relax.Expr],
) -> list[relax.Expr]:
    """Tensors joined with those before them along a dimension, in steps of 1, 2, 4, ... (Hillis and Steele).

    `joined` takes what is at places and what is before them.
    """
    extents = _extents(name, values[0])
    extent, step = extents[dim] if extents else 1, 1
    while step < extent:
        parts = [[emit(op.strided_slice(each, [dim], [low], [high])) for each in values]
                 for low, high in ((0, step), (step, extent), (0, extent - step))]  # fmt: skip
        values = [
            emit(op.concat([first, emit(rest)], dim)) for first, rest in zip(parts[0], joined(parts[1], parts[2]))
        ]
        step *= 2
    return [*values]


def _log_sums(emit: Emit, self: relax.Expr, dim: int) -> relax.Expr:
    wide = emit(op.astype(self, "float32" if str(self.ty.dtype) != "float64" else "float64"))
    return _stepwise("logcumsumexp", lambda at, before: [op.log_add_exp(at[0], before[0])], emit, dim, [wide])[0]


def _extremes(
    name: str, beyond: Callable[..., relax.Expr], emit: Emit, self: relax.Expr, dim: int
) -> tuple[relax.Expr, ...]:
    """The largest or least elements up to each, the last of equal ones, and their places; no number beats each."""
    extents = _extents(name, self)
    row = np.arange(extents[dim]).reshape([-1 if axis == dim % len(extents) else 1 for axis in range(len(extents))])
    places = emit(op.broadcast_to(relax.const(row, "int64"), extents))
    fractions = "float" in str(self.ty.dtype)

    def joined(at: Sequence[relax.Expr], before: Sequence[relax.Expr]) -> list[relax.Expr]:
        stays = beyond(at[0], before[0])
        if fractions:  # comparisons with no number don't hold
            stays = op.logical_or(op.isnan(at[0]), op.logical_and(stays, op.logical_not(op.isnan(before[0]))))
        kept = emit(stays)
        return [op.where(kept, one, other) for one, other in zip(at, before)]

    return tuple(_stepwise(name, joined, emit, dim, [self, places]))


def _adaptive_max_pool(count: int, emit: Emit, self: relax.Expr, output_size: Sequence[int]) -> relax.Expr:
    """The largest element of each window; dimension by dimension, windows padded with their last element."""
    extents = _extents("adaptive_max_pool", self)
    for axis, size in zip(range(len(extents) - count, len(extents)), output_size, strict=True):
        extent = extents[axis]
        low = np.arange(size) * extent // size
        high = -(-(np.arange(size) + 1) * extent // size)
        longest = int((high - low).max())
        places = np.minimum(low[:, None] + np.arange(longest), high[:, None] - 1)
        windows = emit(op.take(self, relax.const(places, "int64"), axis))
        self = emit(op.max(windows, axis + 1))
    return self


def _distances(emit: Emit, x1: relax.Expr, x2: relax.Expr, p: float, compute_mode: int | None = None) -> relax.Expr:
    """Of each row of one to each of the other."""
    far = emit(op.abs(op.subtract(op.expand_dims(x1, -2), op.expand_dims(x2, -3))))
    dtype = str(far.ty.dtype)
    if p == 0:
        return op.sum(op.astype(op.not_equal(far, relax.const(0, dtype)), dtype), -1)
    if p == 1:
        return op.sum(far, -1)
    if p == 2:
        return op.sqrt(op.sum(op.multiply(far, far), -1))
    if math.isinf(p):
        return op.max(far, -1)
    return op.power(op.sum(op.power(far, relax.const(p, dtype)), -1), relax.const(1 / p, dtype))


def _sampled(
    emit: Emit, input: relax.Expr, grid: relax.Expr, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> relax.Expr:
    """Volumes at places, whose numbers are from -1 to 1 and the last dimension's first."""
    batch, channels, *extents = _extents("grid_sampler_3d", input)
    places = _extents("grid_sampler_3d", grid)[1:-1]
    wide = "float64" if str(input.ty.dtype) == "float64" else "float32"
    data, at = emit(op.astype(input, wide)), emit(op.astype(grid, wide))
    points = [_point(emit, at, 2 - axis, extent, padding_mode, align_corners) for axis, extent in enumerate(extents)]
    rows = emit(op.reshape(data, (batch, channels, math.prod(extents))))
    if interpolation_mode == 1:
        corners = [[(emit(op.round(point)), None)] for point in points]
    else:
        corners = []
        for point in points:
            low = emit(op.floor(point))
            part = emit(op.subtract(point, low))
            one = relax.const(1, wide)
            corners.append([(low, emit(op.subtract(one, part))), (emit(op.add(low, one)), part)])
    found: Any = None
    for corner in itertools.product(*corners):
        taken = _at_corner(emit, rows, [place for place, _ in corner], extents, (batch, channels, *places))
        for _, share in corner:
            taken = taken if share is None else op.multiply(taken, op.expand_dims(share, 1))
        found = emit(taken if found is None else op.add(found, taken))
    return found


def _point(emit: Emit, grid: relax.Expr, number: int, extent: int, padding_mode: int, align_corners: bool) -> relax.Var:
    """The place along a dimension: outside, at the border, or mirrored, as the mode says (0, 1 and 2)."""
    dtype = str(grid.ty.dtype)

    def const(value: float) -> relax.Expr:
        return relax.const(value, dtype)

    x = emit(op.squeeze(op.take(grid, relax.const([number], "int64"), len(grid.ty.shape) - 1), [-1]))
    x = emit(op.add(x, const(1)))
    if align_corners:
        x = emit(op.multiply(x, const((extent - 1) / 2)))
    else:
        x = emit(op.subtract(op.multiply(x, const(extent / 2)), const(0.5)))
    if padding_mode == 2:
        low, span = (0.0, extent - 1.0) if align_corners else (-0.5, float(extent))
        if span == 0:
            return emit(op.zeros_like(x))
        far = emit(op.abs(op.subtract(x, const(low))))
        turns = emit(op.floor(op.divide(far, const(span))))
        rest = emit(op.subtract(far, op.multiply(turns, const(span))))
        odd = op.subtract(turns, op.multiply(op.floor(op.multiply(turns, const(0.5))), const(2)))
        mirrored = op.where(op.greater(odd, const(0.5)), op.subtract(const(span), rest), rest)
        x = emit(op.add(mirrored, const(low)))
    if padding_mode:
        x = emit(op.minimum(op.maximum(x, const(0)), const(extent - 1)))
    return x


def _at_corner(
    emit: Emit, rows: relax.Expr, corner: Sequence[relax.Expr], extents: Sequence[int], shape: Sequence[int]
) -> relax.Var:
    """Elements at whole places, and zeros at those outside."""
    inside: Any = None
    flat: Any = None
    for place, extent in zip(corner, extents, strict=True):
        dtype = str(place.ty.dtype)
        zero, last = relax.const(0, dtype), relax.const(extent - 1, dtype)
        within = op.logical_and(op.greater_equal(place, zero), op.less_equal(place, last))
        inside = within if inside is None else op.logical_and(inside, within)
        whole = op.astype(op.minimum(op.maximum(place, zero), last), "int64")
        flat = whole if flat is None else op.add(op.multiply(flat, relax.const(extent, "int64")), whole)
    batch, channels, *places = shape
    count = math.prod(places)
    index = emit(op.broadcast_to(op.reshape(emit(flat), (batch, 1, count)), (batch, channels, count)))
    taken = emit(op.reshape(emit(op.gather_elements(rows, index, axis=2)), shape))
    return emit(op.where(op.expand_dims(emit(inside), 1), taken, op.zeros_like(taken)))


_REDUCED = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def _scattered(
    emit: Emit,
    self: relax.Expr,
    dim: int,
    index: relax.Expr,
    src: relax.Expr,
    reduce: str = "sum",
    include_self: bool = True,
) -> relax.Expr:
    """The elements of one tensor added to those of another, or joined with them otherwise, along a dimension."""
    if reduce not in _REDUCED or not include_self:
        given = f"reduce={reduce!r}" if include_self else "include_self=False"
        raise InputError(f"scatter_reduce: {given} isn't imported; valid are {', '.join(_REDUCED)}, with the elements")
    counts = _extents("scatter", index)
    if counts != _extents("scatter", src):
        axes = [*range(len(counts))]
        src = emit(op.strided_slice(src, axes, [0] * len(counts), counts))
    return op.scatter_elements(self, index, src, dim, _REDUCED[reduce])


SELECTIONS: Mapping[str, Callable[..., Any]] = {
    "_cdist_forward.default": _distances,
    "adaptive_max_pool2d.default": partial(_adaptive_max_pool, 2),
    "adaptive_max_pool3d.default": partial(_adaptive_max_pool, 3),
    "argsort.default": _order,
    "argsort.stable": _order,
    "cummax.default": partial(_extremes, "cummax", op.greater_equal),
    "cummin.default": partial(_extremes, "cummin", op.less_equal),
    "grid_sampler_3d.default": _sampled,
    "kthvalue.default": _kth,
    "logcumsumexp.default": _log_sums,
    "median.default": _median_of_all,
    "median.dim": _median,
    "scatter_add.default": _scattered,
    "scatter_reduce.two": _scattered,
    "sort.default": _sorted,
    "sort.stable": _sorted,
    "topk.default": _first,
}
