"""Nodes that compute tiles as a whole: products, reductions, and what goes in the order of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_axe.tile.nodes.statement import Statement
from tvm_axe.tile.reducers import combined, identity_of, reduced_type
from tvm_axe.tile.regions import Region, Tile


@dataclass(frozen=True, eq=False)
class Gemm(Statement):
    """A product ``c (+)= a @ b``.

    Invariant: `a` is m x k, or k x m if `transpose_a`; `b` is k x n, or n x k if `transpose_b`; `c` is m x n, in a
    fragment that neither of them is a part of.

    Attributes
    ----------
    c, a, b : Region
        Their last two dimensions are those of the matrices; the others are of extent 1.
    transpose_a, transpose_b : bool
        Whether an operand is stored transposed.
    accumulate : bool
        Whether `c` is added to, and not set.
    instruction : str or None
        The instruction as annotated; None is one to be chosen.
    """

    c: Region
    a: Region
    b: Region
    transpose_a: bool
    transpose_b: bool
    accumulate: bool
    instruction: str | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """m, n, k."""
        (m, n), (rows, columns) = self.c.extents[-2:], self.a.extents[-2:]
        return m, n, rows if self.transpose_a else columns

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.a.tile, self.b.tile) + ((self.c.tile,) if self.accumulate else ())

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.c.tile,)

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self.c, self.a, self.b)

    def __str__(self) -> str:
        a, b = (f"{r}.T" if t else f"{r}" for r, t in ((self.a, self.transpose_a), (self.b, self.transpose_b)))
        return f"{self.c} {'+=' if self.accumulate else '='} {a} @ {b}"


@dataclass(frozen=True, eq=False)
class Reduce(Statement):
    """A reduction of `src` along one axis into `dst`, or into what `dst` holds if `accumulate`.

    Invariant: `dst` has the extents of `src` without `axis`, up to ones; `kind` is ``"sum"``, ``"max"`` or ``"min"``,
    or ``"reduce"``, of which alone there is a `reducer`.

    Attributes
    ----------
    kind : str
        The word.
    dst, src : Region
        What is written, and what is reduced.
    axis : int
        The dimension of `src` along which it is.
    accumulate : bool
        Whether results are combined with what `dst` holds.
    reducer : CommReducer or None
        A function of one's own: two variables, the expression of them, and the identity, all of the type that
        `reducers.combined_type` says.
    """

    kind: str
    dst: Region
    src: Region
    axis: int
    accumulate: bool
    reducer: tirx.CommReducer | None = None

    @property
    def dtype(self) -> str:
        """The type in which elements are compared or added: the source's, where `dst` is of integers and lacks some.

        As numpy does it, the result is converted, and not each element.
        """
        return reduced_type(self.src.tile.dtype, self.dst.tile.dtype)

    def combined(self, a: Any, b: Any) -> Any:
        """The combination of two values, which are in it as often as the function names them."""
        return combined(self.kind, self.reducer, a, b)

    def identity(self, dtype: str) -> tirx.Expr:
        """The constant of a type that changes no result."""
        return identity_of(self.kind, self.reducer, dtype)

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.src.tile,) + ((self.dst.tile,) if self.accumulate else ())

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.dst.tile,)

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self.dst, self.src)

    def __str__(self) -> str:
        what = self.kind if self.reducer is None else str(self.reducer.result[0])
        return f"{self.dst} {'accumulates' if self.accumulate else '='} {what} of {self.src} along {self.axis}"


@dataclass(frozen=True, eq=False)
class Sort(Statement):
    """The first elements of each line of `src` along an axis, in an order: their values, their places in the line.

    Invariant: there are `values`, `indices` or both, of the extents of `src` with `count` in the place of `axis`, or
    without it for ``"argmax"`` and ``"argmin"``, up to ones.

    Attributes
    ----------
    word : str
        ``"argmax"``, ``"argmin"``, ``"sort"`` or ``"top_k"``.
    values, indices : Region or None
        What is written.
    src : Region
        What is ordered.
    axis : int
        The dimension of `src` along which it is.
    descending : bool
        Whether the largest come first.
    """

    word: str
    values: Region | None
    indices: Region | None
    src: Region
    axis: int
    descending: bool

    @property
    def results(self) -> tuple[Region, ...]:
        """What is written: values first."""
        return tuple(region for region in (self.values, self.indices) if region is not None)

    @property
    def keeps_axis(self) -> bool:
        """Whether results have a dimension in the axis' place."""
        return self.word in ("sort", "top_k")

    @property
    def count(self) -> int:
        """How many elements of a line there are in a result."""
        return self.results[0].extents[-1] if self.keeps_axis else 1

    @property
    def length(self) -> int:
        """How many elements a line has."""
        return self.src.extents[self.axis]

    @property
    def nan_first(self) -> bool:
        """Whether a NaN comes before all else, and not behind it."""
        return self.descending or self.word == "argmin"

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.src.tile,)

    @property
    def writes(self) -> tuple[Tile, ...]:
        return tuple(region.tile for region in self.results)

    @property
    def regions(self) -> tuple[Region, ...]:
        return (*self.results, self.src)

    def __str__(self) -> str:
        results = ", ".join(f"{region}" for region in self.results)
        what = " and ".join(name for name in ("values", "indices") if getattr(self, name) is not None)
        order = {"sort": ", descending" * self.descending, "top_k": ", smallest" * (not self.descending)}
        return f"{results} = {what} of {self.word} of {self.src} along {self.axis}{order.get(self.word, '')}"


@dataclass(frozen=True, eq=False)
class Scan(Statement):
    """Sums of the elements of `src` up to each one along an axis, into `dst`.

    Invariant: both regions have the same `shape`.

    Attributes
    ----------
    reverse : bool
        Whether the sums are of each element and those behind it.
    exclusive : bool
        Whether they leave out the element itself.
    """

    dst: Region
    src: Region
    axis: int
    reverse: bool
    exclusive: bool

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.src.tile,)

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.dst.tile,)

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self.dst, self.src)

    def __str__(self) -> str:
        notes = ", reverse" * self.reverse + ", exclusive" * self.exclusive
        return f"{self.dst} = sums of {self.src} along {self.axis}{notes}"
