"""What a program's blocks do that others may see, in order, with nothing computed for it.

Where loops, branches and indices depend on the device, the block and loops alone, it is known what a block waits for,
what it signals, and which elements of tensors it loads and stores.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, tirx

from tvm_axe.tile.nodes import Branch, Let, Loop, Node, Parallel, Signal, Wait
from tvm_axe.tile.points import accesses, evaluate
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.walking import walk

BUDGET = 20_000
"""The most steps of all blocks of all devices that are gone through, a fraction of a second's worth."""

POINTS = 1024
"""How many points of a `parallel` count as a step."""

LOADS, STORES, JOINS = "loads", "stores", "joins"
"""How elements are touched: joins are atomic."""

Flag = tuple[Tile, int, tuple[int, ...]]
"""A flag: the tensor, the device whose it is, and its place; -1 for a mesh tensor, which is everybody's."""


class Unknown(Exception):
    """Data decides who waits or signals, or there is too much of it."""


@dataclass(frozen=True)
class Block:
    """A block of a device.

    Attributes
    ----------
    device : int
        The device's number.
    point : tuple of int
        The block's place in the grid.
    values : dict of Var to array
        The coordinates of the block and of the device.
    where : str
        These in words, as ``me=0, i=1``.
    """

    device: int
    point: tuple[int, ...]
    values: dict[tirx.Var, Any]
    where: str


@dataclass(frozen=True)
class Event:
    """A wait or a signal of one block, on flags of known places, with a known value."""

    node: Wait | Signal
    flags: tuple[Flag, ...]
    value: int
    where: str


@dataclass(frozen=True)
class Touch:
    """What a node of one block does to elements of a tensor.

    Attributes
    ----------
    node : Node
        The node.
    tile : Tile
        The tensor.
    home : int
        The device whose it is; -1 for a mesh tensor.
    how : str
        `LOADS`, `STORES` or `JOINS`.
    low, high : array
        The least index along each dimension, and the first behind the largest.
    elements : array or None
        The indices of the elements, a row for each dimension, where they are fewer than the box has.
    where : str
        The device and the block.
    """

    node: Node
    tile: Tile
    home: int
    how: str
    low: np.ndarray
    high: np.ndarray
    elements: np.ndarray | None
    where: str


def places_in(program: TileProgram) -> int:
    """How many places the grid has, those of a block on each device; 0 if an extent isn't constant."""
    extents = [extent for _, extent in program.grid]
    return math.prod(extents) if all(isinstance(extent, int) for extent in extents) else 0


def blocks_at(program: TileProgram, number: int) -> list[Block]:
    """The blocks of all devices at one place of the grid, by its number in order."""
    point = tuple(int(x) for x in np.unravel_index(number, [extent for _, extent in program.grid]))
    return [_block(program, device, point) for device in range(program.devices)]


def _block(program: TileProgram, device: int, point: tuple[int, ...]) -> Block:
    values: dict[tirx.Var, Any] = {var: np.asarray(x) for (var, _), x in zip(program.grid, point)}
    named = [f"{var.name}={x}" for (var, _), x in zip(program.grid, point)]
    if program.device is not None:
        values[program.device] = np.asarray(device)
        named.insert(0, f"{program.device.name}={device}")
    return Block(device, point, values, ", ".join(named))


def boxes(node: Node, tiles: dict[tirx.Buffer, Tile]) -> Iterator[tuple[Region, str]]:
    """The parts of tensors in global memory that a node touches by itself, and how; those of a `parallel` apart."""
    if not isinstance(node, Wait | Signal):
        joined = {tile for tile, _ in node.joins}
        for region in node.regions:
            if region.tile.scope == "global":
                stores = region is getattr(node, "dst", None)
                yield region, LOADS if not stores else JOINS if region.tile in joined else STORES
    loads: list[ir.TensorLoad] = []
    for expression in node.scalars:
        if not isinstance(expression, int):
            tvm_ffi.structural_walk(expression, (ir.TensorLoad, loads.append))
    for load in loads:
        tile = tiles[load.source]
        if tile.scope == "global":
            yield Region(tile, tuple(load.indices), (1,) * len(load.indices)), LOADS


class Events:
    """Goes through blocks of a program.

    Parameters
    ----------
    program : TileProgram
        The program.
    judged : collection of Tile
        The flags whose waits and signals are events.
    touched : collection of Tile
        The tensors of which it is an event that elements are touched, where it is known which, and that they are.
    budget : int
        The most steps that are gone through, of all blocks together.

    Attributes
    ----------
    left : int
        How many of these are left; less than 0 where there were too few.
    data_decides : bool
        Whether something was left out, as data says where it is, or whether it is done.
    """

    def __init__(
        self, program: TileProgram, judged: Collection[Tile], touched: Collection[Tile] = (), budget: int = BUDGET
    ) -> None:
        self._program, self._judged, self._touched, self.left = program, judged, touched, budget
        self.data_decides = False
        self._tiles = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
        self._counts = {
            scalar: np.asarray(1) for scalar in program.scalars if "int" in str(scalar.ty)
        }  # what is given counts as 1 where it is a value
        self._meets = {
            node for node in program.nodes() if any(isinstance(inner, Wait | Signal) for inner in walk((node,)))
        }
        self._boxes: dict[Node, list[tuple[Region, str]]] = {}
        self._points: set[Node] = set()
        for node in program.nodes() if touched else ():
            of_node = [(region, how) for region, how in boxes(node, self._tiles) if region.tile in touched]
            if of_node:
                self._boxes[node] = of_node
            if isinstance(node, Parallel) and any(tile in touched for tile, _, _ in node.accesses):
                self._points.add(node)
        own = self._boxes.keys() | self._points
        self._touches = {node for node in program.nodes() if any(inner in own for inner in walk((node,)))}

    def of(self, block: Block) -> Iterator[Event | Touch]:
        """What a block does, in order.

        Raises
        ------
        Unknown
            Data decides about what comes next, or it is more than the budget's steps.
        """
        try:
            yield from self._body(self._program.body, dict(block.values), block)
        except Unknown:
            self.data_decides = self.data_decides or self.left >= 0
            raise

    def _body(self, body: Sequence[Node], values: dict[tirx.Var, Any], block: Block) -> Iterator[Event | Touch]:
        for node in body:
            self.left -= 1
            if self.left < 0:
                raise Unknown
            if isinstance(node, Let):
                values[node.var] = evaluate(node.value, values)
            for region, how in self._boxes.get(node, ()):
                yield from self._box(node, region, how, values, block)
            if isinstance(node, Parallel) and node in self._points:
                yield from self._elements(node, values, block)
            elif isinstance(node, Branch):
                yield from self._branch(node, values, block)
            elif isinstance(node, Loop):
                yield from self._loop(node, values, block)
            elif isinstance(node, Wait | Signal) and node.flags.tile in self._judged:
                first = [_known(index, values) for index in node.flags.start]
                home = -1 if node.flags.tile.is_mesh else block.device
                flags = tuple(
                    (node.flags.tile, home, tuple(f + o for f, o in zip(first, offsets)))
                    for offsets in np.ndindex(*node.flags.extents)
                )
                yield Event(node, flags, _known(node.value, {**self._counts, **values}), block.where)

    def _branch(self, node: Branch, values: dict[tirx.Var, Any], block: Block) -> Iterator[Event | Touch]:
        if node in self._meets:
            holds = bool(_known(node.condition, values))
        elif node in self._touches:
            truth = evaluate(node.condition, values)
            if truth is None:
                self.data_decides = True
                return
            holds = bool(truth)
        else:
            return
        yield from self._body(node.then if holds else node.otherwise, values, block)

    def _loop(self, node: Loop, values: dict[tirx.Var, Any], block: Block) -> Iterator[Event | Touch]:
        if node not in self._meets and node not in self._touches:
            return
        start, extent = (evaluate(each, values) for each in (node.start, node.extent))
        if start is None or extent is None or node.until is not None:
            self.data_decides = True
            if node in self._meets:
                raise Unknown
            return
        for step in range(int(extent)):
            values[node.var] = np.asarray(int(start) + step)
            yield from self._body(node.body, values, block)

    def _box(self, node: Node, region: Region, how: str, values: dict[tirx.Var, Any], block: Block) -> Iterator[Touch]:
        first = [evaluate(index, values) for index in region.start]
        if any(index is None for index in first):
            self.data_decides = True
        else:
            low = np.array([int(index) for index in first], "int64")
            ends = zip(low, region.extents, region.tile.shape)
            high = np.array([min(a + n, size) if isinstance(size, int) else a + n for a, n, size in ends], "int64")
            if (low < high).all():
                home = -1 if region.tile.is_mesh else block.device
                yield Touch(node, region.tile, home, how, low, high, None, block.where)

    def _elements(self, node: Parallel, values: dict[tirx.Var, Any], block: Block) -> Iterator[Touch]:
        self.left -= math.prod(node.extents) // POINTS
        for access in accesses(node, {var: value for var, value in values.items() if value is not None}):
            tile = self._tiles[access.buffer]
            if tile not in self._touched:
                continue
            if not (access.known and access.guard.exact):
                self.data_decides = True
            elif access.guard.mask.any():
                where = np.stack(access.where)[:, access.guard.mask]
                low, high = where.min(axis=1), where.max(axis=1) + 1
                distinct = np.unique(np.ravel_multi_index(tuple(where - low[:, None]), tuple(high - low)))
                elements = None
                if len(distinct) < math.prod((high - low).tolist()):
                    elements = np.stack(np.unravel_index(distinct, tuple(high - low))) + low[:, None]
                how = JOINS if access.atomic else STORES if access.stores else LOADS
                home = -1 if tile.is_mesh else block.device
                yield Touch(node, tile, home, how, low, high, elements, block.where)


def _known(expr: Any, values: dict[tirx.Var, Any]) -> int:
    """The value of an expression that all must know."""
    found = evaluate(expr, values)
    if found is None:
        raise Unknown
    return int(found)
