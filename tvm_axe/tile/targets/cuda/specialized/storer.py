"""The storing warp's code: one thread that writes what consumers have staged, and signals when it has arrived.

Only kernels that signal, or that say in which pieces to store, have one. A store to a peer takes its time; the
consumers go on meanwhile, up to the next tile through the same staging buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T
from tvm.script.tirx import tile as primitives

from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import Copy, Node, Signal
from tvm_axe.tile.regions import Region
from tvm_axe.tile.targets.cuda.instructions import flags, tma
from tvm_axe.tile.targets.cuda.specialized.barriers import BlockContext, Cursor, Values
from tvm_axe.tile.targets.cuda.specialized.one_thread import OneThread
from tvm_axe.tile.targets.cuda.specialized.overwriting import overwritten
from tvm_axe.tile.walking import substitute_in


class Storer(OneThread):
    """The role of the thread that stores."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__(context, _NODES)
        self.waits = context.waits(context.plan.warpgroups + 1)
        self.staging = context.plan.memory.staging
        self.places = context.plan.memory.places
        self.cursors = {place: Cursor(1, 0) for place in dict.fromkeys(self.places.values())}
        self.again = overwritten(context.plan.program)

    def end(self) -> None:
        """Emit the wait for the last stores: their source is shared memory of this block."""
        with self.waits.around("stores"):
            T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))

    def owns(self, node: Node) -> bool:
        return isinstance(node, Signal) or node in self.staging

    def signal(self, node: Signal, values: Values) -> None:
        """Emit the signal to each of the flags, once all stores have arrived."""
        # Complete stores are visible to this thread (PTX ISA, cp.async.bulk.wait_group); its signal releases them.
        T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))
        for index in flags.each(node.flags, values):
            flags.signal(node, index, substitute_in(node.value, values))

    def store(self, copy: Copy, values: Values) -> None:
        """Emit the stores of what consumers have staged, in pieces if they were asked for."""
        plan, staged = self.plan, self.context.staged[copy]
        rows, columns = copy.src.tile.shape[0] // plan.warpgroups, self.staging[copy].columns
        target = Region(copy.dst.tile, tuple(substitute_in(s, values) for s in copy.dst.start), copy.dst.extents)
        with self.waits.around(f"{copy.src} to be staged"):
            self.cursors[self.places[copy]].take(self.context.staged_full[copy])
        if plan.epilogue_tile is None:
            with tma.each(plan.warpgroups) as group:
                tma.store(staged, (group, 0), target, group * rows, 0)
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())
            if copy.dst.tile in self.again:  # before it is stored to again, in order
                T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))
            else:
                T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
        else:
            height, width = plan.epilogue_tile
            counts = (plan.warpgroups, rows // height, columns // width)
            with tma.each(counts[0]) as group, tma.each(counts[1]) as i, tma.each(counts[2]) as j:
                row, column = i * height, j * width
                piece = staged[group, 0, row : row + height, column : column + width]
                place = tma.box(target, group * rows + row, height, column, width)
                primitives.copy_async(place, piece, dispatch="tma_explicit")
                T.evaluate(T.ptx.cp.async_.bulk.commit_group())
                T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))
        self.context.staged_empty[copy].arrive(0)


_NODES: TypeTable[Callable[[Any, Any, Values], None]] = TypeTable(
    "code of the storing warp", {Copy: Storer.store, Signal: Storer.signal}
)
