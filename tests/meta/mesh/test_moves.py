"""The schedules that are enumerated: the known ones are among them, none twice, and each computes the same."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir

import tvm_axe as axe
from tvm_axe.layout import Mesh
from tvm_axe.lower import lower
from tvm_axe.machines import resolve_target
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.devices import Devices
from tvm_axe.meta.mesh.moves import Candidate, schedules
from tvm_axe.meta.mesh.seeds import seed_schedule, sharings
from tvm_axe.meta.mesh.space import on_gpus, program_workload
from tvm_axe.programs import PROGRAMS
from tvm_axe.schedule import Schedule

DP, TP = Mesh({"dp": 2}), Mesh({"tp": 2})


@pytest.mark.parametrize(
    ("program", "mesh", "known"),
    [
        ("adam", DP, {"AR-C", "RS-C-AG", "fuse(RS-C-AG)", "R-B-C"}),
        ("mlp", TP, {"MM-AR-C", "MM-RS-C-AG", "MM-fuse(RS-C-AG)", "ol(MM, fuse(RS-C-AG))"}),
    ],
)
def test_known_schedules(program, mesh, known):
    found = list(schedules(seed_schedule(PROGRAMS[program](mesh).func, mesh), keep=("m_out", "v_out")))
    functions = [candidate.sch.mod["main"] for candidate in found]
    notations = {lower(function, mesh).notation for function in functions}
    assert known <= notations
    assert len({tvm_ffi.structural_hash(function) for function in functions}) == len(found)
    assert len({str(candidate.sch.trace) for candidate in found}) == len(found)


def test_each_is_the_same_function_on_one_device():
    """A scheduled program is still an ordinary one: its annotations ignored, it computes what the program does."""
    program = PROGRAMS["mlp"](TP)
    arrays = program.inputs(np.random.default_rng(1))
    expected = program.reference(*arrays)
    for candidate in schedules(seed_schedule(program.func, TP), chunks=(2,)):
        executable = tvm.compile(candidate.sch.mod["main"].with_attr("global_symbol", "main"), target="llvm")
        out = tvm.runtime.tensor(np.full(expected[0].shape, np.nan, "float32"))
        executable["main"](*map(tvm.runtime.tensor, arrays), out)
        assert program.error((out.numpy(),), expected) < program.tolerance, candidate.steps


def test_trace_replays_on_a_stock_schedule():
    program = PROGRAMS["sgd"](DP)
    *_, candidate = schedules(seed_schedule(program.func, DP), keep=("m_out",))
    stock = s_tir.Schedule(program.func)
    candidate.sch.trace.apply_to_schedule(stock, remove_postproc=False)
    tvm.ir.assert_structural_equal(stock.mod, candidate.sch.mod)


def test_state_stays_sharded_only_where_it_may():
    func = PROGRAMS["adam"](DP).func
    kept = [
        c for c in schedules(seed_schedule(func, DP), keep=("m_out",), chunks=()) if "as_slice" in " ".join(c.steps)
    ]
    assert kept
    assert all("v_out" not in " ".join(s for s in c.steps if s.startswith("as_slice")) for c in kept)
    assert not any("as_slice" in " ".join(c.steps) for c in schedules(seed_schedule(func, DP), chunks=()))


def test_seed_of_gradients_and_of_a_matmul():
    assert lower(seed_schedule(PROGRAMS["sgd"](DP).func, DP).mod["main"], DP).stages[0].kind == "all-reduce"
    kinds = [stage.kind for stage in lower(seed_schedule(PROGRAMS["mlp"](TP).func, TP).mod["main"], TP).stages]
    assert kinds == ["local", "all-reduce", "local"]


def test_nothing_to_share():
    from tvm.script import tirx as T

    @T.prim_func(s_tir=True)
    def double(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("B"):
                vi = T.axis.spatial(8, i)
                B[vi] = A[vi] * T.float32(2)

    with pytest.raises(axe.ScheduleError, match=r"nothing to share over tp=2.*sch\.shard"):
        seed_schedule(double, TP)


def test_a_matmul_that_stores_to_a_part_of_a_parameter_is_shared_by_its_sum_alone():
    """The copy behind rows or columns would overwrite what lies between the elements that it stores to."""
    from tvm.script import tirx as T

    @T.prim_func(s_tir=True)
    def spread(X: T.Buffer((4, 6), "float32"), W: T.Buffer((6, 4), "float32"), C: T.Buffer((8, 4), "float32")):
        for i, j, k in T.grid(4, 4, 6):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi * 2, vj] = T.float32(0)
                C[vi * 2, vj] = C[vi * 2, vj] + X[vi, vk] * W[vk, vj]

    ways = list(sharings(spread, TP))
    assert [lower(way.mod["main"], TP).notation for way in ways] == ["MM-AR"]
    for way in ways:
        axe.check(way, engine="threads", seeds=1)


@pytest.mark.parametrize(("program", "mesh", "wanted"), [("norm", TP, "meets"), ("layers", DP, "beside")])
def test_what_only_gpus_hide(program, mesh, wanted):
    """An all-reduce in one kernel with its norm, a collective beside products: on GPUs, and not on cores."""
    made = PROGRAMS[program](mesh)
    way = next(sharings(made.func, mesh)) if program == "norm" else made.schedule("MM-AR-C")
    for name in ("cuda:sm_90a", "llvm"):
        devices = Devices.of(resolve_target(name), None)
        known = Candidates(None, devices)
        plain = known.with_lowered(
            Candidate(Schedule(program_workload(way.mod["main"], mesh, devices)["main"], mesh=mesh))
        )
        assert plain is not None
        found = [found.lowered for found in on_gpus([plain], known)]
        meets = any(buffer.is_flags for lowered in found for buffer in lowered.buffers.values())
        beside = any(call.function.endswith(":beside") for lowered in found for call in lowered.calls)
        assert {"meets": meets, "beside": beside}[wanted] == (name != "llvm")
