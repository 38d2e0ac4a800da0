"""From the blocks of a tile program to a graph of streams.

Each loop is a dim, each step a unit: what only its iteration matters for is a Map; what is handed on from iteration to
iteration is the state of an Accum, or of a Scan where something in the loop takes it as well. Contents from outside of
a loop are expanded over its iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from tvm_axe.errors import StreamError
from tvm_axe.stream.graph import Stream, Tensor
from tvm_axe.stream.program import StreamProgram
from tvm_axe.stream.tiled.blocks import Block, Content, Flow, Guard, Item, Nest, exposed, flow_of, in_order
from tvm_axe.stream.tiled.boxes import Box, Matrix
from tvm_axe.stream.tiled.folding import Computing, Slot, data_of, flat, folding, last, mapping
from tvm_axe.stream.tiled.lines import Lines
from tvm_axe.stream.tiled.points import Points, Side
from tvm_axe.stream.tiled.step import Step
from tvm_axe.stream.types import DataType, Scalar, Selector, StreamType, Tile, Tuple
from tvm_axe.stream.views import View
from tvm_axe.tile.nodes import Node
from tvm_axe.tile.regions import Tile as TileBuffer


@dataclass(frozen=True, eq=False)
class _Sent:
    """A stream that carries contents, in these iterations."""

    stream: Stream
    part: int | None
    points: Points


class Building:
    """Puts the operators of a tile program into a streaming program.

    Parameters
    ----------
    program : StreamProgram
        The streaming program.
    matrices : Mapping
        The matrix of each tensor.
    lines : Lines
        Where statements stand.

    Attributes
    ----------
    inputs : dict[str, list]
        The values of the input streams: addresses of tiles, and variables of loops that are computed with.
    """

    def __init__(self, program: StreamProgram, matrices: Mapping[TileBuffer, Matrix], lines: Lines) -> None:
        self.program, self.matrices, self.lines = program, matrices, lines
        self.inputs: dict[str, list] = {}
        self._tensors: dict[TileBuffer, Tensor] = {}
        self._sent: dict[Content, _Sent] = {}
        self._moved: dict[tuple[Stream, Points], Stream] = {}
        self._chosen: dict[tuple[Stream, int], tuple[Stream, ...]] = {}
        self._like: dict[Points, Stream] = {}
        self._through: set[Content | None] = set()  # what loops around others hand on through these alone

    def block(
        self, block: Block, outside: Mapping[TileBuffer, Content], wanted: set[TileBuffer], loop: bool
    ) -> dict[TileBuffer, Content]:
        """Add what a block does; return the contents of the tiles that it writes, behind all iterations of a loop.

        Parameters
        ----------
        outside : Mapping
            The contents of tiles before it.
        wanted : set[Tile]
            The tiles that something behind it reads, whose contents are returned.
        """
        flow = flow_of(block, outside, loop)
        handed = [content.after for content in flow.handed.values() if flow.readers(content)]
        for item in block.items:
            if isinstance(item, Step) and item.plain == "load" and not {*flow.made[item].values()} & {*handed}:
                self._load_step(item, flow, block.points)
        again = {*block.exposed} if loop else set()
        found: dict[TileBuffer, Content] = {}
        for group in in_order(flow):
            states = [
                content
                for content in flow.handed.values()
                if content.after is not None and content.after.maker in group and flow.readers(content)
            ]
            if states:
                found |= self._fold(block, flow, group, states, wanted)
            elif isinstance(group[0], Guard):
                self._guard(group[0], flow)
            elif isinstance(group[0], Nest):
                item = group[0]
                behind = {*exposed(block.items[block.items.index(item) + 1 :])} | again | wanted
                made = self.block(item.block, flow.taken[item], behind, loop=True)
                for tile, content in made.items():
                    self._rename(flow.made[item][tile], content)
            else:
                self._step(group[0], flow, block.points)
        for tile, content in flow.last.items():
            if tile in wanted and tile not in found:
                found[tile] = self._final(content, block.points) if loop else content
        return found

    def _guard(self, guard: Guard, flow: Flow) -> None:
        """Add what is done in some iterations only."""
        self.block(guard.block, flow.taken[guard], set(), loop=False)

    # ---- Steps

    def _load_step(self, step: Step, flow: Flow, points: Points) -> None:
        (content,) = flow.made[step].values()
        self._sent[content] = _Sent(self._load(step.boxes[0]), None, points)

    def _step(self, step: Step, flow: Flow, points: Points) -> None:
        """Add what a step does in each iteration by itself."""
        if step.plain == "load":
            return
        if step.plain == "name":
            self._rename(flow.made[step][step.writes[0]], flow.taken[step][step.reads[0]])
            return
        results = [None] if step.store is not None else list(flow.made[step].values())
        taken = flow.taken[step].values()
        streamed = step.store is not None or step.boxes or step.variables
        if not streamed and all(content.constant is not None for content in taken):
            made = Computing([step], flow, [], results)()
            for content, array in zip(flow.made[step].values(), made if type(made) is tuple else (made,)):
                content.constant = array.reshape(content.tile.shape)
            return
        streams, slots = self._arriving([step], flow, points, [])
        stored = None if step.store is None else self.matrices[step.store.region.tile].tile(step.store)
        data = data_of(list(flow.made[step].values())) if stored is None else stored
        computing = Computing([step], flow, slots, results, None if stored is None else stored.shape)
        function = mapping(step.word, computing, data, step.flops)
        plain = step.plain == "store" and len(streams) == 1 and streams[0].type.data == data
        found = streams[0] if plain else streams[0].map(function, *streams[1:])
        if step.store is not None:
            self._store(found, step)
        for number, content in enumerate(flow.made[step].values()):
            self._sent[content] = _Sent(found, number if isinstance(data, Tuple) else None, points)

    def _fold(
        self, block: Block, flow: Flow, group: list[Item], states: list[Content], wanted: set[TileBuffer]
    ) -> dict[TileBuffer, Content]:
        """Add what is handed on from iteration to iteration; return the contents behind the loop."""
        inner = next((item for item in group if isinstance(item, Nest)), None)
        if inner is not None:
            return self._fold_nest(flow, group, inner, states)
        steps = [item for item in group if isinstance(item, Step)]
        made = [content for step in steps for content in flow.made[step].values()]
        used = [content for content in (*states, *made) if any(item not in group for item in flow.readers(content))]
        ends = [content for content in made if flow.last.get(content.tile) is content and content.tile in wanted]
        handed_on = [content.after for content in states if content.after is not None]
        results = list(dict.fromkeys((*handed_on, *ends, *used)))
        rank, begins = 1, {content: content.before for content in states}
        while any(before in self._through for before in begins.values()):
            if not all(before in self._through for before in begins.values()):
                raise self._mixed(steps[-1].node, next(c for c, before in begins.items() if before in self._through))
            rank, begins = rank + 1, {content: before.before for content, before in begins.items() if before}
        starts: list[tuple[Content, Content]] = [(c, before) for c, before in begins.items() if before is not None]
        constant = all(before.constant is not None for _, before in starts)
        streams, slots = self._arriving(steps, flow, block.points, [] if constant else starts)
        starting = _starting(results, dict(starts)) if constant else None
        function = folding(
            steps[-1].word,
            Computing(steps, flow, slots, results),
            results,
            sum(s.flops for s in steps),
            states,
            starting,
        )
        alone = len(results) == 1
        if not used:
            found = streams[0].accum(function, *streams[1:], rank=rank)
            return self._behind(found, results, ends, _out_of(block.points, rank))
        found = streams[0].scan(function, *streams[1:], rank=rank)
        for number, content in enumerate(results):
            self._sent[content] = _Sent(found, None if alone else number, block.points)
        if not ends:
            return {}
        behind = found.accum(last(data_of(results)), rank=rank)
        return self._behind(behind, results, ends, _out_of(block.points, rank))

    def _behind(
        self, stream: Stream, results: list[Content], ends: list[Content], points: Points
    ) -> dict[TileBuffer, Content]:
        """Return the contents behind a loop that a stream carries among others."""
        found = {}
        for content in ends:
            found[content.tile] = Content(content.tile)
            part = None if len(results) == 1 else results.index(content)
            self._sent[found[content.tile]] = _Sent(stream, part, points)
        return found

    def _fold_nest(
        self, flow: Flow, group: list[Item], inner: Nest, states: list[Content]
    ) -> dict[TileBuffer, Content]:
        """Add a loop that goes on with what its last iteration in the loop outside of it has left, and nothing else."""
        taken = [content for content in states if flow.readers(content) != [inner]]
        made = [content for content in flow.made[inner].values() if flow.readers(content)]
        if len(group) > 1 or taken or made:
            raise self._mixed(inner.node, states[0])
        self._through.update(states)
        tiles = {content.tile for content in states}
        behind = self.block(inner.block, flow.taken[inner], tiles, loop=True)
        return {tile: behind[tile] for tile in tiles}

    def _mixed(self, node: Node, content: Content) -> StreamError:
        return self.lines.refuse(
            node,
            f"{content.tile.name} is handed on by this loop and by the one around it, and used between them; let one "
            "loop hand it on, or sum in a tile that is filled anew before this loop and added behind it",
        )

    # ---- Streams

    def _arriving(
        self, steps: Sequence[Step], flow: Flow, points: Points, starts: Sequence[tuple[Content, Content]]
    ) -> tuple[list[Stream], list[list[Slot]]]:
        """Return the streams that steps take, in these iterations, and what comes on each.

        Parameters
        ----------
        starts : Sequence
            What is handed on, as the steps take it, and what it is before the first iteration.
        """
        own = {content for step in steps for content in flow.made[step].values()}
        needed: dict[Content, Content] = {}
        for step in steps:
            for content in flow.taken[step].values():
                is_state = content.after is not None and content.after in own
                if content not in own and content.constant is None and not is_state:
                    needed[content] = content
        needed.update(starts)
        found: dict[Stream, list[Slot]] = {}
        for content, origin in needed.items():
            if origin.constant is not None:
                stream, part = self._constant(origin, points), None
            else:
                sent = self._sent[origin]
                stream, part = self._brought(sent.stream, sent.points, points), sent.part
            found.setdefault(stream, []).append(Slot(content, part))
        for step in steps:
            for box in step.boxes:
                loaded = self._load(box)
                found.setdefault(loaded, []).append(Slot((step, box)))
            for var in step.variables:
                found.setdefault(self._variable(var, points), []).append(Slot((step, var)))
        if not found:
            found[self._counter(points)] = []
        streams, slots = list(found), list(found.values())
        if len(streams) == 1 and isinstance(streams[0].type.data, Tuple):
            # Values that travel together come one by one to a function that takes nothing else.
            items = range(len(streams[0].type.data.items))
            slots = [[Slot(slot.of) for slot in slots[0] if slot.part == item] for item in items]
        return streams, slots

    def _brought(self, stream: Stream, at: Points, points: Points) -> Stream:
        """Return a stream of some iterations in others: expanded over those of loops, or sent to a side of a choice."""
        if at is points:
            return stream
        key = (stream, points)
        if key not in self._moved:
            if points.side is not None:
                whole = self._brought(stream, at, points.side.whole)
                self._moved[key] = self._sides(whole, points.side)[0 if points.side.first else 1]
            else:
                outer = points
                while outer.outer is not None and outer is not at:
                    outer = outer.outer
                like = self._like.get(points) or self._counter(points)
                self._moved[key] = self._brought(stream, at, outer).expand(like)
        return self._moved[key]

    def _sides(self, stream: Stream, side: Side) -> tuple[Stream, ...]:
        """Return what of a stream goes to the first and to the second side of a choice."""
        key = (stream, id(side.holds))
        if key not in self._chosen:
            selectors = [(0,) if holds else (1,) for holds in side.holds.tolist()]
            chosen = self._input("side", side.whole, selectors, Selector(2))
            self._chosen[key] = stream.partition(chosen)
        return self._chosen[key]

    def finish(self) -> None:
        """Throw away what nobody takes: of choices a side that doesn't, or what a loop overwrites if it runs at all."""
        for node in self.program.nodes:
            for stream in node.outputs:
                if not (stream.consumers or stream.discarded):
                    stream.discard()

    def _final(self, content: Content, points: Points) -> Content:
        """Return contents as the last iteration of a loop leaves them."""
        if content.constant is not None or self._sent[content].points is not points:
            return content
        found, sent = Content(content.tile), self._sent[content]
        data = sent.stream.type.data
        assert isinstance(data, (Tile, Tuple))
        self._sent[found] = _Sent(sent.stream.accum(last(data)), sent.part, _out_of(points, 1))
        return found

    def _rename(self, content: Content, same: Content) -> None:
        if same.constant is not None:
            content.constant = same.constant
        else:
            self._sent[content] = self._sent[same]

    def _constant(self, content: Content, points: Points) -> Stream:
        """Return a stream of what is known beforehand."""
        array = flat(content.constant, content)  # type: ignore[arg-type]
        function = mapping(f"constant_{content.tile.name}", lambda *_: array, data_of([content]), 0)  # type: ignore[arg-type]
        return self._counter(points).map(function)

    def _counter(self, points: Points) -> Stream:
        """Return a stream of the numbers of the iterations."""
        return self._given("iteration", points, np.arange(len(points)))

    def _variable(self, var: tirx.Var, points: Points) -> Stream:
        return self._given(str(var.name), points, points.at(var))

    def _given(self, name: str, points: Points, values: np.ndarray) -> Stream:
        """Return an input stream of numbers, one an iteration."""
        return self._input(name, points, values.tolist(), Scalar("float64" if values.dtype.kind == "f" else "int64"))

    def _input(self, name: str, points: Points, values: list, data: DataType) -> Stream:
        found = f"{name}_{len(self.inputs)}"
        self.inputs[found] = points.nested(values)
        return self.program.input(found, StreamType(points.dims, data))

    # ---- Off-chip memory

    def _tensor(self, tile: TileBuffer) -> Tensor:
        if tile not in self._tensors:
            matrix = self.matrices[tile]
            self._tensors[tile] = self.program.tensor(tile.name, matrix.rows, matrix.columns, tile.dtype)
        return self._tensors[tile]

    def _load(self, box: Box) -> Stream:
        """Return a stream of the tiles that a box is."""
        matrix, points = self.matrices[box.region.tile], box.points
        tensor, tile, numbers = self._tensor(box.region.tile), matrix.tile(box), matrix.numbers(box)
        view = None if numbers is None else view_of(numbers, points)
        if view is not None:
            found = self.program.load(tensor, tile, view)
        elif numbers is not None:
            found = self._given(f"{tensor.name}_tile", points, numbers).load_at(tensor, tile)
        else:
            found = self._given(f"{tensor.name}_element", points, matrix.elements(box)).load_at(tensor, tile, True)
        self._like.setdefault(points, found)
        return found

    def _store(self, stream: Stream, step: Step) -> None:
        """Store the tiles that a step sends where its box is."""
        assert step.store is not None
        box = step.store
        matrix, tensor = self.matrices[box.region.tile], self._tensor(box.region.tile)
        numbers = matrix.numbers(box)
        once = numbers is not None and box.rows is None and len({*numbers.tolist()}) == len(numbers)
        view = view_of(numbers, box.points) if once and numbers is not None else None
        if view is not None and view.positions() == list(range(len(box.points))):
            stream.store(tensor)
        elif view is not None:
            stream.store(tensor, view)
        elif box.rows is None:
            addresses = self._given(f"{tensor.name}_element", box.points, matrix.elements(box))
            stream.store_at(tensor, addresses, elements=True).discard()
        else:
            pairs = list(zip(matrix.elements(box).tolist(), box.rows.tolist()))
            places = self._input(f"{tensor.name}_rows", box.points, pairs, Tuple((Scalar(), Scalar())))
            stream.store_at(tensor, places, elements=True).discard()


def _out_of(points: Points, loops: int) -> Points:
    """Return the iterations of a nest without so many of its innermost loops."""
    for _ in range(loops):
        assert points.outer is not None
        points = points.outer
    return points


def _starting(results: Sequence[Content], starts: Mapping[Content, Content]) -> Any:
    """Return the state before the first iteration; zeros of what isn't handed on, which nobody sees."""
    begins = {handed.after: before.constant for handed, before in starts.items()}
    arrays = []
    for content in results:
        array = begins.get(content)
        arrays.append(flat(np.zeros(content.tile.shape, content.tile.dtype) if array is None else array, content))
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


def view_of(numbers: np.ndarray, points: Points) -> View | None:
    """Return the affine view that goes through tiles in this order, if there is one."""
    sizes = points.sizes
    if sizes is None or not all(sizes):
        return None
    grid = numbers.reshape(sizes)
    first = int(grid[(0,) * len(sizes)])
    strides = []
    for dim, size in enumerate(sizes):
        at = tuple(int(other == dim) for other in range(len(sizes)))
        strides.append(int(grid[at]) - first if size > 1 else 0)
    view = View(sizes, tuple(strides), first)
    return view if view.positions() == numbers.tolist() else None
