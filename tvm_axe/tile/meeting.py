"""Whether the devices and blocks of a program can all get on: its waits and signals alone, run on all devices.

Nothing is computed for it: where loops, branches and indices of flags depend on the device, the block and loops alone,
what a block waits for and signals is known. Each runs as far as it can, until all have ended or nobody can go on. As a
right program ends in every order, one order in which it does not is enough to refuse it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from tvm_axe.errors import TileError
from tvm_axe.tile.nodes import Branch, Let, Loop, Node, Signal, Wait
from tvm_axe.tile.points import evaluate
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.walking import walk

BUDGET = 20_000
"""The most steps of all blocks of all devices that are gone through, a fraction of a second's worth."""

_Flag = tuple[Tile, int, tuple[int, ...]]
"""A flag: the tensor, the device whose it is, and its place; -1 for a mesh tensor, which is everybody's."""


class _Unknown(Exception):
    """Data decides who waits or signals, or there is too much of it."""


@dataclass(frozen=True)
class _Event:
    """A wait or a signal of one block, on flags of known places, with a known value."""

    node: Wait | Signal
    flags: tuple[_Flag, ...]
    value: int
    where: str


@dataclass(frozen=True)
class Stuck:
    """A wait that nobody answers any more.

    Attributes
    ----------
    node : Wait
        The wait.
    where : str
        The device and the block that wait, as ``me=0, i=1``.
    flag : str
        The flag that isn't set, as ``flags[0, 1]``.
    later : str or None
        Who would set it, being stuck or not begun itself; None if nobody does.
    """

    node: Wait
    where: str
    flag: str
    later: str | None


def find_stuck(program: TileProgram, serial: bool = False) -> Stuck | None:
    """Return a wait at which a program stays on all devices together; None if it ends, or if data decides that.

    Flags that aren't of the mesh may be set by others than the program: waits for them are passed, except with `serial`
    for those that the program sets itself. Scalars other than the device count as 1 where they are values of flags.

    Parameters
    ----------
    program : TileProgram
        The program.
    serial : bool
        Whether a device runs its blocks one after the other, in the order of the grid, and not all at once.
    """
    signalled = {node.flags.tile for node in program.nodes() if isinstance(node, Signal)}
    judged = {
        node.flags.tile
        for node in program.nodes()
        if isinstance(node, Wait) and (node.flags.tile.is_mesh or (serial and node.flags.tile in signalled))
    }
    if not judged:
        return None
    try:
        lanes = _Walk(program, judged).lanes(serial)
    except _Unknown:
        return None
    flags: dict[_Flag, int] = {}
    left = [list(reversed(lane)) for lane in lanes]
    while sum(_advance(lane, flags) for lane in left):
        pass
    waiting = next((lane[-1] for lane in left if lane), None)
    if waiting is None:
        return None
    assert isinstance(waiting.node, Wait)
    unset = next(flag for flag in waiting.flags if flags.get(flag, 0) < waiting.value)
    later = (event for lane in left for event in lane if isinstance(event.node, Signal))
    setters = (event.where for event in later if unset in event.flags)
    text = f"{unset[0].name}[{', '.join(map(str, unset[2]))}]"
    return Stuck(waiting.node, waiting.where, text, next(setters, None))


def _advance(lane: list[_Event], flags: dict[_Flag, int]) -> bool:
    """Take a lane's next events, which are at its end, as far as it gets; whether it got anywhere."""
    before = len(lane)
    while lane:
        node, value = lane[-1].node, lane[-1].value
        for flag in lane[-1].flags:
            if isinstance(node, Wait) and flags.get(flag, 0) < value:
                return len(lane) < before
        for flag in lane.pop().flags:
            if isinstance(node, Signal):
                flags[flag] = value + (flags.get(flag, 0) if node.add else 0)
            elif node.reset:
                flags[flag] = 0
    return len(lane) < before


class _Walk:
    """The events of every block, in order."""

    def __init__(self, program: TileProgram, judged: set[Tile]) -> None:
        self.program, self.judged, self.left = program, judged, BUDGET
        self.counts = {
            scalar: np.asarray(1) for scalar in program.scalars if "int" in str(scalar.ty)
        }  # what is given counts as 1 where it is a value
        self.meets = {
            node for node in program.nodes() if any(isinstance(inner, Wait | Signal) for inner in walk((node,)))
        }

    def lanes(self, serial: bool) -> list[list[_Event]]:
        """The events of what runs in order: of each device's blocks, or of each device."""
        extents = [extent for _, extent in self.program.grid]
        if not all(isinstance(extent, int) for extent in extents):
            raise _Unknown
        lanes: list[list[_Event]] = []
        for device in range(self.program.devices):
            blocks = []
            for point in np.ndindex(*extents):
                values: dict[tirx.Var, Any] = {var: np.asarray(x) for (var, _), x in zip(self.program.grid, point)}
                named = [f"{var.name}={x}" for (var, _), x in zip(self.program.grid, point)]
                if self.program.device is not None:
                    values[self.program.device] = np.asarray(device)
                    named.insert(0, f"{self.program.device.name}={device}")
                blocks.append(list(self.events(self.program.body, values, device, ", ".join(named))))
            lanes += [[event for block in blocks for event in block]] if serial else blocks
        return lanes

    def events(self, body: Sequence[Node], values: dict[tirx.Var, Any], device: int, where: str) -> Iterator[_Event]:
        for node in body:
            self.left -= 1
            if self.left < 0:
                raise _Unknown
            if isinstance(node, Let):
                values[node.var] = evaluate(node.value, values)
            elif node not in self.meets:
                continue
            elif isinstance(node, Branch):
                holds = self.known(node.condition, values)
                yield from self.events(node.then if holds else node.otherwise, values, device, where)
            elif isinstance(node, Loop):
                if node.until is not None:
                    raise _Unknown
                start = self.known(node.start, values)
                for step in range(self.known(node.extent, values)):
                    values[node.var] = np.asarray(start + step)
                    yield from self.events(node.body, values, device, where)
            elif isinstance(node, Wait | Signal) and node.flags.tile in self.judged:
                first = [self.known(index, values) for index in node.flags.start]
                home = -1 if node.flags.tile.is_mesh else device
                flags = tuple(
                    (node.flags.tile, home, tuple(f + o for f, o in zip(first, offsets)))
                    for offsets in np.ndindex(*node.flags.extents)
                )
                yield _Event(node, flags, self.known(node.value, {**self.counts, **values}), where)

    def known(self, expr: Any, values: dict[tirx.Var, Any]) -> int:
        """The value of an expression that all must know."""
        found = evaluate(expr, values)
        if found is None:
            raise _Unknown
        return int(found)


def check_meeting(program: TileProgram) -> None:
    """Refuse a program whose devices wait for each other for ever.

    Raises
    ------
    TileError
        A wait for flags of the mesh that no signal of the program sets, or that are set behind waits that nobody
        answers.
    """
    signalled = {node.flags.tile for node in program.nodes() if isinstance(node, Signal)}
    for node in program.nodes():
        if isinstance(node, Wait) and node.flags.tile.is_mesh and node.flags.tile not in signalled:
            raise TileError(
                f"{node}: no signal of the program is on {node.flags.tile}; valid is one by the device that is waited "
                "for, or a tensor of each device's own, T.Buffer, for flags that others than the program set"
            )
    stuck = find_stuck(program)
    if stuck is not None:
        answer = (
            "nobody signals it"
            if stuck.later is None
            else f"what would signal it, at {stuck.later}, comes behind waits that are not answered either"
        )
        raise TileError(
            f"{stuck.node}: with {stuck.where}, {stuck.flag} stays unset, as {answer}; valid is a wait whose signal "
            "comes before all waits that depend on it, on every device"
        )
