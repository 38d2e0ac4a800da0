"""The ground that all roles of the specialized model stand on: shared memory, barriers, and places in circular
buffers.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.tile.nodes import Copy
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.instructions import tma, wgmma
from tvm_axe.tile.targets.cuda.sampling import Waits, waits_of
from tvm_axe.tile.targets.cuda.specialized.memory import ALIGNMENT
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan
from tvm_axe.tile.targets.cuda.specialized.staging import Staging

Values = dict[tirx.Var, Any]
"""What the program's variables are where code is written."""

_WARPS = 4  # of a warpgroup
_PIECE, _WORD = 16, 4  # bytes that a thread stores at once, and of an element of them


class BlockContext:
    """A block as its roles see it: where a thread is, and the shared memory.

    Attributes
    ----------
    full, empty : dict from CircularBuffer to Barriers
        What makes the slots of a circular buffer full (the arrival of its bytes) and empty (a consumer warpgroup each).
    staged_full, staged_empty : dict from Copy to Barriers
        The same of the staging buffers of a storing warp; only of a kernel that has one.
    tiles : dict from Tile
        Shared tiles by (slot, row, column), as upstream's primitives take them.
    flat : dict from Tile
        The same memory element by element, as what threads do by themselves takes it.
    """

    def __init__(self, plan: SpecializedPlan) -> None:
        self.plan, memory = plan, plan.memory
        self.block = T.cta_id([plan.grid.blocks])
        self.group = T.warpgroup_id([plan.warpgroups + 1])
        self.warp = T.warp_id_in_wg([_WARPS])
        self.lane = T.lane_id([32])
        pool = T.SMEMPool()
        self.full = {buffer: Barriers(pool, slots, 1) for buffer, slots in memory.buffers.items()}
        self.empty = {buffer: Barriers(pool, slots, plan.warpgroups) for buffer, slots in memory.buffers.items()}
        if plan.has_storing_warp:
            own = dict.fromkeys(memory.places.values())
            full, empty = ({copy: Barriers(pool, 1, count) for copy in own} for count in (plan.warpgroups, 1))
            self.staged_full = {copy: full[place] for copy, place in memory.places.items()}
            self.staged_empty = {copy: empty[place] for copy, place in memory.places.items()}
        assert pool.offset <= memory.barriers, (pool.offset, memory.barriers)
        place = memory.barriers
        self.tiles: dict[Tile, Any] = {}
        self.flat: dict[Tile, Any] = {}
        for tile, count in memory.slots.items():
            pool.move_base_to(place)
            shape = (count, *tma.matrix(tile))
            made = pool.alloc(shape, tile.dtype, align=ALIGNMENT, layout=tma.shared_layout(tile, count))
            self.tiles[tile], self.flat[tile] = made, flat(made, tile.dtype, count * tma.slot_elements(tile))
            place += memory.room(tile)
            if tile in memory.filled:
                self._clear(tile, made, count, memory.filled[tile])
        pool.move_base_to(place)
        made = {copy: self._stage(pool, copy, memory.staging[copy]) for copy in dict.fromkeys(memory.places.values())}
        self.staged = {copy: made[place] for copy, place in memory.places.items()}
        self.exchange = pool.alloc((memory.scratch,), "uint8", align=ALIGNMENT) if memory.scratch else None
        assert pool.offset <= memory.bytes, (pool.offset, memory.bytes)
        pool.commit(memory.bytes)
        T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        T.evaluate(T.cuda.cta_sync())
        plan.await_previous()

    def _clear(self, tile: Tile, buffer: Any, slots: int, first: int) -> None:
        """Emit zeros for a tile's rows from the first on, in all slots, by all threads, 16 bytes at a time.

        A swizzle moves what is in a row, and no row.
        """
        (rows, columns), width, item = tma.matrix(tile), tma.panel(tile), tma.item_bytes(tile.dtype)
        words = flat(buffer, "uint32", slots * tma.slot_bytes(tile) // _WORD)
        panels, pieces = columns // width, (rows - first) * width * item // _PIECE
        threads = (self.plan.warpgroups + 1) * wgmma.WARPGROUP
        with T.serial(0, -(-slots * panels * pieces // threads)) as step:
            index = T.bind(step * threads + T.cuda.thread_rank())
            with when(index < slots * panels * pieces):
                row = index // pieces % panels * rows + first  # with which a panel's begin
                start = index // (pieces * panels) * tma.slot_bytes(tile) + row * width * item + index % pieces * _PIECE
                with T.vectorized(_PIECE // _WORD) as lane:
                    T.buffer_store(words, T.uint32(0), [start // _WORD + lane])

    def waits(self, role: Any, *conditions: Any) -> Waits:
        """What a role, by its number among the plan's, writes its waits by, in the thread of which conditions hold."""
        return waits_of(self.plan.samples, self.block, role, *conditions)

    def _stage(self, pool: Any, copy: Copy, staging: Staging) -> Any:
        rows = copy.src.tile.shape[0] // self.plan.warpgroups
        shape = (self.plan.warpgroups, staging.slots, rows, staging.columns)
        dtype = copy.dst.tile.dtype
        mode = tma.swizzle(Tile(copy.src.tile.buffer, "shared", (rows, staging.columns), dtype))
        return pool.alloc(shape, dtype, align=ALIGNMENT, layout=_tvm.swizzled_layout(dtype, mode, shape))


class Barriers:
    """A barrier for each slot of a circular buffer."""

    def __init__(self, pool: Any, slots: int, arrivals: int) -> None:
        self.buffer = pool.alloc((slots,), "uint64", align=8)
        with when(T.cuda.thread_rank() == 0):
            for slot in range(slots):
                T.evaluate(T.ptx.mbarrier.init.shared.b64(self.at(slot), T.uint32(arrivals)))

    def at(self, slot: Any) -> Any:
        return self.buffer.ptr_to([slot])

    def wait(self, slot: Any, phase: Any) -> None:
        T.evaluate(T.cuda.mbarrier_wait(self.at(slot), phase))

    def arrive(self, slot: Any) -> None:
        T.evaluate(T.ptx.mbarrier.arrive.shared.b64(self.at(slot), T.uint32(1)))

    def expect(self, slot: Any, size: int) -> None:
        T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(self.at(slot), T.uint32(size)))


class Cursor:
    """A role's place in a circular buffer: the slot to take next, with the parity of its phase, and those taken last.

    Where it goes next is computed as soon as a slot is taken, so that the next wait doesn't wait for it too.

    Parameters
    ----------
    slots : int
        How many slots there are.
    phase : int
        The parity of the phase that the first wait is for.
    lag : int
        How many slots before the last one are still asked for.
    """

    def __init__(self, slots: int, phase: int, lag: int = 0) -> None:
        self.slots = slots
        self._phase = scalar(phase)
        self._next = scalar(0) if slots > 1 else None
        self._taken = [scalar(0) for _ in range(lag + 1)] if slots > 1 else []

    @property
    def slot(self) -> Any:
        """The slot taken last."""
        return self.behind(0)

    def behind(self, lag: int) -> Any:
        """The slot taken `lag` before the last."""
        return self._taken[lag][0] if self._taken else 0

    def take(self, barriers: Barriers) -> None:
        """Wait for the next slot and take it."""
        if self._next is None:
            barriers.wait(0, self._phase[0])
            T.buffer_store(self._phase, self._phase[0] ^ 1, [0])
            return
        barriers.wait(self._next[0], self._phase[0])
        for lag in range(len(self._taken) - 1, 0, -1):
            T.buffer_store(self._taken[lag], self._taken[lag - 1][0], [0])
        T.buffer_store(self._taken[0], self._next[0], [0])
        T.buffer_store(self._next, self._next[0] + 1, [0])
        with when(self._next[0] == self.slots):
            T.buffer_store(self._next, 0, [0])
            T.buffer_store(self._phase, self._phase[0] ^ 1, [0])


def flat(buffer: Any, dtype: str, size: int) -> Any:
    """The memory of a buffer in shared memory as `size` elements in a row."""
    first = buffer.elem_offset * tma.item_bytes(str(buffer.dtype)) // tma.item_bytes(dtype)
    return T.decl_buffer((size,), dtype, data=buffer.data, elem_offset=first, scope=buffer.scope())


def scalar(value: int) -> Any:
    """A new integer of each thread."""
    made = T.alloc_local([1], "int32")
    T.buffer_store(made, value, [0])
    return made


@contextlib.contextmanager
def when(condition: Any) -> Iterator[None]:
    """Code under a condition; under none if it is None."""
    if condition is None:
        yield
        return
    with T.If(condition), T.Then():
        yield
