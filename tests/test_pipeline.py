"""The pipeline: what its passes are, what each leaves to the next, and that everybody takes them from it."""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.lower import lower
from tvm_axe.machines import resolve_target
from tvm_axe.machines.builder import builder_named
from tvm_axe.meta.measure.builder import BUILDER
from tvm_axe.pipeline import APPLY_RECORDS, BUILD, LOWER, PASSES, TILE_KERNELS, Work, build, run
from tvm_axe.relax import alone
from tvm_axe.schedule import Schedule

TP, TARGET = Mesh({"tp": 2}), resolve_target("llvm", threads=1)


@T.prim_func(s_tir=True)
def product(A: T.Buffer((8, 16), "float32"), B: T.Buffer((16, 12), "float32"), C: T.Buffer((8, 12), "float32")):
    for i, j, k in T.grid(8, 12, 16):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@pytest.fixture
def chosen() -> tvm.tirx.PrimFunc:
    """The product, computed by a tile kernel."""
    sch = Schedule(product, mesh=TP)
    sch.tile_kernel(sch.get_sblock("mm"), "matmul")
    return sch.mod["main"]


def test_the_list():
    assert [each.name for each in PASSES] == [
        "redistribute",
        "lower",
        "apply records",
        "ranges",
        "schedules",
        "tile kernels",
        "build",
    ]
    own = [each.name for each in alone.model_passes()]
    assert own == ["fuse", "apply records", "ranges", "schedules", "pack weights", "tile kernels", "build"]
    assert alone.model_passes()[1] is APPLY_RECORDS and alone.model_passes()[5] is TILE_KERNELS


def test_what_each_pass_leaves(chosen):
    start = Work.of(chosen, TARGET, TP)
    lowered = LOWER(start)
    assert lowered.lowered is not None and lowered.module is lowered.lowered.module
    assert LOWER(lowered) is lowered  # once
    assert APPLY_RECORDS(lowered) is lowered  # there is no work_dir
    tiled = TILE_KERNELS(lowered)
    assert tiled.scheduled is lowered.module and "axe.tile" in tiled.scheduled.script()
    assert "axe.tile" not in tiled.module.script()
    assert start == replace(start) and start.lowered is None  # passes change nothing that they were given
    alone = Work.of(product, TARGET)
    assert LOWER(alone) is alone
    assert run(alone, PASSES).built is not None


def test_work_that_was_lowered_before():
    lowered = lower(product, TP)
    work = Work.from_lowered(lowered, TARGET)
    assert LOWER(work) is work and work.module is lowered.module and work.mesh == TP


def test_one_builder_for_candidates_and_users(chosen):
    assert builder_named(BUILDER) is build
    a, b = (np.random.default_rng(0).standard_normal(shape, dtype="float32") for shape in ((8, 16), (16, 12)))
    for func in (product, chosen):
        out = tvm.runtime.empty((8, 12), "float32")
        built = build(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), TARGET)
        built["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b), out)
        np.testing.assert_allclose(out.numpy(), a @ b, rtol=1e-4, atol=1e-4)
    assert BUILD is PASSES[-1]
