"""The producer's code: one thread that runs the program's loops and branches for the copies into rings, and waits."""

from __future__ import annotations

from tvm_axe.tile.program import Copy, Gemm, Node, Region, Wait, substitute_in
from tvm_axe.tile.targets.cuda.instructions import flags, tma
from tvm_axe.tile.targets.cuda.specialized.barriers import Cursor, Kernel, Values
from tvm_axe.tile.targets.cuda.specialized.following import Follower


class Producer(Follower):
    def __init__(self, kernel: Kernel) -> None:
        plan = kernel.plan
        # Slots are empty to begin with: a wait for the phase before the first passes.
        self.cursors = {ring: Cursor(slots, 1) for ring, slots in plan.rings.items()}
        super().__init__(kernel)
        self.owner = {copy: ring for ring in plan.rings for copy in ring.copies + ring.others}
        self.opens = {copies[0] for ring in plan.rings for copies in (ring.copies, ring.others) if copies}
        gemms = [node for node in plan.program.nodes() if isinstance(node, Gemm)]
        operands = {region.tile for gemm in gemms for region in (gemm.a, gemm.b)}
        self.rounded = {tile for tile in operands if tile.dtype == "float32"}  # the tensor cores would cut them off

    def owns(self, node: Node) -> bool:
        return node in self.owner or isinstance(node, Wait)

    def do(self, node: Node, values: Values) -> None:
        if isinstance(node, Wait):
            for index in flags.each(node.flags, values):
                flags.wait(node, index, substitute_in(node.value, values))
            flags.order_copies()
        else:
            assert isinstance(node, Copy), node
            self.load(node, values)

    def load(self, copy: Copy, values: Values) -> None:
        ring = self.owner[copy]
        cursor, full = self.cursors[ring], self.kernel.full[ring]
        if copy in self.opens:
            cursor.take(self.kernel.empty[ring])
            full.expect(cursor.slot, ring.bytes)
        tile, start = copy.dst.tile, tuple(substitute_in(start, values) for start in copy.src.start)
        source = Region(copy.src.tile, start, copy.src.extents)
        tma.load(tile, self.kernel.tiles[tile], cursor.slot, source, full.at(cursor.slot), tile in self.rounded)
