"""What the operators have in common: the interface, what a unit's work costs, and two loops that most of them are."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import sympy

from tvm_axe.errors import StreamError
from tvm_axe.layout import Access, bank_conflicts
from tvm_axe.stream.codec import EMPTY, Token, show
from tvm_axe.stream.engine import AHEAD, Channel, Process, Unit
from tvm_axe.stream.steps import WORK
from tvm_axe.stream.types import AnyLayout, Buffer, DataType, Scalar, Selector, StreamType, Tile, Tuple

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Node, Stream

Step: TypeAlias = Callable[[Any, int], tuple[int, Sequence[Token]]]
"""What a unit does with a token (value, stop): the cycles that it takes, and the tokens that come out."""
Cost: TypeAlias = Callable[[Any], int]


class Operator:
    """One kind of operator.

    A subclass checks its inputs' types in `types`, and is a generator over a unit's channels in `process`; what a run
    keeps lives in that generator.
    """

    kind: ClassVar[str]

    @property
    def label(self) -> str:
        """The operator's name where it is given none, with a number behind; pictures show it."""
        return self.kind

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        """Return the types of the streams that the operator sends.

        Raises
        ------
        StreamError
            If the inputs break the operator's shape rule.
        """
        raise NotImplementedError

    def stored(self, inputs: list[bool]) -> bool:
        """Return whether what it sends lies in on-chip memory, given which inputs do; by default, if one does."""
        return any(inputs)

    def process(self, node: Node, unit: Unit) -> Process:
        """Return the generator that runs the operator on a unit."""
        raise NotImplementedError

    def likeness(self, node: Node) -> Hashable | None:
        """Return what the work of a unit depends on in a run without values, beside the tokens that come.

        Units of equal likeness do the same if the same is sent to them: they write the same steps, send the same, and
        count the same. By default, None, an operator is like no other.
        """
        return None


def shape_of(value: Any) -> tuple[int, int]:
    """Return the rows and columns of a tile, which without values is these."""
    return value if type(value) is tuple else value.shape


def byte_counter(data: DataType) -> Cost:
    """Return the function from a value of that type to its bytes."""
    if isinstance(data, Tile):
        itemsize = data.itemsize

        def of_tile(value: Any) -> int:
            rows, columns = value if type(value) is tuple else value.shape
            return rows * columns * itemsize

        return of_tile
    if isinstance(data, Tuple):
        counters = [byte_counter(item) for item in data.items]
        return lambda value: sum(counter(part) for counter, part in zip(counters, value))
    if isinstance(data, (Scalar, Selector, Buffer)):
        size = 0 if isinstance(data, Buffer) else int(data.bytes)
        return lambda value: size
    raise TypeError(data)


def form(data: DataType) -> Hashable:
    """Return what a run may depend on of a type: symbols are sizes that tiles say."""
    if isinstance(data, Tuple):
        return tuple(map(form, data.items))
    if not isinstance(data, Tile):
        return data
    sizes = [None if isinstance(size, sympy.Symbol) else size for size in data.shape]
    return *sizes, data.dtype, data.layout


def forms(streams: Iterable[Stream]) -> Hashable:
    """Return what a run may depend on of streams: ranks, what they carry, and whether that lies in on-chip memory."""
    return tuple([(stream.type.rank, form(stream.type.data), stream.stored) for stream in streams])


def read_cost(unit: Unit, channel: Channel) -> Cost | None:
    """Return what it costs to read a value of the channel from on-chip memory; None if it needn't be read."""
    accelerator = unit.engine.accelerator
    if accelerator is None or not channel.wire.stored:
        return None
    size, rate = byte_counter(channel.wire.type.data), bandwidth(unit, channel.wire.type.data)
    return lambda value: -(-size(value) // rate)


def bandwidth(unit: Unit, data: DataType) -> int:
    """Bytes a cycle between a unit and tiles of that type in on-chip memory."""
    accelerator = unit.engine.accelerator
    assert accelerator is not None
    if not accelerator.banked or not isinstance(data, Tile) or data.layout is None:
        return accelerator.on_chip_bandwidth
    return max(1, accelerator.on_chip_bandwidth // _bank_ways(data.layout, data.shape, data.dtype))


@functools.lru_cache(maxsize=256)
def _bank_ways(layout: AnyLayout, shape: tuple[int, int], dtype: str) -> int:
    """Return how many turns the banks need for a row of lanes that each read an element."""
    return bank_conflicts(layout, shape, Access(dtype)).ways


def transform(unit: Unit, step: Step, early: bool = False) -> Process:
    """Apply `step` to each token of the only input and send what comes out to the only output.

    A token keeps its slot in the channel until it has been worked on and what comes of it is sent, or, if `early`,
    until it has been worked on.
    """
    (source,), (sink,) = unit.inputs, unit.outputs
    items, out, last = source.items, sink.items, source.rank
    write, cells = unit.script.extend, _cells(unit, early)
    stop = 0
    while stop < last:
        while not items:
            yield source
        value, stop = items.popleft()
        try:
            cycles, made = step(value, stop)
        except StreamError:
            unit.script.append(source.peek)
            raise
        write(cells[cycles, len(made)])
        out.extend(made)
        if len(made) > 1 and len(unit.script) >= AHEAD:
            yield None


def combine(unit: Unit, step: Step, early: bool = False) -> Process:
    """Apply `step` to what comes together on several inputs, a tuple, as `transform` does to what comes on one.

    One input may send a stop with a value and another the same stop late and alone: then the stop that they have in
    common goes with the value, and the other follows alone.
    """
    sources, (sink,) = unit.inputs, unit.outputs
    queues, out, last = [source.items for source in sources], sink.items, sources[0].rank
    waits = list(zip(sources, queues))
    write, cells = unit.script.extend, _cells(unit, early)
    stop = 0
    while stop < last:
        for source, items in waits:
            while not items:
                yield source
        heads = [items.popleft() for items in queues]
        values, stops = zip(*heads)
        together = stops.count(stops[0]) == len(stops)
        stop = stops[0] if together else min(stops)
        empty = values[0] is EMPTY
        for value in values:
            if (value is EMPTY) is not empty:
                write([source.peek for source in sources])
                raise not_together(unit, (yield from unit.now()), heads)
        try:
            cycles, made = step(EMPTY if empty else values, stop)
        except StreamError:
            write([source.peek for source in sources])
            raise
        write(cells[cycles, len(made)])
        out.extend(made)
        if not together:
            stop = yield from _catch_up(unit, heads, step)


def _cells(unit: Unit, early: bool) -> _Cells:
    """Return the cells of a unit, those of all that have as many inputs."""
    known: dict[tuple[int, bool], _Cells] = unit.engine.cells
    kind = len(unit.inputs), early
    found = known.get(kind)
    if found is None:
        found = known[kind] = _Cells(unit.inputs, unit.outputs[0], early)
    return found


class _Cells(dict[tuple[int, int], array]):
    """The cells of taking a token from each source, so many cycles of work, and sending so many tokens."""

    def __init__(self, sources: list[Channel], sink: Channel, early: bool) -> None:
        super().__init__()
        self.sources, self.sink, self.early = sources, sink, early

    def __missing__(self, done: tuple[int, int]) -> array:
        cycles, sent = done
        looks, frees = [source.peek for source in self.sources], [source.free for source in self.sources]
        works, sends = [cycles << 4 | WORK] if cycles else [], [self.sink.send] * sent
        cells = [*looks, *works, *frees, *sends] if self.early else [*looks, *works, *sends, *frees]
        self[done] = found = array("q", cells)
        return found


def _catch_up(unit: Unit, heads: list[Token], step: Step) -> Generator[Channel | None, None, int]:
    """Take the stops that some inputs send late, and send the highest; return it."""
    highest = yield from late_stops(unit, heads)
    for value, ends in step(EMPTY, highest)[1]:
        unit.send(unit.outputs[0], value, ends)
    return highest


def late_stops(unit: Unit, heads: list[Token]) -> Generator[Channel | None, None, int]:
    """Take the stops that some inputs send late, after tokens that came together; return the highest."""
    stops = [stop for _, stop in heads]
    highest = max(stops)
    while min(stops) < highest:
        behind = stops.index(min(stops))
        value, later = yield from unit.get(unit.inputs[behind])
        if value is not EMPTY or later <= stops[behind]:
            raise not_together(unit, (yield from unit.now()), [*heads, (value, later)])
        stops[behind], highest = later, max(highest, later)
    return highest


def not_together(unit: Unit, clock: int, heads: Sequence[Token]) -> StreamError:
    """Return the error that says of what came on each input that it doesn't belong together."""
    seen = ", ".join(_brief(value, stop) for value, stop in heads)
    return unit.fail(f"its inputs don't have the same shape; at cycle {clock} they are at {seen}")


def _brief(value: Any, stop: int) -> str:
    return show(value if value is EMPTY or isinstance(value, (int, tuple)) else "a value", stop) or "a value"


def pipe(unit: Unit, step: Step, early: bool = False) -> Process:
    """Apply `step` to the unit's input, or to what comes together on its inputs, as a tuple."""
    if len(unit.inputs) == 1:
        return transform(unit, step, early)
    return combine(unit, step, early)
