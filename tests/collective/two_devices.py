"""What tests of devices with memory of their own share: a few of them, a program, and what may be left behind."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest
from apart import launched
from tvm.ir import IRModule
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_axe.collective import Argument, Coord, LoadedProgram, MeshTensor, Workers
from tvm_axe.layout import Mesh
from tvm_axe.machines import resolve_target

TWO, FOUR = Mesh({"tp": 2}), Mesh({"tp": 4})


def mesh_at(place: str) -> Mesh:
    """Two devices, or four where a place says ``-four``."""
    return FOUR if place.endswith("-four") else TWO


def turns(devices: int) -> IRModule:
    """A program that counts up what the next has, meets, and does it again; what has not been waited for shows."""

    @I.ir_module
    class Turns:
        @T.prim_func(s_tir=True)
        def step(a: T.handle, out: T.Buffer((1000,), "int32"), tp: T.int32):
            A = T.match_buffer(a, (devices, 1000), "int32", strides=[524288, 1])
            for i in range(1000):
                with T.sblock("step"):
                    vi = T.axis.spatial(1000, i)
                    out[vi] = A[(tp + 1) % devices, vi] + 1

        @R.function(pure=False)
        def main(
            a: R.Tensor((devices, 1000), "int32"),
            own_a: R.Tensor((1000,), "int32"),
            b: R.Tensor((devices, 1000), "int32"),
            own_b: R.Tensor((1000,), "int32"),
            tp: R.Prim("int32"),
        ):
            R.func_attr({"relax.force_pure": False})
            cls = Turns
            _: R.Tuple() = cls.step(a, own_b, tp)
            _1: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            _2: R.Tuple() = cls.step(b, own_a, tp)
            _3: R.Tuple() = R.call_packed("axe.arrive", sinfo_args=(R.Tuple(),))
            _4: R.Tuple() = R.call_packed("axe.wait", 0, sinfo_args=(R.Tuple(),))
            return R.tuple()

    return Turns


def turning(workers: Workers) -> tuple[LoadedProgram, list[Argument], MeshTensor]:
    """The program, its arguments, and what it counts up by 2 a run."""
    a, b = workers.mesh_tensor((1000,), "int32"), workers.mesh_tensor((1000,), "int32")
    program = workers.load(turns(workers.mesh.size), resolve_target(workers.target))
    return program, [(a, "tp"), (a, "slab"), (b, "tp"), (b, "slab"), Coord("tp")], a


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("cuda"):
        request.getfixturevalue("cuda")
    return request.param


def workers_here() -> list[psutil.Process]:
    """The workers' processes of every launch of this process, the newest last: other tests' launches stay open."""
    there = [worker for server in servers_here() for worker in server.children(recursive=True)]
    return sorted(there, key=lambda worker: (worker.create_time(), worker.pid))


def servers_here() -> list[psutil.Process]:
    """The processes that fork workers."""
    return [child for child in psutil.Process().children() if "tvm_axe.processes.server" in command_of(child)]


def command_of(process: psutil.Process) -> str:
    """What a process was started with; nothing of one that has ended and isn't collected yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # of which a zombie is one
        return ""


@pytest.fixture
def nothing_left(place: str) -> Iterator[None]:
    """No process of a worker, no descriptor and no mapping of an arena is left."""
    with launched(mesh_at(place), place) as workers:  # what stays for the whole process is there now
        check_usable(workers)
        if workers.device_type == "cuda" and not workers.apart:  # the driver's files of what is loaded, for one
            program, arguments, _ = turning(workers)
            workers.call(program, arguments)
    gc.collect()
    before = held()
    yield
    assert not held() - before


def held() -> Counter[tuple[str, object]]:
    """What this process could leave behind: descriptors by what they are of, workers, mappings of an arena.

    What is there now and wasn't is `held() - before`; what other tests left open may go at any time.
    """
    found = Counter[tuple[str, object]](("worker", worker.pid) for worker in workers_here())
    for number in os.listdir("/proc/self/fd"):
        if os.path.lexists(place := f"/proc/self/fd/{number}"):  # the listing's own is closed
            found["descriptor", re.sub(r"\[\d+\]", "", os.readlink(place))] += 1
    with open("/proc/self/maps") as maps:
        found["mapping", "an arena"] = sum("memfd:tvm_axe" in line for line in maps)
    return found


def check_usable(workers: Workers) -> None:
    x = workers.mesh_tensor((3,), "float32")
    for device in range(workers.mesh.size):
        x.slab(device)[:] = device + 1
    workers.all_reduce(x, x, "tp")
    assert x.slab(0).tolist() == [workers.mesh.size * (workers.mesh.size + 1) / 2] * 3
    workers.free(x)
