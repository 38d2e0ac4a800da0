"""Pictures and sequences of another size, as PyTorch's ``interpolate`` makes them, of extents that aren't known too.

Where an element comes from is a number by dimension, so each is resized by itself: of known extents the places are
constants, of others they are computed of the extents, in float32 as PyTorch computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from tvm_axe._tvm.torch_sizes import arguments_of, shape_said, size_of
from tvm_axe.errors import InputError

__all__ = ["linear", "nearest"]

Emit = Callable[[relax.Expr], relax.Var]


def nearest(node: Any, importer: Any) -> relax.Expr:
    """Of the row and the column that PyTorch takes, whose numbers are rounded down."""
    given, emit = arguments_of(node), importer.block_builder.emit
    found = importer.env[given["input"]]
    for axis, extent, count, factor in _dimensions(node, importer):
        if isinstance(extent, int) and isinstance(count, int):
            scale = np.float32(1 / factor if factor else extent / count)
            rows = np.floor(np.arange(count, dtype="float32") * scale).astype("int64")
            found = emit(op.take(found, relax.const(np.minimum(rows, extent - 1), "int64"), axis))
        else:
            at = emit(op.multiply(_numbers(count), emit(_step(extent, count, factor))))
            found = emit(op.take(found, emit(_at_most(_floor(at), extent)), axis, mode="clip"))
    return found


def linear(node: Any, importer: Any) -> relax.Expr:
    """Interpolated linearly along each dimension, between the elements that PyTorch takes."""
    given, emit = arguments_of(node), importer.block_builder.emit
    found, corners = importer.env[given["input"]], bool(given["align_corners"])
    wide = "float64" if str(found.ty.dtype) == "float64" else "float32"
    found = emit(op.astype(found, wide))
    for axis, extent, count, factor in _dimensions(node, importer):
        between = _constants if isinstance(extent, int) and isinstance(count, int) else _computed
        low, high, part = between(emit, extent, count, factor, corners)
        behind = [*range(1, len(found.ty.shape) - axis)]
        share = emit(op.astype(emit(op.expand_dims(part, behind)) if behind else part, wide))
        near, far = (emit(op.take(found, places, axis, mode="clip")) for places in (low, high))
        found = emit(op.add(near, op.multiply(op.subtract(far, near), share)))
    return found


def _dimensions(node: Any, importer: Any) -> Iterator[tuple[int, Any, Any, float | None]]:
    """Each dimension that is resized: its number, its extent and the result's, and by which factor, if that is said.

    Raises
    ------
    InputError
        An extent is made of what is no size of an input's.
    """
    given = arguments_of(node)
    shape, factors = importer.env[given["input"]].ty.shape, given["scale_factors"]
    for axis, count in enumerate(shape_said(node, importer)):
        if axis < 2:
            continue
        if count is None:
            raise InputError(
                f"{node.name}: dimension {axis} is made {node.meta['val'].shape[axis]}, which isn't made of inputs' "
                "extents; export the model with extents that are known"
            )
        extent = shape[axis]
        yield (
            axis,
            int(extent) if isinstance(extent, tirx.IntImm) else extent,
            int(count) if isinstance(count, tirx.IntImm) else count,
            factors[axis - 2] if factors else None,
        )


def _constants(emit: Emit, extent: int, count: int, factor: float | None, corners: bool) -> tuple[Any, Any, Any]:
    """The places before and behind each element, and its way from one to the other."""
    row = np.arange(count, dtype="float64")
    if corners:
        at = row * ((extent - 1) / (count - 1) if count > 1 else 0)
    else:
        at = np.maximum((row + 0.5) * (1 / factor if factor else extent / count) - 0.5, 0)
    low = np.minimum(np.floor(at).astype("int64"), extent - 1)
    high = np.minimum(low + 1, extent - 1)
    return relax.const(low, "int64"), relax.const(high, "int64"), relax.const(at - low, "float64")


def _computed(emit: Emit, extent: Any, count: Any, factor: float | None, corners: bool) -> tuple[Any, Any, Any]:
    """The same, of extents that aren't known."""
    row, half = emit(_numbers(count)), relax.const(0.5, "float32")
    if corners:
        at = emit(op.multiply(row, emit(_step(extent - 1, tirx.max(count - 1, 1), None))))
    else:
        middle = emit(op.multiply(op.add(row, half), emit(_step(extent, count, factor))))
        at = emit(op.maximum(op.subtract(middle, half), relax.const(0.0, "float32")))
    low = emit(_at_most(_floor(at), extent))
    high = emit(_at_most(op.add(low, relax.const(1, "int64")), extent))
    return low, high, emit(op.subtract(at, op.astype(low, "float32")))


def _step(extent: Any, count: Any, factor: float | None) -> relax.Expr:
    """How far neighbours of the result are from each other in what is resized."""
    if factor:
        return relax.const(np.float32(1 / factor), "float32")
    return op.divide(*(op.astype(size_of(each), "float32") for each in (extent, count)))


def _numbers(count: Any) -> relax.Expr:
    return op.astype(op.arange(0, count, 1, "int64"), "float32")


def _floor(at: relax.Expr) -> relax.Expr:
    return op.astype(op.floor(at), "int64")


def _at_most(places: relax.Expr, extent: Any) -> relax.Expr:
    return op.minimum(places, size_of(extent - 1))
