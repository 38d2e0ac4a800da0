"""Sort: the first elements of each line, by keys in which an element and its place are one integer.

A few results are searched one after the other, each as a reduction to the largest key that is less than the one before;
every thread that holds a part of a line then has its results. More are the first keys of a line that a network sorts in
shared memory, a pair of keys a thread in each of its stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.tile import keys
from tvm_axe.tile.nodes import Copy, Reduce, Sort
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.targets.cuda.fragments.copies import Place, copy
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Registers, region_constants
from tvm_axe.tile.targets.cuda.fragments.infer import ordered_layout
from tvm_axe.tile.targets.cuda.fragments.layout import FragmentLayout, linear, projected
from tvm_axe.tile.targets.cuda.fragments.reductions import Reduction, accumulation_type, in_registers, loaded
from tvm_axe.tile.targets.cuda.fragments.walk import FragmentWalk, StridedWalk


def sort(emitter: Emitter, node: Sort) -> None:
    """Emit it."""
    emitter, src = loaded(emitter, node, node.src)
    if keys.by_passes(node):
        _by_passes(emitter, node, src)
    else:
        _by_network(emitter, node, src)


def _key(node: Sort, held: Registers, register: Any, place: Any) -> tirx.Expr:
    value = held.buffer[register]
    dtype = accumulation_type(str(held.buffer.dtype))
    return keys.key(node, value if str(held.buffer.dtype) == dtype else T.cast(value, dtype), place)


def _result(node: Sort, region: Region, found: Any) -> tirx.Expr:
    """What a key says for one of the results."""
    if region is not node.values:
        return keys.place(found)
    value = keys.element(node, found, accumulation_type(region.tile.dtype))
    return value if str(value.ty.dtype) == region.tile.dtype else T.cast(value, region.tile.dtype)


# ---- One after the other ---------------------------------------------------------------------------------------------


def _by_passes(emitter: Emitter, node: Sort, src: Region) -> None:
    held, shape = emitter.registers(src.tile), src.extents
    kept = [d for d in range(len(shape)) if d != node.axis]
    lines = tuple(shape[d] for d in kept) or (1,)
    best = Tile(src.tile.buffer, "fragment", lines, keys.KEY)
    padded = held.fragment.shape
    rows = tuple(padded[d] for d in kept)
    layout = FragmentLayout(projected(held.fragment.layout, padded, kept), rows or (1,), emitter.threads.count)
    zeros = (tirx.const(0, "int32"),) * len(lines)
    reduce = Reduce("max", Region(best, zeros, lines), src, node.axis, False)
    whole = (*(shape[d] for d in kept), node.count) if node.keeps_axis else lines
    places = (*rows, node.count) if node.keeps_axis else rows or (1,)
    own = ordered_layout(node, held.fragment.layout, padded), places
    results = []
    for region in node.results:
        known, moved = in_registers(emitter, region, own, whole)
        results.append((region, known, moved))
    before = None
    for number in range(node.count):
        found = Registers(T.alloc_buffer((layout.registers,), keys.KEY, scope="local"), layout, f"{node}")
        _Pass(emitter, reduce, held, found, node, before).emit()
        for region, known, moved in results:
            with T.unroll(layout.registers) as register:
                value = _result(node, region, found.buffer[register])
                T.buffer_store(known.registers(moved.tile).buffer, value, [register * node.count + number])
        before = found
    for region, known, moved in results:
        copy(known, Copy(region, moved, None))


class _Pass(Reduction):
    """A reduction to the largest key of a line, or the largest that is less than the one in `before`."""

    def __init__(
        self, emitter: Emitter, reduce: Reduce, src: Registers, dst: Registers, node: Sort, before: Registers | None
    ) -> None:
        super().__init__(emitter, reduce, src, dst)
        self.sort, self.before = node, before
        self.dtype = keys.KEY  # what `taken` makes of the source's elements

    def taken(self, steps: Sequence[tirx.Expr], register: Any) -> tirx.Expr:
        place = self.walk.index(self.emitter.threads.index, steps)[self.axis]
        found = _key(self.sort, self.src, self.walk.register(steps), place)
        if self.before is None:
            return found
        found = T.bind(found)
        return tirx.Select(found < self.before.buffer[register], found, keys.least())


# ---- By a network ----------------------------------------------------------------------------------------------------


def _by_network(emitter: Emitter, node: Sort, src: Region) -> None:
    held, threads = emitter.registers(src.tile), emitter.threads
    lines, length = math.prod(src.extents[:-1]), node.length
    scratch = emitter.scratch(keys.KEY, lines * length)
    walk = FragmentWalk(held.fragment, (0,) * len(src.extents), src.extents)
    threads.sync()
    thread = threads.index
    with walk.steps() as steps, emitter.guarded([*walk.conditions(thread, steps), *walk.first_copy(thread)]):
        index = walk.index(thread, steps)
        found = _key(node, held, walk.register(steps), index[-1])
        T.buffer_store(scratch, found, [linear(index, src.extents)])
    threads.sync()
    count = keys.pairs(length)
    for half, mirrored in keys.stages(length):
        with T.serial(-(-lines * count // threads.count)) as turn:
            number = T.bind(turn * threads.count + threads.index)
            front, back = keys.pair(number % count, half, mirrored)
            inside = [back < length] if count * 2 > length else []
            inside += [number < lines * count] if lines * count % threads.count else []
            with emitter.guarded(inside):
                line = number // count * length
                a, b = T.bind(scratch[line + front]), T.bind(scratch[line + back])
                with T.If(a < b), T.Then():
                    T.buffer_store(scratch, b, [line + front])
                    T.buffer_store(scratch, a, [line + back])
        threads.sync()
    for region in node.results:
        _give(emitter, node, region, scratch)


def _give(emitter: Emitter, node: Sort, region: Region, scratch: tirx.Buffer) -> None:
    """Each thread decodes the keys of the elements that it holds, or some of those in memory."""
    thread, stored = emitter.threads.index, emitter.storages[region.tile]

    def found(index: Sequence[Any]) -> tirx.Expr:
        line = linear(index[:-1], region.extents[:-1])
        return _result(node, region, scratch[line * node.length + index[-1]])

    if isinstance(stored, Registers):
        walk = FragmentWalk(stored.fragment, region_constants(region), region.extents)
        with walk.steps() as steps, emitter.guarded(walk.conditions(thread, steps)):
            T.buffer_store(stored.buffer, found(walk.index(thread, steps)), [walk.register(steps)])
        return
    strides = StridedWalk(region.extents, emitter.threads.count)
    with strides.steps() as steps, emitter.guarded(strides.conditions(thread, steps)):
        index = strides.index(thread, steps)
        Place(emitter, region, [index[d] for d in region.dimensions]).store(1, lambda lane: found(index))
