"""The workers of one launch as the ranks of a job, on one machine or on many.

Rank 0 is the controller, with worker 0 as a thread; every other rank is a worker. Workers of one machine share an arena
that its first rank has made and the others have opened through /proc, and meet at the same control block as the engine
`processes`; commands come by messages instead of a pipe. With workers on several machines, each has an arena of its own
in which everything has the same offset:

- a barrier is one within each machine, and then one across (`Across.arrive` and `wait`);
- a collective along an axis of several machines is done by messages, and the view of a tensor along it has the own slab
  only: each worker for itself (`Across.collective`), or, where a machine has several along that axis (`crowded_axes`),
  in rounds (`Staging`), in which machines move between them what they would as single workers;
- the answers of other machines' workers are messages, which the controller writes into its control block, and so is the
  word that calls a command off;
- the controller's view of other machines' slabs is a copy (`Mirror`).

After a fault the job can only end: a rank that is gone can't be replaced.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from tvm_axe.collective.across import check_rounds, crowded_axes, spanning_axes
from tvm_axe.collective.arena import PAGE, Arena
from tvm_axe.collective.calls import attend
from tvm_axe.collective.device import Device
from tvm_axe.collective.discrete import DeviceMirror, Exchanging, make_device
from tvm_axe.collective.job import ABORT, ANSWER, CLOSE, COMMAND, DO, END, LAUNCH, MEMORY, Job, join
from tvm_axe.collective.messages import Messages, Nap
from tvm_axe.collective.mirror import Mirror, Place
from tvm_axe.collective.session import CORES, GRACE, STARTUP
from tvm_axe.collective.site import Site
from tvm_axe.collective.staging import BUFFER
from tvm_axe.collective.sync import FAILED, SLICE, Control
from tvm_axe.collective.tensor import ALL, MeshTensor
from tvm_axe.collective.worker import Worker
from tvm_axe.errors import WorkerError
from tvm_axe.layout import Mesh

_IDLE = 5e-3  # seconds; the longest nap between looks for a command
_MEETING = 5.0  # seconds; the least that ranks may be apart when they launch: each has imported the compiler by itself


class Devices(NamedTuple):
    """What ranks compute on, if not on their cores.

    Attributes
    ----------
    maker : str
        What makes a rank's `Device`, as ``module:function`` of one of `told` and the bytes of its range of addresses.
    told : sequence of mapping
        What it is told for each rank, that JSON can hold.
    size, page : int
        Bytes of the range, and of the arena; bytes that the devices' memory comes in.
    neighbours : sequence of sequence of int
        The ranks whose devices see each other's memory, of one host each.
    meets : int, optional
        See `DiscreteSession`.
    axes : sequence of str
        The axes along which devices have a communicator; along others that are apart, hosts' memory is between them.
    unique : callable, optional
        What makes the bytes that a communicator is made of.
    """

    maker: str
    told: Sequence[Mapping[str, Any]]
    size: int
    page: int
    neighbours: Sequence[Sequence[int]]
    meets: int | None = None
    axes: Sequence[str] = ()
    unique: Callable[[], bytes] | None = None


class RankedSession(Exchanging):
    """The workers of one launch, as rank 0 of their job holds them.

    Parameters
    ----------
    mesh : Mesh
        One worker for each of its devices.
    timeout : float
        Seconds that a worker may be behind another.
    job : Job
        The job that this process is rank 0 of.
    devices : Devices, optional
        What the ranks compute on; their cores if left out.
    """

    def __init__(self, mesh: Mesh, timeout: float, job: Job, devices: Devices | None = None) -> None:
        super().__init__(mesh, timeout, None if devices is None else Arena.create(devices.size, devices.page))
        self._job, self._devices = job, devices
        self.connected = frozenset(() if devices is None else devices.axes)
        self._far = frozenset(range(mesh.size)).difference(job.host)
        self._axes = spanning_axes(mesh, job.hosts if devices is None else devices.neighbours)
        self._failed = False
        self._nap = Nap()
        self._work: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._site = _site(mesh, self.arena, timeout, job, devices)
        self._control = self._site.control

    def start(self) -> None:
        """Have the ranks be workers of this launch.

        Raises
        ------
        WorkerError
            If one didn't start, or the job has lost ranks.
        """
        self._job.claim(self.close)
        size = self._mesh.size
        try:
            self.arena.allocate(Control.nbytes(size))  # the first allocation, so at offset 0, where Control looks
            commands = self._job.commands
            launch = {
                "axes": dict(self._mesh.axes),
                "timeout": self._timeout,
                "size": self.arena.size,
                "commands": commands,
                "devices": None if self._devices is None else self._devices._replace(unique=None),
            }
            for rank in range(1, size):
                self._job.send(rank, COMMAND, [LAUNCH, launch])
            _lend(self._job, self.arena)
            # Ends with the process, if it doesn't come out of a command before.
            worker = Worker(self._site, 0, _device(self._devices, 0))
            threading.Thread(target=_work, args=(worker, self._work), daemon=True).start()
            self._command("start")
            if self._devices is not None:
                self._use(self._devices)
            elif self._far:
                self.mirror = Mirror(self._command, self._job.hosts)
                self._stage(crowded_axes(self._mesh, self._job.hosts))
        except BaseException:
            self.close(force=True)
            raise

    def _use(self, devices: Devices) -> None:
        """Have the devices be there for each other, and their slabs for the host."""
        self.mirror = DeviceMirror(self)
        if self._far:
            self.messages = Mirror(self._command_of_hosts, self._job.hosts)
        self._command("greet", secrets.token_hex(8))
        if devices.meets is not None:
            self._words = MeshTensor(self.arena, self._mesh, (devices.meets,), "int32", False, self.mirror)
            self._command("meet", self._words.encode(ALL))
        if devices.unique is not None:
            self._command("connect", devices.unique().hex(), sorted(self.connected))
        staged = self._axes.difference(self.connected)
        check_rounds(self._mesh, staged, self._job.hosts)
        self._stage(staged)

    def _stage(self, axes: Collection[str]) -> None:
        """Have collectives along these axes go in rounds through buffers, one for each worker."""
        if axes:
            # Cores need none of other hosts' workers; devices register all of it, which must be there.
            offset = self.arena.allocate(self._mesh.size * BUFFER, take=self._devices is not None)
            self._command("stage", offset, sorted(axes))

    def _command_of_hosts(self, name: str, *arguments: Any) -> None:
        """What is asked of slabs, asked of what hosts have of them."""
        self._command({"reserve": "take", "release": "drop", "move": "carry"}[name], *arguments)

    def exchange(self, places: Sequence[Place]) -> None:
        """Have the ranks get memory for slabs, and see their neighbours'."""
        self._command("reserve", places)
        self._command("share", places)

    def is_apart(self, axis: str) -> bool:
        return axis in self._axes

    def _command(self, *command: Any) -> None:
        if (self._far or self._devices) and self._failed and not self.closed:
            self._failed = False
            super()._command("settle")
        self._failed = True
        super()._command(*command)
        self._failed = False

    def _send(self, command: str) -> None:
        self._nap = Nap()
        for rank in range(1, self._mesh.size):
            self._job.send(rank, COMMAND, [DO, self._sequence, command])
        self._work.put((self._sequence, command))

    def _reset(self) -> None:
        # No worker of another machine can be seen to be out of its barrier, so there each forgets its own (`settle`).
        if not self._far:
            super()._reset()

    def _await(self, rank: int) -> None:
        if rank in self._far:
            self._nap.take()
        else:
            super()._await(rank)

    def _call_off(self) -> None:
        super()._call_off()
        for rank in self._far:
            self._job.send(rank, ABORT, self._job.commands + self._sequence)

    def _check_alive(self) -> None:
        while (answer := self._job.receive(ANSWER)) is not None:
            rank, (sequence, outcome, text) = answer
            self._control.finish(rank, sequence, outcome, text)
        gone = self._job.dead()
        if gone:
            self._job.lost |= dict.fromkeys(gone, "has ended")
            raise WorkerError(f"{self._name(gone)} has ended")

    def _place(self, rank: int) -> str:
        where = self._job.ranks[rank]
        name = None if self._devices is None else self._devices.told[rank].get("name")
        return f"rank {rank}{'' if name is None else f', {name}'}, pid {where.pid} on {where.node}"

    def _close(self, force: bool) -> None:
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._pid:  # a child that was forked: the workers are its parent's
            return
        idle = self._threads_idle([0])
        if force:
            self._recall()
        for rank in range(1, self._mesh.size):
            self._job.send(rank, COMMAND, [CLOSE])
        self._work.put(None)
        self._job.release(self._sequence)
        if idle:  # else its thread still uses the memory
            self._control.close()
            self.arena.close()
        else:
            self._job.lost[0] = "is still in a command"

    def _recall(self) -> None:
        """Have the workers leave the command that they are in; the job loses those that don't."""
        self._call_off()
        deadline = time.monotonic() + GRACE
        while (behind := set(self._behind()).difference(self._job.lost)) and time.monotonic() < deadline:
            with contextlib.suppress(WorkerError):
                self._check_alive()
            time.sleep(SLICE / 10)
        self._job.lost |= {rank: "did not come back from a command" for rank in behind if rank}


def _work(worker: Worker, commands: queue.SimpleQueue[tuple[int, str] | None]) -> None:
    """Be worker 0."""
    while (command := commands.get()) is not None:
        attend(worker, *command)
    worker.close()


def _site(mesh: Mesh, arena: Arena, timeout: float, job: Job, devices: Devices | None) -> Site:
    return Site(mesh, arena, timeout, CORES, job, neighbours=None if devices is None else devices.neighbours)


def _device(devices: Devices | None, rank: int) -> Device | None:
    return None if devices is None else make_device(devices.maker, devices.told[rank], devices.size)


def serve(job: Job) -> NoReturn:
    """Be a worker of rank 0's launches, one after the other, until its process ends; then end this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's
    watch = _Watch(job)
    launched: tuple[Site, Worker] | None = None
    while True:
        kind, *content = job.await_message(COMMAND, 0, longest=_IDLE)
        if kind == END:
            watch.stop()
            job.leave()
        if kind == LAUNCH:
            try:
                site, devices = _join_launch(job, **content[0])
                launched = site, Worker(site, job.rank, _device(devices, job.rank))
            except Exception as error:
                job.send(0, ANSWER, [1, FAILED, "".join(traceback.format_exception(error))])
        elif launched is not None:
            site, worker = launched
            if kind == CLOSE:
                worker.close()
                site.control.close()
                site.arena.close()
                launched = None
            else:
                sequence, command = content
                with watch.over(job.commands + sequence, site.control):
                    attend(worker, sequence, command)
                if 0 not in job.host:
                    job.send(0, ANSWER, [sequence, *site.control.answer(job.rank)])


def _join_launch(
    job: Job, axes: dict[str, int], timeout: float, size: int, commands: int, devices: list[Any] | None
) -> tuple[Site, Devices | None]:
    """Make or open the arena of this machine, for a launch of rank 0's."""
    job.commands = commands
    given = None if devices is None else Devices(*devices)
    page = PAGE if given is None else given.page
    if job.rank == job.host[0]:
        arena = Arena.create(size, page)
        arena.allocate(Control.nbytes(Mesh(axes).size))
        _lend(job, arena)
    else:
        lent = job.await_message(MEMORY, job.host[0], STARTUP)
        if lent is None:
            raise WorkerError(f"rank {job.host[0]} made no shared memory within {STARTUP:g} s")
        pid, descriptor = lent
        arena = Arena(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), size, page)
    return _site(Mesh(axes), arena, timeout, job, given), given


def _lend(job: Job, arena: Arena) -> None:
    """Tell the other ranks of this machine where its arena is open; it has no name that they could find it by."""
    for rank in job.host[1:]:
        job.send(rank, MEMORY, [os.getpid(), arena.fd])


class _Watch:
    """A thread of a serving rank: ends the process when rank 0 is gone, and takes its word that a command is off.

    Its looks also keep messages by MPI moving while the worker computes.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._current: tuple[int, Control] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def over(self, number: int, control: Control) -> Iterator[None]:
        """Watch over the command that the worker is in."""
        with self._lock:
            self._current = number, control
        try:
            yield
        finally:
            with self._lock:
                self._current = None

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopped.wait(SLICE):
            if self._job.dead():
                os._exit(1)
            while (order := self._job.receive(ABORT, 0)) is not None:
                with self._lock:
                    if self._current is not None and self._current[0] == order[1]:
                        self._current[1].abort()


def launch(
    begin: Callable[[float], Messages],
    mesh: Mesh,
    timeout: float,
    devices: Callable[[Job], Devices] | None = None,
) -> RankedSession:
    """Launch workers as rank 0 of the job; on another rank, serve rank 0's launches and never return.

    The ranks compute on the devices that `devices` says on rank 0, or on their cores. For errors see `Engine.launch`.
    """
    job = join(begin, mesh, max(timeout, _MEETING), CORES)
    if job.rank:
        serve(job)
    session = RankedSession(mesh, timeout, job, None if devices is None else devices(job))
    session.start()
    return session
