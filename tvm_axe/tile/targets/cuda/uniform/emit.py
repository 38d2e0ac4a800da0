"""Code of the uniform model: a block's threads do one node after the other.

Barriers stand where a node touches what an earlier one wrote in memory, or writes what an earlier one read. Of a loop
whose loads run ahead the slots are filled `stages - 1` iterations before they are needed; an iteration waits for its
own, with one barrier, behind which the slot of the iteration before is free and is filled anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.tile.program import (
    Branch,
    Gemm,
    Loop,
    Node,
    Region,
    Signal,
    Tile,
    Wait,
    substitute,
    substitute_in,
    tiles_of,
)
from tvm_axe.tile.targets.cuda.fragments.emit import Emitter, Memory, Registers, Threads
from tvm_axe.tile.targets.cuda.fragments.layout import Holding
from tvm_axe.tile.targets.cuda.instructions import cp_async, flags, fma, mma
from tvm_axe.tile.targets.cuda.uniform.plan import ALIGNMENT, Ahead, UniformPlan

Values = dict[tirx.Var, Any]


def lower(plan: UniformPlan) -> tirx.PrimFunc:
    """The function that upstream's ``tirx`` pipeline compiles."""
    with _tvm.builder() as made:
        with _tvm.function_frame():
            T.func_name(plan.program.name)
            T.device_entry()
            _Block(plan).emit()
        body = made.get().body
    func = plan.program.func
    return tirx.PrimFunc(func.params, body, func.ret_type).with_attrs({"global_symbol": plan.program.name})


@dataclass(frozen=True)
class _Touched:
    """The tiles in memory that were read and written since the last barrier."""

    read: frozenset[Tile] = frozenset()
    written: frozenset[Tile] = frozenset()

    def after(self, reads: Iterable[Tile], writes: Iterable[Tile]) -> _Touched:
        return _Touched(self.read | _in_memory(reads), self.written | _in_memory(writes))

    def also(self, other: _Touched) -> _Touched:
        return _Touched(self.read | other.read, self.written | other.written)

    def forbids(self, reads: Iterable[Tile], writes: Iterable[Tile]) -> bool:
        """Whether a barrier must come first."""
        writes = _in_memory(writes)
        return bool(self.written & (_in_memory(reads) | writes) or self.read & writes)


def _in_memory(tiles: Iterable[Tile]) -> frozenset[Tile]:
    return frozenset(tile for tile in tiles if tile.scope in ("shared", "global"))


class _Block:
    def __init__(self, plan: UniformPlan) -> None:
        self.plan = plan
        self.block, self.thread = T.cta_id([plan.blocks]), T.thread_id([plan.threads])
        pool: Any = T.SMEMPool() if plan.shared_bytes else None
        storages: dict[Tile, Registers | Memory] = {tile: Memory(tile.buffer) for tile in plan.program.params}
        for tile, layout in plan.shared.items():
            size = plan.slots(tile) * plan.slot_elements(tile)
            storages[tile] = Memory(pool.alloc((size,), tile.dtype, align=ALIGNMENT), layout)
        for tile, held in plan.fragments.items():
            holding = Holding(held.layout, tile.shape, plan.threads)
            buffer = T.alloc_buffer((holding.registers,), tile.dtype, scope="local")
            storages[tile] = Registers(buffer, holding, held.origin)
        self.exchange = pool.alloc((plan.scratch,), "uint8", align=ALIGNMENT) if plan.scratch else None
        if pool is not None:
            pool.commit()
        plan.await_previous()
        self.analyzer = plan.program.analyzer()
        self.emitter = Emitter(Threads(plan.threads, self.thread, _sync), storages, self.analyzer, self._scratch)
        self.known = {tile.buffer: tile for tile in storages}
        self.touched = _Touched()

    def _scratch(self, dtype: str, size: int) -> Any:
        assert self.exchange is not None
        bits = int(tvm_ffi.dtype(dtype).bits)
        assert size * bits <= self.plan.scratch * 8, (dtype, size)
        offset = self.exchange.elem_offset * 8 // bits
        return T.decl_buffer((size,), dtype, data=self.exchange.data, elem_offset=offset, scope=self.exchange.scope())

    def emit(self) -> None:
        """Emit the block's point of the grid, or one after the other of its points."""
        plan = self.plan
        if not plan.persistent:
            self._point(self.block)
            return
        blocks = plan.blocks
        entry = self._settled(plan.program.body, self.touched)
        with T.serial(0, (plan.tiles - self.block + blocks - 1) // blocks) as turn:
            self.touched = entry
            self._point(T.bind(self.block + turn * blocks))

    def _point(self, index: Any) -> None:
        values: Values = {}
        for (var, extent), value in zip(self.plan.program.grid, self.plan.point(index).values()):
            values[var] = T.bind(value)
            self.analyzer.bind(values[var], ir.Range.from_min_extent(0, extent))
        self._nodes(self.plan.program.body, values, self.emitter)

    def _nodes(self, nodes: Sequence[Node], values: Values, emitter: Emitter) -> None:
        for node in nodes:
            if isinstance(node, Loop):
                self._loop(node, values, emitter)
            elif isinstance(node, Branch):
                self._branch(node, values, emitter)
            elif isinstance(node, Wait | Signal):
                self._flags(node, values, emitter)
            else:
                reads = self._reads(node)
                self._separate(reads, node.writes)
                (changed,) = substitute((node,), values)
                if isinstance(node, Gemm) and isinstance(changed, Gemm):
                    self._gemm(emitter, changed, self.plan.products.get(node))
                else:
                    values = values | emitter.emit(changed)
                self.touched = self.touched.after(reads, node.writes)

    def _flags(self, node: Wait | Signal, values: Values, emitter: Emitter) -> None:
        """A thread a flag, or several. A signal comes behind what the block touched, a wait before what it will."""
        region = node.flags
        self._scalars(node.value, *region.start)
        value, *start = (emitter.expression(substitute_in(v, values)) for v in (node.value, *region.start))
        if isinstance(node, Signal) and node.ordered and self.touched != _Touched():
            _sync()
        self.touched = self._behind_flags(node, self.touched)
        for first in range(0, flags.count(region), self.plan.threads):
            number = self.thread + first
            with T.If(number < flags.count(region)), T.Then():
                index = flags.at(region.extents, start, number)
                if isinstance(node, Signal):
                    flags.signal(node, index, value)
                else:
                    flags.wait(node, index, value)
        if isinstance(node, Wait):
            _sync()

    @staticmethod
    def _behind_flags(node: Wait | Signal, touched: _Touched) -> _Touched:
        """What is touched since the last barrier behind a wait, which has one, or a signal, which may have one."""
        return _Touched() if isinstance(node, Wait) or node.ordered else touched

    def _gemm(self, emitter: Emitter, gemm: Gemm, warps: mma.Warps | None) -> None:
        if warps is None:
            fma.emit(emitter, gemm)
        else:
            mma.emit(emitter, gemm, warps)

    def _branch(self, node: Branch, values: Values, emitter: Emitter) -> None:
        self._scalars(node.condition)
        condition = emitter.expression(substitute_in(node.condition, values))
        before = self.touched
        with T.If(condition):
            with T.Then():
                self._nodes(node.then, values, emitter)
            after = self.touched
            self.touched = before
            if node.otherwise:
                with T.Else():
                    self._nodes(node.otherwise, values, emitter)
        self.touched = self.touched.also(after)

    def _loop(self, loop: Loop, values: Values, emitter: Emitter) -> None:
        self._scalars(loop.start, loop.extent)
        start, extent = (self._once(substitute_in(v, values), emitter) for v in (loop.start, loop.extent))
        if loop in self.plan.ahead:
            self._pipelined(loop, values, emitter, start, extent, self.plan.ahead[loop])
            return
        self.touched = entry = self._settled(loop.body, self.touched)
        with T.serial(start, start + extent) as step:
            self._step(loop, values, emitter, step, start, extent)
        self.touched = entry

    def _once(self, value: Any, emitter: Emitter) -> Any:
        """A loop's bound, which what the loop writes doesn't change."""
        loads = tiles_of([value], self.known)
        return T.bind(emitter.expression(value)) if loads else emitter.expression(value)

    def _step(self, loop: Loop, values: Values, emitter: Emitter, step: Any, start: Any, extent: Any) -> None:
        self.analyzer.bind(step, ir.Range.from_min_extent(start, extent))
        body = tuple(node for node in loop.body if loop not in self.plan.ahead or node not in self._copies(loop))
        self._nodes(body, values | {loop.var: step}, emitter)

    def _copies(self, loop: Loop) -> Any:
        return self.plan.ahead[loop].copies

    def _pipelined(self, loop: Loop, values: Values, emitter: Emitter, start: Any, extent: Any, ahead: Ahead) -> None:
        stages = ahead.stages
        self._separate(*self._loads(ahead))
        entry = self.touched
        for first in range(stages - 1):
            with emitter.guarded([] if _surely(self.analyzer, first < extent) else [first < extent]):
                self._start(ahead, values | {loop.var: start + first}, emitter, first)
            cp_async.commit()
        with T.serial(0, extent) as turn:
            self.analyzer.bind(turn, ir.Range.from_min_extent(0, extent))
            cp_async.wait(stages - 2)
            _sync()
            self.touched = _Touched()
            later = T.bind(turn + (stages - 1))
            self.analyzer.bind(later, ir.Range.from_min_extent(0, extent))  # where it is used
            with emitter.guarded([later < extent]):
                self._start(ahead, values | {loop.var: start + later}, emitter, later % stages)
            cp_async.commit()
            self._step(loop, values, self._in_slot(ahead, emitter, turn % stages), T.bind(start + turn), start, extent)
        self.touched = self.touched.also(entry)

    def _start(self, ahead: Ahead, values: Values, emitter: Emitter, slot: Any) -> None:
        inner = self._in_slot(ahead, emitter, slot)
        for copy, size in ahead.copies.items():
            (changed,) = substitute((copy,), values)
            cp_async.start(inner, changed, size)  # type: ignore[arg-type]

    def _in_slot(self, ahead: Ahead, emitter: Emitter, slot: Any) -> Emitter:
        """An emitter for which the tiles that run ahead are in a slot."""
        for copy in ahead.copies:
            tile = copy.dst.tile
            stored = self.emitter.memory(tile)
            emitter = emitter.with_tile(
                tile, Memory(stored.buffer, stored.layout, slot * self.plan.slot_elements(tile))
            )
        return emitter

    # ---- Barriers ------------------------------------------------------------------------------------------------

    def _separate(self, reads: Iterable[Tile], writes: Iterable[Tile]) -> None:
        """A barrier, if what is to be touched needs one."""
        if self.touched.forbids(reads, writes):
            _sync()
            self.touched = _Touched()

    def _reads(self, node: Node) -> list[Tile]:
        """What a node reads, with what it loads to know where its regions start."""
        regions = [part for part in vars(node).values() if isinstance(part, Region)]
        return [*node.reads, *tiles_of([list(region.start) for region in regions], self.known)]

    def _loads(self, ahead: Ahead) -> tuple[list[Tile], list[Tile]]:
        """What loads that run ahead read and write."""
        return [tile for copy in ahead.copies for tile in self._reads(copy)], [copy.dst.tile for copy in ahead.copies]

    def _scalars(self, *values: Any) -> None:
        """A barrier, if what expressions load needs one."""
        loaded = tiles_of(list(values), self.known)
        self._separate(loaded, ())
        self.touched = self.touched.after(loaded, ())

    def _settled(self, body: Sequence[Node], entry: _Touched) -> _Touched:
        """What may have been touched at the start of any iteration of a loop."""
        while True:
            after = entry.also(self._through(body, entry))
            if after == entry:
                return entry
            entry = after

    def _through(self, nodes: Sequence[Node], touched: _Touched) -> _Touched:
        """What `_nodes` leaves in `self.touched`, without making code."""
        for node in nodes:
            if isinstance(node, Loop | Branch):
                scalars = (node.start, node.extent) if isinstance(node, Loop) else (node.condition,)
                loaded = tiles_of(list(scalars), self.known)
                touched = (_Touched() if touched.forbids(loaded, ()) else touched).after(loaded, ())
            if isinstance(node, Loop) and node in self.plan.ahead:
                entry = _Touched() if touched.forbids(*self._loads(self.plan.ahead[node])) else touched
                rest = [inner for inner in node.body if inner not in self._copies(node)]
                touched = entry.also(self._through(rest, _Touched()))
            elif isinstance(node, Loop):
                touched = self._settled(node.body, touched)
            elif isinstance(node, Branch):
                touched = self._through(node.then, touched).also(self._through(node.otherwise, touched))
            elif isinstance(node, Wait | Signal):
                loaded = tiles_of([node.value, *node.flags.start], self.known)
                touched = (_Touched() if touched.forbids(loaded, ()) else touched).after(loaded, ())
                touched = self._behind_flags(node, touched)
            else:
                reads = self._reads(node)
                if touched.forbids(reads, node.writes):
                    touched = _Touched()
                touched = touched.after(reads, node.writes)
        return touched


def _sync() -> None:
    T.evaluate(T.cuda.cta_sync())


def _surely(analyzer: Any, condition: Any) -> bool:
    return condition if isinstance(condition, bool) else bool(analyzer.can_prove(condition))
