"""A candidate that crashes, hangs, is wrong or doesn't compile costs itself only."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest
import tvm
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe.errors import TuneError
from tvm_axe.meta.database import normalize
from tvm_axe.meta.measure import Worker


@T.prim_func(s_tir=True)
def double(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = A[vi] * T.float32(2)


@T.prim_func(s_tir=True)
def half_done(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(32):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = A[vi] * T.float32(2)


@T.prim_func(s_tir=True)
def aborts(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = A[vi]
            T.evaluate(T.call_extern("int32", "abort"))


@T.prim_func(s_tir=True)
def hangs(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = A[vi]
            T.evaluate(T.call_extern("int32", "pause"))


@T.prim_func(s_tir=True)
def other_shape(A: T.Buffer((32,), "float32"), B: T.Buffer((32,), "float32")):
    for i in range(32):
        with T.sblock("B"):
            vi = T.axis.spatial(32, i)
            B[vi] = A[vi] * T.float32(2)


@pytest.fixture
def worker(target, tmp_path):
    with Worker(target, tmp_path / "worker.log", timeout=3.0) as worker:
        assert worker.prepare(normalize(double)).seconds > 0
        yield worker


def _vectorized() -> tvm.IRModule:
    sch = s_tir.Schedule(normalize(double))
    sch.vectorize(sch.get_loops(sch.get_sblock("B"))[0])
    return sch.mod


def test_failures_are_told_apart_and_cost_themselves_only(worker):
    reasons = {}
    for func in (half_done, aborts, hangs, other_shape):
        reasons[func] = worker.measure(normalize(func))
        after = worker.measure(_vectorized())
        assert after.failure is None
        assert 0 < after.seconds < 1
    assert "wrong result: argument 1 is off by" in reasons[half_done].failure
    assert reasons[aborts].failure == "crashed (SIGABRT)"
    assert "no result within 3" in reasons[hangs].failure
    assert "A.shape[0]" in reasons[other_shape].failure
    assert all(measured.seconds is None for measured in reasons.values())


def test_the_process_stays_up_between_candidates(worker):
    before = worker._process.pid
    for _ in range(3):
        assert worker.measure(_vectorized()).failure is None
    assert worker._process.pid == before


def test_an_untuned_function_that_crashes_is_reported(target, tmp_path):
    with Worker(target, tmp_path / "worker.log", timeout=3.0) as worker:
        assert worker.prepare(normalize(aborts)).failure == "crashed (SIGABRT)"
        with pytest.raises(TuneError, match=r"cannot be prepared: crashed \(SIGABRT\)"):
            worker.measure(normalize(double))
        assert worker.prepare(normalize(double)).failure is None


def test_nothing_is_left_running(target, tmp_path):
    with Worker(target, tmp_path / "worker.log", timeout=3.0) as worker:
        worker.prepare(normalize(double))
        pid = worker._process.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


_TUNER = """
import sys, time
from pathlib import Path
import tvm
from tvm_axe.meta.measure import Worker
from tvm_axe.meta.database import normalize
from test_measure import hangs
worker = Worker(tvm.target.Target({"kind": "llvm", "num-cores": 1}), Path(sys.argv[1]), timeout=60.0)
worker._start()
print(worker._process.pid, flush=True)
worker.prepare(normalize(hangs))
"""


def test_the_worker_dies_with_its_tuner(tmp_path):
    """A tuner that is killed can't clean up, and its worker is in a kernel that doesn't return."""
    here = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-c", _TUNER, str(tmp_path / "worker.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=here) as tuner:
        worker = psutil.Process(int(tuner.stdout.readline()))
        time.sleep(2.0)  # until it is in the kernel
        assert worker.is_running()
        tuner.kill()
        worker.wait(timeout=10)
