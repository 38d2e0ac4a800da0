"""What a program does to the slabs of other devices: whether its waits and signals can order that at all.

A device's peers run beside it. So what they have written is there once one of them has said so, and what is stored to
them is theirs once they have been told. Which flag says which, the tests' interpreter judges; a program in which no
wait comes before such a load, or no signal behind such a store, is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tvm_axe.errors import TileError
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
from tvm_axe.tile.points import accesses
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.walking import substitute_in, tiles_of, walk


def check_peers(program: TileProgram) -> None:
    """Refuse loads of what peers write that are behind no wait, and stores to peers that are before no signal."""
    if program.devices > 1:
        left = _Order(program).body(program.body, {})
        for node, tile in left.items():
            raise TileError(
                f"{node}: it stores to slabs of {tile} that are other devices', and no ordered signal comes behind it, "
                "so nobody is told when they are written; valid is tile.signal(flags[owner, ...]) behind it, which the "
                "owner waits for"
            )


_Pending = dict[Node, Tile]
"""The stores to peers that no signal has announced yet, in order."""


class _Order:
    def __init__(self, program: TileProgram) -> None:
        self.device, self.analyzer, self.waited = program.device, program.analyzer(), False
        self.tiles = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
        self.names: dict[Any, Any] = {}
        for node in walk(program.body):
            if isinstance(node, Let):
                self.names[node.var] = substitute_in(node.value, self.names)
        self.shared = {
            tile for node in walk(program.body) for tile, index, stores in self.touched(node)
            if stores and not self.own(index)
        }  # fmt: skip

    def own(self, index: Any) -> bool:
        """Whether the slabs at an index of dimension 0 are the device's own, for certain."""
        return bool(self.analyzer.can_prove_equal(substitute_in(index, self.names), self.device))

    def touched(self, node: Node) -> Iterator[tuple[Tile, Any, bool]]:
        """The mesh tensors that a node loads from or stores to (True), each with its index of dimension 0."""
        if isinstance(node, Parallel):
            for access in accesses(node):
                if self.tiles[access.buffer].is_mesh:
                    yield self.tiles[access.buffer], access.indices[0], access.stores
        elif isinstance(node, Copy | Fill):
            for region in node.regions:
                if region.tile.is_mesh:
                    yield region.tile, region.start[0], region is node.dst
        for expression in node.scalars:
            for tile in () if isinstance(expression, int) else tiles_of(expression, self.tiles):
                if tile.is_mesh:
                    yield tile, 0, False

    def body(self, nodes: tuple[Node, ...], pending: _Pending) -> _Pending:
        for node in nodes:
            pending = _NODES.of(node)(self, node, pending)
        return pending

    def plain(self, node: Node, pending: _Pending) -> _Pending:
        for tile, index, stores in self.touched(node):
            if not stores and not self.waited and (tile in self.shared or not self.own(index)):
                why = "which peers store to" if tile in self.shared else "which are other devices'"
                raise TileError(
                    f"{node}: it loads from slabs of {tile}, {why}, and no wait comes before it, so nothing says that "
                    "they are written; valid is tile.wait(flags[me, ...]) before it, for a signal of their writer"
                )
            if stores and not self.own(index):
                pending = {**pending, node: tile}
        return pending

    def wait(self, node: Wait, pending: _Pending) -> _Pending:
        self.waited = True
        return pending

    def signal(self, node: Signal, pending: _Pending) -> _Pending:
        return {} if node.ordered else pending

    def branch(self, node: Branch, pending: _Pending) -> _Pending:
        """What is pending behind both arms, and what either adds."""
        pending = self.plain(node, pending)
        then, otherwise = (self.body(nodes, pending) for nodes in (node.then, node.otherwise))
        return {n: t for n, t in {**then, **otherwise}.items() if n not in pending or (n in then and n in otherwise)}

    def loop(self, node: Loop, pending: _Pending) -> _Pending:
        """Twice: what an iteration does comes before all of the next, too."""
        pending = self.plain(node, pending)
        return self.body(node.body, self.body(node.body, pending))


_NODES: TypeTable[Callable[[_Order, Any, _Pending], _Pending]] = TypeTable(
    "order between devices",
    {
        Assign: _Order.plain,
        Branch: _Order.branch,
        Copy: _Order.plain,
        Fill: _Order.plain,
        Gemm: _Order.plain,
        Let: _Order.plain,
        Loop: _Order.loop,
        Parallel: _Order.plain,
        Print: _Order.plain,
        Reduce: _Order.plain,
        Scan: _Order.plain,
        Sort: _Order.plain,
        Signal: _Order.signal,
        Wait: _Order.wait,
    },
)
