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


@dataclass(frozen=True)
class LayoutChoice:
    """The layout of a fragment or local tile, and what decided it.

    Attributes
    ----------
    layout : Layout
        Where its elements lie, over the axes ``tx`` and ``m``.
    shape : tuple of int
        The extents of what `layout` places: the tile's, or more, of which those behind the tile's end hold nothing.
    origin : str
        The node and the rule, or the annotation.
    """

    layout: Layout
    shape: tuple[int, ...]
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
                everywhere(math.prod(tile.shape), threads), tile.shape, "every thread holds all of a local tile"
            )
        elif tile.scope == "fragment" and tile.layout is not None:
            if isinstance(tile.layout, ComposeLayout):
                raise TileError(f"{tile}: layout {tile.layout}: registers have no swizzle; valid is a Layout")
            held[tile] = LayoutChoice(tile.layout, tile.shape, "its annotation")
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
        layout, shape = coalesced(tile.shape, vector, threads)
        padded = "" if shape == tile.shape else f", as if it were {list(shape)}, which the threads divide"
        held[tile] = LayoutChoice(
            layout, shape, f"nothing else fixes it: up to {vector} neighbours a thread, coalesced{padded}"
        )


def coalesced(shape: Sequence[int], vector: int, threads: int) -> tuple[Layout, tuple[int, ...]]:
    """The layout for fast access to memory, and the extents that it places: see the module.

    A thread's vector is shorter than `vector` where that puts more threads to work. What the threads are too many for
    is held in copies. Extents that few threads divide are padded where a thread then holds at most half as many.

    >>> print(*coalesced((16, 64), 8, 128))
    S[(128, 8) : (1@tx, 1)] (16, 64)
    >>> print(*coalesced((1, 640), 8, 128))
    S[(5, 128) : (1, 1@tx)] (1, 640)
    >>> print(*coalesced((2, 24), 8, 32))
    S[(2, 3, 8) : (8@tx, 1, 1@tx)] + R[2 : 16@tx] (2, 24)
    >>> print(*coalesced((4, 777), 4, 128))
    S[(28, 128) : (1, 1@tx)] (4, 896)
    """
    vectors = [
        length for length in (vector >> shift for shift in range(vector.bit_length())) if shape[-1] % length == 0
    ]
    even = [_spread(shape, length, threads, math.gcd) for length in vectors]
    best = max(even, key=lambda held: int(held[0].size(THREAD)))
    padded = [_spread(shape, length, threads, _rounded) for length in vectors]
    least = min(_registers(layout) for layout, _ in padded)
    if 2 * least <= _registers(best[0]):
        best = next(held for held in padded if 4 * _registers(held[0]) <= 5 * least)
    return best[0].canonicalize(), best[1]


def _spread(
    shape: Sequence[int], vector: int, threads: int, shared_out: Callable[[int, int], int]
) -> tuple[Layout, tuple[int, ...]]:
    """A layout of `vector` neighbours a thread, and the extents that it places.

    Over how many threads an extent goes, of those that are left, `shared_out` says.
    """
    iters: list[Iter] = []
    extents: list[int] = []
    stride, register = 1, vector
    for extent in [shape[-1] // vector, *reversed(shape[:-1])]:
        across = shared_out(extent, threads // stride)
        inside = -(-extent // across)
        iters.insert(0, Iter(across, stride, THREAD))
        iters.insert(0, Iter(inside, register, REGISTER))
        extents.insert(0, inside * across)
        stride, register = stride * across, register * inside
    iters.append(Iter(vector, 1, REGISTER))
    extents[-1] *= vector
    return Layout(iters, [Iter(threads // stride, stride, THREAD)]), tuple(extents)


def _rounded(extent: int, threads: int) -> int:
    """How many threads a padded extent goes over: all, or the next power of two, by which shuffles reduce."""
    wide = 1 << (extent - 1).bit_length()
    return threads if extent >= threads else wide if threads % wide == 0 else threads & -threads


def _registers(layout: Layout) -> int:
    return int(layout.span(REGISTER))


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


def reduced_layout(
    region: Region, held: Mapping[Tile, LayoutChoice], threads: int
) -> tuple[Layout, tuple[int, ...]] | None:
    """The layout in which a region is reduced, and the extents that it places.

    It is a fragment's own; of memory, or a part, the one that it is loaded in. None if the fragment has none yet.
    """
    if region.tile.scope in ("shared", "global") or not region.whole:
        return coalesced(region.extents, 128 // _bits(region.tile), threads)
    own = held.get(region.tile)
    return None if own is None else (own.layout, own.shape)


def _propagate(node: Node, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    """Decide what follows from a node; whether that was anything."""
    return NODES.of(node)(node, held, threads)


def _nothing(node: Node, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    """Nothing follows from scalars, flags, values alike for all elements, and products: instructions fix these."""
    return False


def _along_reduce(node: Reduce, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    dst, reduced = node.dst.tile, reduced_layout(node.src, held, threads)
    if reduced is None or dst in held or dst.scope != "fragment" or not reduced[0].admits(reduced[1]):
        return False
    layout, shape = reduced
    kept = [d for d in range(len(shape)) if d != node.axis]
    rows = padded_rows(dst.shape, [node.src.extents[d] for d in kept], [shape[d] for d in kept])
    held[dst] = LayoutChoice(projected(layout, shape, kept), rows, f"{node}, without the reduced axis")
    return True


def padded_rows(shape: Sequence[int], extents: Sequence[int], padded: Sequence[int]) -> tuple[int, ...]:
    """`shape`, which is `extents` up to ones, with the extents that these are padded to."""
    wide = iter([to for extent, to in zip(extents, padded) if extent != 1])
    return tuple(1 if extent == 1 else next(wide, extent) for extent in shape)


def ordered_layout(node: Sort, layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of a result that is searched in a source of `layout`: who has a part of a line has its results.

    `shape` are the extents that the source's layout places.
    """
    lines = projected(layout, shape, [d for d in range(len(shape)) if d != node.axis])
    if not node.keeps_axis:
        return lines
    inside = [Iter(it.extent, it.stride * node.count, it.axis) if it.axis == REGISTER else it for it in lines.D]
    return Layout([*inside, Iter(node.count, 1, REGISTER)], lines.R).canonicalize()


def _along_sort(node: Sort, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    ordered = reduced_layout(node.src, held, threads)
    if ordered is None or not by_passes(node) or not ordered[0].admits(ordered[1]):
        return False
    layout, shape = ordered
    kept = [d for d in range(len(shape)) if d != node.axis]
    extents, padded = ([each[d] for d in kept] for each in (node.src.extents, shape))
    free = [region.tile for region in node.results if region.tile.scope == "fragment" and region.tile not in held]
    for tile in free:
        rows = padded_rows(tile.shape, extents, padded)
        held[tile] = LayoutChoice(ordered_layout(node, layout, shape), rows, f"{node}, where the lines are")
    return bool(free)


def _along_copy(node: Copy | Scan, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    pair = (node.src.tile, node.dst.tile)
    if not (node.src.whole and node.dst.whole) or any(tile.scope != "fragment" for tile in pair):
        return False
    for tile, other in (pair, pair[::-1]):
        if tile in held and other not in held:
            own = held[tile]
            shape = padded_rows(other.shape, tile.shape, own.shape)
            held[other] = LayoutChoice(own.layout, shape, f"{node}, the layout of {tile.name}")
            return True
    return False


def _along_parallel(node: Parallel, held: dict[Tile, LayoutChoice], threads: int) -> bool:
    """From the first fragment that all coordinates go over, to those that some of them go over."""
    accessed = {tile: _places(node, tile, indices) for tile, indices, _ in node.accesses if tile.scope == "fragment"}
    wide = [v for v, extent in enumerate(node.extents) if extent != 1]
    known = [
        (tile, place) for tile, place in accessed.items() if tile in held and place and set(wide) <= {*place.values()}
    ]
    if not known:
        return False
    tile, place = known[0]
    dimension_of = {var: dimension for dimension, var in place.items()}
    found = False
    for other, own in accessed.items():
        if other in held or own is None:
            continue
        # What a coordinate of extent 1 goes over has no steps, and needs no dimension.
        dimensions = [dimension_of[var] for var in own.values() if node.extents[var] != 1]
        layout, shape, origin = held[tile].layout, held[tile].shape, held[tile].origin
        places = {dimension: shape[dimension_of[var]] for dimension, var in own.items() if node.extents[var] != 1}
        held[other] = LayoutChoice(
            projected(layout, shape, dimensions),
            tuple(places.get(dimension, 1) for dimension in range(len(other.shape))),
            f"{node}, along {tile.name}, from {origin}",
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
