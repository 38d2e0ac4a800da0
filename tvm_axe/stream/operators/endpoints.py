"""Where streams begin and end that don't come from off-chip memory: inputs, outputs, feedback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_axe.stream.engine import Process, Unit
from tvm_axe.stream.operators.base import Operator
from tvm_axe.stream.types import StreamType

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Node
    from tvm_axe.stream.loops import Feedback


class Input(Operator):
    """A stream that is given, and waits to be taken from the start."""

    kind = "Input"

    def __init__(self, type: StreamType) -> None:
        self.type = type

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        return [self.type]

    def process(self, node: Node, unit: Unit) -> Process:
        (sink,) = unit.outputs
        yield from unit.send_all(sink, unit.engine.fed[node.name])


class Output(Operator):
    """A result of the program."""

    kind = "Output"

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        return []

    def process(self, node: Node, unit: Unit) -> Process:
        (source,) = unit.inputs
        found: list[tuple[Any, int]] = []
        unit.engine.outputs[node.name] = found
        while not found or found[-1][1] < source.rank:
            while not source.items:
                yield source
            found.extend(unit.take_all(source))


class Discard(Operator):
    """What takes a stream that nobody else takes."""

    kind = "Discard"

    def process(self, node: Node, unit: Unit) -> Process:
        (source,) = unit.inputs
        stop = 0
        while stop < source.rank:
            while not source.items:
                yield source
            _, stop = unit.take_all(source)[-1]


DISCARD = Discard()


class FeedbackEdge(Operator):
    """A stream that is used before it is made.

    It is no unit of its own: what closes it sends into its consumer's channel, which holds the initial values.
    """

    kind = "Feedback"

    def __init__(self, type: StreamType, initial: tuple[Any, ...]) -> None:
        self.type, self.initial = type, initial
        self.feedback: Feedback

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        return [self.type]
