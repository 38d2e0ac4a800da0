"""Operators as Relax legalizes them, and how a schedule is run on them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tuning_workloads import matmul, target
from tvm import relax, s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.machines import resolve_target
from tvm_axe.meta.search.workloads import workloads_of
from tvm_axe.meta.spaces.space import space_for

__all__ = ["matmul", "target"]


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


def _conv(x: np.ndarray, w: np.ndarray, stride: int, padding: int, dilation: int, groups: int) -> np.ndarray:
    """conv2d in float64, by its definition."""
    x = np.pad(x.astype("float64"), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    co, ci, kh, kw = w.shape
    oh, ow = ((n - dilation * (k - 1) - 1) // stride + 1 for n, k in zip(x.shape[2:], (kh, kw)))
    out = np.zeros((x.shape[0], co, oh, ow))
    for g, r, s in itertools.product(range(groups), range(kh), range(kw)):
        rows = slice(r * dilation, r * dilation + (oh - 1) * stride + 1, stride)
        columns = slice(s * dilation, s * dilation + (ow - 1) * stride + 1, stride)
        own = slice(g * co // groups, (g + 1) * co // groups)
        out[:, own] += np.einsum("nchw,oc->nohw", x[:, g * ci : (g + 1) * ci, rows, columns], w[own, :, r, s])
    return out


def _convolution(case: tuple[int, ...], bias: bool) -> tuple[tirx.PrimFunc, list[np.ndarray], np.ndarray]:
    """A convolution, with a bias and relu behind it or not; its arguments and what comes out."""
    n, ci, h, w, co, kernel, stride, padding, dilation, groups = case

    def build(bb: relax.BlockBuilder, x: relax.Var, weights: relax.Var, *behind: relax.Var) -> relax.Expr:
        y = relax.op.nn.conv2d(x, weights, stride, padding, dilation, groups)
        return relax.op.nn.relu(bb.emit(relax.op.add(bb.emit(y), behind[0]))) if behind else y

    shapes = [(n, ci, h, w), (co, ci // groups, kernel, kernel), *[(1, co, 1, 1)] * bias]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, "float32") for shape in shapes]
    want = _conv(arrays[0], arrays[1], stride, padding, dilation, groups)
    return _legalized(shapes, build), arrays, np.maximum(want + arrays[2], 0) if bias else want


@pytest.fixture(scope="session")
def convolution() -> Callable[..., tuple[tirx.PrimFunc, list[np.ndarray], np.ndarray]]:
    """A convolution as Relax legalizes it: ``convolution(case, bias)``, `_convolution`."""
    return _convolution


@pytest.fixture(scope="session")
def conv() -> Callable[..., np.ndarray]:
    """conv2d in float64: ``conv(x, w, stride, padding, dilation, groups)``."""
    return _conv


def _designs(func: tirx.PrimFunc, target: Target) -> list[s_tir.Schedule]:
    mod = tvm.IRModule({"main": func})
    strategy = ms.search_strategy.EvolutionarySearch()
    context = _tvm.tune_context(
        mod, target, space_for(func, target), strategy, "main", 1, 1, logging.getLogger(__name__)
    )
    return list(context.generate_design_space())


@pytest.fixture(scope="session")
def designs() -> Callable[..., list[s_tir.Schedule]]:
    """The design spaces that a function named ``main`` is searched in: ``designs(func, target)``."""
    return _designs
