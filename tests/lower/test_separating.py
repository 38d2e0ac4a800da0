"""Nests that are taken apart: what each block leaves to the next is there, or the nest stays one."""

import numpy as np
import pytest
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.analysis.blocks import nested_blocks
from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.lower.separating import separated


@T.prim_func(s_tir=True)
def chain(A: T.Buffer((8, 4), "float32"), D: T.Buffer((8, 4), "float32")):
    B = T.sblock_alloc_buffer((8, 4))
    C = T.sblock_alloc_buffer((8, 4))
    for i, j in T.grid(8, 4):
        with T.sblock("b"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi, vj] + T.float32(1)
    for i, j in T.grid(8, 4):
        with T.sblock("c"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = B[7 - vi, vj] * T.float32(2)
    for i, j in T.grid(8, 4):
        with T.sblock("d"):
            vi, vj = T.axis.remap("SS", [i, j])
            D[vi, vj] = C[vi, vj] + B[vi, vj]


def test_blocks_of_one_nest():
    """Each has the loops that it had, which are its own now."""
    sch = axe.Schedule(chain, mesh=Mesh({"x": 2}))
    sch.compute_at(sch.get_sblock("c"), sch.get_loops(sch.get_sblock("d"))[0])
    nest = sch.mod["main"].body.block.body[1]
    parts = separated(nest)
    blocks = [nested_blocks(part) for part in parts]
    assert [[block.block.name_hint for block in part] for part in blocks] == [["c"], ["d"]]
    first, second = (part[0].loops[0].loop_var for part in blocks)
    assert first.name == second.name and not first.same_as(second)


@T.prim_func(s_tir=True)
def updated(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32"), C: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("read"):
            vi = T.axis.spatial(8, i)
            B[vi] = A[7 - vi]
        with T.sblock("write"):
            vi = T.axis.spatial(8, i)
            A[vi] = C[vi]


@T.prim_func(s_tir=True)
def ahead(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32"), C: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("write"):
            vi = T.axis.spatial(8, i)
            B[vi] = A[vi]
        with T.sblock("read"):
            vi = T.axis.spatial(8, i)
            C[vi] = B[7 - vi]


@T.prim_func(s_tir=True)
def running(A: T.Buffer((8,), "float32"), B: T.Buffer((1,), "float32"), C: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("sum"):
            vi = T.axis.reduce(8, i)
            with T.init():
                B[0] = T.float32(0)
            B[0] = B[0] + A[vi]
        with T.sblock("read"):
            vi = T.axis.spatial(8, i)
            C[vi] = B[0]


@pytest.mark.parametrize("func", [updated, ahead, running], ids=["updated later", "read ahead", "a running sum"])
def test_what_would_not_be_the_same_stays(func):
    assert separated(func.body.block.body) is None


@pytest.mark.parametrize("devices", [2, 3])
def test_values(launched, devices):
    """One kernel would write what its peers read; two have a barrier between them."""
    sch = axe.Schedule(chain, mesh=Mesh({"x": devices}))
    sch.shard(sch.get_loops(sch.get_sblock("b"))[0], "x")
    sch.shard(sch.get_loops(sch.get_sblock("d"))[0], "x")
    sch.compute_at(sch.get_sblock("c"), sch.get_loops(sch.get_sblock("d"))[0])
    sch.redistribute(sch.get_sblock("c"), "B", "x")
    exe = axe.compile(sch, work_dir=None, redistribute="insert")
    data = np.arange(32, dtype="float32").reshape(8, 4)
    found = exe.run(launched(exe.mesh), data)
    np.testing.assert_array_equal(found, 2 * (data + 1)[::-1] + data + 1)


def test_a_mask_that_is_loaded_is_refused():
    """Upstream's inlining of a copy into a store at a loaded index masks the block by the index."""

    @T.prim_func(s_tir=True)
    def scatter(X: T.Buffer((4, 2), "float32"), at: T.Buffer((4,), "int32"), Y: T.Buffer((4, 2), "float32")):
        for i, j in T.grid(4, 2):
            with T.sblock("scatter"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[at[vi], vj] = X[vi, vj]

    sch = axe.Schedule(scatter, mesh=Mesh({"x": 2}))
    block = sch.get_sblock("scatter")
    sch.shard(sch.get_loops(block)[1], "x")
    sch.cache_write(block, 0, "global")
    sch.as_slice(sch.get_sblock("Y_global"))
    with pytest.raises(LowerError, match=r"block 'scatter' is masked by what it loads \(.*at.*\)"):
        axe.compile(sch, work_dir=None)


def test_parallel_loops_in_each_other_are_refused():
    sch = axe.Schedule(chain, mesh=Mesh({"x": 2}))
    loops = sch.get_loops(sch.get_sblock("b"))
    sch.parallel(loops[1])
    sch.parallel(loops[0])
    with pytest.raises(LowerError, match=r"block 'b': loop 'j' is parallel inside another parallel loop"):
        axe.compile(sch, work_dir=None)
