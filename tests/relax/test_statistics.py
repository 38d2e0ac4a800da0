"""Batch norms of training take the batch's statistics, and give new running ones, on one device and on a mesh."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import IRModule, relax

import tvm_axe as axe


def model(shape: tuple[int, ...], axis: int, dtype: str, **options: object) -> IRModule:
    builder = relax.BlockBuilder()
    channels = (shape[axis],)
    given = [relax.Var("x", relax.TensorType(shape, dtype))]
    given += [relax.Var(name, relax.TensorType(channels, dtype)) for name in ("gamma", "beta", "mean", "variance")]
    with builder.function("main", given):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.batch_norm(*given, axis=axis, **options))
        builder.emit_func_output(out)
    return builder.get()


def exact(given: list[np.ndarray], axis: int, momentum: float, epsilon: float) -> list[np.ndarray]:
    x, gamma, beta, mean, variance = (each.astype("float64") for each in given)
    others = tuple(dim for dim in range(x.ndim) if dim != axis % x.ndim)
    new = x.mean(others), x.var(others)
    m, v, g, b = (np.expand_dims(each, others) for each in (*new, gamma, beta))
    running = [(1 - momentum) * old + momentum * now for old, now in zip((mean, variance), new)]
    return [(x - m) / np.sqrt(v + epsilon) * g + b, *running]


@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "devices", "bound"),
    [
        ((4, 6, 5, 3), 1, "float32", 1, 1e-5),
        ((4, 300, 6), -1, "float16", 1, 2e-3),
        ((4, 6, 5, 3), 1, "float32", 2, 1e-5),
    ],
)
def test_they_are_of_the_batch(shape, axis, dtype, devices, bound) -> None:
    mod = model(shape, axis, dtype, momentum=0.25, epsilon=1e-3)
    exe = axe.compile(mod, work_dir=None) if devices == 1 else axe.compile(mod, mesh={"dp": devices}, work_dir=None)
    rng = np.random.default_rng()
    x = rng.standard_normal(shape) * 3 + 2
    given = [each.astype(dtype) for each in (x, *(rng.standard_normal((4, shape[axis])) + 4))]
    if devices == 1:
        found = exe(*given)
    else:
        with axe.launch(exe.mesh) as workers:
            found = exe.run(workers, *given)
    for one, want in zip(found, exact(given, axis, 0.25, 1e-3), strict=True):
        error = np.linalg.norm(np.asarray(one).astype("float64") - want) / np.linalg.norm(want)
        assert error < bound
