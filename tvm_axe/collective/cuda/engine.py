"""The engine ``"cuda"``: a process for each GPU, or a thread of this one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from tvm_axe.collective.across import spanning_axes
from tvm_axe.collective.arena import round_up
from tvm_axe.collective.cuda import driver
from tvm_axe.collective.cuda.meeting import MOST, WORDS
from tvm_axe.collective.discrete import DiscreteSession
from tvm_axe.collective.engine import Engine, Finding, Rates
from tvm_axe.collective.session import Session
from tvm_axe.collective.staging import BUFFER
from tvm_axe.errors import InputError, TileError
from tvm_axe.layout import Link, Mesh
from tvm_axe.machines import backend_of
from tvm_axe.machines.nvcc import find_compiler
from tvm_axe.machines.target import resolve_target

_LOG = logging.getLogger("tvm_axe")
_MAKER = "tvm_axe.collective.cuda.device:CudaDevice"
_ROOM = 4  # times the GPUs' memory: the holes that tensors leave behind cost addresses alone


class CudaEngine(Engine):
    """The workers are on the GPUs of this machine, which see each other's memory where the machine lets them."""

    name = "cuda"
    device_type = "cuda"
    # NVLink 4 with a meeting of devices; the memory of an H200, and 16-bit products on its tensor cores.
    rates = Rates(Link(latency=5e-6, bandwidth=360e9), memory=4e12, operations=7e14)

    def findings(self) -> list[Finding]:
        found = [*super().findings(), _compiler()]
        try:
            gpus = range(driver.gpus())
        except InputError as error:
            return [
                *found,
                Finding("driver", str(error), "install what is missing; nvidia-smi says what the driver sees"),
            ]
        found.append(Finding("driver", f"CUDA {driver.version()}"))
        if not gpus:
            found.append(
                Finding("GPUs", "none that this process may use", "look at CUDA_VISIBLE_DEVICES and nvidia-smi")
            )
        for gpu in gpus:
            found.append(Finding(f"GPU {gpu}", f"{driver.name_of(gpu)}, {driver.memory_of(gpu) >> 30} GiB"))
        for first, second in combinations(gpus, 2):
            found.append(_between(first, second))
        return found

    def launch(self, mesh: Mesh, timeout: float, **options: Any) -> Session:
        """Start a worker for each device of a mesh.

        Parameters
        ----------
        mesh : Mesh
            The devices.
        timeout : float
            Seconds that a worker may be behind another; positive.
        **options
            `gpus`, a sequence of int: the GPU of each device, the first ones if left out; one that is named twice is
            shared, to try a mesh on fewer GPUs. `processes`, a bool: whether each worker is a process, which a fault of
            another's doesn't touch, or a thread of this one, for debuggers, sanitizers and profilers; True if left out.
            `barriers`, ``"device"`` or ``"host"``: who waits for whom at a barrier; the devices if left out, unless
            some share a GPU, where one that waits would keep the other from running, or some don't see each other's
            memory. `peers`, a bool: False has no device see another's memory, as where GPUs aren't peers; what the
            driver says if left out.

        Raises
        ------
        InputError
            If there is no driver or no bindings of it; for an unknown option; if there are too few GPUs, or no such; if
            devices shall meet by themselves that don't see each other's memory.
        WorkerError
            If a worker didn't start; then none is left.
        """
        named, processes, barriers, peers = self.options(options, "gpus", "processes", "barriers", "peers")
        if barriers not in (None, "device", "host"):
            raise InputError(f'launch: barriers must be "device" or "host", not {barriers!r}')
        gpus = _chosen(mesh, named)
        are_peers = (lambda first, second: False) if peers is False else driver.are_peers
        neighbours = neighbours_of(gpus, are_peers)
        can_meet = len(set(gpus)) == len(gpus) <= MOST and len(neighbours) == 1
        meets = WORDS if barriers == "device" or (barriers is None and can_meet) else None
        if len(neighbours) > 1:
            if barriers == "device":
                raise InputError(
                    "launch: barriers=\"device\" has devices meet in each other's memory, which these don't see; leave "
                    "it out"
                )
            _LOG.warning("%s", _said(mesh, gpus, neighbours, peers))
        page = backend_of(resolve_target(self.target)).page
        devices: list[Mapping[str, Any]] = [
            {"gpu": gpu, "name": f"GPU {gpu}, {driver.name_of(gpu)}", "page": page} for gpu in gpus
        ]
        size = _ROOM * sum(map(driver.memory_of, gpus)) + round_up(mesh.size * BUFFER, page)
        alone = processes is None or bool(processes)
        session = DiscreteSession(mesh, timeout, _MAKER, devices, size, page, alone, meets, neighbours)
        session.start()
        return session


def _compiler() -> Finding:
    try:
        found = find_compiler()
    except TileError as error:
        return Finding("CUDA compiler", "missing", str(error))
    release = found.version.split("release ")[-1].split(",")[0]
    return Finding("CUDA compiler", f"nvrtc {found.version}" if found.path is None else f"nvcc {release}, {found.path}")


def _between(first: int, second: int) -> Finding:
    """How two GPUs see each other's memory."""
    what = f"GPUs {first} and {second}"
    if not (driver.are_peers(first, second) and driver.are_peers(second, first)):
        return Finding(
            what,
            "don't see each other's memory: what goes between them takes the way through the host's; where they can be "
            "peers (nvidia-smi topo -p2p r says why they aren't), it takes their own link",
        )
    return Finding(what, f"see each other's memory{', by NVLink' if driver.are_linked(first, second) else ''}")


def _chosen(mesh: Mesh, gpus: Sequence[int] | None) -> list[int]:
    count = driver.gpus()
    if gpus is None and count < mesh.size:
        raise InputError(
            f"launch: mesh {mesh} has {mesh.size} devices, and this process sees {count} GPU{'s' * (count != 1)}; to "
            f"have devices share one, name it: gpus={(0,) * mesh.size}"
        )
    chosen = list(range(mesh.size)) if gpus is None else list(gpus)
    if len(chosen) != mesh.size or not all(isinstance(gpu, int) and gpu in range(count) for gpu in chosen):
        raise InputError(
            f"launch: gpus must be {mesh.size} numbers in [0, {count}), one for each device of mesh {mesh}, not "
            f"{gpus!r}"
        )
    return chosen


def neighbours_of(gpus: Sequence[int], are_peers: Callable[[int, int], bool]) -> list[list[int]]:
    """Return the devices that see each other's memory, each with the first ones that all see it and are seen by it.

    >>> neighbours_of([0, 1, 2, 3], lambda first, second: first // 2 == second // 2)
    [[0, 1], [2, 3]]
    """
    found: list[list[int]] = []
    for device, gpu in enumerate(gpus):
        for group in found:
            others = [gpus[other] for other in group]
            if all(are_peers(gpu, other) and are_peers(other, gpu) for other in others):
                group.append(device)
                break
        else:
            found.append([device])
    return found


def _said(mesh: Mesh, gpus: Sequence[int], neighbours: Sequence[Sequence[int]], peers: bool | None) -> str:
    """What is to be said of devices that don't see each other's memory."""
    axes = ", ".join(sorted(spanning_axes(mesh, neighbours)))
    groups = " | ".join(" ".join(str(gpus[device]) for device in group) for group in neighbours)
    why = "peers=False" if peers is False else "the driver says that they are no peers"
    return (
        f"launch: along {axes} GPUs don't see each other's memory ({groups}; {why}): collectives go through the "
        "host's, and programs run with theirs unfused"
    )


CUDA = CudaEngine()
