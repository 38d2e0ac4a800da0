"""The proof that a specialized kernel gets on: that no role waits for ever for what another does only after it.

What a role does to barriers is a list of events, which the program's loops and branches alone decide: arrivals, and
waits for the phases of barriers. They are run side by side until all are through, or none can go on, which is a stall.
The order in which roles take their turns at this doesn't matter: a phase that is complete stays so until the role that
waits for it has seen it, so an event that can be done can be done later too, and every order comes to the same end.

What isn't known is tried: loops with no iteration, one, two, and as many as it takes until all is as it was an
iteration before (the most slots of a buffer, and one for what is in flight over the loop's end); branches both ways;
and different ways in turn where they are in a loop. Longer loops repeat what these do: how many slots a role is ahead
of another is bounded by the slots, and an iteration's events are the same but for the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tvm_axe.tile.nodes import Branch, Loop, Node
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.cuda.specialized.buffers import CircularBuffer
from tvm_axe.tile.targets.cuda.specialized.events import Barrier, Event, Roles, Ways
from tvm_axe.tile.targets.cuda.specialized.memory import SpecializedMemory
from tvm_axe.tile.targets.cuda.specialized.steps import Step

_TILES = 3  # of a persistent block: more than there are slots of what is loaded once a tile
_MOST_WAYS = 256  # beyond it, only every two of the choices are tried together


@dataclass(frozen=True)
class Stall:
    """Why a plan doesn't get on.

    Attributes
    ----------
    waits : tuple of str
        What each role that doesn't end waits for, as a sentence without its end.
    names : tuple of str
        The circular buffers and the staged copies that they wait for.
    """

    waits: tuple[str, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.waits)


def find_stall(
    program: TileProgram, memory: SpecializedMemory, steps: Sequence[Step], warpgroups: int, persistent: bool
) -> Stall | None:
    """Find out whether the roles of a plan may wait for each other for ever.

    Parameters
    ----------
    program : TileProgram
        The program, whose loops and loads the producer follows.
    memory : SpecializedMemory
        The circular buffers with their slots, and the copies that are staged.
    steps : sequence of Step
        What a consumer does of a tile of the grid.
    warpgroups : int
        How many warpgroups consume.
    persistent : bool
        Whether a block takes tile after tile.

    Returns
    -------
    Stall or None
        What waits for what; None is the proof that every role ends.
    """
    roles = Roles(program, memory, steps, warpgroups)
    tiles = _TILES if persistent else 1
    for ways in all_ways(program, memory.buffers, persistent):
        faults = roles.faults(ways)
        if faults:
            return Stall(faults, ())
        stall = run(roles.events(ways, tiles), roles.arrivals)
        if stall is not None:
            return stall
    return None


def run(events: Mapping[str, Sequence[Event]], arrivals: Mapping[Barrier, int]) -> Stall | None:
    """Run roles' events side by side, to their ends or to where none can go on.

    Parameters
    ----------
    events : mapping from str
        The events of each role.
    arrivals : mapping from Barrier to int
        How many arrivals complete a phase of each barrier.
    """
    states = {barrier: _Phases(count) for barrier, count in arrivals.items()}
    at = dict.fromkeys(events, 0)
    moved = True
    while moved:
        moved = False
        for role, todo in events.items():
            while at[role] < len(todo) and _done(todo[at[role]], role, states):
                at[role] += 1
                moved = True
    blocked = {role: todo[at[role]] for role, todo in events.items() if at[role] < len(todo)}
    if not blocked:
        return None
    names = dict.fromkeys(event.barrier.name for event in blocked.values() if event.barrier.of is not None)
    return Stall(tuple(f"{role} waits {event}" for role, event in blocked.items()), tuple(names))


@dataclass
class _Phases:
    """A barrier: how many arrivals a phase takes, how many phases are complete, and who arrived in this one."""

    count: int
    complete: int = 0
    arrived: list[str] = field(default_factory=list)
    joined: dict[str, int] = field(default_factory=dict)  # of a role that waits where it arrives: the phase

    def arrive(self, role: str) -> None:
        self.arrived.append(role)
        if len(self.arrived) == self.count:
            self.complete += 1
            self.arrived.clear()


def _done(event: Event, role: str, states: Mapping[Barrier, _Phases]) -> bool:
    """Do an event if it can be done."""
    state = states[event.barrier]
    if event.kind == "arrive":
        state.arrive(role)
        return True
    if event.kind == "join":  # as bar.sync: arrives, and waits for the phase that it arrived in
        if role not in state.joined:
            state.joined[role] = state.complete
            state.arrive(role)
        if state.complete <= state.joined[role]:
            return False
        del state.joined[role]
        return True
    return state.complete >= event.phase


def all_ways(program: TileProgram, buffers: Mapping[CircularBuffer, int], persistent: bool) -> Iterator[Ways]:
    """The ways through a program's loops and branches."""
    analyzer = program.analyzer()
    most = max(buffers.values(), default=1) + 3
    choices: dict[Node, list[tuple[int, int]]] = {}
    for node, inside in _control(program.body, persistent):
        if isinstance(node, Branch):
            options = [0, 1]
        elif isinstance(node.extent, int):
            options = [min(max(node.extent, 0), most)]
        else:
            options = [*range(1 if analyzer.can_prove(node.extent >= 1) else 0, 3), most]
        # In turn where an iteration may go another way than the one before.
        choices[node] = [(a, b) for a in options for b in (options if inside else [a])]
    nodes, options_of = list(choices), list(choices.values())
    if math.prod(map(len, options_of)) <= _MOST_WAYS:
        yield from (Ways(dict(zip(nodes, made))) for made in itertools.product(*options_of))
        return
    for base in (0, -1):
        common = {node: options[base] for node, options in choices.items()}
        for one, other in itertools.combinations(nodes, 2):
            for a, b in itertools.product(choices[one], choices[other]):
                yield Ways({**common, one: a, other: b})


def _control(body: tuple[Node, ...], inside: bool) -> Iterator[tuple[Loop | Branch, bool]]:
    """Loops and branches, and whether a loop is around them."""
    for node in body:
        if isinstance(node, Loop | Branch):
            yield node, inside
        for inner in node.bodies:
            yield from _control(inner, inside or isinstance(node, Loop))
