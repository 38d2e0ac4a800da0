"""Runs a program: one generator an operator says what happens, and a compiled machine when.

A unit's generator takes values from its channels and puts what comes of them into others, and writes down what that
was: a script of steps (see `tvm_axe.stream.machine`) that say nothing of values. Which values there are depends on time
only where what comes first is taken. So generators run ahead, over all that is there and as if channels had room for
everything, and the machine follows, with clocks, and channels as deep as they are. Where a generator asks what came
first, it waits for the machine's answer.

A generator yields the channel that it waits for, or None if it waits for an answer, or has run far enough ahead.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tvm_axe.errors import StreamError
from tvm_axe.stream import steps
from tvm_axe.stream.codec import EMPTY, Token
from tvm_axe.stream.memo import Memo, Whole
from tvm_axe.stream.memory import Accelerator, Occupancy, Tenant
from tvm_axe.stream.waiting import deadlock, too_long

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Tensor
    from tvm_axe.stream.wiring import Place, Wire, Wiring

AHEAD = 1 << 16
"""Cells of scripts that generators may write before the machine follows."""

BATCH = 1 << 12
"""Tokens that a unit may send at a time of which it has as many as it likes."""

Process: TypeAlias = "Generator[Channel | None, None, None]"
"""The generator that runs a unit."""


class Channel:
    """A queue of tokens (value, stop) from one unit to another.

    Attributes
    ----------
    wire : Wire
        What it is in every run.
    items : deque[Token]
        The tokens that its reader's generator hasn't taken.
    waiter : Unit or None
        The unit that is blocked on it: its reader's, if it is empty, and after a run that doesn't end its writer, if it
        is full.
    number, rank, port, peek, free, take, send : int
        The wire's.
    depth : int
        The tokens that it holds.
    whole : Whole or None
        All its tokens, if they were sent at once.
    count : int
        Tokens that are in it at the end.
    """

    __slots__ = (
        "count", "depth", "free", "items", "number", "peek", "port", "rank", "send", "take", "waiter", "whole", "wire",
    )  # fmt: skip

    def __init__(self, wire: Wire, depth: int) -> None:
        self.wire, self.depth = wire, depth
        self.number, self.rank, self.port = wire.number, wire.rank, wire.port
        self.peek, self.free, self.take, self.send = wire.peek, wire.free, wire.take, wire.send
        self.items: deque[Token] = deque(wire.initial)
        self.waiter: Unit | None = None
        self.whole: Whole | None = None
        self.count = 0


class Unit:
    """An operator on the accelerator.

    Attributes
    ----------
    name, kind : str
        The unit's name and its operator's kind.
    operator : Operator
        What it does.
    node : Node
        The operator in the program, or whose streams are copied or thrown away.
    memo : Memo or None
        What units like it have done, until it has begun.
    process : generator or None
        What runs it, once it has begun.
    inputs, outputs : list[Channel]
        The unit's channels, in the operator's order.
    metered : list[tuple[Channel, callable]]
        The outputs of which tokens are counted, each with what counts them.
    engine : Engine
        The run that it belongs to.
    script : array[int]
        Where its steps are written down.
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
        "answer", "asked", "blocked", "busy", "clock", "done", "engine", "flops", "inputs", "kind", "memo", "memory",
        "metered", "name", "node", "number", "operator", "outputs", "process", "read", "script", "spans", "timed",
        "tokens", "waits", "written",
    )  # fmt: skip

    def __init__(self, place: Place, number: int, engine: Engine) -> None:
        self.name, self.operator, self.node = place.name, place.operator, place.node
        self.kind, self.number = place.operator.kind, number
        self.engine, self.script = engine, engine.script
        self.timed = engine.accelerator is not None
        channels = engine.channels
        self.inputs = [channels[at] for at in place.inputs]
        self.outputs = [channels[at] for at in place.outputs]
        self.metered: list[tuple[Channel, Callable[[Iterable[Token]], None]]] = []
        self.clock = self.busy = self.blocked = self.memory = self.flops = self.read = self.written = self.tokens = 0
        self.spans: list[tuple[int, int]] = []
        self.done = self.asked = False
        self.answer = 0
        self.waits: Sequence[Channel] = ()
        self.memo: Memo | None = None
        self.process: Process | None = None

    def fail(self, message: str) -> StreamError:
        """Return the error that says `message` of this unit."""
        return StreamError(f"{self.kind} {self.name!r}: {message}")

    def peek(self, channel: Channel) -> Generator[Channel, None, Token]:
        """Look at the next token once it is there; it stays in the channel until it is freed."""
        items = channel.items
        while not items:
            yield channel
        self.script.append(channel.peek)
        return items[0]

    def get(self, channel: Channel) -> Generator[Channel, None, Token]:
        """Take the next token once it is there."""
        while not channel.items:
            yield channel
        return self.take(channel)

    def take(self, channel: Channel) -> Token:
        """Take the next token, which is there."""
        self.script.append(channel.take)
        return channel.items.popleft()

    def free(self, channel: Channel) -> None:
        """Take the token that was looked at from the channel: from now on its slot can be filled again."""
        self.script.append(channel.free)
        channel.items.popleft()

    def send(self, channel: Channel, value: Any, stop: int) -> None:
        """Send a token."""
        self.script.append(channel.send)
        channel.items.append((value, stop))

    def take_all(self, channel: Channel) -> list[Token]:
        """Take all the tokens that are there."""
        tokens = list(channel.items)
        self.script.extend(array("q", [channel.take]) * len(tokens))
        channel.items.clear()
        return tokens

    def send_all(self, channel: Channel, tokens: list[Token], requests: int = 0) -> Generator[None, None, None]:
        """Send tokens, each of them after so many requests to off-chip memory were answered."""
        access = [requests << 4 | steps.ACCESS] if requests and self.timed else []
        one = array("q", [*access, channel.send])
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            channel.items.extend(part)
            self.script.extend(one * len(part))
            if len(part) == BATCH:
                yield None

    def work(self, cycles: int) -> None:
        """Let cycles of work pass."""
        if cycles:
            self.script.append(cycles << 4 | steps.WORK)

    def access(self, requests: int) -> None:
        """Send so many requests to off-chip memory and wait until they are answered."""
        if requests and self.timed:
            self.script.append(requests << 4 | steps.ACCESS)

    def read_after(self, channel: Channel, cycles: int) -> None:
        """Let pass what is left of so many cycles from when the next token came."""
        self.script.extend((channel.port << 4 | steps.READ, cycles))

    def use(self, tenant: Tenant) -> None:
        """Note that a tenant of on-chip memory is needed now."""
        self.script.append(tenant.number << 4 | steps.USE)

    def merge(self, sources: Sequence[Channel], sink: Channel, cycles: int, stop: int) -> None:
        """Send on equal tokens, one from each of several channels, in the order that they came in.

        Each is sent so many cycles after it came; the stop is behind the last. All have been looked at. As they are
        equal, it is for the machine alone to know the order: it writes their ports into the steps.
        """
        ports, each = [source.port for source in sources], [steps.READ, cycles, steps.TAKE, sink.send]
        for many in range(len(ports), 1, -1):
            self.script.extend((many << 4 | steps.ORDER, *ports[:many], *each))
        self.script.extend(each)
        value, _ = sources[0].items[0]
        for source in sources:
            source.items.popleft()
        sink.items.extend([(value, 0)] * (len(ports) - 1))
        sink.items.append((value, stop))

    def now(self) -> Generator[None, None, int]:
        """Return what cycle it is."""
        self.script.append(steps.NOW)
        return (yield from self._asking())

    def earliest(self, channels: Sequence[Channel]) -> Generator[None, None, int]:
        """Wait for the first token of several channels, and until it is known to be the first; return its number."""
        self.script.extend((len(channels) << 4 | steps.FIRST, *(channel.port for channel in channels)))
        self.waits = channels
        at = yield from self._asking()
        self.waits = ()
        return at

    def _asking(self) -> Generator[None, None, int]:
        self.asked = True
        while self.asked:
            yield None
        return self.answer


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
        self.occupancy = Occupancy()
        self.ready: deque[Unit] = deque()
        self.script = array("q")
        self.units: list[Unit] = []
        self.channels: list[Channel] = []
        self.sinks: list[Unit] = []
        self.fed: dict[str, list[Token]] = {}
        self.tensors: dict[str, np.ndarray] = {}
        self.rows: dict[str, int] = {}
        self.outputs: dict[str, list[Token]] = {}
        self.written: dict[str, list[tuple[int, int, np.ndarray]]] = {}
        self.prices: dict[Hashable, dict[tuple, Any]] = {}
        self.cells: dict[tuple[int, bool], Any] = {}
        self._wholes: dict[tuple[Token, ...], Whole] = {}
        self.off_chip_busy = 0.0
        self._fresh = array("q")
        self._failed: dict[int, StreamError] = {}

    def connect(self, wiring: Wiring) -> None:
        """Make the units and the channels between them, and get them ready.

        Of units that are alike the first one's process is made, which finds what is wrong with any of them; others may
        need none.
        """
        self.wiring = wiring
        depth = self.accelerator.depth if self.accelerator else 2
        self.channels.extend([Channel(wire, wire.depth or depth) for wire in wiring.wires])
        self.units.extend([Unit(place, number, self) for number, place in enumerate(wiring.places)])
        self.sinks.extend([self.units[number] for number in wiring.sinks])
        self.ready.extend([self.units[number] for number in wiring.order])
        memos: dict[Hashable, Memo] = {}
        for unit in self.ready:
            likeness = None if self.values else wiring.places[unit.number].likeness
            unit.memo = memos.get(likeness)
            if unit.memo is None:
                unit.process = unit.operator.process(unit.node, unit)
                if likeness is not None:
                    unit.memo = memos[likeness] = Memo(self._wholes)

    def occupy(self, unit: Unit, size: int) -> Tenant:
        """Take up on-chip memory from now on.

        Raises
        ------
        StreamError
            If that alone is more than there is.
        """
        self.check_capacity(unit, size)
        tenant = self.occupancy.add(size)
        unit.script.append(tenant.number << 4 | steps.OCCUPY)
        return tenant

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
        from tvm_axe.stream.clocks import Clocks  # which imports TVM: seconds, and only runs need it

        clocks = Clocks(self)
        told: Sequence[int] = range(len(self.units))
        while told:
            held = self._run_ahead()
            told = clocks.follow(self.script, self._fresh, held)
            for number in told:
                unit = self.units[number]
                if unit.asked:
                    unit.asked, unit.answer = False, clocks.answer(number)
                self.ready.append(unit)
            failed = [number for number in told if number in self._failed]
            if failed:
                raise self._failed[min(failed, key=clocks.time)]
            if clocks.late is not None:
                break
        clocks.finish()
        if clocks.late is not None:
            raise StreamError(too_long(clocks.late, self.units, self.sinks, self.max_cycles))
        if not all(unit.done for unit in self.sinks):
            raise StreamError(deadlock(self.units, self.sinks))
        for unit in self.units:
            for channel in unit.inputs:
                left = sum(value is not EMPTY for value, _ in channel.items) if channel.items else 0
                if left and not channel.wire.returns:
                    raise unit.fail(f"{left} values of {channel.wire.source!r} are left: it ended without taking them")
            if unit.process is not None:
                unit.process.close()

    def release(self) -> None:
        """Let go of the units, each of which knows the engine, so that memory is free without a garbage collection."""
        self.units.clear()
        self.channels.clear()
        self.sinks.clear()

    def _run_ahead(self) -> list[Unit]:
        """Have generators go on until each of them waits, or enough is written down.

        Return the units that have more to write: it isn't needed before the machine has followed them to their ends.
        """
        ready, script, fresh, held = self.ready, self.script, self._fresh, []
        take = ready.popleft
        while ready and len(script) < AHEAD:
            unit = take()
            start, known = len(script), [len(channel.items) for channel, _ in unit.metered] if unit.metered else ()
            memo, unit.memo = unit.memo, None
            streams = None if memo is None else memo.streams(unit)
            if memo is None or streams is None or not memo.repeat(unit, streams):
                if unit.process is None:
                    unit.process = unit.operator.process(unit.node, unit)
                try:
                    for channel in unit.process:
                        if channel is not None:
                            channel.waiter = unit
                        elif not unit.asked:
                            held.append(unit)
                        break
                    else:
                        script.append(len(unit.inputs) << 4 | steps.END)
                        if memo is not None and streams is not None:
                            memo.note(unit, streams, start)
                except StreamError as error:  # which is to be raised if the unit comes so far
                    self._failed[unit.number] = error
                    held.append(unit)
            if len(script) > start:
                script.append(0)
                fresh.extend((unit.number, start, len(script) - 1))
                for (channel, count), before in zip(unit.metered, known):
                    count(islice(channel.items, before, None))
                for channel in unit.outputs:
                    if channel.waiter is not None and channel.items:
                        ready.append(channel.waiter)
                        channel.waiter = None
        held.extend(ready)
        ready.clear()
        return held
