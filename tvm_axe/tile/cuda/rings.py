"""Shared tiles that only global copies write become rings: slots that a producer fills ahead of those who read them.

A ring has a full and an empty barrier a slot. Tiles that are loaded in the same place and read between the same two
statements share a ring, so one barrier serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm_axe.tile.program import Branch, Copy, Loop, Node, Program, Tile, walk


@dataclass(frozen=True, eq=False)
class Ring:
    """Tiles that are loaded and released together.

    Attributes
    ----------
    copies : what fills a slot, in order
    others : what fills it instead, in the other arm of a branch
    loop : the loop in whose body they are, or None
    first, last : the statements, beside the copies, with the first and the last reader
    threads : whether readers other than `gemm` are among them
    """

    copies: tuple[Copy, ...]
    loop: Loop | None
    first: Node
    last: Node
    threads: bool
    others: tuple[Copy, ...] = ()

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return tuple(copy.dst.tile for copy in self.copies)

    @property
    def bytes(self) -> int:
        """Of a slot."""
        return sum(tile.bytes for tile in self.tiles)

    @property
    def name(self) -> str:
        return ", ".join(tile.name for tile in self.tiles)


def loaded_tiles(program: Program) -> tuple[Tile, ...]:
    """The shared tiles that copies from global memory write."""
    copies = (node for node in program.nodes() if isinstance(node, Copy) and node.src.tile.scope == "global")
    return tuple(dict.fromkeys(copy.dst.tile for copy in copies if copy.dst.tile.scope == "shared"))


def find(program: Program) -> tuple[Ring, ...] | str:
    """The rings of a program; or why a loaded tile can be in none, as a sentence."""
    found: dict[tuple[Node, Node], list[Copy]] = {}
    others: dict[tuple[Node, Node], list[Copy]] = {}
    homes: dict[Copy, Loop | None] = {}
    for tile in loaded_tiles(program):
        writers = [node for node in _leaves(program.body) if tile in node.writes]
        copy, place = writers[0], writers[0]
        if len(writers) == 2:
            branches = (node for node in program.nodes() if isinstance(node, Branch))
            place = next((b for b in branches if writers[0] in b.then and writers[1] in b.otherwise), place)
        if len(writers) != (2 if place is not copy else 1) or not all(isinstance(w, Copy) for w in writers):
            return f"{tile.name} is written in {len(writers)} places; a ring is filled in one, or in both arms of an if"
        if not copy.dst.whole:
            return f"{copy} fills a part of {tile.name}"
        for body, loop in _bodies(program.body, None):
            if place in body:
                after = body[body.index(place) + 1 :]
                readers = [node for node in after if tile in node.reads]
                inside = sum(1 for node in _leaves(after) if tile in node.reads)
                if not readers or inside != sum(1 for node in _leaves(program.body) if tile in node.reads):
                    return f"{tile.name} is read elsewhere than after {copy}"
                found.setdefault((readers[0], readers[-1]), []).append(copy)
                others.setdefault((readers[0], readers[-1]), []).extend(writers[1:])
                homes[copy] = loop
    rings = []
    for (first, last), copies in found.items():
        tiles = {copy.dst.tile for copy in copies}
        readers = [node for node in _leaves(program.body) if tiles & set(node.reads)]
        threads = any(type(node).__name__ != "Gemm" for node in readers)
        rings.append(Ring(tuple(copies), homes[copies[0]], first, last, threads, tuple(others[first, last])))
    return tuple(rings)


def _leaves(body: tuple[Node, ...]) -> Iterator[Node]:
    return (node for node in walk(body) if not isinstance(node, Loop | Branch))


def _bodies(body: tuple[Node, ...], loop: Loop | None) -> Iterator[tuple[tuple[Node, ...], Loop | None]]:
    """Every list of statements, with the innermost loop around it."""
    yield body, loop
    for node in body:
        if isinstance(node, Loop):
            yield from _bodies(node.body, node)
        elif isinstance(node, Branch):
            yield from _bodies(node.then, loop)
            yield from _bodies(node.otherwise, loop)
