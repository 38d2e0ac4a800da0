"""axe.Schedule: the primitives as methods, copies, and traces that replay without it."""

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import s_tir

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule, fuse_collective, reorder_collective, shard, split_collective


def mm_ar_c(sch, dim=0):
    return sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")[1]


def mm_rs_ag_c(sch, dim=0):
    return sch.split_collective(mm_ar_c(sch), dim)


def mm_rs_c_ag(sch, dim=0):
    scatter, gather = mm_rs_ag_c(sch, dim)
    epi = sch.get_sblock("epi")
    return [scatter, epi, *sch.reorder_collective(gather, [epi])]


def mm_fuse(sch, dim=0):
    return sch.fuse_collective(mm_rs_c_ag(sch, dim))


SCHEDULES = {"MM-AR-C": mm_ar_c, "MM-RS-AG-C": mm_rs_ag_c, "MM-RS-C-AG": mm_rs_c_ag, "MM-fuse(RS-C-AG)": mm_fuse}
SHAPES = [(4, 2, 8, 2), (5, 3, 7, 3), (2, 3, 4, 4), (4, 3, 5, 1)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_trace_replays(schedule, name, shape, dim):
    """On a plain upstream schedule, from the trace itself and from its JSON."""
    sch = schedule(*shape)
    plain, from_json = s_tir.Schedule(sch.mod), s_tir.Schedule(sch.mod)
    SCHEDULES[name](sch, dim)
    sch.trace.apply_to_schedule(plain, remove_postproc=False)
    tvm.ir.assert_structural_equal(plain.mod, sch.mod)
    s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), from_json)
    tvm.ir.assert_structural_equal(from_json.mod, sch.mod)


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 6), st.integers(1, 9), st.integers(1, 4)),
    name=st.sampled_from(list(SCHEDULES)),
    dim=st.integers(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_annotations_ignored(programs, shape, name, dim, seed):
    """A scheduled program is still an ordinary program with the same result, or refused for want of partials."""
    m, n, k, devices = shape
    sch = Schedule(programs.block(m, n, k).func, mesh=Mesh({"tp": devices}))
    try:
        SCHEDULES[name](sch, dim)
    except ValueError as error:
        assert "without a partial" in str(error)
        assert -(-k // devices) * (devices - 1) >= k
        return
    rng = np.random.default_rng(seed)
    a, w, b, r = (rng.standard_normal(s, dtype="float32") for s in ((m, k), (k, n), (n,), (m, n)))
    args = [tvm.runtime.tensor(x) for x in (a, w, b, r, np.full((m, n), np.nan, "float32"))]
    tvm.compile(sch.mod, target="llvm")["main"](*args)
    expected = np.maximum(a.astype("float64") @ w + b, 0) + r
    assert np.abs(args[-1].numpy() - expected).max() <= 1e-5 * np.abs(expected).max()


def test_methods_are_the_functions(schedule):
    """On a plain schedule, with the mesh as an argument."""
    sch, plain, mesh = schedule(5, 3, 7), s_tir.Schedule(schedule(5, 3, 7).mod), Mesh({"tp": 2})
    mm_fuse(sch)
    _, reduce = shard(plain, plain.get_loops(plain.get_sblock("mm"))[2], "tp", mesh)
    scatter, gather = split_collective(plain, reduce, mesh)
    epi = plain.get_sblock("epi")
    (gather,) = reorder_collective(plain, gather, [epi], mesh)
    fuse_collective(plain, [scatter, epi, gather])
    tvm.ir.assert_structural_equal(plain.mod, sch.mod)


def test_copy_keeps_the_mesh_and_its_own_state(schedule):
    sch = schedule(tp=2)
    mm = sch.get_sblock("mm")
    copied = sch.copy()
    assert isinstance(copied, Schedule) and copied.mesh == sch.mesh
    copied.shard(copied.get_loops(mm)[2], "tp")
    assert len(sch.get_child_blocks(sch.get_sblock("root"))) == 2
    assert len(copied.get_child_blocks(copied.get_sblock("root"))) == 3


def test_module_with_main(schedule):
    module = schedule().mod
    assert isinstance(module, tvm.IRModule)
    sch = Schedule(module, mesh=Mesh({"tp": 2}))
    mm_fuse(sch)
    assert "axe.bind" in sch.mod.script()
