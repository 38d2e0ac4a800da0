"""A role of one thread: it runs the program's loops and branches for the statements that are its own.

It computes names and local tiles for itself, as all roles do, so that none waits for what another knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

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
from tvm_axe.tile.targets.cuda.specialized.barriers import BlockContext, Values
from tvm_axe.tile.walking import substitute_in


class OneThread:
    """What roles of one thread share.

    Parameters
    ----------
    context : BlockContext
        The ground on which all roles stand.
    code : TypeTable
        The code of each kind of node that may be the role's own; the role says of a node whether it is (`owns`).
    """

    def __init__(self, context: BlockContext, code: TypeTable[Callable[[Any, Any, Values], None]]) -> None:
        self.code = code
        self.context, self.plan = context, context.plan
        # In the program's order: a set's is another in each process, and its code would be compiled anew.
        nodes = self.plan.program.nodes()
        scalars = dict.fromkeys(tile for node in nodes if isinstance(node, Assign) for tile in node.writes)
        self.locals = {tile.buffer: T.alloc_local(tile.shape, tile.dtype) for tile in scalars}

    def owns(self, node: Node) -> bool:
        """Whether this role does a statement."""
        raise NotImplementedError

    def tile(self, values: Values) -> None:
        """Emit the role's part of one tile of the grid."""
        self.body(self.plan.program.body, values | self.locals)

    def body(self, nodes: tuple[Node, ...], values: Values) -> None:
        """Emit the role's part of nodes, in order."""
        for node in nodes:
            if self.owns(node):
                self.code.of(node)(self, node, values)
            else:
                values = values | (_SHARED.of(node)(self, node, values) or {})

    def _loop(self, node: Loop, values: Values) -> None:
        if self.concerns(node.body):
            start, extent = (substitute_in(value, values) for value in (node.start, node.extent))
            with T.serial(start, start + extent) as var:
                self.body(node.body, values | {node.var: var})

    def _branch(self, node: Branch, values: Values) -> None:
        if not self.concerns(node.then + node.otherwise):
            return
        with T.If(substitute_in(node.condition, values)):
            with T.Then():
                T.evaluate(0)  # an arm may have nothing for this role
                self.body(node.then, values)
            if self.concerns(node.otherwise):
                with T.Else():
                    self.body(node.otherwise, values)

    def _let(self, node: Let, values: Values) -> Values:
        return {node.var: T.bind(substitute_in(node.value, values))}

    def _assign(self, node: Assign, values: Values) -> None:
        indices = [substitute_in(index, values) for index in node.indices]
        T.buffer_store(self.locals[node.tile.buffer], substitute_in(node.value, values), indices)

    def _others(self, node: Node, values: Values) -> None:
        """What is another role's."""

    def concerns(self, nodes: tuple[Node, ...]) -> bool:
        """Whether a body has anything for this role."""
        return any(
            self.owns(node) or isinstance(node, Assign) or any(self.concerns(body) for body in node.bodies)
            for node in nodes
        )


_SHARED: TypeTable[Callable[[OneThread, Any, Values], Values | None]] = TypeTable(
    "what all roles do of a node that is none's own",
    {
        Assign: OneThread._assign,
        Branch: OneThread._branch,
        Copy: OneThread._others,
        Fill: OneThread._others,
        Gemm: OneThread._others,
        Let: OneThread._let,
        Loop: OneThread._loop,
        Parallel: OneThread._others,
        Print: OneThread._others,
        Reduce: OneThread._others,
        Scan: OneThread._others,
        Sort: OneThread._others,
        Signal: OneThread._others,
        Wait: OneThread._others,
    },
)
