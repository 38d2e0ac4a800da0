"""A candidate is lowered once, whoever looks at it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.target import Target

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.layout import Mesh
from tvm_axe.lower import lowered as lowering
from tvm_axe.lower.cost import estimate
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.model import ProgramModel
from tvm_axe.meta.mesh.moves import schedules, structure
from tvm_axe.meta.mesh.process import MEASURE, PREPARE, _Handler
from tvm_axe.meta.mesh.seeds import seed_schedule, sharings
from tvm_axe.meta.mesh.space import program_space, program_workload
from tvm_axe.meta.mesh.strategy import Ranking
from tvm_axe.meta.model.features.communication import communication_columns
from tvm_axe.meta.model.features.locality import log
from tvm_axe.programs import PROGRAMS

DP, TP = Mesh({"dp": 2}), Mesh({"tp": 2})
TARGET = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1})


@pytest.fixture
def lowerings(monkeypatch):
    """The names of the functions that were lowered."""
    seen, infer = [], lowering.infer_shardings

    def counting(program, declared):
        seen.append(program.name)
        return infer(program, declared)

    monkeypatch.setattr(lowering, "infer_shardings", counting)
    return seen


def test_a_search_lowers_each_candidate_once(lowerings, tmp_path):
    """To see whether it can be, and what it costs; not to run it, to time it again or to say what it is."""
    program = PROGRAMS["sgd"](DP)
    seed = seed_schedule(program.func, DP)
    # The program as it is shared to begin with is lowered too: an error in it is the caller's.
    count = len({structure(sch) for sch in [seed, *(c.sch for c in schedules(seed, ("m_out",), (2,)))]})
    arrays = program.inputs(np.random.default_rng(0))
    options = {"keep": ("m_out",), "chunks": (2,), "measure": 3, "repeat": 1, "progress": False}
    result = axe.search(program.func, DP, inputs=arrays, engine="threads", work_dir=tmp_path, **options)
    assert sum(found.median_ms is not None for found in result.schedules) == 3
    assert len(lowerings) == count
    axe.search(program.func, DP, inputs=arrays, engine="threads", work_dir=tmp_path, **options)
    assert len(lowerings) == 2 * count


def test_space_and_model_lower_each_schedule_once(lowerings):
    mod = program_workload(PROGRAMS["mlp"](TP).func, TP, "threads")
    known = Candidates()
    model = ProgramModel(known)
    strategy = Ranking(model, 4)
    space = program_space(mod, known, chunks=(2,))
    context = _tvm.tune_context(mod, TARGET, space, strategy, "program", 1, 1, None)
    strategy.pre_tuning(1, 1, context.generate_design_space())
    model.expect(strategy.candidates)
    assert {structure(candidate.sch) for candidate in strategy.candidates} <= {*model._terms}
    ways = {structure(way) for way in sharings(mod["main"], TP)}
    for candidate in strategy.candidates:
        assert known.lowered(candidate.sch.mod).notation
        assert known.steps(candidate.sch.mod) or structure(candidate.sch) in ways
    assert len(lowerings) == len(known._lowered)


def test_the_process_that_runs_a_schedule_lowers_it_once(lowerings, tmp_path):
    mod = program_workload(PROGRAMS["sgd"](DP).func, DP, "threads")
    *_, candidate = schedules(seed_schedule(mod["main"], DP), chunks=())
    handle, encoded = _Handler(), tvm.ir.save_json(candidate.sch.mod)
    target = resolve_target("llvm", threads=cores_per_device(DP))
    origin = tvm.ir.save_json(PROGRAMS["sgd"](DP).func)
    assert handle((PREPARE, tvm.ir.save_json(mod), str(target), str(tmp_path), origin, None))["median"] > 0
    assert len(lowerings) == 1
    for _ in range(2):
        assert handle((MEASURE, encoded))["median"] > 0
    assert len(lowerings) == 2
    handle.bench.close()


def test_what_cannot_be_lowered_is_refused_once(lowerings, monkeypatch):
    def refuse(program, declared):
        lowerings.append(program.name)
        raise axe.LowerError("a stage reads what its device doesn't own")

    monkeypatch.setattr(lowering, "infer_shardings", refuse)
    known, mod = Candidates(), program_workload(PROGRAMS["sgd"](DP).func, DP, "threads")
    assert known.lowered_or_none(mod) is None
    with pytest.raises(axe.LowerError, match="doesn't own"):
        known.lowered(mod)
    assert len(lowerings) == 1


def test_a_fault_of_the_lowering_is_no_refusal(monkeypatch):
    monkeypatch.setattr(lowering, "infer_shardings", lambda program, declared: program.nothing)
    mod = program_workload(PROGRAMS["sgd"](DP).func, DP, "threads")
    with pytest.raises(AttributeError, match="nothing"):
        Candidates().lowered_or_none(mod)


def test_a_candidate_is_what_compile_makes_of_it():
    """Every other row of a product on a device: others do the iterations then, as many; and a copy is a stage."""
    sch = axe.Schedule(PROGRAMS["mlp"](TP).func, mesh=TP)
    mm = sch.get_sblock("mm")
    whole = Candidates(TP).operations(sch.mod)
    _, device = sch.split(sch.get_loops(mm)[0], [None, 2])
    sch.shard(device, "tp")
    with pytest.raises(axe.LowerError):
        axe.compile(sch, work_dir=None, redistribute="refuse")
    known = Candidates(TP)
    lowered = known.lowered(sch.mod)
    assert known.operations(sch.mod) == (whole[0] / 2, whole[1])
    exe = axe.compile(sch, work_dir=None)
    assert (lowered.notation, lowered.stages) == (exe.notation, exe.lowered.stages)
    columns = communication_columns(program_workload(sch.mod["main"], TP)["main"])
    assert columns["mesh_stages"] == pytest.approx(log(len(exe.stages)))
    assert columns["mesh_link_us"] == pytest.approx(log(1e6 * estimate(exe.lowered)))
