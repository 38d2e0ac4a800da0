"""The whole way: tune, find the best again under any name, go on after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import tvm
from tvm.ir import IRModule
from tvm.script import ir as I
from tvm.script import tirx as T

from tvm_axe.errors import TuneError
from tvm_axe.meta import apply_best, resolve_target, tune
from tvm_axe.meta.database import RECORDS, WORKLOADS, read_records, read_workloads
from tvm_axe.meta.job import _in_use
from tvm_axe.meta.measure import Measurement, Worker


def _check(mod: IRModule, name: str, target, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng()
    a, w = rng.standard_normal((m, k), "float32"), rng.standard_normal((k, n), "float32")
    tensors = [tvm.runtime.tensor(x) for x in (a, w, np.full((m, n), np.nan, "float32"))]
    tvm.compile(mod, target=target)[name](*tensors)
    want = a.astype("float64") @ w
    assert np.abs(tensors[-1].numpy() - want).max() / np.abs(want).max() < 1e-5


def _count(folder) -> int:
    return sum(1 for record in read_records(folder, read_workloads(folder)) if record.trace[0])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, matmul, target):
    """A folder with 20 candidates of an uneven matmul, and what `tune` said of them."""
    folder = tmp_path_factory.mktemp("tuned")
    return folder, tune(matmul(61, 53, 67), target=target, trials=20, work_dir=folder, seed=1, progress=False)


def test_the_result_says_what_was_done(tuned, target):
    folder, result = tuned
    (task,) = result.tasks
    assert (task.name, task.trials, task.failures) == ("main", 20, ())
    assert 0 < task.best_ms < task.before_ms
    assert task.gflops == pytest.approx(2 * 61 * 53 * 67 / task.best_ms / 1e6)
    assert result.left_out == {}
    assert set(result.seconds) == {"search", "build", "run", "total"}
    assert sum(result.seconds.values()) < 2 * result.seconds["total"]
    assert _count(folder) == 20
    (run,) = json.loads((folder / "provenance.json").read_text())["runs"]
    assert run["versions"]["apache-tvm"] == "0.27.0.post1"
    assert (run["target"], run["seed"], run["trials"]) == (json.loads(str(target)), 1, 20)
    ((_, about),) = run["tasks"].items()
    assert about == {"name": "main", "before_ms": task.before_ms, "failures": [], "best_ms": task.best_ms, "trials": 20}


def test_the_best_is_applied_whatever_the_function_is_called(tuned, matmul, target):
    folder, result = tuned
    renamed = matmul(61, 53, 67).with_attrs({"global_symbol": "mm_rf", "axe.layouts": "C: S[61:1]"})
    mod = IRModule({"mm_rf": renamed, "other": matmul(8, 8, 8).with_attr("global_symbol", "other")})
    best, seconds = apply_best(mod, target, folder)
    assert seconds == {"mm_rf": pytest.approx(result.tasks[0].best_ms / 1e3)}
    assert dict(best["mm_rf"].attrs.items()) == dict(renamed.attrs.items())
    assert "vectorized" in best["mm_rf"].script()
    assert "vectorized" not in mod["mm_rf"].script()
    tvm.ir.assert_structural_equal(best["other"], mod["other"])
    _check(best, "mm_rf", target, 61, 53, 67)


def test_records_of_another_target_do_not_match(tuned, matmul):
    folder, _ = tuned
    mod = IRModule({"main": matmul(61, 53, 67)})
    for other in (resolve_target("llvm", threads=2), {"kind": "llvm", "mcpu": "x86-64", "num-cores": 1}):
        best, seconds = apply_best(mod, other, folder)
        assert seconds == {}
        tvm.ir.assert_structural_equal(best, mod)


def test_nothing_found_is_fine(tmp_path, matmul, target):
    mod = IRModule({"main": matmul(61, 53, 67)})
    best, seconds = apply_best(mod, target, tmp_path / "missing")
    assert seconds == {}
    tvm.ir.assert_structural_equal(best, mod)


def test_a_finished_job_starts_nothing(tuned, matmul, target, monkeypatch):
    folder, result = tuned
    before = (folder / RECORDS).read_bytes(), (folder / "provenance.json").read_bytes()
    monkeypatch.setattr("tvm_axe.meta.measure.Worker._start", lambda self: pytest.fail("a worker was started"))
    again = tune(matmul(61, 53, 67), target=target, trials=20, work_dir=folder, progress=False)
    assert again.tasks == result.tasks
    assert ((folder / RECORDS).read_bytes(), (folder / "provenance.json").read_bytes()) == before


def test_a_broken_tail_costs_one_trial(tuned, matmul, target, tmp_path):
    source, _ = tuned
    for name in (WORKLOADS, RECORDS):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    with open(tmp_path / RECORDS, "r+b") as records:
        records.truncate((tmp_path / RECORDS).stat().st_size - 30)
    with pytest.warns(UserWarning, match=r"1 broken line\(s\) of .*database_tuning_record.json moved"):
        result = tune(matmul(61, 53, 67), target=target, trials=22, work_dir=tmp_path, progress=False)
    assert result.tasks[0].trials == 22
    assert _count(tmp_path) == 22
    assert len((tmp_path / f"{RECORDS}.broken").read_text().splitlines()) == 1


def test_a_record_that_no_longer_applies_is_passed_over(tuned, matmul, target, tmp_path):
    source, _ = tuned
    (tmp_path / WORKLOADS).write_bytes((source / WORKLOADS).read_bytes())
    lines = (source / RECORDS).read_text().splitlines()
    number, (trace, _, where, infos) = json.loads(lines[-1])
    trace[0][0] = ["GetSBlock", [], ["gone", "main"], ["b0"]]
    bad = json.dumps([number, [trace, [1e-9], where, infos]])
    (tmp_path / RECORDS).write_text("\n".join([bad, *lines]) + "\n")
    with pytest.warns(UserWarning, match=rf"{RECORDS}:1: skipped a record that no longer applies") as caught:
        best, seconds = apply_best(IRModule({"main": matmul(61, 53, 67)}), target, tmp_path)
    assert len(caught) == 1
    assert seconds["main"] > 1e-8
    _check(best, "main", target, 61, 53, 67)


_JOB = """
import sys
from tvm_axe.meta import tune, resolve_target
from conftest import _matmul
tune(_matmul(64, 64, 64), target=resolve_target("llvm", threads=1), trials=200, work_dir=sys.argv[1], seed=3)
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_an_interrupted_job_goes_on_where_it_was(tmp_path, matmul, target, how):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-c", _JOB, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 60
        while not (tmp_path / RECORDS).exists() or (tmp_path / RECORDS).read_bytes().count(b"\n") < 6:
            assert time.monotonic() < deadline
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.02)
        workers = psutil.Process(job.pid).children()
        job.send_signal(getattr(signal, how))
        job.stderr.read()
    assert job.returncode != 0
    assert workers
    assert all(worker.wait(timeout=10) is None for worker in workers)
    done = _count(tmp_path)
    assert 5 <= done < 200
    result = tune(matmul(64, 64, 64), target=target, trials=done + 3, work_dir=tmp_path, seed=3, progress=False)
    assert result.tasks[0].trials == done + 3 == _count(tmp_path)
    best, _ = apply_best(IRModule({"main": matmul(64, 64, 64)}), target, tmp_path)
    _check(best, "main", target, 64, 64, 64)


@I.ir_module
class Several:
    @T.prim_func(s_tir=True)
    def sums(A: T.Buffer((40, 30), "float32"), C: T.Buffer((40,), "float32")):
        for i, k in T.grid(40, 30):
            with T.sblock("C"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    C[vi] = T.float32(0)
                C[vi] = C[vi] + A[vi, vk]

    @T.prim_func(s_tir=True)
    def crashes(A: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("A"):
                vi = T.axis.spatial(8, i)
                A[vi] = A[vi] + T.float32(1)
                T.evaluate(T.call_extern("int32", "abort"))

    @T.prim_func(s_tir=True)
    def scalar(A: T.Buffer((8,), "float32"), n: T.int32):
        for i in range(8):
            with T.sblock("A"):
                vi = T.axis.spatial(8, i)
                A[vi] = A[vi] + T.float32(1)

    @T.prim_func(s_tir=True)
    def empty(A: T.Buffer((8,), "float32")):
        T.evaluate(0)


def test_each_function_is_a_task_and_a_bad_one_spoils_no_other(tmp_path, target):
    result = tune(Several, target=target, trials=4, work_dir=tmp_path, seed=1, progress=False)
    by_name = {task.name: task for task in result.tasks}
    assert set(by_name) == {"sums", "crashes"}
    assert by_name["sums"].trials == 4
    assert by_name["crashes"].failures == ("the untuned function: crashed (SIGABRT)",)
    assert by_name["crashes"].best_ms is by_name["crashes"].before_ms is None
    assert set(result.left_out) == {"scalar", "empty"}
    assert "buffer of constant shape" in result.left_out["scalar"]
    assert "no block" in result.left_out["empty"]
    best, seconds = apply_best(Several, target, tmp_path)
    assert set(seconds) == {"sums"}
    a = np.random.default_rng().standard_normal((40, 30), "float32")
    tensors = [tvm.runtime.tensor(x) for x in (a, np.full(40, np.nan, "float32"))]
    tvm.compile(IRModule({"sums": best["sums"]}), target=target)["sums"](*tensors)
    np.testing.assert_allclose(tensors[1].numpy(), a.astype("float64").sum(1), rtol=1e-5, atol=1e-5)


def test_failures_are_recorded_with_their_reasons(tmp_path, matmul, target, monkeypatch):
    measure, calls = Worker.measure, []

    def sometimes(self, mod):
        calls.append(mod)
        return Measurement(None, "crashed (SIGSEGV)") if len(calls) % 2 else measure(self, mod)

    monkeypatch.setattr(Worker, "measure", sometimes)
    result = tune(matmul(16, 16, 16), target=target, trials=6, work_dir=tmp_path, seed=1, progress=False)
    assert result.tasks[0].failures == ("crashed (SIGSEGV)",) * 3
    assert result.tasks[0].trials == _count(tmp_path) == 6
    ((_, about),) = json.loads((tmp_path / "provenance.json").read_text())["runs"][0]["tasks"].items()
    assert about["failures"] == ["crashed (SIGSEGV)"] * 3
    best, seconds = apply_best(IRModule({"main": matmul(16, 16, 16)}), target, tmp_path)
    assert seconds["main"] < 1
    _check(best, "main", target, 16, 16, 16)


def test_the_tensor_intrinsics_are_never_imported(tuned):
    """Their import takes 13 s; nothing on the way to a tuned kernel needs them."""
    assert "tvm.s_tir.tensor_intrin" not in sys.modules


def test_bad_arguments_are_refused(tmp_path, matmul, target):
    with pytest.raises(TuneError, match="trials: a function needs at least one trial, not 0"):
        tune(matmul(4, 4, 4), target=target, trials=0, work_dir=tmp_path)
    with pytest.raises(TuneError, match=r"func_or_mod: no function can be tuned \(empty: it has no block"):
        tune(IRModule({"empty": Several["empty"]}), target=target, work_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match=r"work_dir: .*file cannot be used"):
        tune(matmul(4, 4, 4), target=target, work_dir=tmp_path / "file")


def test_one_job_at_a_time(tmp_path, matmul, target):
    with _in_use(tmp_path), pytest.raises(TuneError, match="another tuning job is at work"):
        tune(matmul(4, 4, 4), target=target, work_dir=tmp_path)


def test_the_bar_shows_trials_best_and_failures(tmp_path, matmul, target, capsys):
    tune(matmul(16, 16, 16), target=target, trials=3, work_dir=tmp_path, seed=1)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "best 0.0" in shown
    assert "GFLOP/s, 0 failed" in shown
