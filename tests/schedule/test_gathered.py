"""Products whose matrix each row chooses: what is one, the kernel in a schedule, and what devices make of experts."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.script import from_source
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.machines import resolve_target
from tvm_axe.programs.moe_ragged import Extents, moe_ragged
from tvm_axe.schedule.gathered import gathered_of
from tvm_axe.schedule.offers import offers

ROWS, GROUPS, N, K = 50, 3, 24, 40


def product(
    term: str = "X[vi, vk] * W[L[vi], vk, vj]", w: str = "GROUPS, K, N", labels: str = "int32", start: str = "0"
) -> tvm.tirx.PrimFunc:
    source = f"""
@T.prim_func(s_tir=True)
def main(X: T.Buffer((ROWS, K), "float32"), W: T.Buffer(({w}), "float32"), L: T.Buffer((ROWS,), "{labels}"),
         Y: T.Buffer((ROWS, N), "float32")):
    T.func_attr({{"global_symbol": "main"}})
    C = T.sblock_alloc_buffer((ROWS, N), "float32")
    for i, j, k in T.grid(ROWS, N, K):
        with T.sblock("sum"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32({start})
            C[vi, vj] = C[vi, vj] + {term}
    for i, j in T.grid(ROWS, N):
        with T.sblock("relu"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = T.max(C[vi, vj], T.float32(0))
"""
    return from_source(source, {"T": T, "ROWS": ROWS, "N": N, "K": K, "GROUPS": GROUPS})


GUARDED = "T.if_then_else({0}, {1}, T.float32(0))"
ONES = {
    "plain": {},
    "by columns": {"term": "X[vi, vk] * W[L[vi], vj, vk]", "w": "GROUPS, N, K"},
    "W first": {"term": "W[L[vi], vk, vj] * X[vi, vk]"},
    "guarded": {"term": GUARDED.format("L[vi] >= 0", "X[vi, vk] * W[T.max(L[vi], 0), vk, vj]")},
    "guarded from the left": {"term": GUARDED.format("0 <= L[vi]", "X[vi, vk] * W[T.max(0, L[vi]), vk, vj]")},
}
NONE = {
    "another condition": {"term": GUARDED.format("L[vi] >= 1", "X[vi, vk] * W[T.max(L[vi], 0), vk, vj]")},
    "another value": {"term": "T.if_then_else(L[vi] >= 0, X[vi, vk] * W[T.max(L[vi], 0), vk, vj], T.float32(1))"},
    "a label of the column": {"term": "X[vi, vk] * W[L[vj], vk, vj]"},
    "a label of the sum": {"term": "X[vi, vk] * W[L[vk], vk, vj]"},
    "a label changed": {"term": "X[vi, vk] * W[L[vi] + 1, vk, vj]"},
    "rows gathered": {"term": "X[L[vi], vk] * W[L[vi], vk, vj]"},
    "a sum from one": {"start": "1"},
    "long labels": {"labels": "int64"},
    "the maximum unguarded": {"term": "X[vi, vk] * W[T.max(L[vi], 0), vk, vj]"},
}


def block_of(func: tvm.tirx.PrimFunc) -> tvm.s_tir.SBlock:
    sch = tvm.s_tir.Schedule(func)
    return sch.get(sch.get_sblock("sum"))


@pytest.mark.parametrize("name", ONES)
def test_products_of_gathered_matrices(name: str) -> None:
    found = gathered_of(block_of(product(**ONES[name])))
    assert (found.shape, found.groups, found.transpose_b) == ((ROWS, N, K), GROUPS, name == "by columns")
    assert [buffer.name for buffer in found.inputs.values()] == ["X", "W", "L"]
    (offer,) = offers(tvm.s_tir.Schedule(product(**ONES[name])), resolve_target("cuda:sm_90a"))
    assert (offer.kernel, offer.epilogue) == ("gathered_matmul", "relu")


@pytest.mark.parametrize("name", NONE)
def test_what_is_none(name: str) -> None:
    with pytest.raises(ScheduleError, match="block 'sum' is no product whose matrix each row chooses; valid is C"):
        gathered_of(block_of(product(**NONE[name])))


@pytest.mark.parametrize("target", ["llvm", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["by columns", "guarded"])
def test_the_kernel_with_its_epilogue(name: str, target: str, request: pytest.FixtureRequest) -> None:
    if target == "cuda":
        request.getfixturevalue("cuda")
    func = product(**ONES[name])
    sch = axe.Schedule(func, mesh={"x": 1})
    sch.tile_kernel(sch.get_sblock("sum"), "gathered_matmul", epilogue=sch.get_sblock("relu"), block_m=16)
    exe = axe.compile(sch, target=target, work_dir=None)
    rng = np.random.default_rng()
    x, w = rng.standard_normal((ROWS, K), "float32"), rng.standard_normal((GROUPS, K, N), "float32")
    labels = rng.integers(-1 if name == "guarded" else 0, GROUPS, ROWS).astype("int32")
    given = w.transpose(0, 2, 1).copy() if name == "by columns" else w
    options = {"engine": "cuda", "gpus": (0,)} if target == "cuda" else {"engine": "threads"}
    with axe.launch(Mesh({"x": 1}), **options) as workers:
        found = exe.run(workers, x, given, labels)
    chosen = np.where((labels >= 0)[:, None, None], w[labels], 0).astype("float64")
    np.testing.assert_allclose(found, np.maximum(np.einsum("ik,ikj->ij", x, chosen), 0), rtol=1e-4, atol=1e-4)


def test_types_that_differ_are_refused() -> None:
    sch = axe.Schedule(product(), mesh={"x": 1})
    with pytest.raises(ScheduleError, match="gathered_matmul has no parameter block_x; valid are block_m"):
        sch.tile_kernel(sch.get_sblock("sum"), "gathered_matmul", block_x=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", ["AG-MM-AG", "A2A-MM-A2A", "A2A-fuse(MM-C)-MM-A2A"])
def test_experts_on_gpus_are_tile_kernels(schedule: str, dtype: str) -> None:
    """Between what moves tokens: both products of each device."""
    program = moe_ragged(Mesh({"ep": 2}), Extents(64, 64, 96, 4, 2), dtype)
    exe = axe.compile(program.schedule(schedule), target="cuda:sm_90a", work_dir=None)
    kernels = {
        str(name.name_hint) for name, func in exe.runnable.functions_items() if "axe.waits" in (func.attrs or {})
    }
    assert kernels == {"up_relu" if "fuse" in schedule else "up", "down"}
