"""Runs a program: one generator an operator, channels that hold a few tokens, time carried by the tokens.

Each unit has a clock of its own. It takes a token no earlier than the token's time, works for so many cycles, frees the
token's slot in the channel and sends what comes out, or waits until there is room. So the clocks need no common order,
and a unit runs on for as long as its channels let it. Order in time matters where units compete: for off-chip memory,
and in operators that take whatever comes first. These wait until every other unit is blocked, and the earliest of them
goes next; whatever happens because of it happens later, so nothing that was decided has to be taken back.

A generator yields the channel that it is blocked on, or None if it has arranged itself for being woken.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tvm_axe.errors import StreamError
from tvm_axe.stream.codec import EMPTY, Token
from tvm_axe.stream.memory import Accelerator, MemoryQueue, Occupancy, Tenant
from tvm_axe.stream.waiting import deadlock, too_long

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Tensor
    from tvm_axe.stream.types import StreamType

Process: TypeAlias = "Generator[Channel | None, None, None]"
"""The generator that runs a unit."""


class Channel:
    """A queue of tokens (time, value, stop) from one unit to another.

    Attributes
    ----------
    items : deque[tuple[int, Any, int]]
        The tokens, with the time from which on each can be seen.
    room : deque[int]
        The time from which on each free slot can be filled.
    waiter : Unit or None
        The unit that is blocked on it: its reader if it is empty, its writer if it is full.
    stored : bool
        Whether its tiles lie in on-chip memory, so that whoever takes one reads it from there.
    rank : int
        The rank of its stream.
    sender : Unit
        The unit that sends into it.
    returns : bool
        Whether it is feedback, in which tokens are left at the end.
    left : int
        Values that came after its reader had all that it needs.
    """

    __slots__ = (
        "depth", "items", "left", "rank", "returns", "room", "sender", "source", "stored", "target", "type", "waiter",
    )  # fmt: skip

    def __init__(self, type: StreamType, sender: Unit, depth: int, stored: bool) -> None:
        self.type, self.sender, self.depth, self.stored, self.returns = type, sender, depth, stored, False
        self.rank, self.source, self.target = type.rank, sender.name, ""
        self.left = 0
        self.items: deque[tuple[int, Any, int]] = deque()
        self.room: deque[int] = deque([0] * depth)
        self.waiter: Unit | None = None


class Unit:
    """An operator on the accelerator.

    Attributes
    ----------
    name, kind : str
        The operator's name and kind.
    inputs, outputs : list[Channel]
        The unit's channels, in the operator's order.
    engine : Engine
        The run that it belongs to.
    hop, wake, queue : int, callable, MemoryQueue or None
        The run's cycles of a channel, what takes a unit that can go on, and its off-chip memory.
    clock, busy, blocked : int
        The cycle in which it ended, the cycles that it worked, and those that it waited for room in a channel.
    memory : int
        Cycles that it waited for off-chip memory.
    flops, read, written, tokens : int
        FLOPs that it computed, bytes that it loaded and stored off-chip, and tokens that it sent.
    spans : list[tuple[int, int]] or None
        The intervals in which it worked, if the run is traced.
    """

    __slots__ = (
        "answer", "blocked", "busy", "clock", "done", "engine", "flops", "granted", "hop", "inputs", "kind", "memory",
        "name", "outputs", "process", "queue", "read", "spans", "tokens", "version", "waits", "wake", "written",
    )  # fmt: skip

    def __init__(self, name: str, kind: str, engine: Engine) -> None:
        self.name, self.kind, self.engine = name, kind, engine
        self.hop, self.wake, self.queue = engine.hop, engine.ready.append, engine.memory
        self.inputs: list[Channel] = []
        self.outputs: list[Channel] = []
        self.clock = self.busy = self.blocked = self.memory = self.flops = self.read = self.written = self.tokens = 0
        self.spans: list[tuple[int, int]] | None = [] if engine.traced else None
        self.done = self.granted = False
        self.version = 0
        self.answer: int | None = None
        self.waits: Sequence[Channel] = ()
        self.process: Process

    def fail(self, message: str) -> StreamError:
        """Return the error that says `message` of this unit."""
        return StreamError(f"{self.kind} {self.name!r}: {message}")

    def peek(self, channel: Channel) -> Generator[Channel, None, tuple[Any, int]]:
        """Look at the next token once it is there; it stays in the channel until it is freed."""
        items = channel.items
        while not items:
            yield channel
        time, value, stop = items[0]
        if time > self.clock:
            self.clock = time
        return value, stop

    def get(self, channel: Channel) -> Generator[Channel, None, tuple[Any, int]]:
        """Take the next token once it is there."""
        while not channel.items:
            yield channel
        return self.take(channel)

    def take(self, channel: Channel) -> tuple[Any, int]:
        """Take the next token, which is there.

        It and `send` are for loops that every token goes through: they wait by themselves, since a generator in a
        generator takes longer to make than what it does.
        """
        time, value, stop = channel.items.popleft()
        if time > self.clock:
            self.clock = time
        channel.room.append(self.clock + self.hop)
        if channel.waiter is not None:
            self.wake(channel.waiter)
            channel.waiter = None
        return value, stop

    def free(self, channel: Channel) -> None:
        """Take the token that was looked at from the channel: from now on its slot can be filled again."""
        channel.items.popleft()
        channel.room.append(self.clock + self.hop)
        if channel.waiter is not None:
            self.wake(channel.waiter)
            channel.waiter = None

    def put(self, channel: Channel, value: Any, stop: int) -> Generator[Channel, None, None]:
        """Send a token once there is room."""
        while not channel.room:
            yield channel
        self.send(channel, value, stop)

    def send(self, channel: Channel, value: Any, stop: int) -> None:
        """Send a token into a channel that has room."""
        free = channel.room.popleft()
        if free > self.clock:
            self.blocked += free - self.clock
            self.clock = free
        self.tokens += 1
        channel.items.append((self.clock + self.hop, value, stop))
        if channel.waiter is not None:
            self.wake(channel.waiter)
            channel.waiter = None

    def work(self, cycles: int) -> None:
        """Let cycles of work pass."""
        if cycles:
            if self.spans is not None:
                self.spans.append((self.clock, self.clock + cycles))
            self.clock += cycles
            self.busy += cycles

    def access(self, requests: int) -> Generator[None, None, None]:
        """Send so many requests to off-chip memory and wait until they are answered."""
        if self.ask(requests):
            while self.answer is None:
                yield None
            self.answered()

    def ask(self, requests: int) -> bool:
        """Send so many requests to off-chip memory, if there are any; whether to wait for their `answer`."""
        queue = self.queue
        if not requests or queue is None:
            return False
        self.answer = None
        queue.start(self.clock, requests, self)
        return True

    def answered(self) -> None:
        """Go on when the answer is there."""
        assert self.answer is not None
        start, self.clock = self.clock, self.answer
        self.memory += self.clock - start
        if self.spans is not None:
            self.spans.append((start, self.clock))

    def earliest(self, channels: Sequence[Channel]) -> Generator[None, None, int]:
        """Wait for the first token of several channels, and until it is known to be the first; return its number."""
        while True:
            heads = [(channel.items[0][0], number) for number, channel in enumerate(channels) if channel.items]
            if len(heads) == len(channels) or self.granted:
                self.granted = False
                self.version += 1  # what was to be decided is
                time, number = min(heads)
                self.clock = max(self.clock, time)
                return number
            for channel in channels:
                if not channel.items:
                    channel.waiter = self
            self.waits = channels
            if heads:
                self.engine.decide(self, max(self.clock, min(heads)[0]))
            yield None
            self.waits = ()
            for channel in channels:
                if channel.waiter is self:
                    channel.waiter = None


class Engine:
    """A run of a program.

    Parameters
    ----------
    accelerator : Accelerator, optional
        What to simulate; without, nothing takes time.
    values : bool
        Whether tiles are computed. If not, a tile is its (rows, columns).
    traced : bool
        Whether to keep when each unit worked.
    max_cycles : int, optional
        The cycles after which it is given up.
    """

    def __init__(
        self, accelerator: Accelerator | None, values: bool, traced: bool, max_cycles: int | None = None
    ) -> None:
        self.accelerator, self.values, self.traced = accelerator, values, traced
        self.max_cycles = max_cycles
        self.hop = accelerator.hop if accelerator else 0
        self.memory = MemoryQueue(accelerator.off_chip, accelerator.hop) if accelerator else None
        self.occupancy = Occupancy()
        self.ready: deque[Unit] = deque()
        self.units: list[Unit] = []
        self.sinks: list[Unit] = []
        self.fed: dict[str, list[Token]] = {}
        self.tensors: dict[str, np.ndarray] = {}
        self.rows: dict[str, int] = {}
        self.outputs: dict[str, list[Token]] = {}
        self.written: dict[str, list[tuple[int, int, np.ndarray]]] = {}
        self.prices: dict[tuple, dict[tuple, Any]] = {}
        self._decisions: list[tuple[int, int, int, Unit]] = []
        self._drains: list[Unit] = []
        self._serial = 0

    def decide(self, unit: Unit, time: int) -> None:
        """Wake `unit`, with `granted` set, once nothing that isn't under way can happen before `time`."""
        unit.version += 1
        self._serial += 1
        heapq.heappush(self._decisions, (time, self._serial, unit.version, unit))

    def occupy(self, unit: Unit, size: int) -> Tenant:
        """Take up on-chip memory from now on.

        Raises
        ------
        StreamError
            If that alone is more than there is.
        """
        self.check_capacity(unit, size)
        return self.occupancy.add(size, unit.clock)

    def grow(self, unit: Unit, tenant: Tenant, size: int) -> None:
        """Take up more for the same tenant, from the start on: what is filled is reserved.

        Raises
        ------
        StreamError
            If `occupy` refuses the size.
        """
        tenant.size += size
        self.check_capacity(unit, tenant.size)

    def check_capacity(self, unit: Unit, size: int) -> None:
        """Raise an error if a buffer of that size is larger than the on-chip memory."""
        capacity = self.accelerator.capacity if self.accelerator else None
        if capacity is not None and size > capacity:
            raise unit.fail(f"a buffer of {size:,} bytes is larger than the on-chip memory, {capacity:,} bytes")

    def rows_of(self, tensor: Tensor) -> int | None:
        """Return the rows of a tensor: declared, given, or None where those that are stored decide."""
        return tensor.rows if isinstance(tensor.rows, int) else self.rows.get(tensor.name)

    def place(self, unit: Unit, tensor: Tensor, row: int, column: int, value: Any) -> None:
        """Store a tile of a tensor; without values, only see whether it could be.

        Raises
        ------
        StreamError
            If part of it would be outside.
        """
        (rows, columns), most = value.shape if self.values else value, self.rows_of(tensor)
        if row < 0 or (most is not None and row + rows > most) or column + columns > tensor.columns:
            raise unit.fail(f"a tile of {rows} x {columns} at row {row}, column {column} is outside of {tensor}")
        if self.values:
            self.written.setdefault(tensor.name, []).append((row, column, value))

    def run(self) -> None:
        """Run until every sink has what it waits for.

        Raises
        ------
        StreamError
            If units wait for each other, leave values that they were sent, or run for longer than they may.
        """
        self.ready.extend(self.units)
        self._run_ready()
        while self._next_event():
            self._run_ready()
        if not all(unit.done for unit in self.sinks):
            raise StreamError(deadlock(self.units, self.sinks))
        for unit in self.units:
            for channel in unit.inputs:
                for _, value, _ in channel.items:
                    channel.left += value is not EMPTY
                if channel.left and not channel.returns:
                    raise unit.fail(
                        f"{channel.left} values of {channel.source!r} are left: it ended without taking them"
                    )
            unit.process.close()

    def release(self) -> None:
        """Let go of the units, each of which knows the others, so that memory is free without a garbage collection."""
        for drain in self._drains:
            drain.process.close()
        for unit in (*self.units, *self._drains):
            unit.inputs.clear()
            unit.outputs.clear()
        self.units.clear()
        self.sinks.clear()
        self._drains.clear()

    def _run_ready(self) -> None:
        ready = self.ready
        take = ready.popleft
        limit = math.inf if self.max_cycles is None else self.max_cycles
        while ready:
            unit = take()
            for channel in unit.process:
                if channel is not None:
                    channel.waiter = unit
                break
            else:
                self._finish(unit)
            if unit.clock > limit:
                raise StreamError(too_long(unit, self.units, self.sinks, limit))

    def _finish(self, unit: Unit) -> None:
        """Take what is still sent to a unit that needs no more, so that its senders come to their ends."""
        if unit.done:
            return
        unit.done = True
        for channel in unit.inputs:
            if channel.sender.done and not channel.items:
                continue
            drain = Unit(f"{unit.name}, done", "drain", self)
            drain.inputs.append(channel)
            drain.process = _drain(drain)
            self._drains.append(drain)
            self.ready.append(drain)

    def _next_event(self) -> bool:
        """Let the earliest of what waits for its turn happen; return whether there was something."""
        memory, decisions, until = self.memory, self._decisions, math.inf
        while decisions:
            until, _, version, unit = decisions[0]
            if version == unit.version:
                break
            heapq.heappop(decisions)
            until = math.inf
        answered = None if memory is None else memory.advance(until)
        if answered is not None:
            unit, unit.answer = answered
        elif decisions:
            unit = heapq.heappop(decisions)[3]
            unit.granted = True
        else:
            return False
        self.ready.append(unit)
        return True


def _drain(unit: Unit) -> Process:
    (channel,) = unit.inputs
    while True:
        while not channel.items:
            yield channel
        value, _ = unit.take(channel)
        channel.left += value is not EMPTY
