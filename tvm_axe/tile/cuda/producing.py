"""The producer's code: one thread that runs the program's loops and branches for the copies into rings."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_axe.tile.cuda import flags, tma
from tvm_axe.tile.cuda.pipes import Cursor, Kernel, Values
from tvm_axe.tile.program import Assign, Branch, Copy, Gemm, Let, Loop, Node, Region, Wait, substitute_in


class Producer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.plan = kernel, kernel.plan
        # Slots are empty to begin with: a wait for the phase before the first passes.
        self.cursors = {ring: Cursor(slots, 1) for ring, slots in self.plan.rings.items()}
        scalars = {tile for node in self.plan.program.nodes() if isinstance(node, Assign) for tile in node.writes}
        self.locals = {tile.buffer: T.alloc_local(tile.shape, tile.dtype) for tile in scalars}
        self.owner = {copy: ring for ring in self.plan.rings for copy in ring.copies + ring.others}
        self.opens = {copies[0] for ring in self.plan.rings for copies in (ring.copies, ring.others) if copies}
        gemms = [node for node in self.plan.program.nodes() if isinstance(node, Gemm)]
        operands = {region.tile for gemm in gemms for region in (gemm.a, gemm.b)}
        self.rounded = {tile for tile in operands if tile.dtype == "float32"}  # the tensor cores would cut them off

    def tile(self, values: Values) -> None:
        self.body(self.plan.program.body, values | self.locals)

    def body(self, nodes: tuple[Node, ...], values: Values) -> None:
        for node in nodes:
            if node in self.owner:
                self.load(node, values)
            elif isinstance(node, Loop) and self.loads(node.body):
                start, extent = (substitute_in(value, values) for value in (node.start, node.extent))
                with T.serial(start, start + extent) as var:
                    self.body(node.body, values | {node.var: var})
            elif isinstance(node, Branch) and self.loads(node.then + node.otherwise):
                with T.If(substitute_in(node.condition, values)):
                    with T.Then():
                        T.evaluate(0)  # an arm may have nothing for this role
                        self.body(node.then, values)
                    if self.loads(node.otherwise):
                        with T.Else():
                            self.body(node.otherwise, values)
            elif isinstance(node, Wait):
                for offset in flags.each(node.flags):
                    index = [substitute_in(s, values) + o for s, o in zip(node.flags.start, offset)]
                    flags.wait(node.flags.tile.buffer.ptr_to(index), substitute_in(node.value, values), node.reset)
                flags.proxy()
            elif isinstance(node, Let):
                values = values | {node.var: T.bind(substitute_in(node.value, values))}
            elif isinstance(node, Assign):
                indices = [substitute_in(index, values) for index in node.indices]
                T.buffer_store(self.locals[node.tile.buffer], substitute_in(node.value, values), indices)

    def loads(self, nodes: tuple[Node, ...]) -> bool:
        """Whether a body has anything for this role."""
        return any(
            node in self.owner
            or isinstance(node, Assign | Wait)
            or (isinstance(node, Loop) and self.loads(node.body))
            or (isinstance(node, Branch) and self.loads(node.then + node.otherwise))
            for node in nodes
        )

    def load(self, copy: Copy, values: Values) -> None:
        ring = self.owner[copy]
        cursor, full = self.cursors[ring], self.kernel.full[ring]
        if copy in self.opens:
            cursor.take(self.kernel.empty[ring])
            full.expect(cursor.slot, ring.bytes)
        tile, start = copy.dst.tile, tuple(substitute_in(start, values) for start in copy.src.start)
        source = Region(copy.src.tile, start, copy.src.extents)
        tma.load(tile, self.kernel.tiles[tile], cursor.slot, source, full.at(cursor.slot), tile in self.rounded)
