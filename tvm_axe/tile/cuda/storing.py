"""The storing warp's code: it sends off what consumers have staged, and signals what has arrived.

Only programs that signal have one. A store to a peer takes its time; here nobody else waits for it.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.script.tirx import tile as primitives

from tvm_axe.tile.cuda import flags, tma
from tvm_axe.tile.cuda.pipes import Cursor, Kernel, Values
from tvm_axe.tile.program import Branch, Copy, Let, Loop, Node, Region, Signal, substitute_in


class Storer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.plan = kernel, kernel.plan
        self.cursors = {copy: Cursor(1, 0) for copy in self.plan.staging}

    def tile(self, values: Values) -> None:
        self.body(self.plan.program.body, values)

    def end(self) -> None:
        T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))

    def body(self, nodes: tuple[Node, ...], values: Values) -> None:
        for node in nodes:
            if node in self.plan.staging:
                assert isinstance(node, Copy)
                self.store(node, values)
            elif isinstance(node, Signal):
                T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))
                for offset in flags.each(node.flags):
                    index = [substitute_in(s, values) + o for s, o in zip(node.flags.start, offset)]
                    flags.signal(node.flags.tile.buffer.ptr_to(index), node, substitute_in(node.value, values))
            elif isinstance(node, Loop) and self.stores(node.body):
                start, extent = (substitute_in(value, values) for value in (node.start, node.extent))
                with T.serial(start, start + extent) as var:
                    self.body(node.body, values | {node.var: var})
            elif isinstance(node, Branch) and self.stores(node.then + node.otherwise):
                with T.If(substitute_in(node.condition, values)):
                    with T.Then():
                        T.evaluate(0)
                        self.body(node.then, values)
                    if self.stores(node.otherwise):
                        with T.Else():
                            self.body(node.otherwise, values)
            elif isinstance(node, Let):
                values = values | {node.var: T.bind(substitute_in(node.value, values))}

    def stores(self, nodes: tuple[Node, ...]) -> bool:
        return any(
            node in self.plan.staging
            or isinstance(node, Signal)
            or (isinstance(node, Loop) and self.stores(node.body))
            or (isinstance(node, Branch) and self.stores(node.then + node.otherwise))
            for node in nodes
        )

    def store(self, copy: Copy, values: Values) -> None:
        kernel, staging = self.kernel, self.plan.staging[copy]
        assert staging.pieces == 1
        rows = copy.src.tile.shape[0] // self.plan.warpgroups
        target = Region(copy.dst.tile, tuple(substitute_in(s, values) for s in copy.dst.start), copy.dst.extents)
        self.cursors[copy].take(kernel.staged_full[copy])
        pieces: Any = self.plan.program.options.get("sends")
        if pieces is None:
            with tma._each(self.plan.warpgroups) as group:
                tma.store(kernel.staged[copy], (group, 0), target, group * rows, 0)
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())
            T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
        else:
            height, width = pieces
            counts = (self.plan.warpgroups, rows // height, staging.columns // width)
            with tma._each(counts[0]) as group, tma._each(counts[1]) as r, tma._each(counts[2]) as c:
                at, to = r * height, c * width
                part = kernel.staged[copy][group, 0, at : at + height, to : to + width]
                place = tma.box(target, group * rows + at, height, to, width)
                primitives.copy_async(place, part, dispatch="tma_explicit")
                T.evaluate(T.ptx.cp.async_.bulk.commit_group())
                T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))
        kernel.staged_empty[copy].arrive(0)
