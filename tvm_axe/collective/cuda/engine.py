"""The engine ``"cuda"``: a process for each GPU, or a thread of this one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

from tvm_axe.collective import choice, ranked, ranks_engine
from tvm_axe.collective.across import spanning_axes
from tvm_axe.collective.algorithms import Algorithm
from tvm_axe.collective.arena import round_up
from tvm_axe.collective.cuda import driver, nccl
from tvm_axe.collective.cuda.job import can_meet, devices_of, linked_axes
from tvm_axe.collective.cuda.meeting import WORDS
from tvm_axe.collective.discrete import DiscreteSession
from tvm_axe.collective.engine import Engine, Finding, Measured, Rates
from tvm_axe.collective.job import Job
from tvm_axe.collective.measuring import measure, table_of
from tvm_axe.collective.ranked import Devices
from tvm_axe.collective.session import Session
from tvm_axe.collective.staging import BUFFER
from tvm_axe.collective.workers import Workers
from tvm_axe.errors import InputError, TileError
from tvm_axe.layout import Link, Mesh
from tvm_axe.machines import backend_of
from tvm_axe.machines.nvcc import find_compiler
from tvm_axe.machines.target import resolve_target

_LOG = logging.getLogger("tvm_axe")
_MAKER = "tvm_axe.collective.cuda.device:CudaDevice"
_PATIENCE = 60.0  # seconds that a worker may be behind another where collectives are measured
_ROOM = 4  # times the GPUs' memory: the holes that tensors leave behind cost addresses alone


class CudaEngine(Engine):
    """The workers are on the GPUs of this machine, which see each other's memory where the machine lets them."""

    name = "cuda"
    device_type = "cuda"
    packages = ("cuda-bindings", "nccl4py")
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
        found.append(_nccl())
        if len(gpus) > 1:
            found += _collectives(gpus, self.rates.link)
        return found

    def measure(self, tell: Callable[[str], object]) -> list[Measured]:
        count = driver.gpus()
        if count < 2:
            raise InputError("doctor: collectives are measured between GPUs, and this process sees fewer than two")
        found = []
        for devices in sorted({2, 4, 8, count}.intersection(range(2, count + 1))):
            machine = machine_of(range(devices))
            tell(f"measuring the collectives of {machine}")
            times = measure(functools.partial(self._forced, Mesh({"tp": devices})))
            found.append(Measured(machine, table_of(times, "what was measured here"), times))
        return found

    def table(self, devices: int) -> choice.Table:
        """Return that of this machine's first GPUs; of H200s on NVLink where there aren't as many."""
        try:
            found = driver.gpus() >= devices
        except InputError:
            found = False
        if found:
            return choice.find(machine_of(range(devices)), self.rates.link)
        assumed = choice.Machine("NVIDIA H200", devices, "NVLink")
        table = choice.find(assumed, self.rates.link)
        return choice.Table(table.rows, f"{table.source}; supposing {assumed}, as this process sees fewer GPUs")

    def _table(self, machine: choice.Machine, algorithm: str | None) -> choice.Table:
        if algorithm in (None, "nccl", "host"):
            return choice.find(machine, self.rates.link)
        return choice.forced(algorithm)

    def _launch_in_job(self, mesh: Mesh, timeout: float, options: Mapping[str, Any]) -> Session:
        """The same where this process is a rank of a job: each rank has a GPU, in the order of those of a machine."""
        collectives, peers = self.options(options, "collectives", "peers")
        driver.gpus()  # or an error, on every rank
        tables: list[choice.Table] = []

        def devices(job: Job) -> Devices:
            here = range(min(len(job.host), driver.gpus()))
            table = self._table(machine_of(here), collectives)
            tables.append(table)
            page = backend_of(resolve_target(self.target)).page
            alike = {"page": page, "room": min(map(driver.room, here)), "collectives": table.encode()}
            size = addresses([driver.memory_of(0)] * mesh.size, page)
            return devices_of(mesh, job, alike, size, peers, collectives)

        session = ranked.launch(ranks_engine.start_messages, mesh, timeout, devices)
        session.table = tables[0]
        return session

    def _forced(self, mesh: Mesh, algorithm: Algorithm) -> Workers:
        return Workers(mesh, self, self.launch(mesh, _PATIENCE, collectives=str(algorithm)))

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
            some share a GPU, where one that waits would keep the other from running, or the host's memory is between
            some. `collectives`, the algorithm that does all collectives that it is offered for
            (`algorithms.Algorithm`): ``"one-shot"``, ``"two-shot"``, ``"two-step"``, ``"copy-engine"``; that of the
            machine's table if left out (`tvm_axe.collective.choice`). Or ``"nccl"``: all collectives go by NCCL; and
            ``"host"``: where devices don't see each other's memory, through their hosts'. If left out that is so on one
            host; between hosts it is NCCL, if it is there. With NCCL `timeout` also limits what a command takes.
            `peers`, a bool: False has no device see another's memory, as where GPUs aren't peers; what the driver says
            if left out.
            Ranks of a job take `collectives` and `peers` alone: each has a GPU, in their order on its machine.

        Raises
        ------
        InputError
            If there is no driver or no bindings of it; for an unknown option; if there are too few GPUs, or no such; if
            devices shall meet by themselves that don't see each other's memory.
        WorkerError
            If a worker didn't start; then none is left.
        """
        if ranks_engine.of_job():
            return self._launch_in_job(mesh, timeout, options)
        names = ("gpus", "processes", "barriers", "collectives", "peers")
        named, processes, barriers, algorithm, peers = self.options(options, *names)
        if barriers not in (None, "device", "host"):
            raise InputError(f'launch: barriers must be "device" or "host", not {barriers!r}')
        gpus = _chosen(mesh, named)
        are_peers = (lambda first, second: False) if peers is False else driver.are_peers
        neighbours = neighbours_of(gpus, are_peers)
        axes, unique = linked_axes(mesh, frozenset(), 1, algorithm)
        meet = can_meet(mesh, neighbours, axes)
        if barriers == "device" and not meet:
            raise InputError(
                "launch: barriers=\"device\" has devices meet in each other's memory, which these don't see; leave "
                "it out"
            )
        meets = WORDS if barriers == "device" or (barriers is None and meet and len(set(gpus)) == len(gpus)) else None
        if len(neighbours) > 1:
            _LOG.warning("%s", _said(mesh, gpus, neighbours, peers))
        page = backend_of(resolve_target(self.target)).page
        if unique is not None and len(set(gpus)) < len(gpus):
            raise InputError(f'launch: collectives="nccl" needs a GPU for each device, and gpus is {tuple(gpus)}')
        table = self._table(machine_of(gpus), algorithm)
        shared = max(gpus.count(gpu) for gpu in gpus)
        # What every device is told alike: where they differed, they would wait for blocks that others don't have.
        alike = {"page": page, "room": min(map(driver.room, gpus)) // shared, "collectives": table.encode()}
        devices: list[Mapping[str, Any]] = [
            {"gpu": gpu, "name": f"GPU {gpu}, {driver.name_of(gpu)}", **alike} for gpu in gpus
        ]
        size = addresses(list(map(driver.memory_of, gpus)), page)
        alone = processes is None or bool(processes)
        session = DiscreteSession(mesh, timeout, _MAKER, devices, size, page, alone, meets, neighbours, axes, unique)
        session.table, session.shares_context = table, shared > 1 and not alone
        session.start()
        return session


def addresses(memories: Sequence[int], page: int) -> int:
    """Return how many bytes of addresses devices of so much memory each reserve alike: whole pages, as they must be."""
    return round_up(_ROOM * sum(memories) + len(memories) * BUFFER, page)


def machine_of(gpus: Sequence[int]) -> choice.Machine:
    """Return what the GPUs of a mesh's devices are, for the table of their collectives."""
    names = sorted({driver.name_of(gpu) for gpu in gpus})
    distinct = sorted(set(gpus))
    if len(distinct) < len(gpus):
        link = "its own memory" if len(distinct) == 1 else "shared GPUs"
    else:
        linked = all(driver.are_linked(first, second) for first, second in permutations(distinct, 2))
        link = "NVLink" if linked else "PCIe"
    return choice.Machine(" and ".join(names), len(gpus), link)


def _compiler() -> Finding:
    try:
        found = find_compiler()
    except TileError as error:
        return Finding("CUDA compiler", "missing", str(error))
    release = found.version.split("release ")[-1].split(",")[0]
    return Finding("CUDA compiler", f"nvrtc {found.version}" if found.path is None else f"nvcc {release}, {found.path}")


def _nccl() -> Finding:
    """NCCL, which collectives between hosts go by."""
    try:
        return Finding("NCCL", f"{nccl.version()}: collectives between hosts; on one host if asked for")
    except InputError:
        return Finding("NCCL", "missing: what goes between hosts takes the way through their memory; tvm-axe[cuda]")


def _collectives(gpus: Sequence[int], link: Link) -> list[Finding]:
    """Which algorithms a launch on all GPUs uses for collectives, and why."""
    machine = machine_of(gpus)
    *lines, source = str(choice.find(machine, link)).split("\n")
    return [Finding("collectives", f"of {machine}, {source}"), *(Finding("", line) for line in lines)]


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
