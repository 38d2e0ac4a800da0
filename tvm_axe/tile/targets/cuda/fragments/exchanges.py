"""Which fragments a `parallel` goes through shared memory for: those of which threads need what others hold.

Threads go along one fragment, the *anchor*. Another one is read, and stored to, in registers where its layout gives
each thread what it needs there; where it doesn't, as in a transposition, in a shift, or at a place that is data, its
elements are put into shared memory before the points, and back behind them if any was stored.

Both the plan, which leaves room for it, and the code ask `exchanged`, so that they agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, tirx
from tvm.script import tirx as T

from tvm_axe.errors import TileError
from tvm_axe.layout import Iter, Layout
from tvm_axe.tile.nodes import Copy, Parallel
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.targets.cuda.fragments.copies import copy
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Memory, Registers
from tvm_axe.tile.targets.cuda.fragments.infer import LayoutChoice
from tvm_axe.tile.targets.cuda.fragments.layout import REGISTER, FragmentLayout, evaluate
from tvm_axe.tile.targets.cuda.fragments.walk import FragmentWalk, StridedWalk, Walk, covers, find_registers

_ALIGNMENT = 16

Held = Mapping[Tile, FragmentLayout]
"""The tiles in registers, local ones too."""


# ---- What threads go along -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anchor:
    """A box of a fragment, and which of its dimensions each variable is."""

    tile: Tile
    start: list[int]
    extents: list[int]
    place: list[int | None]


def anchor_of(node: Parallel, held: Held) -> Anchor | None:
    """The first tile in registers stored to by plain coordinates, else the first so read; None if there is neither.

    Where points compare and swap, one whose elements no two threads hold: a point is then done by one thread, once, as
    what it finds is told to no other.
    """
    once = any(kind == "cas" for _, kind in node.joins)
    for stores in (True, False):
        for tile, indices, is_store in node.accesses:
            if is_store == stores and tile in held and not (once and held[tile].is_copied):
                box = _box(node, indices)
                if box is not None:
                    return Anchor(tile, *box)
    return None


def _box(node: Parallel, indices: Sequence[Any]) -> tuple[list[int], list[int], list[int | None]] | None:
    """The box of a tile that `indices` go over, and the dimension of each variable; None if they are no plain ones."""
    start, extents = [], []
    place: dict[tirx.Var, int] = {}
    for dimension, index in enumerate(indices):
        var, offset = _plain(index, node.vars)
        if offset is None or var in place:
            return None
        if var is not None:
            place[var] = dimension
        start.append(offset)
        extents.append(1 if var is None else dict(zip(node.vars, node.extents))[var])
    if any(extent != 1 and var not in place for var, extent in zip(node.vars, node.extents)):
        return None
    return start, extents, [place.get(var) for var in node.vars]


def _plain(index: Any, own: Sequence[tirx.Var]) -> tuple[tirx.Var | None, int | None]:
    """The variable and the constant that an index is the sum of; the constant is None if it is no such sum."""
    if isinstance(index, (int, tirx.IntImm)):
        return None, int(index)
    if any(index.same_as(var) for var in own):
        return index, 0
    if isinstance(index, ir.prim.Add):
        (va, ca), (vb, cb) = _plain(index.a, own), _plain(index.b, own)
        if ca is not None and cb is not None and (va is None or vb is None):
            return (va if vb is None else vb), ca + cb
    return None, None


def coordinates(node: Parallel, walk: Walk, anchor: Anchor | None) -> dict[tirx.Var, np.ndarray]:
    """The point that every thread meets at every step, by variable."""
    place = range(len(node.vars)) if anchor is None else anchor.place
    zero = np.zeros_like(walk.inside, dtype=np.int64)
    return {var: zero if d is None else walk.points[d] for var, d in zip(node.vars, place)}


# ---- What they don't hold --------------------------------------------------------------------------------------------


def exchanged(node: Parallel, held: Held, threads: int) -> tuple[Tile, ...]:
    """The fragments that go through shared memory, in the order in which they are found."""
    rest, found = dict(held), list[Tile]()
    while True:
        anchor = anchor_of(node, rest)
        walk = StridedWalk(node.extents, threads) if anchor is None else along(anchor, rest)
        missing = _first_missing(node, rest, walk, coordinates(node, walk, anchor))
        if missing is None:
            return tuple(found)
        found.append(missing)
        del rest[missing]


def along(anchor: Anchor, held: Held) -> FragmentWalk:
    """The walk of the threads along an anchor."""
    return FragmentWalk(held[anchor.tile], anchor.start, anchor.extents)


def _first_missing(node: Parallel, held: Held, walk: Walk, known: dict[tirx.Var, np.ndarray]) -> Tile | None:
    """The first fragment of which threads need what others hold."""
    if not any(tile in held and tile.scope == "fragment" for tile, _, _ in node.accesses):
        return None

    def on_name(bind: tirx.Bind) -> None:
        value = evaluate(bind.value, known)
        if value is not None:
            known[bind.var] = value

    tvm_ffi.structural_walk(node.body, (tirx.Bind, on_name))
    for tile, indices, stores in node.accesses:
        if tile in held and tile.scope == "fragment" and not _has(walk, held[tile], indices, stores, known):
            return tile
    return None


def _has(
    walk: Walk, fragment: FragmentLayout, indices: Sequence[Any], stores: bool, known: dict[tirx.Var, np.ndarray]
) -> bool:
    """Whether all threads have, in their registers, what they access; and meet all copies of what they store."""
    found_at = [evaluate(part, known) for part in indices]
    index = [part for part in found_at if part is not None]
    if len(index) < len(found_at):
        return False
    if isinstance(walk, StridedWalk) and any(np.ptp(part) for part in index):  # which is of other lengths of vectors
        return False
    try:
        found = find_registers(walk, fragment, index)
    except TileError:  # an element outside, which a condition keeps from being accessed: the checks have seen to that
        return False
    return found is not None and (not stores or covers(walk, fragment, index))


# ---- Through shared memory -------------------------------------------------------------------------------------------


def room_of(tiles: Sequence[Tile]) -> int:
    """How many bytes of shared memory the tiles take together."""
    return sum(-(-tile.bytes // _ALIGNMENT) * _ALIGNMENT for tile in tiles)


def put(emitter: Emitter, node: Parallel, tiles: Sequence[Tile]) -> Emitter:
    """Put fragments into shared memory; an emitter to which they are there."""
    emitter.threads.sync()
    storages, offset = dict(emitter.storages), 0
    for tile in tiles:
        stored = _place(emitter, tile, offset, room_of(tiles))
        _between(emitter, tile, stored, back=False)
        storages[tile] = stored
        offset += room_of([tile])
    emitter.threads.sync()
    return Emitter(emitter.threads, storages, emitter.analyzer, emitter.scratch)


def take(emitter: Emitter, node: Parallel, tiles: Sequence[Tile], placed: Emitter) -> None:
    """Take back those that the node has stored to, from where `put` has put them."""
    written = [tile for tile in tiles if tile in node.writes]
    if written:
        emitter.threads.sync()
    for tile in written:
        _between(emitter, tile, placed.memory(tile), back=True)


def _place(emitter: Emitter, tile: Tile, offset: int, room: int) -> Memory:
    """Row-major, so many bytes behind the beginning of scratch memory."""
    size = int(tvm_ffi.dtype(tile.dtype).bits) // 8
    layout = Layout([Iter(math.prod(tile.shape), 1, REGISTER)])
    return Memory(emitter.scratch(tile.dtype, room // size), layout, T.int32(offset // size))


def _between(emitter: Emitter, tile: Tile, stored: Memory, back: bool) -> None:
    """Copy a fragment to its place in shared memory, or back."""
    twin = Tile(tile.buffer, "shared", tile.shape, tile.dtype)
    zeros = (tirx.const(0, "int32"),) * len(tile.shape)
    there, here = Region(twin, zeros, tile.shape), Region(tile, zeros, tile.shape)
    copy(emitter.with_tile(twin, stored), Copy(here, there, None) if back else Copy(there, here, None))


def decide(program: TileProgram, fragments: Mapping[Tile, LayoutChoice], threads: int, decisions: Decisions) -> None:
    """Write down which fragments go through shared memory, and why."""
    for node in program.nodes():
        if isinstance(node, Parallel):
            for tile in exchanged(node, held_of(node, fragments, threads), threads):
                decisions.add(
                    node,
                    f"{tile.name} through {tile.bytes} bytes of shared memory",
                    f"threads need elements that others hold, as {tile.name} lies by {fragments[tile].origin}; a "
                    "tile.shared is there all the time",
                )


def held_of(node: Parallel, fragments: Mapping[Tile, LayoutChoice], threads: int) -> dict[Tile, FragmentLayout]:
    """The layouts of what a node accesses in registers."""
    tiles = dict.fromkeys(tile for tile, _, _ in node.accesses if tile in fragments)
    return {tile: FragmentLayout(fragments[tile].layout, fragments[tile].shape, threads) for tile in tiles}


def registers_of(emitter: Emitter, node: Parallel) -> dict[Tile, FragmentLayout]:
    """The same, of tiles as an emitter knows them."""
    stored = {tile: emitter.storages[tile] for tile, _, _ in node.accesses}
    return {tile: held.fragment for tile, held in stored.items() if isinstance(held, Registers)}
