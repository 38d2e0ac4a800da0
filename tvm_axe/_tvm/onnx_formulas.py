"""Operators of ONNX that upstream's importer doesn't know, or makes something else, in operators of Relax.

A converter takes the call, the node's inputs, of which those left out are None, and its attributes by their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax import op

from tvm_axe._tvm.formulas import elu, number, shifted
from tvm_axe._tvm.onnx_attention import (
    attention,
    layer_norm_of_sum,
    multi_head_attention,
    packed_attention,
    rms_norm,
    rms_norm_of_sum,
    rotary_embedding,
    rotary_embedding_of_positions,
)
from tvm_axe._tvm.onnx_call import Call, dtype_of, rank_of
from tvm_axe._tvm.onnx_loops import loop, scan
from tvm_axe._tvm.onnx_quantizing import QUANTIZING
from tvm_axe._tvm.onnx_recurrent import gru, lstm, rnn
from tvm_axe._tvm.onnx_resizing import resize, upsample

__all__ = ["CONVERTERS"]


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _truth(value: Any) -> bool:
    return bool(int(value))


# ---- Constants and shapes


def _constant(call: Call, **given: Any) -> Any:
    kinds = {"value_int": "int64", "value_ints": "int64", "value_float": "float32", "value_floats": "float32"}
    ((name, value),) = given.items()
    if name == "value":
        return relax.const(value, str(value.dtype))
    if name not in kinds:
        raise call.refused(f"a constant of {name}", "give it as a tensor")
    return relax.const(np.asarray(value, kinds[name]), kinds[name])


def _constant_of_shape(call: Call, shape: Any, value: Any = None) -> Any:
    filled = np.zeros(1, "float32") if value is None else value.reshape(1)
    known, dtype = call.known(shape), str(filled.dtype)
    if known is not None:
        return relax.const(np.full(known.tolist(), filled[0], dtype), dtype)
    return op.full(call.sizes(shape), relax.const(filled[0], dtype), dtype)


def _reshape(call: Call, data: Any, shape: Any, allowzero: int = 0) -> Any:
    """To a shape that becomes known when the model runs: zeros are the extents of before, -1 is what is left."""
    if call.known(shape) is not None or isinstance(shape, relax.ShapeExpr) or isinstance(data, relax.ShapeExpr):
        return call.upstream("Reshape", [data, shape], allowzero=allowzero)
    count, rank = int(shape.ty.shape[0]), rank_of(data)
    asked, before = call.emit(op.astype(shape, "int64")), call.emit(op.shape_to_tensor(op.shape_of(data)))
    one, zero, left = (relax.const(value, "int64") for value in (1, 0, -1))
    if not allowzero:
        head = op.strided_slice(before, [0], [0], [min(count, rank)])
        more = [relax.const(np.ones(count - rank), "int64")] if count > rank else []
        asked = call.emit(op.where(op.equal(asked, zero), op.concat([call.emit(head), *more]), asked))
    free = call.emit(op.equal(asked, left))
    known = op.prod(op.where(free, one, asked))
    rest = op.floor_divide(op.prod(before), op.maximum(known, one))
    return op.reshape(data, call.sizes(call.emit(op.where(free, rest, asked))))


def _expand(call: Call, data: Any, shape: Any) -> Any:
    """To the larger of both extents, as far as they are known here; upstream's of a shape that isn't."""
    wanted = [*call.sizes(shape).values]
    extents = [*data.ty.shape]
    rank = max(len(wanted), len(extents))
    wanted, extents = ([tirx.IntImm("int64", 1)] * (rank - len(each)) + each for each in (wanted, extents))
    made = []
    for want, extent in zip(wanted, extents):
        if _is_one(want) or tvm_ffi.structural_equal(want, extent):
            made.append(extent)
        elif _is_one(extent) or not isinstance(extent, tirx.IntImm):
            made.append(want)
        elif isinstance(want, tirx.IntImm):
            raise call.refused(f"{int(extent)} elements can't be {int(want)}", "give a shape that it is broadcast to")
        else:
            made.append(extent)
    return op.broadcast_to(data, relax.ShapeExpr(made))


def _is_one(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _on_sizes(upstream: str, function: Callable[[Any, Any], Any], call: Call, x: Any, y: Any) -> Any:
    """Sums and products of sizes stay sizes."""
    if not any(isinstance(each, relax.ShapeExpr) for each in (x, y)):
        return call.upstream(upstream, [x, y])
    sides = [_listed(call, each) for each in (x, y)]
    if None in sides:
        return call.upstream(
            upstream, [op.shape_to_tensor(each) if isinstance(each, relax.ShapeExpr) else each for each in (x, y)]
        )
    count = max(map(len, sides))
    one, two = ([*each] * count if len(each) == 1 else each for each in sides)
    return relax.ShapeExpr([function(a, b) for a, b in zip(one, two, strict=True)])


def _concat(call: Call, *inputs: Any, axis: int) -> Any:
    """Sizes and whole numbers one behind the other are sizes."""
    if any(isinstance(each, relax.ShapeExpr) for each in inputs):
        sides = [_listed(call, each) for each in inputs]
        if None not in sides:
            return relax.ShapeExpr([size for side in sides for size in side])
    return op.concat([op.shape_to_tensor(each) if isinstance(each, relax.ShapeExpr) else each for each in inputs], axis)


def _listed(call: Call, value: Any) -> Any:
    """Sizes one by one, or None."""
    if isinstance(value, relax.ShapeExpr):
        return [*value.values]
    if ir.is_prim_expr(value):
        return [value]
    known = call.known(value)
    return None if known is None or known.ndim > 1 else [tirx.IntImm("int64", int(each)) for each in known.reshape(-1)]


def _eye_like(call: Call, data: Any, dtype: Any = None, k: int = 0) -> Any:
    rows, columns = map(int, data.ty.shape)
    kind = dtype or dtype_of(data)
    return relax.const(np.eye(rows, columns, k).astype(kind), kind)


def _gather(call: Call, data: Any, indices: Any, axis: int = 0) -> Any:
    """Sizes of a shape at constant places stay sizes."""
    places = call.known(indices)
    if isinstance(data, relax.ShapeExpr) and places is not None and places.ndim == 1:
        return relax.ShapeExpr([data.values[int(at)] for at in places])
    return call.upstream("Gather", [data, indices], axis=axis)


def _one_hot(call: Call, indices: Any, depth: Any, values: Any, axis: int = -1) -> Any:
    count = int(call.constant(depth, "depth").reshape(()))
    rank = rank_of(indices) + 1
    at = axis % rank
    whole = call.emit(op.astype(indices, "int64"))
    whole = call.emit(op.where(op.less(whole, number(0, whole)), op.add(whole, number(count, whole)), whole))
    classes = np.arange(count).reshape([-1 if dim == at else 1 for dim in range(rank)])
    hit = op.equal(op.expand_dims(whole, at), relax.const(classes, "int64"))
    off, on = (call.emit(op.take(values, relax.const(which, "int64"), axis=0, mode="clip")) for which in (0, 1))
    return op.where(hit, on, off)


def _top_k(call: Call, x: Any, k: Any = None, **attributes: Any) -> Any:
    if dtype_of(x) == "uint64":
        raise call.refused("upstream sorts no uint64", "cast the input to int64, if its elements are below 2^63")
    return call.upstream("TopK", [x] if k is None else [x, k], **attributes)


def _trilu(call: Call, x: Any, k: Any = None, upper: int = 1) -> Any:
    """Of integers by a mask that is known here: of `triu` and `tril` of matrices of int64 upstream makes no code."""
    rows, columns = [*x.ty.shape][-2:]
    first = 0 if k is None else call.known(k)
    if first is None or _is_float(dtype_of(x)) or not all(isinstance(each, tirx.IntImm) for each in (rows, columns)):
        return call.upstream("Trilu", [x, k], upper=upper)
    row, column = np.arange(int(rows))[:, None] + int(np.reshape(first, ())), np.arange(int(columns))
    return op.where(relax.const(row <= column if upper else row >= column, "bool"), x, number(0, x))


# ---- Pointwise


def _is_inf(call: Call, x: Any, detect_negative: int = 1, detect_positive: int = 1) -> Any:
    if detect_negative and detect_positive:
        return op.isinf(x)
    if not detect_negative and not detect_positive:
        return op.zeros(x.ty.shape, "bool")
    zero = number(0, x)
    return op.logical_and(op.isinf(x), op.greater(x, zero) if detect_positive else op.less(x, zero))


def _shift(call: Call, x: Any, y: Any, direction: str) -> Any:
    return shifted(call.emit, x, y, direction == "LEFT")


def _mod(call: Call, x: Any, y: Any, fmod: int = 0) -> Any:
    if fmod or not _is_float(dtype_of(x)):
        return call.upstream("Mod", [x, y], fmod=fmod)
    rest = call.emit(op.mod(x, y))
    zero = number(0, x)
    turned = op.logical_xor(op.less(rest, zero), op.less(y, zero))
    return op.where(op.logical_and(op.not_equal(rest, zero), turned), op.add(rest, y), rest)


def _power(call: Call, x: Any, y: Any) -> Any:
    """In the type of the base, as ONNX has it."""
    dtype = dtype_of(x)
    if _is_float(dtype_of(y)) and not _is_float(dtype):
        return op.astype(op.power(op.astype(x, "float64"), op.astype(y, "float64")), dtype)
    return op.power(x, y if dtype_of(y) == dtype else op.astype(y, dtype))


def _elu(call: Call, x: Any, alpha: float = 1.0, gamma: float = 1.0, input_scale: float = 1.0) -> Any:
    made = call.emit(elu(call.emit, x, alpha, gamma, input_scale))
    return made if dtype_of(made) == dtype_of(x) else op.astype(made, dtype_of(x))


def _celu(call: Call, x: Any, alpha: float = 1.0) -> Any:
    return _elu(call, x, alpha, input_scale=1 / alpha)


_SELU = (1.67326319217681884765625, 1.05070102214813232421875)
"""Its alpha and gamma where none are given."""


def _thresholded(call: Call, x: Any, alpha: float = 1.0) -> Any:
    return op.where(op.greater(x, number(alpha, x)), x, number(0, x))


def _mish(call: Call, x: Any) -> Any:
    return op.multiply(x, op.tanh(call.upstream("Softplus", [x])))


def _quick_gelu(call: Call, x: Any, alpha: float = 1.702) -> Any:
    return op.multiply(x, op.sigmoid(op.multiply(x, number(alpha, x))))


def _dropout(call: Call, data: Any, ratio: Any = None, training: Any = None, **others: Any) -> Any:
    """Of a model that isn't trained: what it was given, and that all of it was kept."""
    if training is not None and _truth(call.constant(training, "training_mode")):
        rate = 0.5 if ratio is None else float(call.constant(ratio, "ratio"))
        if rate:
            raise call.refused("it is for training", "export the model for inference")
    return relax.Tuple([data, op.ones(data.ty.shape, "bool")]) if call.results > 1 else data


# ---- Reductions and norms


def _extreme(beyond: float, call: Call, data: Any, *axes: Any, **attributes: Any) -> Any:
    """The largest or the least, of truth values too; of no elements an infinity."""
    dtype = dtype_of(data)
    given = call.emit(op.astype(data, "int8")) if dtype == "bool" else data
    made = call.upstream(call.operator, [given, *axes], **attributes)  # before opset 18 axes are an attribute
    if dtype == "bool":
        return op.greater(made, number(0, made))
    empty = any(isinstance(extent, tirx.IntImm) and int(extent) == 0 for extent in data.ty.shape)
    return op.full(made.ty.shape, relax.const(beyond, dtype), dtype) if empty and _is_float(dtype) else made


def _layer_norm(
    call: Call, x: Any, scale: Any, bias: Any = None, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    rank, dtype = rank_of(x), dtype_of(x)
    axes = [*range(axis % rank, rank)]
    shape = [x.ty.shape[at] for at in axes]
    wide = call.emit(op.astype(x, "float32")) if stash_type == 1 and dtype != "float32" else x
    scales = [each if each is None else op.broadcast_to(each, shape) for each in (scale, bias)]
    scales[1] = op.zeros(shape, dtype) if bias is None else scales[1]
    scales = [
        call.emit(each if dtype_of(wide) == dtype else op.astype(each, dtype_of(wide)))
        for each in map(call.emit, scales)
    ]
    made = call.emit(op.nn.layer_norm(wide, *scales, axes, epsilon))
    made = made if dtype_of(wide) == dtype else op.astype(made, dtype)
    if call.results == 1:
        return made
    mean, spread = op.mean(wide, axes, True), op.variance(wide, axes, True)
    return relax.Tuple(
        [made, call.emit(mean), op.divide(number(1, wide), op.sqrt(op.add(spread, number(epsilon, wide))))]
    )


def _lp_norm(call: Call, x: Any, axis: int = -1, p: int = 2) -> Any:
    sums = op.sum(op.abs(x) if p == 1 else op.multiply(x, x), axis, True)
    size = call.emit(sums if p == 1 else op.sqrt(sums))
    return op.where(op.equal(size, number(0, size)), number(0, x), op.divide(x, size))


# ---- Pictures


def _conv_transpose(call: Call, x: Any, w: Any, bias: Any = None, **attributes: Any) -> Any:
    """With a shape that is asked for, the paddings follow from it."""
    asked, padded = attributes.pop("output_shape", None), attributes.get("auto_pad", "NOTSET")
    if asked is not None:
        count = rank_of(x) - 2
        strides, dilations = (attributes.get(name, [1] * count) for name in ("strides", "dilations"))
        more = attributes.get("output_padding", [0] * count)
        ahead, behind, extra = [], [], []
        for at in range(count):
            kernel = (int(w.ty.shape[at + 2]) - 1) * dilations[at] + 1
            total = strides[at] * (int(x.ty.shape[at + 2]) - 1) + more[at] + kernel - list(asked)[-count:][at]
            extra.append(more[at] + max(-total, 0))
            half = max(total, 0) // 2
            ahead.append(half if padded == "SAME_UPPER" else max(total, 0) - half)
            behind.append(max(total, 0) - ahead[-1])
        if any(size >= stride for size, stride in zip(extra, strides)):
            raise call.refused(f"output_shape {list(asked)} is beyond what the strides reach", "pad the result instead")
        attributes |= {"pads": [*ahead, *behind], "auto_pad": "NOTSET", "output_padding": extra}
    return call.upstream("ConvTranspose", [x, w, bias], **attributes)


def _roi_align(call: Call, x: Any, rois: Any, which: Any, **attributes: Any) -> Any:
    if attributes.get("mode") == "max":
        raise call.refused('its mode is "max", of which ONNX takes weighted neighbours', "use the mode avg")
    return call.upstream("RoiAlign", [x, rois, which], **attributes)


def _space_to_depth(call: Call, x: Any, blocksize: int, mode: str = "DCR") -> Any:
    batch, channels, rows, columns = x.ty.shape
    rows, columns = rows // blocksize, columns // blocksize
    parts = call.emit(op.reshape(x, (batch, channels, rows, blocksize, columns, blocksize)))
    order = [0, 3, 5, 1, 2, 4] if mode == "DCR" else [0, 1, 3, 5, 2, 4]
    return op.reshape(call.emit(op.permute_dims(parts, order)), (batch, channels * blocksize**2, rows, columns))


def _split(call: Call, data: Any, sizes: Any = None, **attributes: Any) -> Any:
    known = attributes.get("split") if sizes is None else call.constant(sizes, "split")
    if known is not None and 0 in [int(size) for size in known]:
        raise call.refused("a part has no elements", "leave it out")
    count = attributes.pop("num_outputs", call.results)
    extent = data.ty.shape[attributes.get("axis", 0)]
    if known is None and isinstance(extent, tirx.IntImm) and int(extent) % count:
        each = -(-int(extent) // count)
        sizes = relax.const(np.asarray([each] * (count - 1) + [int(extent) - each * (count - 1)]), "int64")
    return call.upstream("Split", [data, sizes], **attributes)


def _suppressed(call: Call, boxes: Any, scores: Any, *limits: Any, **attributes: Any) -> Any:
    for name, value in zip(("max_output_boxes_per_class", "iou_threshold", "score_threshold"), limits):
        if value is not None:
            call.constant(value, name)
    return call.upstream("NonMaxSuppression", [boxes, scores, *limits], **attributes)


def _log_sum_exp(call: Call, data: Any, *axes: Any, **attributes: Any) -> Any:
    largest = call.emit(call.upstream("ReduceMax", [data, *axes], **{**attributes, "keepdims": 1}))
    # Of infinities alone the sum is that infinity; minus itself it would be no number.
    far = call.emit(op.where(op.isfinite(largest), largest, op.zeros_like(largest)))
    terms = call.emit(op.exp(call.emit(op.subtract(data, far))))
    sums = call.emit(call.upstream("ReduceLogSum", [terms, *axes], **attributes))
    return op.add(sums, call.emit(call.upstream("ReduceMax", [far, *axes], **attributes)))


CONVERTERS: Mapping[str, Callable[..., Any]] = {
    **QUANTIZING,
    "Attention": attention,
    "Add": partial(_on_sizes, "Add", lambda a, b: a + b),
    "BitShift": _shift,
    "Celu": _celu,
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "ConvTranspose": _conv_transpose,
    "Div": partial(_on_sizes, "Div", tirx.truncdiv),
    "Dropout": _dropout,
    "Elu": _elu,
    "Expand": _expand,
    "EyeLike": _eye_like,
    "GRU": gru,
    "Gather": _gather,
    "IsInf": _is_inf,
    "LayerNormalization": _layer_norm,
    "LSTM": lstm,
    "Loop": loop,
    "LpNormalization": _lp_norm,
    "Mish": _mish,
    "Mod": _mod,
    "Mul": partial(_on_sizes, "Mul", lambda a, b: a * b),
    "NonMaxSuppression": _suppressed,
    "OneHot": _one_hot,
    "Pow": _power,
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": partial(_extreme, -math.inf),
    "ReduceMin": partial(_extreme, math.inf),
    "RNN": rnn,
    "RMSNormalization": rms_norm,
    "Reshape": _reshape,
    "Resize": resize,
    "Scan": scan,
    "Selu": partial(_elu, alpha=_SELU[0], gamma=_SELU[1]),
    "TopK": _top_k,
    "Trilu": _trilu,
    "Upsample": upsample,
    "com.microsoft.Attention": packed_attention,
    "com.microsoft.MultiHeadAttention": multi_head_attention,
    "com.microsoft.QuickGelu": _quick_gelu,
    "com.microsoft.RotaryEmbedding": rotary_embedding_of_positions,
    "com.microsoft.SkipLayerNormalization": layer_norm_of_sum,
    "com.microsoft.SkipSimplifiedLayerNormalization": rms_norm_of_sum,
    "RoiAlign": _roi_align,
    "RotaryEmbedding": rotary_embedding,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Sub": partial(_on_sizes, "Sub", lambda a, b: a - b),
    "SimplifiedLayerNormalization": rms_norm,
    "ThresholdedRelu": _thresholded,
}
