"""Operators as Relax legalizes them, and how a schedule is run on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.target import Target

from tvm_axe.meta import resolve_target
from tvm_axe.meta.workloads import workloads_of


def _error(mod: tvm.IRModule, target: Target, arrays: list[np.ndarray], want: np.ndarray) -> float:
    """Largest difference from float64, relative to the largest value; the output starts as NaN."""
    out = np.full(want.shape, np.nan, arrays[0].dtype)
    tensors = [tvm.runtime.tensor(a) for a in (*arrays, out)]
    tvm.compile(mod, target=target)["main"](*tensors)
    return float(np.abs(tensors[-1].numpy() - want).max() / np.abs(want).max())


@pytest.fixture(scope="session")
def error() -> Callable[..., float]:
    """Run a module whose last argument is its output: ``error(mod, target, arrays, want)``."""
    return _error


def _legalized(
    shapes: list[tuple[int, ...]], build: Callable[..., relax.Expr], dtype: str = "float32"
) -> tirx.PrimFunc:
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{n}", relax.TensorType(shape, dtype)) for n, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(build(builder, *params))
        builder.emit_func_output(out)
    (workload,), _ = workloads_of(builder.get(), resolve_target("llvm", threads=2))
    return workload.mod["main"]


@pytest.fixture(scope="session")
def legalized() -> Callable[..., tirx.PrimFunc]:
    """The one kernel of a model: ``legalized(shapes, build, dtype)``, `build` having the builder and the parameters."""
    return _legalized
