"""From a program to a run: inputs are fed, units and channels made, results collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import sympy

from tvm_axe.errors import StreamError
from tvm_axe.stream.codec import decode
from tvm_axe.stream.engine import Engine, Unit
from tvm_axe.stream.feeding import Meter, feed
from tvm_axe.stream.memory import Accelerator
from tvm_axe.stream.operators.endpoints import Output
from tvm_axe.stream.operators.higher import Map, Scan
from tvm_axe.stream.operators.off_chip import LinearStore, RandomStore
from tvm_axe.stream.program import StreamProgram
from tvm_axe.stream.report import Activity, Report
from tvm_axe.stream.types import as_size
from tvm_axe.stream.wiring import wiring_of


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
        outputs={
            unit.name: decode(engine.outputs[unit.name], unit.inputs[0].rank)
            for unit in engine.sinks
            if isinstance(unit.operator, Output)
        },
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
    wiring = wiring_of(program)
    engine.connect(wiring)
    meters: list[Meter] = []
    for unit, channel, type in wiring.metered:
        head, meter = engine.channels[channel], Meter(type)
        meter.count(head.items)
        engine.units[unit].metered.append((head, meter.count))
        meters.append(meter)
    return meters


def _stored(program: StreamProgram, engine: Engine) -> dict[str, np.ndarray]:
    """Return the tensors that were stored to: over what was given, else over NaN or zeros."""
    found: dict[str, np.ndarray] = {}
    if not engine.values:
        return found
    stores = (LinearStore, RandomStore)
    for name in {unit.operator.tensor.name: None for unit in engine.sinks if isinstance(unit.operator, stores)}:
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
