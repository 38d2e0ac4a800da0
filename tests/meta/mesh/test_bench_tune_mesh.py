"""The script that sets the tuner's choice for a program on a mesh beside measuring everything: its small form."""

import sys

import bench_tune_mesh as script
import pytest

from tvm_axe.layout import Mesh
from tvm_axe.meta.mesh import best_schedule, space


def test_both_choices_side_by_side(monkeypatch, tmp_path):
    """Of a space that is cut to the schedules of two, and what overlaps in these."""
    monkeypatch.setattr(space, "SCHEDULES", 2)
    case = script.case_of("mlp", "test", Mesh({"tp": 2}), "threads")
    count = len(script.all_schedules(case))
    (choice, time), lines = script.compare(case, tmp_path, trials=2, rounds=2)
    assert choice["ratio"] == pytest.approx(choice["peer_ms"] / choice["ours_ms"])
    assert (time["name"], time["peer"]) == ("mlp on tp=2: 2 measured", f"exhaustive: {count} measured")
    text = "\n".join(lines)
    for side, row_text in (("tuner", choice["name"]), ("exhaustive", choice["peer"])):
        options = {"target": case.target, "work_dir": tmp_path / side, "engine": "threads"}
        recorded = best_schedule(case.func, case.mesh, **options)
        assert script.described(recorded.mod, case.mesh) in row_text, "each chose by its own records"
        assert f"{side}: measured" in text
    same = "both chose the same" in text
    assert same or f"{abs(choice['ours_ms'] / choice['peer_ms'] - 1):.1%} " in text or "faster" in text


def test_a_side_that_has_records_is_refused(monkeypatch, tmp_path, capsys):
    (tmp_path / "records").touch()
    monkeypatch.setattr(sys, "argv", ["bench_tune_mesh.py", "--work-dir", str(tmp_path)])
    with pytest.raises(SystemExit):
        script.main()
    assert "isn't empty, and both sides begin with nothing" in capsys.readouterr().err
