"""A worker's side of where slabs are: their memory, what it sees of its neighbours', and the controller's copies."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvm_axe.collective.sync import Late
from tvm_axe.errors import WorkerError

if TYPE_CHECKING:
    from tvm_axe.collective.device import Device
    from tvm_axe.collective.site import Site

_Place = Sequence[int]  # worker, offset, bytes

_CREDENTIALS = struct.Struct("3i")  # of the process at the other end of a socket: its id, its user's, its group's
_AGAIN = 0.01  # seconds between tries to connect to who doesn't listen yet


class Slabs:
    """The slabs of one worker.

    Descriptors of memory go through the controller, if there is a `connection` to it, as where it has started the
    workers; ranks of a job, which have none, pass them to each other (`greet`).

    Parameters
    ----------
    site, rank, device
        Those of the worker.

    Attributes
    ----------
    connection : socket or None
        As above.
    received : list of int
        The descriptors that have come, and aren't used yet.
    """

    def __init__(self, site: Site, rank: int, device: Device) -> None:
        self._site, self._rank, self._device = site, rank, device
        self.connection: socket.socket | None = None
        self.received: list[int] = []
        self._neighbours: dict[int, socket.socket] = {}

    def greet(self, job: str) -> None:
        """Be connected to the neighbours of this host, which all do the same for the same name.

        Raises
        ------
        Late
            If they don't come in time.
        """
        others = [rank for rank in self._members() if rank != self._rank]
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + self._site.timeout
        with listener:
            listener.bind(_name(job, self._rank))
            listener.listen(len(others) + 1)
            listener.settimeout(_AGAIN)
            while missing := [rank for rank in others if rank not in self._neighbours]:
                if time.monotonic() > deadline:
                    raise Late(missing, self._site.timeout)
                for rank in missing:
                    if rank < self._rank:
                        self._connect(job, rank)
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                connection.settimeout(self._site.timeout)
                number = connection.recv(16)
                if _user(connection) == os.getuid() and number.isdigit() and int(number) in missing:
                    self._neighbours[int(number)] = connection
                else:
                    connection.close()

    def _connect(self, job: str, rank: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(self._site.timeout)
        try:
            connection.connect(_name(job, rank))
        except ConnectionError:
            connection.close()
            return
        if _user(connection) != os.getuid():
            connection.close()
            raise WorkerError(f"the socket of worker {rank} is somebody else's")
        connection.send(str(self._rank).encode())
        self._neighbours[rank] = connection

    def _members(self) -> Sequence[int]:
        return next(each for each in self._site.neighbours if self._rank in each)

    def reserve(self, places: Sequence[_Place]) -> None:
        """Get memory for the slabs of a new tensor that are on this machine: (worker, offset, bytes) each."""
        for worker, offset, nbytes in places:
            if worker == self._rank:
                self._device.reserve(offset, nbytes)
                if self.connection is not None:
                    socket.send_fds(self.connection, [b"\0"], [self._device.lent(offset)])

    def share(self, places: Sequence[_Place]) -> None:
        """See the memory that the neighbours have got for their slabs, the descriptors of which have come, or come."""
        own = {offset for worker, offset, _ in places if worker == self._rank}
        seen = [place for place in places if place[0] in self._members()]
        try:
            if self.connection is None:
                self._swap(seen)
            for (_, offset, nbytes), descriptor in zip(seen, self.received, strict=True):
                if offset not in own:  # of what is shared, each has its own
                    self._device.share(offset, nbytes, descriptor)
        finally:
            self.forget()

    def _swap(self, places: Sequence[_Place]) -> None:
        """Give the neighbours descriptors of the own slabs among these, and get theirs, in order."""
        lent = [self._device.lent(offset) for worker, offset, _ in places if worker == self._rank]
        for rank, connection in self._neighbours.items():
            for descriptor in lent:
                try:
                    socket.send_fds(connection, [b"\0"], [descriptor])
                except (ConnectionError, TimeoutError):
                    raise Late([rank], self._site.timeout) from None
        for worker, _, _ in places:
            if worker == self._rank:
                self.received.append(os.dup(lent.pop(0)))
                continue
            try:
                _, descriptors, *_ = socket.recv_fds(self._neighbours[worker], 1, 1)
            except (ConnectionError, TimeoutError):
                descriptors = []
            if not descriptors:
                raise Late([worker], self._site.timeout)
            self.received += descriptors

    def forget(self) -> None:
        """Close the descriptors that have come."""
        while self.received:
            os.close(self.received.pop())

    def release(self, places: Sequence[_Place]) -> None:
        """Give that memory back, and let go of the neighbours'."""
        for worker, offset, nbytes in places:
            if worker == self._rank or self.connection is not None or worker in self._neighbours:
                self._device.release(offset, nbytes)

    def move(self, places: Sequence[_Place], home: bool) -> None:
        """Copy slabs between the controller's memory and theirs, to the controller if they go `home`."""
        if self._device.in_arena:
            self.carry(places, home)
            return
        # On the way from and to other machines they are in memory of this process: those of a shared tensor have one
        # place in the arena, and each would write there, and drop it, while others read.
        far = self._site.across is not None and self._rank not in self._site.across.controllers
        held = {
            offset: np.empty(array.nbytes, "uint8") if far else array for offset, array in self._own(places).items()
        }
        for offset, array in held.items() if home else ():
            self._device.move(offset, array, True)
        self._carry(places, home, held)
        for offset, array in () if home else held.items():
            self._device.move(offset, array, False)

    def take(self, places: Sequence[_Place]) -> None:
        """Get memory for what the host has of a tensor; see `reserve`."""
        for worker, offset, nbytes in places:
            if worker == self._rank:
                self._site.arena.take(offset, nbytes)

    def drop(self, places: Sequence[_Place]) -> None:
        """Give that memory back."""
        for worker, offset, nbytes in places:
            if worker == self._rank:
                self._site.arena.drop(offset, nbytes)

    def carry(self, places: Sequence[_Place], home: bool) -> None:
        """Send what hosts have to the controller's, if it goes `home`, or from there; what is there already stays."""
        self._carry(places, home, self._own(places))

    def _carry(self, places: Sequence[_Place], home: bool, held: Mapping[int, np.ndarray]) -> None:
        """The same, where what this worker itself sends or receives is `held`, by its offset."""
        across = self._site.across
        if across is None:
            return
        far = [place for place in places if place[0] not in across.controllers]
        if self._rank == 0:
            parcels = [(worker, self._host(offset, nbytes)) for worker, offset, nbytes in far]
        else:
            parcels = [(0, held[offset]) for worker, offset, _ in far if worker == self._rank]
        if home == (self._rank == 0):
            across.exchange([], parcels)
        else:
            across.exchange(parcels, [])

    def _own(self, places: Sequence[_Place]) -> dict[int, np.ndarray]:
        """What the host has of this worker's slabs among these, by their offsets."""
        return {offset: self._host(offset, nbytes) for worker, offset, nbytes in places if worker == self._rank}

    def _host(self, offset: int, nbytes: int) -> np.ndarray:
        return self._site.arena.bytes(offset, nbytes)

    def close(self) -> None:
        """Let go of the neighbours."""
        for connection in self._neighbours.values():
            connection.close()
        self._neighbours.clear()


def _name(job: str, rank: int) -> str:
    return f"\0tvm_axe-{job}-{rank}"


def _user(connection: socket.socket) -> int:
    """The user whose process is at the other end."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])


COMMANDS: dict[str, Callable[..., None]] = {
    "reserve": Slabs.reserve,
    "share": Slabs.share,
    "release": Slabs.release,
    "move": Slabs.move,
    "take": Slabs.take,
    "drop": Slabs.drop,
    "carry": Slabs.carry,
    "greet": Slabs.greet,
}
"""What a worker is sent for its slabs, by name."""
