"""Nodes that move elements, set them, compute them one by one, or print them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import tirx

from tvm_axe.tile.nodes.statement import Statement
from tvm_axe.tile.regions import Region, Tile


@dataclass(frozen=True, eq=False)
class Copy(Statement):
    """The elements of `src` are copied to `dst`, or joined atomically with what it holds; types are cast.

    Invariant: both regions have the same `shape`; `atomic` is None, ``"add"``, ``"max"`` or ``"min"``.
    """

    dst: Region
    src: Region
    atomic: str | None

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.src.tile,)

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.dst.tile,)

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self.dst, self.src)

    @property
    def joins(self) -> tuple[tuple[Tile, str], ...]:
        return () if self.atomic is None else ((self.dst.tile, self.atomic),)

    def __str__(self) -> str:
        how = {"add": ", adding atomically", "max": ", the larger atomically", "min": ", the smaller atomically"}
        return f"copy {self.src} to {self.dst}{how.get(self.atomic or '', '')}"


@dataclass(frozen=True, eq=False)
class Fill(Statement):
    """Every element of `dst` is set to `value`."""

    dst: Region
    value: tirx.Expr
    reads = ()

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.dst.tile,)

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self.dst,)

    @property
    def operands(self) -> tuple[Any, ...]:
        return (self.value,)

    def __str__(self) -> str:
        return f"fill {self.dst} with {self.value}"


@dataclass(frozen=True, eq=False)
class Parallel(Statement):
    """Elements stored for every point of a box, in no order.

    Attributes
    ----------
    vars : tuple of Var
        A point's coordinates.
    extents : tuple of int
        How many values each coordinate has.
    body : Stmt
        Upstream's statement, made of stores, names and branches.
    accesses : tuple of (Tile, indices, bool)
        All that the body touches: loads, then stores (True), each in order.
    distinct : bool
        Whether the author says that no two points store to one element where an index is data.
    joins : tuple of (Tile, str)
        The tensors that values are joined with atomically, and how; such a store's value is a call
        (`tvm_axe.tile.atomics`).
    """

    vars: tuple[tirx.Var, ...]
    extents: tuple[int, ...]
    body: tirx.Stmt
    accesses: tuple[tuple[Tile, tuple, bool], ...]
    distinct: bool = False
    joins: tuple[tuple[Tile, str], ...] = ()

    @cached_property
    def reads(self) -> tuple[Tile, ...]:
        return tuple(dict.fromkeys(tile for tile, _, stores in self.accesses if not stores))

    @cached_property
    def writes(self) -> tuple[Tile, ...]:
        return tuple(dict.fromkeys(tile for tile, _, stores in self.accesses if stores))

    def __str__(self) -> str:
        return f"parallel {' x '.join(map(str, self.extents))} into {', '.join(t.name for t in self.writes)}"


@dataclass(frozen=True, eq=False)
class Print(Statement):
    """The elements of a region, or a number, are printed, each in a line with a label (`tvm_axe.tile.printing`).

    Invariant: there is either a `region` or a `value`, and the other is None.

    Attributes
    ----------
    block : tuple of Expr
        The block's coordinates.
    reads : tuple of Tile
        What is printed, or what the number is loaded from.
    """

    label: str
    region: Region | None
    value: Any
    block: tuple[tirx.Expr, ...]
    reads: tuple[Tile, ...]
    writes = ()

    @property
    def regions(self) -> tuple[Region, ...]:
        return () if self.region is None else (self.region,)

    @property
    def dtype(self) -> str:
        """The type of what is printed."""
        return str(self.value.ty.dtype) if self.region is None else self.region.tile.dtype

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.block if self.value is None else (*self.block, self.value)

    def __str__(self) -> str:
        return f"print {self.value if self.region is None else self.region} as {self.label!r}"
