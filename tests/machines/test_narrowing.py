"""Loops with a hint count in 32 bits where every number of 64 is an index that fits."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, tirx
from tvm.relax.frontend import nn
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.machines import resolve_target
from tvm_axe.machines.narrowing import HINT, narrow_loops

TARGET = resolve_target("llvm", threads=1)
ROWS, COLUMNS, TERMS = 29, 32, 24  # no tile of rows divides 29


class Product(nn.Module):
    def __init__(self) -> None:
        self.linear = nn.Linear(TERMS, COLUMNS)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.linear(x)


def loops_of(part: object) -> list[tirx.For]:
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(part, (tirx.For, found.append))
    return found


def comparisons_in(part: object) -> list[object]:
    found: list[object] = []
    tvm_ffi.structural_walk(part, (tirx.LT, found.append))
    return found


def partitioned(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function behind those of upstream's passes that lead to its partition of loops."""
    passes = s_tir.transform
    before = [passes.LowerInitBlock(), passes.PlanAndUpdateBufferAllocationLocation(), passes.ConvertBlocksToOpaque()]
    flat = [passes.CompactBufferAllocation(), passes.LowerOpaqueBlock(), tirx.transform.FlattenBuffer()]
    last = [tirx.transform.NarrowDataType(32), passes.LoopPartition(), passes.StmtSimplify()]
    return ir.transform.Sequential([*before, *flat, *last])(tvm.IRModule({"main": func}))["main"]


def narrowed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return narrow_loops(tvm.IRModule({"main": func}))["main"]


def is_narrow(func: tirx.PrimFunc) -> bool:
    return all(str(loop.loop_var.ty) == "int32" for loop in loops_of(func.body))


def test_whole_tiles_have_no_condition() -> None:
    mod, _ = Product().export_tvm({"forward": {"x": nn.spec.Tensor([ROWS, TERMS], "float32")}})
    exe = axe.compile(mod, target=TARGET, work_dir=None)
    (kernel,) = (func for func in exe.runnable.functions.values() if isinstance(func, tirx.PrimFunc))
    for func, conditional in ((kernel, True), (narrowed(kernel), False)):
        (tiles,) = (loop for loop in loops_of(partitioned(func).body) if loop.loop_var.name == "i0_0_1")
        assert bool(comparisons_in(tiles.body)) == conditional
    rng = np.random.default_rng(1)
    shapes = (ROWS, TERMS), (COLUMNS, TERMS), (COLUMNS,)
    x, weight, bias = arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    got = relax.VirtualMachine(exe.vm, tvm.cpu())["forward"](*map(tvm.runtime.tensor, arrays)).numpy()
    np.testing.assert_allclose(got, x.astype("float64") @ weight.astype("float64").T + bias, rtol=1e-4, atol=1e-5)


def hinted(dtype: str = "float32", factor: int = 1, size: int = 64, hint: str = HINT) -> tirx.PrimFunc:
    """Y[i] = factor * i + X[i] of the first 30 elements."""

    @T.prim_func(s_tir=True)
    def kernel(X: T.Buffer((T.int64(size),), dtype), Y: T.Buffer((T.int64(size),), dtype)) -> None:
        for i in T.serial(T.int64(30), annotations={hint: 1}):
            with T.sblock("y"):
                v = T.axis.spatial(T.int64(30), i)
                Y[v] = T.cast(v * T.int64(factor), dtype) + X[v]

    return kernel


@pytest.mark.parametrize(
    ("func", "narrow"),
    [
        (hinted(), True),
        (hinted(factor=2**31 // 30), True),
        (hinted(factor=2**31 // 29 + 1), False),  # a number that is computed, and no index
        (hinted("int64"), False),
        (hinted(size=2**31), False),
        (hinted(hint="another"), False),
        (hinted().with_attr("target", resolve_target("cuda:sm_90a")), False),
    ],
)
def test_numbers_that_are_no_small_indices_stay(func: tirx.PrimFunc, narrow: bool) -> None:
    found = narrowed(func)
    assert is_narrow(found) == narrow
    assert narrow or found.same_as(func)


def test_symbolic_extents_stay() -> None:
    @T.prim_func(s_tir=True)
    def kernel(x: T.handle, y: T.handle) -> None:
        n = T.int64()
        X, Y = T.match_buffer(x, (n,)), T.match_buffer(y, (n,))
        for i in T.serial(n, annotations={HINT: 1}):
            with T.sblock("y"):
                v = T.axis.spatial(n, i)
                Y[v] = X[v]

    assert narrowed(kernel).same_as(kernel)


@pytest.mark.parametrize("factor", [3, 2**31 // 29 + 1])
def test_results_are_the_same(factor: int) -> None:
    """Also of numbers that int32 doesn't hold."""
    x = np.arange(64, dtype="float32")
    exe = axe.compile(hinted(factor=factor), target=TARGET, work_dir=None)
    got = np.asarray(exe.run(x, np.full(64, np.nan, "float32")))
    np.testing.assert_array_equal(got[:30], (np.arange(30) * factor).astype("float32") + x[:30])
