"""How much shared memory operations on fragments need for a moment: what warps tell each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import tvm_ffi

from tvm_axe.tile.dispatch import TypeTable
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
    Reduce,
    Signal,
    Wait,
)
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.fragments.infer import LayoutChoice, reduced_layout
from tvm_axe.tile.targets.cuda.fragments.layout import FragmentLayout
from tvm_axe.tile.targets.cuda.fragments.reductions import accumulation_type, over_warps


def scratch_bytes(program: TileProgram, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    """The most that any node of a program asks `Emitter`'s scratch for, in bytes."""
    return max((NODES.of(node)(node, held, threads) for node in program.nodes()), default=0)


def _none(node: Node, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    return 0


def _of_reduce(node: Reduce, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    layout, shape = reduced_layout(node.src, held, threads), node.src.extents
    if layout is None or not layout.admits(shape):  # a part of a fragment, which is refused
        return 0
    digits = over_warps(FragmentLayout(layout, shape, threads), node.axis)
    rows = math.prod(shape) // shape[node.axis]
    parts = math.prod(digit.extent for digit in digits)
    return parts * rows * _bytes(accumulation_type(node.dst.tile.dtype)) if digits else 0


def _of_copy(node: Copy, held: Mapping[Tile, LayoutChoice], threads: int) -> int:
    if node.src.tile not in held or node.dst.tile not in held:
        return 0
    alike = held[node.src.tile].layout == held[node.dst.tile].layout
    same = alike and node.src.whole and node.dst.whole
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
        Parallel: _none,
        Reduce: _of_reduce,
        Signal: _none,
        Wait: _none,
    },
)
"""The bytes that a node needs; what a product by multiply-adds needs, the uniform model's `decide_memory` counts."""
