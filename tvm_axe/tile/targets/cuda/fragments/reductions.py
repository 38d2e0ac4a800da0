"""Reduce: first over a thread's registers, then by shuffles over the lanes of its warp, then over warps.

The result has the source's layout without the reduced axis: its steps over threads become replicas, so that every
thread that held a part of a row holds the row's result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.errors import TileError
from tvm_axe.layout import Layout
from tvm_axe.tile.nodes import Copy, Node, Reduce
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.targets.cuda.fragments.copies import copy
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Memory, Registers
from tvm_axe.tile.targets.cuda.fragments.infer import reduced_layout
from tvm_axe.tile.targets.cuda.fragments.layout import Digit, FragmentLayout, linear, projected
from tvm_axe.tile.targets.cuda.fragments.walk import FragmentWalk, covers, find_registers

LANES = 32
_ALL_LANES = 0xFFFFFFFF
_SIXTEEN_BITS = ("float16", "bfloat16")


def accumulation_type(dtype: str) -> str:
    """In what elements of `dtype` are added or compared."""
    return "float32" if dtype in _SIXTEEN_BITS or dtype.startswith("float8") else dtype


def over_warps(fragment: FragmentLayout, axis: int) -> list[Digit]:
    """The steps along `axis` from warp to warp."""
    across = [digit for digit in fragment.thread_digits if digit.dimension == axis]
    outer = [digit.split(_lanes(digit))[0] for digit in across]
    return [digit for digit in outer if digit.extent > 1]


def _lanes(digit: Digit) -> int:
    """How many steps of a digit stay within a warp."""
    return min(digit.extent, max(1, LANES // digit.stride))


def reduce(emitter: Emitter, node: Reduce) -> None:
    """Emit a reduction; what is in memory, a part of a fragment, or held by other threads, goes through registers."""
    emitter, own = loaded(emitter, node, node.src)
    target, node = node.dst, replace(node, src=own)
    src, kept = emitter.registers(node.src.tile), [d for d in range(len(node.src.extents)) if d != node.axis]
    if not (target.whole and _holds_rows(emitter.storages[target.tile], src.fragment, node)):
        padded = src.fragment.shape
        layout = projected(src.fragment.layout, padded, kept), tuple(padded[d] for d in kept) or (1,)
        emitter, held = in_registers(emitter, target, layout, tuple(node.src.extents[d] for d in kept) or (1,))
        if node.accumulate:
            copy(emitter, Copy(held, target, None))
        node = replace(node, dst=held)
    src, dst = (emitter.registers(region.tile) for region in (node.src, node.dst))
    Reduction(emitter, node, src, dst).emit()
    if node.dst is not target:
        copy(emitter, Copy(target, node.dst, None))


def _rows_held(src: FragmentLayout, node: Reduce, dst: FragmentLayout) -> tuple[int, list[int]] | None:
    """Where, at each step of a walk over the source, the result of its row is in `dst`; None if threads lack it.

    Threads that hold nothing of a row but what it is padded with have its result, too.
    """
    box = (*node.src.extents[: node.axis], src.shape[node.axis], *node.src.extents[node.axis + 1 :])
    walk = FragmentWalk(src, (0,) * len(box), box)
    kept = [d for d in range(len(walk.extents)) if d != node.axis]
    points, extents = [walk.points[d] for d in kept], [walk.extents[d] for d in kept]
    position = linear(points, extents) if points else np.zeros_like(walk.inside, dtype=np.int64)
    index = list(np.unravel_index(np.where(walk.inside, position, 0), node.dst.extents))
    found = find_registers(walk, dst, index)
    return found if found is not None and covers(walk, dst, index) else None


def _holds_rows(dst: Registers | Memory, src: FragmentLayout, node: Reduce) -> bool:
    """Whether each thread that holds a part of a row holds the row's result, and no other thread does."""
    if isinstance(dst, Memory):
        return False
    return _rows_held(src, node, dst.fragment) is not None


def loaded(emitter: Emitter, node: Node, src: Region) -> tuple[Emitter, Region]:
    """What is in memory, or a part of a fragment, in registers, and an emitter that knows them; a fragment stays."""
    if isinstance(emitter.storages[src.tile], Registers) and src.whole:
        return emitter, src
    layout = reduced_layout(src, {}, emitter.threads.count)
    assert layout is not None
    emitter, held = in_registers(emitter, src, layout, src.extents)
    copy(emitter, Copy(held, src, None))
    return emitter, held


def in_registers(
    emitter: Emitter, region: Region, layout: tuple[Layout, tuple[int, ...]], shape: tuple[int, ...]
) -> tuple[Emitter, Region]:
    """Registers for a region's elements, and an emitter that knows them; `layout` is with the extents it places."""
    tile = Tile(region.tile.buffer, "fragment", shape, region.tile.dtype)
    fragment = FragmentLayout(*layout, emitter.threads.count)
    buffer = T.alloc_buffer((fragment.registers,), tile.dtype, scope="local")
    zero = tirx.const(0, "int32")
    stored = Registers(buffer, fragment, f"{region}, loaded")
    return emitter.with_tile(tile, stored), Region(tile, (zero,) * len(shape), shape)


class Reduction:
    """The code of one reduction: over a thread's registers, then lanes (PTX ISA, "shfl.sync"), then warps.

    What is reduced is `taken` of the source.
    """

    def __init__(self, emitter: Emitter, node: Reduce, src: Registers, dst: Registers) -> None:
        self.emitter, self.node, self.src, self.dst = emitter, node, src, dst
        self.axis, shape = node.axis, node.src.extents
        self.walk = FragmentWalk(src.fragment, (0,) * len(shape), shape)
        self.dtype, self.kept_as = (accumulation_type(each) for each in (node.dtype, str(dst.buffer.dtype)))
        self.across = [digit for digit in src.fragment.thread_digits if digit.dimension == self.axis]
        first = _rows_held(src.fragment, node, dst.fragment)
        assert first is not None, (str(node), src.fragment, dst.fragment)
        self.first = first

    def emit(self) -> None:
        """Emit all of it."""
        held = T.alloc_buffer((self.dst.fragment.registers,), self.dtype, scope="local")
        self._over_registers(held)
        for digit in self.across:
            lanes = _lanes(digit)
            if digit.stride < LANES and (lanes & (lanes - 1) or digit.stride & (digit.stride - 1)):
                raise TileError(
                    f"{self.node}: the reduced axis is spread over {digit.extent} threads {digit.stride} apart; valid "
                    "are powers of two, which shuffles reduce"
                )
            self._over_lanes(held, digit.split(lanes)[1])
        warps = over_warps(self.src.fragment, self.axis)
        if warps:
            self._over_warps(held, warps)
        with T.unroll(self.dst.fragment.registers) as register:
            value = T.cast(held[register], self.kept_as)
            if self.node.accumulate:
                value = self._combine(T.cast(self.dst.buffer[register], self.kept_as), value)
            T.buffer_store(self.dst.buffer, T.cast(value, self.dst.buffer.dtype), [register])

    def _combine(self, a: Any, b: Any) -> Any:
        if self.node.reducer is None:
            return self.node.combined(a, b)
        # A function may name its values many times, and 32 parts are combined five deep.
        return self.emitter.expression(self.node.combined(T.bind(a), T.bind(b)))

    def _over_registers(self, held: tirx.Buffer) -> None:
        neutral = self.node.identity(self.dtype)
        with T.unroll(self.dst.fragment.registers) as register:
            T.buffer_store(held, neutral, [register])
        base, coefficients = self.first
        with self.walk.steps() as steps, self.emitter.guarded(self.walk.conditions(self.emitter.threads.index, steps)):
            register = sum((step * c for step, c in zip(steps, coefficients) if c), tirx.const(base, "int32"))
            T.buffer_store(held, self._combine(held[register], self.taken(steps, register)), [register])

    def taken(self, steps: Sequence[tirx.Expr], register: Any) -> tirx.Expr:
        """What of the source is reduced at a step of the walk, into a register of the result."""
        return T.cast(self.src.buffer[self.walk.register(steps)], self.dtype)

    def _over_lanes(self, held: tirx.Buffer, digit: Digit) -> None:
        apart = digit.extent // 2
        while apart:
            with T.unroll(self.dst.fragment.registers) as register:
                other = T.tvm_warp_shuffle_xor(
                    tirx.const(_ALL_LANES, "uint32"), held[register], apart * digit.stride, LANES, LANES
                )
                T.buffer_store(held, self._combine(held[register], other), [register])
            apart //= 2

    def _over_warps(self, held: tirx.Buffer, warps: Sequence[Digit]) -> None:
        """Each warp leaves its part of every row in shared memory, one after the other, and combines all.

        Where the lanes of a warp have the same rows, each lane reads a part; else each thread reads all, and combines
        two and two, so that of 32 parts the last waits for five combinations and not for 31.
        """
        threads, parts = self.emitter.threads, math.prod(digit.extent for digit in warps)
        rows = math.prod(self.dst.fragment.shape)
        scratch = self.emitter.scratch(self.dtype, parts * rows)
        part: Any = 0
        for digit in warps:
            part = part * digit.extent + threads.index // digit.stride % digit.extent
        ours = _Rows(self.dst.fragment)
        copy = self._first_copy(threads.index)
        threads.sync()
        with T.unroll(self.dst.fragment.registers) as register, self.emitter.guarded(copy):
            T.buffer_store(scratch, held[register], [part * rows + ours.row(threads.index, register)])
        threads.sync()
        alike = math.prod(_lanes(digit) for digit in self.across if digit.stride < LANES) == LANES
        by_lanes = alike and parts <= LANES and parts & (parts - 1) == 0
        with T.unroll(self.dst.fragment.registers) as register:
            row = ours.row(threads.index, register)
            each = [threads.index % parts] if by_lanes else list[Any](range(parts))
            found = [scratch[at * rows + row] for at in each]
            while len(found) > 1:
                pairs = [self._combine(a, b) for a, b in zip(found[::2], found[1::2])]
                found = pairs + found[2 * len(pairs) :]
            T.buffer_store(held, found[0], [register])
        if by_lanes:
            self._over_lanes(held, Digit(parts, 1, self.axis, 1))

    def _first_copy(self, thread: tirx.Expr) -> list[tirx.Expr]:
        """Whether a thread is the first of those in whose warps' part of a row the same is."""
        inner = [(digit.stride, _lanes(digit)) for digit in self.across]
        copies = inner + [(it.stride, it.extent) for it in self.src.fragment.replicas]
        return [thread // stride % extent == 0 for stride, extent in copies if extent != 1]


class _Rows:
    """The row-major position of the element in a thread's register."""

    def __init__(self, fragment: FragmentLayout) -> None:
        self.fragment = fragment

    def row(self, thread: tirx.Expr, register: Any) -> Any:
        index = self.fragment.start(thread)
        for digit in self.fragment.register_digits:
            index[digit.dimension] = index[digit.dimension] + register // digit.stride % digit.extent * digit.weight
        return linear(index, self.fragment.shape)
