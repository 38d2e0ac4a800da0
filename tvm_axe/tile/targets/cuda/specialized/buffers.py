"""Shared tiles that only global copies write become circular buffers: slots that a producer fills ahead of readers.

A circular buffer has a full and an empty barrier a slot. Tiles that are loaded in the same place and read between the
same two statements share one, so that one barrier serves all of them. So do small ones, read in between, with what is
loaded beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from tvm_axe.tile.nodes import Branch, Copy, Loop, Node
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.walking import leaves

_SMALL = 16
"""What part of a slot's bytes tiles have at most that join it."""


@dataclass(frozen=True, eq=False)
class CircularBuffer:
    """Tiles that are loaded and released together.

    Attributes
    ----------
    copies : tuple of Copy
        What fills a slot, in order.
    loop : Loop or None
        The loop in whose body they are, if they are in one.
    first, last : Node
        The statements, beside the copies, with the first and the last reader.
    others : tuple of Copy
        What fills a slot instead, in order, where `copies` are in one arm of a branch and these in the other.
    """

    copies: tuple[Copy, ...]
    loop: Loop | None
    first: Node
    last: Node
    others: tuple[Copy, ...] = ()

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return tuple(copy.dst.tile for copy in self.copies)

    @property
    def bytes(self) -> int:
        """The size of a slot."""
        return sum(tile.bytes for tile in self.tiles)

    @property
    def name(self) -> str:
        return ", ".join(tile.name for tile in self.tiles)


class Order:
    """In which order a producer fills slots, and consumers take them, in one pass through a program.

    Parameters
    ----------
    program : TileProgram
        The program.
    buffers : iterable of CircularBuffer
        Its circular buffers.
    """

    def __init__(self, program: TileProgram, buffers: Iterable[CircularBuffer]) -> None:
        self.at = {node: at for at, node in enumerate(program.nodes())}
        self._taken = {buffer: (self.at[buffer.first], number) for number, buffer in enumerate(buffers)}

    def stands_before(self, other: CircularBuffer, buffer: CircularBuffer) -> bool:
        """Whether a slot of `other` that consumers haven't taken yet is what a slot of `buffer` to take comes behind.

        So it is if the producer begins to fill the one before it has filled the other, and consumers take them the
        other way round: then the one has to be given back, of an iteration before, when the other is waited for.
        """
        opens = min(self.at[copy] for copy in other.copies + other.others)
        filled = max(self.at[copy] for copy in buffer.copies + buffer.others)
        return opens < filled and self._taken[other] > self._taken[buffer]


def loaded_tiles(program: TileProgram) -> tuple[Tile, ...]:
    """The shared tiles that copies from global memory write."""
    copies = (node for node in program.nodes() if isinstance(node, Copy) and node.src.tile.scope == "global")
    return tuple(dict.fromkeys(copy.dst.tile for copy in copies if copy.dst.tile.scope == "shared"))


class _Home(NamedTuple):
    """Where a tile is loaded: the statement that is or holds its copies, the statements beside, the loop around."""

    place: Node
    body: tuple[Node, ...]
    loop: Loop | None


def find(program: TileProgram) -> tuple[CircularBuffer, ...] | str:
    """The circular buffers of a program; or why a loaded tile can be in none, as a sentence."""
    found: dict[tuple[Node, Node], list[tuple[Copy, Copy | None]]] = {}
    homes: dict[Copy, _Home] = {}
    for tile in loaded_tiles(program):
        filling = _filling(program, tile)
        if isinstance(filling, str):
            return filling
        place, copy, other = filling
        for body, loop in _bodies(program.body, None):
            if place in body:
                after = body[body.index(place) + 1 :]
                readers = [node for node in after if tile in node.reads]
                inside = sum(1 for node in leaves(after) if tile in node.reads)
                if not readers or inside != sum(1 for node in leaves(program.body) if tile in node.reads):
                    return f"{tile.name} is read elsewhere than after {copy}"
                found.setdefault((readers[0], readers[-1]), []).append((copy, other))
                homes[copy] = _Home(place, body, loop)
    order = {node: at for at, node in enumerate(program.nodes())}
    buffers: list[CircularBuffer] = []
    for (first, last), filled in found.items():
        copies = tuple(copy for copy, _ in filled)
        others = tuple(sorted((other for _, other in filled if other is not None), key=lambda copy: order[copy]))
        if others and len({homes[copy].place for copy in copies}) > 1:
            names = ", ".join(copy.dst.tile.name for copy in copies)
            return f"{names} are read together, and loaded in different places; a branch loads all of them in each arm"
        buffers.append(CircularBuffer(copies, homes[copies[0]].loop, first, last, others))
    return _joined(buffers, homes, order)


def _joined(
    buffers: list[CircularBuffer], homes: Mapping[Copy, _Home], order: Mapping[Node, int]
) -> tuple[CircularBuffer, ...]:
    """The buffers, small ones put into the nearest that may hold them, of those that are loaded in the same place."""
    for small in tuple(buffers):
        beside = [each for each in buffers if homes[each.copies[0]].body is homes[small.copies[0]].body]
        hosts = [each for each in beside if _may_hold(each, small, order)]
        if hosts:
            near = min(hosts, key=lambda each: abs(order[each.copies[-1]] - order[small.copies[0]]))
            copies = tuple(sorted(near.copies + small.copies, key=lambda copy: order[copy]))
            joined = replace(near, copies=copies)
            buffers = [joined if each is near else each for each in buffers if each is not small]
    return tuple(buffers)


def _may_hold(buffer: CircularBuffer, small: CircularBuffer, order: Mapping[Node, int]) -> bool:
    """Whether slots of a buffer may hold another's small tiles, too, and are held no longer for them."""
    if buffer is small or buffer.others or small.others or _SMALL * small.bytes > buffer.bytes:
        return False
    return order[buffer.first] <= order[small.first] and order[small.last] <= order[buffer.last]


def _filling(program: TileProgram, tile: Tile) -> tuple[Node, Copy, Copy | None] | str:
    """What fills a tile: the copy, or the copies in both arms of a branch, and the statement that is or holds them."""
    writers = [node for node in leaves(program.body) if tile in node.writes]
    copies = [w for w in writers if isinstance(w, Copy) and w.src.tile.scope == "global"]
    place: Node | None = None
    if len(copies) == len(writers) == 1:
        place = copies[0]
    elif len(copies) == len(writers) == 2:
        branches = (node for node in program.nodes() if isinstance(node, Branch))
        place = next((b for b in branches if copies[0] in b.then and copies[1] in b.otherwise), None)
    if place is None:
        return (
            f"{tile.name} is written in {len(writers)} places; a circular buffer is filled in one, or in both arms of "
            "an `if`"
        )
    for copy in copies:
        if not copy.dst.whole:
            return f"{copy} fills a part of {tile.name}"
    return place, copies[0], copies[1] if len(copies) == 2 else None


def _bodies(body: tuple[Node, ...], loop: Loop | None) -> Iterator[tuple[tuple[Node, ...], Loop | None]]:
    """Every list of statements, with the innermost loop around it."""
    yield body, loop
    for node in body:
        for inner in node.bodies:
            yield from _bodies(inner, node if isinstance(node, Loop) else loop)
