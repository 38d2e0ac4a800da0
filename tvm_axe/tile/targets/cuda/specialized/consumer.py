"""The consumers' code: warpgroups that multiply and compute, as `specialized.schedule` says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import ir, sym, tirx
from tvm.script import tirx as T
from tvm.script.tirx import tile as primitives

from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import Copy, Let
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.targets.cuda.fragments.emit import emit
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Memory, Registers, Threads, tensors
from tvm_axe.tile.targets.cuda.fragments.layout import FragmentLayout
from tvm_axe.tile.targets.cuda.instructions import tma, wgmma
from tvm_axe.tile.targets.cuda.specialized.barriers import BlockContext, Cursor, Values, flat, when
from tvm_axe.tile.targets.cuda.specialized.steps import (
    Acquire,
    Await,
    Choose,
    Define,
    Do,
    Fence,
    Given,
    Guard,
    Issue,
    PingPong,
    Release,
    Repeat,
    Send,
    Step,
    Sync,
    walk,
)
from tvm_axe.tile.walking import substitute, substitute_in

# Named barriers (PTX ISA, "bar"): of all the consumers; of turns, one a warpgroup. 1 to 3 are those of a warpgroup.
_CONSUMERS, _TURNS = 8, 9


class Consumer:
    """The role of the warpgroups that multiply and compute.

    Attributes
    ----------
    cursors : dict from CircularBuffer to Cursor
        Its place in each circular buffer.
    registers : dict from Tile
        Fragments that lie as wgmma's accumulators and left operands, as upstream's primitives take them.
    emitter : Emitter
        What emits the nodes that threads do by themselves.
    """

    def __init__(self, context: BlockContext) -> None:
        self.context, self.plan = context, context.plan
        plan = self.plan
        lags = dict.fromkeys(plan.memory.buffers, 0)
        for step in walk(plan.schedule.steps):
            if isinstance(step, Release):
                lags[step.buffer] = max(lags[step.buffer], step.lag)
        self.cursors = {buffer: Cursor(slots, 0, lags[buffer]) for buffer, slots in plan.memory.buffers.items()}
        self.waits = context.waits(context.group, context.warp == 0, context.lane == 0)
        self.registers: dict[Tile, Any] = {}  # as upstream's primitives take them
        storages: dict[Tile, Registers | Memory] = {**tensors(plan.program)}
        for tile, inferred in plan.fragments.items():
            fragment = FragmentLayout(inferred.layout, inferred.shape, plan.threads)
            pack = self.pack(tile) if len(tile.shape) == 2 else None
            if pack is not None:
                rows, columns = tile.shape[0] // plan.down, tile.shape[1] // plan.across
                held = wgmma.warpgroup_fragment(rows, columns, pack)
                self.registers[tile] = T.alloc_buffer((rows, columns), tile.dtype, scope="local", layout=held)
                own = self.registers[tile].local(fragment.registers)
            else:
                own = T.alloc_local([fragment.registers], tile.dtype)
            storages[tile] = Registers(own, fragment, inferred.origin)
        self.index = context.group * wgmma.WARPGROUP + context.warp * 32 + context.lane
        self.loops = 0  # around what is being emitted
        for buffer in plan.memory.buffers:
            for tile in buffer.tiles:
                offset = self.cursors[buffer].slot * tma.slot_elements(tile)
                storages[tile] = Memory(context.flat[tile], tma.axe_layout(tile), offset)
        storages |= {tile: Memory(context.flat[tile], tma.axe_layout(tile)) for tile in plan.memory.own_tiles}
        # Of a storing warp's staging buffers, which are empty to begin with.
        stored = dict.fromkeys(plan.memory.places.values()) if plan.has_storing_warp else {}
        self.stagings = {place: Cursor(1, 1) for place in stored}
        # Pieces of another type than their accumulators' are cast first; others are tiles, one for each slot.
        self.casts: dict[Copy, Any] = {}
        self.pieces: dict[Copy, tuple[Tile, ...]] = {}
        for copy, staging in plan.memory.staging.items():
            dtype, rows = copy.dst.tile.dtype, copy.src.tile.shape[0] // plan.warpgroups
            if dtype != copy.src.tile.dtype:
                held = wgmma.warpgroup_fragment(rows, staging.columns)
                self.casts[copy] = T.alloc_buffer((rows, staging.columns), dtype, scope="local", layout=held)
                continue
            piece = Tile(copy.src.tile.buffer, "shared", (rows, staging.columns), dtype)
            memory = flat(context.staged[copy], dtype, staging.bytes // tma.item_bytes(dtype))
            layout = tma.staged_layout(piece, plan.warpgroups, staging.slots)
            whole = (copy.src.tile.shape[0], staging.columns)
            self.pieces[copy] = tuple(Tile(piece.buffer, "shared", whole, dtype) for _ in range(staging.slots))
            for slot, tile in enumerate(self.pieces[copy]):
                storages[tile] = Memory(memory, layout, slot * rows * staging.columns)
        threads = Threads(plan.threads, self.index, self.sync)
        self.analyzer = sym.Analyzer()
        self.emitter = Emitter(threads, storages, self.analyzer, self.scratch)

    def pack(self, tile: Tile) -> int | None:
        """How many neighbours a thread has of a fragment that lies as wgmma's; None of one that lies otherwise."""
        (rows, columns), plan = tma.matrix(tile), self.plan
        for pack in (2, 4):
            if rows % (plan.down * wgmma.ROWS) == 0 and columns % (plan.across * 4 * pack) == 0:
                layout = wgmma.accumulator(rows, columns, plan.warpgroups, plan.across, pack)
                if plan.fragments[tile].layout == layout:
                    return pack
        return None

    def is_cast(self, node: Copy) -> bool:
        """Whether a copy between accumulators only rounds, which is done two registers at a time."""
        if not (node.src.whole and node.dst.whole):
            return False
        src, dst = node.src.tile, node.dst.tile
        if src not in self.registers or dst not in self.registers or src.dtype == dst.dtype:
            return False
        return self.plan.fragments[src].layout == self.plan.fragments[dst].layout

    def scratch(self, dtype: str, size: int) -> Any:
        """Shared memory for an exchange between consumers."""
        assert self.context.exchange is not None
        return flat(self.context.exchange, dtype, size)

    def sync(self) -> None:
        """A barrier among the consumers."""
        with self.waits.around("the other consumers"):
            T.evaluate(T.ptx["bar.sync"](T.uint32(_CONSUMERS), T.uint32(self.plan.threads)))

    def begin(self) -> None:
        if self.plan.schedule.takes_turns:
            with when(self.context.group == self.plan.warpgroups - 1):
                T.evaluate(T.ptx["bar.arrive"](T.uint32(_TURNS), T.uint32(2 * wgmma.WARPGROUP)))

    def end(self) -> None:
        if self.plan.schedule.takes_turns:
            with when(self.context.group == 0):
                T.evaluate(T.ptx["bar.sync"](T.uint32(_TURNS), T.uint32(2 * wgmma.WARPGROUP)))
        if self.plan.memory.sent or (self.plan.memory.staging and not self.plan.has_storing_warp):
            T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))

    def tile(self, values: Values) -> None:
        """Emit a consumer's part of one tile of the grid."""
        for var, extent in self.plan.program.grid:
            self.analyzer.bind(values[var], ir.Range.from_min_extent(0, extent))
        self.steps(self.plan.schedule.steps, values)

    def steps(self, steps: tuple[Step, ...], values: Values) -> None:
        """Emit steps, in order."""
        for step in steps:
            values = values | (_STEPS.of(step)(self, step, values) or {})

    def acquire(self, step: Acquire, values: Values) -> None:
        with self.waits.around(f"{step.buffer.name} to be loaded"):
            self.cursors[step.buffer].take(self.context.full[step.buffer])

    def wait(self, step: Await, values: Values) -> None:
        with self.waits.around("products"):
            T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(step.pending))

    def synchronize(self, step: Sync, values: Values) -> None:
        if step.settles:
            T.evaluate(T.ptx.fence.proxy.async_())
        elif step.proxy:
            T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        # Of no other threads than those that have TMA store is there anything to wait for.
        if step.settles:
            with self.waits.around("stores to be done"):
                T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))
        elif step.drains:
            with self.waits.around("sent tiles to be read"):
                T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
        self.sync()

    def fence(self, step: Fence, values: Values) -> None:
        T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        self.warpgroup_sync()

    def define(self, step: Define, values: Values) -> Values:
        (let,) = substitute((step.node,), values)
        assert isinstance(let, Let), let
        return {step.node.var: T.bind(self.emitter.expression(let.value))}

    def given(self, step: Given, values: Values) -> None:
        self.steps(step.body, values | {step.var: substitute_in(step.value, values)})

    def guard(self, step: Guard, values: Values) -> None:
        with when(self.expression(step.extent, values) > 0):
            self.steps(step.body, values)

    def repeat(self, step: Repeat, values: Values) -> None:
        start, extent = (self.expression(value, values) for value in (step.start, step.extent))
        with when(extent > 0 if step.behind else None):
            with T.serial(start, start + extent) as var:
                self.analyzer.bind(var, ir.Range.from_min_extent(start, extent))
                self.loops += 1
                self.steps(step.body, values | {step.var: var})
                self.loops -= 1
            self.steps(step.behind, values)

    def choose(self, step: Choose, values: Values) -> None:
        condition = self.expression(step.condition, values)
        if self.analyzer.can_prove(condition):
            self.steps(step.then, values)
        elif self.analyzer.can_prove(tirx.Not(condition)):
            self.steps(step.otherwise, values)
        else:
            with T.If(condition):
                with T.Then():
                    T.evaluate(0)  # an arm may be empty
                    self.steps(step.then, values)
                if step.otherwise:
                    with T.Else():
                        self.steps(step.otherwise, values)

    def moved(self, region: Region, values: Values) -> Region:
        """A region whose start is as threads compute it."""
        return Region(region.tile, tuple(self.expression(start, values) for start in region.start), region.extents)

    def expression(self, value: Any, values: Values) -> Any:
        return self.emitter.expression(substitute_in(value, values))

    def release(self, step: Release, values: Values) -> None:
        buffer = step.buffer
        condition = self.expression(step.when, values) if step.when is not None else None
        with when(condition), when(self.context.warp == 0), when(self.one()):
            self.context.empty[buffer].arrive(self.cursors[buffer].behind(step.lag))

    def one(self) -> Any:
        """Whether a thread is the one of its warp that does something, with products before and behind.

        Behind loops accumulators are read next. After a branch by a thread's number ptxas doesn't see that a wait for
        products came before, and lets each end before the next begins (C7514). Within loops an election takes
        registers.
        """
        return T.cuda.elect_sync() if not self.loops else self.context.lane == 0

    def warpgroup_sync(self) -> None:
        """A barrier among the threads of a warpgroup, behind which nothing is read that was read before it.

        Upstream's own (`T.cuda.warpgroup_sync`) doesn't say that it touches memory, so compilers move loads over it.
        """
        whose = T.cast(self.context.group + 1, "uint32")
        T.evaluate(T.ptx["bar.sync"](whose, T.uint32(wgmma.WARPGROUP)))

    def ping_pong(self, step: PingPong, values: Values) -> None:
        begins = step.begins
        group, count = self.context.group, self.plan.warpgroups
        whose = group if begins else (group + 1) % count
        operation = T.ptx["bar.sync" if begins else "bar.arrive"]
        with self.waits.around("its turn") if begins else contextlib.nullcontext():
            T.evaluate(operation(T.cast(whose + _TURNS, "uint32"), T.uint32(2 * wgmma.WARPGROUP)))

    def issue(self, step: Issue, values: Values) -> None:
        gemm, plan = step.gemm, self.plan
        accumulate = step.accumulate if isinstance(step.accumulate, bool) else self.expression(step.accumulate, values)
        operand, stand = partial(self.operand, values), (plan.down, plan.across)
        wgmma.issue(gemm, self.registers[gemm.c.tile], self.context.group, stand, operand, accumulate)

    def operand(self, values: Values, region: Region, dimension: int, at: Any, extent: int) -> Any:
        """A fragment; `extent` of a shared region from `at` on, along a dimension, in the slot acquired last."""
        if region.tile.scope == "fragment":
            return self.registers[region.tile]
        tiles = self.context.tiles[region.tile]
        slot = next(
            (self.cursors[buffer].slot for buffer in self.plan.memory.buffers if region.tile in buffer.tiles), 0
        )
        return wgmma.part_of(tiles, slot, self.moved(region, values).start, region.extents, dimension, at, extent)

    def do(self, step: Do, values: Values) -> None:
        if isinstance(step.node, Copy) and step.node in self.plan.memory.staging:
            self.store(step.node, values)
        elif isinstance(step.node, Copy) and self.is_cast(step.node):
            primitives.wg.cast(self.registers[step.node.dst.tile], self.registers[step.node.src.tile])
        else:
            (node,) = substitute((step.node,), values)
            emit(self.emitter, node)

    def send(self, step: Send, values: Values) -> None:
        """A copy of a shared tile by one thread, behind the barrier that what all have written stands before."""
        copy, context = step.node, self.context
        with when(tirx.all(context.group == 0, context.warp == 0)), when(self.one()):
            tma.store(context.tiles[copy.src.tile], (0,), self.moved(copy.dst, values), 0, 0, copy.atomic)
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())

    def store(self, copy: Copy, values: Values) -> None:
        """A copy out through shared memory, then TMA by one thread a warpgroup or by the storing warp."""
        context, staging = self.context, self.plan.memory.staging[copy]
        target = self.moved(copy.dst, values)
        if self.plan.has_storing_warp:
            with self.waits.around(f"{copy.src} to be stored"):
                self.stagings[self.plan.memory.places[copy]].take(context.staged_empty[copy])
            self.stage(copy, 0)
            with when(tirx.all(context.warp == 0, context.lane == 0)):
                context.staged_full[copy].arrive(0)
        elif copy in self.casts:
            with T.unroll(staging.pieces) as piece:
                self.store_piece(copy, piece, target)
        else:
            for piece in range(staging.pieces):
                self.store_piece(copy, piece, target)

    def store_piece(self, copy: Copy, piece: Any, target: Region) -> None:
        """One piece of a tile, once TMA has read what was in its slot."""
        context, staging = self.context, self.plan.memory.staging[copy]
        rows, slot = copy.src.tile.shape[0] // self.plan.warpgroups, piece % staging.slots
        with self.waits.around(f"{copy.src} to be stored"):
            T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(staging.slots - 1))
        self.warpgroup_sync()
        self.stage(copy, piece)
        with when(tirx.all(context.warp == 0, context.lane == 0)):
            place = (self.own_group, slot)
            tma.store(context.staged[copy], place, target, self.own_group * rows, piece * staging.columns, copy.atomic)
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())

    def stage(self, copy: Copy, piece: Any) -> None:
        """A piece in shared memory, where TMA sees it: by stmatrix if it is cast, else element by element."""
        staging, (rows, _) = self.plan.memory.staging[copy], copy.src.tile.shape
        slot, first = piece % staging.slots, piece * staging.columns
        if copy in self.casts:
            primitives.wg.cast(self.casts[copy], self.registers[copy.src.tile][:, first : first + staging.columns])
            primitives.wg.copy(self.context.staged[copy][self.own_group, slot], self.casts[copy])
        else:
            source = Region(copy.src.tile, (0, first), (rows, staging.columns))
            place = Region(self.pieces[copy][slot], (0, 0), (rows, staging.columns))
            emit(self.emitter, Copy(place, source, None))
        T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        self.warpgroup_sync()

    @property
    def own_group(self) -> Any:
        """The warpgroup's number; of one upstream can't prove that its index is aligned."""
        return self.context.group if self.plan.warpgroups > 1 else 0


_STEPS: TypeTable[Callable[[Consumer, Any, Values], Values | None]] = TypeTable(
    "code of a consumer",
    {
        Acquire: Consumer.acquire,
        Await: Consumer.wait,
        Choose: Consumer.choose,
        Define: Consumer.define,
        Do: Consumer.do,
        Fence: Consumer.fence,
        Given: Consumer.given,
        Guard: Consumer.guard,
        Issue: Consumer.issue,
        PingPong: Consumer.ping_pong,
        Release: Consumer.release,
        Repeat: Consumer.repeat,
        Send: Consumer.send,
        Sync: Consumer.synchronize,
    },
)
