"""Every algorithm of collectives on GPUs: devices that share the first one, as processes, and in one context.

Each program does all the collectives, with the barriers that they hold, on tensors of one shape and type. It runs three
times, since the first is told, the second captured and the third launched as a graph.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import tvm
from algorithm_cases import Case, same, values
from test_link import program
from two_devices import workers_here

import tvm_axe as axe
from tvm_axe.collective import MeshTensor, Workers
from tvm_axe.collective.algorithms import Algorithm
from tvm_axe.collective.cuda import driver
from tvm_axe.collective.cuda.driver import call
from tvm_axe.collective.measuring import measure, table_of
from tvm_axe.collective.plan import VIEWS
from tvm_axe.layout import Mesh
from tvm_axe.machines import resolve_target

pytestmark = pytest.mark.gpu

MESHES = [{"tp": 2}, {"tp": 3}, {"tp": 4}, {"dp": 2, "tp": 2}]
DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "int32", "bool"]
SHAPES = [(7, 5), (37, 19), (64, 96, 2), (4, 3, 130)]
LARGE = (3, 1 << 20)  # which no kernel moves together with its meetings, and of which copy engines have rows
HOW = {"processes": True, "one context": False}


@pytest.fixture(scope="module", params=[(mesh, how) for mesh in MESHES for how in HOW], ids=str)
def where(request: pytest.FixtureRequest, cuda: tvm.runtime.Device) -> tuple[Mesh, bool]:
    mesh, how = request.param
    return Mesh(mesh), HOW[how]


@pytest.fixture(scope="module", params=[None, *map(str, Algorithm)], ids=str)
def workers(request: pytest.FixtureRequest, where: tuple[Mesh, bool]) -> Iterator[Workers]:
    with launched(*where, collectives=request.param) as workers:
        yield workers


def launched(mesh: Mesh, processes: bool = True, **options: object) -> Workers:
    """Workers with a GPU each, or that share one, and whose devices meet by themselves."""
    gpus = driver.gpus_for(mesh.size)
    return axe.launch(mesh, engine="cuda", gpus=gpus, processes=processes, barriers="device", timeout=20.0, **options)


def check(workers: Workers, cases: Sequence[Case], dtype: str, runs: int = 3) -> None:
    """Have one program do collectives, each between barriers, and compare with their definitions."""
    axis, mesh = "tp", workers.mesh
    tensors: list[tuple[MeshTensor, str]] = []
    types, calls = [], []
    for case in cases:
        source = workers.mesh_tensor(case.shapes[0], dtype)
        target = source if case.name == "all_gather_in_place" else workers.mesh_tensor(case.shapes[1], dtype)
        for tensor, is_view in zip((source, target), VIEWS[case.name]):
            tensors.append((tensor, axis if is_view else "slab"))
            types.append((((case.parts,) if is_view else ()) + tensor.shape, dtype))
        at = len(tensors) - 2
        calls += [("barrier", ([], None)), (case.name, (at, at + 1, case.numbers, axis)), ("barrier", ([], None))]
    loaded = workers.load(program(types, calls), resolve_target(workers.target))
    for run in range(runs):
        given: dict[int, np.ndarray] = {}
        for at, (tensor, _) in enumerate(tensors):
            given[at] = values((mesh.size, *tensor.shape), dtype, 100 * run + at)
            for device in range(mesh.size):
                tensor.slab(device)[...] = given[at][device]
        workers.call(loaded, tensors)
        for number, case in enumerate(cases):
            first = given[2 * number + (case.name == "all_gather_in_place")]  # what was written last
            second = given[2 * number + 1]
            for start in {min(mesh.group(device, axis)) for device in range(mesh.size)}:
                group = mesh.group(start, axis)
                with np.errstate(all="ignore"):
                    expected = case.expected(first[list(group)], second[list(group)])
                found = np.stack([tensors[2 * number + 1][0].slab(device) for device in group])
                same(found, expected)
                if case.name == "all_reduce":  # the same bits on all devices
                    assert all((found[0].view("uint8") == each.view("uint8")).all() for each in found)
    workers.free(loaded)
    for tensor in {tensor for tensor, _ in tensors}:
        workers.free(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_collectives(workers: Workers, dtype: str) -> None:
    parts = workers.mesh["tp"]
    for number, shape in enumerate(SHAPES):
        dims = [(0, 1), (1, 0), (1, 2), (2, 1)][number]
        check(workers, [Case(name, shape, parts, *dims, number - 1) for name in VIEWS], dtype)


def test_all_reduce_in_place(workers: Workers) -> None:
    parts = workers.mesh["tp"]
    for size in (3, 1000, 1 << 16):
        x = workers.mesh_tensor((size,), "bfloat16")
        calls = [("barrier", ([], None)), ("all_reduce", (0, 0, [], "tp")), ("barrier", ([], None))]
        loaded = workers.load(program([((parts, size), "bfloat16")], calls), resolve_target(workers.target))
        for run in range(3):
            given = values((workers.mesh.size, size), "bfloat16", run)
            for device in range(workers.mesh.size):
                x.slab(device)[:] = given[device]
            workers.call(loaded, [(x, "tp")])
            for device in range(workers.mesh.size):
                group = list(workers.mesh.group(device, "tp"))
                with np.errstate(all="ignore"):
                    expected = Case("all_reduce", (size,), parts, 0, 0, 0).expected(given[group], given[group])
                same(np.stack([x.slab(device)]), expected[:1])
        workers.free(loaded)
        workers.free(x)


def test_large_messages(workers: Workers) -> None:
    parts = workers.mesh["tp"]
    cases = [Case(name, LARGE, parts, 1, 0, 1) for name in VIEWS]
    for start in range(0, len(cases), 4):
        check(workers, cases[start : start + 4], "float32", runs=2)


@pytest.mark.parametrize("how", HOW)
def test_a_thousand_runs_leak_nothing(cuda: tvm.runtime.Device, how: str) -> None:
    mesh, size = Mesh({"tp": 2}), 4096
    calls = [("barrier", ([], None)), ("all_reduce", (0, 1, [], "tp")), ("barrier", ([], None))]
    context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0))
    call("cuCtxSetCurrent", context)

    def held() -> tuple[int, int, int]:
        of_workers = sum(child.num_fds() for child in workers_here())
        return len(os.listdir("/proc/self/fd")), of_workers, int(call("cuMemGetInfo")[0])

    try:
        with launched(mesh, HOW[how]) as workers:
            x, y = (workers.mesh_tensor((size,), "float32") for _ in range(2))
            x.slab(0)[:], x.slab(1)[:] = 1, 2
            loaded = workers.load(program([((2, size), "float32")] * 2, calls), resolve_target("cuda"))
            arguments = [(x, "tp"), (y, "tp")]
            workers.time(loaded, arguments, repeat=20)
            counts = [held()]
            for _ in range(4):
                workers.time(loaded, arguments, repeat=250)
                counts.append(held())
            assert {count[:2] for count in counts} == {counts[0][:2]}
            # What is free is the whole GPU's, of which others take and give back, too.
            assert min(before[2] - after[2] for before, after in itertools.pairwise(counts)) <= 0
            assert (y.slab(0) == 3).all() and (y.slab(1) == 3).all()
    finally:
        call("cuDevicePrimaryCtxRelease", call("cuDeviceGet", 0))


def test_measuring(cuda: tvm.runtime.Device) -> None:
    """What `tvm-axe doctor --measure` does, though devices that share a GPU say nothing of a machine."""
    mesh = Mesh({"tp": 2})
    times = measure(
        lambda algorithm: launched(mesh, False, collectives=str(algorithm)), sizes=[1 << 12, 16 << 20], repeat=3
    )
    assert all(time.seconds > 0 for time in times)
    assert "all_reduce" in table_of(times, "").rows
