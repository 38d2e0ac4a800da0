"""What a program does to the slabs of other devices: whether its waits and signals can order that at all.

A device's peers run beside it. So what they have written is there once one of them has said so, and what is stored to
them is theirs once they have been told. Which flag says which, `tvm_axe.tile.clocks` finds where it is known; a program
in which no wait comes before such a load, or no signal behind such a store, is refused here, whatever its indices are.
A device's own slab may be loaded from before any wait, where peers store to other elements, or wait themselves before
they do: an exchange in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_axe.errors import TileError
from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.events import LOADS, boxes
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
from tvm_axe.tile.points import accesses, evaluate
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.walking import substitute_in, walk


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


@dataclass(frozen=True)
class _Touch:
    """What a node does to a mesh tensor: the first element along each dimension, how many, and whether it stores."""

    tile: Tile
    start: tuple[Any, ...]
    extents: tuple[int, ...]
    stores: bool


class _Order:
    def __init__(self, program: TileProgram) -> None:
        self.device, self.analyzer, self.waited = program.device, program.analyzer(), False
        self.devices = range(program.devices)
        self.tiles = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
        self.names: dict[Any, Any] = {}
        for node in walk(program.body):
            if isinstance(node, Let):
                self.names[node.var] = substitute_in(node.value, self.names)
        nodes = tuple(walk(program.body))
        first = next((at for at, node in enumerate(nodes) if isinstance(node, Wait)), len(nodes))
        self.shared = {touch.tile for node in nodes for touch in self.to_peers(node)}
        self.early = [touch for node in nodes[:first] for touch in self.to_peers(node)]

    def own(self, index: Any) -> bool:
        """Whether the slabs at an index of dimension 0 are the device's own, for certain."""
        return bool(self.analyzer.can_prove_equal(substitute_in(index, self.names), self.device))

    def to_peers(self, node: Node) -> list[_Touch]:
        """What a node stores to slabs that may be other devices'."""
        return [touch for touch in self.touched(node) if touch.stores and not self.own(touch.start[0])]

    def meets(self, load: _Touch) -> bool:
        """Whether a peer may store to what a device loads from its own slab, before either has waited for anybody."""
        return any(
            store.tile is load.tile and self.may_meet(load, device, store, peer)
            for store in self.early
            for device in self.devices
            for peer in self.devices
            if peer != device
        )

    def may_meet(self, load: _Touch, device: int, store: _Touch, peer: int) -> bool:
        """Whether elements that a device loads may be among those that a peer stores, as far as indices are known."""
        for one, size, other, count in zip(load.start, load.extents, store.start, store.extents):
            a, b = self.known(one, device), self.known(other, peer)
            if a is not None and b is not None and (a + size <= b or b + count <= a):
                return False
        return True

    def known(self, index: Any, device: int) -> int | None:
        """An index on a device; None where it depends on more than that."""
        found = evaluate(substitute_in(index, self.names), {self.device: np.asarray(device)})
        return None if found is None else int(found)

    def touched(self, node: Node) -> Iterator[_Touch]:
        """What a node itself loads from mesh tensors and stores to them."""
        if isinstance(node, Parallel):
            for access in accesses(node):
                tile = self.tiles[access.buffer]
                if tile.is_mesh:
                    yield _Touch(tile, tuple(access.indices), (1,) * len(tile.shape), access.stores)
        for region, how in boxes(node, self.tiles):
            if region.tile.is_mesh:
                yield _Touch(region.tile, region.start, region.extents, how != LOADS)

    def body(self, nodes: tuple[Node, ...], pending: _Pending) -> _Pending:
        for node in nodes:
            pending = _NODES.of(node)(self, node, pending)
        return pending

    def plain(self, node: Node, pending: _Pending) -> _Pending:
        for touch in self.touched(node):
            tile, own = touch.tile, self.own(touch.start[0])
            if not touch.stores and not self.waited and (not own or self.meets(touch)):
                why = "which peers store to" if own else "which are other devices'"
                written = (
                    ""
                    if own or tile in self.shared
                    else (
                        "; that kernels before this one have ended, which may have written them, "
                        "tile.signal(flags[...], ordered=False) on every device says"
                    )
                )
                raise TileError(
                    f"{node}: it loads from slabs of {tile}, {why}, and no wait comes before it, so nothing says that "
                    f"they are written; valid is tile.wait(flags[me, ...]) before it, for a signal of their writer"
                    f"{written}"
                )
            if touch.stores and not own:
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
