"""Records that come with the package: whom they serve, and that they are in order."""

from __future__ import annotations

import pytest
from tvm.ir import IRModule
from tvm.s_tir.meta_schedule.database import Workload

import tvm_axe as axe
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.records import apply_best, shipped
from tvm_axe.records.database import find_databases, normalize, read_records, read_workloads
from tvm_axe.records.folders import folder_for
from tvm_axe.records.maintenance import tuned, validate
from tvm_axe.records.record import FAILED_SECONDS
from tvm_axe.tile import lowering


def _target(mcpu: str, cores: int = 2, **more):
    return resolve_target({"kind": "llvm", "mcpu": mcpu, "num-cores": cores, **more})


@pytest.mark.parametrize(
    ("mcpu", "levels"),
    [
        ("znver5", ["znver5", "x86-64-v4", "x86-64-v3"]),
        ("haswell", ["haswell", "x86-64-v3"]),
        ("x86-64-v3", ["x86-64-v3"]),
        ("nehalem", ["nehalem"]),
    ],
)
def test_generic_levels_stand_in_for_cpus_that_have_their_vectors(mcpu, levels):
    found = shipped.stand_ins(_target(mcpu))
    assert [str(target.attrs["mcpu"]) for target in found] == levels
    assert {int(target.attrs["num-cores"]) for target in found} == {2}


def test_what_a_target_takes_away_is_not_used():
    assert len(shipped.stand_ins(_target("znver5", mattr=["-avx512f"]))) == 2
    assert len(shipped.stand_ins(resolve_target("cuda:sm_90a"))) == 1


@pytest.fixture
def ship(tmp_path, matmul, commit, monkeypatch):
    """Ship records of a 4x4x4 matmul for a target, with the time of the scheduled function."""
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "package")

    def write(target, seconds):
        func = matmul(4, 4, 4)
        commit(folder_for(tmp_path / "package", target, "mm", normalize(func)), func, target, [0.5, seconds])

    return write


def test_own_records_go_first_then_those_for_the_cpu_then_generic_ones(ship, matmul, commit, tmp_path):
    mod, own = IRModule({"mm": matmul(4, 4, 4), "other": matmul(5, 5, 5)}), tmp_path / "own"

    def applied(target) -> dict[str, float]:
        best, seconds = apply_best(mod, target, own)
        assert ("T.parallel" in best["mm"].script()) == (seconds.get("mm") not in (None, 0.5))
        return seconds

    target = _target("znver5")
    assert applied(target) == {}
    ship(_target("x86-64-v3"), 0.125)
    assert applied(target) == applied(_target("haswell")) == {"mm": 0.125}
    assert applied(_target("znver5", cores=3)) == applied(_target("nehalem")) == {}
    ship(_target("x86-64-v4"), 0.25)
    assert applied(target) == {"mm": 0.25}
    assert applied(_target("haswell")) == {"mm": 0.125}
    ship(target, 0.375)
    assert applied(target) == {"mm": 0.375}
    commit(own, matmul(4, 4, 4), target, [0.5, 0.75])
    assert applied(target) == {"mm": 0.5}


def test_compiling_without_records_leaves_the_shipped_ones_out_too(ship, matmul):
    target = _target("x86-64-v2", cores=cores_per_device(axe.Mesh({"device": 1})))
    ship(target, 0.125)
    func, mesh = matmul(4, 4, 4), axe.Mesh({"device": 1})
    assert axe.compile(func, mesh, target, work_dir="nowhere").tuned
    assert not axe.compile(func, mesh, target, work_dir=None).tuned


def test_the_records_that_ship_are_in_order():
    good, problems = validate(shipped.SHIPPED)
    assert problems == []
    assert good > 0
    assert {entry.folder.parent.parent for entry in tuned(shipped.SHIPPED)} == {shipped.SHIPPED}
    assert all(entry.runs and entry.best for entry in tuned(shipped.SHIPPED))


def test_shipped_records_with_tile_kernels_still_plan(monkeypatch):
    """What was fastest on a GPU is refused by no check that came later."""
    target, plans = resolve_target("cuda:sm_90a"), []
    plan = lowering.plan
    monkeypatch.setattr(lowering, "plan", lambda *args: plans.append(plan(*args)) or plans[-1])
    for folder in find_databases(shipped.SHIPPED / "cuda-sm_90a"):
        workloads = read_workloads(folder)
        for record in read_records(folder, workloads):
            workload = workloads[record.workload]
            if workload and record.seconds < FAILED_SECONDS:
                scheduled = record.schedule(Workload.from_json(list(workload)).mod)
                with_tile_kernels(scheduled.mod, target)
    assert len(plans) >= 50
