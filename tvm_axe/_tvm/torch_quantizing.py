"""PyTorch's quantized numbers as its export has them, `quantized_decomposed`: to integers and back.

An integer q stands for ``(q - zero_point) * scale``, where scale and zero point are of all, of each place of a
dimension, of each row, or of each group of neighbours in a row. The formulas are as those of
`tvm_axe._tvm.torch_formulas`. Source: PyTorch, torch/ao/quantization/fx/_decomposed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax
from tvm.relax import op

from tvm_axe._tvm.formulas import Emit, less_zero_point

__all__ = ["QUANTIZING"]


def _named(kind: Any) -> str:
    return str(kind).removeprefix("torch.")


def _tensor(value: Any, dtype: str) -> relax.Expr:
    """A number, or a tensor, as a tensor of a type."""
    return op.astype(value, dtype) if isinstance(value, relax.Expr) else relax.const(value, dtype)


def _along(emit: Emit, value: Any, of: relax.Expr, axis: int) -> Any:
    """A vector along one dimension of a tensor; None stays None."""
    if value is None:
        return None
    rank = len(of.ty.shape)
    return emit(op.reshape(value, [-1 if dim == axis % rank else 1 for dim in range(rank)]))


def _integer(
    emit: Emit, x: relax.Expr, scale: Any, zero: Any, limits: tuple[Any, Any], dtype: Any, behind: bool = False
) -> relax.Expr:
    """Rounded to the nearest integer, the even one of two, and then moved by the zero point; `behind` that is first."""
    made = "float64" if isinstance(scale, relax.Expr) and str(scale.ty.dtype) == "float64" else "float32"
    inverse = _tensor(1.0 / scale, made) if isinstance(scale, float) else emit(op.divide(_tensor(1.0, made), scale))
    value = emit(op.multiply(emit(op.astype(x, made)), inverse))
    zero = emit(_tensor(zero, made))
    value = emit(op.round(emit(op.add(value, zero)))) if behind else emit(op.add(emit(op.round(value)), zero))
    return op.astype(emit(op.clip(value, *map(int, limits))), _named(dtype))


def _number(emit: Emit, q: relax.Expr, scale: Any, zero: Any, out: Any) -> relax.Expr:
    """What an integer stands for, of the scale's type or float32, and then of the type that is asked for."""
    made = str(scale.ty.dtype) if isinstance(scale, relax.Expr) else "float32"
    whole = less_zero_point(emit, q, None if zero is None else _tensor(zero, "int32"))
    value = emit(op.multiply(emit(op.astype(whole, made)), _tensor(scale, made)))
    return op.astype(value, "float32" if out is None else _named(out))


def _quantize(
    emit: Emit, input: relax.Expr, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: Any
) -> relax.Expr:
    return _integer(emit, input, scale, zero_point, (quant_min, quant_max), dtype)


def _dequantize(
    emit: Emit, input: relax.Expr, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: Any,
    out_dtype: Any = None,
) -> relax.Expr:  # fmt: skip
    return _number(emit, input, scale, zero_point, out_dtype)


def _quantize_channels(
    emit: Emit, input: relax.Expr, scales: Any, zero_points: Any, axis: int, quant_min: int, quant_max: int, dtype: Any
) -> relax.Expr:
    scale, zero = (_along(emit, each, input, axis) for each in (scales, zero_points))
    return _integer(emit, input, scale, zero, (quant_min, quant_max), dtype)


def _dequantize_channels(
    emit: Emit, input: relax.Expr, scales: Any, zero_points: Any, axis: int, quant_min: int, quant_max: int, dtype: Any,
    out_dtype: Any = None,
) -> relax.Expr:  # fmt: skip
    scale, zero = (_along(emit, each, input, axis) for each in (scales, zero_points))
    return _number(emit, input, scale, zero, out_dtype)


def _quantize_tokens(
    emit: Emit, input: relax.Expr, scales: Any, zero_points: Any, quant_min: int, quant_max: int, dtype: Any
) -> relax.Expr:
    return _integer(emit, input, scales, zero_points, (quant_min, quant_max), dtype, behind=True)


def _dequantize_tokens(
    emit: Emit, input: relax.Expr, scales: Any, zero_points: Any, quant_min: int, quant_max: int, dtype: Any,
    output_dtype: Any,
) -> relax.Expr:  # fmt: skip
    return _number(emit, input, scales, zero_points, output_dtype)


def _grouped(emit: Emit, input: relax.Expr, scales: Any, zero_points: Any) -> tuple[relax.Expr, Any, Any]:
    """A matrix as (rows, groups, group), and what belongs to a group as (rows, groups, 1)."""
    rows, columns = map(int, input.ty.shape)
    groups = int(scales.ty.shape[-1])
    parts = [None if each is None else emit(op.reshape(each, (rows, groups, 1))) for each in (scales, zero_points)]
    return emit(op.reshape(input, (rows, groups, columns // groups))), *parts


def _quantize_groups(
    emit: Emit, input: relax.Expr, scales: Any, zero_points: Any, quant_min: int, quant_max: int, dtype: Any,
    group_size: int = 128,
) -> relax.Expr:  # fmt: skip
    made = emit(_integer(emit, *_grouped(emit, input, scales, zero_points), (quant_min, quant_max), dtype, behind=True))
    return op.reshape(made, input.ty.shape)


def _dequantize_groups(
    emit: Emit, input: relax.Expr, scales: Any, zero_points: Any, quant_min: int, quant_max: int, dtype: Any,
    group_size: int = 128, output_dtype: Any = None,
) -> relax.Expr:  # fmt: skip
    made = emit(_number(emit, *_grouped(emit, input, scales, zero_points), output_dtype))
    return op.reshape(made, input.ty.shape)


QUANTIZING: Mapping[str, Callable[..., Any]] = {
    "quantize_per_tensor.default": _quantize,
    "quantize_per_tensor.tensor": _quantize,
    "dequantize_per_tensor.default": _dequantize,
    "dequantize_per_tensor.tensor": _dequantize,
    "quantize_per_channel.default": _quantize_channels,
    "dequantize_per_channel.default": _dequantize_channels,
    "quantize_per_token.default": _quantize_tokens,
    "dequantize_per_token.default": _dequantize_tokens,
    "quantize_per_channel_group.default": _quantize_groups,
    "dequantize_per_channel_group.default": _dequantize_groups,
}
"""Formulas by operator."""
