"""Tensors in which a block may store to a place again.

Stores of different threads, and of the copies that TMA does, are in no order of their own (PTX ISA, "cp.async.bulk",
"Async proxy"). So between two statements that store to such a tensor is a barrier, in front of which threads wait until
the copies that they had TMA do are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, sym, tirx

from tvm_axe.tile.nodes import Branch, Copy, Fill, Let, Loop, Node, Parallel
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.walking import substitute_in

_MANY = 1 << 30  # more iterations than loops have


@dataclass(frozen=True)
class _Store:
    """What a statement stores to a tensor, not atomically.

    Attributes
    ----------
    node : Node
        The statement.
    first, last : tuple of Expr, or None
        The first and the last index along each dimension, where they are known; points are variables of `points`.
    points : tuple of (Var, int)
        The coordinates that the indices depend on, with how many values each has.
    loops : tuple of Loop
        The loops around it that may have more than one iteration.
    arms : frozenset of (Branch, int)
        The arms of branches that it is in.
    """

    node: Node
    first: tuple[Any, ...] | None
    last: tuple[Any, ...] | None
    points: tuple[tuple[tirx.Var, int], ...]
    loops: tuple[Loop, ...]
    arms: frozenset[tuple[Branch, int]]

    def again(self, analyzer: sym.Analyzer) -> bool:
        """Whether two iterations of a loop around it may store to the same place."""
        return any(not self._apart(loop, analyzer) for loop in self.loops)

    def _apart(self, loop: Loop, analyzer: sym.Analyzer) -> bool:
        """Whether a dimension tells each iteration of a loop from all that come later, or from all before."""
        if self.first is None or self.last is None:
            return False
        later = tirx.Var("later", loop.var.ty)
        analyzer.bind(later, ir.Range.from_min_extent(0, _MANY))
        others = {var: tirx.Var(f"{var.name}_", var.ty) for var, _ in self.points}
        for var, extent in self.points:
            for point in (var, others[var]):
                analyzer.bind(point, ir.Range.from_min_extent(0, extent), allow_override=True)
        moved = {loop.var: loop.var + 1 + later, **others}
        return any(
            analyzer.can_prove(substitute_in(first, moved) > last)
            or analyzer.can_prove(substitute_in(last, moved) < first)
            for first, last in zip(self.first, self.last)
        )

    def meets(self, other: _Store, analyzer: sym.Analyzer) -> bool:
        """Whether another statement may store to the same place: not in another arm, nor apart along a dimension."""
        if other.node is self.node or any((b, 1 - arm) in other.arms for b, arm in self.arms if not self.loops):
            return False
        if self.first is None or self.last is None or other.first is None or other.last is None:
            return True
        for var, extent in (*self.points, *other.points):
            analyzer.bind(var, ir.Range.from_min_extent(0, extent), allow_override=True)
        moved = {loop.var: tirx.Var(f"{loop.var.name}_", loop.var.ty) for loop in self.loops}
        sides = zip(self.first, self.last, other.first, other.last)
        return not any(
            analyzer.can_prove(substitute_in(last, moved) < its_first)
            or analyzer.can_prove(its_last < substitute_in(first, moved))
            for first, last, its_first, its_last in sides
        )


def overwritten(program: TileProgram) -> frozenset[Tile]:
    """Find the tensors in global memory in which a block may store to a place more than once, not atomically."""
    stores: dict[Tile, list[_Store]] = {}
    analyzer = program.analyzer()
    for tile, store in _Walk(analyzer).stores(program.body, (), frozenset()):
        stores.setdefault(tile, []).append(store)
    return frozenset(
        tile
        for tile, found in stores.items()
        if any(store.again(analyzer) for store in found)
        or any(a.meets(b, analyzer) for at, a in enumerate(found) for b in found[:at])
    )


_Place = tuple[Tile, tuple[Any, ...] | None, tuple[Any, ...] | None, tuple[tuple[tirx.Var, int], ...]]


class _Walk:
    def __init__(self, analyzer: sym.Analyzer) -> None:
        self.analyzer = analyzer
        self.names: dict[tirx.Var, tirx.Expr] = {}

    def stores(
        self, body: Sequence[Node], loops: tuple[Loop, ...], arms: frozenset[tuple[Branch, int]]
    ) -> Iterator[tuple[Tile, _Store]]:
        for node in body:
            if isinstance(node, Let):
                self.names[node.var] = substitute_in(node.value, self.names)
            elif isinstance(node, Loop):
                once = self.analyzer.can_prove(node.extent <= 1)
                yield from self.stores(node.body, loops if once else (*loops, node), arms)
            elif isinstance(node, Branch):
                yield from self.stores(node.then, loops, arms | {(node, 0)})
                yield from self.stores(node.otherwise, loops, arms | {(node, 1)})
            else:
                for tile, first, last, points in self.places(node):
                    yield tile, _Store(node, first, last, points, loops, arms)

    def places(self, node: Node) -> Iterator[_Place]:
        """The tensors that a statement stores to; of each the first and last indices, and points that these are of."""
        if isinstance(node, Copy | Fill):
            if node.dst.tile.scope == "global" and not (isinstance(node, Copy) and node.atomic):
                first = tuple(substitute_in(start, self.names) for start in node.dst.start)
                last = tuple(start + extent - 1 for start, extent in zip(first, node.dst.extents))
                yield node.dst.tile, first, last, ()
        elif isinstance(node, Parallel):
            joined = {tile for tile, _ in node.joins}
            for tile, indices, stores in node.accesses:
                if stores and tile.scope == "global" and tile not in joined:
                    at = tuple(substitute_in(index, self.names) for index in indices)
                    yield tile, at, at, tuple(zip(node.vars, node.extents))
        else:
            yield from ((tile, None, None, ()) for tile in node.writes if tile.scope == "global")
