"""axe.search: what it measures, what it keeps, what it says of the rest."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower.cost import estimate
from tvm_axe.meta.mesh import bench, devices
from tvm_axe.programs import PROGRAMS
from tvm_axe.records.database import Database, with_only_attrs
from tvm_axe.records.folders import MESH

MESH_OF_TWO = Mesh({"dp": 2})


@pytest.fixture
def sgd():
    return PROGRAMS["sgd"](MESH_OF_TWO)


def find(program, work_dir, **options):
    arrays = program.inputs(np.random.default_rng(0))
    settings = {
        "keep": ("m_out",),
        "chunks": (2,),
        "inputs": arrays,
        "engine": "threads",
        "progress": False,
        "repeat": 3,
    }
    return axe.search(program.func, program.mesh, work_dir=work_dir, **(settings | options))


def test_the_best_runs_and_is_right(sgd, tmp_path):
    result = find(sgd, tmp_path, measure=4)
    measured = [found for found in result.schedules if found.median_ms is not None]
    assert len(measured) == 4
    assert result.best is measured[0]
    assert [found.median_ms for found in measured] == sorted(found.median_ms for found in measured)
    arrays = sgd.inputs(np.random.default_rng(2))
    with axe.launch(MESH_OF_TWO, engine="threads") as workers:
        outputs = axe.compile(result.best.sch, work_dir=None).run(workers, *arrays)
    assert sgd.error(outputs, sgd.reference(*arrays)) < sgd.tolerance
    assert result.best.notation in result.table()
    twin = replace(result.best, steps=(*result.best.steps, "overlap([mm, rs], tp, 4)"))
    _, once, again = replace(result, schedules=(result.best, twin)).table().splitlines()
    assert again == f"{once}  by overlap([mm, rs], tp, 4)"
    assert (result.schedule, result.notation) == (result.best.sch, result.best.notation)
    (task,) = result.tasks
    assert task.best_ms == result.best.median_ms
    assert result.left_out == {} and {"search", "build", "run", "kernels", "total"} == set(result.seconds)
    assert result.best.notation in result.table() and result.report.exists()


def test_the_rest_says_why(sgd, tmp_path):
    result = find(sgd, tmp_path, measure=2, slack=1.01)
    unmeasured = [found for found in result.schedules if found.median_ms is None]
    assert unmeasured
    assert all("the model expects" in found.why_not or "come before" in found.why_not for found in unmeasured)
    assert min(found.estimate_ms for found in unmeasured) >= result.best.estimate_ms


def test_what_was_measured_is_not_measured_again(sgd, tmp_path, monkeypatch):
    first = find(sgd, tmp_path, measure=3)
    monkeypatch.setattr(devices, "launch", lambda *_, **__: pytest.fail("nothing was left to measure"))
    second = find(sgd, tmp_path, measure=3)
    assert [found.median_ms for found in second.schedules] == [found.median_ms for found in first.schedules]


def test_what_an_earlier_version_recorded_is_not_measured_again(sgd, tmp_path, monkeypatch):
    """It wrote all times of a schedule in the order in which they were taken, and nothing beside the database."""
    measured = find(sgd, tmp_path / "new", measure=3)
    func = sgd.func
    attrs = {"global_symbol": "main", "s_tir": True, MESH: str(sgd.mesh)}
    workload = ms.database.Workload(IRModule({"main": with_only_attrs(func, attrs)}))
    database, target = Database(tmp_path / "schedules"), measured.target
    for n, found in enumerate(measured.schedules[:3]):
        infos = ms.arg_info.ArgInfo.from_prim_func(workload.mod["main"])
        seconds = [(n + 1) * s for s in (5e-3, 1e-3, 2e-3)]
        database.commit_tuning_record(ms.database.TuningRecord(found.sch.trace, workload, seconds, target, infos))
    monkeypatch.setattr(devices, "launch", lambda *_, **__: pytest.fail("nothing was left to measure"))
    result = find(sgd, tmp_path, measure=3)
    assert [f.median_ms for f in result.schedules[:3]] == pytest.approx([2, 4, 6])
    assert str(result.trace) == str(measured.trace)


def test_what_failed_is_tried_again(sgd, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        judged = []

        def right_once(_, name, got):
            judged.append(name)
            return "is wrong" if judged.count(name) > 1 else ""

        patch.setattr(bench.Expected, "fault", right_once)
        first = find(sgd, tmp_path, measure=2)
    assert [f.why_not for f in first.schedules[:2]].count("") == 1
    second = find(sgd, tmp_path, measure=2)
    assert [f.median_ms is not None for f in second.schedules[:3]] == [True, True, False]


def test_the_database_is_metaschedules(sgd, tmp_path):
    from tvm.s_tir import Schedule

    result = find(sgd, tmp_path, measure=2)
    database = ms.database.JSONDatabase(work_dir=str(tmp_path / "schedules"))
    records = database.get_all_tuning_records()
    assert len({str(record.trace) for record in records}) == 2
    assert len(records) == 4, "each as it was measured alone, and with its turns beside the other"
    assert {str(record.workload.mod["main"].attrs[MESH]) for record in records} == {"dp=2"}
    traces = [record.trace for record in records]
    assert str(result.trace) in [str(trace) for trace in traces]
    stock = Schedule(sgd.func)
    traces[0].apply_to_schedule(stock, remove_postproc=False)


def test_another_mesh_is_another_workload(sgd, tmp_path):
    find(sgd, tmp_path, measure=1)
    find(PROGRAMS["sgd"](Mesh({"dp": 3})), tmp_path, measure=1)
    lines = (tmp_path / "schedules" / "database_workload.json").read_text().splitlines()
    assert len({json.loads(line)[0] for line in lines}) == 2


@pytest.mark.parametrize("wrong_one", [1, 2])
def test_a_wrong_result_is_no_candidate(sgd, tmp_path, monkeypatch, wrong_one):
    """Not the first either, which the others aren't compared with."""
    run, seen = axe.Executable.run, []

    def off_by_some(self, workers, *arrays):
        seen.append(self.notation)
        outputs = run(self, workers, *arrays)
        return outputs if len(seen) != wrong_one else tuple(out + np.float32(1) for out in outputs)

    monkeypatch.setattr(axe.Executable, "run", off_by_some)
    result = find(sgd, tmp_path, measure=3)
    wrong = [found for found in result.schedules if "wrong result: " in found.why_not]
    assert len(wrong) == 1
    assert sum(found.median_ms is not None for found in result.schedules) == 2
    assert wrong[0].notation == seen[wrong_one - 1]
    assert wrong[0].median_ms is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": 0}, "measure: must be at least 1"),
        ({"slack": 0.5}, "slack: must be at least 1"),
        ({"trials": -1}, "trials: must be at least 0, not -1"),
        ({"repeat": 0}, "repeat: must be at least 1"),
    ],
)
def test_numbers_out_of_range(sgd, tmp_path, options, message):
    with pytest.raises(axe.TuneError, match=message):
        find(sgd, tmp_path, **options)


def test_mesh_is_needed_and_must_agree(sgd, tmp_path):
    with pytest.raises(axe.LowerError, match="name the mesh"):
        axe.search(sgd.func, work_dir=tmp_path)
    sch = axe.Schedule(sgd.func, mesh=MESH_OF_TWO)
    with pytest.raises(axe.LowerError, match="the schedule is for the mesh dp=2, not dp=3"):
        axe.search(sch, Mesh({"dp": 3}), work_dir=tmp_path)


def test_command_line(tmp_path, capsys):
    from tvm_axe.cli import main

    (tmp_path / "sgd.py").write_text(
        'import tvm_axe as axe\nfrom tvm_axe.programs import PROGRAMS\nmesh = axe.Mesh({"dp": 2})\n'
        'block = PROGRAMS["sgd"](mesh).func\n'
    )
    kernel, best = f"{tmp_path}/sgd.py:block", str(tmp_path / "best.json")
    options = ["--keep", "m_out", "--measure", "2", "--engine", "threads", "--work-dir", str(tmp_path)]
    assert main(["search", kernel, *options, "--save", best]) == 0
    notation = capsys.readouterr().out.splitlines()[1].split()[0]
    assert main(["show", kernel, "--schedule", best]) == 0
    assert f"schedule {notation} on mesh dp=2" in capsys.readouterr().out
    (tmp_path / "other.py").write_text(
        'import tvm_axe as axe\nfrom tvm_axe.programs import PROGRAMS\nmesh = axe.Mesh({"tp": 2})\n'
        'block = PROGRAMS["mlp"](mesh).func\n'
    )
    assert main(["show", f"{tmp_path}/other.py:block", "--schedule", best]) == 2
    assert "the trace doesn't apply to this function" in capsys.readouterr().err
    (tmp_path / "broken.json").write_text("[")
    assert main(["show", kernel, "--schedule", str(tmp_path / "broken.json")]) == 2
    assert "not a schedule's trace" in capsys.readouterr().err


def test_what_compile_would_insert_is_inserted_and_counted(tmp_path, monkeypatch, caplog):
    """A product of what lies by rows; every way to share its sum moves that first, by copies that no trace has."""
    mesh, rows, inner = Mesh({"tp": 2}), 4, 6

    @T.prim_func(s_tir=True)
    def double(X: T.Buffer((4, 6), "float32"), W: T.Buffer((6, 4), "float32"), out: T.Buffer((4, 4), "float32")):
        C = T.sblock_alloc_buffer((4, 4), "float32")
        for i, j, k in T.grid(4, 4, 6):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + X[vi, vk] * W[vk, vj]
        for i, j in T.grid(4, 4):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = C[vi, vj] * T.float32(2)

    func = axe.with_layouts(double, {"X": Layout.sharded((rows, inner), mesh, {0: "tp"})})
    options = {"engine": "threads", "work_dir": tmp_path, "measure": 2, "repeat": 1, "chunks": (2,), "progress": False}
    result = axe.search(func, mesh, **options)
    assert all(found.inserted == ("recut X for mm_rf: 24 bytes",) for found in result.schedules)
    assert "  redistributed: recut X for mm_rf: 24 bytes" in result.table().splitlines()
    assert not caplog.records, "the table says it; compiling what is measured doesn't, too"
    assert "axe.inserted" not in str(result.trace)
    with pytest.raises(axe.LowerError, match="'mm_rf' reads 'X' across 'tp'"):
        axe.compile(result.schedule, work_dir=None, redistribute="refuse")
    exe = axe.compile(result.schedule, work_dir=None)
    assert (exe.lowered.inserted, exe.notation) == (result.best.inserted, result.notation)
    assert sum(stage.bytes for stage in exe.stages) == result.best.bytes > 24
    assert 1e3 * estimate(exe.lowered) == pytest.approx(result.best.estimate_ms)
    monkeypatch.setattr(devices, "launch", lambda *_, **__: pytest.fail("nothing was left to measure"))
    again = axe.search(func, mesh, **options)
    assert [found.median_ms for found in again.schedules] == [found.median_ms for found in result.schedules]
