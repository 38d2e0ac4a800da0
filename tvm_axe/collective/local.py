"""The engines of one machine: each worker a process, or each a thread of the controller.

A `LocalSession` sends a command through Disco and then watches the control block, never Disco: a call in C++ could
neither be interrupted nor notice that a worker died. It also keeps both ends of every pipe open, because Disco ends the
controller when it writes to a pipe that nobody reads.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
from typing import Any

from tvm_axe import _tvm
from tvm_axe.collective.arena import limited
from tvm_axe.collective.calls import WORKERS
from tvm_axe.collective.engine import Engine
from tvm_axe.collective.forked import Forked
from tvm_axe.collective.session import CORES, GRACE, Session
from tvm_axe.collective.site import Site
from tvm_axe.collective.sync import Control
from tvm_axe.collective.worker import Worker
from tvm_axe.errors import WorkerError
from tvm_axe.layout import Mesh

_ENTRY = "tvm_axe.collective.serving:serve"
_OPENING = 30.0  # seconds at most; opening a session takes milliseconds, and a loaded machine some more


class LocalSession(Session):
    """The workers of one launch, all on this machine.

    Parameters
    ----------
    mesh : Mesh
        One worker for each of its devices.
    timeout : float
        Seconds that a worker may be behind another.
    alone : bool
        Whether each worker but worker 0 is a process, or all are threads of this one.
    """

    def __init__(self, mesh: Mesh, timeout: float, alone: bool) -> None:
        super().__init__(mesh, timeout)
        self._launch = secrets.token_hex(8)
        self._forked = Forked()
        self._descriptors: list[int] = []
        self._disco: _tvm.DiscoSession | None = None
        self._opener: threading.Thread | None = None
        self._site = Site(mesh, self.arena, timeout, CORES, alone=alone)
        self._control = self._site.control
        self._local = [0] if alone else list(range(mesh.size))

    def start(self) -> None:
        """Start the workers.

        Raises
        ------
        WorkerError
            If one didn't start; then none is left.
        """
        try:
            # The first allocation, so at offset 0, where Control looks.
            self.arena.allocate(Control.nbytes(self._mesh.size))
            for rank in self._local:
                WORKERS[self._launch, rank] = Worker(self._site, rank)
            pipes = [self._fork(rank) for rank in range(1, self._mesh.size)] if self._site.alone else None
            # In a thread of its own, because Ctrl-C raises in the main thread only: an exception in Disco's callback
            # would leave a half-made session, whose destructor never returns.
            self._opener = threading.Thread(target=self._open, args=(pipes,), daemon=True)
            self._opener.start()
            limit = min(self._timeout, _OPENING)
            self._opener.join(limit)
            if self._opener.is_alive():
                # Where a thread can't be made Disco throws, and then waits in vain for those that it has made.
                self._opener = None
                raise WorkerError(
                    f"launch: {self._mesh.size} workers did not start within {limit:g} s; "
                    "if a thread had no memory, raise the limit of the address space (ulimit -v)"
                )
            if self._disco is None:
                raise WorkerError(f"Disco could not open a session of {self._mesh.size} workers")
            self.run("start")
            self._forked.started()
        except OSError as error:
            self.close(force=True)
            raise limited(f"launch: {self._mesh.size} workers did not start", error) from error
        except BaseException:
            self.close(force=True)
            raise

    def _open(self, pipes: list[tuple[int, int]] | None) -> None:
        self._disco = _tvm.DiscoSession(self._mesh.size, pipes)

    def _fork(self, rank: int) -> tuple[int, int]:
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
        try:
            self._forked.start(rank, _ENTRY, arguments, [self.arena.fd, worker_read, worker_write])
        except OSError as error:
            raise limited(f"{self._name([rank])} did not start", error) from error
        return from_worker, to_worker

    def _pipe(self) -> tuple[int, int]:
        pipe = os.pipe()
        self._descriptors += pipe
        return pipe

    def _send(self, command: str) -> None:
        assert self._disco is not None  # closed if it isn't open
        self._disco.send(self._launch, self._sequence, command)

    def _check_alive(self) -> None:
        dead = self._forked.dead()
        if dead is not None:
            raise WorkerError(f"{self._name([dead[0]])} {dead[1]}")

    def _place(self, rank: int) -> str:
        if rank in self._local:
            return "a thread of this process"
        pid = self._forked.pid(rank)
        return "no process yet" if pid is None else f"pid {pid}"

    def _close(self, force: bool) -> None:
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._pid:  # a child that was forked: the workers are its parent's
            if self._disco is not None:
                self._disco.leak()
            return
        try:
            if force:
                self._forked.kill()
            if self._opener is not None and self._opener.ident is not None:
                self._opener.join()
            self._end_disco()
        finally:
            self._forked.end(0 if force else GRACE)

    def _end_disco(self) -> None:
        """End the workers that are threads, and tell the others to end; what a thread is stuck in is never freed."""
        if self._disco is not None:
            if not self._threads_idle(self._local):
                self._disco.leak()
                atexit.register(self._settle, self._disco)
                return
            self._disco.close(self._local)
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


class LocalEngine(Engine):
    """The workers are on this machine.

    Parameters
    ----------
    name : str
        What it is registered by.
    alone : bool
        Whether each worker but worker 0 is a process, or all are threads of this one.
    """

    def __init__(self, name: str, alone: bool) -> None:
        self.name = name
        self._alone = alone

    def launch(self, mesh: Mesh, timeout: float, **options: Any) -> LocalSession:
        self.options(options)
        session = LocalSession(mesh, timeout, self._alone)
        session.start()
        return session


PROCESSES = LocalEngine("processes", alone=True)
THREADS = LocalEngine("threads", alone=False)
