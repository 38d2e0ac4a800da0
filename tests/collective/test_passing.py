"""Collectives by a communicator: what devices tell theirs and move themselves, done here by the real binding of NCCL.

What the binding calls is fake_nccl.py's, and devices' memory is the host's. Their threads get on in any order.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from apart import launched
from fake_nccl import FakeNccl
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algorithms import Case, cases, do, same, tensors

from tvm_axe.collective.algorithms import Phase
from tvm_axe.collective.cuda import job, moving, nccl
from tvm_axe.collective.cuda.moving import Side
from tvm_axe.collective.cuda.passing import Passing, Scratch
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.sync import Aborted, Late
from tvm_axe.errors import InputError, WorkerError
from tvm_axe.layout import Mesh

DTYPES = ["float32", "float16", "bfloat16", "int8", "float64", "bool", "float8_e4m3fn"]


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeNccl]:
    """A module in nccl4py's place."""
    patch = pytest.MonkeyPatch()
    found, package, bindings = FakeNccl(), ModuleType("nccl"), ModuleType("nccl.bindings")
    bindings.nccl = found  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "nccl", package)
    patch.setitem(sys.modules, "nccl.bindings", bindings)
    patch.setitem(sys.modules, "nccl.bindings.nccl", found)
    patch.setenv("NCCL_NVLS_ENABLE", "1")
    nccl._bindings.cache_clear()
    yield found
    nccl._bindings.cache_clear()
    patch.undo()


class Here:
    """What a GPU is told, done at once."""

    def run(self, phases: Sequence[Phase], source: Side, target: Side) -> None:
        for phase in phases:
            for work in list(moving._works(phase, source, target)):
                do(work, np.dtype(moving.check_dtype(target.dtype)))


class Memory:
    """Scratch of a device, NaN all over."""

    def __init__(self, least: int) -> None:
        self.kept: list[np.ndarray] = []
        self.scratch = Scratch(self._get, least)

    def _get(self, nbytes: int) -> int:
        self.kept.append(np.full(nbytes, 255, "uint8"))
        return int(self.kept[-1].ctypes.data)


def connect(told: bytes, mesh: Mesh, rank: int, **others: Any) -> tuple[nccl.Nccl, dict[str, nccl.Nccl]]:
    """What a device of a mesh is told to connect to the others along all axes."""
    groups = {axis: (mesh.group(rank, axis)[0], mesh.axis_size(axis), mesh.coords(rank)[axis]) for axis in mesh.names}
    memory = np.zeros(16 * max(2, mesh.size), "uint8")
    given = {"seconds": 20.0, "is_off": lambda: False} | others
    prepare = given.pop("prepare", lambda: None)
    return nccl.connected(told, mesh.size, rank, groups, 0, memory.ctypes.data, prepare, lambda: memory.any(), **given)


def on_each(count: int, do_it: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(do_it, range(count)))


_worlds: dict[int, list[tuple[nccl.Nccl, dict[str, nccl.Nccl]]]] = {}


def run(case: Case, source: np.ndarray, target: np.ndarray, dtype: str, apart: bool, least: int = 1 << 16) -> None:
    """Do a collective on every device; of views each sees its own slab alone, if they are `apart`, or all."""
    mesh = Mesh({"tp": case.parts})
    if case.parts not in _worlds:
        told = nccl.unique()
        _worlds[case.parts] = on_each(case.parts, lambda rank: connect(told, mesh, rank))

    def device(rank: int) -> None:
        memory = Memory(least)
        one = Passing(_worlds[case.parts][rank][1]["tp"], Here(), memory.scratch, case.parts, rank)
        sides = []
        for tensor, is_view in zip((source, target), VIEWS[case.name]):
            slabs = [slab.ctypes.data for slab in tensor]
            if not is_view or apart:
                slabs = [slabs[rank]] * (case.parts if is_view else 1)
            sides.append(Side(tuple(slabs), tensor.shape[1:], dtype))
        with np.errstate(all="ignore"):
            one.collective(case.name, *sides, case.numbers)

    on_each(case.parts, device)


@pytest.mark.parametrize("name", sorted(VIEWS))
@settings(max_examples=60)
@given(data=st.data())
def test_each_collective_of_any_extents_and_type(fake: FakeNccl, name: str, data: st.DataObject) -> None:
    """Nothing but what is to be written is; what is added, is in the order of the slabs, bit for bit."""
    case, dtype, seed = data.draw(cases(name)), data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 99))
    if dtype == "float8_e4m3fn" and (name in ("all_reduce", "reduce", "reduce_scatter")):
        dtype = "float32"
    source, target = tensors(case, dtype, seed, name == "all_reduce" and data.draw(st.booleans()))
    with np.errstate(all="ignore"):
        expected = case.expected(source.copy(), target)
    run(case, source, target, dtype, data.draw(st.booleans()), data.draw(st.sampled_from([256, 1 << 16])))
    same(target, expected)


@pytest.mark.parametrize(
    ("case", "dtype", "called"),
    [
        (Case("all_reduce", (5, 3), 3, 0, 1, 0), "bfloat16", ["all_reduce"]),
        (Case("all_reduce", (5, 3), 3, 0, 1, 0), "bool", ["exchange"] * 2),
        (Case("reduce", (5, 3), 3, 0, 1, 1), "int8", ["reduce"]),
        (Case("broadcast", (5, 3), 3, 0, 1, 1), "bool", ["broadcast"]),
        (Case("all_gather", (6, 3), 3, 0, 1, 0), "bool", ["all_gather"]),
        (Case("all_gather", (7, 3), 3, 0, 1, 0), "float32", ["exchange"]),
        (Case("all_gather", (4, 6), 3, 1, 0, 0), "float32", ["exchange"]),
        (Case("all_gather_in_place", (6, 3), 3, 0, 1, 0), "float16", ["all_gather"]),
        (Case("reduce_scatter", (6, 3), 3, 0, 1, 0), "float64", ["reduce_scatter"]),
        (Case("reduce_scatter", (6, 3), 3, 1, 0, 0), "float64", ["exchange"]),
        (Case("all_to_all", (6, 3), 3, 0, 1, 0), "float32", ["exchange"]),
        (Case("send", (6, 3), 3, 0, 1, 1), "float32", ["exchange"]),
    ],
    ids=str,
)
def test_what_nccl_does_itself(fake: FakeNccl, case: Case, dtype: str, called: list[str]) -> None:
    """And what goes as messages; all devices call the same."""
    source, target = tensors(case, dtype, 1, False)
    with np.errstate(all="ignore"):
        expected = case.expected(source.copy(), target)
    run(case, source.copy(), target.copy(), dtype, True)  # the first makes the communicator
    fake.called.clear()
    run(case, source, target, dtype, True)
    same(target, expected)
    assert sorted(fake.called) == sorted(called * case.parts)


def test_sums_are_near_those_of_float64(fake: FakeNccl) -> None:
    rng = np.random.default_rng(0)
    case = Case("all_reduce", (37, 19), 4, 0, 1, 0)
    source = rng.standard_normal((4, 37, 19)).astype("float32")
    target = np.full_like(source, np.nan)
    run(case, source, target, "float32", True)
    exact = source.astype("float64").sum(0)
    assert np.abs(target - exact).max() < 1e-6 * np.abs(source).sum(0).max()


def test_groups_of_a_mesh_of_two_axes(fake: FakeNccl) -> None:
    """Each device's communicator along an axis is that of its group, in the order of the coordinates."""
    mesh, told = Mesh({"dp": 2, "tp": 3}), nccl.unique()
    found = on_each(6, lambda rank: connect(told, mesh, rank)[1])
    slabs = np.arange(6, dtype="float32") + 1
    for axis in mesh.names:
        target = np.full((6, 3), np.nan, "float32")

        def gather(rank: int, axis: str = axis, target: np.ndarray = target) -> None:
            found[rank][axis].all_gather(slabs[rank:].ctypes.data, target[rank].ctypes.data, 4)

        on_each(6, gather)
        for rank in range(6):
            group = mesh.group(rank, axis)
            assert target[rank, : len(group)].tolist() == [member + 1 for member in group]


@pytest.mark.parametrize(("apart", "meeting"), [(True, False), (True, True), (False, False), (False, True)])
def test_workers_whose_devices_are_connected(fake: FakeNccl, apart: bool, meeting: bool) -> None:
    """Of one mesh axis that crosses hosts and one that doesn't, or all of one host; near float64."""
    mesh = Mesh({"dp": 2, "tp": 2})
    options: dict[str, Any] = {"axes": ["dp"] if apart else ["dp", "tp"], "unique": nccl.unique}
    if apart:
        options["neighbours"] = [[0, 1], [2, 3]]
    with launched(mesh, "apart-threads-meeting" if meeting else "apart-threads", **options) as workers:
        assert workers.is_apart("dp") == apart and not workers.is_apart("tp")
        assert workers.way("dp").startswith("by NCCL") and bool(workers.way("tp")) == (not apart)
        rng = np.random.default_rng(3)
        x, y = workers.mesh_tensor((5, 7), "float32"), workers.mesh_tensor((3, 7), "float32")
        z = workers.mesh_tensor((5, 7), "float32")
        data = rng.standard_normal((4, 5, 7)).astype("float32")
        for device in range(4):
            x.slab(device)[:], y.slab(device)[:], z.slab(device)[:] = data[device], np.nan, np.nan
        fake.called.clear()
        workers.reduce_scatter(x, y, "dp", 0)
        workers.all_gather(y, z, "dp", 0)
        workers.all_reduce(z, z, "tp")
        assert fake.called.count("exchange") == 8 and fake.called.count("all_reduce") == 4 * (not apart)
        exact = data.astype("float64").sum(0)
        for device in range(4):
            np.testing.assert_allclose(z.slab(device), exact, rtol=1e-5, atol=1e-5)


def test_multicast_stays_off(fake: FakeNccl) -> None:
    import os

    nccl.version()
    assert os.environ["NCCL_NVLS_ENABLE"] == "0" and nccl.version() == "2.30.7"


def test_who_does_not_come_is_named(fake: FakeNccl) -> None:
    with pytest.raises(Late) as error:
        connect(nccl.unique(), Mesh({"tp": 3}), 1, seconds=0.3)
    assert error.value.missing == [0, 2]


def test_to_be_called_off_ends_the_wait(fake: FakeNccl) -> None:
    off = threading.Event()
    threading.Timer(0.2, off.set).start()
    with pytest.raises(Aborted):
        connect(nccl.unique(), Mesh({"tp": 2}), 0, is_off=off.is_set)


def test_what_nccl_says_is_told(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise fake.NCCLError("InvalidUsage (5): two ranks on one GPU")

    monkeypatch.setattr(fake, "comm_init_rank_scalable", refuse, raising=False)
    with pytest.raises(WorkerError, match="nccl comm_init_rank_scalable: InvalidUsage"):
        connect(nccl.unique(), Mesh({"tp": 2}), 0)


def test_without_nccl4py_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl._bindings.cache_clear()
    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.setitem(sys.modules, "nccl.bindings", None)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    with pytest.raises(InputError, match=r"need nccl4py .*pip install tvm-axe\[cuda\]; or leave them out"):
        nccl.version()
    nccl._bindings.cache_clear()


def test_what_goes_by_nccl(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on one host, unless it is asked for; between hosts what is apart, unless NCCL isn't there."""
    mesh = Mesh({"dp": 2, "tp": 4, "one": 1})
    assert job.linked_axes(mesh, frozenset(), 1, None) == ([], None)
    assert job.linked_axes(mesh, frozenset({"tp"}), 1, None) == ([], None)
    assert job.linked_axes(mesh, frozenset({"dp"}), 2, "host") == ([], None)
    assert job.linked_axes(mesh, frozenset({"dp"}), 2, None) == (["dp"], nccl.unique)
    assert job.linked_axes(mesh, frozenset(), 1, "nccl") == (["dp", "tp"], nccl.unique)

    def missing() -> str:
        raise InputError("there is none")

    monkeypatch.setattr(nccl, "version", missing)
    assert job.linked_axes(mesh, frozenset({"dp"}), 2, None) == ([], None)
    with pytest.raises(InputError, match="there is none"):
        job.linked_axes(mesh, frozenset({"dp"}), 1, "nccl")


def test_which_gpus_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a host, unless the driver or the caller says no; hosts that are one machine are still several."""
    gpus, hosts = job.machine_numbers(["a"] * 4 + ["b"] * 4), [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert gpus == [0, 1, 2, 3] * 2
    monkeypatch.setattr(job.driver, "are_peers", lambda first, second: True)
    assert job.seen_within(hosts, gpus, 4, None) == hosts
    assert job.seen_within(hosts, gpus, 4, False) == [[rank] for rank in range(8)]
    monkeypatch.setattr(job.driver, "are_peers", lambda first, second: first == second)
    assert job.seen_within(hosts, gpus, 4, None) == [[rank] for rank in range(8)]
    assert job.seen_within(hosts, gpus, 1, None) == hosts
