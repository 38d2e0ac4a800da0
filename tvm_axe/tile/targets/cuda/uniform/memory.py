"""Shared memory of the uniform model: how tiles lie there, and how much of it they take."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi

from tvm_axe.errors import TileError
from tvm_axe.layout import Access, ComposeLayout, Iter, Layout
from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import (
    Assign,
    Copy,
    Fill,
    Gemm,
    Let,
    Loop,
    Node,
    Parallel,
    Print,
    Reduce,
    Scan,
    Signal,
    Sort,
    Wait,
)
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda import swizzles
from tvm_axe.tile.targets.cuda.fragments.infer import LayoutChoice
from tvm_axe.tile.targets.cuda.fragments.layout import THREAD
from tvm_axe.tile.targets.cuda.fragments.scratch import scratch_bytes
from tvm_axe.tile.targets.cuda.instructions import mma, tma
from tvm_axe.tile.targets.cuda.uniform.warpgroups import Warpgroups
from tvm_axe.tile.walking import leaves

ALIGNMENT = 128
"""Bytes, of tiles in shared memory."""

_LANES = 32
_MOST_SHOWN = 1 << 14  # elements of a tile whose accesses by `parallel` are counted one by one

Fragments = Mapping[Tile, LayoutChoice]
Load = Copy | Parallel
"""What fills a shared tile: a copy, or a parallel that gathers (`uniform.gathers`)."""


@dataclass(frozen=True)
class Pipeline:
    """The loads of a loop that run ahead of its iterations.

    Attributes
    ----------
    copies : mapping from Load to int
        The loads, with the bytes that a thread takes at once.
    ahead : mapping from Load to Load
        Each as it is made before its iteration: from where the names of that iteration say, by what they are.
    stages : int
        How many iterations' tiles there are slots for.
    """

    copies: Mapping[Load, int]
    ahead: Mapping[Load, Load]
    stages: int


@dataclass(frozen=True)
class UniformMemory:
    """What is in a block's shared memory.

    Attributes
    ----------
    layouts : mapping from Tile
        The layout of each shared tile, over the axis ``m``.
    scratch : int
        Bytes for exchanges between warps.
    operands : tuple of Tile
        The tiles that ``wgmma`` reads; they come first, so that none is moved for its alignment.
    pipelines : mapping from Loop to Pipeline
        The loops whose loads run ahead; their tiles have a slot a stage.
    """

    layouts: Mapping[Tile, Layout | ComposeLayout]
    scratch: int
    operands: tuple[Tile, ...] = ()
    pipelines: Mapping[Loop, Pipeline] = field(default_factory=dict)

    def slots(self, tile: Tile) -> int:
        """How many of a tile there are."""
        pipelines = self.pipelines.values()
        return max([p.stages for p in pipelines if any(tile in load.writes for load in p.copies)], default=1)

    def alignment(self, tile: Tile) -> int:
        """Bytes that a slot of a tile is aligned to."""
        return tma.alignment(tile) if tile in self.operands else ALIGNMENT

    def slot_bytes(self, tile: Tile) -> int:
        """How far it is from one slot of a tile to the next."""
        step = self.alignment(tile)
        return -(-int(self.layouts[tile].span()) * item_bytes(tile) // step) * step

    def slot_elements(self, tile: Tile) -> int:
        """The same in elements."""
        return self.slot_bytes(tile) // item_bytes(tile)

    @property
    def bytes(self) -> int:
        """How much there is in all."""
        return sum(self.slots(tile) * self.slot_bytes(tile) for tile in self.layouts) + self.scratch


def item_bytes(tile: Tile) -> int:
    """The size of an element."""
    return int(tvm_ffi.dtype(tile.dtype).bits) // 8


def decide_memory(
    program: TileProgram,
    fragments: Fragments,
    products: Mapping[Gemm, mma.Warps | Warpgroups],
    threads: int,
    decisions: Decisions,
) -> UniformMemory:
    """Decide the layouts of tiles in shared memory, and the room for exchanges.

    Parameters
    ----------
    program : TileProgram
        The program.
    fragments : mapping from Tile to LayoutChoice
        The layouts of fragments.
    products : mapping from Gemm
        How warps or warpgroups stand over the products of tensor cores; the others are multiply-adds.
    threads : int
        The threads of a block.
    decisions : Decisions
        Where the decisions are written.

    Raises
    ------
    TileError
        A layout as annotated puts two elements at one address.
    """
    layouts: dict[Tile, Layout | ComposeLayout] = {}
    by_warpgroups = [gemm for gemm, stand in products.items() if isinstance(stand, Warpgroups)]
    operands = dict.fromkeys(tile for gemm in by_warpgroups for tile in (gemm.a.tile, gemm.b.tile))
    by_warps = [gemm for gemm in products if gemm not in by_warpgroups]
    for tile in (*operands, *(tile for tile in program.tiles if tile not in operands)):
        if tile.scope != "shared":
            continue
        if tile in operands:
            layouts[tile], why = tma.axe_layout(tile), "as wgmma takes it"
        elif tile.layout is not None:
            if not (tile.layout.admits(tile.shape) and tile.layout.is_injective()):
                raise TileError(f"{tile}: layout {tile.layout} must place its elements at as many different addresses")
            layouts[tile], why = tile.layout, "its annotation"
        else:
            accesses = _accesses(program, fragments, by_warps, tile)
            layouts[tile], why = swizzles.choose(tile.shape, tile.dtype, accesses)
        decisions.add(tile, layouts[tile], why)
    scratch = scratch_bytes(program, fragments, threads)
    for node in program.nodes():
        if isinstance(node, Gemm) and node not in products and node.a.tile.scope != "shared":
            scratch = max(scratch, node.a.tile.bytes)
    return UniformMemory(layouts, -(-scratch // ALIGNMENT) * ALIGNMENT, tuple(operands))


@dataclass(frozen=True)
class _Asked:
    """The tile whose accesses are asked for, in pieces of so many elements, and what is decided beside it."""

    tile: Tile
    piece: int
    fragments: Fragments
    products: Collection[Gemm]


def _accesses(program: TileProgram, fragments: Fragments, products: Collection[Gemm], tile: Tile) -> list[Access]:
    """The ways in which warps access a shared tile."""
    asked = _Asked(tile, math.gcd(tile.shape[-1], swizzles.PIECE // item_bytes(tile)), fragments, products)
    found: list[Access] = []
    for node in leaves(program.body):
        if tile in node.reads + node.writes:
            found += _ACCESSES.of(node)(node, asked)
    return list(dict.fromkeys(found))


def _uncounted(node: Node, asked: _Asked) -> list[Access]:
    return []


def _by_gemm(node: Gemm, asked: _Asked) -> list[Access]:
    return [Access(asked.tile.dtype, "column", asked.piece)] if node in asked.products else []


def _by_copy(node: Copy, asked: _Asked) -> list[Access]:
    return [Access(asked.tile.dtype, "row", asked.piece)]


def _by_parallel(node: Parallel, asked: _Asked) -> list[Access]:
    """Accesses to a shared tile by the coordinates of a fragment that the threads go along."""
    tile, fragments = asked.tile, asked.fragments
    if math.prod(tile.shape) > _MOST_SHOWN:
        return []
    along = next((access for access in node.accesses if access[0] in fragments and access[2]), None)
    if along is None:
        return []
    fragment, outer, _ = along
    if fragments[fragment].shape != fragment.shape:
        return []  # of extents that are padded, lanes access no whole box
    found = []
    for other, indices, _ in node.accesses:
        if other is not tile or len(indices) != len(outer):
            continue
        order = [next((d for d, own in enumerate(outer) if own.same_as(index)), None) for index in indices]
        extents = [fragment.shape[d] for d in order if d is not None]
        if sorted(d for d in order if d is not None) == list(range(len(outer))) and tuple(extents) == tile.shape:
            held = fragments[fragment].layout.permute(fragment.shape, [d for d in order if d is not None])
            found.append(Access(tile.dtype, _lanes(held), 1))
    return found


def _lanes(layout: Layout) -> Layout:
    """A fragment's layout with its threads as lanes of warps."""
    shard: list[Iter] = []
    for it in layout.D:
        inner = min(it.extent, max(1, _LANES // it.stride)) if it.axis == THREAD else 1
        if it.axis != THREAD:
            shard.append(it)
        elif it.stride >= _LANES:
            shard.append(Iter(it.extent, it.stride // _LANES, "warpid"))
        else:
            shard += [
                Iter(it.extent // inner, max(1, it.stride * inner // _LANES), "warpid"),
                Iter(inner, it.stride, "laneid"),
            ]
    return Layout(shard)


_ACCESSES: TypeTable[Callable[[Any, _Asked], list[Access]]] = TypeTable(
    "accesses to shared memory",
    {
        Assign: _uncounted,
        Copy: _by_copy,
        Fill: _uncounted,
        Gemm: _by_gemm,
        Let: _uncounted,
        Parallel: _by_parallel,
        Print: _uncounted,
        Reduce: _uncounted,
        Scan: _uncounted,
        Sort: _uncounted,
        Signal: _uncounted,
        Wait: _uncounted,
    },
)
"""The ways in which a node accesses a tile, as far as they count in the choice of its layout."""
