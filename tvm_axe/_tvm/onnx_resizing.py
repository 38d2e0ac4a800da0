"""ONNX's Resize: the pixels and the weights of each dimension worked out from its sizes, in operators of Relax.

Source: the operator's definition, and ``onnx/reference/ops/op_resize.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from tvm_axe._tvm.onnx_call import Call

__all__ = ["resize", "upsample"]

_FEW = 4
"""Up to how many pixels are taken one by one; more are a product."""


def upsample(call: Call, x: Any, scales: Any = None, mode: str = "nearest", **attributes: Any) -> Any:
    """What Resize was called before: its scales are an attribute or the second input."""
    given = attributes.pop("scales", None)
    factors = np.asarray(given, "float32") if given is not None else call.constant(scales, "scales")
    kept: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return resize(call, x, None, relax.const(factors, "float32"), **kept)


def resize(
    call: Call, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, *,
    antialias: int = 0, axes: Sequence[int] | None = None, coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75, exclude_outside: int = 0, extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch", mode: str = "nearest", nearest_mode: str = "round_prefer_floor",
) -> Any:  # fmt: skip
    """A tensor of another size, along each of its dimensions by itself."""
    rank = len(x.ty.shape)
    along = [axis % rank for axis in (axes or range(rank))]
    if isinstance(sizes, relax.ShapeExpr):
        sizes = list(sizes.values)
    elif sizes is not None:
        sizes = [int(size) for size in call.constant(sizes, "sizes")] or None
    factors = None if scales is None else [float(scale) for scale in call.constant(scales, "scales")] or None
    window = None if roi is None else [float(value) for value in call.constant(roi, "roi")]
    extents = [x.ty.shape[axis] for axis in along]
    changed = [
        (at, axis) for at, axis in enumerate(along)
        if (sizes is not None and not _same(sizes[at], extents[at])) or (factors is not None and factors[at] != 1)
    ]  # fmt: skip
    if coordinate_transformation_mode == "tf_crop_and_resize" and window:
        changed = [*enumerate(along)]
    if any(not isinstance(extents[at], tirx.IntImm) for at, _ in changed):
        raise call.refused("a dimension of unknown size is resized", "give the input's shape as shape_dict")
    counts, ratios = [0] * len(along), [1.0] * len(along)
    for at, _ in changed:
        extent = int(extents[at])
        ratios[at] = factors[at] if factors is not None else int(sizes[at]) / extent
        counts[at] = int(factors[at] * extent) if factors is not None else int(sizes[at])
    if sizes is not None and keep_aspect_ratio_policy != "stretch" and changed:
        one = (min if keep_aspect_ratio_policy == "not_larger" else max)(ratios[at] for at in range(len(along)))
        ratios, counts = [one] * len(along), [int(one * int(extent) + 0.5) for extent in extents]
    dtype, inside, made = str(x.ty.dtype), None, x
    for at, axis in changed:
        extent = int(extents[at])
        part = (window[at], window[at + len(along)]) if window else None
        places = _places(coordinate_transformation_mode, counts[at], extent, ratios[at], part)
        if coordinate_transformation_mode == "tf_crop_and_resize":
            seen = ((places >= 0) & (places <= extent - 1)).reshape([-1 if dim == axis else 1 for dim in range(rank)])
            inside = seen if inside is None else inside & seen
        if mode == "nearest":
            pixels = np.clip(_rounded(places, nearest_mode), 0, extent - 1)
            made = call.emit(op.take(made, relax.const(pixels, "int64"), axis=axis, mode="clip"))
            continue
        weights = _weights(places, extent, ratios[at], mode, bool(antialias), cubic_coeff_a, bool(exclude_outside))
        made = call.emit(op.astype(made, "float32")) if str(made.ty.dtype) not in ("float32", "float64") else made
        made = _combined(call, made, axis, weights)
    if str(made.ty.dtype) != dtype:
        made = call.emit(op.astype(op.round(made) if "int" in dtype else made, dtype))
    if inside is not None and not inside.all():
        made = op.where(relax.const(inside, "bool"), made, relax.const(extrapolation_value, dtype))
    return made


def _same(size: Any, extent: Any) -> bool:
    if isinstance(extent, tirx.IntImm) and not isinstance(size, tirx.Var):
        return int(size) == int(extent)
    return isinstance(size, tirx.Var) and isinstance(extent, tirx.Var) and size.same_as(extent)


def _places(mode: str, count: int, extent: int, ratio: float, part: tuple[float, float] | None) -> Any:
    """Where each pixel of the result lies among those that are given."""
    at, whole = np.arange(count, dtype="float64"), ratio * extent
    if mode == "align_corners":
        return at * 0 if whole == 1 else at * (extent - 1) / (whole - 1)
    if mode == "asymmetric":
        return at / ratio
    if mode == "tf_crop_and_resize":
        first, last = part or (0.0, 1.0)
        step = (last - first) * (extent - 1)
        return first * (extent - 1) + (at * 0 + step / 2 if count == 1 else at * step / (whole - 1))
    if mode == "pytorch_half_pixel" and whole == 1:
        return at * 0 - 0.5
    shift = extent / 2 * (1 - count / whole) if mode == "half_pixel_symmetric" else 0.0
    return shift + (at + 0.5) / ratio - 0.5


def _rounded(places: Any, mode: str) -> Any:
    found = {
        "round_prefer_floor": lambda: np.ceil(places - 0.5),
        "round_prefer_ceil": lambda: np.floor(places + 0.5),
        "floor": lambda: np.floor(places),
        "ceil": lambda: np.ceil(places),
    }[mode]()
    return found.astype("int64")


def _weights(places: Any, extent: int, ratio: float, mode: str, soft: bool, a: float, inner: bool) -> Any:
    """How much of each pixel that is given is in each one of the result: [result's, given]."""
    squeeze = min(ratio, 1.0) if soft else 1.0
    reach = (1 if mode == "linear" else 2) / squeeze
    made = np.zeros((len(places), extent))
    for row, place in enumerate(places):
        near = np.arange(math.floor(place - reach), math.ceil(place + reach) + 1)
        distance = np.abs(near - place) * squeeze
        if mode == "linear":
            share = np.clip(1 - distance, 0, None)
        else:
            close = ((a + 2) * distance - (a + 3)) * distance**2 + 1
            far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
            share = np.where(distance <= 1, close, np.where(distance < 2, far, 0))
        if inner:
            share = np.where((near >= 0) & (near < extent), share, 0)
        np.add.at(made[row], np.clip(near, 0, extent - 1), share / share.sum())
    return made


def _combined(call: Call, x: Any, axis: int, weights: Any) -> Any:
    """Sums of pixels along a dimension."""
    rank, dtype = len(x.ty.shape), str(x.ty.dtype)
    taken = max(int((weights != 0).sum(1).max()), 1)
    if taken > _FEW:
        last = [*(dim for dim in range(rank) if dim != axis), axis]
        product = op.matmul(op.permute_dims(x, last), relax.const(weights.T.astype(dtype), dtype))
        back = [last.index(dim) for dim in range(rank)]
        return call.emit(op.permute_dims(call.emit(product), back))
    order = np.argsort(weights == 0, axis=1, kind="stable")[:, :taken]
    made = None
    for pixels in order.T:
        share = weights[np.arange(len(weights)), pixels].reshape([-1 if dim == axis else 1 for dim in range(rank)])
        one = op.take(x, relax.const(pixels, "int64"), axis=axis, mode="clip")
        term = call.emit(op.multiply(one, relax.const(share.astype(dtype), dtype)))
        made = term if made is None else call.emit(op.add(made, term))
    return made
