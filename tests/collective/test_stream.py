"""Streaming stores in a program's own kernels: the same results, and only where they are worth it."""

import platform

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.collective.kernels import STREAM
from tvm_axe.collective.stream import stream_copies

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="streaming stores are x86-64's here")


def program(rows: int, width: int, dtype: str = "float32") -> tirx.PrimFunc:
    """B = 2 A by way of a private row, which is copied."""

    @T.prim_func(s_tir=True)
    def kernel(A: T.Buffer((rows, width), dtype), B: T.Buffer((rows, width), dtype)):
        row = T.sblock_alloc_buffer((rows, width), dtype)
        for i in range(rows):
            for j in range(width):
                with T.sblock("double"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    row[vi, vj] = A[vi, vj] + A[vi, vj]
            for j in range(width):
                with T.sblock("copy"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    B[vi, vj] = row[vi, vj]

    return kernel.with_attr("global_symbol", "kernel")


@pytest.mark.parametrize(("dtype", "width"), [("float32", 1024), ("float32", 48), ("float16", 96), ("float64", 8)])
def test_same_result(dtype, width):
    rows = STREAM // (width * np.dtype(dtype).itemsize) + 1
    executable = tvm.compile(stream_copies(program(rows, width, dtype)), target="llvm")
    assert executable.mod.inspect_source("ll").count("!nontemporal") > 0
    a = np.random.default_rng(0).standard_normal((rows, width)).astype(dtype)
    out = tvm.runtime.tensor(np.full((rows, width), np.nan, dtype))
    executable["kernel"](tvm.runtime.tensor(a), out)
    np.testing.assert_array_equal(out.numpy(), a + a)


@pytest.mark.parametrize(
    ("rows", "width", "why"),
    [
        (64, 1024, "small"),
        (STREAM // 4000 + 1, 1000, "rows that begin within a line"),
        (STREAM // 4 // 8 + 1, 8, "rows shorter than a line"),
    ],
)
def test_left_alone(rows, width, why):
    kernel = program(rows, width)
    assert stream_copies(kernel).same_as(kernel), why


def test_what_is_computed_is_not_streamed():
    rows, width = STREAM // 4096, 1024

    @T.prim_func(s_tir=True)
    def kernel(A: T.Buffer((rows, width), "float32"), B: T.Buffer((rows, width), "float32")):
        for i, j in T.grid(rows, width):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] + A[vi, vj]

    assert stream_copies(kernel).same_as(kernel)


def test_masked_rows_are_not_streamed():
    rows, width = STREAM // 4096, 1024

    @T.prim_func(s_tir=True)
    def kernel(A: T.Buffer((rows, width), "float32"), B: T.Buffer((rows, width), "float32")):
        for i, j in T.grid(rows, width):
            with T.sblock("copy"):
                vi, vj = T.axis.remap("SS", [i, j])
                T.where(i * width + j < rows * width - 3)
                B[vi, vj] = A[vi, vj]

    assert stream_copies(kernel).same_as(kernel)
