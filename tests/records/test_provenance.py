"""What is written beside a database of where its records come from."""

from __future__ import annotations

import json
import threading

import pytest

from tvm_axe.records.provenance import PROVENANCE, Provenance, add_runs, read_runs


def test_a_run_says_with_what_and_how_it_was_made(tmp_path, target):
    run = Provenance(tmp_path, target, seed=3, trials=8)
    assert read_runs(tmp_path) == []
    run.record("12", name="mm", before_ms=2.0)
    run.record("12", best_ms=1.0)
    (written,) = read_runs(tmp_path)
    assert written["tasks"] == {"12": {"name": "mm", "before_ms": 2.0, "best_ms": 1.0}}
    assert written["target"] == json.loads(str(target))
    assert (written["seed"], written["trials"]) == (3, 8)
    assert written["versions"].keys() == {"tvm-axe", "apache-tvm", "apache-tvm-ffi", "xgboost-cpu", "numpy"}
    assert all(written[key] for key in ("id", "date", "command", "python", "host", "cpu"))


def test_runs_at_the_same_time_keep_each_other(tmp_path, target):
    runs = [Provenance(tmp_path, target, seed, 1) for seed in range(4)]

    def record(run):
        for n in range(10):
            run.record("1", best_ms=n)

    threads = [threading.Thread(target=record, args=[run]) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = read_runs(tmp_path)
    assert sorted(run["seed"] for run in written) == [0, 1, 2, 3]
    assert {run["tasks"]["1"]["best_ms"] for run in written} == {9}


def test_runs_of_before_there_were_ids_stay(tmp_path, target):
    old = {"date": "2026-01-01T00:00:00+00:00", "target": {"kind": "llvm"}, "seed": 1, "tasks": {}}
    (tmp_path / PROVENANCE).write_text(json.dumps({"runs": [old, {**old, "seed": 2}]}))
    Provenance(tmp_path, target, 3, 1).record("1", best_ms=1)
    add_runs(tmp_path, [old])
    assert [run["seed"] for run in read_runs(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("text", ["{", '{"runs": 3}', "[]", '{"runs": [{}]}'])
def test_what_cannot_be_read_is_kept_aside(tmp_path, target, text):
    (tmp_path / PROVENANCE).write_text(text)
    assert read_runs(tmp_path) is None
    with pytest.warns(UserWarning, match="provenance.json cannot be read; it is now .*provenance.json.broken"):
        Provenance(tmp_path, target, 3, 1).record("1", best_ms=1)
    assert (tmp_path / f"{PROVENANCE}.broken").read_text() == text
    assert [run["seed"] for run in read_runs(tmp_path)] == [3]
