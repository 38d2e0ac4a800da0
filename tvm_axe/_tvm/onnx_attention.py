"""ONNX's attention, and what ONNX Runtime makes of a decoder's layers, written out in operators of Relax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from tvm_axe._tvm.onnx_call import Call

__all__ = [
    "attention",
    "layer_norm_of_sum",
    "multi_head_attention",
    "packed_attention",
    "rms_norm",
    "rms_norm_of_sum",
    "rotary_embedding",
    "rotary_embedding_of_positions",
]


def attention(
    call: Call, query: Any, key: Any, value: Any, mask: Any = None, past_key: Any = None, past_value: Any = None,
    lengths: Any = None, *, is_causal: int = 0, kv_num_heads: int = 0, q_num_heads: int = 0,
    qk_matmul_output_mode: int = 0, scale: float | None = None, softcap: float = 0.0, softmax_precision: int = 1,
) -> Any:  # fmt: skip
    """ONNX's own: [batch, heads, tokens, size], or [batch, tokens, heads * size] with the number of heads told.

    Keys and values of fewer heads are those of several queries' heads beside each other.
    """
    if lengths is not None:
        raise call.refused("nonpad_kv_seqlen is given", "give a mask instead")
    flat = len(query.ty.shape) == 3
    if flat:
        query = _heads(call, query, q_num_heads)
        key, value = (_heads(call, each, kv_num_heads) for each in (key, value))
    if past_key is not None:
        key = call.emit(op.concat([past_key, key], axis=2))
        value = call.emit(op.concat([past_value, value], axis=2))
    made, scores = attend(
        call, query, key, value, mask, scale=scale, softcap=softcap,
        before=past_key.ty.shape[2] if past_key is not None else tirx.IntImm("int64", 0) if is_causal else None,
        causal=bool(is_causal), seen=qk_matmul_output_mode,
    )  # fmt: skip
    if flat:
        batch, heads, tokens, size = made.ty.shape
        made = call.emit(op.reshape(call.emit(op.permute_dims(made, [0, 2, 1, 3])), (batch, tokens, heads * size)))
    return relax.Tuple([made, key, value, scores][: call.results]) if call.results > 1 else made


def _heads(call: Call, x: Any, count: int) -> Any:
    """[batch, tokens, heads * size] as [batch, heads, tokens, size]."""
    batch, tokens, width = x.ty.shape
    split = call.emit(op.reshape(x, (batch, tokens, count, int(width) // count)))
    return call.emit(op.permute_dims(split, [0, 2, 1, 3]))


def attend(
    call: Call, query: Any, key: Any, value: Any, mask: Any, *, scale: float | None, softcap: float = 0.0,
    before: Any = None, causal: bool = False, seen: int = 0,
) -> tuple[Any, Any]:  # fmt: skip
    """What queries make of keys and values, all [batch, heads, tokens, size]; and its scores as `seen` numbers them.

    Rows that no key counts in are zeros. `before` is how many keys lie ahead of the first query, for a causal mask.
    """
    dtype, (_batch, heads, rows, size) = str(query.ty.dtype), query.ty.shape
    keys, wide = key.ty.shape[2], "float64" if dtype == "float64" else "float32"
    key, value = (_repeated(call, each, heads) for each in (key, value))
    factor = 1 / math.sqrt(int(size)) if scale is None else scale
    scores = call.emit(op.matmul(query, call.emit(op.permute_dims(key, [0, 1, 3, 2])), wide))
    scores = call.emit(op.multiply(scores, relax.const(factor, wide)))
    found = {0: scores}
    if softcap:
        cap = relax.const(softcap, wide)
        scores = call.emit(op.multiply(op.tanh(op.divide(scores, cap)), cap))
    found[1] = scores
    least, none = relax.const(-math.inf, wide), relax.const(0.0, wide)
    bias = None
    if mask is not None:
        last = mask.ty.shape[-1]
        if isinstance(last, tirx.IntImm) and isinstance(keys, tirx.IntImm) and int(last) < int(keys):
            filled = False if str(mask.ty.dtype) == "bool" else -math.inf
            more = op.full((*[*mask.ty.shape][:-1], int(keys) - int(last)), relax.const(filled, str(mask.ty.dtype)))
            mask = call.emit(op.concat([mask, more], axis=-1))
        bias = op.where(mask, none, least) if str(mask.ty.dtype) == "bool" else op.astype(mask, wide)
        bias = call.emit(bias)
    if causal:
        row = op.reshape(op.arange(before, before + rows, dtype="int64"), (rows, 1))
        column = op.reshape(op.arange(0, keys, dtype="int64"), (1, keys))
        ahead = call.emit(op.where(op.greater_equal(row, column), none, least))
        bias = ahead if bias is None else call.emit(op.add(bias, ahead))
    if bias is not None:
        scores = call.emit(op.add(scores, bias))
    found[2] = scores
    weights = call.emit(op.nn.softmax(scores, axis=-1))
    if bias is not None:
        counted = op.max(scores, axis=-1, keepdims=True)
        weights = call.emit(op.where(op.greater(counted, relax.const(float(np.finfo(wide).min), wide)), weights, none))
    found[3] = weights
    made = op.matmul(weights if dtype == wide else op.astype(weights, dtype), value, wide)
    made = call.emit(made if dtype == wide else op.astype(made, dtype))
    return made, call.emit(op.astype(found[seen], dtype))


def rotary_embedding(
    call: Call, x: Any, cos: Any, sin: Any, places: Any = None, *,
    interleaved: int = 0, num_heads: int = 0, rotary_embedding_dim: int = 0,
) -> Any:  # fmt: skip
    """ONNX's own: pairs of elements turned by the angles of their token, whose cosines and sines are given."""
    flat = len(x.ty.shape) == 3
    if flat and not num_heads:
        raise call.refused("num_heads isn't told", "give it as an attribute")
    x = _heads(call, x, num_heads) if flat else x
    batch, heads, tokens, size = x.ty.shape
    turned = rotary_embedding_dim or int(size)
    if places is not None:
        cos, sin = (call.emit(op.take(each, places, axis=0, mode="clip")) for each in (cos, sin))
    cos, sin = (call.emit(op.expand_dims(each, 1)) for each in (cos, sin))
    part = x if turned == int(size) else call.emit(op.strided_slice(x, [3], [0], [turned]))
    if interleaved:
        pairs = call.emit(op.reshape(part, (batch, heads, tokens, turned // 2, 2)))
        one, two = (call.emit(op.take(pairs, relax.const(at, "int64"), axis=4, mode="clip")) for at in (0, 1))
    else:
        halves = call.emit(op.split(part, 2, 3))
        one, two = call.emit(halves[0]), call.emit(halves[1])
    real = call.emit(op.subtract(op.multiply(one, cos), op.multiply(two, sin)))
    other = call.emit(op.add(op.multiply(one, sin), op.multiply(two, cos)))
    if interleaved:
        sides = [call.emit(op.expand_dims(each, 4)) for each in (real, other)]
        made = call.emit(op.reshape(call.emit(op.concat(sides, 4)), (batch, heads, tokens, turned)))
    else:
        made = call.emit(op.concat([real, other], 3))
    if turned < int(size):
        made = call.emit(op.concat([made, call.emit(op.strided_slice(x, [3], [turned], [int(size)]))], 3))
    if not flat:
        return made
    return op.reshape(call.emit(op.permute_dims(made, [0, 2, 1, 3])), (batch, tokens, heads * size))


def rotary_embedding_of_positions(call: Call, x: Any, places: Any, cos: Any, sin: Any, **attributes: Any) -> Any:
    """ONNX Runtime's, whose positions are the second input, one for each token of each sequence."""
    if len(places.ty.shape) != 2:
        raise call.refused("it is given the first position alone", "give one for each token")
    if attributes.pop("is_packed_batching", 0) or attributes.pop("scale", 1.0) != 1.0:
        raise call.refused("it has packed sequences or a scale", "leave them out")
    return rotary_embedding(call, x, cos, sin, places, **attributes)


def _repeated(call: Call, x: Any, heads: Any) -> Any:
    """Each head as often as queries have heads for it."""
    batch, given, tokens, size = x.ty.shape
    times = int(heads) // int(given)
    if times == 1:
        return x
    wide = op.broadcast_to(op.expand_dims(x, 2), (batch, given, times, tokens, size))
    return call.emit(op.reshape(call.emit(wide), (batch, heads, tokens, size)))


# ---- ONNX Runtime's


def multi_head_attention(
    call: Call, query: Any, key: Any = None, value: Any = None, bias: Any = None, mask: Any = None,
    relative: Any = None, past_key: Any = None, past_value: Any = None, *,
    num_heads: int, mask_filter_value: float = -10000.0, scale: float = 0.0, unidirectional: int = 0,
) -> Any:  # fmt: skip
    """ONNX Runtime's MultiHeadAttention of three tensors [batch, tokens, heads * size]."""
    ranks = [None if each is None else len(each.ty.shape) for each in (query, key, value)]
    if ranks != [3, 3, 3] or mask is not None:
        raise call.refused(
            "it has a mask of keys, or packed keys and values", "export the model without fusing attention"
        )
    if bias is not None:
        widths = [int(each.ty.shape[2]) for each in (query, key, value)]
        parts = call.emit(op.split(bias, [widths[0], widths[0] + widths[1]], 0))
        query, key, value = (call.emit(op.add(each, parts[at])) for at, each in enumerate((query, key, value)))
    return attention(
        call, query, key, value, relative, past_key, past_value,
        is_causal=unidirectional, kv_num_heads=num_heads, q_num_heads=num_heads, scale=scale or None,
    )  # fmt: skip


def packed_attention(
    call: Call, x: Any, weights: Any, bias: Any = None, mask: Any = None, past: Any = None, extra: Any = None, *,
    num_heads: int, mask_filter_value: float = -10000.0, scale: float = 0.0, unidirectional: int = 0,
    qkv_hidden_sizes: Any = None,
) -> Any:  # fmt: skip
    """ONNX Runtime's Attention: products for queries, keys and values as one, and a mask of keys in ones and zeros."""
    if past is not None or (mask is not None and len(mask.ty.shape) not in (2, 3)):
        raise call.refused("it has a past, or a mask of lengths", "give a mask [batch, tokens]")
    widths = [*(qkv_hidden_sizes or [int(weights.ty.shape[1]) // 3] * 3)]
    whole = call.emit(op.matmul(x, weights))
    whole = whole if bias is None else call.emit(op.add(whole, bias))
    parts = call.emit(op.split(whole, [widths[0], widths[0] + widths[1]], 2))
    query, key, value = (call.emit(parts[at]) for at in range(3))
    if mask is not None:
        one, dtype = relax.const(1, str(mask.ty.dtype)), str(x.ty.dtype)
        hidden = call.emit(op.astype(call.emit(op.subtract(one, mask)), dtype))
        hidden = call.emit(op.multiply(hidden, relax.const(mask_filter_value, dtype)))
        for _ in range(4 - len(mask.ty.shape)):
            hidden = call.emit(op.expand_dims(hidden, 1))
        extra = hidden if extra is None else call.emit(op.add(extra, hidden))
    return attention(
        call, query, key, value, extra,
        is_causal=unidirectional, kv_num_heads=num_heads, q_num_heads=num_heads, scale=scale or None,
    )  # fmt: skip


def layer_norm_of_sum(
    call: Call, x: Any, skip: Any, gamma: Any, beta: Any = None, bias: Any = None, *, epsilon: float = 1e-12
) -> Any:
    """ONNX Runtime's SkipLayerNormalization, whose fourth result is the sum."""
    total = _sum(call, x, skip, bias)
    shift = op.zeros(gamma.ty.shape, str(gamma.ty.dtype)) if beta is None else beta
    made = call.emit(op.nn.layer_norm(total, gamma, call.emit(shift), [-1], epsilon))
    return _with_sum(call, made, total)


def rms_norm_of_sum(call: Call, x: Any, skip: Any, gamma: Any, bias: Any = None, *, epsilon: float = 1e-12) -> Any:
    """ONNX Runtime's SkipSimplifiedLayerNormalization, whose fourth result is the sum."""
    total = _sum(call, x, skip, bias)
    return _with_sum(call, call.emit(op.nn.rms_norm(total, gamma, [-1], epsilon)), total)


def rms_norm(call: Call, x: Any, gamma: Any, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Any:
    """ONNX's RMSNormalization, which ONNX Runtime calls SimplifiedLayerNormalization: any weights, of any type."""
    if call.results > 1:
        raise call.refused("the inverse deviation is a result, too", "compute it from the input")
    rank, dtype = len(x.ty.shape), str(x.ty.dtype)
    wide = call.emit(op.astype(x, "float32")) if stash_type == 1 and dtype not in ("float32", "float64") else x
    axes = [*range(axis % rank, rank)]
    mean = op.mean(op.multiply(wide, wide), axes, True)
    root = op.sqrt(op.add(mean, relax.const(epsilon, str(wide.ty.dtype))))
    normed = call.emit(op.divide(wide, root))
    normed = normed if str(normed.ty.dtype) == dtype else call.emit(op.astype(normed, dtype))
    return op.multiply(normed, gamma)


def _sum(call: Call, x: Any, skip: Any, bias: Any) -> Any:
    total = call.emit(op.add(x, skip))
    return total if bias is None else call.emit(op.add(total, bias))


def _with_sum(call: Call, made: Any, total: Any) -> Any:
    if call.results == 1:
        return made
    zero = relax.const(0, "float32")  # results that inference never gives
    return relax.Tuple([made, zero, zero, total][: call.results])
