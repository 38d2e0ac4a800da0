"""The producer's code: one thread that fills circular buffers, and waits for what other kernels signal.

It runs the program's loops and branches for the copies from global into shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_axe.analysis.expressions import loads_in
from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import Copy, Gemm, Node, Wait
from tvm_axe.tile.regions import Region
from tvm_axe.tile.targets.cuda.instructions import flags, tma
from tvm_axe.tile.targets.cuda.specialized.barriers import BlockContext, Cursor, Values
from tvm_axe.tile.targets.cuda.specialized.one_thread import OneThread
from tvm_axe.tile.walking import substitute_in


class Producer(OneThread):
    """The role of the thread that loads."""

    def __init__(self, context: BlockContext) -> None:
        program, buffers = context.plan.program, context.plan.memory.buffers
        # Slots are empty to begin with: a wait for the phase before the first passes.
        self.cursors = {buffer: Cursor(slots, 1) for buffer, slots in buffers.items()}
        super().__init__(context, _NODES)
        self.waits = context.waits(context.plan.warpgroups)
        self.owner = {copy: buffer for buffer in buffers for copy in buffer.copies + buffer.others}
        self.opens = {copies[0] for buffer in buffers for copies in (buffer.copies, buffer.others) if copies}
        gemms = [node for node in program.nodes() if isinstance(node, Gemm)]
        operands = {region.tile for gemm in gemms for region in (gemm.a, gemm.b)}
        self.rounded = {tile for tile in operands if tile.dtype == "float32"}  # the tensor cores would cut them off

    def owns(self, node: Node) -> bool:
        return node in self.owner or isinstance(node, Wait)

    def wait(self, node: Wait, values: Values) -> None:
        """Emit the wait for each of the flags, and what orders the loads behind it."""
        with self.waits.around(str(node)):
            for index in flags.each(node.flags, values):
                flags.wait(node, index, substitute_in(node.value, values))
        flags.order_copies()

    def load(self, copy: Copy, values: Values) -> None:
        """Emit a load into a slot; the first into one waits until it is empty."""
        buffer = self.owner[copy]
        start = tuple(substitute_in(start, values) for start in copy.src.start)
        # Where data say from where, they are asked once, and before the wait for a slot.
        start = tuple(T.bind(value) if loads_in(value) else value for value in start)
        cursor, full = self.cursors[buffer], self.context.full[buffer]
        if copy in self.opens:
            with self.waits.around(f"a free slot of {buffer.name}"):
                cursor.take(self.context.empty[buffer])
            full.expect(cursor.slot, self.context.plan.memory.loaded(buffer))
        tile = copy.dst.tile
        source = Region(copy.src.tile, start, copy.src.extents)
        rows = self.context.plan.memory.rows(tile)
        tma.load(tile, self.context.tiles[tile], cursor.slot, source, rows, full.at(cursor.slot), tile in self.rounded)


_NODES: TypeTable[Callable[[Any, Any, Values], None]] = TypeTable(
    "code of the producer", {Copy: Producer.load, Wait: Producer.wait}
)
