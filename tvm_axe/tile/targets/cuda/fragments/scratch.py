"""How much shared memory operations on fragments need for a moment: what warps tell each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import tvm_ffi

from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.keys import KEY, by_passes
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
from tvm_axe.tile.targets.cuda.fragments.exchanges import exchanged, held_of, room_of
from tvm_axe.tile.targets.cuda.fragments.infer import LayoutChoice, ordered_layout, padded_rows, reduced_layout
from tvm_axe.tile.targets.cuda.fragments.layout import FragmentLayout, projected
from tvm_axe.tile.targets.cuda.fragments.reductions import accumulation_type, over_warps
from tvm_axe.tile.targets.cuda.fragments.scans import sums_type


def scratch_bytes(program: TileProgram, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    """The most that any node of a program asks `Emitter`'s scratch for, in bytes."""
    return max((NODES.of(node)(node, held, threads) for node in program.nodes()), default=0)


def _none(node: Node, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    return 0


def _of_reduce(node: Reduce, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    """A part of each row from each warp; before, a part of a fragment, and behind, rows for threads without parts."""
    reduced = reduced_layout(node.src, held, threads)
    assert reduced is not None, node
    layout, shape = reduced
    digits = over_warps(FragmentLayout(layout, shape, threads), node.axis)
    rows, size = math.prod(shape) // shape[node.axis], _bytes(accumulation_type(node.dtype))
    over = math.prod(digit.extent for digit in digits) * rows * size if digits else 0
    kept = [d for d in range(len(shape)) if d != node.axis]
    own = projected(layout, shape, kept)
    target = held.get(node.dst.tile)
    padded = padded_rows(node.dst.extents, *([each[d] for d in kept] for each in (node.src.extents, shape)))
    moved = target is not None and not ((target.layout, target.shape) == (own, padded) and node.dst.whole)
    return max(over, _of_part(node.src, held), rows * _bytes(node.dst.tile.dtype) if moved else 0)


def _of_part(region: Region, held: Mapping[Tile, LayoutChoice]) -> int:
    """What a part of a fragment takes on its way to the threads that go over it."""
    return math.prod(region.extents) * _bytes(region.tile.dtype) if region.tile in held and not region.whole else 0


def _of_parallel(node: Parallel, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    return room_of(exchanged(node, held_of(node, held, threads), threads))


def _of_sort(node: Sort, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    """Keys: a row's from each warp, or all of them; then results on their way to threads that don't have the lines."""
    ordered = reduced_layout(node.src, held, threads)
    assert ordered is not None, node
    layout, shape = ordered
    lines = math.prod(node.src.extents) // node.length
    part = _of_part(node.src, held)
    if not by_passes(node):
        return max(part, lines * node.length * _bytes(KEY))
    parts = math.prod(digit.extent for digit in over_warps(FragmentLayout(layout, shape, threads), node.axis))
    keys = parts * math.prod(shape) // shape[node.axis] * _bytes(KEY) if parts > 1 else 0
    own, padded = ordered_layout(node, layout, shape), shape != node.src.extents
    moved = [r for r in node.results if r.tile in held and (padded or not (held[r.tile].layout == own and r.whole))]
    return max([part, keys, *(lines * node.count * _bytes(region.tile.dtype) for region in moved)])


def _of_scan(node: Scan, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    in_memory = node.src.tile not in held and node.dst.tile not in held
    return 0 if in_memory else math.prod(node.src.extents) * _bytes(sums_type(node.dst.tile.dtype))


def _of_copy(node: Copy, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    if node.src.tile not in held or node.dst.tile not in held:
        return 0
    src, dst = held[node.src.tile], held[node.dst.tile]
    same = (src.layout, src.shape) == (dst.layout, dst.shape) and node.src.whole and node.dst.whole
    return 0 if same else math.prod(node.src.extents) * _bytes(node.dst.tile.dtype)


def _bytes(dtype: str) -> int:
    return int(tvm_ffi.dtype(dtype).bits) // 8


NODES: TypeTable[Callable[[Any, Mapping[Tile, LayoutChoice], int], int]] = TypeTable(
    "memory for exchanges",
    {
        Assign: _none,
        Branch: _none,
        Copy: _of_copy,
        Fill: _none,
        Gemm: _none,
        Let: _none,
        Loop: _none,
        Parallel: _of_parallel,
        Print: _none,
        Reduce: _of_reduce,
        Scan: _of_scan,
        Sort: _of_sort,
        Signal: _none,
        Wait: _none,
    },
)
"""The bytes that a node needs; what a product by multiply-adds needs, the uniform model's `decide_memory` counts."""
