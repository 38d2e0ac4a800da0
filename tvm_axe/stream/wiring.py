"""Which units and channels the runs of a program have: found out once, as long as nobody changes the program.

A program says who takes a stream. A run needs a unit for each operator, one more where several take a stream or nobody
does, and channels between them. These are new in each run; what they are is the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import sympy

from tvm_axe.stream import steps
from tvm_axe.stream.operators.endpoints import DISCARD, FeedbackEdge
from tvm_axe.stream.operators.loops import LoopHead
from tvm_axe.stream.operators.routing import BROADCAST

if TYPE_CHECKING:
    from tvm_axe.stream.codec import Token
    from tvm_axe.stream.graph import Node, Stream
    from tvm_axe.stream.operators.base import Operator
    from tvm_axe.stream.program import StreamProgram
    from tvm_axe.stream.types import StreamType

__all__ = ["Place", "Wire", "Wiring", "wiring_of"]


class Wire:
    """What a channel is in every run.

    Attributes
    ----------
    type : StreamType
        The type of its stream.
    rank : int
        The rank of that.
    stored : bool
        Whether its tiles lie in on-chip memory, so that whoever takes one reads it from there.
    number : int
        The channel's place among those of a run.
    depth : int or None
        The tokens that it holds, if not as many as channels of the accelerator do.
    source, target : str
        The names of the units that send to it and take from it.
    room, send : int
        The steps of its writer.
    port : int
        The reader's port that it leads to.
    peek, free, take : int
        The steps of its reader.
    initial : tuple[Token, ...]
        The tokens that are in it from the start.
    returns : bool
        Whether it is feedback, in which tokens are left at the end.
    """

    __slots__ = (
        "depth", "free", "initial", "number", "peek", "port", "rank", "returns", "room", "send", "source", "stored",
        "take", "target", "type",
    )  # fmt: skip

    def __init__(self, stream: Stream, number: int, sender: Place, depth: int | None) -> None:
        self.type, self.rank, self.stored = stream.type, len(stream.type.shape), stream.stored
        self.number, self.depth, self.source = number, depth, sender.name
        cell = (2 * len(sender.outputs) + 1) << 4
        self.room, self.send = cell | steps.ROOM, cell | steps.SEND
        sender.outputs.append(number)
        self.initial: tuple[Token, ...] = ()
        self.returns = False

    def lead_to(self, reader: Place) -> None:
        """Make it the reader's next input."""
        self.target, self.port = reader.name, 2 * len(reader.inputs)
        cell = self.port << 4
        self.peek, self.free, self.take = cell | steps.PEEK, cell | steps.FREE, cell | steps.TAKE
        reader.inputs.append(self.number)


class Place:
    """What a unit is in every run.

    Attributes
    ----------
    name : str
        The unit's name.
    operator : Operator
        What it does.
    node : Node
        The operator in the program, or whose streams are copied or thrown away.
    likeness : Hashable or None
        What the operator's work depends on beside tokens, the same for units that are alike; None if no other one is,
        or something is sent to where tokens are from the start.
    inputs, outputs : list[int]
        The numbers of its channels, in the operator's order.
    """

    __slots__ = ("inputs", "likeness", "name", "node", "operator", "outputs")

    def __init__(self, name: str, operator: Operator, node: Node, likeness: Hashable | None) -> None:
        self.name, self.operator, self.node, self.likeness = name, operator, node, likeness
        self.inputs: list[int] = []
        self.outputs: list[int] = []


@dataclass(frozen=True, eq=False)
class Wiring:
    """The units and channels of a program's runs.

    Attributes
    ----------
    places : list[Place]
        The units, by their numbers.
    wires : list[Wire]
        The channels, by theirs.
    order : list[int]
        The units in the order in which they begin: what sends to others first.
    sinks : list[int]
        The units that a run ends with.
    metered : list[tuple[int, int, StreamType]]
        The units and channels of the streams that are measured, since their sizes are known only then.
    ports : numpy.ndarray
        The channels that the ports of all units are of, one unit's behind another's (`tvm_axe.stream.steps`).
    first_ports : numpy.ndarray
        The place of each unit's first port among these.
    filled : numpy.ndarray
        How many tokens are in each channel from the start.
    """

    places: list[Place]
    wires: list[Wire]
    order: list[int]
    sinks: list[int]
    metered: list[tuple[int, int, StreamType]]
    ports: np.ndarray
    first_ports: np.ndarray
    filled: np.ndarray


def wiring_of(program: StreamProgram) -> Wiring:
    """Return the units and channels of a program as it is now.

    Raises
    ------
    StreamError
        If feedback isn't closed, or nobody takes a stream.
    """
    state = [
        (stream.depth, stream.discarded, len(stream.consumers)) for node in program.nodes for stream in node.outputs
    ]
    if program.wired is None or program.wired[0] != state:
        program.wired = state, _Maker(program).made()
    return program.wired[1]


class _Maker:
    def __init__(self, program: StreamProgram) -> None:
        self.program = program
        self.places: list[Place] = []
        self.wires: list[Wire] = []
        self.arrivals: dict[tuple[Stream, Node], deque[Wire]] = defaultdict(deque)

    def made(self) -> Wiring:
        own: list[tuple[Node, Place]] = []
        for node in self.program.nodes:
            if not isinstance(node.operator, FeedbackEdge):
                own.append((node, self.place(node.name, node.operator, node, node.likeness)))
            elif not node.inputs:
                raise node.fail(_unclosed(node))
        order: list[int] = []
        metered: list[tuple[int, int, StreamType]] = []
        measured: set[sympy.Symbol] = set()
        for number, (node, place) in enumerate(own):
            known = len(self.places)
            for stream in node.outputs:
                self.wire(stream, place)
                if not measured.issuperset(stream.type.symbols):
                    metered.append((number, place.outputs[-1], stream.type))
                    measured.update(stream.type.symbols)
            order += [number, *range(known, len(self.places))]
        for node, place in own:
            for stream in node.inputs:
                self.arrivals[stream, node].popleft().lead_to(place)
        stores = ("Output", "RandomOffChipStore")
        sinks = [n for n, place in enumerate(self.places) if not place.outputs or place.operator.kind in stores]
        alike = Counter(place.likeness for place in self.places)
        for place in self.places:
            if alike[place.likeness] == 1 or any(self.wires[number].initial for number in place.outputs):
                place.likeness = None
        filled = np.array([len(wire.initial) for wire in self.wires], np.int64)
        return Wiring(self.places, self.wires, order, sinks, metered, *_ports(self.places), filled)

    def place(self, name: str, operator: Operator, node: Node, likeness: Hashable | None) -> Place:
        self.places.append(Place(name, operator, node, likeness))
        return self.places[-1]

    def link(self, stream: Stream, sender: Place, depth: int | None) -> Wire:
        self.wires.append(Wire(stream, len(self.wires), sender, depth))
        return self.wires[-1]

    def wire(self, stream: Stream, place: Place) -> None:
        """Make the channels of a stream, and a broadcast if it has several."""
        ends: list[tuple[Stream, Node]] = []  # a stream as its consumer knows it, and the consumer
        for consumer in stream.consumers:
            if isinstance(consumer.operator, FeedbackEdge):
                (known,) = consumer.outputs
                ends += [(known, taker) for taker in _takers(known)]
            else:
                ends.append((stream, consumer))
        several = len(ends) + stream.discarded
        if not several:
            raise stream.node.fail(
                f"output {stream.name!r}, {stream}, isn't connected; use it, or say Stream.discard()"
            )
        if several > 1:
            likeness = BROADCAST.kind, stream.type.rank, several
            split = self.place(f"{stream.name} to {len(ends)}", BROADCAST, stream.node, likeness)
            self.link(stream, place, stream.depth).lead_to(split)
            place = split
        for known, consumer in ends:
            link = self.link(stream, place, known.depth)
            self.arrivals[known, consumer].append(link)
            if known is not stream:
                _fill(link, known, consumer)
        if stream.discarded:
            away = self.place(f"{stream.name}, discarded", DISCARD, stream.node, None)
            self.link(stream, place, stream.depth).lead_to(away)


def _ports(places: list[Place]) -> tuple[np.ndarray, np.ndarray]:
    """Return the channels of all units' ports, and where each unit's begin."""
    ports: list[int] = []
    first: list[int] = []
    for place in places:
        first.append(len(ports))
        for pair in zip_longest(place.inputs, place.outputs, fillvalue=0):
            ports.extend(pair)
    return np.array(ports, np.int64), np.array(first, np.int64)


def _fill(link: Wire, known: Stream, consumer: Node) -> None:
    """Put the initial values of feedback into the channel that it is."""
    # A loop takes back all that it sends on its way; other feedback may have more than is taken.
    link.returns = not isinstance(consumer.operator, LoopHead)
    assert isinstance(known.node.operator, FeedbackEdge)
    link.initial = tuple((value, 0) for value in known.node.operator.initial)


def _unclosed(node: Node) -> str:
    """Return what to do with feedback that nothing is connected to."""
    loops = [taker.name for stream in node.outputs for taker in stream.consumers if taker.kind == LoopHead.kind]
    if loops:
        return f"nothing comes back to loop {loops[0]!r}; call Loop.close with what its body makes"
    return "nothing closes it; call Feedback.close with the stream that it carries"


def _takers(stream: Stream) -> list[Node]:
    if not stream.consumers:
        raise stream.node.fail("nobody takes it")
    return stream.consumers
