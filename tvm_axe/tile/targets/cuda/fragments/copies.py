"""Copies and fills, between registers and memory by vectors of up to 16 bytes where layouts and alignment prove them.

A fragment's copy goes along the fragment, each thread moving what it holds; a copy in memory goes row-major over all
threads, through a vector of registers. Reads beyond the end of a tensor give zero, writes there are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.script import tirx as T

from tvm_axe.layout import ComposeLayout, Iter, Layout
from tvm_axe.tile.nodes import Copy, Fill
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.strides import are_pieces
from tvm_axe.tile.targets.cuda.fragments.atomics import join
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Memory, Registers, region_constants
from tvm_axe.tile.targets.cuda.fragments.layout import REGISTER
from tvm_axe.tile.targets.cuda.fragments.walk import FragmentWalk, StridedWalk, find_registers, vector_lengths


def copy(emitter: Emitter, node: Copy) -> None:
    """Emit a copy."""
    src, dst = (emitter.storages[region.tile] for region in (node.src, node.dst))
    if isinstance(src, Registers) and isinstance(dst, Registers):
        _between(emitter, node, src, dst)
    elif isinstance(dst, Registers):
        _load(emitter, node, dst)
    elif isinstance(src, Registers):
        _store(emitter, node, src)
    else:
        _move(emitter, node)


def fill(emitter: Emitter, node: Fill) -> None:
    """Emit a fill."""
    region, stored = node.dst, emitter.storages[node.dst.tile]
    value = emitter.expression(node.value)
    if isinstance(stored, Registers):
        walk = FragmentWalk(stored.fragment, region_constants(region), region.extents)
        with walk.steps() as steps, emitter.guarded(walk.conditions(emitter.threads.index, steps)):
            T.buffer_store(stored.buffer, value, [walk.register(steps)])
        return
    vector = _vector(emitter, (region, stored))
    strides = StridedWalk(region.shape, emitter.threads.count, vector)
    with strides.steps() as steps:
        place = Place(emitter, region, strides.index(emitter.threads.index, steps))
        with emitter.guarded([*strides.conditions(emitter.threads.index, steps), *place.bounds]):
            place.store(vector, lambda lane: value)


def _load(emitter: Emitter, node: Copy, dst: Registers) -> None:
    region = node.dst
    vector = _held_vector(emitter, node.src, emitter.memory(node.src.tile), region, dst)
    walk = FragmentWalk(dst.fragment, region_constants(region), region.extents, vector)
    with walk.steps() as steps:
        index = walk.index(emitter.threads.index, steps)
        place = Place(emitter, node.src, [index[d] for d in region.dimensions])
        with emitter.guarded(walk.conditions(emitter.threads.index, steps)):
            place.load(vector, dst.buffer, walk.register(steps))


def _store(emitter: Emitter, node: Copy, src: Registers) -> None:
    region, dtype = node.src, node.dst.tile.dtype
    vector = _held_vector(emitter, node.dst, emitter.memory(node.dst.tile), region, src)
    walk = FragmentWalk(src.fragment, region_constants(region), region.extents, 1 if node.atomic else vector)
    thread = emitter.threads.index
    with walk.steps() as steps:
        index = walk.index(thread, steps)
        place = Place(emitter, node.dst, [index[d] for d in region.dimensions])
        with emitter.guarded([*walk.conditions(thread, steps), *walk.first_copy(thread), *place.bounds]):
            register = walk.register(steps)
            if node.atomic:
                place.join(node.atomic, _cast(src.buffer[register], dtype))
            elif src.buffer.dtype == dtype:
                place.store_from(vector, src.buffer, register)
            else:
                place.store(vector, lambda lane: _cast(src.buffer[register + lane], dtype))


def _move(emitter: Emitter, node: Copy) -> None:
    sides = [(region, emitter.memory(region.tile)) for region in (node.src, node.dst)]
    vector = 1 if node.atomic else min(_vector(emitter, side) for side in sides)
    strides = StridedWalk(node.src.shape, emitter.threads.count, vector)
    thread, (src, dst) = emitter.threads.index, (node.src.tile.dtype, node.dst.tile.dtype)
    with strides.steps() as steps:
        index = strides.index(thread, steps)
        with emitter.guarded(strides.conditions(thread, steps)):
            held = T.alloc_buffer((vector,), src, scope="local")
            Place(emitter, node.src, index).load(vector, held, 0)
            place = Place(emitter, node.dst, index)
            with emitter.guarded(place.bounds):
                if node.atomic:
                    place.join(node.atomic, _cast(held[0], dst))
                elif src == dst:
                    place.store_from(vector, held, 0)
                else:
                    place.store(vector, lambda lane: _cast(held[lane], dst))


def _between(emitter: Emitter, node: Copy, src: Registers, dst: Registers) -> None:
    walk = FragmentWalk(dst.fragment, region_constants(node.dst), node.dst.extents)
    index: list[Any] = region_constants(node.src)
    for own, other in zip(node.src.dimensions, node.dst.dimensions):
        index[own] = index[own] + walk.points[other]
    found = find_registers(walk, src.fragment, index)
    if found is None:
        _exchange(emitter, node)
        return
    base, coefficients = found
    with walk.steps() as steps, emitter.guarded(walk.conditions(emitter.threads.index, steps)):
        register = sum((step * c for step, c in zip(steps, coefficients) if c), tirx.const(base, "int32"))
        T.buffer_store(dst.buffer, _cast(src.buffer[register], node.dst.tile.dtype), [walk.register(steps)])


def _exchange(emitter: Emitter, node: Copy) -> None:
    """Through shared memory, where threads need what others hold."""
    emitter, between = row_major(emitter, node.src, node.dst.tile.dtype)
    emitter.threads.sync()
    copy(emitter, Copy(between, node.src, None))
    emitter.threads.sync()
    copy(emitter, Copy(node.dst, between, None))


def row_major(emitter: Emitter, region: Region, dtype: str | None = None) -> tuple[Emitter, Region]:
    """A place for a region's elements in scratch memory, row-major, and an emitter that knows it."""
    tile = Tile(region.tile.buffer, "shared", region.extents, dtype or region.tile.dtype)
    size = math.prod(tile.shape)
    stored = Memory(emitter.scratch(tile.dtype, size), Layout([Iter(size, 1, REGISTER)]))
    zero = tirx.const(0, "int32")
    return emitter.with_tile(tile, stored), Region(tile, (zero,) * len(tile.shape), tile.shape)


class Place:
    """Neighbouring elements of a tensor or a shared tile, at a point of a region.

    `bounds` are the conditions under which it is inside the tensor; those that are proved are left out.
    """

    def __init__(self, emitter: Emitter, region: Region, point: Sequence[Any]) -> None:
        self.tile, self.stored = region.tile, emitter.memory(region.tile)
        self.index = [emitter.expression(start) for start in region.start]
        for dimension, step in zip(region.dimensions, point):
            self.index[dimension] = self.index[dimension] + step
        outside = region.overruns(emitter.analyzer) if region.tile.scope == "global" else ()
        self.bounds = [self.index[d] < region.tile.shape[d] for d in outside]

    def _address(self, lane: Any, length: int = 1) -> list[Any]:
        address = self.stored.address(self.index, self.tile.shape, length)
        return [*address[:-1], address[-1] + lane]

    def pointer(self) -> Any:
        """The address of the first element."""
        return self.stored.buffer.ptr_to(self._address(0))

    def value(self) -> Any:
        """The first element, where it is inside."""
        return self.stored.buffer[tuple(self._address(0))]

    def load(self, vector: int, buffer: tirx.Buffer, base: Any) -> None:
        """Load `vector` elements into ``buffer[base ...]``, zeros where they are outside."""
        if str(buffer.dtype) != self.tile.dtype:
            held = T.alloc_buffer((vector,), self.tile.dtype, scope="local")
            self.load(vector, held, 0)
            with T.unroll(vector) as lane:
                T.buffer_store(buffer, _cast(held[lane], str(buffer.dtype)), [base + lane])
            return
        zero = tirx.const(0, self.tile.dtype)
        if vector == 1:
            value = self.value()
            if self.bounds:
                value = tirx.if_then_else(tirx.all(*self.bounds), value, zero)
            T.buffer_store(buffer, value, [base])
            return
        if not self.bounds:
            self._load_vector(vector, buffer, base)
            return
        with T.If(tirx.all(*self.bounds)):
            with T.Then():
                self._load_vector(vector, buffer, base)
            with T.Else(), T.unroll(vector) as lane:  # upstream has no vector of 16 equal bytes
                T.buffer_store(buffer, zero, [base + lane])

    def _load_vector(self, vector: int, buffer: tirx.Buffer, base: Any) -> None:
        with T.vectorized(vector) as lane:
            T.buffer_store(buffer, self.stored.buffer[tuple(self._address(lane, vector))], [base + lane])

    def store_from(self, vector: int, buffer: tirx.Buffer, base: Any) -> None:
        """Store ``buffer[base ...]``, of the tile's type."""
        with T.vectorized(vector) as lane:
            T.buffer_store(self.stored.buffer, buffer[base + lane], self._address(lane, vector))

    def store(self, vector: int, value: Any) -> None:
        """Store ``value(lane)`` for every lane, of the tile's type."""
        if vector == 1:
            T.buffer_store(self.stored.buffer, value(0), self._address(0))
            return
        held = T.alloc_buffer((vector,), self.tile.dtype, scope="local")
        with T.unroll(vector) as lane:
            T.buffer_store(held, value(lane), [lane])
        self.store_from(vector, held, 0)

    def join(self, kind: str, value: Any) -> None:
        """Join a value with one element atomically."""
        join(kind, self.tile, self.pointer(), value)


def _cast(value: Any, dtype: str) -> Any:
    return value if str(value.ty.dtype) == dtype else T.cast(value, dtype)


def _held_vector(emitter: Emitter, region: Region, stored: Memory, own: Region, held: Registers) -> int:
    """How many registers one access of `region` may fill: neighbours in the fragment and in memory."""
    digits = held.fragment.register_digits
    if not digits:
        return 1
    lane, last = digits[-1], own.dimensions[-1]
    if (lane.stride, lane.weight, lane.dimension) != (1, 1, last):
        return 1
    start, extent = region_constants(own)[last], own.extents[last]
    return next(
        v
        for v in vector_lengths(tvm_ffi.dtype(region.tile.dtype).bits)
        if v == 1
        or (not (lane.extent % v or start % v or extent % v) and is_vector(emitter.analyzer, region, stored.layout, v))
    )


def _vector(emitter: Emitter, side: tuple[Region, Memory]) -> int:
    region, stored = side
    lengths = vector_lengths(tvm_ffi.dtype(region.tile.dtype).bits)
    return next(v for v in lengths if v == 1 or is_vector(emitter.analyzer, region, stored.layout, v))


def is_vector(analyzer: sym.Analyzer, region: Region, layout: Layout | ComposeLayout | None, length: int) -> bool:
    """Whether each aligned `length` elements of a region's last dimension are one aligned piece of memory."""
    last = len(region.extents) - 1
    shape = region.tile.shape
    if region.dimensions[-1] != last or region.extents[last] % length:
        return False
    if not analyzer.can_prove(region.start[last] % length == 0):
        return False
    if layout is None:
        # A vector is inside of the tensor where its first element is.
        ends = last not in region.overruns(analyzer) or analyzer.can_prove(shape[last] % length == 0)
        return are_pieces(region.tile, length, analyzer) and bool(ends)
    return keeps_together(layout, shape, length)


def keeps_together(layout: Layout | ComposeLayout, shape: Sequence[int], length: int) -> bool:
    """Whether a layout puts each aligned `length` elements of the last dimension at neighbouring aligned addresses."""
    plain = layout.tile_layout if isinstance(layout, ComposeLayout) else layout
    if isinstance(layout, ComposeLayout) and 2**layout.per_element % length:
        return False
    grouped, seps = plain.group(shape)
    if seps[-2] == seps[-1]:
        return length == 1
    *outer, inner = grouped.D
    others = [int(it.stride) for it in outer if it.extent != 1] + [int(plain.O[REGISTER])]
    return inner.stride == 1 and inner.extent % length == 0 and all(stride % length == 0 for stride in others)
