"""The workers of one launch whose devices have memory of their own: processes of this machine, or threads.

Each worker has a range of addresses as long as the arena, and in it, at the offset that a slab has in the arena, the
slab: its own, in its device's memory, and its peers', in theirs. So dimension 0 of a mesh tensor is the device, for a
kernel as for the host. A worker gets the memory of its slab and hands out a descriptor, which the controller passes on
to those of the others whose devices can see it. What goes between devices that can't goes through buffers in the arena
(`staging`). What the arena itself has at that offset is the host's copy, which exists only while it is wanted
(`Mirror`).

Commands go to each worker through a pair of sockets, and with them the descriptors; the answers come by the control
block, as with the engines of the host's cores. The controller uses no device itself, so that a fault takes none from
it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from tvm_axe.collective.across import check_rounds, spanning_axes
from tvm_axe.collective.arena import Arena, limited
from tvm_axe.collective.calls import attend
from tvm_axe.collective.device import Device
from tvm_axe.collective.forked import Forked, speak
from tvm_axe.collective.mirror import Mirror, Place
from tvm_axe.collective.session import CORES, GRACE, Session
from tvm_axe.collective.site import Site
from tvm_axe.collective.staging import BUFFER
from tvm_axe.collective.sync import SLICE, Control
from tvm_axe.collective.tensor import ALL, MeshTensor
from tvm_axe.collective.worker import Worker
from tvm_axe.errors import WorkerError
from tvm_axe.layout import Mesh

_ENTRY = "tvm_axe.collective.discrete:serve"
_MESSAGE = 160 << 10  # bytes of a command; those of sockets are kept below the least that a machine lets them hold
_ENDS = b""  # what a worker reads when the controller has closed its end


class Exchanging(Session):
    """A session whose workers see the memory of each other's devices."""

    @abstractmethod
    def exchange(self, places: Sequence[Place]) -> None:
        """Have all the workers get the memory of slabs, and see their neighbours'."""


class DiscreteSession(Exchanging):
    """The workers of one launch, all on this machine.

    Parameters
    ----------
    mesh : Mesh
        One worker for each of its devices.
    timeout : float
        Seconds that a worker may be behind another.
    maker : str
        What makes a worker's `Device`, as ``module:function`` of one of `devices` and the bytes of its range.
    devices : sequence of mapping
        What it is told for each worker, that JSON can hold.
    size : int
        Bytes of the arena, and of the range.
    page : int
        Bytes that the devices' memory comes in.
    alone : bool
        Whether each worker is a process, or a thread of this one.
    meets : int, optional
        The words of 32 bits in each slab of the tensor by which devices meet without their workers; if left out, the
        workers meet.
    neighbours : sequence of sequence of int, optional
        The workers whose devices see each other's memory; all of them if left out.
    axes : sequence of str
        The axes along which devices have a communicator; along others that are apart, the arena is between them.
    unique : callable, optional
        What makes the bytes that a communicator is made of.
    """

    def __init__(
        self,
        mesh: Mesh,
        timeout: float,
        maker: str,
        devices: Sequence[Mapping[str, Any]],
        size: int,
        page: int,
        alone: bool,
        meets: int | None = None,
        neighbours: Sequence[Sequence[int]] | None = None,
        axes: Sequence[str] = (),
        unique: Callable[[], bytes] | None = None,
    ) -> None:
        super().__init__(mesh, timeout, Arena.create(size, page))
        self._maker, self._devices, self._alone, self._meets = maker, devices, alone, meets
        self._neighbours = [list(range(mesh.size))] if neighbours is None else list(map(list, neighbours))
        self._axes = spanning_axes(mesh, self._neighbours)
        self.connected, self._unique = frozenset(axes), unique
        self._forked = Forked()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._control = Control(self.arena.map, mesh.size)
        self._failed = False  # the last command

    def start(self) -> None:
        """Start the workers.

        Raises
        ------
        WorkerError
            If one didn't start; then none is left.
        """
        try:
            self.arena.allocate(Control.nbytes(self._mesh.size))  # the first, so at offset 0, where Control looks
            for rank, device in enumerate(self._devices):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._sockets.append(ours)
                self._start(rank, device, theirs)
            self._command("start")
            self._forked.started()
            self.mirror = DeviceMirror(self)
            if self._meets is not None:
                self._words = MeshTensor(self.arena, self._mesh, (self._meets,), "int32", False, self.mirror)
                self._command("meet", self._words.encode(ALL))
            if self._unique is not None:
                self._command("connect", self._unique().hex(), sorted(self.connected))
            if staged := self._axes.difference(self.connected):
                check_rounds(self._mesh, staged, self._neighbours)
                self._command("stage", self.arena.allocate(self._mesh.size * BUFFER), sorted(staged))
        except OSError as error:
            self.close(force=True)
            raise limited(f"launch: {self._mesh.size} workers did not start", error) from error
        except BaseException:
            self.close(force=True)
            raise

    def _start(self, rank: int, device: Mapping[str, Any], theirs: socket.socket) -> None:
        arguments = {
            "rank": rank,
            "axes": dict(self._mesh.axes),
            "memory": self.arena.size,
            "page": self.arena.page,
            "timeout": self._timeout,
            "cores": CORES,
            "maker": self._maker,
            "device": dict(device),
            "neighbours": self._neighbours,
        }
        if self._alone:
            with theirs:
                self._forked.start(rank, _ENTRY, arguments, [self.arena.fd, theirs.fileno()])
            return
        site = Site(self._mesh, self.arena, self._timeout, CORES, alone=False, neighbours=self._neighbours)
        made = make_device(self._maker, device, self.arena.size)
        thread = threading.Thread(target=_work, args=(Worker(site, rank, made), theirs), daemon=True)
        thread.start()
        self._threads.append(thread)

    def is_apart(self, axis: str) -> bool:
        return axis in self._axes

    def _command(self, *command: Any) -> None:
        if self._failed and not self.closed:
            self._failed = False
            super()._command("settle")
        self._failed = True
        super()._command(*command)
        self._failed = False

    def exchange(self, places: Sequence[Place]) -> None:
        """Have all the workers get the memory of slabs, and see their neighbours'."""
        descriptors: list[int] = []
        try:
            self._command("reserve", places)
            for place in places:
                descriptors.append(_received(self._sockets[place.device]))
            for neighbours in self._neighbours:
                seen = [each for each, place in zip(descriptors, places) if place.device in neighbours]
                for rank in neighbours:
                    for descriptor in seen:
                        socket.send_fds(self._sockets[rank], [b"\0"], [descriptor])
        except BaseException:
            for connection in [] if self.closed else self._sockets:
                descriptors += _left(connection)
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._command("share", places)

    def _send(self, command: str) -> None:
        message = f"{self._sequence} {command}".encode()
        if len(message) > _MESSAGE:
            raise WorkerError(f"a command of {len(message)} bytes; valid are up to {_MESSAGE}: give it fewer arguments")
        for rank, connection in enumerate(self._sockets):
            try:
                connection.send(message)
            except ConnectionError:
                deadline = time.monotonic() + GRACE  # that a process has ended is seen later than that its socket has
                while time.monotonic() < deadline:
                    self._check_alive()
                    time.sleep(SLICE / 10)
                raise WorkerError(f"{self._name([rank])} doesn't listen any more") from None

    def _check_alive(self) -> None:
        dead = self._forked.dead()
        if dead is not None:
            raise WorkerError(f"{self._name([dead[0]])} {dead[1]}")

    def _place(self, rank: int) -> str:
        pid = self._forked.pid(rank)
        where = "a thread of this process" if not self._alone else "no process yet" if pid is None else f"pid {pid}"
        described = self._devices[rank].get("name")
        return where if described is None else f"{described}; {where}"

    def _close(self, force: bool) -> None:
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._pid:  # a child that was forked: the workers are its parent's
            return
        idle = self._alone or self._threads_idle(range(len(self._threads)))
        try:
            if force:
                self._forked.kill()
        finally:
            for connection in self._sockets:
                connection.close()
            self._forked.end(0 if force else GRACE)
            for thread in self._threads:
                thread.join(GRACE if idle else 0)
            if idle:  # else threads still use the memory
                self._control.close()
                self.arena.close()


class DeviceMirror(Mirror):
    """Keeps what the host has of the slabs of devices.

    Parameters
    ----------
    session : Exchanging
        Whose slabs they are.
    """

    discrete = True

    def __init__(self, session: Exchanging) -> None:
        super().__init__(session._command, [[], *([device] for device in range(session._mesh.size))])
        self._session = session
        self._zeros: set[Place] = set()  # the slabs that nothing has written to

    def reserve(self, tensor: MeshTensor) -> None:
        places = self._places(tensor)
        try:
            self._session.exchange(places)
        except BaseException:
            if not self._session.closed:
                self._session._command("release", places)
            raise
        self._shared.update(places if tensor.shared else ())
        self._zeros.update(places)

    def forget(self, tensor: MeshTensor) -> None:
        places = self._places(tensor)
        self._zeros.difference_update(places)
        self._drop([place for place in places if place in self._current])
        super().forget(tensor)

    def outdate(self) -> None:
        super().outdate()
        self._zeros.clear()

    def push(self) -> None:
        super().push()
        # Without an array over it, a copy is only memory.
        self._drop([place for place in self._current if place not in self._views])

    def _fetch(self, places: Sequence[Place]) -> None:
        for place in places:
            if place not in self._current:
                self._session.arena.take(place.offset, place.nbytes)
        self._current.update(self._zeros.intersection(places))  # the hole in the arena was zeros too
        super()._fetch(places)

    def _drop(self, places: Sequence[Place]) -> None:
        for place in places:
            self._current.discard(place)
            self._session.arena.drop(place.offset, place.nbytes)


def _received(connection: socket.socket) -> int:
    """The descriptor that comes next."""
    _, descriptors, *_ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise WorkerError("a worker handed out no memory")
    return descriptors[0]


def _left(connection: socket.socket) -> list[int]:
    """The descriptors that have come, and that nobody took."""
    found: list[int] = []
    connection.setblocking(False)  # recv_fds of Python 3.11 leaves its flags out
    with contextlib.suppress(BlockingIOError):
        while descriptors := socket.recv_fds(connection, 1, 1)[1]:
            found += descriptors
    connection.setblocking(True)
    return found


def make_device(maker: str, device: Mapping[str, Any], size: int) -> Device:
    """Make a worker's device of what it is told, and the bytes of its range of addresses; see `DiscreteSession`."""
    home, _, function = maker.partition(":")
    make: Callable[..., Device] = getattr(import_module(home), function)
    return make(device, size)


def _work(worker: Worker, connection: socket.socket) -> None:
    """Be a worker: do what comes, until the controller closes its end."""
    worker.slabs.connection = connection
    # A controller that is gone, or closed its end before it read all, resets the connection.
    with connection, contextlib.suppress(ConnectionError):
        while True:
            message, descriptors, *_ = socket.recv_fds(connection, _MESSAGE, 1)
            worker.slabs.received += descriptors
            if message == _ENDS:
                break
            if not descriptors:
                sequence, _, command = message.decode().partition(" ")
                attend(worker, int(sequence), command)
    worker.close()


def serve(
    descriptors: Sequence[int],
    rank: int,
    axes: dict[str, int],
    memory: int,
    page: int,
    timeout: float,
    cores: list[int],
    maker: str,
    device: dict[str, Any],
    neighbours: list[list[int]],
) -> None:
    """Be worker `rank` of a launch, alone in this process, until the controller closes it.

    Parameters
    ----------
    descriptors : sequence of int
        The arena's file, the socket, and the one for standard error, if there is any, once this worker is up.
    axes : dict
        The mesh.
    memory, page : int
        The size of the arena and of its pages, in bytes.
    timeout : float
        Seconds to wait at a barrier.
    cores : list of int
        The cores that the launch may use.
    maker, device
        What makes the device, and what it is told.
    neighbours : list of list of int
        The workers whose devices see each other's memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's
    os.sched_setaffinity(0, cores)
    shared, connection, *errors = descriptors
    arena = Arena(shared, memory, page)
    site = Site(Mesh(axes), arena, timeout, cores, neighbours=neighbours)
    worker = Worker(site, rank, make_device(maker, device, memory))
    speak(errors)
    _work(worker, socket.socket(fileno=connection))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # there is nothing to save, and taking the compiler down takes longer than the rest of closing
