"""How much shared memory operations on fragments need for a moment: what warps tell each other."""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm_ffi

from tvm_axe.tile.program import Copy, Node, Program, Reduce, Tile
from tvm_axe.tile.targets.cuda.fragments.infer import Held, reduced_layout
from tvm_axe.tile.targets.cuda.fragments.layout import Holding
from tvm_axe.tile.targets.cuda.fragments.reductions import accumulation_type, over_warps


def scratch_bytes(program: Program, held: Mapping[Tile, Held], threads: int) -> int:
    """The most that any node of a program asks `Emitter`'s scratch for, in bytes."""
    return max((_of(node, held, threads) for node in program.nodes()), default=0)


def _of(node: Node, held: Mapping[Tile, Held], threads: int) -> int:
    if isinstance(node, Reduce):
        layout, shape = reduced_layout(node.src, held, threads), node.src.extents
        if layout is None or not layout.admits(shape):  # a part of a fragment, which is refused
            return 0
        digits = over_warps(Holding(layout, shape, threads), node.axis)
        rows = math.prod(shape) // shape[node.axis]
        parts = math.prod(digit.extent for digit in digits)
        return parts * rows * _bytes(accumulation_type(node.dst.tile.dtype)) if digits else 0
    if isinstance(node, Copy) and node.src.tile in held and node.dst.tile in held:
        alike = held[node.src.tile].layout == held[node.dst.tile].layout
        same = alike and node.src.whole and node.dst.whole
        return 0 if same else math.prod(node.src.extents) * _bytes(node.dst.tile.dtype)
    return 0


def _bytes(dtype: str) -> int:
    return int(tvm_ffi.dtype(dtype).bits) // 8
