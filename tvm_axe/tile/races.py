"""What may not happen in no order: between the points of a `parallel`, and between blocks.

Only what is known without running the program is judged, at the first and the last iteration of what is around. Where
indices are data, loaded from a tensor or a tile, they may be equal unless the author says otherwise (`distinct`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import sym, tirx

from tvm_axe.analysis.expressions import alike
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
from tvm_axe.tile.points import Access, Scope, accesses
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.walking import variables_in


def check_parallel(parallel: Parallel, scope: Scope, tiles: dict[tirx.Buffer, Tile]) -> None:
    """Refuse accesses that leave a tile, points that store one element, and points that read what others store."""
    sure = scope.ends()
    for values in sure or scope.ends(maybe=True):
        touched = accesses(parallel, values)
        for access in touched if sure else ():
            _inside(parallel, access, tiles[access.buffer])
        joins = {tile for tile, _ in parallel.joins}  # in any order, and nothing else touches them
        for tile in parallel.writes:
            if tile in joins:
                continue
            of_tile = [access for access in touched if tiles[access.buffer] is tile]
            stores = [access for access in of_tile if access.stores]
            for store in stores:
                _spread(parallel, store)
                _told(parallel, store)
            _apart(parallel, of_tile, stores)


def _inside(parallel: Parallel, access: Access, tile: Tile) -> None:
    if not access.guard.exact:
        return
    for dimension, (index, size) in enumerate(zip(access.where, tile.shape)):
        if index is None or not isinstance(size, int):
            continue
        outside = access.guard.mask & ((index < 0) | (index >= size))
        if outside.any():
            point = int(np.argmax(outside))
            raise TileError(
                f"parallel: {access} is element {index[point]} of dimension {dimension} of {tile}, at "
                f"{_point(parallel, point)}; valid is 0 to {size - 1}; an `if` around, or T.if_then_else, leaves out "
                "points (both sides of `and` are evaluated)"
            )


def _spread(parallel: Parallel, store: Access) -> None:
    """Refuse a store whose index, and the conditions around it, don't depend on one of the variables."""
    if store.known:
        return  # judged element by element
    for var, extent in zip(parallel.vars, parallel.extents):
        if extent > 1 and var not in store.vars | store.guard.vars:
            raise TileError(
                f"parallel: {store} is stored by all {extent} points along {var.name}, in no order; valid is an index "
                f"that depends on {var.name}, or a `parallel` without it"
            )


def _told(parallel: Parallel, store: Access) -> None:
    """Refuse a store whose points are told apart by data alone, which may be equal."""
    if store.known or parallel.distinct:
        return
    known = [index for index in store.apart if index is not None]
    if len(known) == len(store.apart):
        return  # it is unknown, but no data
    active = np.flatnonzero(store.guard.mask)
    columns = np.stack([index[active] for index in known] or [np.zeros(len(active), "int64")])
    _, first, number = np.unique(columns, axis=1, return_index=True, return_inverse=True)
    number = number.reshape(-1)
    again = np.flatnonzero(first[number] != np.arange(len(active)))
    if len(again):
        one, other = int(active[first[number[again[0]]]]), int(active[again[0]])
        raise TileError(
            f"parallel: {store} is stored at {_point(parallel, one)} and at {_point(parallel, other)}, in no order, "
            "and the index is data, which may be equal there; valid are a loop over these points around, in order, "
            "tile.atomic_add of what is to be added, or parallel(..., distinct=True), which says that no two "
            "points store to one element"
        )


def _apart(parallel: Parallel, touched: list[Access], stores: list[Access]) -> None:
    """Refuse one element that a point stores and another point stores or loads."""
    known = [d for d in range(len(touched[0].where)) if all(access.where[d] is not None for access in touched)]
    clash = _clash(parallel, touched, known) if known or not touched[0].where else None
    if len(known) == len(touched[0].where):
        if clash is not None:
            raise TileError(
                f"parallel: {clash}; points run in no order: valid are elements of a point's own, or two `parallel`"
            )
        return
    if known and clash is None:
        return  # what is known of the indices tells all points apart, whatever the rest is
    for access in touched:
        other = next((store for store in stores if not _same(store, access)), None)
        if other is not None and not (access.stores and parallel.distinct):
            also = ", or distinct=True, which says that no two points store to one element" if access.stores else ""
            raise TileError(
                f"parallel: {other} is stored, and {access} of the same tile is "
                f"{'stored' if access.stores else 'read'} beside it: that no two points meet in one element can't "
                f"be shown where indices come from tensors; valid is one index for both, or two `parallel`{also}"
            )


def _clash(parallel: Parallel, touched: list[Access], dimensions: list[int]) -> str | None:
    """Which point touches what another stores, told by the indices in some dimensions alone; None if none does."""
    elements = _elements(touched, dimensions)
    owner = np.full(max(int(element.max(initial=0)) for element in elements) + 1, -1)
    points = np.arange(len(elements[0]))
    for store, element in zip(touched, elements):
        if store.stores:
            active = store.guard.mask
            found = _meet(parallel, store, element, owner, "stored")
            owner[element[active]] = points[active]
            found = found or _meet(parallel, store, element, owner, "stored")
            if found is not None:
                return found
    loads = (pair for pair in zip(touched, elements) if not pair[0].stores)
    return next(filter(None, (_meet(parallel, load, element, owner, "read") for load, element in loads)), None)


def _meet(parallel: Parallel, access: Access, element: np.ndarray, owner: np.ndarray, what: str) -> str | None:
    points = np.arange(len(element))
    clash = access.guard.mask & (owner[element] != -1) & (owner[element] != points)
    if not clash.any():
        return None
    point = int(np.argmax(clash))
    where = ", ".join("?" if index is None else str(index[point]) for index in access.where)
    return (
        f"{access} is {what} at {_point(parallel, point)}, and that element, [{where}], is stored at "
        f"{_point(parallel, int(owner[element[point]]))}"
    )


def _elements(touched: list[Access], dimensions: list[int]) -> list[np.ndarray]:
    """A number for the element that each access touches at each point, the same for the same indices in dimensions."""
    columns = [np.stack([access.where[d] for access in touched]) for d in dimensions]
    numbers = np.zeros((len(touched), len(touched[0].guard.mask)), "int64")
    for column in columns:
        numbers = numbers * (int(np.ptp(column)) + 1) + column - column.min()
    return list(numbers)


def _same(a: Access, b: Access) -> bool:
    return alike(a.indices, b.indices)


def _point(parallel: Parallel, number: int) -> str:
    coordinates = np.unravel_index(number, parallel.extents)
    return ", ".join(f"{var.name}={x}" for var, x in zip(parallel.vars, coordinates))


# ---- Blocks ----------------------------------------------------------------------------------------------------------


def check_blocks(program: TileProgram) -> None:
    """Refuse what several blocks store to the same elements of a tensor, or flags that they set, in no order.

    Of a mesh tensor, what several devices do as well.
    """
    grid = {var: extent for var, extent in program.grid if not (isinstance(extent, int) and extent == 1)}
    device = {program.device: program.devices} if program.device is not None and program.devices > 1 else {}
    _Blocks(grid, device, program.analyzer()).statements(program.body, frozenset())


class _Blocks:
    """Finds which of the grid's variables, and of the device, each value may depend on.

    `behind` has those of names and local tiles.

    `runs` is False in the arm of a branch that is proved never to be taken.
    """

    def __init__(self, grid: dict[tirx.Var, Any], device: dict[tirx.Var, Any], analyzer: sym.Analyzer) -> None:
        self.grid, self.analyzer, self.runs = grid, analyzer, True
        self.with_device = {**grid, **device}
        self.behind: dict[tirx.Var, frozenset[tirx.Var]] = {var: frozenset([var]) for var in self.with_device}

    def sharing(self, tile: Tile) -> dict[tirx.Var, Any]:
        """The variables that tell apart who touches a tensor, and how many values each has."""
        return self.with_device if tile.is_mesh else self.grid

    def of(self, *values: Any) -> frozenset[tirx.Var]:
        """The variables that a value depends on; all of them if it is loaded from what was stored before."""
        return frozenset().union(*(self.behind.get(var, frozenset()) for var in variables_in(*values)))

    def statements(self, body: tuple[Node, ...], around: frozenset[tirx.Var]) -> None:
        """Walk in order; `around` are the variables that decide whether the body runs at all."""
        for node in body:
            _NODES.of(node)(self, node, around)

    def let(self, node: Let, around: frozenset[tirx.Var]) -> None:
        self.behind[node.var] = self.of(node.value)

    def assign(self, node: Assign, around: frozenset[tirx.Var]) -> None:
        known = self.behind.get(node.tile.buffer, frozenset())
        self.behind[node.tile.buffer] = known | around | self.of(node.value, *node.indices)

    def branch(self, node: Branch, around: frozenset[tirx.Var]) -> None:
        inner, runs = around | self.of(node.condition), self.runs
        for nodes, never in ((node.then, tirx.Not(node.condition)), (node.otherwise, node.condition)):
            self.runs = runs and not self.analyzer.can_prove(never)
            self.statements(nodes, inner)
        self.runs = runs

    def loop(self, node: Loop, around: frozenset[tirx.Var]) -> None:
        # Twice, as what an iteration assigns the next one reads.
        for _ in range(2):
            self.behind[node.var] = self.of(node.start, node.extent)
            self.statements(node.body, around | self.of(*node.operands[1:]))

    def on_chip(self, node: Gemm | Reduce, around: frozenset[tirx.Var]) -> None:
        """What is stored on chip may be anything."""
        for tile in node.writes:
            self.behind[tile.buffer] = frozenset(self.with_device)

    def region(self, node: Copy | Fill, around: frozenset[tirx.Var]) -> None:
        """What is stored on chip may be anything; in a tensor its place counts."""
        tile = node.dst.tile
        if tile.scope != "global":
            self.behind[tile.buffer] = frozenset(self.with_device)
        elif not node.joins:
            self.refuse(node, tile, around | self.of(*node.dst.start))

    def parallel(self, node: Parallel, around: frozenset[tirx.Var]) -> None:
        """The same of every element that is stored."""
        for tile, _ in node.joins:
            self.behind[tile.buffer] = frozenset(self.with_device)  # a former value may be anything
        for tile in node.writes:
            if tile.scope != "global":
                self.behind[tile.buffer] = frozenset(self.with_device)
                continue
            for access in accesses(node):
                if access.stores and not access.atomic and access.buffer.same_as(tile.buffer):
                    self.refuse(node, tile, around | self.of(*access.vars, *access.guard.vars))

    def nothing(self, node: Print, around: frozenset[tirx.Var]) -> None:
        """It stores nothing."""

    def flags(self, node: Wait | Signal, around: frozenset[tirx.Var]) -> None:
        """Refuse flags that several blocks set, each for itself, or reset, which only the first of them would see."""
        harmless = not node.reset if isinstance(node, Wait) else node.add or not node.ordered
        if harmless or not self.runs:
            return
        found = around | self.of(*node.flags.start)
        for var, count in self.sharing(node.flags.tile).items():
            if var not in found:
                does, valid = "wait for and reset", "reset=False"
                if isinstance(node, Signal):
                    does, valid = "set", "add=True, and a wait for as many"
                raise TileError(
                    f"{node}: all {self._who(var, count)} {does} the same flags of {node.flags.tile}, "
                    f"in no order, so the first alone decides; valid are flags, or an `if`, that depend on {var.name}, "
                    f"or {valid}"
                )

    def refuse(self, node: Node, tile: Tile, found: frozenset[tirx.Var]) -> None:
        """Refuse a store to a tensor that is in the same place for all of a grid variable's blocks."""
        for var, count in self.sharing(tile).items():
            if var in found:
                continue
            raise TileError(
                f"{node}: all {self._who(var, count)} store to one part of {tile}, in no order; valid "
                f"is a place, or an `if`, that depends on {var.name}, or tile.atomic_add"
            )

    def _who(self, var: tirx.Var, count: Any) -> str:
        return f"{count} blocks along {var.name}" if var in self.grid else f"{count} devices"


_NODES: TypeTable[Callable[[_Blocks, Any, frozenset[tirx.Var]], None]] = TypeTable(
    "races of blocks",
    {
        Assign: _Blocks.assign,
        Branch: _Blocks.branch,
        Copy: _Blocks.region,
        Fill: _Blocks.region,
        Gemm: _Blocks.on_chip,
        Let: _Blocks.let,
        Loop: _Blocks.loop,
        Parallel: _Blocks.parallel,
        Print: _Blocks.nothing,
        Reduce: _Blocks.on_chip,
        Scan: _Blocks.on_chip,
        Sort: _Blocks.on_chip,
        Signal: _Blocks.flags,
        Wait: _Blocks.flags,
    },
)
