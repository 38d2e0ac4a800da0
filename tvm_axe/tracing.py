"""The timeline of a run: what workers recorded, by stage, with an arrow wherever data crosses from one to another."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from tvm_axe.collective import Arrow, Event, Recording, Timeline
from tvm_axe.layout import Mesh
from tvm_axe.lower.calls import Box, Call, Touch, Touches
from tvm_axe.lower.derive import EXCHANGE, LOCAL
from tvm_axe.lower.lowered import Lowered
from tvm_axe.timeline import ARRIVAL, BESIDE, EDGE, WAITING

_KINDS = {
    "axe.barrier": WAITING,
    "axe.wait": WAITING,
    "axe.arrive": ARRIVAL,
    "axe.fork": BESIDE,
    "axe.wait_count": BESIDE,
    "axe.flag": BESIDE,
}


def timeline_of(lowered: Lowered, recordings: Sequence[Recording]) -> Timeline:
    """What the workers did in a run of `lowered`.

    What is in place from the beginning comes from an event before the first call on any device, and what is left in
    the end goes to one after the last, until which the others wait; it stops when the worker has noticed.
    """
    mesh, calls = lowered.mesh, lowered.calls
    touches = Touches(mesh, lowered.module, lowered.buffers)
    touched = [[touches.of(call, device) for call in calls] for device in range(mesh.size)]
    moved = _bytes(lowered, calls, touched)
    begun = min(recording.calls[0].start for recording in recordings)
    finished = max(recording.stop for recording in recordings)
    done: list[list[Event]] = []
    waits = []
    for device, recording in enumerate(recordings):
        done.append([Event(device, "inputs", EDGE, 0, begun)])
        for number, (call, called) in enumerate(zip(calls, recording.calls, strict=True)):
            name, kind, details = described(lowered, call)
            if number in moved[device]:
                details["bytes"] = moved[device][number]
            done[device].append(Event(device, name, kind, called.start, called.stop, details))
        if recording.stop < finished:
            waits.append(Event(device, "wait for the end", WAITING, recording.stop, finished))
        done[device].append(Event(device, "outputs", EDGE, finished, max(recording.left, finished + 1)))
    arrows = [
        Arrow(buffer, done[writer][first], done[reader][second])
        for buffer, writer, first, reader, second in _crossings(lowered, calls, touched)
    ]
    events = [event for of_device in done for event in of_device] + waits
    title = f"{lowered.name}: {lowered.notation} on {mesh}"
    return Timeline(title, _workers(mesh), tuple(events), tuple(arrows))


def model_timeline(name: str, mesh: Mesh, recordings: Sequence[Recording]) -> Timeline:
    """What the workers did in a call of a function of a model that is shared over a mesh."""
    finished = max(recording.stop for recording in recordings)
    events = []
    for device, recording in enumerate(recordings):
        events += [Event(device, *_named(called.name), called.start, called.stop) for called in recording.calls]
        if recording.stop < finished:
            events.append(Event(device, "wait for the end", WAITING, recording.stop, finished))
    return Timeline(f"{name} on {mesh}", _workers(mesh), tuple(events), ())


def _named(called: str) -> tuple[str, str]:
    """The name and the kind of the event of a call; what workers have made of collectives has a number behind it."""
    plain = f"axe.{re.sub(r'_[0-9]+$', '', called[4:])}" if called[:4] in ("axe.", "axe_") else called
    if plain in _KINDS:
        return plain[4:], _KINDS[plain]
    if plain != called or called[:4] == "axe.":
        return plain[4:], plain[4:].replace("_", "-")
    return called, EXCHANGE if "_taken" in called else LOCAL


def _workers(mesh: Mesh) -> tuple[str, ...]:
    coords = [", ".join(f"{axis}={at}" for axis, at in mesh.coords(device).items()) for device in range(mesh.size)]
    return tuple(f"worker {device} ({at})" for device, at in enumerate(coords))


def described(lowered: Lowered, call: Call) -> tuple[str, str, dict[str, Any]]:
    """The name and the kind of a call's event, and what there is to say about it."""
    if call.stage is None:
        return call.function.removeprefix("axe."), _KINDS[call.function], {}
    stage = lowered.stages[call.stage]
    details = {"axis": stage.axis, "kernel": stage.kernel, "step": call.step, "chunk": call.chunk}
    return stage.name, stage.kind, {name: value for name, value in details.items() if value is not None}


Touched = Sequence[Sequence[frozenset[Touch]]]  # by device and call


def _bytes(lowered: Lowered, calls: Sequence[Call], touched: Touched) -> list[dict[int, int]]:
    """By device and call, the bytes received of peers.

    A device's calls of a stage share what it receives there by the peers' slabs that they touch; where they touch none,
    as of one that others alone write to, the last one has it all.
    """
    found: list[dict[int, int]] = [{} for _ in touched]
    for index, stage in enumerate(lowered.stages):
        mine = [number for number, call in enumerate(calls) if call.stage == index]
        if stage.axis is None or not mine:
            continue
        for device, of_device in enumerate(touched):
            slabs = [len({(t.buffer, t.device) for t in of_device[n] if t.device != device}) for n in mine]
            weights = slabs if any(slabs) else [0] * (len(mine) - 1) + [1]
            parts = [stage.received[device] * upto // sum(weights) for upto in accumulate(weights, initial=0)]
            found[device].update(zip(mine, (after - before for before, after in pairwise(parts))))
    return found


@dataclass(frozen=True)
class _Write:
    """A box of a slab, written by a device in an event, numbered as the calls are with the inputs before them."""

    stage: int
    device: int
    event: int
    box: Box


Crossing = tuple[str, int, int, int, int]  # a buffer; the device that wrote it, in which event; who reads it, in which


def _crossings(lowered: Lowered, calls: Sequence[Call], touched: Touched) -> list[Crossing]:
    """What one device wrote and another reads.

    What a call reads was written by the last stage before its own that wrote any of it.
    """
    writes: dict[tuple[str, int], list[_Write]] = defaultdict(list)
    reads: list[tuple[Touch, int, int, int]] = []  # with stage, device and event
    for device, of_device in enumerate(touched):
        for buffer in lowered.buffers.values():
            stored = buffer.sharding.stored
            whole = Box(stored, (0,) * len(stored), stored)
            if buffer.is_input:
                writes[buffer.name, device].append(_Write(-1, device, 0, whole))
            if buffer.is_output:
                reads.append((Touch(buffer.name, device, whole, False), len(lowered.stages), device, len(calls) + 1))
        for event, (call, touches) in enumerate(zip(calls, of_device), 1):
            for touch in touches:
                assert call.stage is not None  # else it touches nothing
                if touch.is_write:
                    writes[touch.buffer, touch.device].append(_Write(call.stage, device, event, touch.box))
                else:
                    reads.append((touch, call.stage, device, event))
    found: dict[Crossing, None] = {}
    for touch, stage, reader, event in reads:
        before = [
            write
            for write in writes[touch.buffer, touch.device]
            if write.stage < stage and write.event < event and write.box.meets(touch.box)
        ]
        last = max((write.stage for write in before), default=None)
        for write in before:
            if write.stage == last and write.device != reader:
                found[touch.buffer, write.device, write.event, reader, event] = None
    return list(found)
