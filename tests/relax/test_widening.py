"""Operators on types of 16 bits: as right on one device and on a mesh as the types allow."""

from __future__ import annotations

import doctest
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


def model(make: Callable[[Any], Any], dtype: str) -> tvm.IRModule:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((6, 8), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(make(builder.emit(op.negative(x)))))
        builder.emit_func_output(out)
    return builder.get()


def test_documentation() -> None:
    assert doctest.testmod(widening).failed == 0


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
