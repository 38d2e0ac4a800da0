"""Products by a transpose that another product reads, too, and of a matrix with its own transpose."""

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax
from tvm.ir import IRModule

import tvm_axe as axe

matmul, transpose = relax.op.matmul, relax.op.permute_dims


def gram(emit, x, _):
    return matmul(x, emit(transpose(x)))


def read_twice(emit, x, w):
    by = emit(transpose(w))
    return matmul(emit(matmul(x, by)), emit(transpose(emit(matmul(emit(relax.op.nn.relu(x)), by)))))


def read_elsewhere(emit, x, w):
    by = emit(transpose(w))
    return relax.op.add(emit(matmul(emit(matmul(w, by)), w)), emit(transpose(emit(relax.op.nn.relu(by)))))


def wanted(kind: Callable[..., object], x: np.ndarray, w: np.ndarray) -> np.ndarray:
    if kind is gram:
        return x @ x.T
    return x @ w.T @ (np.maximum(x, 0) @ w.T).T if kind is read_twice else w @ w.T @ w + np.maximum(w, 0)


def model(kind: Callable[..., relax.Expr]) -> IRModule:
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", (24, 40)), ("w", (16, 40))))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            result = builder.emit_output(kind(builder.emit, x, w))
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize("mesh", [None, {"tp": 2}], ids=str)
@pytest.mark.parametrize("kind", [gram, read_twice, read_elsewhere])
def test_products_are_right(kind, mesh, workers):
    rng = np.random.default_rng()
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((24, 40), (16, 40)))
    exe = axe.compile(model(kind), target={"kind": "llvm", "num-cores": 1}, mesh=mesh, work_dir=None)
    found = exe(x, w) if mesh is None else exe.run(workers(2), x, w)
    want = wanted(kind, x.astype("float64"), w.astype("float64"))
    assert np.linalg.norm(np.asarray(found) - want) < 1e-6 * np.linalg.norm(want)
