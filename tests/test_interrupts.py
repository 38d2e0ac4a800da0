"""Ctrl-C stays what it is where upstream's C++ lies between, and timing hears of it."""

import signal

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe import tile
from tvm_axe.machines import timing


@T.prim_func(s_tir=True)
def twice(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("twice"):
            vi = T.axis.spatial(64, i)
            B[vi] = A[vi] + A[vi]


@T.prim_func
def copied(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    with tile.kernel(1) as _:
        a = tile.shared((64,), "float32")
        tile.copy(A[0], a)
        tile.copy(a, B[0])


def test_an_interrupt_crosses_upstream():
    def visit(loop):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tvm_ffi.structural_walk(twice.body, (tirx.For, visit))


def test_an_interrupted_primitive_leaves_the_schedule(monkeypatch):
    sch = axe.Schedule(twice, mesh={"tp": 2})
    before = sch.mod
    annotate = axe.Schedule.annotate

    def interrupted(self, *given):
        annotate(self, *given)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(axe.Schedule, "annotate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sch.shard("twice", "i", "tp")
    tvm.ir.assert_structural_equal(sch.mod, before)
    assert sch.applied == ()
    sch.shard("twice", "i", "tp")
    assert [each.name for each in sch.applied] == ["shard"]
    assert axe.compile(sch, work_dir=None).mesh == sch.mesh


@pytest.mark.parametrize("kind", ["function", "tile program"])
def test_timing_can_be_interrupted(kind, monkeypatch):
    """Python has a turn between few runs, however many are asked for."""
    array = np.ones(64, "float32")
    exe = axe.compile(twice, work_dir=None) if kind == "function" else tile.compile(copied, "llvm")
    arguments = (array,) if kind == "function" else (array, np.zeros_like(array))
    calls = []

    def interrupted(seconds):
        calls.append(len(seconds))
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return 1.0  # so that slices are as small as they get

    monkeypatch.setattr(timing.statistics, "median", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exe.time(*arguments, repeat=10**9)
    assert calls == [4, 8, 12]


@pytest.mark.parametrize("repeat", [1, 4, 5, 30, 1000])
def test_timing_gives_as_many_times_as_were_asked_for(repeat):
    seconds = axe.compile(twice, work_dir=None).time(np.ones(64, "float32"), repeat=repeat)
    assert len(seconds) == repeat and min(seconds) >= 0


@pytest.mark.parametrize("wrong", [{"repeat": 0}, {"repeat": -1}, {"warmup": -1}])
def test_counts_that_make_no_sense_are_refused(wrong):
    with pytest.raises(axe.InputError, match=r"time: repeat must be at least 1 and warmup at least 0, not"):
        axe.compile(twice, work_dir=None).time(np.ones(64, "float32"), **wrong)
