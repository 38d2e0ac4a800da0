"""Fragment layouts: what instructions fix, what follows from it, and what is free.

A layout that a node fixes is carried on by the others: an element that a `parallel` computes lives in the thread that
holds what it is computed from, a row's result in every thread that holds a part of the row. What nothing fixes gets a
layout for fast access to memory: 16 bytes a thread along the last dimension, the threads along it, then over the rows
before it. Every layout comes with its origin, the node and the rule, for errors and for ``tvm-axe tile explain``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from tvm_axe.errors import TileError
from tvm_axe.layout import ComposeLayout, Iter, Layout
from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.keys import by_passes
from tvm_axe.tile.nodes import (
    Assign,
    Branch,
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
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.targets.cuda.fragments.layout import REGISTER, THREAD, everywhere, projected

_FREE = "nothing else fixes it"
"""How the origin begins of a layout that is for fast access to memory alone."""


@dataclass(frozen=True)
class LayoutChoice:
    """The layout of a fragment or local tile, and what decided it.

    Attributes
    ----------
    layout : Layout
        Where its elements lie, over the axes ``tx`` and ``m``.
    origin : str
        The node and the rule, or the annotation.
    """

    layout: Layout
    origin: str


def infer(program: TileProgram, fixed: Mapping[Tile, LayoutChoice], threads: int) -> dict[Tile, LayoutChoice]:
    """A layout over ``tx`` and ``m`` for every fragment and local tile.

    Parameters
    ----------
    program : TileProgram
        The program.
    fixed : mapping from Tile to LayoutChoice
        The layouts that the instructions of gemms demand. An annotation comes first.
    threads : int
        How many threads hold fragments.

    Raises
    ------
    TileError
        A fragment is annotated with a swizzled layout.
    """
    held: dict[Tile, LayoutChoice] = {}
    for tile in program.tiles:
        if tile.scope == "local":
            held[tile] = LayoutChoice(
                everywhere(math.prod(tile.shape), threads), "every thread holds all of a local tile"
            )
        elif tile.scope == "fragment" and tile.layout is not None:
            if isinstance(tile.layout, ComposeLayout):
                raise TileError(f"{tile}: layout {tile.layout}: registers have no swizzle; valid is a Layout")
            held[tile] = LayoutChoice(tile.layout, "its annotation")
        elif tile in fixed:
            held[tile] = fixed[tile]
    nodes = list(program.nodes())
    while True:
        while any(_propagate(node, held, threads) for node in nodes):
            pass
        free = [tile for tile in program.tiles if tile.scope == "fragment" and tile not in held]
        if not free:
            return held
        tile = max(free, key=lambda tile: math.prod(tile.shape))
        vector = max([128 // _bits(memory) for memory in _memory_of(tile, nodes)] or [128 // _bits(tile)])
        held[tile] = LayoutChoice(
            coalesced(tile.shape, vector, threads), f"{_FREE}: {vector} neighbours a thread, coalesced"
        )


def coalesced(shape: Sequence[int], vector: int, threads: int) -> Layout:
    """The layout for fast access to memory: see the module. What the threads are too many for is held in copies.

    A thread's vector is shorter than `vector` where that puts more threads to work.

    >>> print(coalesced((16, 64), 8, 128))
    S[(128, 8) : (1@tx, 1)]
    >>> print(coalesced((1, 640), 8, 128))
    S[(5, 128) : (1, 1@tx)]
    >>> print(coalesced((2, 24), 8, 32))
    S[(2, 3, 8) : (8@tx, 1, 1@tx)] + R[2 : 16@tx]
    """
    vectors = [
        length for length in (vector >> shift for shift in range(vector.bit_length())) if shape[-1] % length == 0
    ]
    layouts = [_spread(shape, length, threads) for length in vectors]
    return max(layouts, key=lambda layout: int(layout.size(THREAD))).canonicalize()


def _spread(shape: Sequence[int], vector: int, threads: int) -> Layout:
    iters: list[Iter] = []
    stride, register = 1, vector
    for extent in [shape[-1] // vector, *reversed(shape[:-1])]:
        across = math.gcd(extent, threads // stride)
        iters.insert(0, Iter(across, stride, THREAD))
        iters.insert(0, Iter(extent // across, register, REGISTER))
        stride, register = stride * across, register * (extent // across)
    iters.append(Iter(vector, 1, REGISTER))
    return Layout(iters, [Iter(threads // stride, stride, THREAD)])


def find_shared_out_badly(fragments: Mapping[Tile, LayoutChoice], threads: int) -> list[str]:
    """Which fragments have elements for all threads but few threads that divide them, and what avoids that."""
    found = []
    for tile, held in fragments.items():
        holders = int(held.layout.size(THREAD))
        if held.origin.startswith(_FREE) and 4 * holders <= threads <= math.prod(tile.shape):
            wide = 1 << (tile.shape[-1] - 1).bit_length()
            better = f"{wide} columns" if wide != tile.shape[-1] else "rows with more factors of two"
            found.append(
                f"{tile} is held by {holders} threads of {threads}, whose work the others do again, since few threads "
                f"divide its extents; {better} avoid it: a copy fills what is outside of a tensor with zeros"
            )
    return found


def _bits(tile: Tile) -> int:
    return int(tvm_ffi.dtype(tile.dtype).bits)


def _memory_of(tile: Tile, nodes: Sequence[Node]) -> Iterator[Tile]:
    """What the tile is copied to and from."""
    for node in nodes:
        if isinstance(node, Copy):
            pair = (node.dst.tile, node.src.tile)
            if tile in pair:
                other = pair[0] if pair[1] is tile else pair[1]
                if other.scope in ("global", "shared"):
                    yield other


def reduced_layout(region: Region, held: Mapping[Tile, LayoutChoice], threads: int) -> Layout | None:
    """The layout in which a region is reduced: a fragment's own; of memory, or a part, the one that it is loaded in.

    None if the fragment has none yet.
    """
    if region.tile.scope in ("shared", "global") or not region.whole:
        return coalesced(region.extents, 128 // _bits(region.tile), threads)
    return held[region.tile].layout if region.tile in held else None


def _propagate(node: Node, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    """Decide what follows from a node; whether that was anything."""
    return NODES.of(node)(node, held, threads)


def _nothing(node: Node, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    """Nothing follows from scalars, flags, values alike for all elements, and products: instructions fix these."""
    return False


def _along_reduce(node: Reduce, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    dst, shape = node.dst.tile, node.src.extents
    layout = reduced_layout(node.src, held, threads)
    if layout is None or dst in held or dst.scope != "fragment" or not layout.admits(shape):
        return False
    kept = [d for d in range(len(shape)) if d != node.axis]
    held[dst] = LayoutChoice(projected(layout, shape, kept), f"{node}, without the reduced axis")
    return True


def ordered_layout(node: Sort, layout: Layout) -> Layout:
    """The layout of a result that is searched in a source of `layout`: who has a part of a line has its results."""
    shape = node.src.extents
    lines = projected(layout, shape, [d for d in range(len(shape)) if d != node.axis])
    if not node.keeps_axis:
        return lines
    inside = [Iter(it.extent, it.stride * node.count, it.axis) if it.axis == REGISTER else it for it in lines.D]
    return Layout([*inside, Iter(node.count, 1, REGISTER)], lines.R).canonicalize()


def _along_sort(node: Sort, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    layout = reduced_layout(node.src, held, threads)
    if layout is None or not by_passes(node) or not layout.admits(node.src.extents):
        return False
    free = [region.tile for region in node.results if region.tile.scope == "fragment" and region.tile not in held]
    for tile in free:
        held[tile] = LayoutChoice(ordered_layout(node, layout), f"{node}, where the lines are")
    return bool(free)


def _along_copy(node: Copy | Scan, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    pair = (node.src.tile, node.dst.tile)
    if not (node.src.whole and node.dst.whole) or any(tile.scope != "fragment" for tile in pair):
        return False
    for tile, other in (pair, pair[::-1]):
        if tile in held and other not in held:
            held[other] = LayoutChoice(held[tile].layout, f"{node}, the layout of {tile.name}")
            return True
    return False


def _along_parallel(node: Parallel, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    """From the first fragment that all coordinates go over, to those that some of them go over."""
    places = {tile: _places(node, tile, indices) for tile, indices, _ in node.accesses if tile.scope == "fragment"}
    wide = [v for v, extent in enumerate(node.extents) if extent != 1]
    known = [
        (tile, place) for tile, place in places.items() if tile in held and place and set(wide) <= {*place.values()}
    ]
    if not known:
        return False
    tile, place = known[0]
    dimension_of = {var: dimension for dimension, var in place.items()}
    found = False
    for other, own in places.items():
        if other in held or own is None:
            continue
        # What a coordinate of extent 1 goes over has no steps, and needs no dimension.
        dimensions = [dimension_of[var] for var in own.values() if node.extents[var] != 1]
        held[other] = LayoutChoice(
            projected(held[tile].layout, tile.shape, dimensions), f"{node}, along {tile.name}, from {held[tile].origin}"
        )
        found = True
    return found


def _places(node: Parallel, tile: Tile, indices: Sequence[object]) -> dict[int, int] | None:
    """Which coordinate each dimension of a whole fragment is; None if it is accessed in another way."""
    place: dict[int, int] = {}
    for dimension, index in enumerate(indices):
        var = next((v for v, own in enumerate(node.vars) if own.same_as(index)), None)
        if var is None:
            if tile.shape[dimension] != 1:
                return None
        elif node.extents[var] != tile.shape[dimension] or var in place.values():
            return None
        else:
            place[dimension] = var
    return place


NODES: TypeTable[Callable[[Any, dict[Tile, LayoutChoice], int], bool]] = TypeTable(
    "layouts that follow from a node",
    {
        Assign: _nothing,
        Branch: _nothing,
        Copy: _along_copy,
        Fill: _nothing,
        Gemm: _nothing,
        Let: _nothing,
        Loop: _nothing,
        Parallel: _along_parallel,
        Print: _nothing,
        Reduce: _along_reduce,
        Scan: _along_copy,
        Sort: _along_sort,
        Signal: _nothing,
        Wait: _nothing,
    },
)
