"""The workers of one launch as the controller holds them: their memory, processes and session, and their faults.

An `Engine` sends commands and watches the control block for the answers; how the workers are started, told and ended is
up to `LocalEngine`, for the workers of one machine, and `mpi.MpiEngine`, for the ranks of an MPI job.

`LocalEngine` sends a command through Disco and then watches the control block, never Disco: a call in C++ could neither
be interrupted nor notice that a worker died. It also keeps both ends of every pipe open, because Disco ends the
controller when it writes to a pipe that nobody reads.

What is promised when something goes wrong: an error that names the worker, within a second of a death and within
`timeout` of a hang; no process and no shared memory left behind. A worker that answered with an error is still usable,
and so are the others; after a death, a hang or Ctrl-C they are all closed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvm_axe import _tvm, processes
from tvm_axe.collective.arena import Arena
from tvm_axe.collective.sync import ABORTED, DONE, LATE, Control
from tvm_axe.collective.worker import WORKERS, Site, Worker
from tvm_axe.errors import WorkerError
from tvm_axe.layout import Mesh

if TYPE_CHECKING:
    from tvm_axe.collective.mirror import Mirror

ENGINES = ("processes", "threads", "mpi")
STARTUP = 60.0  # seconds; the least that is allowed for starting and for compiling, where workers share the cores
GRACE = 2.0  # seconds that workers may take to come out of a command that was called off, or to end when asked to

# Taken before anything runs a kernel: upstream then binds the main thread, and what it starts, to some of the cores.
CORES = tuple(sorted(os.sched_getaffinity(0)))

_ENTRY = "tvm_axe.collective.worker:serve"
# numpy's own threads would compete with those that the kernels use; and a process with threads can't be forked.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Engine(ABC):
    """The workers of one launch, started; `run` has all of them do a command.

    Parameters
    ----------
    mesh : Mesh
        One worker for each of its devices.
    timeout : float
        Seconds that a worker may be behind another.

    Attributes
    ----------
    arena : Arena
        The memory that the workers of this machine share.
    closed : bool
        Whether the workers have gone.
    mirror : Mirror or None
        What keeps the controller's copies of slabs on other machines up to date, if there are any.
    """

    mirror: Mirror | None = None

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self._mesh = mesh
        self._timeout = timeout
        self._sequence = 0
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self.closed = False
        self.arena = Arena.create()
        self._control: Control

    def spans_hosts(self, axis: str) -> bool:
        """Whether workers along a mesh axis are on several machines, so that no kernel can index all of their slabs."""
        return False

    def run(self, *command: Any) -> None:
        """Have every worker do a command and wait until all have.

        Raises
        ------
        WorkerError
            If a worker failed, died or fell behind, or if the workers are closed.
        """
        with self._busy:
            if self.closed:
                raise WorkerError("the workers are closed; launch new ones")
            try:
                self._check_alive()
                self._reset()
                self._sequence = (self._sequence + 1) & 0xFFFFFFFF
                self._send(json.dumps(command))
                self._wait(max(self._timeout, STARTUP) if command[0] in ("start", "load") else self._timeout)
            except BaseException:
                self._close(force=True)
                raise
            failures = self._failures()
            if failures:
                raise WorkerError(failures)

    def _wait(self, timeout: float) -> None:
        """Wait for the answers to the last command; raises for a worker that died or fell behind."""
        answered = failed = None  # when a worker was first seen to have answered, and to have failed
        for rank in range(self._mesh.size):
            while not self._control.finished(rank, self._sequence):
                self._await(rank)
                self._check_alive()
                behind = self._behind()
                now = time.monotonic()
                if len(behind) < self._mesh.size:
                    answered = answered or now
                    outcomes = [self._control.answer(r)[0] for r in range(self._mesh.size) if r not in behind]
                    if failed is None and any(outcome != DONE for outcome in outcomes):
                        failed = now
                        self._call_off()
                if failed is not None:  # the others are being called off
                    if now > failed + GRACE:
                        late = f"{self._name(behind)} did not come back within {GRACE:g} s"
                        raise WorkerError(f"{self._failures()}\n{late}")
                elif answered is not None and now > answered + timeout:
                    raise WorkerError(f"{self._name(behind)} did not answer within {timeout:g} s of another worker")

    def _behind(self) -> list[int]:
        return self._control.unfinished(range(self._mesh.size), self._sequence)

    def _reset(self) -> None:
        """Make the control block ready for a new command."""
        self._control.reset()

    def _await(self, rank: int) -> None:
        """Wait a little for worker `rank` to answer the last command."""
        self._control.await_finish(rank, self._sequence)

    def _call_off(self) -> None:
        """Have the workers leave the last command, as one has failed; also called when they leave already."""
        self._control.abort()

    @abstractmethod
    def _send(self, command: str) -> None:
        """Tell every worker the command that has the number `_sequence`."""

    @abstractmethod
    def _check_alive(self) -> None:
        """Raise `WorkerError` if a worker is dead."""

    @abstractmethod
    def _place(self, rank: int) -> str:
        """Say where worker `rank` runs."""

    @abstractmethod
    def _close(self, force: bool) -> None:
        """End the workers, unless that is done already."""

    def _failures(self) -> str:
        """Say what the workers that answered the last command have to complain about, or nothing."""
        failed: list[tuple[int, str]] = []
        missing: set[int] = set()
        waiting = set()  # those that waited for others themselves
        for rank in range(self._mesh.size):
            if not self._control.finished(rank, self._sequence):
                continue
            outcome, text = self._control.answer(rank)
            if outcome in (LATE, ABORTED):
                others = json.loads(text)
                missing |= set(others if outcome == LATE else ())
                waiting |= {rank} if others else set()
            elif outcome != DONE:
                failed.append((rank, text.strip()))
        if failed:
            also = f" (and {self._name([rank for rank, _ in failed[1:]])})" if failed[1:] else ""
            return f"{self._name([failed[0][0]])}{also} failed:\n{failed[0][1]}"
        if missing:
            late = self._name(sorted(missing - waiting or missing))
            return f"{late} did not arrive at a barrier within {self._timeout:g} s"
        return ""

    def _name(self, ranks: Sequence[int]) -> str:
        names = []
        for rank in ranks:
            coords = ", ".join(f"{axis}={at}" for axis, at in self._mesh.coords(rank).items())
            names.append(f"worker {rank} ({coords}; {self._place(rank)})")
        return ", ".join(names)

    def close(self, force: bool = False) -> None:
        """End the workers and give everything back; `force` doesn't wait for what they are doing."""
        with self._busy:
            self._close(force)

    def _threads_idle(self, ranks: Sequence[int]) -> bool:
        """Whether `ranks`, threads of this process, are out of their commands; calls them off and waits a little."""
        self._control.abort()
        deadline = time.monotonic() + GRACE
        for rank in ranks:
            while not self._control.finished(rank, self._sequence):
                if time.monotonic() > deadline:
                    return False
                self._control.await_finish(rank, self._sequence)
        return True


class LocalEngine(Engine):
    """The workers of one launch, all on this machine.

    Parameters
    ----------
    mesh : Mesh
        One worker for each of its devices.
    kind : str
        "processes" or "threads".
    timeout : float
        Seconds that a worker may be behind another.

    Raises
    ------
    WorkerError
        If a worker didn't start.
    """

    def __init__(self, mesh: Mesh, kind: str, timeout: float) -> None:
        super().__init__(mesh, timeout)
        self._launch = secrets.token_hex(8)
        self._processes: dict[int, processes.Process] = {}
        self._descriptors: list[int] = []
        self._session: _tvm.DiscoSession | None = None
        self._opener: threading.Thread | None = None
        site = Site(mesh, self.arena, timeout, CORES, alone=kind == "processes")
        self._control = site.control
        self._local = [0] if kind == "processes" else list(range(mesh.size))
        try:
            self.arena.allocate(Control.nbytes(mesh.size))  # the first allocation, so at offset 0, where Control looks
            for rank in self._local:
                WORKERS[self._launch, rank] = Worker(site, rank)
            pipes = [self._start(rank) for rank in range(1, mesh.size)] if kind == "processes" else None
            # In a thread of its own, because Ctrl-C raises in the main thread only: an exception in Disco's callback
            # would leave a half-made session, whose destructor never returns.
            self._opener = threading.Thread(target=self._open, args=(pipes,))
            self._opener.start()
            self._opener.join()
            if self._session is None:
                raise WorkerError(f"Disco could not open a session of {mesh.size} workers")
            self.run("start")
        except BaseException:
            self.close(force=True)
            raise

    def _open(self, pipes: list[tuple[int, int]] | None) -> None:
        self._session = _tvm.DiscoSession(self._mesh.size, pipes)

    def _start(self, rank: int) -> tuple[int, int]:
        """Start the process of worker `rank`; returns the descriptors to read from and to write to it."""
        from_worker, worker_write = self._pipe()
        worker_read, to_worker = self._pipe()
        arguments = {
            "launch": self._launch,
            "rank": rank,
            "axes": dict(self._mesh.axes),
            "memory": self.arena.size,
            "timeout": self._timeout,
            "cores": CORES,
        }
        descriptors = self.arena.fd, worker_read, worker_write
        try:
            self._processes[rank] = processes.start(_ENTRY, arguments, descriptors, _ENVIRONMENT)
        except OSError as error:
            raise WorkerError(f"{self._name([rank])} did not start: {error}") from error
        return from_worker, to_worker

    def _pipe(self) -> tuple[int, int]:
        pipe = os.pipe()
        self._descriptors += pipe
        return pipe

    def _send(self, command: str) -> None:
        assert self._session is not None  # closed if it isn't open
        self._session.send(self._launch, self._sequence, command)

    def _check_alive(self) -> None:
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
                raise WorkerError(f"{self._name([rank])} {how}")

    def _place(self, rank: int) -> str:
        if rank in self._local:
            return "a thread of this process"
        process = self._processes.get(rank)
        return f"pid {process.pid}" if process else "no process yet"

    def _close(self, force: bool) -> None:
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._pid:  # a child that was forked: the workers are its parent's
            if self._session is not None:
                self._session.leak()
            return
        try:
            if force:
                for process in self._processes.values():
                    process.kill()
            if self._opener is not None and self._opener.ident is not None:
                self._opener.join()
            self._end_session()
        finally:
            deadline = time.monotonic() + (0 if force else GRACE)
            for process in self._processes.values():
                with contextlib.suppress(TimeoutError):
                    process.wait(max(0, deadline - time.monotonic()))
                process.kill()
                process.wait()

    def _end_session(self) -> None:
        """End the workers that are threads, and tell the others to end; what a thread is stuck in is never freed."""
        if self._session is not None:
            if not self._threads_idle(self._local):
                self._session.leak()
                atexit.register(self._settle, self._session)
                return
            self._session.close(self._local)
        for rank in self._local:
            WORKERS.pop((self._launch, rank), None)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._control.close()
        self.arena.close()

    def _settle(self, session: _tvm.DiscoSession) -> None:
        """Before Python shuts down, give the threads that were left alone a last chance to come out.

        One that returns to Python while it shuts down is ended by an exception, which C++ makes the end of the process.
        """
        if self._threads_idle(self._local):
            session.sync(self._local)
