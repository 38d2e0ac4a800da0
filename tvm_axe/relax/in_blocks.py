"""What kernels compute of a model, in blocks: for whatever doesn't know of kernels, and for CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tvm import te, tirx

from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.tile.kernels.attention import MASKED, scale_of, shapes
from tvm_axe.tile.kernels.kernel import Problem
from tvm_axe.tile.kernels.weights import stored_as

__all__ = [
    "attention_in_blocks",
    "computed_by",
    "decoding_product_in_blocks",
    "gathered_in_blocks",
    "layer_norm_in_blocks",
    "softmax_in_blocks",
]

_OPAQUE = {"op_pattern": 8}  # what upstream fuses with nothing


def computed_by(
    name: str,
    problem: Problem,
    blocks: Sequence[te.Tensor],
    products: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> tirx.PrimFunc:
    """The function of blocks that a kernel computes, which says so.

    Of what isn't known of the problem it says which parameter's extent it is: the numbers of both. What is a product of
    several extents of a parameter is told as that by `products`, and said with all of their numbers.
    """
    unknown = [value for value in problem.values() if isinstance(value, tirx.Var)]
    func = te.create_prim_func(list(blocks), "int64" if unknown else None).without_attr("global_symbol")
    extents = {
        extent: [at, dim]
        for at, block in reversed([*enumerate(blocks)])
        for dim, extent in enumerate(block.shape)
        if isinstance(extent, tirx.Var)
    }
    said = {
        key: (list(products[key]) if key in products else extents[value]) if isinstance(value, tirx.Var) else value
        for key, value in problem.items()
    }
    return func.with_attrs({KERNEL: name, **{f"{KERNEL}.{key}": value for key, value in said.items()}, **_OPAQUE})


def layer_norm_in_blocks(tensors: tuple[te.Tensor, te.Tensor, te.Tensor], epsilon: float) -> list[te.Tensor]:
    """A layer norm in blocks; upstream has none of bfloat16."""
    x, weight, bias = tensors
    *rows, columns = x.shape
    each, other = te.reduce_axis((0, columns), "k"), te.reduce_axis((0, columns), "k")
    total = te.compute(rows, lambda *at: te.sum(x(*at, each).astype("float32"), each), "total")

    def far(*at: Any) -> Any:
        return x(*at).astype("float32") - total(*at[:-1]) / columns.astype("float32")

    squares = te.compute(rows, lambda *at: te.sum(far(*at, other) * far(*at, other), other), "squares")

    def normed(*at: Any) -> Any:
        factor = te.rsqrt(squares(*at[:-1]) / columns.astype("float32") + tirx.const(epsilon, "float32"))
        scaled = far(*at) * factor * weight(at[-1]).astype("float32")
        return (scaled + bias(at[-1]).astype("float32")).astype(x.dtype)

    return [x, weight, bias, te.compute(x.shape, normed, "Y")]


def softmax_in_blocks(x: te.Tensor) -> list[te.Tensor]:
    """A softmax of the last axis in blocks, summed in float32; upstream sums 16-bit floats in their type."""
    *rows, columns = x.shape
    each, other = te.reduce_axis((0, columns), "k"), te.reduce_axis((0, columns), "k")
    top = te.compute(rows, lambda *at: te.max(x(*at, each).astype("float32"), each), "top")

    def weight(*at: Any) -> Any:
        return te.exp(x(*at).astype("float32") - top(*at[:-1]))

    total = te.compute(rows, lambda *at: te.sum(weight(*at, other), other), "total")
    return [x, te.compute(x.shape, lambda *at: (weight(*at) / total(*at[:-1])).astype(x.dtype), "Y")]


def gathered_in_blocks(told: Mapping[str, int], shape: Sequence[int], dtype: str, by_columns: bool) -> list[te.Tensor]:
    """A product of each row with the matrix that its label says, in blocks."""
    x = te.placeholder((told["rows"], told["k"]), dtype, "X")
    w, labels = te.placeholder(tuple(shape), dtype, "W"), te.placeholder((told["rows"],), "int32", "labels")
    term = te.reduce_axis((0, told["k"]), "k")

    def product(r: Any, j: Any) -> Any:
        return te.sum(x[r, term] * (w[labels[r], j, term] if by_columns else w[labels[r], term, j]), term)

    return [x, w, labels, te.compute((told["rows"], told["n"]), product, "Y")]


def decoding_product_in_blocks(problem: Problem, tensors: Sequence[tuple[Sequence[Any], str]]) -> list[te.Tensor]:
    """The product with weights of four or eight bits in blocks: as the kernel computes it, but for its sums' order.

    Parameters
    ----------
    problem : mapping
        The kernel's.
    tensors : Sequence of (shape, dtype)
        Of the codes, those of four bits in words of any width, of the scales, of what stands for zero, and of the bias.
    """
    m, n, k, group, dtype = (problem[name] for name in ("m", "n", "k", "group", "dtype"))
    a = te.placeholder((m, k), dtype, "A")
    names = ("B", "scales", *(("points",) if problem.get("zeros", False) else ()), "bias")
    b, scales, *others = (te.placeholder(*each, name) for each, name in zip(tensors, names))
    bias = others.pop() if problem.get("bias", False) else None
    stored = stored_as(problem.get("weights"))
    lanes = 1 if stored.each == 1 else dtype_bits(str(b.dtype)) // 4
    made = str(scales.dtype)

    def decoded(j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
        number: Any = b[j, i]
        if lanes > 1:
            word = b[j, i // lanes] >> tirx.Cast(str(b.dtype), i % lanes * 4)
            number = word & tirx.const(15, str(b.dtype))
        if stored.is_integer:
            zero: Any = others[0][i // group, j] if others else problem.get("middle", stored.middle)
            number = tirx.Cast("int32", number) - (tirx.Cast("int32", zero) if others else zero)
        scaled = tirx.Cast(made, number) * scales[i // group, j]
        return scaled if made == dtype else tirx.Cast(dtype, scaled)

    weight, term = te.compute((n, k), decoded, "decoded"), te.reduce_axis((0, k), "i")

    def added(r: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        return te.sum(a[r, term].astype("float32") * weight[j, term].astype("float32"), term)

    sums, out = te.compute((m, n), added, "sums"), problem.get("out_dtype", dtype)

    def result(r: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        return (sums[r, j] if bias is None else sums[r, j] + bias[j].astype("float32")).astype(out)

    given = [a, b, scales, *others, *([] if bias is None else [bias])]
    return [*given, te.compute((m, n), result, "C")]


def attention_in_blocks(problem: Problem, order: str) -> list[te.Tensor]:
    """Attention in blocks, as the kernel of that name computes it; extents that aren't known are variables."""
    batch, heads, kv_heads = (problem[name] for name in ("batch", "heads", "kv_heads"))
    queries, keys, dim, dtype, causal = (problem[name] for name in ("queries", "keys", "dim", "dtype", "causal"))
    scale = scale_of(dim, problem.get("scale"))
    group, window = heads // kv_heads, problem.get("window")
    own = shapes(batch, heads, kv_heads, queries, keys, dim, order)
    q, k, v = (te.placeholder(shape, dtype, name) for shape, name in zip(own, "QKV"))
    sinks = [te.placeholder((heads,), "float32", "S")] if problem.get("sinks", False) else []

    def at(tensor: te.Tensor, letter: str, b: Any, head: Any, token: Any, d: Any) -> Any:
        return tensor[b, head, token, d] if letter == "h" else tensor[b, token, head, d]

    inner, last = te.reduce_axis((0, dim), "d"), te.reduce_axis((0, keys), "t")
    largest, every = te.reduce_axis((0, keys), "t"), te.reduce_axis((0, keys), "t")
    shape = (batch, heads, queries, keys)

    def product(b: Any, h: Any, i: Any, t: Any) -> Any:
        left, right = at(q, order[0], b, h, i, inner), at(k, order[1], b, h // group, t, inner)
        return te.sum(left.astype("float32") * right.astype("float32"), inner)

    scores = te.compute(shape, product, "scores")

    def seen(b: Any, h: Any, i: Any, t: Any) -> Any:
        scaled = scores[b, h, i, t] * tirx.const(scale, "float32")
        if not causal:
            return scaled
        newest = i + (keys - queries)
        shown = t <= newest if window is None else tirx.all(t <= newest, t > newest - window)
        return tirx.if_then_else(shown, scaled, tirx.const(MASKED, "float32"))

    masked = te.compute(shape, seen, "masked")
    top = te.compute(shape[:3], lambda b, h, i: te.max(masked[b, h, i, largest], largest), "top")
    if sinks:
        top_of_keys = top
        top = te.compute(shape[:3], lambda b, h, i: te.max(top_of_keys[b, h, i], sinks[0][h]), "top_of_all")
    weights = te.compute(shape, lambda b, h, i, t: te.exp(masked[b, h, i, t] - top[b, h, i]), "weights")
    total = te.compute(shape[:3], lambda b, h, i: te.sum(weights[b, h, i, every], every), "total")

    def weighed(b: Any, h: Any, i: Any, d: Any) -> Any:
        return te.sum(weights[b, h, i, last] * at(v, order[2], b, h // group, last, d).astype("float32"), last)

    sums = te.compute((batch, heads, queries, dim), weighed, "sums")

    def averaged(b: Any, first: Any, second: Any, d: Any) -> Any:
        h, i = (first, second) if order[3] == "h" else (second, first)
        whole = total[b, h, i]
        for sink in sinks:
            whole = whole + te.exp(sink[h] - top[b, h, i])
        return (sums[b, h, i, d] / whole).astype(dtype)

    return [q, k, v, *sinks, te.compute(own[3], averaged, "O")]
