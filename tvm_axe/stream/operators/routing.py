"""Partition, Reassemble and EagerMerge, which send values where they are told to; and broadcast."""

from __future__ import annotations

from array import array
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import sympy

from tvm_axe.stream.codec import EMPTY
from tvm_axe.stream.engine import AHEAD, Channel, Process, Unit
from tvm_axe.stream.memo import exact
from tvm_axe.stream.operators.base import Cost, Operator, read_cost
from tvm_axe.stream.types import Dim, Selector, Size, StreamType, as_size, data_differ, shapes_differ, symbol

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Node


class Partition(Operator):
    """See `Stream.partition`."""

    kind = "Partition"

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def stored(self, inputs: list[bool]) -> bool:
        return False

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        type, selector = inputs
        if not isinstance(selector.data, Selector):
            raise node.fail(f"its second stream must be one of selectors, not {selector}")
        outer = type.shape[: type.rank - self.rank]
        if not 0 <= self.rank < type.rank or len(outer) != selector.rank or shapes_differ(outer, selector.shape):
            raise node.fail(
                f"rank={self.rank} of {type} must leave dims outside, {outer_text(type, self.rank)}, that are those of "
                f"the selectors, {selector}"
            )
        inner = type.shape[type.rank - self.rank :]
        # Whatever else the same selectors partition, output i gets as much.
        origin = node.inputs[1]
        found = []
        for number in range(selector.data.outputs):
            size = symbol(f"{origin.name}_{number}")
            dims = [Dim(node.symbol(f"_{number}_{at}"), True) if dim.ragged else dim for at, dim in enumerate(inner)]
            found.append(StreamType((size, *dims), type.data))
        return found

    def process(self, node: Node, unit: Unit) -> Process:
        source, selector = unit.inputs
        rank, sinks, items, write = self.rank, unit.outputs, source.items, unit.script.append
        cost = read_cost(unit, source)
        routing = 0 if unit.engine.accelerator is None else 1
        ended = selected = False  # the data, and the selectors
        while not ended:
            # A selector isn't taken before there is something to send: with feedback there are more than data.
            while not source.items:
                yield source
            value, stop = source.items[0]
            if value is EMPTY and stop > rank:
                unit.take(source)
                ended = stop == source.rank
                continue
            write(source.peek)
            chosen: Any = EMPTY
            while chosen is EMPTY:
                if selected:
                    raise unit.fail(f"its selectors, from {selector.wire.source!r}, have ended before its data")
                while not selector.items:
                    yield selector
                chosen, stop = unit.take(selector)
                selected = stop == selector.rank
            targets = [sinks[number] for number in sorted(chosen)]
            while True:
                while not items:
                    yield source
                value, stop = items.popleft()
                write(source.peek)
                if value is not EMPTY:
                    unit.work(routing + (cost(value) if cost is not None else 0))
                write(source.free)
                for sink in targets:
                    unit.send(sink, value, stop if stop < rank else rank)
                if stop >= rank:
                    ended = stop == source.rank
                    break
        for sink in sinks:
            unit.send(sink, EMPTY, sink.rank)


class Reassemble(Operator):
    """See `StreamProgram.reassemble`."""

    kind = "Reassemble"

    def __init__(self, rank: int, in_order: bool) -> None:
        self.rank, self.in_order = rank, in_order

    def stored(self, inputs: list[bool]) -> bool:
        return False

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        *streams, selector = inputs
        if not isinstance(selector.data, Selector) or selector.data.outputs != len(streams):
            raise node.fail(f"it needs selectors among its {len(streams)} streams, not {selector}")
        inner = same_inner(node, streams, self.rank)
        # Whatever the streams have is selected somewhere.
        some = Dim(as_sum([type.shape[0].size for type in streams], node), ragged=True)
        return [StreamType((*selector.shape, some, *inner), streams[0].data)]

    def process(self, node: Node, unit: Unit) -> Process:
        *sources, selector = unit.inputs
        (sink,) = unit.outputs
        rank = self.rank
        costs = [read_cost(unit, source) for source in sources]
        routing = 0 if unit.engine.accelerator is None else 1
        while True:
            chosen, stop = yield from unit.get(selector)
            if chosen is EMPTY:
                unit.send(sink, EMPTY, stop + rank + 1)
            else:
                left = sorted(chosen)
                taken, reading = [sources[number] for number in left], None
                for source in taken if self.in_order else ():
                    while not source.items:
                        yield source
                    unit.script.append(source.peek)
                if self.in_order and rank == 0 and len(left) > 1:
                    reading = _same_reading(taken, [costs[number] for number in left])
                if reading is not None:
                    unit.merge(taken, sink, routing + reading, stop + 1)
                    left.clear()
                    if len(unit.script) >= AHEAD:
                        yield None
                elif not left:
                    unit.send(sink, EMPTY, rank + 1)
                    if stop:
                        unit.send(sink, EMPTY, rank + 1 + stop)
                while left:
                    at = (yield from unit.earliest([sources[number] for number in left])) if len(left) > 1 else 0
                    number = left.pop(at)
                    ends = rank if left else rank + 1 + stop
                    yield from forward(unit, sources[number], sink, rank, ends, routing, costs[number])
            if stop == selector.rank:
                return


class EagerMerge(Operator):
    """See `StreamProgram.eager_merge`."""

    kind = "EagerMerge"

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        rank = inputs[0].rank - 1
        inner = same_inner(node, inputs, rank)
        total = Dim(as_size("total", sum(type.shape[0].size for type in inputs), least=0))
        return [StreamType((total, *inner), inputs[0].data), StreamType((total,), Selector(len(inputs)))]

    def process(self, node: Node, unit: Unit) -> Process:
        sources = list(enumerate(unit.inputs))
        data, origin = unit.outputs
        rank = data.rank - 1
        while sources:
            at = yield from unit.earliest([source for _, source in sources])
            number, source = sources[at]
            value, stop = source.items[0]
            if value is EMPTY and stop == source.rank:
                unit.free(source)
                del sources[at]
                continue
            unit.send(origin, (number,), 0)
            if (yield from forward(unit, source, data, rank, rank, 0, None)) == source.rank:
                del sources[at]
        unit.send(data, EMPTY, rank + 1)
        unit.send(origin, EMPTY, 1)


def _same_reading(sources: list[Channel], costs: list[Cost | None]) -> int | None:
    """Return what it costs to read the next value of each of several channels, if these are equal and cost the same."""
    values = [source.items[0][0] for source in sources]
    first = values[0]
    if first is EMPTY or not all(exact(value) and value == first for value in values):
        return None
    reading = {0 if cost is None else cost(first) for cost in costs}
    return reading.pop() if len(reading) == 1 else None


def forward(
    unit: Unit, source: Channel, sink: Channel, rank: int, ends: int, routing: int, cost: Cost | None
) -> Generator[Channel, None, int]:
    """Send on one tensor of rank `rank`, with the stop `ends` at its end; return the stop that it came with.

    Each value is sent `routing` cycles, and those for reading it, after it came.
    """
    begun, items, write = False, source.items, unit.script.append
    while True:
        while not items:
            yield source
        value, stop = items.popleft()
        if value is EMPTY and stop > rank and not begun:
            if stop == source.rank:
                raise unit.fail(f"{source.wire.source!r} has ended, and one more tensor of it was selected")
            write(source.take)
            continue
        begun = True
        if value is not EMPTY:
            unit.read_after(source, routing + (cost(value) if cost is not None else 0))
        write(source.take)
        if stop >= rank and value is EMPTY and ends > rank:
            unit.send(sink, EMPTY, rank)
        write(sink.send)
        sink.items.append((value, stop if stop < rank else ends))
        if stop >= rank:
            return stop


class Broadcast(Operator):
    """What sends a stream to several units at the same time, once all of them have room."""

    kind = "Broadcast"

    def process(self, node: Node, unit: Unit) -> Process:
        (source,), sinks = unit.inputs, unit.outputs
        steps = array(
            "q", [source.peek, *(sink.wire.room for sink in sinks), *(sink.send for sink in sinks), source.free]
        )
        items, stop = source.items, 0
        while stop < source.rank:
            while not items:
                yield source
            _, stop = items[-1]
            for sink in sinks:
                sink.items.extend(items)
            unit.script.extend(steps * len(items))
            items.clear()


BROADCAST = Broadcast()


def as_sum(sizes: list[Size], node: Node) -> sympy.Expr:
    """Return the sum of sizes as an expression, a symbol's if all of them are known."""
    total = as_size("total", sum(sizes), least=0)
    return node.symbol("_selected") if isinstance(total, int) else total


def same_inner(node: Node, streams: list[StreamType], rank: int) -> tuple[Dim, ...]:
    """Return the inner dims that streams share, all but the outermost.

    Raises
    ------
    StreamError
        If they differ in them or in their data, or there are not `rank` of them.
    """
    first = streams[0]
    for other in streams:
        unlike = shapes_differ(first.shape[1:], other.shape[1:]) or data_differ(first.data, other.data)
        if other.rank != rank + 1 or unlike:
            raise node.fail(
                f"its streams must be alike but for their outermost dims, with {rank} more inside; there are {first} "
                f"and {other}"
            )
    return tuple(
        dim if not dim.ragged and all(type.shape[at] == dim for type in streams) else Dim(node.symbol(f"_{at}"), True)
        for at, dim in enumerate(first.shape[1:], start=1)
    )


def outer_text(type: StreamType, rank: int) -> str:
    """Write the dims of a stream that are outside of the `rank` inner ones."""
    return f"[{', '.join(map(str, type.shape[: max(0, type.rank - rank)]))}]"
