"""Workers that fail, hang or die, and a controller that is interrupted or dies."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import psutil
import pytest
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from two_devices import check_usable, held, servers_here, workers_here

from tvm_axe.collective import Coord, LoadedProgram, MeshTensor, WorkerError, Workers, launch, local
from tvm_axe.layout import Mesh

Limit: TypeAlias = "Callable[[float], AbstractContextManager[None]]"


@I.ir_module
class Spin:
    """A chain of `steps` dependent operations that nothing interrupts, a few nanoseconds each; or sleep.

    A rank sleeps `microseconds` times its number where it is to be late: on a busy machine computing takes longer.
    """

    @T.prim_func(s_tir=True)
    def kernel(out: T.Buffer((1,), "float32"), steps: T.int64):
        for i in T.serial(steps):
            with T.sblock("step"):
                T.reads(out[0])
                T.writes(out[0])
                out[0] = out[0] * T.float32(0.5) + T.Cast("float32", i)

    @T.prim_func(s_tir=True)
    def only(out: T.Buffer((1,), "float32"), microseconds: T.int64, rank: T.int64):
        T.evaluate(T.call_extern("int32", "usleep", microseconds * rank))
        out[0] = T.float32(1)

    @T.prim_func(s_tir=True)
    def refuse(out: T.Buffer((1,), "float32"), rank: T.int64):
        assert rank == 0, "only rank 0 may do this"
        out[0] = T.float32(1)

    @T.prim_func(s_tir=True)
    def sleep(out: T.Buffer((1,), "float32"), microseconds: T.int64):
        T.evaluate(T.call_extern("int32", "usleep", microseconds))
        out[0] = T.float32(1)

    @R.function(pure=False)
    def nap(out: R.Tensor((1,), "float32"), microseconds: R.Prim("int64")):
        R.func_attr({"relax.force_pure": False})
        cls = Spin
        _: R.Tuple() = cls.sleep(out, microseconds)
        _1: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
        return R.tuple()

    @R.function(pure=False)
    def fails(out: R.Tensor((1,), "float32"), microseconds: R.Prim("int64"), rank: R.Prim("int64")):
        R.func_attr({"relax.force_pure": False})
        cls = Spin
        _: R.Tuple() = cls.only(out, microseconds, rank)
        _1: R.Tuple() = cls.refuse(out, rank)
        _2: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
        return R.tuple()

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

    @R.function(pure=False)
    def late(out: R.Tensor((1,), "float32"), microseconds: R.Prim("int64"), rank: R.Prim("int64")):
        R.func_attr({"relax.force_pure": False})
        cls = Spin
        _: R.Tuple() = cls.only(out, microseconds, rank)
        _1: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
        return R.tuple()

    @R.function(pure=False)
    def behind(out: R.Tensor((1,), "float32"), microseconds: R.Prim("int64"), rank: R.Prim("int64")):
        R.func_attr({"relax.force_pure": False})
        cls = Spin
        _: R.Tuple() = cls.only(out, microseconds, rank)
        return R.tuple()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    gc.collect()  # what other tests left to be collected, such as processes that records were tried in
    until = time.monotonic() + 30
    while len(servers_here()) > 1 and time.monotonic() < until:
        time.sleep(0.05)
    for engine in ("threads", "processes"):
        with launch(Mesh({"tp": 2}), engine=engine):
            pass  # what stays for the whole process, such as loaded libraries and the server, is there now
    before = held()
    yield
    assert not held() - before


def process_of(rank: int, of: int = 2) -> psutil.Process:
    """The process of worker `rank` of the last launch, of `of` workers: it started them in the order of the ranks."""
    children = workers_here()
    return children[len(children) - (of - 1) + rank - 1]


def later(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


@pytest.mark.parametrize("function", ["main", "meet"])
def test_a_killed_worker_is_named(nothing_left: None, function: str, limit: Limit) -> None:
    with launch(Mesh({"tp": 3})) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        victim = process_of(1, of=3)
        timer = later(0.3, victim.kill)
        with limit(10), pytest.raises(WorkerError, match=rf"worker 1 \(tp=1; pid {victim.pid}\) died of SIGKILL"):
            workers.time(program, [(out, "slab"), 20_000_000], repeat=10_000, function=function)
        timer.join()
        with pytest.raises(WorkerError, match="closed"):
            workers.call(program, [(out, "slab"), 1])
        with pytest.raises(WorkerError, match="closed"):
            out.slab(0)
        del out
    with launch(Mesh({"tp": 3})) as workers:
        check_usable(workers)


def test_a_worker_that_does_not_start_is_named(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "processes")
    monkeypatch.setattr(local, "_ENTRY", "entries:exit_with_3")
    with pytest.raises(WorkerError, match=r"worker 1 \(tp=1; pid \d+\) ended with exit status 3"):
        launch(Mesh({"tp": 2}))


@pytest.mark.parametrize("then", ["call", "close"])
def test_a_worker_killed_while_idle(nothing_left: None, then: str) -> None:
    with launch(Mesh({"tp": 2})) as workers:
        process_of(1).kill()
        time.sleep(0.1)
        if then == "call":
            with pytest.raises(WorkerError, match=r"worker 1 .* died of SIGKILL"):
                check_usable(workers)


def test_killing_at_any_moment(nothing_left: None) -> None:
    """The moments cover the launch, the commands and the end of a short session."""

    def children() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True))

    others = children()
    for moment in np.random.default_rng(0).uniform(0, 0.9, 8):
        timer = later(moment, lambda: [child.kill() for child in children() - others])
        try:
            with launch(Mesh({"tp": 2})) as workers:
                for _ in range(100):
                    check_usable(workers)
        except WorkerError as error:
            assert "worker 1" in str(error)
        timer.join()


@pytest.mark.parametrize("function", ["main", "meet"])
def test_a_killed_server_takes_its_workers_along(nothing_left: None, function: str) -> None:
    """It is replaced without a word."""
    with launch(Mesh({"tp": 3})) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        server = process_of(1, of=3).parent()
        timer = later(0.3, server.kill)
        with pytest.raises(WorkerError, match=r"worker ([12]) \(tp=\1; pid \d+\) died of SIGKILL"):
            workers.time(program, [(out, "slab"), 20_000_000], repeat=10_000, function=function)
        timer.join()
        del out
    with launch(Mesh({"tp": 3})) as workers:
        check_usable(workers)
        assert process_of(1, of=3).parent().pid != server.pid


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


# Where the others are when it happens: looking at the word in compiled code, asleep there, or in the slow path.
MOMENTS = {"looking": 0.0, "asleep": 0.02, "in the slow path": 0.3}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_killed_while_others_wait_for_it(nothing_left: None, moment: str, size: int, limit: Limit) -> None:
    """Two workers have a core each here and look before they sleep, three do not; see `native`."""
    with launch(Mesh({"tp": size})) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        victim = process_of(1, of=size)
        timer = later(MOMENTS[moment], victim.kill)
        with limit(10), pytest.raises(WorkerError, match=rf"worker 1 \(tp=1; pid {victim.pid}\) died of SIGKILL"):
            workers.call(program, [(out, "slab"), 2_500_000, Coord("tp")], "late")
        timer.join()
        del out


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_stopped_while_another_waits_for_it(nothing_left: None, moment: str, limit: Limit) -> None:
    with launch(Mesh({"tp": 2}), timeout=0.5) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        victim = process_of(1)
        timer = later(MOMENTS[moment], victim.suspend)
        named = rf"worker 1 \(tp=1; pid {victim.pid}\) did not arrive at a barrier within 0.5 s"
        with limit(10), pytest.raises(WorkerError, match=named):
            workers.call(program, [(out, "slab"), 20_000_000, Coord("tp")], "late")
        timer.join()
        del out


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_a_failure_calls_off_those_who_wait(nothing_left: None, engine: str, moment: str, limit: Limit) -> None:
    """The failed worker is named, not those that waited for it, and all can be used again."""
    with launch(Mesh({"tp": 2}), engine=engine) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        microseconds = int((0.01 + MOMENTS[moment]) * 1e6)
        with (
            limit(10),
            pytest.raises(WorkerError, match=r"^worker 1 \(tp=1; [^)]*\) failed:(?s:.*)only rank 0 may do this"),
        ):
            workers.call(program, [(out, "slab"), microseconds, Coord("tp")], "fails")
        check_usable(workers)
        workers.call(program, [(out, "slab"), 1], "meet")
        del out


def test_no_memory_left_says_what_was_asked_for(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor, a program's text and the times of `time` all take shared memory; without it, nothing else is lost."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with launch(Mesh({"tp": 2})) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        in_use = r"\(in use: \d+ KiB\): \[Errno 28\] No space left on device"
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(WorkerError, match=rf"no shared memory for 80 KiB more {in_use}"):
                workers.mesh_tensor((10_000,), "float32")
            with pytest.raises(WorkerError, match=rf"no shared memory for \d+ KiB more {in_use}"):
                workers.load(Spin, "llvm")
            with pytest.raises(WorkerError, match=rf"no shared memory for 8 KiB more {in_use}"):
                workers.time(program, [(out, "slab"), 1], repeat=3)
        check_usable(workers)
        workers.call(program, [(out, "slab"), 1])
        del out


def steps_of(seconds: float, workers: Workers, program: LoadedProgram, out: MeshTensor) -> int:
    """How many steps of `Spin` take about so many seconds here."""
    return int(seconds / min(workers.time(program, [(out, "slab"), 10_000_000], 3)) * 10_000_000)


@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_a_command_may_take_longer_than_the_timeout(nothing_left: None, engine: str) -> None:
    """Its parts may not: it sleeps sixteen times for a tenth of a second."""
    with launch(Mesh({"tp": 2}), engine=engine, timeout=0.5) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        seconds = workers.time(program, [(out, "slab"), 100_000], 16, function="nap")
        assert len(seconds) == 16
        del out


@pytest.mark.parametrize("function", ["late", "behind"])
@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_one_may_not_be_later_than_the_timeout(nothing_left: None, engine: str, function: str) -> None:
    """Worker 1 takes a second more; it comes back, at a barrier, in time for the workers to be used again."""
    with launch(Mesh({"tp": 2}), engine=engine, timeout=0.4) as workers:
        out = workers.mesh_tensor((1,), "float32")
        program = workers.load(Spin, "llvm")
        how = "arrive at a barrier within 0.4 s" if function == "late" else "answer within 0.4 s of another worker"
        with pytest.raises(WorkerError, match=rf"^worker 1 \([^)]*\) did not {how}"):
            workers.call(program, [(out, "slab"), 1_000_000, Coord("tp")], function)
        if function == "late":
            check_usable(workers)
        del out


def test_a_stuck_thread_is_left_alone(nothing_left: None) -> None:
    """What a thread of this process is still computing on stays mapped; then the process still ends well."""
    script = """
        from tvm_axe.collective import session

        session.GRACE = 0.3
        with launch(Mesh({"tp": 2}), timeout=0.4) as workers:
            out = workers.mesh_tensor((1,), "float32")
            program = workers.load(Spin, "llvm")
            steps = steps_of(3.0, workers, program, out)
            later(0.3, process_of(1).kill)
            try:
                workers.call(program, [(out, "slab"), steps])
            except WorkerError as error:
                print(error)
        print(sorted((what, count) for what, count in held().items() if what[0] != "descriptor"))
        session.GRACE = 60.0
        with launch(Mesh({"tp": 2})) as workers:
            check_usable(workers)
    """
    process = run_script(script)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert re.fullmatch(
        r"worker 1 \(tp=1; pid \d+\) died of SIGKILL\n\[\(\('mapping', 'an arena'\), 1\)\]\n", output
    ), output


def run_script(script: str) -> subprocess.Popen[str]:
    """Run a script with the names of this module in a process of its own."""
    names = f"""
import sys
from tvm_axe.processes import leave_out_torch
leave_out_torch()
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_faults import *
"""
    script = names + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


LONG_RUN = """
    with launch(Mesh({"tp": 3}), engine=ENGINE):
        pass
    before = held()
    try:
        with launch(Mesh({"tp": 3}), engine=ENGINE) as workers:
            out = workers.mesh_tensor((1,), "float32")
            program = workers.load(Spin, "llvm")
            print(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]), flush=True)
            workers.time(program, [(out, "slab"), 100_000], repeat=100_000, function="meet")
    except KeyboardInterrupt:
        del out
        assert not held() - before, held() - before
        with launch(Mesh({"tp": 3}), engine=ENGINE) as workers:
            check_usable(workers)
        print("interrupted")
"""


@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_ctrl_c(engine: str) -> None:
    """As a terminal does it: the signal goes to the whole process group."""
    process = run_script(f"ENGINE = {engine!r}\n" + textwrap.dedent(LONG_RUN))
    assert process.stdout is not None
    children = json.loads(process.stdout.readline())
    assert len(children) == (3 if engine == "processes" else 0)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (output, errors, process.returncode) == ("interrupted\n", "", 0)
    assert not any(map(psutil.pid_exists, children))


CLOSING = """
    from tvm_axe._tvm import disco
    with launch(Mesh({"tp": 3})):
        pass
    before = held()

    def interrupted(*given):
        pool = disco._process_pool(*given)
        return lambda worker: pool(worker) if worker else signal.raise_signal(signal.SIGINT)

    disco.register_functions({disco._DISCO_POOL: interrupted})
    workers = launch(Mesh({"tp": 3}))
    children = psutil.Process().children(recursive=True)
    assert len(children) == 3
    try:
        workers.close()
    except KeyboardInterrupt:
        assert workers.closed
        assert sum(child.is_running() for child in children) == 1, "the server alone"
        disco.register_functions({disco._DISCO_POOL: disco._process_pool})
        del workers
        assert not held() - before, held() - before
        with launch(Mesh({"tp": 3})) as workers:
            check_usable(workers)
        print("interrupted")
"""


def test_ctrl_c_while_workers_end() -> None:
    """In the middle of what C++ calls in a destructor, which no exception may leave."""
    process = run_script(CLOSING)
    output, errors = process.communicate(timeout=60)
    assert (output, errors, process.returncode) == ("interrupted\n", "", 0)


def test_a_killed_controller_leaves_no_worker() -> None:
    process = run_script("ENGINE = 'processes'\n" + textwrap.dedent(LONG_RUN))
    assert process.stdout is not None
    children = [psutil.Process(pid) for pid in json.loads(process.stdout.readline())]
    time.sleep(0.5)
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert len(children) == 3 and not alive


def test_workers_that_are_never_closed_end_with_the_program() -> None:
    process = run_script(
        """
        workers = launch(Mesh({"tp": 2}))
        check_usable(workers)
        print(process_of(1).pid, servers_here()[0].pid)
        """
    )
    output, errors = process.communicate(timeout=60)
    assert (errors, process.returncode) == ("", 0)
    assert not any(map(psutil.pid_exists, map(int, output.split())))


def test_a_forked_child_does_not_end_the_workers() -> None:
    process = run_script(
        """
        with launch(Mesh({"tp": 2})) as workers:
            child = os.fork()
            if child == 0:
                sys.exit(0)
            os.waitpid(child, 0)
            check_usable(workers)
        """
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_a_forked_child_launches_workers_of_its_own() -> None:
    process = run_script(
        """
        with launch(Mesh({"tp": 2})) as workers:
            child = os.fork()
            if child == 0:
                with launch(Mesh({"tp": 3})) as own:
                    check_usable(own)
                    print([server.ppid() == os.getpid() for server in servers_here()], len(workers_here()), flush=True)
                sys.exit(0)
            print(os.waitpid(child, 0)[1], flush=True)
            check_usable(workers)
            print(len(servers_here()), len(workers_here()))
        """
    )
    output, errors = process.communicate(timeout=60)
    assert (output, process.returncode) == ("[True] 2\n0\n1 1\n", 0), errors


def test_workers_outlive_the_thread_that_launched_them(nothing_left: None) -> None:
    launched: list[Workers] = []
    thread = threading.Thread(target=lambda: launched.append(launch(Mesh({"tp": 3}))))
    thread.start()
    thread.join()
    time.sleep(0.3)
    with launched.pop() as workers:
        check_usable(workers)


def test_threads_launch_beside_each_other(nothing_left: None) -> None:
    def use() -> None:
        for _ in range(3):
            with launch(Mesh({"tp": 2})) as workers:
                check_usable(workers)
        used.append(True)

    used: list[bool] = []
    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used == [True] * 3


def test_shared_memory_has_no_name(nothing_left: None) -> None:
    before = {entry.path for entry in psutil.Process().memory_maps()}  # whatever others have, such as MPI
    with launch(Mesh({"tp": 2})) as workers:
        check_usable(workers)
        for process in (psutil.Process(), process_of(1)):
            paths = {entry.path for entry in process.memory_maps()}
            assert any("memfd:tvm_axe" in path for path in paths)
            assert not any(path.startswith("/dev/shm") for path in paths - before)


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


def test_a_session_that_is_held_writes_to_no_descriptor_once_it_is_closed(nothing_left: None) -> None:
    """As the traceback of what was interrupted in it holds it; the numbers are other files' then."""
    workers = launch(Mesh({"tp": 3}))
    check_usable(workers)
    disco = workers._session._disco  # type: ignore[attr-defined]
    kept = [disco._session, disco._execute]
    used = set(map(int, os.listdir("/proc/self/fd")))
    workers.close()
    pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(40)]
    try:
        assert used & {descriptor for pipe in pipes for descriptor in pipe}
        kept.clear()
        gc.collect()
        for reader, writer in pipes:
            with pytest.raises(BlockingIOError):
                os.read(reader, 1)
            os.write(writer, b"x")
    finally:
        for descriptor in {descriptor for pipe in pipes for descriptor in pipe}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
