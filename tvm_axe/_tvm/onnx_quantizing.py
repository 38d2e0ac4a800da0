"""ONNX's quantized numbers: to them and back, and products and convolutions of them.

A number y of few bits stands for ``(y - zero_point) * scale``, where scale and zero point are of all, of each place of
a dimension, or of each block of so many of a dimension. Source: ONNX operators, DequantizeLinear-25, QuantizeLinear-25.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_axe._tvm.formulas import less_zero_point
from tvm_axe._tvm.onnx_call import Call, dtype_of, rank_of

__all__ = ["QUANTIZING"]

_FEW = ("int8", "uint8", "int16", "uint16", "int32", "float8_e4m3fn", "float8_e5m2")


def _named(kind: int) -> str:
    """A type by its number in ONNX."""
    import onnx

    return str(onnx.helper.tensor_dtype_to_np_dtype(kind))


def _along(value: Any, rank: int, axis: int | None) -> Any:
    """A vector along one dimension of so many."""
    if rank_of(value) != 1:
        return value
    if axis is None or int(value.ty.shape[0]) == 1:
        return op.reshape(value, ())
    return op.reshape(value, [-1 if dim == axis % rank else 1 for dim in range(rank)])


# ---- To few bits and back


def _spread(call: Call, value: Any, x: Any, axis: int, block_size: int) -> Any:
    """A scale or zero point with that of each element of `x` at its place, or where it is broadcast from."""
    if not block_size:
        return _along(value, rank_of(x), axis if rank_of(x) > 1 else 0)
    axis %= rank_of(x)
    return op.strided_slice(call.emit(op.repeat(value, block_size, axis)), [axis], [0], [x.ty.shape[axis]])


def _dequantized(
    call: Call, x: Any, scale: Any, zero_point: Any = None, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Any:
    """In float32, as ONNX's own, and then of the type that is asked for: that of the scale if none is."""
    _check(call, dtype_of(x))
    number = x
    if zero_point is not None and not dtype_of(x).startswith("float"):
        number = less_zero_point(call.emit, x, _spread(call, zero_point, x, axis, block_size))
    wide = call.emit(op.astype(_spread(call, scale, x, axis, block_size), "float32"))
    value = call.emit(op.multiply(call.emit(op.astype(number, "float32")), wide))
    return op.astype(value, _named(output_dtype) if output_dtype else dtype_of(scale))


def _quantized(
    call: Call, x: Any, scale: Any, zero_point: Any = None, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
    saturate: int = 1, precision: int = 0,
) -> Any:  # fmt: skip
    """Integers are rounded to the nearest, the even one of two; floats as a cast does it."""
    dtype = dtype_of(zero_point) if zero_point is not None else _named(output_dtype) if output_dtype else "uint8"
    _check(call, dtype)
    made = _named(precision) if precision else "float32"
    wide = call.emit(op.astype(_spread(call, scale, x, axis, block_size), made))
    value = call.emit(op.divide(call.emit(op.astype(x, made)), wide))
    if dtype.startswith("float"):
        most = float(ml_dtypes.finfo(getattr(ml_dtypes, dtype)).max)
        return op.astype(call.emit(op.clip(value, -most, most)) if saturate else value, dtype)
    zero = None if zero_point is None else _spread(call, zero_point, x, axis, block_size)
    return _limited(call, call.emit(op.round(value)), zero, dtype)


def _check(call: Call, dtype: str) -> None:
    if dtype not in _FEW:
        raise call.refused(f"a quantized type of {dtype}", f"use one of {', '.join(_FEW)}")


def _limited(call: Call, value: Any, zero_point: Any, dtype: str) -> Any:
    """Whole floats and a zero point as an integer of a type, or its least or greatest."""
    if zero_point is not None:
        value = call.emit(op.add(value, op.astype(zero_point, dtype_of(value))))
    limits = np.iinfo(dtype)
    return op.astype(op.clip(value, int(limits.min), int(limits.max)), dtype)


# ---- Products


def _whole(call: Call, value: Any, zero_point: Any, axis: int | None) -> Any:
    """What is quantized as int32, less its zero point, which may be one for each place of a dimension."""
    along = None if zero_point is None else _along(zero_point, rank_of(value), axis)
    return less_zero_point(call.emit, value, along)


def _conv_integer(call: Call, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None, **attributes: Any) -> Any:
    return call.upstream("Conv", [_whole(call, x, x_zero, None), _whole(call, w, w_zero, 0), None], **attributes)


def _requantized(call: Call, sums: Any, scale: Any, out_scale: Any, zero_point: Any) -> Any:
    ratio = op.divide(op.astype(scale, "float32"), op.astype(_along(out_scale, 1, None), "float32"))
    value = call.emit(op.round(op.multiply(op.astype(sums, "float32"), ratio)))
    return _limited(call, value, _along(zero_point, 1, None), dtype_of(zero_point))


def _qlinear_conv(
    call: Call, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, y_scale: Any, y_zero: Any,
    bias: Any = None, **attributes: Any,
) -> Any:  # fmt: skip
    sums = call.emit(_conv_integer(call, x, w, x_zero, w_zero, **attributes))
    if bias is not None:
        sums = call.emit(op.add(sums, _along(bias, rank_of(x), 1)))
    scale = call.emit(op.multiply(_along(x_scale, 1, None), _along(w_scale, rank_of(x), 1)))
    return _requantized(call, sums, scale, y_scale, y_zero)


def _qlinear_matmul(
    call: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any
) -> Any:
    one, two = _whole(call, a, a_zero, -2), _whole(call, b, b_zero, -1)
    scale = call.emit(op.multiply(_along(a_scale, max(rank_of(a), 2), -2), _along(b_scale, max(rank_of(b), 2), -1)))
    return _requantized(call, call.emit(op.matmul(one, two, "int32")), scale, y_scale, y_zero)


def _matmul_nbits(
    call: Call, a: Any, b: Any, scales: Any, zero_points: Any = None, g_idx: Any = None, bias: Any = None, K: int = 0,
    N: int = 0, bits: int = 4, block_size: int = 0, accuracy_level: int = 0,
) -> Any:  # fmt: skip
    """ONNX Runtime's product with weights of four or eight bits: codes of a row in blocks, each with its scale.

    Source: ONNX Runtime, "Contrib operators: com.microsoft.MatMulNBits".
    """
    if bits not in _CODES:
        raise call.refused(f"weights of {bits} bits", "quantize them to 4 or 8 bits")
    if g_idx is not None:
        raise call.refused("columns have groups by an index, g_idx", "quantize without act_order")
    dtype, blocks = dtype_of(a), -(-K // block_size)
    codes = call.emit(op.reshape(_codes(call, b, bits), (N, blocks, block_size)))
    if zero_points is None:
        number = less_zero_point(call.emit, codes, relax.const(1 << bits - 1, "int32"))
    elif dtype_of(zero_points) == "uint8":
        of_bytes = call.emit(op.reshape(zero_points, (N, -(-blocks * bits // 8))))
        zero = call.emit(op.strided_slice(_codes(call, of_bytes, bits), [1], [0], [blocks]))
        number = less_zero_point(call.emit, codes, op.reshape(zero, (N, blocks, 1)))
    else:
        number = call.emit(op.subtract(call.emit(op.astype(codes, dtype)), op.reshape(zero_points, (N, blocks, 1))))
    scale = call.emit(op.reshape(scales, (N, blocks, 1)))
    wide = call.emit(op.multiply(call.emit(op.astype(number, dtype_of(scales))), scale))
    weight = call.emit(op.strided_slice(op.reshape(wide, (N, blocks * block_size)), [1], [0], [K]))
    made = call.emit(op.matmul(a, op.permute_dims(call.emit(op.astype(weight, dtype)))))
    return made if bias is None else op.add(made, bias)


_CODES = (4, 8)
"""Bits of a code that there are."""


def _codes(call: Call, of_bytes: Any, bits: int) -> Any:
    """The codes of bytes, along the last dimension, that in the low bits first."""
    if bits == 8:
        return of_bytes
    low = call.emit(op.bitwise_and(of_bytes, relax.const(15, "uint8")))
    high = call.emit(op.right_shift(of_bytes, relax.const(4, "uint8")))
    *rows, columns = of_bytes.ty.shape
    return call.emit(op.reshape(op.stack([low, high], -1), (*rows, 2 * int(columns))))


QUANTIZING: Mapping[str, Callable[..., Any]] = {
    "ConvInteger": _conv_integer,
    "DequantizeLinear": _dequantized,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "QuantizeLinear": _quantized,
    "com.microsoft.MatMulNBits": _matmul_nbits,
}
"""Converters by operator."""
