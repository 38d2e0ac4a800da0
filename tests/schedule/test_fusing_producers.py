"""A chain whose last block also reads what was computed before it: its nest takes the chain in."""

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.schedule.query import bound_loops, name_of


@T.prim_func(s_tir=True)
def late(
    A: T.Buffer((5, 8), "float32"),
    W: T.Buffer((8, 3), "float32"),
    residual: T.Buffer((5, 3), "float32"),
    out: T.Buffer((5, 3), "float32"),
):
    """A matmul whose epilogue reads a tensor that another nest computes."""
    before = T.sblock_alloc_buffer((5, 3))
    C = T.sblock_alloc_buffer((5, 3))
    for i, j in T.grid(5, 3):
        with T.sblock("before"):
            vi, vj = T.axis.remap("SS", [i, j])
            before[vi, vj] = residual[vi, vj] * T.float32(2)
    for i, j, k in T.grid(5, 3, 8):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(5, 3):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = C[vi, vj] + before[vi, vj]


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_epilogue_takes_the_chain_into_its_nest(devices, dim, moved):
    mesh = axe.Mesh({"tp": devices})
    sch = axe.Schedule(late, mesh=mesh)
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    _, reduce = sch.shard(sch.get_loops(mm)[2], "tp")
    scatter, gather = sch.split_collective(reduce, dim)
    (gather,) = sch.reorder_collective(gather, [epi])
    device = sch.fuse_collective([scatter, epi, gather])
    inside = [name_of(sch, block) for block in sch.get_child_blocks(device)]
    assert inside == ["mm", "epi", "out_global"]
    if devices > 1:
        assert list(bound_loops(sch, scatter, tvm.tirx.IterVar.CommReduce)) == ["tp"]

    # Stock instructions only: the trace replays on a plain schedule.
    replayed = s_tir.Schedule(late)
    s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), replayed)
    tvm.ir.assert_structural_equal(replayed.mod, sch.mod)

    rng = np.random.default_rng(devices)
    arrays = [rng.standard_normal(shape, dtype="float32") for shape in [(5, 8), (8, 3), (5, 3)]]
    want = arrays[0].astype("float64") @ arrays[1] + 2 * arrays[2]
    exe = axe.compile(sch)
    assert exe.bytes == moved(["RS+AG"], *((5, 3) if dim == 0 else (3, 5)), devices)
    with axe.launch(mesh, engine="threads") as workers:
        np.testing.assert_allclose(exe.run(workers, *arrays), want, rtol=1e-5, atol=1e-5)
    ignored = tvm.runtime.tensor(np.full((5, 3), np.nan, "float32"))
    tvm.compile(sch.mod, target="llvm")["main"](*[tvm.runtime.tensor(array) for array in arrays], ignored)
    np.testing.assert_allclose(ignored.numpy(), want, rtol=1e-5, atol=1e-5)
