"""A role of one thread: it runs the program's loops and branches for the statements that are its own.

It computes names and local tiles for itself, as all roles do, so that none waits for what another knows.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_axe.tile.program import Assign, Branch, Let, Loop, Node, substitute_in
from tvm_axe.tile.targets.cuda.specialized.barriers import Kernel, Values


class Follower:
    """What roles of one thread share; each says which statements are its own (`owns`) and emits them (`do`)."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.plan = kernel, kernel.plan
        # In the program's order: a set's is another in each process, and its code would be compiled anew.
        nodes = self.plan.program.nodes()
        scalars = dict.fromkeys(tile for node in nodes if isinstance(node, Assign) for tile in node.writes)
        self.locals = {tile.buffer: T.alloc_local(tile.shape, tile.dtype) for tile in scalars}

    def owns(self, node: Node) -> bool:
        """Whether this role does a statement."""
        raise NotImplementedError

    def do(self, node: Node, values: Values) -> None:
        """Emit a statement that the role owns."""
        raise NotImplementedError

    def tile(self, values: Values) -> None:
        """Emit the role's part of one tile of the grid."""
        self.body(self.plan.program.body, values | self.locals)

    def body(self, nodes: tuple[Node, ...], values: Values) -> None:
        for node in nodes:
            if self.owns(node):
                self.do(node, values)
            elif isinstance(node, Loop) and self.concerns(node.body):
                start, extent = (substitute_in(value, values) for value in (node.start, node.extent))
                with T.serial(start, start + extent) as var:
                    self.body(node.body, values | {node.var: var})
            elif isinstance(node, Branch) and self.concerns(node.then + node.otherwise):
                with T.If(substitute_in(node.condition, values)):
                    with T.Then():
                        T.evaluate(0)  # an arm may have nothing for this role
                        self.body(node.then, values)
                    if self.concerns(node.otherwise):
                        with T.Else():
                            self.body(node.otherwise, values)
            elif isinstance(node, Let):
                values = values | {node.var: T.bind(substitute_in(node.value, values))}
            elif isinstance(node, Assign):
                indices = [substitute_in(index, values) for index in node.indices]
                T.buffer_store(self.locals[node.tile.buffer], substitute_in(node.value, values), indices)

    def concerns(self, nodes: tuple[Node, ...]) -> bool:
        """Whether a body has anything for this role."""
        return any(
            self.owns(node)
            or isinstance(node, Assign)
            or (isinstance(node, Loop) and self.concerns(node.body))
            or (isinstance(node, Branch) and self.concerns(node.then + node.otherwise))
            for node in nodes
        )
