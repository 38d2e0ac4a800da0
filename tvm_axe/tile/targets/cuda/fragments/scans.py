"""Scan: sums along the lines of a tile in shared memory, a warp a line, 32 elements at a time.

A lane adds what the lanes before it have by shuffles (PTX ISA, "shfl.sync"), as often as 32 is a power of two, and then
the sum of the elements before these. A fragment goes through shared memory, whose threads needn't hold neighbours.

Source: Hillis and Steele, "Data parallel algorithms", 1986.
"""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.tile.nodes import Copy, Scan
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Region
from tvm_axe.tile.targets.cuda.fragments.copies import Place, copy, row_major
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Memory

LANES = 32
_ALL_LANES = 0xFFFFFFFF


def sums_type(dtype: str) -> str:
    """In what sums of a type are computed: 32 bits at least."""
    narrow = tvm_ffi.dtype(dtype).bits < 32
    return dtype if not narrow else "float32" if "float" in dtype else "int32"


def decide(program: TileProgram, decisions: Decisions) -> None:
    """Write down how lines are summed up, and why."""
    for node in program.nodes():
        if isinstance(node, Scan):
            why = "a fragment's threads needn't hold neighbours"
            decisions.add(node, f"a warp a line, {LANES} elements at a time, from shared memory", why)


def scan(emitter: Emitter, node: Scan) -> None:
    """Emit it; where both sides are fragments, each sum takes its element's place in scratch memory."""
    threads, dtype = emitter.threads, sums_type(node.dst.tile.dtype)
    src, dst = node.src, node.dst
    if not all(isinstance(emitter.storages[region.tile], Memory) for region in (src, dst)):
        threads.sync()  # others may still read there
    if not isinstance(emitter.storages[src.tile], Memory):
        emitter, src = row_major(emitter, node.src, dtype)
        copy(emitter, Copy(src, node.src, None))
        threads.sync()
    if not isinstance(emitter.storages[dst.tile], Memory):
        emitter, dst = row_major(emitter, node.dst, dtype)
    _lines(emitter, node, src, dst, dtype)
    if dst is not node.dst:
        threads.sync()
        copy(emitter, Copy(node.dst, dst, None))


def _lines(emitter: Emitter, node: Scan, src: Region, dst: Region, dtype: str) -> None:
    """The scan from memory to memory, each line by a warp."""
    threads = emitter.threads
    length, lanes = src.extents[node.axis], tirx.const(_ALL_LANES, "uint32")
    wide = [(d, extent) for d, extent in enumerate(src.extents) if extent != 1]
    lines = math.prod(src.extents) // length
    warps = threads.count // LANES
    warp, lane = T.bind(threads.index // LANES), T.bind(threads.index % LANES)
    with T.serial(-(-lines // warps)) as turn:
        line = T.bind(turn * warps + warp)
        with emitter.guarded([line < lines] if lines % warps else []):
            before = T.alloc_buffer((1,), dtype, scope="local")
            total = T.alloc_buffer((1,), dtype, scope="local")
            T.buffer_store(before, tirx.const(0, dtype), [0])
            with T.serial(-(-length // LANES)) as part:
                step = T.bind(part * LANES + lane)
                at = length - 1 - step if node.reverse else step
                inside = [step < length] if length % LANES else []
                point = _point(wide, node.axis, line, at)
                T.buffer_store(total, tirx.const(0, dtype), [0])
                with emitter.guarded(inside):
                    Place(emitter, src, point).load(1, total, 0)
                for apart in (1, 2, 4, 8, 16):
                    other = T.bind(T.tvm_warp_shuffle_up(lanes, total[0], apart, LANES, LANES))
                    with T.If(lane >= apart), T.Then():
                        T.buffer_store(total, total[0] + other, [0])
                found = total[0]
                if node.exclusive:
                    other = T.bind(T.tvm_warp_shuffle_up(lanes, total[0], 1, LANES, LANES))
                    found = tirx.Select(lane == 0, tirx.const(0, dtype), other)
                value = T.bind(before[0] + found)
                with emitter.guarded(inside):
                    Place(emitter, dst, point).store(1, lambda _: _as(value, dst.tile.dtype))
                last = T.bind(T.tvm_warp_shuffle(lanes, total[0], LANES - 1, LANES, LANES))
                T.buffer_store(before, before[0] + last, [0])


def _point(wide: list[tuple[int, int]], axis: int, line: Any, at: Any) -> list[Any]:
    """The point of a region's shape, which leaves ones out, at a place of a line."""
    point: list[Any] = []
    for dimension, extent in reversed(wide):
        point.insert(0, at if dimension == axis else line % extent)
        line = line if dimension == axis else line // extent
    return point or [at]


def _as(value: Any, dtype: str) -> Any:
    return value if str(value.ty.dtype) == dtype else T.cast(value, dtype)
