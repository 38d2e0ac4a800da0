"""Why a run doesn't go on: which units wait for what, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_axe.stream.engine import Channel, Unit

_MOST_LINES = 24  # of what waits in a message


def too_long(unit: Unit, units: Sequence[Unit], sinks: Sequence[Unit], limit: int | None) -> str:
    """Return what to say of a run with a unit that is beyond the most cycles."""
    return (
        f"max_cycles={limit:,}: {unit.kind} {unit.name!r} is at cycle {unit.clock:,}, and {_missing(sinks)} didn't "
        f"end:\n{_waiting(units)}"
    )


def deadlock(units: Sequence[Unit], sinks: Sequence[Unit]) -> str:
    """Return what to say of a run in which every unit waits for another."""
    return (
        f"deadlock: {_missing(sinks)} never ended, and every operator waits for another; {_remedy(units)}:\n"
        f"{_waiting(units)}"
    )


def _remedy(units: Sequence[Unit]) -> str:
    """Return what may help: a loop's elements that found no room on their way back are the likeliest reason."""
    for unit in units:
        if unit.kind == "Loop" and not unit.done and unit.inputs[1].count == unit.inputs[1].depth:
            return f"loop {unit.name!r} needs a larger capacity than {unit.inputs[1].depth - 1} for its list"
    return "deeper channels (Stream.buffered) help if a full one is in the cycle"


def _missing(sinks: Sequence[Unit]) -> str:
    return ", ".join(repr(unit.name) for unit in sinks if not unit.done)


def _waiting(units: Sequence[Unit]) -> str:
    lines: list[tuple[bool, str]] = []
    ended = {unit.name for unit in units if unit.done}
    for unit in units:
        waits = () if unit.done else unit.waits
        if waits:
            said = ", ".join(_state(unit, channel, channel.wire.source in ended) for channel in waits)
            lines.append((waits[0] in unit.inputs, f"  {unit.kind} {unit.name!r} waits {said}"))
    # Full channels first: whoever starves does so because of them, or they say where the cycle is.
    shown = [line for _, line in sorted(lines, key=lambda line: line[0])]
    if len(shown) > _MOST_LINES:
        shown[_MOST_LINES:] = [f"  and {len(shown) - _MOST_LINES} more that wait"]
    return "\n".join(shown)


def _state(unit: Unit, channel: Channel, ended: bool) -> str:
    if channel in unit.inputs:
        state = "there" if channel.count else "which has ended" if ended else "empty"
        return f"for a token from {channel.wire.source!r} ({state})"
    return f"for room in the channel to {channel.wire.target!r} (full, {channel.depth} tokens)"
