"""Where the uniform model needs a barrier: what threads have read and written in memory since the last one.

A barrier must come before a node that touches what an earlier one wrote, or that writes what an earlier one read. At
the start of a loop's body the iteration before counts too, which `Hazards.settled` finds without making code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

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
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.uniform.memory import Pipeline
from tvm_axe.tile.walking import tiles_of


@dataclass(frozen=True)
class Touched:
    """The tiles in memory that were read and written since the last barrier."""

    read: frozenset[Tile] = frozenset()
    written: frozenset[Tile] = frozenset()

    def after(self, reads: Iterable[Tile], writes: Iterable[Tile]) -> Touched:
        """The same when these are read and written too."""
        return Touched(self.read | _in_memory(reads), self.written | _in_memory(writes))

    def also(self, other: Touched) -> Touched:
        """What either of two ways has touched."""
        return Touched(self.read | other.read, self.written | other.written)

    def forbids(self, reads: Iterable[Tile], writes: Iterable[Tile]) -> bool:
        """Whether a barrier must come first."""
        writes = _in_memory(writes)
        return bool(self.written & (_in_memory(reads) | writes) or self.read & writes)

    def separated(self, reads: Iterable[Tile], writes: Iterable[Tile]) -> Touched:
        """What is touched since the last barrier, behind the one that these may need."""
        return Touched() if self.forbids(reads, writes) else self

    def behind(self, flags: Wait | Signal) -> Touched:
        """What is touched since the last barrier behind a wait, which has one, or a signal, which may have one."""
        return Touched() if isinstance(flags, Wait) or flags.ordered else self


def _in_memory(tiles: Iterable[Tile]) -> frozenset[Tile]:
    return frozenset(tile for tile in tiles if tile.scope in ("shared", "global"))


class Hazards:
    """What nodes touch, and what is touched behind them.

    Parameters
    ----------
    known : mapping from Buffer to Tile
        The tile or tensor behind each buffer.
    pipelines : mapping from Loop to Pipeline
        The loops whose loads run ahead: a barrier a iteration separates them from the rest.
    """

    def __init__(self, known: Mapping[tirx.Buffer, Tile], pipelines: Mapping[Loop, Pipeline]) -> None:
        self.known, self.pipelines = known, pipelines

    def reads(self, node: Node) -> list[Tile]:
        """What a node reads, with what it loads to know where its regions start."""
        return [*node.reads, *self.loaded(*node.starts)]

    def loaded(self, *values: Any) -> tuple[Tile, ...]:
        """What expressions load."""
        return tiles_of(list(values), self.known)

    def ahead(self, pipeline: Pipeline) -> tuple[list[Tile], list[Tile]]:
        """What the loads that run ahead read and write."""
        loads = pipeline.ahead.values()
        return [tile for load in loads for tile in self.reads(load)], [tile for load in loads for tile in load.writes]

    def settled(self, body: Sequence[Node], entry: Touched) -> Touched:
        """What may have been touched at the start of any iteration of a loop."""
        while True:
            after = entry.also(self.through(body, entry))
            if after == entry:
                return entry
            entry = after

    def through(self, nodes: Sequence[Node], touched: Touched) -> Touched:
        """What is touched behind nodes, given what was before them."""
        for node in nodes:
            touched = _NODES.of(node)(self, node, touched)
        return touched

    def _scalars(self, node: Node, touched: Touched) -> Touched:
        loaded = self.loaded(*node.scalars)
        return touched.separated(loaded, ()).after(loaded, ())

    def _leaf(self, node: Node, touched: Touched) -> Touched:
        reads = self.reads(node)
        return touched.separated(reads, node.writes).after(reads, node.writes)

    def _loop(self, node: Loop, touched: Touched) -> Touched:
        touched = self._scalars(node, touched)
        if node not in self.pipelines:
            return self.settled(node.body, touched)
        pipeline = self.pipelines[node]
        entry = touched.separated(*self.ahead(pipeline))
        rest = [inner for inner in node.body if inner not in pipeline.copies]
        return entry.also(self.through(rest, Touched()))

    def _branch(self, node: Branch, touched: Touched) -> Touched:
        touched = self._scalars(node, touched)
        return self.through(node.then, touched).also(self.through(node.otherwise, touched))

    def _flags(self, node: Wait | Signal, touched: Touched) -> Touched:
        return self._scalars(node, touched).behind(node)


_NODES: TypeTable[Callable[[Hazards, Any, Touched], Touched]] = TypeTable(
    "hazards of the uniform model",
    {
        Assign: Hazards._leaf,
        Branch: Hazards._branch,
        Copy: Hazards._leaf,
        Fill: Hazards._leaf,
        Gemm: Hazards._leaf,
        Let: Hazards._leaf,
        Loop: Hazards._loop,
        Parallel: Hazards._leaf,
        Print: Hazards._leaf,
        Reduce: Hazards._leaf,
        Scan: Hazards._leaf,
        Sort: Hazards._leaf,
        Signal: Hazards._flags,
        Wait: Hazards._flags,
    },
)
