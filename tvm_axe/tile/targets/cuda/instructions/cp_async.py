"""Loads from global to shared memory that run ahead: ``cp.async``, 16, 8 or 4 bytes a thread, zeros where outside.

Source: PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.script import tirx as T

from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.tile.nodes import Copy
from tvm_axe.tile.targets.cuda.fragments.copies import Place, is_vector
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter
from tvm_axe.tile.targets.cuda.fragments.walk import StridedWalk

SIZES = (16, 8, 4)
"""Bytes that a thread takes at once."""


def piece_bytes(analyzer: sym.Analyzer, copy: Copy, layout: Layout | ComposeLayout) -> int | None:
    """How many bytes a thread takes at once; None if the copy can't be made so."""
    src, dst = copy.src.tile, copy.dst.tile
    if src.scope != "global" or dst.scope != "shared" or src.dtype != dst.dtype or copy.atomic:
        return None
    item = int(tvm_ffi.dtype(src.dtype).bits) // 8
    for size in SIZES:
        length = size // item
        sides = ((copy.src, None), (copy.dst, layout))
        if length and all(is_vector(analyzer, region, held, length) for region, held in sides):
            return size
    return None


def start(emitter: Emitter, copy: Copy, size: int) -> None:
    """Start a copy, to be committed to a group; `size` is `piece_bytes`."""
    vector = size // (int(tvm_ffi.dtype(copy.src.tile.dtype).bits) // 8)
    walk = StridedWalk(copy.src.shape, emitter.threads.count, vector)
    thread = emitter.threads.index
    with walk.steps() as steps, emitter.guarded(walk.conditions(thread, steps)):
        index = walk.index(thread, steps)
        src, dst = (Place(emitter, region, index) for region in (copy.src, copy.dst))
        piece(dst.pointer(), src.pointer(), size, src.bounds)


def piece(dst: Any, src: Any, size: int, conditions: Sequence[Any]) -> None:
    """Start what a thread takes at once, of pointers; zeros where a condition doesn't hold."""
    arguments = [dst, src, size]
    if conditions:
        arguments.append(T.cast(tirx.if_then_else(tirx.all(*conditions), size, 0), "uint32"))
    T.evaluate(T.ptx[f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global"](*arguments))


def commit() -> None:
    """End a group of copies."""
    T.evaluate(T.ptx["cp.async.commit_group"]())


def wait(groups: int) -> None:
    """Wait until at most `groups` groups, the last ones, are under way."""
    T.evaluate(T.ptx["cp.async.wait_group"](groups))
