"""Where a loop's elements enter its body, and where they leave it or go back; see `tvm_axe.stream.loops`.

The way back carries rounds, each with a stop behind it, and an empty one when all elements of a list have left: that is
how the head knows that the list is done, so that no token is left in the loop when the next one enters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_axe.stream.codec import EMPTY
from tvm_axe.stream.engine import Process, Unit
from tvm_axe.stream.operators.base import Operator, late_stops, not_together, read_cost
from tvm_axe.stream.types import Dim, Scalar, StreamType, data_differ, shapes_differ

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Node


class LoopHead(Operator):
    """See `Stream.loop`: what enters and what comes back, as rounds."""

    kind = "Loop"

    def __init__(self, most: int | None) -> None:
        self.most = most

    def stored(self, inputs: list[bool]) -> bool:
        return False

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        entering, back = inputs
        if data_differ(entering.data, back.data):
            raise node.fail(f"{entering.data} enters it, and {back.data} comes back")
        rounds = Dim(node.symbol("_rounds"), ragged=entering.rank > 1)
        left = Dim(node.symbol("_left"), ragged=True)
        return [StreamType((*entering.shape[:-1], rounds, left), entering.data)]

    def process(self, node: Node, unit: Unit) -> Process:
        (entering, back), (sink,) = unit.inputs, unit.outputs
        costs = {channel: read_cost(unit, channel) for channel in unit.inputs}
        routing = 0 if unit.engine.accelerator is None else 1
        source = entering
        rounds = stop = ends = 0  # rounds of the list that have begun, its stop, and that of a round
        begun = False  # whether something is in the round that is under way
        while True:
            while not source.items:
                yield source
            value, _ = source.items[0]
            if value is not EMPTY and not begun and rounds == self.most:
                raise unit.fail(f"after most={self.most} rounds there are elements of a list that go on")
            yield from unit.peek(source)
            if value is not EMPTY:
                cost = costs[source]
                unit.work(routing + (cost(value) if cost is not None else 0))
            value, ends = unit.take(source)
            if source is entering:
                stop = ends
            if value is not EMPTY or begun:
                unit.send(sink, value, min(ends, 1))
                rounds += not begun
                begun = not ends
                if ends:
                    source = back
                continue
            # An empty list, or an empty round: the list has ended, maybe with others around it.
            unit.send(sink, EMPTY, stop + 1)
            if stop == entering.rank:
                break
            source, rounds = entering, 0
        while ends < back.rank:
            _, ends = yield from unit.get(back)


class LoopEnd(Operator):
    """See `Loop.close`: what leaves a loop, and what goes back.

    Attributes
    ----------
    head : str
        The name of the loop's head.
    """

    kind = "LoopEnd"

    def __init__(self, head: str) -> None:
        self.head = head

    def stored(self, inputs: list[bool]) -> bool:
        return False

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        state, again = inputs
        body = node.program.stream(self.head)
        entering, back = (stream.type for stream in body.node.inputs)
        if shapes_differ(body.type.shape, state.shape) or data_differ(entering.data, state.data):
            raise node.fail(f"{body} goes into the loop's body, and {state} comes out")
        if not isinstance(again.data, Scalar) or shapes_differ(state.shape, again.shape):
            raise node.fail(f"which elements go on must be a scalar for each of {state}, not {again}")
        number = Dim(node.symbol(), ragged=entering.rank > 1)
        left = entering.shape if state.shape == body.type.shape else (*entering.shape[:-1], number)
        return [StreamType(left, state.data), StreamType(back.shape, state.data)]

    def process(self, node: Node, unit: Unit) -> Process:
        sources, back = unit.inputs, unit.outputs[1]
        cost = read_cost(unit, sources[0])
        routing = 0 if unit.engine.accelerator is None else 1
        stop = 0
        begun = left = False  # whether the list has a round, and whether an element of it has left
        while stop < sources[0].rank:
            heads = []
            for source in sources:
                heads.append((yield from unit.peek(source)))
            (value, goes), stops = zip(*heads)
            if (value is EMPTY) is not (goes is EMPTY):
                raise not_together(unit, (yield from unit.now()), heads)
            if value is not EMPTY:
                unit.work(routing + (cost(value) if cost is not None else 0))
            for source in sources:
                unit.take(source)
            stop = min(stops)
            begun = begun or value is not EMPTY or stop == 1
            left = left or (value is not EMPTY and not goes)
            self._send(unit, value, goes, stop, begun and not left)
            if stop < max(stops):
                begun, left = begun and stop < 2, left and stop < 2
                stop = yield from late_stops(unit, heads)
                self._send(unit, EMPTY, EMPTY, stop, begun and not left)
            begun, left = begun and stop < 2, left and stop < 2
        unit.send(back, EMPTY, back.rank)

    def _send(self, unit: Unit, value: Any, goes: Any, stop: int, lost: bool) -> None:
        """Send an element out of the loop or back, and the stop behind it: back of a round, out of whole lists.

        A list of which nothing is left, as its body dropped all of it (`lost`), is closed by a stop of its own.
        """
        done, back = unit.outputs
        stays = value if value is not EMPTY and goes else EMPTY
        if value is not stays:
            unit.send(done, value, 0)
        if stop > 1:
            if stays is not EMPTY:
                raise unit.fail(
                    f"{unit.inputs[0].wire.source!r} ends with an element that goes on; it isn't the loop's body"
                )
            if lost and stop > 2:
                unit.send(done, EMPTY, 1)
            unit.send(done, EMPTY, stop - 1)
        elif stop or stays is not EMPTY:
            unit.send(back, stays, stop)
