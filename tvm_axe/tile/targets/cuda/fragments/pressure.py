"""How many registers a program's fragments take at once: those whose values are still needed, where most are.

A value is needed from where it is written to its last reader, and around a loop where a later iteration reads it. What
threads do element by element takes what is needed before it or behind it, whichever is more: an operand's registers
become the result's. A product and a reduction take both.

Only what the assembler has to keep counts: what tensor cores add to or read, and what is needed around a loop. The rest
it computes and loads again where that takes fewer registers (norms of 416 registers by this count take 61).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tvm_ffi

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
from tvm_axe.tile.regions import Region, Tile, constant
from tvm_axe.tile.targets.cuda.fragments.infer import LayoutChoice
from tvm_axe.tile.targets.cuda.fragments.layout import REGISTER

_NONE: frozenset[Tile] = frozenset()

Way = TypeVar("Way")
Plan = TypeVar("Plan")


class RegisterError(TileError):
    """Fragments take more registers than a thread has."""


@dataclass(frozen=True)
class Use:
    """A statement as far as fragments go.

    Attributes
    ----------
    name : str
        The statement, in words.
    reads, writes : frozenset of Tile
        The tiles whose values it needs, and those that it changes.
    sets : frozenset of Tile
        Of `writes`, those that have nothing left of what they held.
    keeps : frozenset of Tile
        The tiles that an instruction has in registers of its own choice.
    together : bool
        Whether its results take other registers than its operands.
    """

    name: str
    reads: frozenset[Tile] = _NONE
    writes: frozenset[Tile] = _NONE
    sets: frozenset[Tile] = _NONE
    keeps: frozenset[Tile] = _NONE
    together: bool = False


@dataclass(frozen=True)
class Again:
    """A loop around uses, which may have no iteration."""

    body: tuple[Use | Again | Either, ...]


@dataclass(frozen=True)
class Either:
    """A branch."""

    arms: tuple[tuple[Use | Again | Either, ...], ...]


Uses = Use | Again | Either


@dataclass(frozen=True)
class Peak:
    """Where fragments take most registers.

    Attributes
    ----------
    registers : int
        How many of each thread's, of 32 bits.
    held : tuple of (Tile, int)
        The fragments whose values are needed there, with the registers of each, the most first.
    at : str
        The statement.
    """

    registers: int = 0
    held: tuple[tuple[Tile, int], ...] = ()
    at: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{tile.name} {count}" for tile, count in self.held)


def registers_of(tile: Tile, held: LayoutChoice) -> int:
    """The registers, of 32 bits, that a fragment takes of each thread."""
    return -(-int(held.layout.span(REGISTER)) * int(tvm_ffi.dtype(tile.dtype).bits) // 32)


def registers_of_all(fragments: Mapping[Tile, LayoutChoice]) -> dict[Tile, int]:
    """The registers that each fragment takes of each thread; a local tile, which the assembler may index, has none."""
    return {tile: registers_of(tile, held) for tile, held in fragments.items() if tile.scope == "fragment"}


def find_peak(uses: Sequence[Uses], registers: Mapping[Tile, int]) -> Peak:
    """Find where fragments take most registers.

    Parameters
    ----------
    uses : sequence of Use, Again or Either
        The statements, in order.
    registers : mapping from Tile to int
        The registers of each fragment; other tiles don't count.
    """
    search = _Search(registers)
    search.body(tuple(uses), frozenset(), _written(uses, frozenset()))
    return search.peak()


class _Search:
    """Goes backwards, with what is needed behind a statement and what may have been written before it."""

    def __init__(self, registers: Mapping[Tile, int]) -> None:
        self.registers = registers
        self.kept: set[Tile] = set()
        self.lives: dict[frozenset[Tile], str] = {}

    def peak(self) -> Peak:
        """Where what is kept takes most."""
        best = Peak()
        for live, name in self.lives.items():
            held = [(tile, self.registers[tile]) for tile in live if tile in self.kept and tile in self.registers]
            total = sum(count for _, count in held)
            if total > best.registers:
                best = Peak(total, tuple(sorted(held, key=lambda item: (-item[1], item[0].name))), name)
        return best

    def body(
        self, uses: Sequence[Uses], needed: frozenset[Tile], written: Sequence[frozenset[Tile]]
    ) -> frozenset[Tile]:
        """What is needed before some statements, by what is behind them."""
        for use, before in zip(reversed(uses), reversed(written)):
            needed = self.one(use, needed, before)
        return needed

    def one(self, use: Uses, needed: frozenset[Tile], written: frozenset[Tile]) -> frozenset[Tile]:
        if isinstance(use, Either):
            return frozenset().union(*(self.body(arm, needed, _written(arm, written)) for arm in use.arms))
        if isinstance(use, Again):
            inside = _written(use.body, written | _changed(use.body))
            while True:
                more = needed | self.body(use.body, needed, inside)
                if more == needed:
                    self.kept |= needed & inside[0] if inside else _NONE
                    return needed
                needed = more
        before = (needed - use.sets) | use.reads
        self.consider(use, (needed & written) | use.writes | (before & written if use.together else _NONE))
        self.consider(use, before & written)
        return before

    def consider(self, use: Use, live: frozenset[Tile]) -> None:
        self.lives.setdefault(live, use.name)
        self.kept |= use.keeps


def _changed(uses: Iterable[Uses]) -> frozenset[Tile]:
    """What statements write."""
    found: set[Tile] = set()
    for use in uses:
        bodies = use.arms if isinstance(use, Either) else (use.body,) if isinstance(use, Again) else ()
        found |= use.writes if isinstance(use, Use) else frozenset().union(*map(_changed, bodies))
    return frozenset(found)


def _written(uses: Iterable[Uses], before: frozenset[Tile]) -> list[frozenset[Tile]]:
    """What may have been written before each of some statements."""
    found = []
    for use in uses:
        found.append(before)
        before |= _changed((use,))
    return found


def check(peak: Peak, most: int, threads: int, remedy: str) -> None:
    """Refuse fragments that take more than `most` registers of each of so many threads at once.

    Raises
    ------
    RegisterError
        They do; it names them with the registers of each, and what to do about it.
    """
    if peak.registers > most:
        raise RegisterError(
            f"fragments take {peak.registers} registers of each of {threads} threads at once, by `{peak.at}`, and "
            f"there are {most} for them: {peak}; valid are smaller tiles, {remedy}, or one fragment for what is never "
            "needed at once"
        )


def first_with_room(ways: Iterable[Way], decide: Callable[[Way], Plan]) -> Plan:
    """What is decided of the first of some ways, in order, to share tiles among threads whose registers hold them.

    Raises
    ------
    TileError
        The first way is refused, and not for registers; or all of them are, of which it is what the first one lacks.
    """
    refusal: TileError | None = None
    for way in ways:
        try:
            return decide(way)
        except TileError as error:
            refusal = refusal or error
            if not isinstance(refusal, RegisterError):
                break
    assert refusal is not None
    raise refusal


# ---- Of nodes --------------------------------------------------------------------------------------------------------


def uses_of(body: Iterable[Node]) -> tuple[Uses, ...]:
    """The statements of a body as far as fragments go."""
    return tuple(_USES.of(node)(node) for node in body)


def use_of(node: Node, sets: Iterable[Tile] = (), keeps: Iterable[Tile] = (), together: bool = False) -> Use:
    """A statement that does what its node says."""
    reads, writes = frozenset(node.reads), frozenset(node.writes)
    return Use(str(node), reads, writes, frozenset(sets), frozenset(keeps), together)


def _of_region(node: Copy | Fill | Scan) -> Use:
    return use_of(node, _whole(node.dst))


def _of_gemm(gemm: Gemm) -> Use:
    return use_of(gemm, () if gemm.accumulate else _whole(gemm.c), (gemm.a.tile, gemm.c.tile), together=True)


def _of_reduce(reduce: Reduce) -> Use:
    return use_of(reduce, () if reduce.accumulate else _whole(reduce.dst), together=True)


def _of_sort(node: Sort) -> Use:
    return use_of(node, [tile for region in node.results for tile in _whole(region)], together=True)


def _whole(region: Region) -> tuple[Tile, ...]:
    return (region.tile,) if region.whole else ()


def _of_parallel(parallel: Parallel) -> Use:
    """It sets what it stores at every point to the element of the point, under no condition."""
    extents = dict(zip(parallel.vars, parallel.extents))
    stored = [access for access in accesses(parallel) if access.stores and access.guard.exact and not access.guard.vars]
    own = {access.buffer for access in stored if bool(access.guard.mask.all()) and _is_point(access.indices, extents)}
    counts = math.prod(parallel.extents)
    return use_of(parallel, [t for t in parallel.writes if t.buffer in own and math.prod(t.shape) == counts])


def _is_point(indices: Sequence[Any], extents: Mapping[Any, int]) -> bool:
    used = [index for index in indices if not isinstance(constant(index), int)]
    return all(index in extents for index in used) and len(set(used)) == len(used) == len(extents)


def _of_loop(loop: Loop) -> Again:
    return Again(uses_of(loop.body))


def _of_branch(branch: Branch) -> Either:
    return Either((uses_of(branch.then), uses_of(branch.otherwise)))


_USES: TypeTable[Callable[[Any], Uses]] = TypeTable(
    "uses of fragments",
    {
        Assign: use_of,
        Branch: _of_branch,
        Copy: _of_region,
        Fill: _of_region,
        Gemm: _of_gemm,
        Let: use_of,
        Loop: _of_loop,
        Parallel: _of_parallel,
        Print: use_of,
        Reduce: _of_reduce,
        Scan: _of_region,
        Sort: _of_sort,
        Signal: use_of,
        Wait: use_of,
    },
)
