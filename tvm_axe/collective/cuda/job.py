"""The GPUs of the ranks of a job: which one each has, which see each other, and what goes by NCCL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tvm_axe.collective.across import spanning_axes
from tvm_axe.collective.cuda import driver, nccl
from tvm_axe.collective.cuda.device import CudaDevice
from tvm_axe.collective.cuda.meeting import MOST, WORDS
from tvm_axe.collective.job import Job
from tvm_axe.collective.ranked import Devices
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

_LOG = logging.getLogger("tvm_axe")
_MAKER = "tvm_axe.collective.cuda.job:of_rank"


def of_rank(told: Mapping[str, Any], size: int) -> CudaDevice:
    """Make the device of this process, a rank of its machine.

    Raises
    ------
    InputError
        If there is no GPU for it.
    """
    count = driver.gpus()
    gpu = 0 if count == 1 else told["gpu"]  # who starts ranks may show each its own GPU only
    if gpu >= count:
        raise InputError(f"launch: rank {told['rank']} is to have GPU {gpu} of its machine, which shows it {count}")
    return CudaDevice({**told, "gpu": gpu}, size)


def devices_of(
    mesh: Mesh,
    job: Job,
    alike: Mapping[str, Any],
    size: int,
    peers: bool | None,
    collectives: str | None,
) -> Devices:
    """Return the GPUs of a job's ranks, one each in the order of the ranks of a machine.

    What is asked of GPUs is asked of rank 0's machine; the others are taken to be like it.

    Parameters
    ----------
    mesh, job
        The devices, which are the ranks.
    alike : mapping
        What all devices are told.
    size : int
        Bytes of the range of addresses.
    peers, collectives
        See `CudaEngine.launch`.

    Raises
    ------
    InputError
        If NCCL is asked for and isn't there.
    """
    gpus = machine_numbers([rank.machine for rank in job.ranks])
    neighbours = seen_within(job.hosts, gpus, driver.gpus(), peers)
    apart = spanning_axes(mesh, neighbours)
    axes, unique = linked_axes(mesh, apart, len(job.hosts), collectives)
    told = [{"gpu": gpu, "name": f"GPU {gpu}", "rank": rank, **alike} for rank, gpu in enumerate(gpus)]
    return Devices(
        _MAKER,
        told,
        size,
        alike["page"],
        neighbours,
        WORDS if max(gpus) < driver.gpus() and can_meet(mesh, neighbours, axes) else None,
        axes,
        unique,
    )


def can_meet(mesh: Mesh, neighbours: Sequence[Sequence[int]], axes: Collection[str]) -> bool:
    """Whether devices can meet by themselves, each those whose memory it sees.

    The slabs of `neighbours`, who see each other's memory, must lie one behind the other, and no more than `MOST` of
    them. Between others all goes by NCCL, along `axes`: in that, who has what it waits for has met who sent it.

    >>> can_meet(Mesh({"dp": 2, "tp": 2}), [(0, 1), (2, 3)], ["dp"])
    True
    >>> can_meet(Mesh({"dp": 2, "tp": 2}), [(0, 1), (2, 3)], [])
    False
    """
    runs = all(list(group) == list(range(group[0], group[0] + len(group))) for group in neighbours)
    return runs and max(map(len, neighbours)) <= MOST and spanning_axes(mesh, neighbours) <= set(axes)


def machine_numbers(machines: Sequence[str]) -> list[int]:
    """Return each rank's number among those of its machine.

    >>> machine_numbers(["a", "b", "a", "b"])
    [0, 0, 1, 1]
    """
    return [machines[:rank].count(machine) for rank, machine in enumerate(machines)]


def seen_within(hosts: Sequence[Sequence[int]], gpus: Sequence[int], count: int, peers: bool | None) -> list[list[int]]:
    """Return the ranks whose GPUs see each other's memory, of one host each.

    Where this process is shown fewer GPUs than its host has ranks, those of a host are taken to see each other.
    """
    if peers is False:
        return [[rank] for host in hosts for rank in host]
    first = hosts[0]
    known = max(gpus[rank] for rank in first) < count
    if known and not all(driver.are_peers(gpus[one], gpus[other]) for one in first for other in first):
        return [[rank] for host in hosts for rank in host]
    return [list(host) for host in hosts]


def linked_axes(
    mesh: Mesh, apart: frozenset[str], hosts: int, collectives: str | None
) -> tuple[list[str], Callable[[], bytes] | None]:
    """Return the axes along which collectives go by NCCL, and what makes the bytes that its communicators are made of.

    Told ``"nccl"`` these are all axes, and told ``"host"`` none. Else, on several hosts, those that are apart, if NCCL
    is there; on one host none.
    """
    if collectives == "nccl":
        nccl.version()  # or an error
        axes = [axis for axis in mesh.names if mesh.axis_size(axis) > 1]
    elif hosts > 1 and collectives != "host":
        try:
            nccl.version()
        except InputError as error:
            _LOG.warning(
                "launch: along %s collectives go through the hosts' memory: %s", ", ".join(sorted(apart)), error
            )
            return [], None
        axes = sorted(axis for axis in apart if mesh.axis_size(axis) > 1)
    else:
        axes = []
    return axes, nccl.unique if axes else None
