"""Devices with memory of their own: what becomes of it, and faults; see conftest.py for which devices these are."""

from __future__ import annotations

import math
import os
import time

import numpy as np
import pytest
from apart import launched
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from two_devices import TWO, check_usable, turning, workers_here

import tvm_axe as axe
from tvm_axe.collective import Coord, MeshTensor, WorkerError, Workers
from tvm_axe.collective.cuda.engine import addresses
from tvm_axe.layout import Iter, Layout, Mesh
from tvm_axe.machines import resolve_target
from tvm_axe.programs import PROGRAMS

_GPUS = ("cuda", "cuda-threads", "cuda-staged", "cuda-staged-threads")
PLACES = [
    *("apart", "apart-threads", "apart-staged", "apart-staged-threads"),
    *(pytest.param(name, marks=pytest.mark.gpu) for name in _GPUS),
]
PROCESSES = [
    *("apart", "apart-staged"),
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda-meeting", "cuda-staged")),
]


def copies(workers: Workers) -> int:
    """Bytes of memory that the host's side of the workers takes."""
    return os.fstat(workers._session.arena.fd).st_blocks * 512


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_the_host_keeps_copies_only_while_they_are_used(nothing_left: None, place: str) -> None:
    with launched(TWO, place) as workers:
        before = copies(workers)
        x = workers.mesh_tensor((1 << 20,), "float32")
        assert copies(workers) == before  # a slab is in its device's memory
        x.slab(0)[:] = 1
        x.slab(1)[:] = 2
        assert copies(workers) >= before + (8 << 20)
        kept = x.slab(1)
        workers.all_reduce(x, x, "tp")
        assert before + (4 << 20) <= copies(workers) < before + (8 << 20)
        assert (kept == 3).all()  # an array that is held has what the device has
        kept[7] = 9
        del kept
        workers.all_reduce(x, x, "tp")
        assert copies(workers) == before
        assert x.slab(0)[:9].tolist() == x.slab(1)[:9].tolist() == [6] * 7 + [12, 6]
        assert workers.mesh_tensor((5,), "int8").slab(1).tolist() == [0] * 5


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_slabs_of_other_shapes_in_the_same_memory(nothing_left: None, place: str) -> None:
    with launched(TWO, place) as workers:
        before = copies(workers)
        x, y = (workers.mesh_tensor((1 << 20,), "float32") for _ in range(2))
        for shape in ((3, 7), (1 << 18, 4), (0, 5), (2, 5), (1 << 20,), (3, 7)):
            x.resize(shape)
            y.resize(shape)
            values = np.arange(math.prod(shape), dtype="float32").reshape(shape)
            for device in range(2):
                x.slab(device)[...] = values + device
            workers.all_reduce(x, y, "tp")
            for device in range(2):
                np.testing.assert_array_equal(y.slab(device), 2 * values + 1)
        workers.free(x)
        workers.free(y)
        assert copies(workers) == before
        assert not workers.mesh_tensor((1 << 20,), "float32").slab(1).any()


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_memory_comes_and_goes(nothing_left: None, place: str) -> None:
    """No descriptor of what was freed stays, here or in a worker, and what comes after it is zeros."""
    with launched(TWO, place) as workers:
        counts = []
        for turn in range(12):
            tensors = [workers.mesh_tensor((n,), "float32", shared=n == 7) for n in (5, 7, 1 << 19)]
            for tensor in tensors:
                assert not tensor.slab(1).any()
                tensor.slab(1)[:] = turn + 1
            target = workers.mesh_tensor((7,), "float32")
            workers.all_reduce(tensors[1], target, "tp")
            assert (target.slab(0) == 2 * (turn + 1)).all()
            for tensor in (*tensors, target):
                workers.free(tensor)
            of_workers = sum(child.num_fds() for child in workers_here())
            counts.append((len(os.listdir("/proc/self/fd")), of_workers))
        assert counts[-1] == counts[2]


@pytest.mark.parametrize("place", ["apart", "apart-threads"], indirect=True)
def test_too_little_memory_is_named_and_costs_nothing(nothing_left: None, place: str) -> None:
    with launched(TWO, place, room=1 << 20) as workers:
        small = workers.mesh_tensor((1 << 16,), "float32")
        small.slab(1)[:] = 5
        for _ in range(3):
            with pytest.raises(WorkerError, match=r"(?s)worker 0 .*worker 1.*no memory for a slab of 1048576 bytes"):
                workers.mesh_tensor((1 << 18,), "float32")
            check_usable(workers)
        others: list[MeshTensor] = [workers.mesh_tensor((1 << 16,), "float32") for _ in range(2)]
        assert (small.slab(1) == 5).all() and not others[1].slab(0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cuda", "cuda-threads"], indirect=True)
def test_too_little_memory_of_a_gpu(nothing_left: None, place: str) -> None:
    with launched(TWO, place) as workers:
        with pytest.raises(
            WorkerError, match=r"(?s)worker \d.*no memory for a slab of \d+ MiB on GPU \d, which has \d+ MiB left"
        ):
            workers.mesh_tensor((200 << 30,), "int8")
        check_usable(workers)


@pytest.mark.parametrize("place", PROCESSES, indirect=True)
@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_killed_worker_is_named(nothing_left: None, place: str, when: str) -> None:
    with launched(TWO, place) as workers:
        check_usable(workers)
        victim = workers_here()[-1]
        if when == "busy":
            victim.suspend()
        victim.kill()
        with pytest.raises(WorkerError, match=rf"worker 1 \(tp=1; .*pid {victim.pid}\) died of SIGKILL"):
            check_usable(workers)
        assert workers.closed
    with launched(TWO, place) as workers:
        check_usable(workers)


@pytest.mark.parametrize("place", PROCESSES, indirect=True)
def test_a_stopped_worker_is_named(nothing_left: None, place: str) -> None:
    with launched(TWO, place, timeout=0.5) as workers:
        x = workers.mesh_tensor((3,), "float32")
        victim = workers_here()[-1]
        victim.suspend()
        start = time.monotonic()
        with pytest.raises(WorkerError, match=rf"worker 1 \(tp=1; .*pid {victim.pid}\) did not (answer|arrive)"):
            workers.all_reduce(x, x, "tp")
        assert time.monotonic() - start < 10 and workers.closed


@pytest.mark.parametrize("place", ["apart", "apart-threads"], indirect=True)
def test_a_device_that_is_lost_ends_the_workers(nothing_left: None, place: str) -> None:
    with launched(TWO, place, fails=2 * 4096) as workers:
        check_usable(workers)
        x = workers.mesh_tensor((4096,), "float32")
        with pytest.raises(WorkerError, match=r"(?s)worker 0.*fell off the bus"):
            workers.all_reduce(x, x, "tp")
        assert workers.closed
        with pytest.raises(WorkerError, match="the workers are closed"):
            workers.all_reduce(x, x, "tp")
    with launched(TWO, place) as workers:
        check_usable(workers)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cuda", "cuda-threads", "cuda-meeting"], indirect=True)
def test_runs_meet_each_time(nothing_left: None, place: str) -> None:
    """The first is told, the second captured, the others are launched, where devices meet by themselves."""
    with launched(TWO, place) as workers:
        program, arguments, a = turning(workers)
        for turn in range(6):
            workers.call(program, arguments)
            assert (a.slab(0) == 2 * turn + 2).all() and (a.slab(1) == 2 * turn + 2).all()
        seconds = workers.time(program, arguments, repeat=4, warmup=1)
        assert len(seconds) == 4 and min(seconds) > 0 and (a.slab(1) == 22).all()
        workers.free(workers.mesh_tensor((5,), "int8"))  # after which nothing that was captured holds
        workers.call(program, arguments)
        assert (a.slab(0) == 24).all()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cuda", "cuda-meeting"], indirect=True)
def test_a_peer_that_never_arrives_is_named(nothing_left: None, place: str) -> None:
    with launched(TWO, place, timeout=1.0) as workers:
        program, arguments, _ = turning(workers)
        workers.call(program, arguments)
        victim = workers_here()[-1]
        victim.suspend()
        start = time.monotonic()
        with pytest.raises(WorkerError, match=rf"(?s)worker 1 \(tp=1; .*pid {victim.pid}\) did not"):
            workers.call(program, arguments)
        assert time.monotonic() - start < 10 and workers.closed
    with launched(TWO, place) as workers:
        check_usable(workers)


@I.ir_module
class Astray:
    """Worker 1 writes far beyond its slab."""

    @T.prim_func(s_tir=True)
    def kernel(out: T.Buffer((64,), "int32"), tp: T.int32):
        for i in range(64):
            with T.sblock("astray"):
                vi = T.axis.spatial(64, i)
                out[vi + tp * 1000000000] = 1

    @R.function(pure=False)
    def main(out: R.Tensor((64,), "int32"), tp: R.Prim("int32")):
        R.func_attr({"relax.force_pure": False})
        cls = Astray
        _: R.Tuple() = cls.kernel(out, tp)
        return R.tuple()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
def test_an_illegal_address_is_named(nothing_left: None, place: str) -> None:
    with launched(TWO, place) as workers:
        out = workers.mesh_tensor((64,), "int32")
        program = workers.load(Astray, resolve_target("cuda"))
        with pytest.raises(WorkerError, match=r"(?s)worker 1 \(tp=1; GPU \d, .*ILLEGAL_ADDRESS"):
            workers.call(program, [(out, "slab"), Coord("tp")])
        assert workers.closed
    with launched(TWO, place) as workers:  # the GPU is as it was
        check_usable(workers)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("apart", "adam_f16"), ("apart", "mlp"), ("apart", "moe"), ("apart-staged", "mlp"), ("apart-staged", "moe"),
        ("apart-staged", "layers"), ("apart-staged-threads", "adam_f16"), ("apart-staged-threads", "moe_ragged"),
    ],
    indirect=["place"],
)  # fmt: skip
def test_programs(nothing_left: None, place: str, name: str) -> None:
    """What is compiled for the host's cores runs where slabs lie the host's pages apart."""
    mesh = Mesh(dict.fromkeys(PROGRAMS[name].axes, 3))
    program = PROGRAMS[name](mesh, "uneven")
    with launched(mesh, place, page=os.sysconf("SC_PAGESIZE")) as workers:
        for schedule in program.schedules:
            exe = axe.compile(program.schedule(schedule), work_dir=None)
            for _ in range(2):
                arrays = program.inputs(np.random.default_rng())
                outputs = exe.run(workers, *arrays)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                assert program.error(outputs, program.reference(*arrays)) <= program.tolerance
            assert len(exe.time(workers, *arrays, repeat=3)) == 3
            assert {event.worker for event in exe.trace(workers, *arrays).events} == {0, 1, 2}
            del exe


@pytest.mark.parametrize(
    "place",
    ["apart", pytest.param("cuda", marks=pytest.mark.gpu)],
    indirect=True,
)
def test_redistribution(nothing_left: None, place: str) -> None:
    """By collectives, and by the kernel that takes elements from where they are."""
    mesh = Mesh({"tp": 2})
    options = {} if place == "cuda" else {"page": os.sysconf("SC_PAGESIZE")}
    array = np.random.default_rng().standard_normal((12, 10)).astype("float32")
    with launched(mesh, place, **options) as workers:
        rows = workers.mesh_tensor((12, 10), "float32", layout=Layout.sharded((12, 10), mesh, {0: "tp"}))
        rows.scatter(array)
        columns = axe.redistribute(rows, Layout.sharded((12, 10), mesh, {1: "tp"}))
        np.testing.assert_array_equal(columns.gather(), array)
        np.testing.assert_array_equal(columns.slab(1), array[:, 5:])
        cyclic = Layout([Iter(6, 10, "m"), Iter(2, 1, "tp"), Iter(10, 1, "m")])
        turned = axe.redistribute(columns, cyclic)
        np.testing.assert_array_equal(turned.gather(), array)
        np.testing.assert_array_equal(turned.slab(1).reshape(6, 10), array[1::2])


@pytest.mark.parametrize("memory", [1 << 30, 150_109_880_320, 12345])
def test_addresses_are_whole_pages(memory: int) -> None:
    """As the driver asks for; GPUs don't all have a multiple of them."""
    found = addresses([memory] * 3, 2 << 20)
    assert found % (2 << 20) == 0 and found >= 12 * memory
