"""From a program to a run: units and channels are made, inputs fed, results collected."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import sympy

from tvm_axe.errors import StreamError
from tvm_axe.stream.codec import EMPTY, Token, decode, encode
from tvm_axe.stream.engine import Channel, Engine, Unit
from tvm_axe.stream.memory import Accelerator
from tvm_axe.stream.operators.base import shape_of
from tvm_axe.stream.operators.endpoints import Input, Loop, Output
from tvm_axe.stream.operators.higher import Accum, Map, Scan
from tvm_axe.stream.operators.off_chip import LinearLoad, LinearStore, RandomLoad, RandomStore
from tvm_axe.stream.operators.routing import broadcast
from tvm_axe.stream.program import Node, Stream, StreamProgram
from tvm_axe.stream.report import Activity, Report
from tvm_axe.stream.types import Selector, StreamType, Tile


class Meter(deque):
    """The queue of a channel that counts what is sent, to find out how long dynamic dims were."""

    def __init__(self, type: StreamType) -> None:
        super().__init__()
        self.type = type
        self.counts = [0] * type.rank  # how many elements of each dim, innermost first
        self.rows = 0
        self._filled = [False] * (type.rank + 1)

    def append(self, token: tuple[int, Any, int]) -> None:
        """Count a token (time, value, stop), and take it."""
        super().append(token)
        _, value, stop = token
        counts, filled = self.counts, self._filled
        if value is not EMPTY:
            counts[0] += 1
            filled[1] = True
            if isinstance(self.type.data, Tile):
                self.rows += shape_of(value)[0]
        for level in range(1, min(stop + 1, self.type.rank)):
            if filled[level] or level == stop:
                counts[level] += 1
                filled[level], filled[level + 1] = False, True

    def bind(self, bindings: dict[sympy.Symbol, Any]) -> None:
        """Add the values of the symbols that are sizes of this stream."""
        outer = 1
        for dim, found in zip(self.type.shape, reversed(self.counts)):
            if isinstance(dim.size, sympy.Symbol):
                bindings.setdefault(dim.size, found if dim.ragged else sympy.Rational(found, outer) if outer else 0)
            outer = found
        data = self.type.data
        if isinstance(data, Tile) and isinstance(data.rows, sympy.Symbol):
            bindings.setdefault(data.rows, sympy.Rational(self.rows, outer) if outer else 0)


def run(
    program: StreamProgram, inputs: dict[str, Any], accelerator: Accelerator | None, values: bool, trace: bool
) -> Report:
    """Run a program; see `StreamProgram.run`."""
    engine = Engine(accelerator, values, trace and accelerator is not None)
    with _no_collection():
        bindings = _feed(program, inputs, engine)
        meters = _connect(program, engine)
        engine.run()
    for meter in meters:
        meter.bind(bindings)
    cycles = max((unit.clock for unit in engine.units), default=0) if accelerator else 0
    steps = engine.occupancy.steps() if accelerator else []
    peak = max((used for _, used in steps), default=0)
    if accelerator and accelerator.capacity is not None and peak > accelerator.capacity:
        raise StreamError(
            f"program {program.name!r}: its buffers take up {peak:,} bytes at a time, more than the on-chip memory, "
            f"{accelerator.capacity:,} bytes"
        )
    nodes = {node.name: node for node in program.nodes}
    return Report(
        program=program.name,
        outputs={node.name: _collected(node, engine) for node in program.nodes if isinstance(node.operator, Output)},
        tensors=_stored(program, engine, inputs, bindings),
        cycles=cycles,
        units=tuple(_activity(unit, nodes.get(unit.name), accelerator) for unit in engine.units),
        bindings=bindings,
        peak_on_chip=peak,
        off_chip_busy=engine.memory.busy if engine.memory else 0.0,
        occupancy=tuple(steps),
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from looking through the units, again and again, as tokens come and go."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _feed(program: StreamProgram, inputs: dict[str, Any], engine: Engine) -> dict[sympy.Symbol, Any]:
    """Give the engine the inputs; return the symbols that they determine."""
    bindings: dict[sympy.Symbol, Any] = {}
    wanted = {node.name: node for node in program.nodes if isinstance(node.operator, Input)}
    unknown = set(inputs) - set(wanted) - set(program.tensors)
    if unknown:
        known = ", ".join(sorted([*wanted, *program.tensors]))
        raise StreamError(f"program {program.name!r} has no input or tensor {sorted(unknown)[0]!r}; it has {known}")
    for name, node in wanted.items():
        if name not in inputs:
            raise node.fail("it isn't given; pass nested lists of its values")
        engine.fed[name] = _tokens(node, inputs[name])
    loaded = {
        node.operator.tensor.name: node for node in program.nodes if isinstance(node.operator, (LinearLoad, RandomLoad))
    }
    for name, node in loaded.items():
        tensor, given = program.tensors[name], inputs.get(name)
        shape = given if isinstance(given, tuple) else getattr(given, "shape", None)
        if shape is None and (engine.values or not isinstance(tensor.rows, int)):
            raise node.fail(f"{tensor} isn't given; pass an array, or without values its (rows, columns)")
        if shape is None:
            continue
        fits = len(shape) == 2 and shape[1] == tensor.columns
        if not fits or (isinstance(tensor.rows, int) and shape[0] != tensor.rows):
            raise node.fail(f"{tensor} is given with shape {tuple(shape)}")
        engine.rows[name] = int(shape[0])
        if isinstance(tensor.rows, sympy.Symbol):
            bindings[tensor.rows] = int(shape[0])
        if engine.values:
            engine.tensors[name] = np.asarray(given)
    return bindings


def _tokens(node: Node, given: Any) -> list[Token]:
    (stream,) = node.outputs
    nested = given.tolist() if isinstance(given, np.ndarray) and not isinstance(stream.type.data, Tile) else given
    if isinstance(nested, np.ndarray):
        nested = list(nested)
    try:
        tokens = encode(nested, stream.type.rank)
    except StreamError as error:
        raise node.fail(f"{error}; it is a stream {stream}") from error
    meter = Meter(stream.type)
    for number, (value, stop) in enumerate(tokens):
        if isinstance(stream.type.data, Selector) and value is not EMPTY:
            value = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
            tokens[number] = (value, stop)
        meter.append((0, value, stop))
    outer = 1
    for dim, found in zip(stream.type.shape, reversed(meter.counts)):
        if isinstance(dim.size, int) and found != outer * dim.size:
            raise node.fail(f"{stream} needs {outer * dim.size} elements in all for its dim {dim}, and has {found}")
        outer = found
    return tokens


def _connect(program: StreamProgram, engine: Engine) -> list[Meter]:
    """Make the units and the channels between them; return the meters of channels whose dims are dynamic."""
    units: dict[Node, Unit] = {}
    for node in program.nodes:
        if isinstance(node.operator, Loop):
            if node.operator.feedback.closing is None:
                raise node.fail("nothing closes it; call Feedback.close with the stream that it carries")
            continue
        units[node] = Unit(node.name, node.kind, engine)
    engine.units.extend(units.values())
    meters: list[Meter] = []
    measured: set[sympy.Symbol] = set()
    arrivals: dict[tuple[int, int], list[Channel]] = {}
    for node in units:
        for stream in node.outputs:
            _wire(stream, units[node], engine, arrivals, measured, meters)
    for node, unit in units.items():
        for stream in node.inputs:
            unit.inputs.append(arrivals[id(stream), id(node)].pop(0))
            unit.inputs[-1].target = unit.name
    for node, unit in units.items():
        unit.process = node.operator.process(node, unit)
    for unit in engine.units:
        if not unit.outputs or unit.kind in ("Output", "RandomOffChipStore"):
            engine.sinks.append(unit)
    return meters


def _wire(
    stream: Stream,
    unit: Unit,
    engine: Engine,
    arrivals: dict[tuple[int, int], list[Channel]],
    measured: set[sympy.Symbol],
    meters: list[Meter],
) -> None:
    """Make the channels of a stream, and a broadcast if it has several."""
    depth = engine.accelerator.depth if engine.accelerator else 2
    ends: list[tuple[Stream, Node]] = []  # a stream as its consumer knows it, and the consumer
    for consumer in stream.consumers:
        if isinstance(consumer.operator, Loop):
            (known,) = consumer.outputs
            ends += [(known, taker) for taker in _takers(known)]
        else:
            ends.append((stream, consumer))
    if not ends and not stream.discarded:
        raise unit.fail(f"output {stream.name!r}, {stream}, isn't connected; use it, or say Stream.discard()")

    def channel(source: Unit, known: Stream) -> Channel:
        made = Channel(stream.type, source.name, known.depth or depth, stream.stored)
        source.outputs.append(made)
        return made

    several = len(ends) + stream.discarded > 1
    if several:
        first = channel(unit, stream)
        split = Unit(f"{stream.name} to {len(ends)}", "Broadcast", engine)
        split.inputs.append(first)
        first.target = split.name
        engine.units.append(split)
    made = []
    for known, consumer in ends:
        link = channel(split if several else unit, known)
        made.append(link)
        arrivals.setdefault((id(known), id(consumer)), []).append(link)
        if isinstance(known.node.operator, Loop):
            for value in known.node.operator.feedback.initial:
                link.room.popleft()
                link.items.append((0, value, 0))
    if stream.discarded:
        made.append(channel(split if several else unit, stream))
        away = Unit(f"{stream.name}, discarded", "Discard", engine)
        away.inputs.append(made[-1])
        made[-1].target = away.name
        away.process = _discard(away)
        engine.units.append(away)
    if several:
        split.process = broadcast(split)
    symbols = {dim.size for dim in stream.type.shape if isinstance(dim.size, sympy.Symbol)}
    if isinstance(stream.type.data, Tile) and isinstance(stream.type.data.rows, sympy.Symbol):
        symbols.add(stream.type.data.rows)
    if symbols - measured:
        head = first if several else made[0]
        meter = Meter(stream.type)
        meter.extend(head.items)
        head.items = meter
        meters.append(meter)
        measured |= symbols


def _takers(stream: Stream) -> list[Node]:
    if not stream.consumers:
        raise stream.node.fail("nobody takes it")
    return stream.consumers


def _discard(unit: Unit) -> Any:
    (source,) = unit.inputs
    stop = 0
    while stop < source.rank:
        _, stop = yield from unit.get(source)


def _collected(node: Node, engine: Engine) -> list:
    return decode(engine.outputs[node.name], node.inputs[0].type.rank)


def _stored(
    program: StreamProgram, engine: Engine, inputs: dict[str, Any], bindings: dict[sympy.Symbol, Any]
) -> dict[str, np.ndarray]:
    """Return the tensors that were stored to: over what was given, else over NaN or zeros."""
    found: dict[str, np.ndarray] = {}
    stores = (LinearStore, RandomStore)
    for name in {node.operator.tensor.name: None for node in program.nodes if isinstance(node.operator, stores)}:
        if not engine.values:
            continue
        tensor, tiles = program.tensors[name], engine.written.get(name, [])
        if name in inputs:
            array = np.array(inputs[name])
        else:
            reached = max((row + len(value) for row, _, value in tiles), default=0)
            rows = tensor.rows if isinstance(tensor.rows, int) else reached
            dtype = np.dtype(tensor.dtype)
            array = np.zeros((rows, tensor.columns), dtype)
            if dtype.kind in "fV":
                array[:] = np.nan
        for row, column, value in tiles:
            array[row : row + value.shape[0], column : column + value.shape[1]] = value
        found[name] = array
    return found


def _activity(unit: Unit, node: Node | None, accelerator: Accelerator | None) -> Activity:
    compute = 0
    if accelerator is not None and node is not None and isinstance(node.operator, (Map, Accum, Scan)) and unit.flops:
        compute = node.operator.compute or accelerator.compute
    return Activity(
        name=unit.name,
        kind=unit.kind,
        busy=unit.busy,
        memory=unit.memory,
        blocked=unit.blocked,
        starved=max(0, unit.clock - unit.busy - unit.memory - unit.blocked),
        flops=unit.flops,
        read=unit.read,
        written=unit.written,
        tokens=unit.tokens,
        compute=compute,
        spans=tuple(unit.spans or ()),
    )
