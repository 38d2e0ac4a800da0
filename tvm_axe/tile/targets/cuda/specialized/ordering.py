"""What flags order in a specialized kernel, whose roles run beside each other; `check` refuses what they wouldn't.

The producer waits, so a wait holds back what TMA loads behind it, and what consumers do once they have such a load. The
storing warp signals, so a signal is behind the tiles that it has stored, and what consumers did before they staged
them. So what is read before a signal, by the producer for consumers or by themselves, has a staged tile behind it.
Consumers' own reads are held back by no wait, and their own stores are announced by no signal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import sym

from tvm_axe.errors import TileError
from tvm_axe.tile.checks import scalars
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
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.specialized.buffers import CircularBuffer
from tvm_axe.tile.targets.cuda.specialized.overwriting import overwritten
from tvm_axe.tile.targets.cuda.specialized.staging import has_storing_warp
from tvm_axe.tile.walking import leaves


class OrderError(TileError):
    """What a wait or a signal would not order between the roles of a specialized kernel; a uniform one orders it.

    Attributes
    ----------
    reason : str
        What isn't ordered, without what would be.
    """

    def __init__(self, reason: str, valid: str) -> None:
        super().__init__(f"{reason}; valid in a specialized kernel {valid}, or roles='uniform'")
        self.reason = reason


@dataclass(frozen=True)
class _Before:
    """What may have been done, and what has been done for certain, before a statement.

    Attributes
    ----------
    waited : Wait or None
        A wait that may have been passed.
    pending : Wait or None
        A wait that may have been passed, and behind which consumers have not taken a load for certain.
    loaded : frozenset of CircularBuffer
        The circular buffers that were filled behind `pending` for certain.
    stored : Node or None
        A statement by which consumers may have stored to global memory themselves.
    staged : bool
        Whether a tile has gone to the storing warp for certain.
    read : mapping from Node to CircularBuffer or None
        The statements that may have read global memory, with no staged tile behind them for certain; of a load the
        circular buffer, as long as consumers haven't taken what it filled for certain.
    """

    waited: Wait | None = None
    pending: Wait | None = None
    loaded: frozenset[CircularBuffer] = frozenset()
    stored: Node | None = None
    staged: bool = False
    read: Mapping[Node, CircularBuffer | None] = field(default_factory=dict)

    def or_else(self, other: _Before) -> _Before:
        """What holds behind two ways that may have been taken."""
        return _Before(
            self.waited or other.waited,
            self.pending or other.pending,
            self.loaded & other.loaded if self.pending and other.pending else self.loaded | other.loaded,
            self.stored or other.stored,
            self.staged and other.staged,
            {n: self.read.get(n) or other.read.get(n) for n in (*self.read, *other.read)},
        )


def check(program: TileProgram, buffers: Collection[CircularBuffer], staged: Collection[Copy]) -> None:
    """Refuse what a wait or a signal would not order in a specialized kernel.

    Parameters
    ----------
    program : TileProgram
        The program.
    buffers : collection of CircularBuffer
        What the producer loads.
    staged : collection of Copy
        The copies that the storing warp stores.

    Raises
    ------
    OrderError
        Consumers read global memory behind a wait; the producer loads, behind none, what the kernel stores; something
        is stored behind a wait, with no load in between; a signal comes behind a store that consumers make themselves,
        or behind none, or behind a read that no stored tile is behind. Or the storing warp and consumers both store to
        a tensor, perhaps to the same places.
    """
    if has_storing_warp(program):
        _check_stores(program, frozenset(staged))
    _Order(program, tuple(buffers), frozenset(staged)).body(program.body, _Before())


def _check_stores(program: TileProgram, staged: frozenset[Copy]) -> None:
    """Refuse a tensor in which a place is stored to again, by the storing warp and by consumers, in no order."""
    for tile in overwritten(program):
        stores = [node for node in leaves(program.body) if tile in node.writes]
        for own in stores:
            if own not in staged and any(node in staged for node in stores):
                raise OrderError(
                    f"{own}: consumers store to {tile}, to which the storing warp stores beside them, perhaps to the "
                    "same places",
                    "are places that are shown to be others, whole accumulators alone",
                )


class _Order:
    def __init__(self, program: TileProgram, buffers: tuple[CircularBuffer, ...], staged: frozenset[Copy]) -> None:
        self.analyzer: sym.Analyzer = program.analyzer()
        self.tiles = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
        self.buffers, self.staged = buffers, staged
        self.written = {tile for node in leaves(program.body) for tile in node.writes if tile.scope == "global"}
        self.owner = {copy: buffer for buffer in buffers for copy in buffer.copies + buffer.others}

    def body(self, nodes: tuple[Node, ...], before: _Before) -> _Before:
        for node in nodes:
            taken = [buffer for buffer in self.buffers if buffer.first is node]
            if before.loaded & set(taken):
                before = replace(before, pending=None, loaded=frozenset())
            seen = {n: None if buffer in taken else buffer for n, buffer in before.read.items()}
            before = self.statement(node, replace(before, read=seen))
        return before

    def statement(self, node: Node, before: _Before) -> _Before:
        return _NODES.of(node)(self, node, before)

    def wait(self, node: Wait, before: _Before) -> _Before:
        return before if node.loads else replace(before, waited=node, pending=node, loaded=frozenset())

    def copy(self, node: Copy, before: _Before) -> _Before:
        if node not in self.owner:
            return self.consumers(node, before)
        self.reads(node, scalars(node, self.tiles), before)
        if node.src.tile in self.written and before.waited is None:
            raise OrderError(
                f"{node}: the producer loads from {node.src.tile}, which the kernel stores to beside it, and no wait "
                "comes before",
                "is a wait for who stores",
            )
        buffer = self.owner[node]
        before = replace(before, read={**before.read, node: buffer})
        return replace(before, loaded=before.loaded | {buffer}) if before.pending else before

    def consumers(self, node: Node, before: _Before) -> _Before:
        """What consumers do, some of it by way of the storing warp."""
        self.reads(node, (*node.reads, *scalars(node, self.tiles)), before)
        stores = [tile for tile in node.writes if tile.scope == "global"]
        if stores and before.pending is not None:
            raise OrderError(
                f"{before.pending}: the producer waits, and `{node}`, behind it without a load in between, stores "
                f"to {stores[0]} beside it",
                "is a store behind a load into shared memory that is behind the wait",
            )
        if node in self.staged:
            return replace(before, staged=True, read={n: of for n, of in before.read.items() if of is not None})
        if any(tile.scope == "global" for tile in node.reads):
            before = replace(before, read={**before.read, node: None})
        return replace(before, stored=before.stored or node) if stores else before

    def reads(self, node: Node, tiles: tuple[Tile, ...], before: _Before) -> None:
        for tile in tiles:
            if before.waited is not None and tile.scope == "global":
                raise OrderError(
                    f"{before.waited}: the producer waits, and `{node}`, behind it, reads {tile} as consumers, which "
                    "don't",
                    "is a copy into shared memory that TMA can do, a read before the wait",
                )

    def signal(self, node: Signal, before: _Before) -> _Before:
        if not node.ordered:
            return before
        if before.stored is not None:
            tile = next(tile for tile in before.stored.writes if tile.scope == "global")
            raise OrderError(
                f"{node}: the storing warp signals, and `{before.stored}`, before it, is stored to {tile} by "
                "consumers, which it doesn't wait for",
                "are copies of whole accumulators to 16-bit tensors, by TMA, a store behind the signal, ordered=False",
            )
        if not before.staged:
            raise OrderError(
                f"{node}: the storing warp signals, and has stored nothing before for certain, so it would signal at "
                "once",
                "is a signal behind a copy of an accumulator to a 16-bit tensor, by TMA, in the same arm of an `if` or "
                "before it, ordered=False",
            )
        if before.read:
            raise OrderError(
                f"{node}: the storing warp signals, and `{next(iter(before.read))}`, before it, may not have been done "
                "by then, as no tile that the storing warp stores is behind it",
                "is a signal behind a copy of an accumulator to a 16-bit tensor that is behind what is read (and "
                "behind the product of what is loaded), ordered=False",
            )
        return before

    def branch(self, node: Branch, before: _Before) -> _Before:
        self.reads(node, scalars(node, self.tiles), before)
        return self.body(node.then, before).or_else(self.body(node.otherwise, before))

    def loop(self, node: Loop, before: _Before) -> _Before:
        """Twice: what an iteration does comes before all of the next, too."""
        self.reads(node, scalars(node, self.tiles), before)
        after = self.body(node.body, before)
        after = self.body(node.body, before.or_else(after))
        return after if self.analyzer.can_prove(node.extent >= 1) else before.or_else(after)


_NODES: TypeTable[Callable[[_Order, Any, _Before], _Before]] = TypeTable(
    "order of flags",
    {
        Assign: _Order.consumers,
        Branch: _Order.branch,
        Copy: _Order.copy,
        Fill: _Order.consumers,
        Gemm: _Order.consumers,
        Let: _Order.consumers,
        Loop: _Order.loop,
        Parallel: _Order.consumers,
        Print: _Order.consumers,
        Reduce: _Order.consumers,
        Scan: _Order.consumers,
        Sort: _Order.consumers,
        Signal: _Order.signal,
        Wait: _Order.wait,
    },
)


def roles(program: TileProgram) -> Iterator[tuple[Wait | Signal, str, str]]:
    """Who waits and who signals, and why, as decisions."""
    for node in program.nodes():
        if isinstance(node, Wait):
            yield node, "by the producer", "before the loads behind it"
        elif isinstance(node, Signal):
            why = "once its stores have arrived" if node.ordered else "at once"
            yield node, "by the storing warp", why
