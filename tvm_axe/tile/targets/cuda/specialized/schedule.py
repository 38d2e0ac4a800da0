"""The consumers' software pipeline: from a program's statements to `steps`, which say when a consumer waits.

`gemm` is asynchronous, so nothing waits for one but what needs it: a statement that touches its accumulator (other
than another product into it), one that overwrites what it reads, and the release of the slots that it reads. A loop
that ends with products in flight carries them into its next iteration, where the slots are released a product later;
but not past a branch over accumulators, where the assembler can't tell any more which are in flight, and lets each
product end before the next begins (ptxas, C7514; docs/decisions/0073); and not past the end of a loop that may have no
iteration, for the same reason (C7515; docs/decisions/0078). Barriers and fences between threads are
`specialized.hazards`'s.

Two rewrites make more of that. An accumulator that is cleared right before its first product isn't cleared: that
product sets it. And a pipelined loop that ends in a product whose left operand is in registers defers it: the next
iteration's first product is issued before it, so that what threads compute in between runs beside it (the order of
FlashAttention-3, arXiv:2407.08608, section 3.2); several warpgroups take turns at issuing (ping-pong, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import (
    Assign,
    Branch,
    Copy,
    Fill,
    Gemm,
    Let,
    Loop,
    Node,
    Parallel,
    Print,
    Reduce,
    Scan,
    Signal,
    Sort,
    Wait,
)
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.cuda.specialized.buffers import CircularBuffer, Order
from tvm_axe.tile.targets.cuda.specialized.firsts import after_first, first_product
from tvm_axe.tile.targets.cuda.specialized.hazards import Hazards, Touched
from tvm_axe.tile.targets.cuda.specialized.steps import (
    Acquire,
    Await,
    Choose,
    Define,
    Do,
    Given,
    Guard,
    Issue,
    PingPong,
    Release,
    Repeat,
    Send,
    Step,
)
from tvm_axe.tile.targets.cuda.specialized.steps import walk as all_steps
from tvm_axe.tile.walking import leaves, walk


@dataclass(frozen=True, eq=False)
class Schedule:
    """A consumer's steps and what was done to make them.

    Attributes
    ----------
    steps : tuple of Step
        What a consumer does of one tile of the grid.
    folded : tuple of (Fill, Gemm)
        The fills that a product makes up for, with it.
    deferred : tuple of (Gemm, Loop)
        The products that are issued an iteration later, with their loops.
    """

    steps: tuple[Step, ...]
    folded: tuple[tuple[Fill, Gemm], ...]
    deferred: tuple[tuple[Gemm, Loop], ...]

    @property
    def takes_turns(self) -> bool:
        """Whether warpgroups take turns at issuing products."""
        return any(isinstance(step, PingPong) for step in all_steps(self.steps))


def schedule(
    program: TileProgram,
    buffers: Mapping[CircularBuffer, int],
    ping_pong: bool,
    defers: bool = True,
    carries: bool = True,
    sent: Collection[Copy] = (),
    given: Collection[Copy] = (),
) -> Schedule:
    """The steps of a consumer.

    Parameters
    ----------
    program : TileProgram
        The program.
    buffers : mapping from CircularBuffer to int
        The circular buffers, with how many slots each has.
    ping_pong : bool
        Whether warpgroups take turns at issuing the products of loops that defer one.
    defers : bool
        Whether loops defer their last product where they can.
    carries : bool
        Whether loops carry products in flight into their next iteration where they can.
    sent : collection of Copy
        The copies of the consumers' shared tiles to global memory that TMA does.
    given : collection of Copy
        The copies that the storing warp stores, by itself in order.
    """
    scheduler = _Scheduler(program, dict(buffers), ping_pong, defers, carries, frozenset(sent), frozenset(given))
    scheduler.body(program.body)
    scheduler.settle(len(scheduler.flights))
    return Schedule(tuple(scheduler.steps), tuple(scheduler.folded), tuple(scheduler.deferred))


@dataclass(eq=False)
class _Flight:
    """A product in flight.

    Attributes
    ----------
    gemm : Gemm
        The product.
    held : list of (CircularBuffer, int)
        The slots to release once it is waited for, each by the number of its acquisition.
    when : Expr or None
        The condition under which it is in flight at all: not in a loop's first iteration, say.
    var : Var or None
        The variable of the loop that the condition is about.
    """

    gemm: Gemm
    held: list[tuple[CircularBuffer, int]] = field(default_factory=list)
    when: tirx.Expr | None = None
    var: tirx.Var | None = None

    def conflicts(self, node: Node) -> bool:
        """Whether a statement can't be begun before the product is done."""
        reads, writes, c = set(node.reads), set(node.writes), self.gemm.c.tile
        if isinstance(node, Gemm) and node.c.tile is c:
            return c in (node.a.tile, node.b.tile)
        return c in reads | writes or bool(writes & {self.gemm.a.tile, self.gemm.b.tile})


class _Scheduler:
    """Makes steps of statements, in order.

    Invariants, behind every statement:

    - `flights` are the products that may be in flight behind the last of `steps`, the oldest first. Each is a group of
      its own, so a wait until n groups are in flight completes all but the last n (PTX ISA, wgmma.wait_group).
    - Every slot that was acquired has been released once, is held by one of the flights, or has its last reader to
      come; slots of a buffer are released in the order in which they were acquired. `acquired` counts the acquisitions
      of each buffer, from which a release knows how many slots behind the current one its own is.
    - No statement that is among `steps` touches what a product writes, or overwrites what it reads, while that may be
      in flight.
    - The arms of a branch leave no products of their own in flight. An iteration of a loop leaves as many in flight, of
      the same products, as it found; before the first these are none, which `when` says.
    """

    def __init__(
        self,
        program: TileProgram,
        slots: dict[CircularBuffer, int],
        ping_pong: bool,
        defers: bool,
        carries: bool,
        sent: frozenset[Copy],
        given: frozenset[Copy],
    ) -> None:
        self.slots, self.ping_pong, self.defers, self.carries, self.sent = slots, ping_pong, defers, carries, sent
        self.analyzer = program.analyzer()
        self.steps: list[Step] = []
        self.flights: list[_Flight] = []
        self.acquired = dict.fromkeys(slots, 0)
        self.sets: dict[Gemm, tirx.Expr | bool] = {}
        self.folded: list[tuple[Fill, Gemm]] = []
        self.deferred: list[tuple[Gemm, Loop]] = []
        self.turn: tuple[Node, Gemm] | None = None  # the products that begin and end a turn
        self.late: tuple[CircularBuffer, Node] | None = None  # what a deferred product takes, behind which statement
        self.order = Order(program, slots)
        self.loads = _others(program, slots)
        own = [node for node in leaves(program.body) if node not in self.loads]
        self.hazards = Hazards(program, own, slots, sent, given)

    # -- waiting --

    def settle(self, count: int) -> None:
        """Wait for the oldest `count` products in flight and release what only they held."""
        if not count:
            return
        self.steps.append(Await(len(self.flights) - count))
        for flight in self.flights[:count]:
            for buffer, number in flight.held:
                self.give_back(Release(buffer, self.acquired[buffer] - number, flight.when, flight.var))
        del self.flights[:count]

    def settle_for(self, node: Node) -> None:
        found = [i for i, flight in enumerate(self.flights) if flight.conflicts(node)]
        self.settle(found[-1] + 1 if found else 0)

    # -- statements --

    def body(self, nodes: tuple[Node, ...]) -> None:
        for index, node in enumerate(nodes):
            if node in self.loads or (isinstance(node, Fill) and self.folds(node, nodes[index + 1 :])):
                continue
            self.statement(node)

    def statement(self, node: Node) -> None:
        for buffer in self.slots:
            if buffer.first is node:
                self.acquire(buffer)
        _NODES.of(node)(self, node)
        for buffer in self.slots:
            if buffer.last is node:
                self.release(buffer, node)

    def do(self, node: Copy | Fill | Parallel | Print | Reduce | Scan | Sort | Assign) -> None:
        self.settle_for(node)
        self.hazards.before(node, self.steps)
        self.steps.append(Send(node) if isinstance(node, Copy) and node in self.sent else Do(node))
        self.hazards.read(node)

    def define(self, node: Let) -> None:
        self.settle_for(node)
        self.hazards.before(node, self.steps)
        self.steps.append(Define(node))
        self.hazards.read(node)

    def make_room(self, buffer: CircularBuffer) -> None:
        """Give back the slots that the producer needs before it can have filled the next of a buffer."""
        count = 0
        for other, slots in self.slots.items():
            held = [i for i, flight in enumerate(self.flights) if any(of is other for of, _ in flight.held)]
            spare = slots - (other is buffer or self.order.stands_before(other, buffer))
            if self.late and other is self.late[0] and self.order.at[buffer.first] <= self.order.at[self.late[1]]:
                spare -= 1  # it has a slot that is taken an iteration late
            if len(held) > spare:
                count = max(count, held[len(held) - spare - 1] + 1)
        self.settle(count)

    def acquire(self, buffer: CircularBuffer) -> None:
        self.make_room(buffer)
        self.steps.append(Acquire(buffer))
        self.acquired[buffer] += 1

    def release(self, buffer: CircularBuffer, node: Node) -> None:
        if isinstance(node, Gemm):
            self.flights[-1].held.append((buffer, self.acquired[buffer]))
            return
        reading = [i for i, flight in enumerate(self.flights) if set(flight.gemm.reads) & set(buffer.tiles)]
        self.settle(reading[-1] + 1 if reading else 0)
        self.give_back(Release(buffer, 0, None))

    def give_back(self, release: Release) -> None:
        self.hazards.fence(release.buffer, self.steps)
        self.steps.append(release)

    def issue(self, gemm: Gemm) -> None:
        self.settle_for(gemm)
        self.hazards.before(gemm, self.steps)
        if self.turn and gemm is self.turn[0]:
            self.steps.append(PingPong(True))
        self.steps.append(Issue(gemm, self.sets.get(gemm, gemm.accumulate)))
        self.flights.append(_Flight(gemm))
        if self.turn and gemm is self.turn[1]:
            self.steps.append(PingPong(False))

    def branch(self, node: Branch) -> None:
        """Both arms leave as many products in flight: none of their own."""
        self.settle_for(node)
        inside = set(walk((node,)))
        if any(isinstance(inner, Gemm) for inner in inside):
            self.settle(len(self.flights))
        for buffer in self.slots:
            if buffer.first in inside:
                self.make_room(buffer)  # before the arms: what was issued before them is waited for in both or in none
        self.hazards.read(node)
        outer, arms, before, behind = self.steps, [], self.hazards.touched, Touched()
        for nodes in (node.then, node.otherwise):
            self.steps, self.hazards.touched = [], before
            flying = len(self.flights)
            self.body(nodes)
            self.settle(len(self.flights) if len(self.flights) > flying else 0)
            arms.append(tuple(self.steps))
            behind = behind.also(self.hazards.touched)
        self.steps, self.hazards.touched = outer, behind
        self.steps.append(Choose(node.condition, *arms))

    # -- loops --

    def loop(self, node: Loop) -> None:
        self.settle(len(self.flights))
        if self.hazards.meets(node):
            self.hazards.barrier(self.steps)
        if any(child not in self.loads for child in node.body):
            before, deferral = self.hazards.touched, self.deferral(node)
            if deferral is None:
                self.repeat(node.var, node.start, node.extent, node.body, ends=True)
            else:
                self.defer(node, deferral)
            self.hazards.touched = self.hazards.touched.also(before)  # it may have no iteration

    def repeat(
        self, var: tirx.Var, start: tirx.Expr, extent: tirx.Expr, nodes: tuple[Node, ...], ends: bool = False
    ) -> None:
        """A loop, with products in flight over its end if its body leaves any.

        With `ends`, a loop that may have no iteration waits for its last products where it had one: behind both ways
        the assembler can't tell what is in flight (docs/decisions/0078).
        """
        outer, marks = self.steps, (len(self.folded), len(self.deferred), dict(self.acquired))
        self.steps = []
        self.iteration(nodes, {})
        if not self.may_carry(nodes):
            self.settle(len(self.flights))
        if self.flights:  # again, with those of the iteration before in flight
            before = self.acquired
            del self.folded[marks[0] :], self.deferred[marks[1] :]
            self.acquired = dict(marks[2])
            self.flights = [
                _Flight(
                    flight.gemm,
                    [(buffer, self.acquired[buffer] - (before[buffer] - number)) for buffer, number in flight.held],
                    after_first(var, start),
                    var,
                )
                for flight in self.flights
            ]
            self.steps = []
            self.iteration(nodes, set(self.flights))
        maybe = not self.analyzer.can_prove(extent >= 1)
        steps, self.steps = self.steps, []
        if maybe and ends:
            self.settle(len(self.flights))
        elif maybe:
            for flight in self.flights:
                flight.when, flight.var = extent > 0, var
        behind, self.steps = self.steps, outer
        self.steps.append(Repeat(var, start, extent, tuple(steps), tuple(behind)))

    def may_carry(self, nodes: tuple[Node, ...]) -> bool:
        """Whether products may be in flight over the end of a loop's iteration."""
        inside = tuple(walk(nodes))
        sums = {node.c.tile for node in inside if isinstance(node, Gemm)}
        branches = (node for node in inside if isinstance(node, Branch) and node not in self.loads)
        return self.carries and not any(sums & {*node.reads, *node.writes} for node in branches)

    def iteration(self, nodes: tuple[Node, ...], carried: set[_Flight] | dict) -> None:
        self.hazards.read(*nodes)  # in the iteration before
        self.body(nodes)
        # What is in flight only under a condition is not carried on: the next iteration would need this one's.
        ends = [i for i, flight in enumerate(self.flights) if flight in carried or flight.when is not None]
        self.settle(ends[-1] + 1 if ends else 0)
        if self.hazards.touched.tiles and self.hazards.meets(*nodes):
            self.hazards.barrier(self.steps)

    def deferral(self, loop: Loop) -> tuple[int, Gemm] | None:
        """Where in a loop's body its last product may be issued for the iteration before: after which statement."""
        nodes = [node for node in loop.body if node not in self.loads]
        last = nodes[-1]
        if not self.defers or loop.stages is None:
            return None
        if not isinstance(last, Gemm) or last.a.tile.scope != "fragment" or not last.accumulate:
            return None
        firsts = [i for i, node in enumerate(nodes[:-1]) if isinstance(node, Gemm)]
        buffer = next((buffer for buffer in self.slots if buffer.first is last), None)
        if not firsts or buffer is None or buffer.last is not last or buffer.loop is not loop or self.slots[buffer] < 2:
            return None
        c, a = last.c.tile, last.a.tile
        before = nodes[: firsts[0] + 1]
        if any({c, a} & set(node.reads + node.writes) for node in before):
            return None
        if not all(region.whole for region in (last.a, last.b, last.c)) or c in nodes[firsts[0]].reads:
            return None
        return firsts[0], last

    def defer(self, loop: Loop, deferral: tuple[int, Gemm]) -> None:
        """first without its last product; then for the others: first product, last one of before, the rest; last.

        All of it under a condition if the loop may have no iteration, with nothing in flight behind.
        """
        if self.analyzer.can_prove(loop.extent >= 1):
            self.rotate(loop, deferral)
            return
        outer, self.steps = self.steps, []
        self.rotate(loop, deferral)
        self.settle(len(self.flights))
        self.steps, steps = outer, self.steps
        self.steps.append(Guard(loop.var, loop.extent, tuple(steps)))

    def rotate(self, loop: Loop, deferral: tuple[int, Gemm]) -> None:
        """The loop's steps with its last product deferred; that of its last iteration is in flight behind them."""
        at, last = deferral
        nodes = tuple(node for node in loop.body if node not in self.loads)
        self.deferred.append((last, loop))
        outer, self.steps = self.steps, []
        self.body(nodes[:-1])
        self.settle(len(self.flights))
        self.steps, first = outer, self.steps
        self.steps.append(Given(loop.var, loop.start, tuple(first)))
        if self.ping_pong:
            self.turn = (nodes[at], last)
        sets = last in self.sets  # its first time: in the loop's first iteration, or after it
        if sets:
            self.sets[last] = after_first(loop.var, loop.start + 1)
        rotated = (*nodes[: at + 1], last, *nodes[at + 1 : -1])
        self.late = next(buffer for buffer in self.slots if buffer.first is last), nodes[at]
        self.repeat(loop.var, loop.start + 1, loop.extent - 1, rotated)
        self.settle(len(self.flights))
        self.turn, self.late = None, None
        if sets:
            self.sets[last] = loop.extent > 1
        self.statement(last)

    def folds(self, fill: Fill, following: tuple[Node, ...]) -> bool:
        """Whether clearing an accumulator is left to its first product, which then sets it.

        Behind a branch products set it, too, and it is cleared for the other way alone: products that depend on what
        threads did before a branch on data are serialized (ptxas, C7520).
        """
        tile = fill.dst.tile
        if not (fill.dst.whole and isinstance(fill.value, tirx.FloatImm | tirx.IntImm) and fill.value.value == 0):
            return False
        node = next((node for node in following if tile in node.reads + node.writes), None)
        for arm in node.bodies if isinstance(node, Branch) else ():
            self.fold(first_product(tile, arm, self.analyzer))
        found = first_product(tile, following, self.analyzer)
        self.fold(found)
        if found is not None:
            self.folded.append((fill, found[0]))
        return found is not None

    def fold(self, first: tuple[Gemm, tirx.Expr | bool] | None) -> None:
        """A product sets its accumulator unless a condition holds."""
        if first is not None and first[0].accumulate:
            self.sets[first[0]] = first[1]


def _others(program: TileProgram, slots: Mapping[CircularBuffer, int]) -> set[Node]:
    """What roles other than consumers do: loads, waits and signals, and branches around nothing else."""
    found: set[Node] = {copy for buffer in slots for copy in buffer.copies + buffer.others}
    found |= {node for node in program.nodes() if isinstance(node, Wait | Signal)}
    for node in program.nodes():
        if isinstance(node, Branch):
            inner = tuple(walk(node.then + node.otherwise))
            if all(child in found or isinstance(child, Branch) for child in inner):
                found.add(node)
    return found


_NODES: TypeTable[Callable[[_Scheduler, Any], None]] = TypeTable(
    "steps of a consumer",
    {
        Assign: _Scheduler.do,
        Branch: _Scheduler.branch,
        Copy: _Scheduler.do,
        Fill: _Scheduler.do,
        Gemm: _Scheduler.issue,
        Let: _Scheduler.define,
        Loop: _Scheduler.loop,
        Parallel: _Scheduler.do,
        Print: _Scheduler.do,
        Reduce: _Scheduler.do,
        Scan: _Scheduler.do,
        Sort: _Scheduler.do,
    },
)
"""Waits and signals are other roles' (`_others`)."""
