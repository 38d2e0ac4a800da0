"""Loops with a hint that upstream would take apart wrongly stay whole."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.machines import resolve_target
from tvm_axe.machines.narrowing import HINT
from tvm_axe.machines.partitions import whole_loops

TARGET = resolve_target("llvm", threads=1)


def hints_of(kernel: tirx.PrimFunc) -> int:
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(whole_loops(tvm.IRModule({"main": kernel}))["main"].body, (tirx.For, found.append))
    return sum(HINT in loop.annotations for loop in found)


def chosen(condition: str) -> tirx.PrimFunc:
    """``Y[i, 8 * j + l] = X[i, 8 * j + l]`` where a condition on i and ``c = 8 * j + l`` holds, else 0."""

    @T.prim_func(s_tir=True)
    def kernel(X: T.Buffer((30, 60), "float32"), Z: T.Buffer((60,), "int32"), Y: T.Buffer((30, 60), "float32")) -> None:
        for i in T.serial(30):
            for j in T.serial(8, annotations={HINT: 1}):
                for lane in T.vectorized(8):
                    with T.sblock("y"):
                        vi, vc = T.axis.spatial(30, i), T.axis.spatial(60, j * 8 + lane)
                        T.where(j * 8 + lane < 60)
                        Y[vi, vc] = T.Select(CONDITIONS[condition][0](X, Z, vi, vc), X[vi, vc], T.float32(0))

    return kernel


CONDITIONS = {  # as numpy has it, and how many hints are left
    "rows": (lambda x, z, i, c: c <= i - 20, lambda x, z, i, c: c <= i - 20, 0),
    "loaded": (lambda x, z, i, c: c <= z[i], lambda x, z, i, c: c <= z[i], 0),
    "two": (lambda x, z, i, c: tirx.all(c < 50, c + i == 40), lambda x, z, i, c: (c < 50) & (c + i == 40), 0),
    "columns": (lambda x, z, i, c: c < 50, lambda x, z, i, c: c < 50, 1),
    "of a row": (lambda x, z, i, c: i < 7, lambda x, z, i, c: i < 7, 1),
    "of elements": (lambda x, z, i, c: x[i, c] > tirx.const(0.0, "float32"), lambda x, z, i, c: x > 0, 1),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_hints_are_taken_where_something_else_says_where_the_loop_would_be_cut(condition: str) -> None:
    kernel = chosen(condition)
    _, holds, hints = CONDITIONS[condition]
    assert hints_of(kernel) == hints
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((30, 60)).astype("float32"), rng.integers(-20, 90, 60).astype("int32")
    got = np.asarray(axe.compile(kernel, target=TARGET, work_dir=None).run(x, z))
    np.testing.assert_array_equal(got, np.where(holds(x, z, *np.ogrid[:30, :60]), x, 0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint64", "int32", "int16", "int8", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(5, 7), (3, 33, 65), (200, 65), (64, 64)])
def test_triangles(shape: tuple[int, ...], dtype: str) -> None:
    """Also those that some rows have no element of."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    cases = [(triangle, k) for triangle in ("triu", "tril") for k in (-30, -2, 0, 1, 30)]
    with builder.function("main", [x]):
        with builder.dataflow():
            made = [builder.emit(getattr(relax.op, triangle)(x, k)) for triangle, k in cases]
            out = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(out)
    exe = axe.compile(builder.get(), target=TARGET, work_dir=None)
    given = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    results = relax.VirtualMachine(exe.vm, tvm.cpu())["main"](tvm.runtime.tensor(given))
    for got, (triangle, k) in zip(results, cases, strict=True):
        np.testing.assert_array_equal(got.numpy(), getattr(np, triangle)(given, k))
