"""From a program to a run: units and channels are made, inputs fed, results collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import sympy

from tvm_axe.errors import StreamError
from tvm_axe.stream.codec import decode
from tvm_axe.stream.engine import Channel, Engine, Unit
from tvm_axe.stream.feeding import Meter, feed
from tvm_axe.stream.memory import Accelerator
from tvm_axe.stream.operators.endpoints import DISCARD, FeedbackEdge, Output
from tvm_axe.stream.operators.higher import Map, Scan
from tvm_axe.stream.operators.loops import LoopHead
from tvm_axe.stream.operators.off_chip import LinearStore, RandomStore
from tvm_axe.stream.operators.routing import BROADCAST
from tvm_axe.stream.program import Node, Stream, StreamProgram
from tvm_axe.stream.report import Activity, Report
from tvm_axe.stream.types import Tile, as_size


def run(
    program: StreamProgram,
    inputs: dict[str, Any],
    accelerator: Accelerator | None,
    values: bool,
    trace: bool,
    max_cycles: int | None,
) -> Report:
    """Run a program; see `StreamProgram.run`."""
    if max_cycles is not None:
        as_size("max_cycles", max_cycles)
        if accelerator is None:
            raise StreamError(f"max_cycles={max_cycles}: without an accelerator nothing takes time; pass one")
    engine = Engine(accelerator, values, trace and accelerator is not None, max_cycles)
    with _no_collection():
        bindings = feed(program, inputs, engine)
        meters = _connect(program, engine)
        engine.run()
        for meter in meters:
            meter.bind(bindings)
        report = _report(program, engine, bindings)
        engine.release()
    return report


def _report(program: StreamProgram, engine: Engine, bindings: dict[sympy.Symbol, Any]) -> Report:
    """Return what a run has come to."""
    accelerator = engine.accelerator
    cycles = max((unit.clock for unit in engine.units), default=0) if accelerator else 0
    steps = engine.occupancy.steps() if accelerator else []
    peak = max((used for _, used in steps), default=0)
    if accelerator and accelerator.capacity is not None and peak > accelerator.capacity:
        raise StreamError(
            f"program {program.name!r}: its buffers take up {peak:,} bytes at a time, more than the on-chip memory, "
            f"{accelerator.capacity:,} bytes"
        )
    return Report(
        program=program.name,
        outputs={node.name: _collected(node, engine) for node in program.nodes if isinstance(node.operator, Output)},
        tensors=_stored(program, engine),
        cycles=cycles,
        units=tuple([_activity(unit, accelerator) for unit in engine.units]),
        bindings=bindings,
        peak_on_chip=peak,
        off_chip_busy=engine.off_chip_busy,
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


def _connect(program: StreamProgram, engine: Engine) -> list[Meter]:
    """Make the units and the channels between them; return the meters of channels whose dims are dynamic."""
    units: dict[Node, Unit] = {}
    for node in program.nodes:
        if isinstance(node.operator, FeedbackEdge):
            if not node.inputs:
                raise node.fail(_unclosed(node))
            continue
        units[node] = Unit(node.name, node.operator, node, node.likeness, engine)
    meters: list[Meter] = []
    measured: set[sympy.Symbol] = set()
    arrivals: dict[tuple[int, int], list[Channel]] = {}
    for node, unit in units.items():
        engine.ready.append(unit)
        known = len(engine.units)
        for stream in node.outputs:
            _wire(stream, unit, engine, arrivals, measured, meters)
        engine.ready.extend(engine.units[known:])  # what sends to others goes first
    for node, unit in units.items():
        for stream in node.inputs:
            arrivals[id(stream), id(node)].pop(0).lead_to(unit)
    for unit in engine.ready:
        engine.prepare(unit)
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
        if isinstance(consumer.operator, FeedbackEdge):
            (known,) = consumer.outputs
            ends += [(known, taker) for taker in _takers(known)]
        else:
            ends.append((stream, consumer))
    if not ends and not stream.discarded:
        raise unit.fail(f"output {stream.name!r}, {stream}, isn't connected; use it, or say Stream.discard()")

    def channel(source: Unit, known: Stream) -> Channel:
        return Channel(stream.type, source, known.depth or depth, stream.stored)

    several = len(ends) + stream.discarded > 1
    if several:
        first = channel(unit, stream)
        likeness = BROADCAST.kind, first.rank, len(ends) + stream.discarded
        split = Unit(f"{stream.name} to {len(ends)}", BROADCAST, stream.node, likeness, engine)
        first.lead_to(split)
    made = []
    for known, consumer in ends:
        link = channel(split if several else unit, known)
        made.append(link)
        arrivals.setdefault((id(known), id(consumer)), []).append(link)
        if isinstance(known.node.operator, FeedbackEdge):
            # A loop takes back all that it sends on its way; other feedback may have more than is taken.
            link.returns = not isinstance(consumer.operator, LoopHead)
            for value in known.node.operator.initial:
                link.initial += 1
                link.items.append((value, 0))
    if stream.discarded:
        made.append(channel(split if several else unit, stream))
        made[-1].lead_to(Unit(f"{stream.name}, discarded", DISCARD, stream.node, None, engine))
    sizes = [dim.size for dim in stream.type.shape]
    if isinstance(stream.type.data, Tile):
        sizes.append(stream.type.data.rows)
    symbols = [size for size in sizes if isinstance(size, sympy.Symbol) and size not in measured]
    if symbols:
        head = first if several else made[0]
        meter = Meter(stream.type)
        meter.count(head.items)
        unit.metered.append((head, meter.count))
        meters.append(meter)
        measured.update(symbols)


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


def _collected(node: Node, engine: Engine) -> list:
    return decode(engine.outputs[node.name], node.inputs[0].type.rank)


def _stored(program: StreamProgram, engine: Engine) -> dict[str, np.ndarray]:
    """Return the tensors that were stored to: over what was given, else over NaN or zeros."""
    found: dict[str, np.ndarray] = {}
    stores = (LinearStore, RandomStore)
    for name in {node.operator.tensor.name: None for node in program.nodes if isinstance(node.operator, stores)}:
        if not engine.values:
            continue
        tensor, tiles = program.tensors[name], engine.written.get(name, [])
        if name in engine.tensors:
            array = engine.tensors[name].copy()
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


def _activity(unit: Unit, accelerator: Accelerator | None) -> Activity:
    operator, busy, memory, blocked, flops = unit.operator, unit.busy, unit.memory, unit.blocked, unit.flops
    starved, compute = unit.clock - busy - memory - blocked, 0
    if flops and accelerator is not None and isinstance(operator, (Map, Scan)):
        compute = operator.compute or accelerator.compute
    return Activity(
        unit.name,
        unit.kind,
        busy,
        memory,
        blocked,
        starved if starved > 0 else 0,
        flops,
        unit.read,
        unit.written,
        unit.tokens,
        compute,
        tuple(unit.spans),
    )
