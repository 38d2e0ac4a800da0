"""Workers that fail, hang or die, and a controller that is interrupted or dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_axe.collective import Coord, WorkerError, Workers, launch
from tvm_axe.layout import Mesh


@I.ir_module
class Spin:
    """`main(out, steps)`: a chain of `steps` dependent operations, about a nanosecond each, that nothing interrupts."""

    @T.prim_func(s_tir=True)
    def kernel(out: T.Buffer((1,), "float32"), steps: T.int64):
        for i in T.serial(steps):
            with T.sblock("step"):
                T.reads(out[0])
                T.writes(out[0])
                out[0] = out[0] * T.float32(0.5) + T.Cast("float32", i)

    @R.function(pure=False)
    def main(out: R.Tensor((1,), "float32"), steps: R.Prim("int64")):
        R.func_attr({"relax.force_pure": False})
        cls = Spin
        _: R.Tuple() = cls.kernel(out, steps)
        return R.tuple()

    @R.function(pure=False)
    def meet(out: R.Tensor((1,), "float32"), steps: R.Prim("int64")):
        R.func_attr({"relax.force_pure": False})
        cls = Spin
        _: R.Tuple() = cls.kernel(out, steps)
        _1: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
        return R.tuple()


def held() -> tuple[int, set[int], list[str], int]:
    """What a process can leak: descriptors, children, names in /dev/shm, mappings of an arena."""
    children = {child.pid for child in psutil.Process().children()}
    with open("/proc/self/maps") as maps:
        arenas = sum("memfd:tvm_axe" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), children, sorted(os.listdir("/dev/shm")), arenas


@pytest.fixture
def nothing_left() -> Iterator[None]:
    with launch(Mesh({"tp": 2}), engine="threads"):
        pass  # what stays for the whole process, such as loaded libraries, is there now
    before = held()
    yield
    assert held() == before


def check_usable(workers: Workers) -> None:
    x = workers.mesh_tensor((3,), "float32")
    for device in range(workers.mesh.size):
        x.slab(device)[:] = device + 1
    workers.all_reduce(x, x, "tp")
    assert x.slab(0).tolist() == [workers.mesh.size * (workers.mesh.size + 1) / 2] * 3


def process_of(rank: int) -> psutil.Process:
    """The process of worker `rank`: their launch started them in the order of the ranks."""
    return sorted(psutil.Process().children(), key=lambda child: (child.create_time(), child.pid))[rank - 1]


def later(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


@pytest.mark.parametrize("function", ["main", "meet"])
def test_a_killed_worker_is_named(nothing_left: None, function: str) -> None:
    with launch(Mesh({"tp": 3})) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        victim = process_of(1)
        timer = later(0.3, victim.kill)
        start = time.monotonic()
        with pytest.raises(WorkerError, match=rf"worker 1 \(tp=1; pid {victim.pid}\) died of SIGKILL"):
            workers.time(program, [(out, "slab"), 20_000_000], repeat=10_000, function=function)
        assert time.monotonic() - start < 10
        timer.join()
        with pytest.raises(WorkerError, match="closed"):
            workers.call(program, [(out, "slab"), 1])
        with pytest.raises(WorkerError, match="closed"):
            out.slab(0)
        del out
    with launch(Mesh({"tp": 3})) as workers:
        check_usable(workers)


@pytest.mark.parametrize("then", ["call", "close"])
def test_a_worker_killed_while_idle(nothing_left: None, then: str) -> None:
    with launch(Mesh({"tp": 2})) as workers:
        process_of(1).kill()
        time.sleep(0.1)
        if then == "call":
            with pytest.raises(WorkerError, match="worker 1 .* died of SIGKILL"):
                check_usable(workers)


def test_killing_at_any_moment(nothing_left: None) -> None:
    """The moments cover the launch, the commands and the end of a short session."""
    for moment in np.random.default_rng(0).uniform(0, 0.9, 8):
        timer = later(moment, lambda: [child.kill() for child in psutil.Process().children()])
        try:
            with launch(Mesh({"tp": 2})) as workers:
                for _ in range(100):
                    check_usable(workers)
        except WorkerError as error:
            assert "worker 1" in str(error)
        timer.join()


@pytest.mark.parametrize("function", ["main", "meet"])
def test_a_stopped_worker_is_named(nothing_left: None, function: str) -> None:
    with launch(Mesh({"tp": 2}), timeout=0.5) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        victim = process_of(1)
        victim.suspend()
        with pytest.raises(WorkerError, match=rf"worker 1 \(tp=1; pid {victim.pid}\) did not (arrive|answer)"):
            workers.call(program, [(out, "slab"), 1], function)
        del out


@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_a_slow_worker_is_waited_for_up_to_the_timeout(nothing_left: None, engine: str) -> None:
    with launch(Mesh({"tp": 2}), engine=engine, timeout=0.3) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        steps = int(1e8 / max(workers.time(program, [(out, "slab"), 10_000_000], 3)) * 1e-1)  # a second
        del steps, out


@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_an_error_in_a_program_is_raised_here(nothing_left: None, engine: str) -> None:
    with launch(Mesh({"tp": 2}), engine=engine) as workers:
        wrong = workers.mesh_tensor((2,), "float32")
        right = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        with pytest.raises(WorkerError, match=r"worker 0 .*worker 1 .*(?s:failed:.*Traceback)"):
            workers.call(program, [(wrong, "slab"), 1])
        workers.call(program, [(right, "slab"), 3])
        assert right.slab(1)[0] == 2.5
        del wrong, right
