"""Who the ranks of a job are: on which machines, of which launch, and whether they are alive."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

RANKS_PER_HOST = "TVM_AXE_RANKS_PER_HOST"  # for tests: take so many ranks of a machine for a machine of their own


@dataclass(frozen=True)
class Rank:
    """One process of the job.

    Attributes
    ----------
    pid : int
        Its process id, on its machine.
    node : str
        The machine's name.
    machine : str
        What tells the machine, and its space of process ids, from all others.
    cores : tuple of int
        The cores that it may use.
    mesh : str
        The mesh that it was launched with.
    """

    pid: int
    node: str
    machine: str
    cores: tuple[int, ...]
    mesh: str

    @classmethod
    def own(cls, mesh: Mesh, cores: Sequence[int]) -> Rank:
        """Describe this process."""
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        machine = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
        return cls(os.getpid(), socket.gethostname(), machine, tuple(cores), str(mesh))


def split_hosts(ranks: Sequence[Rank], most: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each machine, at most `most` in one, by their first ranks.

    >>> ranks = [Rank(1, "n", machine, (0,), "tp=4") for machine in "aabaab"]
    >>> split_hosts(ranks), split_hosts(ranks, 2)
    (((0, 1, 3, 4), (2, 5)), ((0, 1), (2, 5), (3, 4)))
    """
    machines: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        machines.setdefault(rank.machine, []).append(number)
    hosts = []
    for members in machines.values():
        size = len(members) if most is None else most
        hosts += [tuple(members[start : start + size]) for start in range(0, len(members), size)]
    return tuple(sorted(hosts))


def find_fault(meshes: Sequence[str]) -> str:
    """Say what keeps ranks with these meshes from being the workers of one launch, or nothing."""
    first = meshes[0]
    others = [rank for rank, mesh in enumerate(meshes) if mesh != first]
    if others:
        there = ", ".join(f"rank {rank} with {meshes[rank]}" for rank in others)
        return f"launch: all the ranks must launch the same mesh; rank 0 launched with {first}, {there}"
    size = Mesh.parse(first).size
    if size != len(meshes):
        names = "rank 0 alone" if len(meshes) == 1 else f"ranks 0 to {len(meshes) - 1}"
        return (
            f"launch: mesh {first} has {size} devices, but the job has {len(meshes)} ({names}); start one rank a "
            f"device: mpiexec -n {size} python ..."
        )
    return ""


def ranks_per_host() -> int | None:
    text = os.environ.get(RANKS_PER_HOST)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{RANKS_PER_HOST} must be a positive number, not {text!r}")
    return int(text)


def open_process(pid: int) -> int | None:
    """Open the folder in /proc of a process, which stays that of this process whoever gets its number; None if gone."""
    try:
        return os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def is_alive(folder: int) -> bool:
    """Whether the process of an open folder in /proc is neither gone nor waits to be collected by its parent."""
    try:
        stat = os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except (FileNotFoundError, ProcessLookupError):
        return False
    try:
        return os.read(stat, 4096).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except ProcessLookupError:
        return False
    finally:
        os.close(stat)
