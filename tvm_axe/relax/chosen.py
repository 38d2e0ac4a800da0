"""What was chosen for a function of a model along a mesh axis: how each call is run, and what is moved before it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tvm_axe.layout import Link
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.relax.forms import SLICE, Form, Move
from tvm_axe.relax.graph import Graph, Node
from tvm_axe.relax.sizes import shape_at
from tvm_axe.relax.transfers import Transfer
from tvm_axe.relax.ways import Strategy

__all__ = ["Choice", "Chosen", "Moved", "moves_of", "seconds_of"]


class Moved(NamedTuple):
    """A value that is brought to another form before a call."""

    value: int
    source: Form
    target: Form
    how: Move


class Choice(NamedTuple):
    """A call, how it is run, and what is moved before."""

    node: Node
    strategy: Strategy
    moves: tuple[Moved, ...]

    @property
    def transfer(self) -> Transfer | None:
        """The move along an outer axis that the call is, of what a device has."""
        of = self.node.transfer
        return None if of is None else of.within(self.strategy.ins[0], self.strategy.outs[0])


def moves_of(choices: Iterable[Choice], link: Link) -> Iterator[Move]:
    """Yield what is moved before calls and in them, along outer axes too."""
    for choice in choices:
        yield from (each.how for each in choice.moves)
        yield from (stage.how for stage in choice.strategy.stages)
        transfer = choice.transfer
        if transfer is not None:
            yield transfer.how(link)


def seconds_of(choices: Iterable[Choice]) -> float:
    """Return what calls take a device, and what is moved before them."""
    return sum(choice.strategy.seconds + sum(each.how.seconds for each in choice.moves) for choice in choices)


@dataclass(frozen=True)
class Chosen:
    """What was chosen for a function.

    Attributes
    ----------
    graph : Graph
        The function.
    choices : tuple[Choice, ...]
        In the order of the calls.
    held : Mapping[int, tuple[Form, ...]]
        In which forms inputs and weights are placed.
    results : tuple[Form, ...]
        The form of each result.
    link : Link
        Between two of the devices.
    axis : str
        The axis.
    """

    graph: Graph
    choices: tuple[Choice, ...]
    held: Mapping[int, tuple[Form, ...]]
    results: tuple[Form, ...]
    link: Link
    axis: str
    operations: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Of each product how many operations it has, and the part that a device does."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Why what is computed whole by every device along the axis is, of products by name."""

    @property
    def bytes(self) -> int:
        """Bytes that the busiest device of each move receives."""
        return sum(how.bytes for how in moves_of(self.choices, self.link))

    @property
    def collectives(self) -> Counter[str]:
        """How often there is which kind of move."""
        return Counter(how.kind for how in moves_of(self.choices, self.link) if how.kind != SLICE)

    @property
    def seconds(self) -> float:
        """What a call takes a device."""
        return seconds_of(self.choices)

    @property
    def weights(self) -> tuple[int, int]:
        """Bytes of weights that a device holds, and that there are."""
        here, there = 0, dict[object, int]()
        for number, forms in self.held.items():
            value = self.graph.values[number]
            if value.kind == "weight":
                here += round(dtype_bytes(value.dtype, value.size) * sum(form.fraction() for form in forms))
                there[value.name, value.param] = dtype_bytes(
                    value.dtype, math.prod(shape_at(value.whole, self.graph.typical))
                )
        return here, sum(there.values())

    def without_pins(self) -> Chosen:
        """The same where what calls pin is the value that they take; moves to it stay."""
        same: dict[int, int] = {}
        choices = []
        for node, strategy, moves in self.choices:
            moves = tuple(each._replace(value=same.get(each.value, each.value)) for each in moves)
            ins = tuple(same.get(value, value) for value in node.ins)
            if node.pins is not None:
                same[node.outs[0]] = ins[0]
                node, strategy = replace(node, outs=()), strategy._replace(outs=())
            choices.append(Choice(replace(node, ins=ins), strategy, moves))
        results = [same.get(value, value) for value in self.graph.results]
        return replace(self, graph=replace(self.graph, results=results), choices=tuple(choices))

    @property
    def divided(self) -> float:
        """The part of the operations of products that devices share."""
        total = sum(count for count, _ in self.operations.values())
        done = sum(count for count, share in self.operations.values() if share < 1)
        return done / total if total else 1.0
