"""Nodes by which blocks and devices meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_axe.tile.nodes.statement import Statement
from tvm_axe.tile.regions import Region, Tile


@dataclass(frozen=True, eq=False)
class Wait(Statement):
    """Go on when every flag is at least `value`; with `reset` the flags are set to 0 then.

    Of one with `loads` the program's author says that it is for loads into shared memory alone.
    """

    flags: Region
    value: tirx.Expr
    reset: bool
    loads: bool

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.flags.tile,)

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.flags.tile,) if self.reset else ()

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self.flags,)

    @property
    def operands(self) -> tuple[Any, ...]:
        return (self.value,)

    def __str__(self) -> str:
        notes = ", for loads" * self.loads + ", then reset" * self.reset
        return f"wait for {self.flags} >= {self.value}{notes}"


@dataclass(frozen=True, eq=False)
class Signal(Statement):
    """Set every flag to `value`, or add it; if `ordered`, once all that the block has read and written is done."""

    flags: Region
    value: tirx.Expr
    ordered: bool
    add: bool

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.flags.tile,) if self.add else ()

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.flags.tile,)

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self.flags,)

    @property
    def operands(self) -> tuple[Any, ...]:
        return (self.value,)

    def __str__(self) -> str:
        return f"signal {self.flags} {'+=' if self.add else '='} {self.value}" + ("" if self.ordered else ", at once")
