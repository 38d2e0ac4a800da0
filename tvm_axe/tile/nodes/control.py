"""Nodes of control flow, and of what decides it: loops, branches, names and elements of local tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tvm import sym, tirx

from tvm_axe.tile.ending import ENDLESS
from tvm_axe.tile.nodes.statement import Statement
from tvm_axe.tile.regions import Tile, constant

if TYPE_CHECKING:
    from tvm_axe.tile.nodes import Node


@dataclass(frozen=True, eq=False)
class Loop(Statement):
    """A loop, whose iterations run in order.

    Attributes
    ----------
    var : Var
        The iteration, from `start` to ``start + extent - 1``.
    start, extent : Expr
        The first iteration, and how many there are; `extent` may be an int.
    stages : int or None
        How many iterations' loads are held at once; None for an ordinary loop, 0 for a pipelined one whose stages are
        to be inferred.
    body : tuple of Node
        What an iteration does, in order.
    until : Expr or None
        What is asked behind each iteration, of local tiles alone: where it holds, no other iteration follows
        (`tvm_axe.tile.ending`). None of a loop that runs to its end.
    """

    var: tirx.Var
    start: tirx.Expr
    extent: tirx.Expr
    stages: int | None
    body: tuple[Node, ...]
    until: tirx.Expr | None = None

    @cached_property
    def reads(self) -> tuple[Tile, ...]:
        return _union(self.body, "reads")

    @cached_property
    def writes(self) -> tuple[Tile, ...]:
        return _union(self.body, "writes")

    @property
    def is_endless(self) -> bool:
        """Whether it is a ``while``, whose iterations nobody counts; `until` doesn't hold before the first."""
        return self.until is not None and isinstance(self.extent, int) and self.extent == ENDLESS

    @property
    def operands(self) -> tuple[Any, ...]:
        return (self.start, self.extent, *(() if self.until is None else (self.until,)))

    @property
    def bodies(self) -> tuple[tuple[Node, ...], ...]:
        return (self.body,)

    def __str__(self) -> str:
        if self.until is not None and self.is_endless:
            return f"while {sym.Analyzer().simplify(tirx.Not(self.until))}"
        ending = "" if self.until is None else f" until {self.until}"
        start, stop = constant(self.start), sym.Analyzer().simplify(self.start + self.extent)
        span = f"{stop}" if isinstance(start, int) and start == 0 else f"{start}, {stop}"
        if self.stages is None:
            return f"for {self.var.name} in range({span}){ending}"
        return f"for {self.var.name} in pipelined({span}{f', stages={self.stages}' if self.stages else ''}){ending}"


@dataclass(frozen=True, eq=False)
class Branch(Statement):
    """``if condition: then, else: otherwise``; the condition is the same for all threads of a block."""

    condition: tirx.Expr
    then: tuple[Node, ...]
    otherwise: tuple[Node, ...]

    @cached_property
    def reads(self) -> tuple[Tile, ...]:
        return _union(self.then + self.otherwise, "reads")

    @cached_property
    def writes(self) -> tuple[Tile, ...]:
        return _union(self.then + self.otherwise, "writes")

    @property
    def operands(self) -> tuple[Any, ...]:
        return (self.condition,)

    @property
    def bodies(self) -> tuple[tuple[Node, ...], ...]:
        return (self.then, self.otherwise)

    def __str__(self) -> str:
        return f"if {self.condition}"


@dataclass(frozen=True, eq=False)
class Let(Statement):
    """A name for a scalar, the same for all threads of a block: ``length = lengths[batch]``."""

    var: tirx.Var
    value: tirx.Expr
    reads: tuple[Tile, ...]
    writes = ()

    @property
    def operands(self) -> tuple[Any, ...]:
        return (self.value,)

    def __str__(self) -> str:
        return f"{self.var.name} = {self.value}"


@dataclass(frozen=True, eq=False)
class Assign(Statement):
    """An element of a local tile, the same for all threads: ``count[0] = count[0] + 1``."""

    tile: Tile
    indices: tuple
    value: tirx.Expr
    reads: tuple[Tile, ...]

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.tile,)

    @property
    def operands(self) -> tuple[Any, ...]:
        return (self.value, *self.indices)

    def __str__(self) -> str:
        return f"{self.tile.name}[{', '.join(map(str, self.indices))}] = {self.value}"


def _union(nodes: tuple[Node, ...], what: str) -> tuple[Tile, ...]:
    return tuple(dict.fromkeys(tile for node in nodes for tile in getattr(node, what)))
