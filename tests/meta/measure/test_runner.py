"""A candidate that crashes, hangs, is wrong, takes all memory or doesn't compile costs itself only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import misbehaving
import psutil
import pytest
from misbehaving import (
    changes_its_input,
    does_not_compile,
    does_not_link,
    double,
    goes_on,
    half_done,
    loops,
    other_shape,
    raises,
    starts_before,
    takes_all_memory,
    vectorized,
)
from tvm.script import tirx as T

from tvm_axe.errors import TuneError
from tvm_axe.machines.builder import builder_named
from tvm_axe.meta.measure import batch
from tvm_axe.meta.measure.child import Fault
from tvm_axe.meta.measure.process import Bench
from tvm_axe.meta.measure.runner import BUILDER, Runner
from tvm_axe.records.database import normalize


@pytest.fixture(scope="module")
def shared(target, tmp_path_factory):
    """A worker that all faults happen to, one after the other."""
    with Runner(target, tmp_path_factory.mktemp("measure") / "worker.log", timeout=3.0) as worker:
        yield worker


@pytest.fixture
def worker(shared):
    assert shared.prepare(normalize(double)).seconds > 0
    return shared


@pytest.mark.parametrize(
    "candidate, reason",
    [
        (normalize(half_done), "wrong result: argument 1 is off by"),
        (normalize(changes_its_input), "wrong result: argument 0 is off by"),
        (normalize(starts_before), "wrong result: it writes beyond argument 1"),
        (normalize(goes_on), "crashed (SIGSEGV)"),
        (normalize(does_not_link), "crashed (SIGSEGV)"),
        (normalize(does_not_compile), "InternalError: not implemented"),
        (normalize(other_shape), "A.shape[0]"),
        (normalize(takes_all_memory), "std::bad_alloc"),
        (raises(signal.SIGKILL), "killed (SIGKILL): by the system for want of memory, or from outside"),
        (normalize(loops), "no result within 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_costs_itself_only(worker, candidate, reason):
    before, fault, after = worker.measure_all([vectorized(), candidate, vectorized()])
    assert fault.seconds is None
    assert reason in fault.failure
    for measured in (before, after):
        assert measured.failure is None
        assert min(measured.seconds, measured.build_seconds, measured.run_seconds) > 0


def test_a_fault_of_the_builder_is_no_candidates(target, tmp_path):
    """It stops the job, with the traceback of the process: here a builder that doesn't take what builders are given."""
    builder = "tvm_axe.checking.comparing:is_float"
    with Runner(target, tmp_path / "log", 10.0, builder) as runner, pytest.raises(Fault, match="TypeError"):
        runner.prepare(normalize(double))


def test_what_writes_beyond_an_argument_says_nothing_of_those_behind(worker):
    """Their processes go on: each begins with whole surroundings."""
    found = worker.measure_all([normalize(starts_before)] * 4 + [vectorized()] * 8)
    failures = [one.failure for one in found]
    assert failures == ["ValueError: wrong result: it writes beyond argument 1"] * 4 + [None] * 8


def test_processes_stay_up_between_candidates(worker):
    list(worker.measure_all([vectorized()] * 8))
    before = [slot.child.pid for slot in worker._slots]
    assert None not in before
    assert [measured.failure for measured in worker.measure_all([vectorized()] * 8)] == [None] * 8
    assert [slot.child.pid for slot in worker._slots] == before


def test_a_process_that_somebody_kills_costs_nothing(worker):
    found = worker.measure_all([vectorized()] * 12)
    measured = [next(found)]
    # One: a candidate that moves to another process, which is killed too, counts as one that ends them.
    os.kill(next(slot.child.pid for slot in worker._slots if slot.child.pid is not None), signal.SIGKILL)
    measured += found
    assert [one.failure for one in measured] == [None] * 12


def test_candidates_that_nobody_waits_for_are_given_up(worker, limit):
    found = worker.measure_all([vectorized(), *[normalize(loops)] * 8])
    assert next(found).failure is None
    found.close()
    with limit(20):  # it would take 8 times 3 s
        assert worker.measure(vectorized()).failure is None


def test_a_function_that_was_prepared_is_known(worker, matmul):
    first = worker.prepare(normalize(matmul(8, 8, 8)))
    assert worker.measure(normalize(double)).failure is not None
    pids = [slot.child.pid for slot in worker._slots]
    again = worker.prepare(normalize(double))
    assert worker.measure(vectorized()).failure is None
    assert worker.prepare(normalize(matmul(8, 8, 8))) == first  # the very time, so it was not run again
    assert worker.measure(normalize(matmul(8, 8, 8))).failure is None
    assert again.seconds > 0
    assert [slot.child.pid for slot in worker._slots] == pids


def test_functions_that_were_not_used_for_long_are_forgotten(worker, matmul, monkeypatch):
    monkeypatch.setattr("tvm_axe.meta.measure.runner._KEPT", 2)
    count = len(os.listdir("/proc/self/fd"))
    for size in (4, 5, 6, 7):
        assert worker.prepare(normalize(matmul(size, 4, 4))).failure is None
    assert len(os.listdir("/proc/self/fd")) <= count + 1
    assert worker.measure(normalize(matmul(7, 4, 4))).failure is None


def test_an_update_too_small_to_be_rounding_is_still_wanted(shared):
    """What the untuned function changes is an output, however little it changes."""

    @T.prim_func(s_tir=True)
    def update(w: T.Buffer((64,), "float32"), g: T.Buffer((64,), "float32")):
        for i in range(64):
            with T.sblock("w"):
                vi = T.axis.spatial(64, i)
                w[vi] = w[vi] + g[vi] * T.float32(1e-6)

    assert shared.prepare(normalize(update)).failure is None
    assert shared._functions[shared._digest].prepared.written == (True, False)
    assert shared.measure(normalize(update)).failure is None


def test_roots_are_taken_of_positive_numbers(shared):
    """The root of a negative number would agree with that of any other."""

    @T.prim_func(s_tir=True)
    def root(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
        for i in range(64):
            with T.sblock("B"):
                vi = T.axis.spatial(64, i)
                B[vi] = T.sqrt(A[vi])

    @T.prim_func(s_tir=True)
    def of_double(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
        for i in range(64):
            with T.sblock("B"):
                vi = T.axis.spatial(64, i)
                B[vi] = T.if_then_else(A[vi] < T.float32(0), T.sqrt(A[vi]), T.float32(2) * T.sqrt(A[vi]))

    assert shared.prepare(normalize(root)).failure is None
    assert "wrong result: argument 1 is off by 1 of its norm" in shared.measure(normalize(of_double)).failure


GATHERS = {"one row": 1, "few rows": 2, "many": 50}


def gather(rows: int, kind: str):
    """X by an index that comes from a tensor, on its way through a scale and another tensor or not; or a scatter."""

    @T.prim_func(s_tir=True)
    def gather(X: T.Buffer((rows, 8), "float32"), I: T.Buffer((64,), "int64"), Y: T.Buffer((64, 8), "float32")):
        for i, j in T.grid(64, 8):
            with T.sblock("Y"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[I[vi], vj] + T.float32(1)

    @T.prim_func(s_tir=True)
    def computed(X: T.Buffer((rows, 8), "float32"), I: T.Buffer((64,), "int64"), Y: T.Buffer((64, 8), "float32")):
        K = T.alloc_buffer((64,), "int64")
        for i in range(64):
            with T.sblock("K"):
                vi = T.axis.spatial(64, i)
                K[vi] = I[vi]
        for i, j in T.grid(64, 8):
            with T.sblock("Y"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[K[vi], vj] + T.float32(1)

    @T.prim_func(s_tir=True)
    def scatter(X: T.Buffer((64, 8), "float32"), I: T.Buffer((64,), "int64"), Y: T.Buffer((rows, 8), "float32")):
        for j in range(8):
            with T.sblock("Y"):
                vj = T.axis.spatial(8, j)
                for i in range(64):
                    Y[I[i], vj] = Y[I[i], vj] + X[i, vj]

    return {"gather": gather, "computed": computed, "scatter": scatter}[kind]


@pytest.mark.parametrize("rows", GATHERS)
@pytest.mark.parametrize("kind", ["gather", "computed", "scatter"])
def test_what_is_an_index_is_within(target, tmp_path, rows, kind):
    """Also into one row alone; of many, all are looked at."""
    mod = normalize(gather(GATHERS[rows], kind))
    exchange = tmp_path / "exchange"
    exchange.touch()
    bench = Bench(mod, target, builder_named(BUILDER), exchange, None)
    for arrays in bench.exchange.inputs:
        assert 0 <= arrays[1].min() <= arrays[1].max() < GATHERS[rows]
        if rows == "many" and kind != "computed":
            assert len(set(arrays[1].tolist())) == 50
    assert bench.prepared.written == (False, False, True)


def test_conditions_are_stated(worker):
    first = str(min(os.sched_getaffinity(0)))
    wanted = {"cpus": first, "threads": 1, "input sets": 2, "caches": "warm", "repeats": 5, "statistic": "median"}
    assert worker.conditions == wanted


def test_an_untuned_function_that_crashes_is_reported(shared):
    assert shared.prepare(raises(signal.SIGABRT)).failure == "crashed (SIGABRT)"
    with pytest.raises(TuneError, match="no function is prepared"):
        shared.measure(vectorized())
    assert shared.prepare(normalize(double)).failure is None
    assert shared.measure(vectorized()).failure is None


def test_workers_that_cannot_be_started_are_an_error(worker, monkeypatch):
    for slot in worker._slots:
        slot.drop()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(TuneError, match=r"no tuning worker can be started: .*No such file"):
            worker.measure(vectorized())
    assert worker.measure(vectorized()).failure is None
    for slot in worker._slots:
        slot.drop()
    with monkeypatch.context() as patch:
        patch.setattr(batch, "START_SECONDS", 0.0)
        with pytest.raises(TuneError, match=r"cannot be prepared: no result within 0 s; see .*worker.log"):
            worker.measure(vectorized())
    assert worker.measure(vectorized()).failure is None


def test_nothing_is_left_running(target, tmp_path):
    with Runner(target, tmp_path / "worker.log", timeout=3.0) as worker:
        worker.prepare(normalize(double))
        (pid,) = [slot.child.pid for slot in worker._slots if slot.child.pid is not None]
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


_TUNER = """
import sys
from pathlib import Path
import tvm
from tvm_axe.meta.measure.runner import Runner
from tvm_axe.records.database import normalize
from misbehaving import double, loops
worker = Runner(tvm.target.Target({"kind": "llvm", "num-cores": 1}), Path(sys.argv[1]), timeout=60.0)
worker.prepare(normalize(double))
print(worker._slots[0].child.pid, flush=True)
worker.measure(normalize(loops))
"""


def test_the_worker_dies_with_its_tuner(tmp_path):
    """A tuner that is killed can't clean up, and its worker is in a kernel that doesn't return."""
    here = {**os.environ, "PYTHONPATH": os.path.dirname(misbehaving.__file__)}
    command = [sys.executable, "-c", _TUNER, str(tmp_path / "worker.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=here) as tuner:
        worker = psutil.Process(int(tuner.stdout.readline()))
        time.sleep(1.0)  # until it is in the kernel
        assert worker.is_running()
        tuner.kill()
        worker.wait(timeout=10)
