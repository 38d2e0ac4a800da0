"""Lines changed at random cost themselves: no process ends, no good line is lost, and each bad one is named."""

from __future__ import annotations

import json
import os
import signal

import pytest
from mutations import mutations

from tvm_axe.records.checks import CHECKED
from tvm_axe.records.database import RECORDS, WORKLOADS, read_records, read_workloads
from tvm_axe.records.replay import Trials


def test_lines_changed_at_random_are_skipped_or_replayed():
    counts = mutations(7, range(100))
    assert set(counts) <= {"skipped", "replayed", "refused"} and sum(counts.values()) == 100
    assert counts["skipped"] > 50 and counts["replayed"] > 0


@pytest.fixture
def database(tmp_path, commit, matmul, target, monkeypatch):
    monkeypatch.setenv("TVM_AXE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tvm_axe.records.checks._faults", {})
    commit(tmp_path / "db", matmul(4, 4, 4), target, [0.5, 0.25])
    return tmp_path / "db"


def _line(folder, number=0):
    (workload,) = read_workloads(folder)
    return workload, json.loads((folder / RECORDS).read_text().splitlines()[number])[1]


def test_what_ends_the_process_that_tries_it_is_told_and_the_next_is_tried_in_another(database):
    workload, entry = _line(database)
    trials = Trials()
    assert trials.workload_fault(workload) is None
    os.kill(trials._process.pid, signal.SIGSEGV)
    trials._process.wait(10)
    assert trials.entry_fault(workload, entry) == "ends the process that reads it (SIGSEGV)"
    assert trials.entry_fault(workload, entry) is None


def test_what_takes_too_long_is_told(database):
    workload, entry = _line(database)
    trials = Trials()
    assert trials.workload_fault(workload) is None
    os.kill(trials._process.pid, signal.SIGSTOP)
    trials.seconds = 0.2
    assert trials.entry_fault(workload, entry) == "takes more than 0.2 s"
    trials.seconds = 60.0
    assert trials.entry_fault(workload, entry) is None


def test_written_and_checked_lines_are_not_tried_again(database, tmp_path, monkeypatch):
    def tried(*_):
        raise AssertionError("was tried")

    monkeypatch.setattr(Trials, "_ask", tried)
    assert len(read_records(database, read_workloads(database))) == 2
    # What another process has noted counts; a line that was changed since doesn't.
    monkeypatch.setattr("tvm_axe.records.checks._faults", {})
    assert len(read_records(database, read_workloads(database))) == 2
    path = database / RECORDS
    path.write_text(path.read_text().replace("0.25", "0.125"))
    with pytest.raises(AssertionError, match="was tried"):
        read_records(database, read_workloads(database))
    monkeypatch.undo()
    monkeypatch.setenv("TVM_AXE_CACHE", str(tmp_path / "other"))
    assert [record.seconds for record in read_records(database, read_workloads(database))] == [0.5, 0.125]
    assert (tmp_path / "other" / CHECKED).stat().st_size > 0


def test_a_changed_workload_costs_its_records_and_they_are_named(database):
    path = database / WORKLOADS
    digest, encoded = json.loads(path.read_text())
    path.write_text(json.dumps([digest, encoded[:100] + "A" + encoded[101:]]) + "\n")
    with pytest.warns(UserWarning, match="there is no workload 0 that can be read") as caught:
        assert read_records(database, read_workloads(database)) == []
    assert [f"{RECORDS}:{n}: skipped" in str(w.message) for n, w in enumerate(caught, 1)] == [True, True]
