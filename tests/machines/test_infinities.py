"""Infinities and NaN that a function writes down, of every type and in vectors, in CUDA code and on a CPU."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes  # noqa: F401  # numpy then knows the narrow types
import numpy as np
import pytest
import tvm
from tvm import te, tirx

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.machines import cache, nvcc
from tvm_axe.machines.target import resolve_target

GPU = resolve_target("cuda:sm_90a")
FLOATS = ["float16", "bfloat16", "float32", "float64"]
VALUES = [np.inf, -np.inf, np.nan]
CASES = [
    *((dtype, value, lanes) for dtype in FLOATS for value in VALUES for lanes in (1, 2)),
    *(("float8_e5m2", value, 1) for value in VALUES),
    ("float8_e4m3fn", np.nan, 1),
]


def function(dtype: str, value: float) -> tirx.PrimFunc:
    """Of three elements two are `value`, the one as a number and the other as a cast of one."""
    given = te.placeholder((64,), dtype, name="given")
    number, cast = tirx.const(value, dtype), tirx.Cast(dtype, tirx.const(value, "float32"))

    def element(i: tirx.Var) -> tirx.Expr:
        return tirx.Select(i % 3 > 0, tirx.Select(i % 3 > 1, cast, number), given[i])

    return te.create_prim_func([given, te.compute((64,), element, name="out")])


def of_threads(dtype: str, value: float, lanes: int) -> tirx.PrimFunc:
    """The same, of which each thread computes `lanes` elements at once."""
    schedule = tvm.s_tir.Schedule(function(dtype, value))
    (loop,) = schedule.get_loops("out")
    if lanes > 1:
        loop, within = schedule.split(loop, [None, lanes])
        schedule.vectorize(within)
    schedule.bind(loop, "threadIdx.x")
    return schedule.mod["main"].with_attr("global_symbol", "main")


@pytest.mark.parametrize("dtype, value, lanes", CASES)
def test_in_cuda_code(dtype: str, value: float, lanes: int) -> None:
    mod = tvm.IRModule({"main": of_threads(dtype, value, lanes)})
    try:
        nvcc.find_compiler()
    except TileError as error:
        pytest.skip(str(error))
    _, source = _tvm.build_cuda(mod, GPU, lambda code: nvcc.cubin(code, GPU, cache.Cache()), pipeline="s_tir")
    if dtype.startswith(("bfloat16", "float8")):
        bits = np.array(value, dtype).view("uint16" if dtype == "bfloat16" else "uint8")
        assert re.search(rf"\b{int(bits)}\b", source)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, value, lanes", CASES)
def test_on_a_gpu(dtype: str, value: float, lanes: int, cuda: Any) -> None:
    given = np.random.default_rng(5).standard_normal(64).astype(dtype)
    same(axe.compile(of_threads(dtype, value, lanes), target="cuda", work_dir=None)(given), given, value)


@pytest.mark.parametrize("dtype, value", [(dtype, value) for dtype, value, lanes in CASES if lanes == 1])
def test_on_a_cpu(dtype: str, value: float) -> None:
    given = np.random.default_rng(5).standard_normal(64).astype(dtype)
    same(axe.compile(function(dtype, value), work_dir=None)(given), given, value)


def same(got: np.ndarray, given: np.ndarray, value: float) -> None:
    """Compare with numpy's choice."""
    want = np.where(np.arange(64) % 3 > 0, np.array(value, given.dtype), given)
    np.testing.assert_array_equal(got.astype("float64"), want.astype("float64"))
