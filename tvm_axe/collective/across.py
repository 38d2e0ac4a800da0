"""What one rank of a job does together with ranks on other machines, whose slabs it can't see.

Everything is made of one operation, the exchange: arrays to some ranks and arrays from some, none of them waited for
inside. A collective is what `plan` says: each worker gets the boxes that it sums from those who have them, and then
sends the sum to those whose slabs it belongs to. MPI's own collectives move as little as that (of an all-reduce, twice
(n - 1) / n of a slab each way), but they don't say who is missing when one doesn't come, know no float16 and no
bfloat16, and add in an order of their own; here the sums are those of `ops`, bit for bit. That is for axes along which
each machine has one worker, or groups of workers lie on machines in different ways. Along others (`crowded_axes`) the
machines' sums are added, by exchanges too (`rounds`).

An exchange that is called off leaves messages behind that nobody takes. They carry the number of their command as tag,
so that they are never taken for those of a later one.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tvm_axe.collective import ops
from tvm_axe.collective.job import Job
from tvm_axe.collective.messages import Nap
from tvm_axe.collective.plan import VIEWS, Corner, Move, plan
from tvm_axe.collective.staging import neighbours_within
from tvm_axe.collective.sync import Aborted, Control, Late
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

_CANCELLING = 0.2  # seconds that a message on its way may take when its exchange is called off

Parcel = tuple[int, np.ndarray]  # a rank, and what is sent to it or where what it sends shall go


def spanning_axes(mesh: Mesh, hosts: Sequence[Sequence[int]]) -> frozenset[str]:
    """Return the axes of a mesh along which there are devices of several hosts.

    >>> sorted(spanning_axes(Mesh({"dp": 2, "tp": 2}), [(0, 1), (2, 3)]))
    ['dp']
    """
    host_of = {rank: host for host in hosts for rank in host}
    return frozenset(
        axis
        for axis in mesh.names
        if any(host_of[device] != host_of[mesh.group(device, axis)[0]] for device in range(mesh.size))
    )


def crowded_axes(mesh: Mesh, hosts: Sequence[Sequence[int]]) -> frozenset[str]:
    """Return the axes of a mesh along which there are devices of several hosts, and several of one.

    All groups along them must lie on hosts alike, as in rounds all the workers of a host meet, as often as each other.

    >>> sorted(crowded_axes(Mesh({"dp": 2, "tp": 2}), [(0, 1), (2, 3)]))
    []
    >>> sorted(crowded_axes(Mesh({"tp": 4}), [(0,), (1, 2, 3)]))
    ['tp']
    >>> sorted(crowded_axes(Mesh({"dp": 2, "tp": 2}), [(0,), (1, 2, 3)]))
    []
    """
    shapes = {axis: _shapes(mesh, axis, hosts) for axis in spanning_axes(mesh, hosts)}
    return frozenset(
        axis for axis, (first, *others) in shapes.items() if not others and any(len(part) > 1 for part in first)
    )


def check_rounds(mesh: Mesh, axes: Collection[str], hosts: Sequence[Sequence[int]]) -> None:
    """Refuse a mesh on hosts along whose `axes` collectives can't go in rounds.

    Raises
    ------
    InputError
        If groups of one of the axes lie on hosts in different ways: workers of a host would wait for rounds that others
        of it don't have.

    >>> check_rounds(Mesh({"dp": 2, "tp": 2}), ["tp"], [(0, 1), (2, 3)])
    >>> check_rounds(Mesh({"dp": 2, "tp": 2}), ["tp"], [(0,), (1, 2, 3)])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    tvm_axe.errors.InputError: launch: devices along 'tp' lie on the hosts in different ways, and ...
    """
    for axis in sorted(axes):
        if len(_shapes(mesh, axis, hosts)) > 1:
            raise InputError(
                f"launch: devices along {axis!r} lie on the hosts in different ways, and their collectives go through "
                "the hosts' memory in rounds, which needs them alike: give each host as many ranks, or use NCCL"
            )


def _shapes(mesh: Mesh, axis: str, hosts: Sequence[Sequence[int]]) -> set[tuple[tuple[int, ...], ...]]:
    """In which ways the groups along an axis lie on hosts."""
    return {neighbours_within(mesh.group(rank, axis), hosts) for rank in range(mesh.size)}


class Across:
    """A rank's side of what the ranks of several machines do together.

    Parameters
    ----------
    job : Job
        The job.
    mesh : Mesh
        The workers; device d is rank d.
    control : Control
        This machine's; says when the command is called off.
    timeout : float
        Seconds to wait for another rank.

    Attributes
    ----------
    controllers : frozenset of int
        The workers of rank 0's machine.
    """

    def __init__(self, job: Job, mesh: Mesh, control: Control, timeout: float) -> None:
        self.controllers = frozenset(job.hosts[0])
        self._job = job
        self._mesh = mesh
        self._control = control
        self._timeout = timeout
        self._tag = 0
        self._tags = job.data.tags // 2  # of a command: one for its data, one for arrivals
        self._arrivals: dict[int, int] = {}  # at barriers in this command, by rank
        self._sent: list[Any] = []
        self._abandoned: list[tuple[list[Any], list[Parcel]]] = []  # memory that may still be used

    def begin(self, sequence: int) -> None:
        """Begin a command; what is left of the last one is not part of it."""
        self._listen()
        self._tag = 2 * ((self._job.commands + sequence) % self._tags)
        self._arrivals = {rank: 0 for host in self._job.hosts if self._job.rank not in host for rank in host}
        self._arrivals[self._job.rank] = 0

    def arrive(self) -> None:
        """Say that what this worker wrote and read until now is done, to each rank of the other machines.

        A message a rank, so that each knows whom it waits for.
        """
        self._arrivals[self._job.rank] += 1
        others = [rank for rank in self._arrivals if rank != self._job.rank]
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent += [self._job.data.send(rank, self._tag + 1, bytearray()) for rank in others]

    def wait(self, behind: int) -> None:
        """Wait until all on the other machines have arrived as often as this worker less `behind` times.

        Raises
        ------
        Aborted
            If the command was called off.
        Late
            If a worker didn't arrive in time.
        """
        generation = self._arrivals[self._job.rank] - behind
        deadline, nap = time.monotonic() + self._timeout, Nap()
        while missing := [rank for rank, count in self._arrivals.items() if count < generation]:
            self._check(missing, deadline)
            nap.take()
            self._listen()

    def collective(self, name: str, source: np.ndarray, target: np.ndarray, *numbers: int, axis: str) -> None:
        """Do this worker's part of a collective along one of `axes`; takes the arrays that `ops.collective` takes.

        Of views of the group only the own slab is here: they have a stride of 0.
        """
        group = self._mesh.group(self._job.rank, axis)
        me = group.index(self._job.rank)
        pulls, pushes = VIEWS[name]
        source, target = (
            array[:1] if is_view else array[np.newaxis] for array, is_view in zip((source, target), VIEWS[name])
        )
        plans = _plans(name, source.shape[1:], target.shape[1:], numbers, len(group))

        sends: list[Parcel] = []
        receives: list[Parcel] = []
        mine: list[list[np.ndarray]] = []
        for peer, move in plans:
            owners = move.source.slabs if pulls else (peer,)
            if peer == me:
                here = _box(source, move.source, move.box)
                terms = [here if owner == me else np.empty_like(here, order="C") for owner in owners]
                receives += [(group[owner], term) for owner, term in zip(owners, terms) if owner != me]
                mine.append(terms)
            elif me in owners:
                sends.append((group[peer], _box(source, move.source, move.box)))
        self.exchange(sends, receives)

        totals = map(ops.summed, mine)
        sends, receives = [], []
        for peer, move in plans:
            owners = move.target.slabs if pushes else (peer,)
            if peer == me:
                total = next(totals)
                sends += [(group[owner], total) for owner in owners if owner != me]
            if me in owners:
                here = _box(target, move.target, move.box)
                if peer == me:
                    here[...] = total
                else:
                    receives.append((group[peer], here))
        self.exchange(sends, receives)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send arrays to ranks and receive arrays from ranks, all at the same time.

        Raises
        ------
        Aborted
            If the command was called off.
        Late
            If a rank didn't come in time.
        """
        incoming = [(rank, _dense(array)) for rank, array in receives]
        outgoing = [(rank, np.ascontiguousarray(array)) for rank, array in sends]
        requests = [self._job.data.receive(rank, self._tag, _bytes(array)) for rank, array in incoming]
        requests += [self._job.data.send(rank, self._tag, _bytes(array)) for rank, array in outgoing]
        pending = dict(enumerate([*incoming, *outgoing]))
        # By MPI data may only move when it is called, a buffer's worth a time: no nap is longer than one takes to fill.
        deadline, nap = time.monotonic() + self._timeout, Nap(longest=1e-4)
        try:
            while pending := {i: parcel for i, parcel in pending.items() if not requests[i].Test()}:
                self._check(sorted({rank for rank, _ in pending.values()}), deadline)
                nap.take()
        except (Aborted, Late):
            self._abandon(requests[: len(incoming)], requests[len(incoming) :], [*incoming, *outgoing])
            raise
        for (_, array), (_, received) in zip(receives, incoming):
            if received is not array:
                array[...] = received

    def _check(self, missing: list[int], deadline: float) -> None:
        if self._control.aborted:
            raise Aborted(missing)
        if time.monotonic() > deadline:
            raise Late(missing, self._timeout)

    def _listen(self) -> None:
        """Count the arrivals that were told."""
        while (message := self._job.data.take(self._tag + 1)) is not None:
            self._arrivals[message[0]] += 1

    def _abandon(self, receives: list[Any], sends: list[Any], parcels: list[Parcel]) -> None:
        """Take back what was to be received; what was sent can't be, and nobody takes it."""
        receives = [request for request in receives if not request.Test()]
        for request in receives:
            request.Cancel()
        deadline = time.monotonic() + _CANCELLING
        while (receives := [request for request in receives if not request.Test()]) and time.monotonic() < deadline:
            time.sleep(1e-3)
        self._abandoned.append(([*receives, *sends], parcels))


@functools.lru_cache(maxsize=256)
def _plans(
    name: str, source: tuple[int, ...], target: tuple[int, ...], numbers: tuple[int, ...], parts: int
) -> list[tuple[int, Move]]:
    """Return what every worker of a group does, each step with its worker's coordinate."""
    return [(rank, move) for rank in range(parts) for move in plan(name, source, target, numbers, parts, rank)]


def _box(slab: np.ndarray, corner: Corner, box: tuple[int, ...]) -> np.ndarray:
    """Return the box at `corner` of a group of one slab."""
    return ops.boxes(slab, dataclasses.replace(corner, slabs=(0,)), box)[0]


def _dense(array: np.ndarray) -> np.ndarray:
    """Return the array, or one like it, dense, if it isn't."""
    return array if array.flags.c_contiguous else np.empty_like(array, order="C")


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view("uint8")
