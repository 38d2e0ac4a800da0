"""Maxima and minima of floats as they are compiled: a NaN of either side is kept, as by numpy, and where it needn't."""

from __future__ import annotations

import functools
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.analysis.annotations import DROPS_NAN
from tvm_axe.analysis.shifted import sums_show_nan
from tvm_axe.machines import backend_of, resolve_target
from tvm_axe.machines.vector_math import PIPELINE
from tvm_axe.nests import with_default_schedules

SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.0, 3e38])
A, B = (array.reshape(-1) for array in np.meshgrid(SPECIAL, SPECIAL))
CPU, GPU = resolve_target("llvm", threads=1), resolve_target("cuda:sm_90a")


def elements(extent: int, dtype: str, lanes: int, of: Any) -> Any:
    """A function of two tensors' elements, in vectors of so many."""

    @T.prim_func(s_tir=True)
    def main(a: T.Buffer((extent,), dtype), b: T.Buffer((extent,), dtype), out: T.Buffer((extent,), dtype)):
        for i in range(extent):
            with T.sblock("out"):
                v = T.axis.spatial(extent, i)
                out[v] = of(a[v], b[v])

    sch = tvm.s_tir.Schedule(main)
    if lanes > 1:
        _, inner = sch.split(sch.get_loops("out")[0], [None, lanes])
        sch.vectorize(inner)
    return sch.mod


FORMS = {
    "max": (tirx.max, np.maximum),
    "min": (tirx.min, np.minimum),
    "relu": (lambda a, b: tirx.max(a, tirx.const(0, a.ty.dtype)), lambda a, b: np.maximum(a, 0)),
    "constant first": (lambda a, b: tirx.Max(tirx.const(1, b.ty.dtype), b), lambda a, b: np.maximum(b, 1)),
    "clip": (
        lambda a, b: tirx.min(tirx.max(a, tirx.const(-1, a.ty.dtype)), b),
        lambda a, b: np.minimum(np.maximum(a, -1), b),
    ),
    "nested": (
        lambda a, b: tirx.max(tirx.min(a, b) * a, tirx.max(b, a + b)),
        lambda a, b: np.maximum(np.minimum(a, b) * a, np.maximum(b, a + b)),
    ),
    # Compiled in a second: as choices of choices it would take years.
    "chained": (
        lambda a, b: functools.reduce(lambda m, k: tirx.max(m + a, b * tirx.const(k, b.ty.dtype)), range(1, 40), a),
        lambda a, b: functools.reduce(lambda m, k: np.maximum(m + a, b * b.dtype.type(k)), range(1, 40), a),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", FORMS)
@np.errstate(all="ignore")
def test_of_all_pairs_beside_numpy(name: str, dtype: str) -> None:
    of, want = FORMS[name]
    a, b = A.astype(dtype), B.astype(dtype)
    for lanes in (1, 16, 5):  # the last with a remainder
        out = tvm.runtime.tensor(np.zeros_like(a))
        built = tvm.compile(elements(len(a), dtype, lanes, of), target=CPU, tir_pipeline=PIPELINE)
        built["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b), out)
        np.testing.assert_array_equal(out.numpy(), want(a, b))


def test_a_bound_that_is_a_constant_takes_one_instruction() -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", "mtriple": "x86_64-linux-gnu"})
    of = FORMS["relu"][0]
    text = tvm.compile(elements(64, "float32", 8, of), target=target, tir_pipeline=PIPELINE).mod.inspect_source("asm")
    assert "vmaxps" in text and "vcmp" not in text and "vblendv" not in text


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_cuda(dtype: str, monkeypatch: Any) -> None:
    sources: list[str] = []

    def compiled(source: str, *_: Any) -> bytes:
        sources.append(source)
        return b""

    monkeypatch.setattr("tvm_axe.tile.targets.cuda.backend.nvcc.cubin", compiled)
    monkeypatch.setattr("tvm_axe.tile.targets.cuda.backend.nvcc.remarks", lambda *_: {})
    monkeypatch.setattr("tvm_axe.tile.targets.cuda.backend.resources", lambda _: {})
    for name, lanes in (("relu", 1), ("nested", 1), ("max", 4)):
        mod = elements(64, dtype, lanes, FORMS[name][0])
        main = mod["main"].with_attr("global_symbol", "main")
        if lanes > 1:
            sch = tvm.s_tir.Schedule(main)
            sch.bind(sch.get_loops("out")[0], "threadIdx.x")
            main = sch.mod["main"]
        source = backend_of(GPU).build(tvm.IRModule({"main": main}), GPU).source
        assert source is not None and "axe_max(" in source.split("__global__")[-1]
        assert " max(" not in source.split("__global__")[-1]
    if shutil.which("nvcc") is not None:
        for source in sources:
            ptx = subprocess.run(
                ["nvcc", "-arch=sm_90a", "-ptx", "-x", "cu", "-o", "-", "-"],
                input=source, capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            assert dtype == "float64" or "max.NaN.f32" in ptx


def row_function(scaled: bool = False, kept: bool = False, part: bool = False, chosen: bool = False) -> Any:
    """A softmax of rows of 64, or what looks like one: of which a NaN in a row might not get everywhere."""
    terms = 32 if part else 64

    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((8, 64), "float32"), y: T.Buffer((8, 64), "float32")):
        m = T.sblock_alloc_buffer((8,), "float32")
        e = T.sblock_alloc_buffer((8, 64), "float32")
        s = T.sblock_alloc_buffer((8,), "float32")
        for i, k in T.grid(8, 64):
            with T.sblock("m"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    m[vi] = T.float32(-3.4028234663852886e38)
                m[vi] = T.max(m[vi], x[vi, vk])
        for i, j in T.grid(8, 64):
            with T.sblock("e"):
                vi, vj = T.axis.remap("SS", [i, j])
                e[vi, vj] = T.exp(x[vi, vj] - m[vi])
        for i, k in T.grid(8, terms):
            with T.sblock("s"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    s[vi] = T.float32(0)
                s[vi] = s[vi] + e[vi, vk]
        for i, j in T.grid(8, 64):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                if scaled:
                    y[vi, vj] = e[vi, vj] * T.float32(2)
                elif kept:
                    y[vi, vj] = e[vi, vj] / s[vi] + T.max(x[vi, vj], T.float32(0))
                elif chosen:
                    y[vi, vj] = T.Select(e[vi, vj] > s[vi], T.float32(0), T.float32(1))
                else:
                    y[vi, vj] = e[vi, vj] / s[vi]

    return main


def test_a_softmax_shows_nan_by_its_sum() -> None:
    assert sums_show_nan(row_function())
    for other in ({"scaled": True}, {"kept": True}, {"part": True}, {"chosen": True}):
        assert not sums_show_nan(row_function(**other)), other


@pytest.mark.parametrize("form", [{}, {"scaled": True}, {"kept": True}, {"part": True}, {"chosen": True}])
@np.errstate(invalid="ignore", over="ignore")
def test_rows_with_nan_beside_numpy(form: dict[str, bool]) -> None:
    func = row_function(**form)
    x = np.random.default_rng(0).standard_normal((8, 64)).astype("float32")
    x[2, 40], x[5, 3] = np.nan, np.nan
    m = x.max(1, keepdims=True)
    e = np.exp(x - m)
    s = e[:, : 32 if form.get("part") else 64].sum(1, keepdims=True)
    want = {"scaled": e * 2, "kept": e / s + np.maximum(x, 0), "chosen": np.where(e > s, 0, 1)}
    got = axe.compile(func, target=CPU, work_dir=None)(x)
    np.testing.assert_allclose(got, want.get(next(iter(form), ""), e / s), 1e-5)
    scheduled = with_default_schedules(tvm.IRModule({"main": func}), CPU)["main"]
    assert (DROPS_NAN in (scheduled.attrs or {})) == (not form)
