"""What the roles of a specialized kernel do to barriers, one way through the program's loops and branches.

As the code of the roles does it (`specialized.producer`, `consumer`, `storer`, `barriers`): a role that takes the n-th
slot of a circular buffer waits for the phase of that slot's barrier which the number says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import sym, tirx

from tvm_axe.errors import TileError
from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import Branch, Copy, Loop, Node
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import constant
from tvm_axe.tile.targets.cuda.specialized.buffers import CircularBuffer
from tvm_axe.tile.targets.cuda.specialized.memory import SpecializedMemory
from tvm_axe.tile.targets.cuda.specialized.staging import has_storing_warp
from tvm_axe.tile.targets.cuda.specialized.steps import (
    Acquire,
    Await,
    Choose,
    Define,
    Do,
    Fence,
    Given,
    Guard,
    Issue,
    PingPong,
    Release,
    Repeat,
    Send,
    Step,
    Sync,
    walk,
)

PRODUCER, STORER = "the producer", "the storing warp"


@dataclass(frozen=True)
class Barrier:
    """A barrier: of which kind, of what, and of which slot.

    Attributes
    ----------
    kind : str
        ``"full"``, ``"empty"``, ``"staged full"``, ``"staged empty"``, ``"turn"`` or ``"consumers"``.
    of : CircularBuffer or Copy or None
        The circular buffer, or the copy that is staged.
    slot : int
        The slot; of a turn, the warpgroup.
    """

    kind: str
    of: CircularBuffer | Copy | None = None
    slot: int = 0

    @property
    def name(self) -> str:
        """What it is of, by name."""
        return self.of.name if isinstance(self.of, CircularBuffer) else str(self.of)


@dataclass(frozen=True)
class Event:
    """Something that a role does to a barrier.

    Attributes
    ----------
    kind : str
        ``"arrive"``, ``"wait"`` (until so many phases are complete), or ``"join"`` (arrive, and wait for the phase).
    barrier : Barrier
        The barrier.
    phase : int
        How many phases a wait is for.
    """

    kind: str
    barrier: Barrier
    phase: int = 0

    def __str__(self) -> str:
        return _WAITS[self.barrier.kind].format(self.barrier.name)


_WAITS = {
    "full": "for {} to be loaded",
    "empty": "for a slot of {} to be given back",
    "staged full": "for {} to be staged",
    "staged empty": "for {} to be stored",
    "turn": "for its turn",
    "consumers": "for the other consumers",
}


@dataclass(frozen=True)
class Ways:
    """One way through a program.

    Attributes
    ----------
    choices : mapping from Node
        For each loop how many iterations it has, for each branch whether it is taken: the first time around it, the
        second, and so on in turn.
    """

    choices: Mapping[Node, tuple[int, int]]

    def at(self, node: Node, around: Sequence[int]) -> int:
        """What a loop or a branch does in the iterations `around` it, the outermost first."""
        return self.choices[node][sum(around) % 2]


class Roles:
    """The roles of a plan.

    Attributes
    ----------
    arrivals : dict from Barrier to int
        How many arrivals complete a phase of each barrier.
    """

    def __init__(self, program: TileProgram, memory: SpecializedMemory, steps: Sequence[Step], warpgroups: int) -> None:
        self.program, self.memory, self.steps, self.warpgroups = program, memory, tuple(steps), warpgroups
        self.stored = dict(memory.places) if has_storing_warp(program) else {}
        self.owner = {copy: buffer for buffer in memory.buffers for copy in buffer.copies + buffer.others}
        self.opens = {copies[0] for b in memory.buffers for copies in (b.copies, b.others) if copies}
        self.takes_turns = any(isinstance(step, PingPong) for step in walk(self.steps))
        self.conditions = _Conditions(program)
        self.arrivals: dict[Barrier, int] = {Barrier("consumers"): warpgroups}
        for buffer, slots in memory.buffers.items():
            for slot in range(slots):
                # The announcement of the bytes, and the bytes of each copy.
                self.arrivals[Barrier("full", buffer, slot)] = 1 + len(buffer.copies)
                self.arrivals[Barrier("empty", buffer, slot)] = warpgroups
        for place in self.stored.values():
            self.arrivals[Barrier("staged full", place)] = warpgroups
            self.arrivals[Barrier("staged empty", place)] = 1
        self.arrivals |= {Barrier("turn", None, group): 2 for group in range(warpgroups)}

    def events(self, ways: Ways, tiles: int) -> dict[str, list[Event]]:
        """The events of each role, of so many tiles of the grid, one after the other."""
        found: dict[str, list[Event]] = {PRODUCER: []}
        producer = _Places(self.memory.buffers)
        storer = dict.fromkeys(self.stored.values(), 0)
        for tile in range(tiles):
            for copy in self._copies(self.program.body, ways, (tile,)):
                if copy in self.owner:
                    found[PRODUCER] += self._load(copy, producer)
                elif copy in self.stored:
                    place = self.stored[copy]
                    storer[place] += 1
                    found.setdefault(STORER, []).append(Event("wait", Barrier("staged full", place), storer[place]))
                    found[STORER].append(Event("arrive", Barrier("staged empty", place)))
        made = [self._consumer(ways, tiles, group) for group in range(self.warpgroups)]
        return found | {f"consumer {group}": consumer.events for group, consumer in enumerate(made)}

    def faults(self, ways: Ways) -> tuple[str, ...]:
        """Slots that consumers don't give back once each, in the order taken."""
        made = self._consumer(ways, 1, 0)
        held = [buffer.name for buffer in self.memory.buffers if made.given[buffer] != made.taken.counts[buffer]]
        return (*made.faults, *(f"a slot of {name} is not given back by the end of a tile" for name in held))

    def _copies(self, body: tuple[Node, ...], ways: Ways, around: tuple[int, ...]) -> Iterator[Copy]:
        """The copies of a body, in the order in which one thread that follows the program comes by them."""
        for node in body:
            if isinstance(node, Copy):
                yield node
            elif isinstance(node, Loop):
                for at in range(ways.at(node, around)):
                    yield from self._copies(node.body, ways, (*around, at))
            elif isinstance(node, Branch):
                yield from self._copies(node.then if ways.at(node, around) else node.otherwise, ways, around)

    def _load(self, copy: Copy, places: _Places) -> list[Event]:
        buffer, found = self.owner[copy], []
        if copy in self.opens:
            slot, phase = places.take(buffer)
            found.append(Event("wait", Barrier("empty", buffer, slot), phase))
            found.append(Event("arrive", Barrier("full", buffer, slot)))
        return [*found, Event("arrive", Barrier("full", buffer, places.slot(buffer)))]

    def _consumer(self, ways: Ways, tiles: int, group: int) -> _Consumer:
        made = _Consumer(self, ways, group)
        last = self.warpgroups - 1
        if self.takes_turns and self.warpgroups > 1 and group == last:
            made.events.append(Event("arrive", Barrier("turn", None, 0)))
        for tile in range(tiles):
            made.around = {None: tile}
            made.run(self.steps)
        if self.takes_turns and self.warpgroups > 1 and group == 0:
            made.events.append(Event("join", Barrier("turn", None, 0)))
        return made


@dataclass
class _Places:
    """How often slots of each buffer were taken."""

    slots: Mapping[CircularBuffer, int]
    counts: dict[CircularBuffer, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = dict.fromkeys(self.slots, 0)

    def take(self, buffer: CircularBuffer) -> tuple[int, int]:
        """The next slot, and how often it was taken before."""
        number = self.counts[buffer]
        self.counts[buffer] += 1
        return number % self.slots[buffer], number // self.slots[buffer]

    def slot(self, buffer: CircularBuffer, lag: int = 0) -> int:
        """The slot taken `lag` before the last."""
        return (self.counts[buffer] - 1 - lag) % self.slots[buffer]


class _Consumer:
    """A consumer's way through its steps."""

    def __init__(self, roles: Roles, ways: Ways, group: int) -> None:
        self.roles, self.ways, self.group = roles, ways, group
        self.events: list[Event] = []
        self.faults: list[str] = []
        self.taken = _Places(roles.memory.buffers)
        self.given = dict.fromkeys(roles.memory.buffers, 0)
        self.staged = dict.fromkeys(roles.stored.values(), 0)
        self.around: dict[Loop | None, int] = {None: 0}  # the iteration of each loop around; of the tile

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            _EVENTS.of(step)(self, step)

    def way(self, node: Node) -> int:
        """What a loop or a branch does in these iterations of the loops around it."""
        return self.ways.at(node, [self.around[loop] for loop in self.roles.conditions.around[node]])

    def acquire(self, step: Acquire) -> None:
        slot, phase = self.taken.take(step.buffer)
        self.events.append(Event("wait", Barrier("full", step.buffer, slot), phase + 1))

    def release(self, step: Release) -> None:
        if step.when is not None and not self.roles.conditions.of(step)(self):
            return
        buffer = step.buffer
        self.given[buffer] += 1
        if self.given[buffer] != self.taken.counts[buffer] - step.lag and not self.faults:
            self.faults.append(f"`{step}` gives back a slot of {buffer.name} out of turn")
        slot = self.taken.slot(buffer, step.lag)
        self.events.append(Event("arrive", Barrier("empty", buffer, slot)))

    def do(self, step: Do) -> None:
        """A statement, in which all consumers may meet."""
        if isinstance(step.node, Copy) and step.node in self.roles.stored:
            place = self.roles.stored[step.node]
            self.events.append(Event("wait", Barrier("staged empty", place), self.staged[place]))
            self.events.append(Event("arrive", Barrier("staged full", place)))
            self.staged[place] += 1
        else:
            self.synchronize(step)

    def synchronize(self, step: Step) -> None:
        self.events.append(Event("join", Barrier("consumers")))

    def ping_pong(self, step: PingPong) -> None:
        whose = self.group if step.begins else (self.group + 1) % self.roles.warpgroups
        self.events.append(Event("join" if step.begins else "arrive", Barrier("turn", None, whose)))

    def given_value(self, step: Given) -> None:
        loop = self.roles.conditions.loops[step.var]
        self.around[loop] = self.roles.conditions.behind(step.value, loop.start, step)
        self.run(step.body)

    def guard(self, step: Guard) -> None:
        loop = self.roles.conditions.loops[step.var]
        if self.way(loop) + self.roles.conditions.behind(step.extent, loop.extent, step) > 0:
            self.run(step.body)

    def repeat(self, step: Repeat) -> None:
        conditions = self.roles.conditions
        loop = conditions.loops[step.var]
        first = conditions.behind(step.start, loop.start, step)
        count = self.way(loop) + conditions.behind(step.extent, loop.extent, step)
        for at in range(count):
            self.around[loop] = first + at
            self.run(step.body)
        if count > 0:
            self.run(step.behind)

    def choose(self, step: Choose) -> None:
        branch = self.roles.conditions.branches[step.condition]
        self.run(step.then if self.way(branch) else step.otherwise)

    def nothing(self, step: Step) -> None:
        """What threads do without another role."""


_EVENTS: TypeTable[Callable[[_Consumer, Any], None]] = TypeTable(
    "events of a consumer",
    {
        Acquire: _Consumer.acquire,
        Await: _Consumer.nothing,
        Choose: _Consumer.choose,
        Define: _Consumer.nothing,
        Do: _Consumer.do,
        Fence: _Consumer.nothing,
        Given: _Consumer.given_value,
        Guard: _Consumer.guard,
        Issue: _Consumer.nothing,
        PingPong: _Consumer.ping_pong,
        Release: _Consumer.release,
        Repeat: _Consumer.repeat,
        Send: _Consumer.nothing,
        Sync: _Consumer.synchronize,
    },
)


class _Conditions:
    """What the expressions of steps are, by the iterations of the program's loops.

    Attributes
    ----------
    loops : dict from Var to Loop
        The loops by their variables.
    branches : dict from Expr to Branch
        The branches by their conditions.
    around : dict from Node
        The loops around each loop and branch, the outermost first; None, for the tile, before them.
    """

    def __init__(self, program: TileProgram) -> None:
        self.loops: dict[tirx.Var, Loop] = {}
        self.branches: dict[Any, Branch] = {}
        self.around: dict[Node, tuple[Loop | None, ...]] = {}
        self.analyzer = sym.Analyzer()
        self.known: dict[Release, Callable[[_Consumer], bool]] = {}
        self.distances: dict[tuple[Any, Any], int] = {}
        self._visit(program.body, (None,))

    def _visit(self, body: tuple[Node, ...], around: tuple[Loop | None, ...]) -> None:
        for node in body:
            if isinstance(node, Loop):
                self.loops[node.var], self.around[node] = node, around
                self._visit(node.body, (*around, node))
            elif isinstance(node, Branch):
                self.branches[node.condition], self.around[node] = node, around
                self._visit(node.then + node.otherwise, around)

    def difference(self, value: Any, base: Any) -> int | None:
        """How much more a value is than another, if that is constant."""
        found = constant(self.analyzer.simplify(tirx.const(0, "int32") + value - base))
        return found if isinstance(found, int) else None

    def behind(self, value: Any, base: Any, step: Step) -> int:
        if (value, base) not in self.distances:
            found = self.difference(value, base)
            if found is None:
                raise TileError(f"`{step}`: {value} and {base}, of the same loop, differ by no constant")
            self.distances[value, base] = found
        return self.distances[value, base]

    def of(self, release: Release) -> Callable[[_Consumer], bool]:
        """Whether a release is made: in no first iteration of its loop, or if that has any."""
        if release not in self.known:
            self.known[release] = self._read(release)
        return self.known[release]

    def _read(self, release: Release) -> Callable[[_Consumer], bool]:
        condition: Any = release.when
        simple = constant(self.analyzer.simplify(condition))
        if isinstance(simple, int):
            return lambda consumer: bool(simple)
        loop = None if release.var is None else self.loops[release.var]
        if loop is not None and isinstance(condition, tirx.NE) and condition.a.same_as(loop.var):
            first = self.difference(condition.b, loop.start)
            if first is not None:
                return lambda consumer: consumer.around[loop] != first
        if loop is not None and isinstance(condition, tirx.GT | tirx.LT):
            more, less = (condition.a, condition.b) if isinstance(condition, tirx.GT) else (condition.b, condition.a)
            beyond = self.difference(more - less, loop.extent)
            if beyond is not None:
                return lambda consumer: consumer.way(loop) + beyond > 0
        raise TileError(f"`{release}`: the condition isn't one of the iterations of its loop")
