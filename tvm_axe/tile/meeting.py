"""Whether the devices and blocks of a program can all get on: its waits and signals alone, run on all devices.

Nothing is computed for it: where loops, branches and indices of flags depend on the device, the block and loops alone,
what a block waits for and signals is known. Each runs as far as it can, until all have ended or nobody can go on. As a
right program ends in every order, one order in which it does not is enough to refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_axe.errors import TileError
from tvm_axe.tile.events import BUDGET, Event, Events, Flag, Unknown, blocks_at, places_in
from tvm_axe.tile.nodes import Signal, Wait
from tvm_axe.tile.program import TileProgram


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
    count = places_in(program)
    if not 0 < count * program.devices * len(program.body) <= BUDGET:
        return None
    lanes: dict[tuple[int, int], list[Event]] = {}
    events = Events(program, judged)
    try:
        for number in range(count):
            for block in blocks_at(program, number):
                lane = lanes.setdefault((block.device, 0 if serial else number), [])
                lane += [event for event in events.of(block) if isinstance(event, Event)]
    except Unknown:
        return None
    flags: dict[Flag, int] = {}
    left = [lanes[key][::-1] for key in sorted(lanes)]
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


def _advance(lane: list[Event], flags: dict[Flag, int]) -> bool:
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
