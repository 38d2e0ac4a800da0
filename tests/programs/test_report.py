"""`tvm-axe programs`: its rows and table, which programs run on which mesh, and faults that don't stop the others."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

import tvm_axe as axe
from tvm_axe import InputError, ScheduleError, cli
from tvm_axe.layout import Mesh
from tvm_axe.programs import PROGRAMS, ProgramFactory, report

KEYS = {
    "program", "schedule", "mesh", "engine", "relative_error", "bytes", "bytes_expected", "median_ms", "reference_ms",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _few_repeats(monkeypatch):
    monkeypatch.setattr(report, "REPEAT", 2)


def spoil(monkeypatch, **changes) -> None:
    """Replace parts of the program sgd."""
    factory = ProgramFactory(("dp",), lambda mesh, size: replace(PROGRAMS["sgd"].build(mesh, size), **changes))
    monkeypatch.setattr(report, "PROGRAMS", {**PROGRAMS, "sgd": factory})


def test_json_of_two_programs(capsys):
    arguments = ["programs", "--programs", "sgd,ag_mm", "--mesh", "dp=2,tp=2", "--engine", "threads", "--json"]
    assert cli.main(arguments) == 0
    out, progress = capsys.readouterr()
    rows = json.loads(out)["rows"]
    names = [
        (name, schedule) for name in ("sgd", "ag_mm") for schedule in PROGRAMS[name](Mesh({"dp": 2, "tp": 2})).schedules
    ]
    assert [(row["program"], row["schedule"]) for row in rows] == names
    for row in rows:
        assert set(row) == KEYS
        assert (row["mesh"], row["engine"]) == ("dp=2,tp=2", "threads")
        assert 0 <= row["relative_error"] <= 1e-5
        assert row["bytes"] == row["bytes_expected"] > 0
        assert row["median_ms"] > 0 and row["reference_ms"] > 0
    assert "programs: sgd on dp=2,tp=2: fuse(RS-C-AG)" in progress.splitlines()


def test_table():
    row = report.ProgramRow("sgd", "AR-C", "dp=3", "threads", 5e-8, 1536, 1536, 0.25, 0.5)
    text = report.ProgramsReport([row, replace(row, relative_error=None, bytes=10.5)], []).table().splitlines()
    assert text[1].split() == ["sgd", "AR-C", "dp=3", "5.0e-08", "1,536", "1,536", "0.250", "0.500"]
    assert text[2].split() == ["sgd", "AR-C", "dp=3", "NaN", "10.5", "1,536", "0.250", "0.500"]
    assert len({len(line) for line in text}) == 1


def test_meshes_of_two_where_none_is_given():
    found = report.chosen(None, None)
    assert list(found) == list(PROGRAMS)
    assert found["adam"] == Mesh({"dp": 2}) and found["pipeline"] == Mesh({"pp": 2, "tp": 2})


def test_programs_that_cannot_use_the_mesh_are_left_out(capsys):
    mesh = Mesh({"tp": 2})
    assert report.chosen(mesh, None) == dict.fromkeys(["mlp", "attention", "norm", "ag_mm"], mesh)
    notes = capsys.readouterr().err
    assert "pipeline: left out, as it is shared over pp and tp and the mesh is tp=2" in notes
    assert "adam: left out, as it is shared over dp" in notes


def test_no_program_is_left():
    with pytest.raises(InputError, match="no program can use the mesh x=2; give it axes among: dp; ep; pp, tp; tp"):
        report.chosen(Mesh({"x": 2}), None)


def test_unknown_program(capsys):
    assert cli.main(["programs", "--programs", "adam,adamw"]) == 2
    assert "no program adamw; there are sgd, adam," in capsys.readouterr().err


def test_failing_schedule_does_not_stop_the_others(monkeypatch, capsys):
    def refuse(sch):
        raise ScheduleError("that rule doesn't hold")

    good = PROGRAMS["sgd"](Mesh({"dp": 2}))
    spoil(monkeypatch, schedules={**good.schedules, "RS-C-AG": refuse})
    assert cli.main(["programs", "--programs", "sgd", "--engine", "threads", "--json"]) == 1
    out, faults = capsys.readouterr()
    assert [row["schedule"] for row in json.loads(out)["rows"]] == ["AR-C", "fuse(RS-C-AG)"]
    assert "sgd on dp=2: RS-C-AG: ScheduleError: that rule doesn't hold" in faults


def test_workers_that_a_schedule_ended_are_launched_again(monkeypatch):
    good = PROGRAMS["sgd"](Mesh({"dp": 2}))
    launched = []

    def launch(mesh, engine):
        launched.append(axe.launch(mesh, engine=engine))
        return launched[-1]

    def kill(sch):
        good.schedules["RS-C-AG"](sch)
        launched[-1].close()

    monkeypatch.setattr(report, "launch", launch)
    spoil(monkeypatch, schedules={**good.schedules, "RS-C-AG": kill})
    found = report.run({"sgd": Mesh({"dp": 2})}, "threads", "test")
    assert len(found.rows) == 3 and not found.faults
    assert len(launched) == 2 and all(workers.closed for workers in launched)


def test_unknown_engine(capsys):
    assert cli.main(["programs", "--programs", "sgd", "--engine", "steam"]) == 2
    assert "unknown engine 'steam'" in capsys.readouterr().err


def test_failing_program_does_not_stop_the_others(monkeypatch):
    def fail(rng):
        raise ValueError("no such inputs")

    spoil(monkeypatch, inputs=fail)
    found = report.run({"sgd": Mesh({"dp": 2}), "norm": Mesh({"tp": 2})}, "threads", "test")
    assert {row.program for row in found.rows} == {"norm"}
    assert found.faults == ["sgd on dp=2: ValueError: no such inputs"]


def test_wrong_result_is_a_fault(monkeypatch):
    spoil(monkeypatch, compute=lambda g, p, m, lr: (p + 1, m))
    found = report.run({"sgd": Mesh({"dp": 2})}, "threads", "test")
    assert len(found.rows) == len(found.faults) == 3
    assert "AR-C: its relative error is" in found.faults[0] and "more than 1e-05" in found.faults[0]


def test_nan_is_a_fault_and_null(monkeypatch):
    spoil(monkeypatch, compute=lambda g, p, m, lr: (p * np.nan, m))
    found = report.run({"sgd": Mesh({"dp": 1})}, "threads", "test")
    assert [row.relative_error for row in found.rows] == [None] * 3
    assert "its relative error is nan" in found.faults[0]
    assert json.loads(json.dumps(asdict(found), allow_nan=False))["rows"][0]["relative_error"] is None


def test_other_bytes_are_a_fault(monkeypatch):
    spoil(monkeypatch, bytes=dict.fromkeys(["AR-C", "RS-C-AG", "fuse(RS-C-AG)"], 7))
    found = report.run({"sgd": Mesh({"dp": 2})}, "threads", "test")
    assert found.faults[0] == "sgd on dp=2: AR-C: it moves 1152 bytes, not 7"
