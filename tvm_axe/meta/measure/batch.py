"""Candidates on their way through the processes of a `Runner`: who builds what, and who may run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import tvm
from tvm.ir import IRModule

from tvm_axe.errors import TuneError
from tvm_axe.meta.measure.child import Child
from tvm_axe.meta.measure.protocol import BUILD, PREPARE, RUN, Measurement, Prepared

__all__ = ["START_SECONDS", "Batch", "Function", "Limits", "Slot"]

START_SECONDS = 120.0  # importing the compiler on a busy machine, and running an untuned function
_AHEAD = 4  # candidates that a process has built and not run
_STARTS = 3  # processes in a row that can't be prepared, before that is taken to be for good


@dataclass(frozen=True)
class Function:
    """A function that was prepared: what a process must be told to measure candidates of it."""

    digest: str
    mod: str
    target: str
    builder: str
    descriptor: int
    exchange: Path
    prepared: Prepared

    @property
    def request(self) -> tuple[Any, ...]:
        """What prepares another process for it."""
        return PREPARE, self.mod, self.target, self.builder, self.exchange, self.prepared


@dataclass(frozen=True)
class Limits:
    """Seconds that building and that running a candidate may take; and whether it must be quiet while one runs."""

    build: float
    run: float
    quiet: bool


class Slot:
    """A process, what it holds and what it is doing."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.digest = ""  # of the function that it is prepared for
        self.held: deque[int] = deque()  # candidates that are built, and not run
        self.doing: tuple[str, int] | None = None
        self.limit = self.deadline = 0.0

    def start(self, request: tuple[Any, ...], number: int, limit: float) -> None:
        """Have the process do something."""
        self.child.send(request)
        self.doing, self.limit, self.deadline = (request[0], number), limit, time.monotonic() + limit

    def finish(self) -> tuple[str, Any]:
        """What came of it; for a process that has answered, has died or is late."""
        self.doing = None
        pipe = self.child.connection
        if pipe is not None and not pipe.poll() and time.monotonic() >= self.deadline:
            self.child.close()
            return "error", f"no result within {self.limit:.3g} s"
        return self.child.receive(self.limit)

    def drop(self) -> list[int]:
        """End the process if there is one; gives what it had built."""
        lost = list(self.held)
        self.child.close()
        self.digest, self.doing = "", None
        self.held.clear()
        return lost


class Batch:
    """Candidates of one function that are being measured.

    Invariants, whenever `results` waits or gives one:

    - each candidate is in one place: to do, being built or run by a slot, held by one, done, or given;
    - a slot holds only what its process built, for this function, in the order in which it was built;
    - at most one candidate runs, and where it must be quiet nothing is built or prepared meanwhile;
    - a candidate whose process died was not tried before, or counts as failed.
    """

    def __init__(self, slots: Sequence[Slot], function: Function, limits: Limits, mods: Sequence[IRModule]) -> None:
        self.slots, self.function, self.limits, self.mods = slots, function, limits, mods
        self.todo = deque(range(len(mods)))
        self.done: dict[int, Measurement] = {}
        self._build_seconds: dict[int, float] = {}
        self._tried: set[int] = set()
        self._failed_starts = 0
        self._running = False  # where it must be quiet: whether what was built is run now, and nothing is built

    def results(self) -> Iterator[Measurement]:
        """What became of the candidates, in order."""
        for number in range(len(self.mods)):
            while number not in self.done:
                self._dispatch()
                self._settle()
            yield self.done.pop(number)

    def abandon(self) -> None:
        """End the processes that still do something, or hold something, for candidates that nobody wants any more."""
        for slot in self.slots:
            if slot.doing is not None or slot.held:
                slot.drop()

    def _dispatch(self) -> None:
        """Give the idle processes what may be done now."""
        if not self._running:
            for slot in self.slots:
                self._build_next(slot)
        busy = [slot.doing[0] for slot in self.slots if slot.doing is not None]
        if busy and (self.limits.quiet or RUN in busy):
            return
        ready = [slot for slot in self.slots if slot.held and slot.doing is None]
        self._running = self.limits.quiet and bool(ready)
        if ready:
            slot = min(ready, key=lambda slot: slot.held[0])
            slot.start((RUN, slot.held[0]), slot.held[0], self.limits.run)
        elif not busy:
            for slot in self.slots:
                self._build_next(slot)

    def _build_next(self, slot: Slot) -> None:
        """Have an idle process build a candidate, or prepare for that."""
        if slot.doing is not None or not self.todo or len(slot.held) >= _AHEAD:
            return
        function = self.function
        if slot.digest == function.digest:
            number = self.todo.popleft()
            slot.start((BUILD, number, tvm.ir.save_json(self.mods[number])), number, self.limits.build)
        elif sum(other.doing == (PREPARE, 0) for other in self.slots) < len(self.todo):
            slot.start(function.request, 0, START_SECONDS)

    def _settle(self) -> None:
        """Wait until a process has answered, has died or is late, and see what came of it."""
        busy = [slot for slot in self.slots if slot.doing is not None]
        pipes: list[Connection] = [slot.child.connection for slot in busy if slot.child.connection is not None]
        soonest = min(slot.deadline for slot in busy)
        ready = wait(pipes, max(0.0, soonest - time.monotonic()))
        for slot in busy:
            if slot.child.connection in ready or time.monotonic() >= slot.deadline:
                assert slot.doing is not None
                self._finish(slot, *slot.doing)

    def _finish(self, slot: Slot, kind: str, number: int) -> None:
        started = slot.deadline - slot.limit
        status, answer = slot.finish()
        if kind == RUN and slot.held:
            slot.held.popleft()
        if slot.child.pid is None:
            self.todo.extendleft(reversed(slot.drop()))
        if kind == PREPARE:
            self._prepared(slot, status, answer)
        elif status == "died" and number not in self._tried:
            self._tried.add(number)
            self.todo.appendleft(number)
        elif status != "ok":
            took = time.monotonic() - started
            built = self._build_seconds.get(number, 0.0)
            built, ran = (took, 0.0) if kind == BUILD else (built, took)
            self.done[number] = Measurement(None, answer, built, ran)
        elif kind == BUILD:
            slot.held.append(number)
            self._build_seconds[number] = answer["build"]
        else:
            self.done[number] = Measurement(answer["median"], None, self._build_seconds[number], answer["run"])

    def _prepared(self, slot: Slot, status: str, answer: Any) -> None:
        if status == "ok":
            slot.digest, self._failed_starts = self.function.digest, 0
            return
        slot.drop()
        self._failed_starts += 1
        if self._failed_starts == _STARTS:
            raise TuneError(f"a new tuning worker cannot be prepared: {answer}; see {slot.child.log}")
