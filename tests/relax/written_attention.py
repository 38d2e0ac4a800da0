"""Attention that is written out, with masks: what models of it are made of in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import IRModule, relax, tirx

HEADS, DIM = 6, 16
op = relax.op


class Case:
    """Softmax between two products; what stands around and how a mask is written are the builder's.

    `kv_heads` are repeated; `others` are keys that queries don't bring themselves: "none", "alone", or "before" theirs.
    """

    def __init__(self, build: Callable[..., Any], causal: bool = False, kv_heads: int = HEADS, others: str = "none"):
        self.build, self.causal, self.kv_heads, self.others = build, causal, kv_heads, others

    def model(self, batch: int | None, dtype: str = "float32", tokens: int | None = None, dim: int = DIM) -> IRModule:
        b = batch or tirx.Var("b", "int64")
        n, p = tokens or tirx.Var("n", "int64"), tirx.Var("p", "int64")
        keys = {"none": [n], "alone": [p], "before": [p, n]}[self.others]
        shapes = [(n, HEADS), *((each, self.kv_heads) for each in keys for _ in "kv")]
        params = [relax.Var(f"x{at}", relax.TensorType((b, *of, dim), dtype)) for at, of in enumerate(shapes)]
        made = relax.BlockBuilder()
        with made.function("main", params):
            with made.dataflow():
                q, *parts = (made.emit(op.permute_dims(each, [0, 2, 1, 3])) for each in params)
                k, v = parts[:2]
                if len(parts) > 2:
                    k, v = (made.emit(op.concat([parts[at], parts[at + 2]], 2)) for at in (0, 1))
                out = made.emit(op.permute_dims(self.build(made.emit, q, k, v), [0, 2, 1, 3]))
                out = made.emit_output(out)
            made.emit_func_output(out)
        return made.get()

    def arrays(self, batch: int, n: int, p: int, dtype: str = "float32", dim: int = DIM) -> list[np.ndarray]:
        rng = np.random.default_rng()
        keys = {"none": [n], "alone": [p], "before": [p, n]}[self.others]
        shapes = [(n, HEADS), *((each, self.kv_heads) for each in keys for _ in "kv")]
        return [rng.standard_normal((batch, *shape, dim)).astype(dtype) for shape in shapes]

    def exact(self, arrays: list[np.ndarray]) -> np.ndarray:
        q, *parts = (each.astype("float64").swapaxes(1, 2) for each in arrays)
        k, v = (np.repeat(np.concatenate(parts[at::2], 2), HEADS // self.kv_heads, 1) for at in (0, 1))
        scores = q @ k.swapaxes(2, 3) * q.shape[3] ** -0.5
        if self.causal:
            rows, columns = np.indices(scores.shape[2:])
            scores = np.where(columns <= rows + scores.shape[3] - scores.shape[2], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


def shape(value: Any) -> list[Any]:
    return list(value.ty.shape.values)


def number(value: float, like: Any) -> Any:
    return relax.const(value, str(like.ty.dtype))


def scores_of(emit: Any, q: Any, k: Any) -> Any:
    products = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
    return emit(op.divide(products, number(float(int(shape(q)[3])) ** 0.5, products)))


def distance(emit: Any, scores: Any) -> Any:
    """Of each key from its query, that of the last query from the last key being 0."""
    queries, keys = shape(scores)[-2:]
    columns = emit(op.expand_dims(emit(op.arange(0, keys, 1, "int64")), 0))
    rows = emit(op.expand_dims(emit(op.arange(keys - queries, keys, 1, "int64")), 1))
    return emit(op.subtract(columns, rows))


def chosen(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """Scores of later keys are replaced, as masked_fill has it."""
    scores = scores_of(emit, q, k)
    seen = emit(op.less_equal(distance(emit, scores), relax.const(0, "int64")))
    masked = emit(op.where(emit(op.bitwise_not(seen)), number(-np.inf, scores), scores))
    return emit(op.matmul(emit(op.nn.softmax(masked)), v))


def added(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """A mask is added, made by where."""
    scores = scores_of(emit, q, k)
    queries, keys = shape(scores)[-2:]
    seen = emit(op.less(distance(emit, scores), relax.const(1, "int64")))
    least = emit(op.full((queries, keys), number(-1e38 if str(scores.ty.dtype) != "float16" else -np.inf, scores)))
    mask = emit(op.where(seen, number(0.0, scores), least))
    return emit(op.matmul(emit(op.nn.softmax(emit(op.add(scores, mask)))), v))


def kernels(mod: IRModule) -> list[tirx.PrimFunc]:
    """The functions that a kernel computes, or that are its code."""
    functions = ((str(v.name_hint), f) for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc))
    return [func for name, func in functions if name.startswith("attention")]
