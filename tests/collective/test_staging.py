"""Collectives through the memory of hosts: the rounds, and what workers make of them, here threads of simulated hosts.

`test_workers.py` and others run them on devices whose memory peers don't see (``apart-staged``), and `in_job.py` across
the ranks of an MPI job.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from apart import HostCopies, launched

import tvm_axe.collective.tensor  # noqa: F401  (gives numpy the names of small floats)
from tvm_axe import _tvm
from tvm_axe.collective import ops
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.rounds import crossing, rounds
from tvm_axe.collective.staging import BUFFER, Staging, neighbours_within
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh
from tvm_axe.layout.dtypes import dtype_bytes

Shape = tuple[int, ...]
HOSTS = [((0,), (1,)), ((0, 1), (2,)), ((0, 1), (2, 3)), ((0, 1, 2),), ((0, 2), (1, 3)), ((0, 1, 4), (2, 3))]


def cases(n: int, rows: int = 23, columns: int = 11) -> list[tuple[str, Shape, Shape, Shape]]:
    """Each collective: what else it takes, and the shapes of its slabs; extents that n doesn't divide."""
    whole, high, wide = (rows, columns, 3), -(-rows // n), -(-columns // n)
    return [
        ("all_reduce", (), whole, whole),
        ("reduce_scatter", (1,), whole, (rows, wide, 3)),
        ("reduce_scatter", (0,), whole, (high, columns, 3)),
        ("all_gather", (1,), (rows, wide, 3), whole),
        ("all_gather_in_place", (0,), whole, whole),
        ("all_to_all", (0, 1), (high, columns, 3), (rows, wide, 3)),
        ("send", (1,), whole, whole),
        ("send", (-2,), whole, whole),
        ("reduce", (n - 1,), whole, whole),
        ("broadcast", (n - 1,), whole, whole),
    ]


def done_by_ops(name: str, numbers: Shape, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The targets of a group after a collective on memory that all see."""
    pulls, pushes = VIEWS[name]
    out = targets.copy()
    if name == "all_gather_in_place":
        sources = out
    for rank in range(len(sources)):
        into = out if pushes else out[rank]
        ops.collective(name, sources if pulls else sources[rank], into, *numbers, rank=rank)
    return out


class Group:
    """Workers that are threads, of one group, on simulated hosts; each has slabs that the others never look at."""

    def __init__(self, hosts: Sequence[Sequence[int]], room: int) -> None:
        self.mesh = Mesh({"x": sum(map(len, hosts))})
        buffers = {tuple(host): np.full((self.mesh.size, 2, room), 0xA5, "uint8") for host in hosts}
        barriers = {tuple(host): threading.Barrier(len(host)) for host in hosts}
        self._mail: dict[tuple[int, int], queue.Queue[bytes]] = {
            (sender, receiver): queue.Queue() for sender in range(self.mesh.size) for receiver in range(self.mesh.size)
        }
        self.sent = 0
        self._lock = threading.Lock()
        self._workers = []
        for rank in range(self.mesh.size):
            host = next(tuple(each) for each in hosts if rank in each)
            meet = barriers[host].wait
            exchange = lambda sends, receives, rank=rank: self._exchange(rank, sends, receives)  # noqa: E731
            self._workers.append(
                Staging(HostCopies(), buffers[host], self.mesh, rank, hosts, lambda meet=meet: meet(20), exchange)
            )

    def _exchange(self, rank: int, sends: Sequence, receives: Sequence) -> None:
        for peer, array in sends:
            with self._lock:
                self.sent += array.nbytes
            self._mail[rank, peer].put(array.tobytes())
        for peer, array in receives:
            array[...] = np.frombuffer(self._mail[peer, rank].get(timeout=20), array.dtype)

    def run(self, name: str, numbers: Shape, sources: np.ndarray, targets: np.ndarray) -> None:
        pulls, pushes = VIEWS[name]
        n, failed = self.mesh.size, []

        def view(slab: np.ndarray, is_view: bool) -> object:
            if is_view:  # the own slab at each index
                slab = np.lib.stride_tricks.as_strided(slab, (n, *slab.shape), (0, *slab.strides))
            return _tvm.as_tensor(slab)

        def work(rank: int) -> None:
            try:
                target = view(targets[rank], pushes)
                source = target if name == "all_gather_in_place" else view(sources[rank], pulls)
                self._workers[rank].collective(name, source, target, numbers, "x")
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]


def drawn(rng: np.random.Generator, shape: Shape, dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind in "iub":
        return rng.integers(0, 2 if dtype == "bool" else 50, shape).astype(kind)
    return rng.standard_normal(shape).astype(kind)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("room", [1024, 1 << 20])
def test_each_collective_does_what_ops_does(hosts: tuple[Shape, ...], dtype: str, room: int) -> None:
    """Bit for bit where one host adds, and as near as another order of the terms is where several do; often in turn."""
    group, rng = Group(hosts, room), np.random.default_rng(0)
    n = group.mesh.size
    for name, numbers, source, target in cases(n):
        sources, targets = drawn(rng, (n, *source), dtype), drawn(rng, (n, *target), dtype)
        expected = done_by_ops(name, numbers, sources, targets)
        group.sent = 0
        group.run(name, numbers, sources, targets)
        each = rounds(name, source, target, numbers, hosts, dtype, room)
        assert len(each) > 1 or room > 1024 or dtype != "float32", name
        assert group.sent == crossing(each, dtype)
        if len(hosts) == 1 or dtype == "int8":
            np.testing.assert_array_equal(targets, expected, err_msg=name)
        else:
            eps = 1e-6 if dtype == "float32" else 2**-8
            scale = np.abs(expected.astype("float64")).max()
            np.testing.assert_allclose(
                targets.astype("float64"), expected.astype("float64"), rtol=eps, atol=eps * scale, err_msg=name
            )


@pytest.mark.parametrize("dtype", ["float64", "float16", "float8_e4m3fn", "int64", "uint16", "bool", "float4_e2m1fn"])
def test_every_type(dtype: str) -> None:
    """Also of whole bytes that numpy can't add: those are only copied."""
    group, rng = Group(((0, 1), (2,)), 4096), np.random.default_rng(1)
    for name, numbers, source, target in cases(3):
        sums = name in ("all_reduce", "reduce_scatter", "reduce")
        if sums and dtype == "float4_e2m1fn":
            continue
        sources, targets = drawn(rng, (3, *source), dtype), drawn(rng, (3, *target), dtype)
        expected = done_by_ops(name, numbers, sources, targets)
        group.run(name, numbers, sources, targets)
        got, expected = targets.astype("float64"), expected.astype("float64")
        if sums and np.dtype(dtype).kind in "fV":
            np.testing.assert_allclose(got, expected, rtol=2**-3 if "float8" in dtype else 2**-10, atol=1e-2)
        else:
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_in_place(name: str) -> None:
    """The target is the source: what is stored in a round isn't fetched in the next."""
    group, rng = Group(((0, 1), (2, 3)), 1024), np.random.default_rng(2)
    numbers = () if name == "all_reduce" else (1,)
    for _ in range(3):
        slabs = drawn(rng, (4, 999), "int32")
        expected = slabs.sum(axis=0) if name == "all_reduce" else slabs[1].copy()
        group.run(name, numbers, slabs, slabs)
        assert (slabs == expected).all()


def test_what_crosses_hosts_crosses_once() -> None:
    """Of two hosts of any number of devices: an all-reduce's sum and terms of each, and what is gathered, one time."""
    size, dtype = 4096, "float32"
    for each in (1, 2, 4):
        hosts = (tuple(range(each)), tuple(range(each, 2 * each)))
        whole = dtype_bytes(dtype, size)

        def sent(name: str, source: Shape, target: Shape, *numbers: int, hosts: tuple[Shape, ...] = hosts) -> int:
            return crossing(rounds(name, source, target, numbers, hosts, dtype, 1 << 20), dtype)

        assert sent("all_reduce", (size,), (size,)) == 2 * whole
        assert sent("reduce_scatter", (size,), (size // 2 // each,), 0) == whole
        assert sent("all_gather", (size // 2 // each,), (size,), 0) == whole
        assert sent("broadcast", (size,), (size,), 0) == whole
        assert sent("all_to_all", (size // 2 // each, 8), (size, 8 // 2 // each), 0, 1) == 4 * whole


def test_elements_that_dont_fit_are_refused() -> None:
    with pytest.raises(InputError, match="all_to_all: an element of each of 4 workers doesn't fit into a buffer of 64"):
        rounds("all_to_all", (2, 4), (8, 1), (0, 1), ((0, 1, 2, 3),), "int8", 64)


def test_groups_have_their_hosts() -> None:
    assert neighbours_within((0, 2, 4, 6), [(4, 5, 6, 7), (0, 1, 2, 3)]) == ((2, 3), (0, 1))


@pytest.mark.parametrize("place", ["apart-staged", "apart-staged-threads"])
def test_more_than_the_buffers_hold(place: str) -> None:
    """In many rounds, of which each gets what the one before had."""
    size = 3 * BUFFER // 4 + 12345
    with launched(Mesh({"a": 2, "b": 2}), place) as workers:
        assert workers.apart == {"a", "b"} and workers.is_apart("a")
        x, rng = workers.mesh_tensor((size,), "int32"), np.random.default_rng(3)
        values = rng.integers(-99, 99, (4, size), dtype="int32")
        for device in range(4):
            x.slab(device)[:] = values[device]
        workers.all_reduce(x, x, "a")
        workers.all_reduce(x, x, "b")
        expected = values.sum(axis=0)
        for device in range(4):
            np.testing.assert_array_equal(x.slab(device), expected)


def test_pairs_that_see_each_other() -> None:
    """Along one axis devices see each other, along the other they don't."""
    with launched(Mesh({"a": 2, "b": 2}), "apart", neighbours=[[0, 1], [2, 3]]) as workers:
        assert workers.apart == {"a"}
        x = workers.mesh_tensor((5,), "float32")
        for device in range(4):
            x.slab(device)[:] = 10**device
        workers.all_reduce(x, x, "b")
        assert [x.slab(device)[0] for device in range(4)] == [11, 11, 1100, 1100]
        workers.all_reduce(x, x, "a")
        assert all((x.slab(device) == 1111).all() for device in range(4))
