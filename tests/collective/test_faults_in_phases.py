"""Devices with memory of their own, and a worker that is lost in each phase of a program; a thousand runs; no such GPU.

Whatever happens is named within ten seconds, ends the launch, leaves nothing behind, and another launch works.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from apart import launched
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from two_devices import TWO, check_usable, mesh_at, turning, workers_here

import tvm_axe as axe
from tvm_axe.collective import Coord, LoadedProgram, WorkerError, Workers
from tvm_axe.collective.cuda import engine
from tvm_axe.collective.discrete import DiscreteSession
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh
from tvm_axe.machines import resolve_target
from tvm_axe.programs import PROGRAMS

PAGE = 2 << 20  # bytes, as of GPUs, which what `turning` runs is of
SECONDS = 10.0
GPUS = "cuda", "cuda-meeting", "cuda-meeting-four", "cuda-staged"
PLACES = ["apart", "apart-four", *(pytest.param(name, marks=pytest.mark.gpu) for name in GPUS)]


def started(place: str, **options: Any) -> Workers:
    return launched(mesh_at(place), place, **({"page": PAGE} if place.startswith("apart") else {}), **options)


# ---- A process is killed or stopped ----------------------------------------------------------------------------------


class Phase:
    """What a launch has done before a worker is lost, and what it is asked then."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.runs = 0
        self.program: LoadedProgram | None = None

    def run(self) -> None:
        """A run of the program: the first is told to the device, the second captured, others are launched."""
        if self.program is None:
            self.program, self.arguments, self.counted = turning(self.workers)
        self.workers.call(self.program, self.arguments)
        self.runs += 1
        assert (self.counted.slab(1) == 2 * self.runs).all()

    def reserve(self) -> None:
        self.workers.mesh_tensor((1 << 19,), "float32")

    def load(self) -> None:
        turning(self.workers)

    def timed(self) -> None:
        self.run()
        self.workers.time(self.program, self.arguments, 3)

    def read(self) -> None:
        """The host asks for what a device has, which it has no copy of."""
        tensor = self.workers.mesh_tensor((1 << 10,), "float32")
        self.workers.all_reduce(tensor, tensor, "tp")
        tensor.slab(1)


PHASES: dict[str, tuple[int, Callable[[Phase], None]]] = {
    "memory": (0, Phase.reserve),
    "loading": (0, Phase.load),
    "the first run": (0, Phase.run),
    "the second run": (1, Phase.run),
    "a later run": (3, Phase.run),
    "timing": (2, Phase.timed),
    "reading": (1, Phase.read),
}


@contextlib.contextmanager
def lost(victim: psutil.Process) -> Iterator[None]:
    """What is done inside ends with an error that names worker 1, in time."""
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"(?s)worker 1 \(tp=1; .*pid {victim.pid}\) (died of SIGKILL|did not)"):
        yield
    assert time.monotonic() - start < SECONDS


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_is_lost(nothing_left: None, place: str, phase: str, how: str) -> None:
    before, asked = PHASES[phase]
    if place == "cuda-staged" and phase not in ("memory", "reading"):
        pytest.skip("its devices index no peer's memory, as the program does")
    with started(place, timeout=1.0) as workers:
        doing = Phase(workers)
        for _ in range(before if place != "cuda-staged" else 0):
            doing.run()
        victim = workers_here()[1 - workers.mesh.size]
        victim.kill() if how == "killed" else victim.suspend()
        with lost(victim):
            asked(doing)
        assert workers.closed
    with started(place) as workers:
        check_usable(workers)


@pytest.mark.parametrize("place", PLACES[:-1], indirect=True)
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_worker_that_is_lost_while_it_runs(nothing_left: None, place: str, how: str) -> None:
    """At any moment of many runs, not between two of them."""
    for seconds in (0.05, 0.13):
        with started(place, timeout=1.0) as workers:
            doing = Phase(workers)
            doing.run()
            victim = workers_here()[1 - workers.mesh.size]
            timer = threading.Timer(seconds, victim.kill if how == "killed" else victim.suspend)
            timer.start()
            with lost(victim):
                for _ in range(100_000):
                    doing.run()
            timer.join()
            assert workers.closed
    with started(place) as workers:
        check_usable(workers)


@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]], indirect=True)
def test_a_worker_that_is_killed_as_it_starts(nothing_left: None, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it was is named, and the others end too."""
    others = workers_here()
    killed: list[int] = []
    command = DiscreteSession._command

    def kill_first(session: DiscreteSession, *told: Any) -> None:
        """Kill a worker right before all are told to start, as soon as there is one."""
        if told == ("start",) and not killed:
            deadline = time.monotonic() + SECONDS
            while len(there := workers_here()) == len(others) and time.monotonic() < deadline:
                time.sleep(0.001)
            for worker in there:
                if worker not in others and not killed:
                    worker.kill()
                    killed.append(worker.pid)
        command(session, *told)

    monkeypatch.setattr(DiscreteSession, "_command", kill_first)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker [01] \(tp=[01]; .*pid \d+\) died of SIGKILL"):
        started(place)
    assert killed and time.monotonic() - start < SECONDS
    with started(place) as workers:
        check_usable(workers)


# ---- What only GPUs do -----------------------------------------------------------------------------------------------


@I.ir_module
class AstrayThenMeet:
    """Worker 1 writes far beyond its slab from the second run on, and all meet behind it."""

    @T.prim_func(s_tir=True)
    def kernel(out: T.Buffer((64,), "int32"), tp: T.int32):
        for i in range(64):
            with T.sblock("astray"):
                vi = T.axis.spatial(64, i)
                out[vi + tp * out[0] * 1000000000] = 1

    @R.function(pure=False)
    def main(out: R.Tensor((64,), "int32"), tp: R.Prim("int32")):
        R.func_attr({"relax.force_pure": False})
        cls = AstrayThenMeet
        _: R.Tuple() = cls.kernel(out, tp)
        _1: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
        return R.tuple()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cuda", "cuda-meeting"], indirect=True)
def test_an_illegal_address_in_a_later_run(nothing_left: None, place: str) -> None:
    with launched(TWO, place, timeout=2.0) as workers:
        out = workers.mesh_tensor((64,), "int32")
        program = workers.load(AstrayThenMeet, resolve_target("cuda"))
        workers.call(program, [(out, "slab"), Coord("tp")])
        assert (out.slab(0) == 1).all()
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"(?s)worker 1 \(tp=1; GPU \d, .*ILLEGAL_ADDRESS"):
            workers.call(program, [(out, "slab"), Coord("tp")])
        assert time.monotonic() - start < SECONDS and workers.closed
    with launched(TWO, place) as workers:  # the GPU is as it was
        check_usable(workers)


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        (3, {}, r"mesh tp=3 has 3 devices, and this process sees 2 GPUs; .* name it: gpus=\(0, 0, 0\)"),
        (2, {"gpus": (0, 7)}, r"gpus must be 2 numbers in \[0, 2\), .* not \(0, 7\)"),
        (2, {"gpus": (0, -1)}, r"gpus must be 2 numbers in \[0, 2\), .* not \(0, -1\)"),
        (2, {"gpus": (0,)}, r"gpus must be 2 numbers in \[0, 2\), .* not \(0,\)"),
    ],
)
def test_gpus_that_arent_there(
    monkeypatch: pytest.MonkeyPatch, devices: int, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(engine.driver, "gpus", lambda: 2)
    before = workers_here()
    with pytest.raises(InputError, match=message):
        axe.launch(Mesh({"tp": devices}), engine="cuda", **options)
    assert not set(workers_here()).difference(before)


@pytest.mark.gpu
def test_a_mesh_of_more_gpus_than_there_are(cuda: object) -> None:
    start, before = time.monotonic(), workers_here()
    with pytest.raises(InputError, match=r"mesh tp=99 has 99 devices, and this process sees \d+ GPU"):
        axe.launch(Mesh({"tp": 99}), engine="cuda")
    with pytest.raises(InputError, match=r"gpus must be 2 numbers in \[0, \d+\), .* not \(0, 99\)"):
        axe.launch(TWO, engine="cuda", gpus=(0, 99))
    assert time.monotonic() - start < SECONDS and not set(workers_here()).difference(before)


# ---- A thousand runs -------------------------------------------------------------------------------------------------


def held(workers: Workers) -> dict[str, int]:
    """What a launch holds of what it could lose a little of in each run."""
    processes = [psutil.Process(), *workers_here()]
    found = {
        "descriptors": sum(process.num_fds() for process in processes),
        "mappings": sum(len(process.memory_maps(grouped=False)) for process in processes),
        "memory": sum(process.memory_info().rss for process in processes),
    }
    if workers.device_type == "cuda" and shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--id=0", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        said = subprocess.run(asked, capture_output=True, check=True, text=True).stdout
        used = dict(line.split(", ") for line in said.splitlines())
        ours = [used[str(process.pid)] for process in processes if used.get(str(process.pid), "").isdigit()]
        if ours:  # not where a container's processes have other numbers
            found["memory of the GPU"] = sum(map(int, ours)) << 20
    return found


def mesh_of(name: str) -> Mesh:
    """A mesh of the axes of a program, of four devices where as many GPUs are, and of two elsewhere."""
    axes = PROGRAMS[name].axes
    with contextlib.suppress(InputError):  # there is no GPU
        if engine.driver.gpus() >= 4:
            return Mesh(dict.fromkeys(axes, 4) if len(axes) == 1 else dict.fromkeys(axes, 2))
    return Mesh(dict(zip(axes, (2, 1))))


@pytest.mark.parametrize(
    ("place", "name", "schedule"),
    [
        ("apart", "mlp", "MM-RS-C-AG"),
        pytest.param("cuda", "mlp", "MM-RS-C-AG", marks=pytest.mark.gpu),
        *(pytest.param("cuda-meeting", name, None, marks=pytest.mark.gpu) for name in PROGRAMS),
    ],
    indirect=["place"],
)
def test_a_thousand_runs_leave_nothing(nothing_left: None, place: str, name: str, schedule: str | None) -> None:
    """On a GPU, of a program's last schedule if none is named; two hundred without one. Bit for bit alike each time.

    Descriptors are the same, and mappings no more at each of four counts; of memory there is a round of runs in which
    what is used didn't grow by a page a run.
    """
    mesh = mesh_of(name)
    program = PROGRAMS[name](mesh, "uneven")
    page = {} if place != "apart" else {"page": os.sysconf("SC_PAGESIZE")}
    target = "cuda" if place != "apart" else "llvm"
    with launched(mesh, place, **page) as workers:
        exe = axe.compile(program.schedule(schedule or [*program.schedules][-1]), target=target, work_dir=None)
        arrays = program.inputs(np.random.default_rng())
        want = program.reference(*arrays)
        run = functools.partial(exe.run, workers, *arrays)
        each = 250 if workers.device_type == "cuda" else 50
        counts = []
        first = bits_of(run())
        for _ in range(4):
            for _ in range(each):
                found = run()
            counts.append(held(workers))
            assert bits_of(found) == first
        assert program.error(found if isinstance(found, tuple) else (found,), want) <= program.tolerance
    for what in ("descriptors", "mappings"):
        assert len({count[what] for count in counts[1:]}) < 3, [count[what] for count in counts]
    assert counts[-1]["descriptors"] == counts[1]["descriptors"]
    for what in counts[0].keys() & {"memory", "memory of the GPU"}:
        rounds = [after[what] - before[what] for before, after in itertools.pairwise(counts)]
        assert min(rounds) < each * os.sysconf("SC_PAGESIZE"), (what, rounds)


def bits_of(outputs: Any) -> list[bytes]:
    return [np.array(output).tobytes() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]
