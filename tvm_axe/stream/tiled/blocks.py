"""What a block of a tile program does, as steps and nests of loops, and the values that go between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import tvm_ffi
from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.stream.tiled.boxes import Box
from tvm_axe.stream.tiled.lines import Lines
from tvm_axe.stream.tiled.points import Points, Side
from tvm_axe.stream.tiled.step import Step
from tvm_axe.stream.tiled.steps import Steps
from tvm_axe.tile.nodes import Assign, Branch, Let, Loop, Node, Parallel
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Region
from tvm_axe.tile.regions import Tile as TileBuffer
from tvm_axe.tile.walking import walk


@dataclass(frozen=True, eq=False)
class Nest:
    """A loop in a block."""

    node: Loop
    block: Block

    @property
    def reads(self) -> tuple[TileBuffer, ...]:
        """The tiles whose contents from before the loop are needed."""
        return self.block.exposed

    @property
    def writes(self) -> tuple[TileBuffer, ...]:
        """The tiles that have new contents behind it."""
        return self.block.writes


@dataclass(frozen=True, eq=False)
class Guard:
    """What is done in some iterations only, and leaves nothing in tiles on chip."""

    node: Branch
    block: Block

    @property
    def reads(self) -> tuple[TileBuffer, ...]:
        """The tiles whose contents from before it are needed."""
        return self.block.exposed

    @property
    def writes(self) -> tuple[TileBuffer, ...]:
        """No tiles."""
        return ()


Item: TypeAlias = Step | Nest | Guard


@dataclass(frozen=True, eq=False)
class Block:
    """What is done in each iteration of a nest of loops.

    Attributes
    ----------
    points : Points
        The iterations.
    items : tuple[Step or Nest, ...]
        What is done, in order.
    """

    points: Points
    items: tuple[Item, ...]

    @cached_property
    def exposed(self) -> tuple[TileBuffer, ...]:
        """The tiles that are read before they are written."""
        return exposed(self.items)

    @cached_property
    def writes(self) -> tuple[TileBuffer, ...]:
        """The tiles that are written."""
        return tuple(dict.fromkeys(tile for item in self.items for tile in item.writes))

    def steps(self) -> Iterable[Step]:
        """Return all steps, those of loops in it too."""
        for item in self.items:
            if isinstance(item, Step):
                yield item
            else:
                yield from item.block.steps()


def exposed(items: Iterable[Item]) -> tuple[TileBuffer, ...]:
    """Return the tiles that are read before they are written."""
    found: dict[TileBuffer, None] = {}
    written: set[TileBuffer] = set()
    for item in items:
        found.update(dict.fromkeys(tile for tile in item.reads if tile not in written))
        written.update(item.writes)
    return tuple(found)


def pruned(block: Block, lines: Lines, wanted: Iterable[TileBuffer] = (), loop: bool = False) -> Block:
    """Return a block without what makes contents that nothing takes.

    Parameters
    ----------
    lines : Lines
        Where statements stand.
    wanted : Iterable[Tile]
        The tiles that something behind it reads.
    loop : bool
        Whether an iteration begins with what the one before has left.

    Raises
    ------
    StreamError
        If a side of a choice leaves something in a tile that is read elsewhere.
    """
    behind = {*wanted}
    while True:
        live, kept = {*behind}, list[Item]()
        for item in reversed(block.items):
            if isinstance(item, Nest):
                inner = pruned(item.block, lines, live, loop=True)
                if inner.items:
                    live.difference_update(inner.writes if inner.points.always else ())
                    kept.append(Nest(item.node, inner))
            elif isinstance(item, Guard):
                for tile in live.intersection(item.block.writes):
                    raise lines.refuse(
                        item.node,
                        f"it leaves {tile.name} to what is behind it, in some iterations only; put what reads it into "
                        "the branch, or take loops and stores out of it",
                    )
                inner = pruned(item.block, lines)
                if inner.items:
                    kept.append(Guard(item.node, inner))
            elif item.store is not None or live.intersection(item.writes):
                live.difference_update(item.writes)
                kept.append(item)
            if kept:
                live.update(kept[-1].reads)
        if not loop or live <= behind:
            return Block(block.points, tuple(reversed(kept)))
        behind |= live


def block_of(
    program: TileProgram, known: Mapping[tirx.Var, Any], tensors: Mapping[tirx.Var, np.ndarray], lines: Lines
) -> Block:
    """Return what a program does, in each iteration of its grid, for what it stores.

    Parameters
    ----------
    known : Mapping
        The values of its scalars and of the variables in its shapes.
    tensors : Mapping
        The arrays of tensors that say which tiles come, and how often loops run.

    Raises
    ------
    StreamError
        If streams have nothing for a statement.
    """
    points = Points.outside(known, tensors)
    for var, extent in program.grid:
        points = points.inside(var, 0, extent, str(var.name))
    return pruned(_Reader(program, points, lines).block(program.body, points), lines)


class _Reader:
    def __init__(self, program: TileProgram, grid: Points, lines: Lines) -> None:
        self.lines, self.analyzer = lines, program.analyzer()
        self.numbers = _numbers(program, grid)

    def block(self, body: Sequence[Node], points: Points) -> Block:
        return Block(points, tuple(self._items(body, points)))

    def _items(self, body: Sequence[Node], points: Points) -> Iterable[Item]:
        steps = Steps(points, self.analyzer, self.lines)
        for written in body:
            node = self._settled(written)
            if isinstance(node, Let):
                points.named(node.var, self._at_hand(written, node.value, points))
            elif isinstance(node, Assign) and node.tile in self.numbers:
                points.named(self.numbers[node.tile], self._at_hand(written, node.value, points))
            elif isinstance(node, Loop):
                yield self._nest(written, node, points)
            elif isinstance(node, Branch):
                yield from self._branch(written, node, points, steps)
            else:
                yield from steps.of(node)

    def _settled(self, node: Node) -> Node:
        """Return a node with variables in the place of numbers that are known before the program runs."""
        found = {tile.buffer: var for tile, var in self.numbers.items()}

        def replaced(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(replaced, value))
            if isinstance(value, Region):
                return replace(value, start=replaced(value.start))
            if not isinstance(value, (ir.Expr, tirx.Stmt)):
                return value
            return _tvm.structural_map(value, (ir.TensorLoad, lambda load: found.get(load.source, load)))

        if not found:
            return node
        names = {each.name for each in fields(node)} - {"body", "then", "otherwise", "var", "vars"}
        if isinstance(node, Parallel):
            names.add("body")
        changed = {name: replaced(getattr(node, name)) for name in names}
        if isinstance(node, Assign):
            changed["reads"] = tuple(tile for tile in node.reads if tile not in self.numbers)
        made = replace(node, **changed)
        self.lines.same(made, node)
        return made

    def _nest(self, written: Node, node: Loop, points: Points) -> Nest:
        if node.until is not None:
            raise self.lines.refuse(
                written, "how often it runs is data; let it run to the end, and compute nothing new from there on"
            )
        start, extent = (self._at_hand(written, each, points) for each in (node.start, node.extent))
        return Nest(node, self.block(node.body, points.inside(node.var, start, extent, str(node.var.name))))

    def _branch(self, written: Node, node: Branch, points: Points, steps: Steps) -> Iterable[Item]:
        """Return what is in a branch.

        It is what one side does, where that is always taken. Else steps on tiles are guarded by its condition, and
        where there are loops or stores each side has iterations of its own.
        """
        holds = points.at(self._at_hand(written, node.condition, points)).astype(bool)
        if holds.all() or not holds.any():
            yield from self._items(node.then if holds.all() else node.otherwise, points)
        elif any(each.bodies or _stores(each) for each in walk(node.then + node.otherwise)):
            for side, first in ((node.then, True), (node.otherwise, False)):
                if side:
                    yield Guard(node, self.block(side, points.on(Side(points, holds, first))))
        else:
            for side, condition in ((node.then, node.condition), (node.otherwise, tirx.Not(node.condition))):
                for item in self._items(side, points):
                    assert isinstance(item, Step)
                    yield steps.guarded(item, condition)

    def _at_hand(self, written: Node, value: Any, points: Points) -> Any:
        """Return an expression whose value is known before the program runs.

        Raises
        ------
        StreamError
            If it is data of a tensor or a tile.
        """
        if points.settles(value):
            return value
        found: list[Any] = []
        tvm_ffi.structural_walk(value, (ir.TensorLoad, found.append))
        what = f"{found[0]} is data" if found else f"{value} is known in an inner loop alone"
        raise self.lines.refuse(
            written, f"{what}, and what streams go where is settled before; pass the tensor that it is of in `given`"
        )


def _numbers(program: TileProgram, points: Points) -> dict[TileBuffer, tirx.Var]:
    """Return the local tiles of one number that is known before the program runs, each with a variable for it.

    All that they are assigned is made of variables, of tensors that are given and of other such numbers, and they are
    read in the iteration that assigns them.
    """
    found: dict[TileBuffer, list[Assign]] = {}
    others: set[TileBuffer] = set()
    for node in program.nodes():
        if isinstance(node, Assign) and all(extent == 1 for extent in node.tile.shape):
            found.setdefault(node.tile, []).append(node)
        elif not node.bodies:
            others.update(node.writes)
    found = {tile: nodes for tile, nodes in found.items() if tile not in others and not _leaves(program.body, tile)}
    while True:
        known = {tile.buffer for tile in found}
        kept = {
            tile: nodes
            for tile, nodes in found.items()
            if all(source in known or points.gives(source) for node in nodes for source in _loaded(node.value))
        }
        if len(kept) == len(found):
            return {tile: tirx.Var(tile.name, tile.dtype) for tile in found}
        found = kept


def _loaded(*values: Any) -> list[Any]:
    """Return the tensors and tiles that expressions load from."""
    found: list[Any] = []
    for value in values:
        if not isinstance(value, int):
            tvm_ffi.structural_walk(value, (ir.TensorLoad, lambda load: found.append(load.source)))
    return found


def _leaves(body: Sequence[Node], tile: TileBuffer) -> bool:
    """Return whether what a loop or a branch assigns to a tile is read elsewhere than behind that, within it."""
    for at, node in enumerate(body):
        if node.bodies and tile in node.writes:
            if any(_reads(other, tile) for other in body[at + 1 :]):
                return True
            if any(_read_first(inner, tile) or _leaves(inner, tile) for inner in node.bodies):
                return True
    return False


def _read_first(body: Sequence[Node], tile: TileBuffer) -> bool:
    """Return whether a tile is read before it is written."""
    for node in body:
        if _reads(node, tile):
            return True
        if tile in node.writes:
            return False
    return False


def _reads(node: Node, tile: TileBuffer) -> bool:
    """Return whether a node reads a tile, or something in it does."""
    if tile in node.reads or tile.buffer in _loaded(*node.scalars):
        return True
    return any(_reads(inner, tile) for body in node.bodies for inner in body)


def _stores(node: Node) -> bool:
    return any(tile.scope == "global" for tile in node.writes)


# ---- Values ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Content:
    """The contents of a tile at one place of a program.

    Attributes
    ----------
    tile : Tile
        The tile.
    constant : numpy.ndarray, optional
        What it is, where that is known.
    before : Content, optional
        Where a loop hands it on from one iteration to the next, what it is before the first.
    after : Content, optional
        Likewise, what it is at the end of each.
    maker : Step or Nest, optional
        What makes it; None of what is handed on or comes from outside of the loop.
    """

    tile: TileBuffer
    constant: np.ndarray | None = None
    before: Content | None = None
    after: Content | None = None
    maker: Item | None = None


@dataclass(eq=False)
class Flow:
    """The contents that a block's items take and make.

    Attributes
    ----------
    taken, made : dict
        The contents of each tile that an item reads, and that it writes, by item.
    handed : dict[Tile, Content]
        What a loop hands on from one iteration to the next.
    last : dict[Tile, Content]
        The contents of each tile that is written, at the end.
    """

    taken: dict[Item, dict[TileBuffer, Content]] = field(default_factory=dict)
    made: dict[Item, dict[TileBuffer, Content]] = field(default_factory=dict)
    handed: dict[TileBuffer, Content] = field(default_factory=dict)
    last: dict[TileBuffer, Content] = field(default_factory=dict)

    def readers(self, content: Content) -> list[Item]:
        """Return the items that take contents."""
        return [item for item, taken in self.taken.items() if content in taken.values()]

    def sources(self, item: Item) -> Iterable[Item]:
        """Return what makes the contents that an item takes, in its iteration or in the one before."""
        for content in self.taken[item].values():
            found = content if content.after is None else content.after
            if found.maker is not None and found.maker in self.taken:
                yield found.maker


def flow_of(block: Block, outside: Mapping[TileBuffer, Content], loop: bool) -> Flow:
    """Return the contents in a block.

    Parameters
    ----------
    outside : Mapping
        The contents of tiles before it.
    loop : bool
        Whether an iteration begins with what the one before has left.
    """
    flow, held = Flow(), dict(outside)
    if loop:
        for tile in block.exposed:
            if tile in block.writes:
                flow.handed[tile] = held[tile] = Content(tile, before=_held(tile, outside))
    for item in block.items:
        flow.taken[item] = {tile: _held(tile, held) for tile in item.reads}
        flow.made[item] = {tile: Content(tile, maker=item) for tile in item.writes}
        held.update(flow.made[item])
    for tile, content in flow.handed.items():
        content.after = held[tile]
    flow.last = {tile: held[tile] for tile in block.writes}
    return flow


def _held(tile: TileBuffer, held: Mapping[TileBuffer, Content]) -> Content:
    """Return a tile's contents; zeros of one that nothing was written to, of which a part is kept."""
    return held.get(tile) or Content(tile, np.zeros(tile.shape, tile.dtype))


def in_order(flow: Flow) -> list[list[Item]]:
    """Return the items, those before others whose contents they take; together those that wait for each other.

    Items wait for each other where one takes what another has made in the iteration before. (Tarjan, "Depth-first
    search and linear graph algorithms", 1972.)
    """
    found: list[list[Item]] = []
    numbers: dict[Item, int] = {}
    lowest: dict[Item, int] = {}
    open_items: list[Item] = []
    positions = {item: position for position, item in enumerate(flow.taken)}

    def visit(item: Item) -> None:
        numbers[item] = lowest[item] = len(numbers)
        open_items.append(item)
        for source in flow.sources(item):
            if source not in numbers:
                visit(source)
                lowest[item] = min(lowest[item], lowest[source])
            elif source in open_items:
                lowest[item] = min(lowest[item], numbers[source])
        if lowest[item] == numbers[item]:
            group = [open_items.pop()]
            while group[-1] is not item:
                group.append(open_items.pop())
            found.append(sorted(group, key=positions.__getitem__))

    for item in flow.taken:
        if item not in numbers:
            visit(item)
    return found


def boxes_by_tensor(block: Block) -> dict[TileBuffer, list[Box]]:
    """Return all the boxes that steps load and store, by the tensor."""
    found: dict[TileBuffer, list[Box]] = {}
    for step in block.steps():
        for box in (*step.boxes, *(() if step.store is None else (step.store,))):
            found.setdefault(box.region.tile, []).append(box)
    return found
