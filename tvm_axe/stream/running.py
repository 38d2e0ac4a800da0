"""From a program to a run: units and channels are made, inputs fed, results collected."""

from __future__ import annotations

import gc
from collections import defaultdict, deque
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
from tvm_axe.stream.types import as_size


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
    arrivals: dict[tuple[Stream, Node], deque[Channel]] = defaultdict(deque)
    for node, unit in units.items():
        engine.ready.append(unit)
        known = len(engine.units)
        for stream in node.outputs:
            _wire(stream, unit, arrivals)
            if not measured.issuperset(stream.type.symbols):
                meters.append(_meter(stream, unit))
                measured.update(stream.type.symbols)
        engine.ready.extend(engine.units[known:])  # what sends to others goes first
    for node, unit in units.items():
        for stream in node.inputs:
            arrivals[stream, node].popleft().lead_to(unit)
    for unit in engine.ready:
        engine.prepare(unit)
    for unit in engine.units:
        if not unit.outputs or unit.kind in ("Output", "RandomOffChipStore"):
            engine.sinks.append(unit)
    return meters


def _wire(stream: Stream, unit: Unit, arrivals: dict[tuple[Stream, Node], deque[Channel]]) -> None:
    """Make the channels of a stream, and a broadcast if it has several."""
    engine, type, stored = unit.engine, stream.type, stream.stored
    depth = engine.accelerator.depth if engine.accelerator else 2
    ends: list[tuple[Stream, Node]] = []  # a stream as its consumer knows it, and the consumer
    for consumer in stream.consumers:
        if isinstance(consumer.operator, FeedbackEdge):
            (known,) = consumer.outputs
            ends += [(known, taker) for taker in _takers(known)]
        else:
            ends.append((stream, consumer))
    several = len(ends) + stream.discarded
    if not several:
        raise unit.fail(f"output {stream.name!r}, {stream}, isn't connected; use it, or say Stream.discard()")
    if several > 1:
        likeness = BROADCAST.kind, type.rank, several
        split = Unit(f"{stream.name} to {len(ends)}", BROADCAST, stream.node, likeness, engine)
        Channel(type, unit, stream.depth or depth, stored).lead_to(split)
        unit = split
    for known, consumer in ends:
        link = Channel(type, unit, known.depth or depth, stored)
        arrivals[known, consumer].append(link)
        if known is not stream:
            _fill(link, known, consumer)
    if stream.discarded:
        away = Unit(f"{stream.name}, discarded", DISCARD, stream.node, None, engine)
        Channel(type, unit, stream.depth or depth, stored).lead_to(away)


def _fill(link: Channel, known: Stream, consumer: Node) -> None:
    """Put the initial values of feedback into the channel that it is."""
    # A loop takes back all that it sends on its way; other feedback may have more than is taken.
    link.returns = not isinstance(consumer.operator, LoopHead)
    assert isinstance(known.node.operator, FeedbackEdge)
    for value in known.node.operator.initial:
        link.initial += 1
        link.items.append((value, 0))


def _meter(stream: Stream, unit: Unit) -> Meter:
    """Return the meter of a stream, whose first channel is the last that the unit has got."""
    head, meter = unit.outputs[-1], Meter(stream.type)
    meter.count(head.items)
    unit.metered.append((head, meter.count))
    return meter


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
