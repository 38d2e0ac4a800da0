"""The workers of one launch as the controller holds them: their memory, their commands and their faults.

A `Session` sends commands and watches the control block for the answers; how the workers are started, told and ended is
up to the engine's own kind of session: `local.LocalSession` for the workers of one machine, `mpi.MpiSession` for the
ranks of an MPI job.

What is promised when something goes wrong: an error that names the worker, within a second of a death and within
`timeout` of a hang; no process and no shared memory left behind. A worker that answered with an error is still usable,
and so are the others; after a death, a hang or Ctrl-C they are all closed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvm_axe.collective.arena import Arena
from tvm_axe.collective.sync import ABORTED, DONE, LATE, LOST, Control
from tvm_axe.errors import WorkerError
from tvm_axe.interrupts import uninterrupted
from tvm_axe.layout import Mesh

if TYPE_CHECKING:
    from tvm_axe.collective.choice import Table
    from tvm_axe.collective.mirror import Mirror

STARTUP = 60.0  # seconds; the least that is allowed for starting and for compiling, where workers share the cores
_READS = (
    "load",
    "unload",
    "bind",
    "unbind",
    "drop",
)  # the commands that write to no slab, of those that `Workers` gives
GRACE = 2.0  # seconds that workers may take to come out of a command that was called off, or to end when asked to

# Taken before anything runs a kernel: upstream then binds the main thread, and what it starts, to some of the cores.
CORES = tuple(sorted(os.sched_getaffinity(0)))


class Session(ABC):
    """The workers of one launch; `start` starts them, and `run` has all of them do a command.

    Parameters
    ----------
    mesh : Mesh
        One worker for each of its devices.
    timeout : float
        Seconds that a worker may be behind another.
    arena : Arena, optional
        What to use for the memory; a new one if left out.

    Attributes
    ----------
    arena : Arena
        The memory that the workers of this machine share.
    closed : bool
        Whether the workers have gone.
    table : Table or None
        Which algorithms collectives take, where there is a choice.
    shares_context : bool
        Whether a GPU is that of several workers of one process, in which a kernel's first launch waits for those that
        run.
    mirror : Mirror or None
        What keeps the controller's copies of slabs on other machines up to date, if there are any.
    connected : frozenset of str
        The mesh axes along which devices have a communicator.
    messages : Mirror or None
        The same for what hosts tell each other, if `mirror` keeps copies of devices' memory.
    """

    mirror: Mirror | None = None
    messages: Mirror | None = None
    connected: frozenset[str] = frozenset()
    table: Table | None = None
    shares_context: bool = False

    def __init__(self, mesh: Mesh, timeout: float, arena: Arena | None = None) -> None:
        self._mesh = mesh
        self._timeout = timeout
        self._sequence = 0
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self.closed = False
        self.arena = Arena.create() if arena is None else arena
        self._control: Control

    def way(self, axis: str) -> str:
        """Say how collectives along a mesh axis go, if not by the table."""
        if axis in self.connected:
            return "by NCCL" + (", as devices don't see each other's memory" if self.is_apart(axis) else "")
        return "through the host's memory, in rounds, as devices don't see each other's" if self.is_apart(axis) else ""

    def is_apart(self, axis: str) -> bool:
        """Whether there are devices along a mesh axis that don't see each other's memory, so that no kernel can."""
        return False

    def run(self, *command: Any) -> None:
        """Have every worker do a command and wait until all have.

        Raises
        ------
        WorkerError
            If a worker failed, died or fell behind, or if the workers are closed.
        """
        mirrors = [mirror for mirror in (self.mirror, self.messages) if mirror is not None]
        for mirror in mirrors:
            mirror.push()
        try:
            self._command(*command)
        except BaseException:
            for mirror in mirrors:
                mirror.outdate()
            raise
        if command[0] not in _READS:
            for mirror in mirrors:
                mirror.pull()

    def _command(self, *command: Any) -> None:
        """The same, with copies of slabs as they are."""
        with self._busy:
            if self.closed:
                raise WorkerError("the workers are closed; launch new ones")
            try:
                self._check_alive()
                self._reset()
                self._sequence = (self._sequence + 1) & 0xFFFFFFFF
                self._send(json.dumps(command))
                self._wait(max(self._timeout, STARTUP) if command[0] in ("start", "load", "connect") else self._timeout)
            except BaseException:
                with uninterrupted():
                    self._close(force=True)
                raise
            if self._control.all_done():
                return
            failures = self._failures()
            if any(self._control.answer(rank)[0] == LOST for rank in range(self._mesh.size)):
                with uninterrupted():
                    self._close(force=True)
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
        """End the workers, unless that is done already; within seconds, as Ctrl-C is held back meanwhile."""

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
        with self._busy, uninterrupted():
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
