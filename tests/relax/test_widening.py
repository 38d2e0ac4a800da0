"""Operators on types of 16 bits: as right on one device and on a mesh as the types allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

import tvm_axe as axe
from tvm_axe.relax import widening

TYPES = {"bfloat16": (np.dtype(ml_dtypes.bfloat16), 1e-2), "float16": (np.dtype("float16"), 2e-3)}


def ones(x: Any) -> Any:
    return relax.const(np.ones(8), x.ty.dtype)


OPERATORS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "layer_norm": (
        lambda x: op.nn.layer_norm(x, ones(x), ones(x), axes=[-1]),
        lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) + 1,
    ),
    "power": (lambda x: op.power(x, relax.const(2, x.ty.dtype)), np.square),
    "mod": (lambda x: op.floor_mod(x, relax.const(0.375, x.ty.dtype)), lambda x: x % 0.375),
    "isfinite": (op.isfinite, np.isfinite),
    "argmax": (lambda x: op.argmax(x, axis=1), lambda x: x.argmax(1)),
    "sort": (lambda x: op.sort(x, axis=1), lambda x: np.sort(x, 1)),
    "topk": (lambda x: op.add(*_topk(x)), lambda x: np.sort(x, 1)[:, ::-1][:, :3] * 2),
    "atan": (op.atan, np.arctan),
}


def _topk(x: Any) -> tuple[Any, Any]:
    """The largest three by both of its results."""
    both = op.topk(x, 3, axis=1)
    return relax.TupleGetItem(both, 0), op.gather_elements(x, op.astype(relax.TupleGetItem(both, 1), "int64"), axis=1)


def model(make: Callable[[Any], Any], dtype: str, shape: tuple[int, ...] = (6, 8)) -> tvm.IRModule:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(make(builder.emit(op.negative(x)))))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(workers: Any, name: str, dtype: str) -> None:
    (make, wanted), (kind, bound) = OPERATORS[name], TYPES[dtype]
    x = -np.random.default_rng(0).permuted(np.arange(48).reshape(6, 8) / 50).astype(kind)
    want = wanted(-x.astype("float64"))
    alone, shared = (axe.compile(model(make, dtype), mesh=mesh, work_dir=None) for mesh in (None, {"tp": 2}))
    for where, got in (("one device", np.asarray(alone(x))), ("a mesh", shared.run(workers(2), x))):
        assert got.dtype == (want.dtype if want.dtype.kind in "bi" else kind), where
        assert np.abs(got.astype("float64") - want).max() <= bound * max(np.abs(want).max(), 1), where


LONG = 4096
SUMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "mean": (lambda x: op.mean(op.multiply(x, x), -1), lambda x: (x * x).mean(-1)),
    "softmax": (lambda x: op.nn.softmax(x, -1), lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
    "cumsum": (lambda x: op.cumsum(x, 1), lambda x: x.cumsum(1)),
    "scatter": (
        lambda x: op.scatter_elements(op.zeros((2, 1), x.ty.dtype), _zeros((2, LONG)), x, 1, "add"),
        lambda x: x.sum(1, keepdims=True),
    ),
    "conv1d": (
        lambda x: op.nn.conv1d(op.reshape(x, (2, LONG // 4, 4)), relax.const(np.ones((3, LONG // 4, 3)), x.ty.dtype)),
        lambda x: np.repeat(
            np.lib.stride_tricks.sliding_window_view(x.reshape(2, -1, 4), 3, 2).sum((1, 3))[:, None], 3, 1
        ),
    ),
}


def _zeros(shape: tuple[int, ...]) -> Any:
    return relax.const(np.zeros(shape), "int64")


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_any_length_are_as_right_as_short_ones(workers: Any, name: str) -> None:
    """In bfloat16 ones add up to 256 at most, and means of some thousand were wrong by as much as they are."""
    (make, wanted), (kind, bound) = SUMS[name], TYPES["bfloat16"]
    x = -np.random.default_rng(0).uniform(0.5, 1.5, (2, LONG)).astype(kind)
    want = wanted(-x.astype("float64"))
    alone, shared = (
        axe.compile(model(make, "bfloat16", (2, LONG)), mesh=mesh, work_dir=None) for mesh in (None, {"tp": 2})
    )
    for where, got in (("one device", np.asarray(alone(x))), ("a mesh", shared.run(workers(2), x))):
        assert got.dtype == kind, where
        assert np.abs(got.astype("float64") - want).max() <= bound * np.abs(want).max(), where


def test_products_give_their_sums_and_gpus_sum_their_own() -> None:
    def made(x: Any) -> Any:
        return op.matmul(x, op.permute_dims(x))

    products = {
        matmuls: str(widening.widened(model(made, "float16"), matmuls)).count('out_dtype="float32"')
        for matmuls in (False, True)
    }
    assert products == {False: 0, True: 1}
