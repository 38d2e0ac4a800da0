"""Whether an order holds between what the blocks and devices of a program do to one element, or to one flag.

What they wait for and signal is run with vector clocks (Mattern, Virtual Time and Global States of Distributed Systems,
1989), as is which elements they touch, with nothing computed: a signal releases what its block has done and seen, and a
wait acquires what its flags were set with when they first were what it waits for, however late it looks. So what one
run of them doesn't order, no program's luck may: the rows of a peer that are read before its flag, a slot that is
given back while it is read, a flag that is set for the second time before it was seen for the first.

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def shifted(x: T.Buffer((8, 64), "float32"), me: T.int32, inbox: tile.mesh_tensor((2, 8, 64), "float32"),
...             flags: tile.mesh_tensor((2, 1), "int32"), y: T.Buffer((8, 64), "float32")):
...     with tile.kernel(1, device=me):
...         part = tile.fragment((8, 64), "float32")
...         tile.copy(x, part)
...         tile.signal(flags[1 - me, 0])
...         tile.copy(part, inbox[1 - me, 0, 0])
...         tile.signal(flags[1 - me, 0], 2)
...         tile.wait(flags[me, 0])
...         tile.copy(inbox[me, 0, 0], part)
...         tile.copy(part, y)
>>> tile.read(shifted)  # doctest: +ELLIPSIS
Traceback (most recent call last):
  ...
tvm_axe.errors.TileError: copy inbox[me, 0:8, 0:64] to part: with me=1, v=0, inbox[1, 0, 0] is loaded from, and with ...

What isn't known without data is left out, as is what comes behind a wait or a signal that data decides about; where a
block waits for what isn't known, it goes no further. Of very many blocks the first and the last are run, and as many
more as a budget of steps allows: what they do before they wait for the others, they may do before these have begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from tvm_axe.errors import TileError
from tvm_axe.tile.events import JOINS, LOADS, STORES, Block, Event, Events, Flag, Touch, Unknown, blocks_at, places_in
from tvm_axe.tile.nodes import Signal, Wait
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile

BUDGET = 4_000
"""The most steps of blocks that are run with what they touch."""


def check_order(program: TileProgram) -> str:
    """Refuse a program that touches elements, or sets flags, in no order where one is needed.

    Returns
    -------
    How far that is known, in words; empty for a program that waits for nothing.

    Raises
    ------
    TileError
        One block stores to what another loads, stores or joins values with, one loads from what another joins values
        with, or one sets a flag that another sets or resets, and no wait of the one is for a signal of the other;
        or a device loads from another's slab what a kernel before left there, and hasn't heard of that one's end.
    """
    waited = {node.flags.tile for node in program.nodes() if isinstance(node, Wait)}
    signalled = {node.flags.tile for node in program.nodes() if isinstance(node, Signal)}
    if not waited:
        return ""
    if waited - signalled:  # what these say may order anything
        return f"not judged: others than the program set {', '.join(sorted(tile.name for tile in waited - signalled))}"
    count = places_in(program)
    if not count:
        return "not judged: the grid has no constant extents"
    flags = waited | signalled
    stored = {tile for node in program.nodes() for tile in node.writes}
    touched = {tile for tile in program.params if (tile.is_mesh or tile in stored) and tile not in flags}
    events = Events(program, flags, touched, BUDGET)
    blocks: list[Block] = []
    lanes: list[list[Event | Touch]] = []
    for number in dict.fromkeys((0, count - 1, *range(count))):
        if events.left < 0:
            break
        for block in blocks_at(program, number):
            blocks.append(block)
            lanes.append([])
            with contextlib.suppress(Unknown):  # what comes before it is known
                lanes[-1].extend(events.of(block))
    ended = _Run(blocks, program.devices).run(lanes)
    all_blocks = count * program.devices
    said = f"{'all' if len(blocks) == all_blocks else f'{len(blocks)} of'} {all_blocks} blocks are in order"
    if events.left < 0 or not ended:
        return f"{said}, until they wait for others"
    return f"{said}, but for what data decides" if events.data_decides else said


class _Touched:
    """What was done to elements of one tensor so far."""

    def __init__(self, rank: int) -> None:
        self.touches: list[Touch] = []
        self.low, self.high = (np.zeros((16, rank), "int64") for _ in range(2))
        self.threads, self.times, self.kinds = (np.zeros(16, "int64") for _ in range(3))

    def add(self, touch: Touch, thread: int, time: int) -> None:
        count = len(self.touches)
        if count == len(self.low):
            for name in ("low", "high", "threads", "times", "kinds"):
                held = getattr(self, name)
                setattr(self, name, np.concatenate([held, np.zeros_like(held)]))
        self.low[count], self.high[count] = touch.low, touch.high
        self.threads[count], self.times[count], self.kinds[count] = thread, time, _KINDS[touch.how]
        self.touches.append(touch)

    def meeting(self, touch: Touch, kinds: Sequence[int]) -> np.ndarray:
        """Which earlier touches of some kinds have elements with one in common, as far as boxes say."""
        count = len(self.touches)
        meets = (self.low[:count] < touch.high).all(axis=1) & (touch.low < self.high[:count]).all(axis=1)
        return np.flatnonzero(meets & np.isin(self.kinds[:count], kinds))


_KINDS = {LOADS: 0, STORES: 1, JOINS: 2}
_AGAINST = {LOADS: (1, 2), STORES: (0, 1, 2), JOINS: (0, 1)}
"""What needs an order with each kind."""
_DONE = {LOADS: "loaded from", STORES: "stored to", JOINS: "joined with"}


class _Run:
    """Runs blocks with a vector clock each, and behind the blocks' times one of each device's beginning."""

    def __init__(self, blocks: Sequence[Block], devices: int) -> None:
        self.blocks, self.count = blocks, len(blocks)
        self.time = np.zeros((self.count, self.count + devices), "int32")
        for thread, block in enumerate(blocks):
            self.time[thread, thread] = self.time[thread, self.count + block.device] = 1
        self.values: dict[Flag, int] = {}
        self.set_with: dict[Flag, list[tuple[int, np.ndarray]]] = {}
        self.set_by: dict[Flag, tuple[int, int, Event]] = {}
        self.touched: dict[tuple[Tile, int], _Touched] = {}

    def run(self, lanes: Sequence[Sequence[Event | Touch]]) -> bool:
        """Run what each block does, as far as they get; whether all end."""
        left = [list(reversed(lane)) for lane in lanes]
        while sum(self.advance(thread, lane) for thread, lane in enumerate(left)):
            pass
        return not any(left)

    def advance(self, thread: int, lane: list[Event | Touch]) -> bool:
        """Take a block's next events, which are at its end, as far as it gets; whether it got anywhere."""
        before = len(lane)
        while lane:
            event = lane[-1]
            if isinstance(event, Touch):
                self.touch(thread, event)
            elif isinstance(event.node, Signal):
                self.signal(thread, event, event.node)
            elif all(self.values.get(flag, 0) >= event.value for flag in event.flags):
                self.wait(thread, event, event.node)
            else:
                break
            lane.pop()
        return len(lane) < before

    def signal(self, thread: int, event: Event, node: Signal) -> None:
        said = np.zeros_like(self.time[thread])
        said[self.count + self.blocks[thread].device] = 1
        now = int(self.time[thread, thread])
        if node.ordered:
            said = self.time[thread].copy()
            self.time[thread, thread] += 1
        for flag in event.flags:
            if flag in self.set_by:
                by, at, other = self.set_by[flag]
                adds = isinstance(other.node, Signal) and other.node.add and node.add
                if at > self.time[thread, by] and not adds:
                    raise _unordered_flag(event, flag, other)
            self.set_by[flag] = thread, now, event
            sets = self.set_with.setdefault(flag, [(0, np.zeros_like(said))])
            whole = np.maximum(said, sets[-1][1]) if node.add else said
            self.values[flag] = event.value + (self.values.get(flag, 0) if node.add else 0)
            sets.append((self.values[flag], whole))

    def wait(self, thread: int, event: Event, node: Wait) -> None:
        for flag in event.flags:
            seen = next((said for value, said in self.set_with.get(flag, ()) if value >= event.value), None)
            if seen is not None:
                self.time[thread] = np.maximum(self.time[thread], seen)
        for flag in event.flags if node.reset else ():
            self.set_by[flag] = thread, int(self.time[thread, thread]), event
            self.set_with.pop(flag, None)
            self.values[flag] = 0

    def touch(self, thread: int, touch: Touch) -> None:
        earlier = self.touched.setdefault((touch.tile, touch.home), _Touched(len(touch.low)))
        now = self.time[thread]
        for number in earlier.meeting(touch, _AGAINST[touch.how]):
            if earlier.times[number] > now[earlier.threads[number]]:
                place = _shared(touch, earlier.touches[number])
                if place is not None:
                    raise _unordered(touch, earlier.touches[number], place)
        if touch.how == LOADS and touch.tile.is_mesh and not len(earlier.meeting(touch, (1, 2))):
            for device in range(int(touch.low[0]), int(touch.high[0])):
                if not now[self.count + device]:
                    raise _not_begun(touch, device)
        earlier.add(touch, thread, int(now[thread]))


def _shared(one: Touch, other: Touch) -> tuple[int, ...] | None:
    """An element that two touches have in common, whose boxes do."""
    low, high = np.maximum(one.low, other.low), np.minimum(one.high, other.high)
    inside = [touch.elements for touch in (one, other) if touch.elements is not None]
    places = [
        np.ravel_multi_index(tuple(each[:, kept] - low[:, None]), tuple(high - low))
        for each in inside
        for kept in [((each >= low[:, None]) & (each < high[:, None])).all(axis=0)]
    ]
    if not places:
        return tuple(map(int, low))
    both = places[0] if len(places) == 1 else np.intersect1d(*places)
    return tuple(int(a + b) for a, b in zip(low, np.unravel_index(both[0], tuple(high - low)))) if len(both) else None


def _named(tile: Tile, place: Sequence[int]) -> str:
    return f"{tile.name}[{', '.join(map(str, place))}]"


def _unordered(touch: Touch, other: Touch, place: tuple[int, ...]) -> TileError:
    return TileError(
        f"{touch.node}: with {touch.where}, {_named(touch.tile, place)} is {_DONE[touch.how]}, and with {other.where} "
        f"it is {_DONE[other.how]} by `{other.node}`, in no order; valid is an ordered tile.signal behind what comes "
        "first, and a tile.wait for it before the other"
    )


def _not_begun(touch: Touch, device: int) -> TileError:
    return TileError(
        f"{touch.node}: with {touch.where}, it loads from the slab of {touch.tile} on device {device} what a kernel "
        "before this one left there, and no wait says that this has ended; valid is "
        "tile.signal(flags[...], ordered=False) on every device, and a tile.wait for it before the load"
    )


def _unordered_flag(event: Event, flag: Flag, other: Event) -> TileError:
    does = "reset" if isinstance(other.node, Wait) else "set"
    return TileError(
        f"{event.node}: with {event.where}, {_named(flag[0], flag[2])} is set, and with {other.where} it is {does} by "
        f"`{other.node}`, in no order, so one of them may be lost; valid are a flag of each one's own, add=True for "
        "flags that count, or a wait between the two"
    )
