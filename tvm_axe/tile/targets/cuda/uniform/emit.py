"""Code of the uniform model: a block's threads do one node after the other.

Hazards stand where `uniform.hazards` says. Of a loop whose loads run ahead the slots are filled ``stages - 1``
iterations before they are needed; an iteration waits for its own, with one barrier, behind which the slot of the
iteration before is free and is filled anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
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
    Print,
    Reduce,
    Scan,
    Signal,
    Sort,
    Wait,
)
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda import sampling
from tvm_axe.tile.targets.cuda.fragments.emit import emit
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Memory, Registers, Threads, tensors
from tvm_axe.tile.targets.cuda.fragments.layout import FragmentLayout
from tvm_axe.tile.targets.cuda.instructions import cp_async, flags, fma, mma
from tvm_axe.tile.targets.cuda.residency import launch_bounds
from tvm_axe.tile.targets.cuda.uniform.gathers import gather_of
from tvm_axe.tile.targets.cuda.uniform.hazards import Hazards, Touched
from tvm_axe.tile.targets.cuda.uniform.memory import ALIGNMENT, Pipeline
from tvm_axe.tile.targets.cuda.uniform.plan import UniformPlan
from tvm_axe.tile.targets.cuda.uniform.products import Products
from tvm_axe.tile.walking import substitute, substitute_in, walk

Values = dict[tirx.Var, Any]
"""What the program's variables are where code is written."""


class Places:
    """What gives out a block's shared memory, in pieces of one pool, and its threads' registers."""

    def __init__(self) -> None:
        self._pool: Any = None

    def shared(self, size: int, dtype: str, align: int = ALIGNMENT) -> tirx.Buffer:
        """So many elements for all threads, aligned to so many bytes."""
        self._pool = self._pool or T.SMEMPool()
        return self._pool.alloc((size,), dtype, align=align)

    def registers(self, size: int, dtype: str) -> tirx.Buffer:
        """So many elements of each thread."""
        return T.alloc_buffer((size,), dtype, scope="local")

    def close(self) -> None:
        """All shared memory has been given out."""
        if self._pool is not None:
            self._pool.commit()


def lower(plan: UniformPlan, places: type[Places] = Places) -> tirx.PrimFunc:
    """The function that upstream's ``tirx`` pipeline compiles, with all tiles where `places` has room for them."""
    with _tvm.builder() as builder:
        with _tvm.function_frame():
            T.func_name(plan.program.name)
            T.device_entry()
            with launch_bounds(plan.residency):
                _Block(plan, places()).emit()
        body = builder.get().body
    func = plan.program.func
    made = tirx.PrimFunc(sampling.parameters(func, plan.samples), body, func.ret_type)
    return made.with_attrs({"global_symbol": plan.program.name})


class _Block:
    """A block's code as it is written: `touched` is what its threads have touched since the last barrier."""

    def __init__(self, plan: UniformPlan, places: Places) -> None:
        self.plan, self.memory = plan, plan.memory
        self.block, self.thread = T.cta_id([plan.grid.blocks]), T.thread_id([plan.threads])
        storages: dict[Tile, Registers | Memory] = {**tensors(plan.program)}
        for tile, layout in self.memory.layouts.items():
            size = self.memory.slots(tile) * self.memory.slot_elements(tile)
            storages[tile] = Memory(places.shared(size, tile.dtype, self.memory.alignment(tile)), layout)
        self.products = Products(plan, storages)
        for tile, held in plan.fragments.items():
            fragment = FragmentLayout(held.layout, held.shape, plan.threads)
            own = self.products.registers(tile, fragment.registers)
            own = places.registers(fragment.registers, tile.dtype) if own is None else own
            storages[tile] = Registers(own, fragment, held.origin)
        scratch = self.memory.scratch
        self.exchange = places.shared(scratch, "uint8") if scratch else None
        places.close()
        plan.await_previous()
        warp, lane = self.thread // 32, self.thread % 32
        self.waits = sampling.waits_of(plan.samples, self.block, warp, lane == 0)
        self.analyzer = plan.program.analyzer()
        self.emitter = Emitter(Threads(plan.threads, self.thread, self._sync), storages, self.analyzer, self._scratch)
        self.hazards = Hazards({tile.buffer: tile for tile in storages}, self.memory.pipelines)
        self.touched = Touched()

    def _scratch(self, dtype: str, size: int) -> Any:
        assert self.exchange is not None
        bits = int(tvm_ffi.dtype(dtype).bits)
        assert size * bits <= self.memory.scratch * 8, (dtype, size)
        offset = self.exchange.elem_offset * 8 // bits
        return T.decl_buffer((size,), dtype, data=self.exchange.data, elem_offset=offset, scope=self.exchange.scope())

    def emit(self) -> None:
        """Emit the block's point of the grid, or one after the other of its points."""
        grid = self.plan.grid
        if not grid.persistent:
            self._point(self.block)
            self.waits.end()
            return
        blocks = grid.blocks
        entry = self.hazards.settled(self.plan.program.body, self.touched)
        with T.serial(0, grid.turns(self.block)) as turn:
            self.touched = entry
            self._point(T.bind(self.block + turn * blocks))
        self.waits.end()

    def _point(self, index: Any) -> None:
        grid, values = self.plan.grid, dict[tirx.Var, Any]()
        for (var, extent), value in zip(grid.dimensions, grid.point(index).values()):
            values[var] = T.bind(value)
            self.analyzer.bind(values[var], ir.Range.from_min_extent(0, extent))
        self._body(self.plan.program.body, values, self.emitter)

    def _nodes(self, nodes: Sequence[Node], values: Values, emitter: Emitter) -> Values:
        """What nodes do, in order; returns the values with those of names among them."""
        for node in nodes:
            values = values | (_NODES.of(node)(self, node, values, emitter) or {})
        return values

    def _body(self, nodes: Sequence[Node], values: Values, emitter: Emitter) -> None:
        """What a body does, behind which no product is under way."""
        self._nodes(nodes, values, emitter)
        self._settle()

    def _leaf(self, node: Node, values: Values, emitter: Emitter) -> Values:
        reads = self.hazards.reads(node)
        self._settle_before(reads, node.writes)
        self._separate(reads, node.writes)
        (changed,) = substitute((node,), values)
        named = emit(emitter, changed)
        self.touched = self.touched.after(reads, node.writes)
        return named

    def _gemm(self, node: Gemm, values: Values, emitter: Emitter) -> None:
        reads = self.hazards.reads(node)
        if not self.products.has(node):
            self._settle_before(reads, node.writes)
        self._separate(reads, node.writes)
        (changed,) = substitute((node,), values)
        assert isinstance(changed, Gemm), changed
        warps = self.plan.products.get(node)
        if warps is None:
            fma.emit(emitter, changed)
        elif isinstance(warps, mma.Warps):
            mma.emit(emitter, changed, warps)
        else:
            self.products.start(node, changed, emitter)
        self.touched = self.touched.after(reads, node.writes)

    def _flags(self, node: Wait | Signal, values: Values, emitter: Emitter) -> None:
        """A thread a flag, or several. A signal comes behind what the block touched, a wait before what it will."""
        region = node.flags
        self._scalars(node)
        value, *start = (emitter.expression(substitute_in(v, values)) for v in (node.value, *region.start))
        if isinstance(node, Signal) and node.ordered and self.touched != Touched():
            self._sync()
        self.touched = self.touched.behind(node)
        with self.waits.around(str(node)) if isinstance(node, Wait) else contextlib.nullcontext():
            self._each_flag(node, value, start)
        if isinstance(node, Wait):
            self._sync()

    def _each_flag(self, node: Wait | Signal, value: Any, start: list[Any]) -> None:
        region = node.flags
        for first in range(0, flags.count(region), self.plan.threads):
            number = self.thread + first
            with T.If(number < flags.count(region)), T.Then():
                index = flags.at(region.extents, start, number)
                if isinstance(node, Signal):
                    flags.signal(node, index, value)
                else:
                    flags.wait(node, index, value)

    def _branch(self, node: Branch, values: Values, emitter: Emitter) -> None:
        self._scalars(node)
        self._settle()
        condition = emitter.expression(substitute_in(node.condition, values))
        before = self.touched
        with T.If(condition):
            with T.Then():
                self._body(node.then, values, emitter)
            after = self.touched
            self.touched = before
            if node.otherwise:
                with T.Else():
                    self._body(node.otherwise, values, emitter)
        self.touched = self.touched.also(after)

    def _loop(self, loop: Loop, values: Values, emitter: Emitter) -> None:
        self._scalars(loop)
        self._settle()
        start, extent = (self._once(substitute_in(v, values), emitter) for v in (loop.start, loop.extent))
        if loop in self.memory.pipelines:
            self._pipelined(loop, values, emitter, start, extent, self.memory.pipelines[loop])
            return
        self.touched = entry = self.hazards.settled(loop.body, self.touched)
        if loop.until is not None and loop.is_endless:
            with T.While(tirx.Not(emitter.expression(substitute_in(loop.until, values)))):
                self._body(loop.body, values, emitter)
            self.touched = entry
            return
        with T.serial(start, start + extent) as step:
            self.analyzer.bind(step, ir.Range.from_min_extent(start, extent))
            self._body(loop.body, values | {loop.var: step}, emitter)
            if loop.until is not None:
                with T.If(emitter.expression(substitute_in(loop.until, values))), T.Then():
                    T.evaluate(tirx.break_loop())
        self.touched = entry

    def _once(self, value: Any, emitter: Emitter) -> Any:
        """A loop's bound or where a load begins, which what is written from here on doesn't change."""
        loads = self.hazards.loaded(value)
        return T.bind(emitter.expression(value)) if loads else emitter.expression(value)

    def _pipelined(
        self, loop: Loop, values: Values, emitter: Emitter, start: Any, extent: Any, pipeline: Pipeline
    ) -> None:
        stages = pipeline.stages
        self._separate(*self.hazards.ahead(pipeline))
        entry = self.touched
        for first in range(stages - 1):
            with emitter.guarded([] if _surely(self.analyzer, first < extent) else [first < extent]):
                self._start(pipeline, values | {loop.var: start + first}, emitter, first)
            cp_async.commit()
        rest = tuple(node for node in loop.body if node not in pipeline.copies)
        first = self.products.leading(rest)

        def start_later(turn: Any) -> None:
            later = T.bind(turn + (stages - 1))
            self.analyzer.bind(later, ir.Range.from_min_extent(0, extent))  # where it is used
            with emitter.guarded([later < extent]):
                self._start(pipeline, values | {loop.var: start + later}, emitter, later % stages)
            cp_async.commit()

        with T.serial(0, extent) as turn:
            self.analyzer.bind(turn, ir.Range.from_min_extent(0, extent))
            with self.waits.around(f"loads of loop {loop.var.name}"):
                cp_async.wait(stages - 2)
            if any(map(self.products.has, walk(loop.body))):
                self._await_products()  # those of the iteration before, which read the slot that is filled next
            self._sync()
            self.touched = Touched()
            if not first:
                start_later(turn)
            inner, step = self._in_slot(pipeline, emitter, turn % stages), T.bind(start + turn)
            self.analyzer.bind(step, ir.Range.from_min_extent(start, extent))
            named = self._nodes(rest[:first], values | {loop.var: step}, inner)
            if first:
                start_later(turn)  # while products are under way
            self._nodes(rest[first:], named, inner)
        self.touched = self.touched.also(entry)

    def _start(self, pipeline: Pipeline, values: Values, emitter: Emitter, slot: Any) -> None:
        inner = self._in_slot(pipeline, emitter, slot)
        for load, size in pipeline.copies.items():
            (changed,) = substitute((pipeline.ahead[load],), values)
            if isinstance(changed, Parallel):
                gather = gather_of(changed)
                assert gather is not None, changed
                gather.start(inner, size)
                continue
            assert isinstance(changed, Copy), changed
            # Where data say from where, they are loaded once, and not for each piece of the copy.
            place = tuple(
                self._once(start, emitter) if self.hazards.loaded(start) else start for start in changed.src.start
            )
            cp_async.start(inner, replace(changed, src=replace(changed.src, start=place)), size)

    def _in_slot(self, pipeline: Pipeline, emitter: Emitter, slot: Any) -> Emitter:
        """An emitter for which the tiles that run ahead are in a slot."""
        for load in pipeline.copies:
            (tile,) = load.writes
            stored = self.emitter.memory(tile)
            place = Memory(stored.buffer, stored.layout, slot * self.memory.slot_elements(tile))
            emitter = emitter.with_tile(tile, place)
        return emitter

    def _sync(self) -> None:
        self._settle()
        self.products.publish()
        with self.waits.around("the other warps"):
            T.evaluate(T.cuda.cta_sync())

    # ---- Products of warpgroups ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for all products, if any is under way."""
        if self.products.under_way:
            self._await_products()

    def _settle_before(self, reads: Iterable[Tile], writes: Iterable[Tile]) -> None:
        """Wait for all products, if what is read or written next is of one that is under way."""
        if not self.products.under_way.isdisjoint((*reads, *writes)):
            self._await_products()

    def _await_products(self) -> None:
        """Wait for all products, those of an iteration before, too."""
        with self.waits.around("products"):
            T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
        self.products.under_way = frozenset()

    # ---- Hazards ------------------------------------------------------------------------------------------------

    def _separate(self, reads: Iterable[Tile], writes: Iterable[Tile]) -> None:
        """A barrier, if what is to be touched needs one."""
        if self.touched.forbids(reads, writes):
            self._sync()
            self.touched = Touched()

    def _scalars(self, node: Node) -> None:
        """A barrier, if what a node's scalars load needs one."""
        loaded = self.hazards.loaded(*node.scalars)
        self._separate(loaded, ())
        self.touched = self.touched.after(loaded, ())


_NODES: TypeTable[Callable[[_Block, Any, Values, Emitter], Values | None]] = TypeTable(
    "code of the uniform model",
    {
        Assign: _Block._leaf,
        Branch: _Block._branch,
        Copy: _Block._leaf,
        Fill: _Block._leaf,
        Gemm: _Block._gemm,
        Let: _Block._leaf,
        Loop: _Block._loop,
        Parallel: _Block._leaf,
        Print: _Block._leaf,
        Reduce: _Block._leaf,
        Scan: _Block._leaf,
        Sort: _Block._leaf,
        Signal: _Block._flags,
        Wait: _Block._flags,
    },
)


def _surely(analyzer: Any, condition: Any) -> bool:
    return condition if isinstance(condition, bool) else bool(analyzer.can_prove(condition))
