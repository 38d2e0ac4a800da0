"""The whole way: tune, find the best again under any name, go on after an interruption."""

from __future__ import annotations

import json
import os
import shutil
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
from tvm_axe.machines import resolve_target
from tvm_axe.meta import tune
from tvm_axe.meta.measure.protocol import Measurement
from tvm_axe.meta.measure.runner import Runner
from tvm_axe.records import apply_best
from tvm_axe.records.database import RECORDS, WORKLOADS, find_databases, read_records, read_workloads
from tvm_axe.records.trials import TRIALS, key_of, read_trials


def _check(mod: IRModule, name: str, target, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng()
    a, w = rng.standard_normal((m, k), "float32"), rng.standard_normal((k, n), "float32")
    tensors = [tvm.runtime.tensor(x) for x in (a, w, np.full((m, n), np.nan, "float32"))]
    tvm.compile(mod, target=target)[name](*tensors)
    want = a.astype("float64") @ w
    assert np.abs(tensors[-1].numpy() - want).max() / np.abs(want).max() < 1e-5


def _candidates(folder):
    """The records of the only database below a folder, without the untuned function's."""
    (database,) = find_databases(folder)
    return [record for record in read_records(database, read_workloads(database)) if record.trace[0]]


def _agree(folder) -> int:
    """How many candidates are recorded, once each, with a line each in the log of trials."""
    (database,) = find_databases(folder)
    keys = [key_of(record.entry) for record in _candidates(folder)]
    assert len({json.dumps(record.trace) for record in _candidates(folder)}) == len(keys)
    assert [trial.record for trial in read_trials(database)] == keys
    return len(keys)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, matmul, target):
    """A folder with 20 candidates of an uneven matmul, and what `tune` said of them."""
    folder = tmp_path_factory.mktemp("tuned")
    return folder, tune(matmul(61, 53, 67), target=target, trials=20, work_dir=folder, seed=1, progress=False)


def test_the_result_says_what_was_done(tuned, target):
    folder, result = tuned
    (task,) = result.tasks
    assert (task.name, task.trials, task.failures) == ("main", 20, ())
    assert min(task.best_ms, task.before_ms) > 0
    assert task.gflops == pytest.approx(2 * 61 * 53 * 67 / task.best_ms / 1e6)
    assert result.left_out == {}
    assert set(result.seconds) == {"search", "build", "run", "total"}
    assert result.seconds["search"] + result.seconds["run"] < result.seconds["total"]
    assert _agree(folder) == 20
    assert task.folder.parent.parent == folder
    trials = read_trials(task.folder)
    assert 0 < trials[0].elapsed < trials[-1].elapsed < result.seconds["total"]
    assert min(trial.seconds for trial in trials) * 1e3 == task.best_ms
    (run,) = json.loads((task.folder / "provenance.json").read_text())["runs"]
    assert run["versions"]["apache-tvm"] == "0.27.0.post1"
    assert (run["target"], run["seed"], run["trials"]) == (json.loads(str(target)), 1, 20)
    ((_, about),) = run["tasks"].items()
    assert about.pop("conditions")["threads"] == 1
    assert about == {"name": "main", "before_ms": task.before_ms, "failures": [], "best_ms": task.best_ms, "trials": 20}


def test_the_best_is_applied_whatever_the_function_is_called(tuned, matmul, target):
    folder, result = tuned
    renamed = matmul(61, 53, 67).with_attrs({"global_symbol": "mm_rf", "axe.layouts": "C: S[61:1]"})
    mod = IRModule({"mm_rf": renamed, "other": matmul(8, 8, 8).with_attr("global_symbol", "other")})
    best, seconds = apply_best(mod, target, folder)
    assert seconds == {"mm_rf": pytest.approx(result.tasks[0].best_ms / 1e3)}
    assert dict(best["mm_rf"].attrs.items()) == dict(renamed.attrs.items())
    # A tile kernel is an annotation, any other schedule has vectors.
    assert any(word in best["mm_rf"].script() for word in ("vectorized", "axe.tile"))
    assert not any(word in mod["mm_rf"].script() for word in ("vectorized", "axe.tile"))
    tvm.ir.assert_structural_equal(best["other"], mod["other"])
    _check(best, "mm_rf", target, 61, 53, 67)


def test_kernels_have_no_schedule_of_a_program(tuned):
    _, result = tuned
    assert result.schedules == ()
    for name in ("best", "schedule", "trace", "notation"):
        with pytest.raises(TuneError, match=r"no program on a mesh was tuned but main.*apply_best"):
            getattr(result, name)
    assert result.table().splitlines()[1].split()[::3] == ["main", "20"]


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
    files = (RECORDS, "provenance.json", TRIALS, "../model.npz")
    before = [(result.tasks[0].folder / name).read_bytes() for name in files]
    monkeypatch.setattr(Runner, "prepare", lambda self, mod: pytest.fail("a worker was started"))
    again = tune(matmul(61, 53, 67), target=target, trials=20, work_dir=folder, progress=False)
    assert again.tasks == result.tasks
    assert [(result.tasks[0].folder / name).read_bytes() for name in files] == before


def test_a_broken_tail_costs_one_trial(tuned, matmul, target, tmp_path):
    source, _ = tuned
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    (database,) = find_databases(tmp_path)
    with open(database / RECORDS, "r+b") as records:
        records.truncate((database / RECORDS).stat().st_size - 30)
    with pytest.warns(UserWarning, match=r"1 broken line\(s\) of .*database_tuning_record.json moved"):
        result = tune(matmul(61, 53, 67), target=target, trials=22, work_dir=tmp_path, progress=False)
    assert result.tasks[0].trials == len(_candidates(tmp_path)) == 22
    assert len((database / f"{RECORDS}.broken").read_text().splitlines()) == 1


def test_a_record_that_no_longer_applies_is_passed_over(tuned, matmul, target, tmp_path):
    source = tuned[1].tasks[0].folder
    (tmp_path / WORKLOADS).write_bytes((source / WORKLOADS).read_bytes())
    lines = (source / RECORDS).read_text().splitlines()
    number, (trace, _, where, infos) = json.loads(lines[-1])
    trace[0][0] = ["GetSBlock", [], ["gone", "main"], ["b0"]]
    bad = json.dumps([number, [trace, [1e-9], where, infos]])
    (tmp_path / RECORDS).write_text("\n".join([bad, *lines]) + "\n")
    with pytest.warns(UserWarning, match=rf"{RECORDS}:1: a record that no longer applies") as caught:
        best, seconds = apply_best(IRModule({"main": matmul(61, 53, 67)}), target, tmp_path)
    assert len(caught) == 1
    assert seconds["main"] > 1e-8
    _check(best, "main", target, 61, 53, 67)


_JOB = """
import sys
from tvm_axe.machines import resolve_target
from tvm_axe.meta import tune
from tuning_workloads import _matmul
tune(_matmul(64, 64, 64), target=resolve_target("llvm", threads=1), trials=200, work_dir=sys.argv[1], seed=3)
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_an_interrupted_job_goes_on_where_it_was(tmp_path, matmul, target, how):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
    command = [sys.executable, "-c", _JOB, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 60
        while sum(path.read_bytes().count(b"\n") for path in tmp_path.rglob(RECORDS)) < 6:
            assert time.monotonic() < deadline
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.02)
        workers = psutil.Process(job.pid).children()
        job.send_signal(getattr(signal, how))
        job.stderr.read()
    assert job.returncode != 0
    assert workers
    assert all(worker.wait(timeout=10) is None for worker in workers)
    done = len(_candidates(tmp_path))
    assert 4 <= done < 200  # of the five that were seen the last may not have been on disk yet
    result = tune(matmul(64, 64, 64), target=target, trials=done + 3, work_dir=tmp_path, seed=3, progress=False)
    assert result.tasks[0].trials == done + 3 == _agree(tmp_path)
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
    assert by_name["sums"].trials == 4  # those of the other are not made
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
    measure_all = Runner.measure_all

    def sometimes(self, mods):
        for n, measured in enumerate(measure_all(self, mods)):
            yield measured if n % 2 else Measurement(None, "crashed (SIGSEGV)")

    monkeypatch.setattr(Runner, "measure_all", sometimes)
    result = tune(matmul(16, 16, 16), target=target, trials=6, work_dir=tmp_path, seed=1, progress=False)
    (task,) = result.tasks
    assert task.failures == ("crashed (SIGSEGV)",) * 3
    assert task.trials == _agree(tmp_path) == 6
    assert [trial.failure for trial in read_trials(task.folder)] == ["crashed (SIGSEGV)", None] * 3
    ((_, about),) = json.loads((task.folder / "provenance.json").read_text())["runs"][0]["tasks"].items()
    assert about["failures"] == ["crashed (SIGSEGV)"] * 3
    best, seconds = apply_best(IRModule({"main": matmul(16, 16, 16)}), target, tmp_path)
    assert seconds["main"] < 1
    _check(best, "main", target, 16, 16, 16)


def test_the_tensor_intrinsics_are_never_imported(tuned):
    """Their import takes 13 s; nothing on the way to a tuned kernel needs them."""
    assert "tvm.s_tir.tensor_intrin" not in sys.modules


def test_bad_arguments_are_refused(tmp_path, matmul, target):
    with pytest.raises(TuneError, match="trials: at least one candidate is needed, not 0"):
        tune(matmul(4, 4, 4), target=target, trials=0, work_dir=tmp_path)
    with pytest.raises(TuneError, match="patience: at least one candidate is needed, not 0"):
        tune(matmul(4, 4, 4), target=target, patience=0, work_dir=tmp_path)
    with pytest.raises(TuneError, match=r"program: no function can be tuned \(empty: it has no block"):
        tune(IRModule({"empty": Several["empty"]}), target=target, work_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match=r"work_dir: .*file.* cannot be used"):
        tune(matmul(4, 4, 4), target=target, work_dir=tmp_path / "file")


def test_the_bar_shows_trials_best_and_failures(tmp_path, matmul, target, capsys):
    tune(matmul(16, 16, 16), target=target, trials=3, work_dir=tmp_path, seed=1)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "best 0.0" in shown
    assert "trials a minute" in shown
    assert "GFLOP/s, 0 failed" in shown
