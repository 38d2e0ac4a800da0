"""Barriers that the collectives beside them hold: which ones, and that programs compute the same."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from apart import launched
from test_link import called, program
from two_devices import workers_here

from tvm_axe.collective import WorkerError, Workers
from tvm_axe.collective.merging import merged
from tvm_axe.layout import Mesh
from tvm_axe.machines import resolve_target

PLACES = ["processes", "apart", "apart-meeting", pytest.param("cuda-meeting", marks=pytest.mark.gpu)]
REDUCE, SEND, BARRIER = ("all_reduce", (0, 1, [], "tp")), ("send", (1, 2, [1], "tp")), ("barrier", ([], None))
BOTH = [BARRIER, REDUCE, BARRIER, SEND, BARRIER]
ARRIVE, WAIT = ("arrive", ([], None)), ("wait", ([0], None))
TYPES = [((2, 6), "float32"), ((2, 6), "float32"), ((6,), "float32")]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("cuda"):
        request.getfixturevalue("cuda")
    return request.param


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([BARRIER, REDUCE, BARRIER], ["merged", "all_reduce:between", "merged"]),
        ([BARRIER, REDUCE], ["merged", "all_reduce:behind"]),
        ([REDUCE, BARRIER], ["all_reduce:before", "merged"]),
        ([REDUCE, BARRIER, SEND], ["all_reduce", "merged", "send:behind"]),
        (
            [BARRIER, REDUCE, BARRIER, SEND, BARRIER],
            ["merged", "all_reduce:behind", "merged", "send:between", "merged"],
        ),
        ([REDUCE, SEND, BARRIER], ["all_reduce", "send:before", "merged"]),
        ([REDUCE, BARRIER, BARRIER, SEND], ["all_reduce:before", "merged", "merged", "send:behind"]),
        ([BARRIER, ARRIVE, REDUCE, WAIT, BARRIER], ["barrier", "arrive", "all_reduce", "wait", "barrier"]),
        ([BARRIER, BARRIER], ["barrier", "barrier"]),
    ],
)
def test_a_barrier_goes_to_the_collective_beside_it(calls: Sequence, expected: Sequence[str]) -> None:
    """Each to one, and none is moved past another call; there are as many calls as before."""
    found = called(merged(program(TYPES, calls)))
    assert found == [f"*axe.{name}" for name in expected]


VIEW, SLAB = ((2, 6), "float32"), ((6,), "float32")


@pytest.mark.parametrize(
    ("types", "calls", "expected"),
    [
        (TYPES, [BARRIER, REDUCE, BARRIER], "all_reduce:loosely-between"),
        (TYPES, [BARRIER, REDUCE, BARRIER, BARRIER], "all_reduce:loosely-between"),
        (TYPES, [BARRIER, REDUCE, BARRIER, ARRIVE, WAIT], "all_reduce:loosely-between"),
        (TYPES, [REDUCE, BARRIER], "all_reduce:before"),  # it runs again, and there is no barrier before it
        # What is sent next is read by a peer, which may not have it.
        (TYPES, [BARRIER, REDUCE, BARRIER, ARRIVE, SEND, BARRIER], "all_reduce:between"),
        (TYPES, [ARRIVE, ("send", (0, 2, [1], "tp")), BARRIER, REDUCE, BARRIER], "all_reduce:between"),
        ([VIEW, VIEW, SLAB], [BARRIER, ("all_gather", (2, 1, [0], "tp")), BARRIER], "all_gather:loosely-between"),
        (TYPES, [BARRIER, SEND, BARRIER, ARRIVE, WAIT], "send:between"),
    ],
)
def test_a_barrier_is_held_loosely_where_nothing_of_peers_is_touched(
    types: Sequence, calls: Sequence, expected: str
) -> None:
    assert f"*axe.{expected}" in called(merged(program(types, calls), 2))
    assert not any("loosely" in name for name in called(merged(program(types, calls))))


LOOSELY = [BARRIER, REDUCE, BARRIER]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        # All have met in front of the second and the third, and moved only what is an exchange's own.
        (LOOSELY * 3, ["loosely-between", "quietly-loosely-between", "quietly-loosely-between"]),
        ([BARRIER, ARRIVE, WAIT, *LOOSELY], ["quietly-loosely-between"]),
        # Nobody knows what was before the first call.
        ([ARRIVE, WAIT, *LOOSELY], ["loosely-between"]),
        # A peer's slab was read since they met, and the next is behind a meeting that isn't left out.
        ([BARRIER, SEND, *LOOSELY], ["behind", "loosely-between"]),
        ([BARRIER, SEND, BARRIER, ARRIVE, *LOOSELY], ["between", "quietly-loosely-between"]),
        # One that may read its peers holds no barrier behind it.
        ([BARRIER, REDUCE, *LOOSELY], ["behind", "loosely-between"]),
        ([*LOOSELY, REDUCE, *LOOSELY], ["behind", "behind", "loosely-between"]),
    ],
)
def test_a_barrier_is_held_quietly_where_nothing_of_peers_was_touched(calls: Sequence, expected: Sequence[str]) -> None:
    found = called(merged(program(TYPES, calls), 2))
    assert [name.partition(":")[2] for name in found if ":" in name] == expected
    assert not any("quietly" in name for name in called(merged(program(TYPES, calls))))


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_programs_compute_the_same(place: str, sizes: dict[str, int]) -> None:
    """A chain of collectives, whose every step is wrong where a barrier is missing; also when it runs again."""
    mesh, n = Mesh(sizes), 6
    parts = mesh["tp"]
    types = [((parts, n), "float32"), ((parts, n), "float32"), ((n,), "float32"), ((parts, n), "float32")]
    calls = [
        BARRIER,
        ("all_reduce", (0, 1, [], "tp")),
        BARRIER,
        ("send", (1, 2, [1], "tp")),
        BARRIER,
        ("all_reduce", (0, 0, [], "tp")),
        BARRIER,
        ("send", (0, 2, [1], "tp")),
        ("all_reduce", (1, 3, [], "tp")),
        BARRIER,
    ]
    with launched(mesh, place) as workers:
        x, y, block, z = (workers.mesh_tensor((n,), "float32") for _ in range(4))
        loaded = workers.load(program(types, calls), resolve_target(workers.target))
        for turn in range(5):
            for device in range(mesh.size):
                x.slab(device)[:] = device + turn + np.arange(n)
                for tensor in (y, block, z):
                    tensor.slab(device)[:] = np.nan
            workers.call(loaded, [(x, "tp"), (y, "tp"), (block, "slab"), (z, "tp")])
            for device in range(mesh.size):
                total = sum(peer + turn + np.arange(n) for peer in mesh.group(device, "tp"))
                for tensor, expected in ((x, total), (y, total), (block, total), (z, parts * total)):
                    np.testing.assert_array_equal(tensor.slab(device), expected)


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 3}], ids=str)
@pytest.mark.parametrize("rows", [16, 3 << 17], ids=["marked", "told"])
def test_exchanges_in_a_row(place: str, sizes: dict[str, int], rows: int) -> None:
    """Collectives that GPUs exchange, of equal parts, some of them behind and before meetings that are left out."""
    mesh, parts = Mesh(sizes), sizes["tp"]
    n = rows * parts
    types = [((parts, n), "float32"), ((rows,), "float32"), ((parts, n), "float32"), ((parts, 1, n), "float32")]
    types += [((parts, rows), "float32"), ((parts, n), "float32"), ((n,), "float32")]
    calls = [
        BARRIER,
        ("reduce_scatter", (0, 1, [0], "tp")),
        BARRIER,
        BARRIER,
        ("all_gather", (1, 2, [0], "tp")),
        BARRIER,
        BARRIER,
        ("all_to_all", (3, 4, [0, 1], "tp")),
        BARRIER,
        *[BARRIER, ("all_reduce", (2, 5, [], "tp")), BARRIER] * 2,
        ("send", (5, 6, [1], "tp")),
        BARRIER,
    ]
    rng = np.random.default_rng()
    with launched(mesh, place) as workers:
        slabs = ((n,), (rows,), (n,), (1, n), (parts, rows), (n,), (n,))
        x, part, total, dealt, found, twice, sent = tensors = [workers.mesh_tensor(slab, "float32") for slab in slabs]
        loaded = workers.load(program(types, calls), resolve_target(workers.target))
        for _ in range(4):
            given = rng.integers(-99, 99, (2, parts, n)).astype("float32")
            for device in range(parts):
                x.slab(device)[:], dealt.slab(device)[0] = given[0, device], given[1, device]
                for tensor in (part, total, found, twice, sent):
                    tensor.slab(device)[:] = np.nan
            views = ["tp", "slab", "tp", "tp", "slab", "tp", "slab"]
            workers.call(loaded, [*zip(tensors, views)])
            whole = given[0].sum(axis=0)
            for device in range(parts):
                mine = slice(device * rows, (device + 1) * rows)
                np.testing.assert_array_equal(total.slab(device), whole)
                np.testing.assert_array_equal(found.slab(device), given[1][:, mine])
                np.testing.assert_array_equal(twice.slab(device), parts * whole)
                np.testing.assert_array_equal(part.slab(device), whole[mine])
                np.testing.assert_array_equal(sent.slab(device), parts * whole)


@pytest.mark.parametrize("place", PLACES[2:], indirect=True)
def test_a_peer_that_does_not_come_is_named(place: str) -> None:
    """A device waits for it in a collective, and only once; what is launched then can be used."""
    mesh, n = Mesh({"tp": 2}), 6
    calls = [BARRIER, ("all_reduce", (0, 1, [], "tp")), BARRIER] * 5
    mod = program([((2, n), "float32")] * 2, calls)

    def summed(workers: Workers) -> None:
        x, y = (workers.mesh_tensor((n,), "float32") for _ in range(2))
        x.slab(0)[:], x.slab(1)[:] = 1, 2
        loaded = workers.load(mod, resolve_target(workers.target))
        for _ in range(3):
            workers.call(loaded, [(x, "tp"), (y, "tp")])
            assert y.slab(1).tolist() == [3] * n
        victim = workers_here()[-1]
        victim.suspend()
        start = time.monotonic()
        with pytest.raises(WorkerError, match=rf"(?s)worker 1 \(tp=1; .*pid {victim.pid}\) did not"):
            workers.call(loaded, [(x, "tp"), (y, "tp")])
        assert time.monotonic() - start < 8 and workers.closed

    for _ in range(2):
        with launched(mesh, place, timeout=1.0) as workers:
            summed(workers)
