"""Ctrl-C stays what it is where upstream's C++ lies between, and timing hears of it."""

import signal

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe import _tvm, tile
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


@pytest.mark.parametrize("kind", [KeyboardInterrupt, axe.LowerError, AttributeError])
def test_no_error_leaves_what_a_rewriting_walk_calls(kind, monkeypatch):
    """It would break upstream's heap; it is raised behind the walk instead, the same object as in the callback."""
    x, y = (tirx.Var(name, "int32") for name in "xy")
    seen, left, made = [], [], []
    walk = tvm_ffi.structural_map

    def watched(value, entries):
        def call(callback):
            def watch(node):
                try:
                    return callback(node)
                except BaseException as error:
                    left.append(error)
                    raise

            return watch

        return walk(value, [(each, call(callback)) for each, callback in entries])

    def rewrite(var):
        seen.append(var)
        if len(seen) == 2:
            if kind is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            else:
                made.append(kind("wrong"))
                raise made[0]
        return var + 1

    monkeypatch.setattr(tvm_ffi, "structural_map", watched)
    with pytest.raises(kind) as caught:
        _tvm.structural_map((x + y) * (y - x), (tirx.Var, rewrite))
    assert left == []
    assert made in ([], [caught.value])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    mapped = _tvm.structural_map(x * y, (tirx.Var, lambda var: var + 1))
    tvm.ir.assert_structural_equal(mapped, (x + 1) * (y + 1))


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
