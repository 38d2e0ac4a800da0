"""The demo: its numpy baselines are right, and its report says what it must."""

import json
import math
import multiprocessing
from dataclasses import asdict

import numpy as np
import pytest

from tvm_axe import cli, demo
from tvm_axe.demo import baseline, block


@pytest.fixture
def problem():
    return baseline.Problem.random(33, 41, 17, seed=np.random.SeedSequence().entropy)


def test_both_processes_hold_the_result_of_the_all_reduce(problem):
    with baseline.AllReduce(problem) as all_reduce:
        seconds = all_reduce.time(3)
        results = all_reduce.results()
    assert len(seconds) == 3 and min(seconds) > 0
    for result in results:
        np.testing.assert_allclose(result, problem.reference(), rtol=1e-5, atol=1e-5)
    assert multiprocessing.active_children() == []


def test_baseline_ends_its_processes_after_an_error(problem):
    with pytest.raises(RuntimeError, match="in the middle"), baseline.AllReduce(problem):
        raise RuntimeError("in the middle")
    assert multiprocessing.active_children() == []


def test_reference_is_the_blocks_formula(problem):
    x, w, bias, residual = (array.astype("float64") for array in problem)
    row, column = 5, 7
    product = math.fsum(x[row, k] * w[k, column] for k in range(x.shape[1])) + bias[column]
    assert problem.reference().dtype == np.float64
    assert math.isclose(problem.reference()[row, column], max(product, 0) + residual[row, column], abs_tol=1e-12)


def test_relative_error_cannot_hide_a_nan():
    reference = np.ones((2, 2))
    assert demo._relative_error(reference + 1e-3, reference) == pytest.approx(1e-3)
    assert math.isnan(demo._relative_error(np.array([[1, np.nan], [1, 1]]), reference))


def test_report_on_two_workers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "TRIALS", 2)
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "REPEAT", 2)
    monkeypatch.setattr(demo, "WORK_DIR", tmp_path)
    assert cli.main(["demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"rows", "chosen", "numpy_ms", "numpy_all_reduce_ms"}
    rows = report["rows"]
    assert [(row["schedule"], row["tuned"]) for row in rows] == [
        (name, tuned) for name in block.SCHEDULES for tuned in (False, True)
    ]
    for row in rows:
        assert set(row) == {"schedule", "tuned", "relative_error", "median_ms", "bytes"}
        assert row["relative_error"] < 1e-5
        assert row["median_ms"] > 0
        # An all-reduce of [tokens, outer] float32 over n devices, or a reduce-scatter and an all-gather of it.
        n = block.mesh.size
        assert row["bytes"] == 2 * (n - 1) * block.TOKENS * block.OUTER * 4 // n
    assert report["chosen"] == min(rows, key=lambda row: row["median_ms"])["schedule"]
    assert report["numpy_ms"] > 0 and report["numpy_all_reduce_ms"] > 0


def test_table_has_a_line_for_each_row_and_peer():
    rows = [demo.DemoRow("MM-AR-C", False, 2e-7, 10.0, 1536), demo.DemoRow("MM-AR-C", True, 3e-7, 4.0, 1536)]
    report = demo.DemoReport(rows, "MM-AR-C", 8.0, 6.0)
    lines = report.table().splitlines()
    assert lines[1].split() == ["MM-AR-C", "no", "2.0e-07", "10.00", "1,536"]
    assert lines[2].split() == ["MM-AR-C", "yes", "3.0e-07", "4.00", "1,536"]
    assert "8.00 ms, 2.00 times" in lines[3]
    assert "6.00 ms, 1.50 times" in lines[4]
    assert lines[5] == "chosen: MM-AR-C"
    assert json.loads(json.dumps(asdict(report)))["rows"][0]["tuned"] is False
