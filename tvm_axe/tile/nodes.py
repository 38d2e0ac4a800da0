"""The nodes of a tile program, which say what a block does.

Nodes keep upstream's variables and expressions. What every node has (`Statement`, with `reads` and `writes`) says which
tiles and tensors it touches, so that checks and targets find dependences without looking at what kind of node it is;
where the kind matters, they have a table with an entry a kind (`tvm_axe.tile.dispatch`).

To add a node takes

1. its class here, a frozen dataclass that derives from `Statement`, in the union `Node`: `reads`, `writes`, `__str__`,
   and what it has of `regions`, `operands` and `bodies`;
2. its word in `tvm_axe.tile.language`, and an entry in a table of `tvm_axe.tile.reading`, by what upstream makes of it;
   a word that upstream has no primitive for is a call (`tvm_axe.tile.calls`);
3. its rules, an entry in a table each: `tvm_axe.tile.checks` (what must hold on every target) and `tvm_axe.tile.races`
   (what it stores, from several blocks);
4. an entry in the tables of each target: for CPUs in ``targets/llvm/emit.py``; for GPUs in ``targets/cuda/fragments``
   (`emit` the code, `infer` what follows for layouts, `scratch` the memory for exchanges), ``uniform`` (`emit`,
   `hazards`, `memory`) and ``specialized`` (`obstacles`, `ordering`, `schedule` for consumers, `one_thread` for the
   other roles, with an entry in `producer` or `storer` where one of these does it);
5. its meaning in the judge of the tests, ``tests/tile/interpreter.py``. ``tests/tile/test_dispatch.py`` knows all
   tables, and fails for each that has no entry for a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import sym, tirx

from tvm_axe.tile.ending import ENDLESS
from tvm_axe.tile.regions import Region, Tile, constant


class Statement:
    """What every node has; each derived class has `reads`, `writes`, and what it has of the rest.

    Invariants: `reads` and `writes` are all tiles and tensors whose elements the node loads and stores (those of its
    scalars are no part of `reads`, but for names and local tiles, which are made of nothing else); a node with `bodies`
    touches by itself its scalars only, and its `reads` and `writes` are the union of those of the nodes in them. Nodes
    are compared by identity: one node stands in one place of a program.
    """

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions that it moves or computes on, those that it writes first."""
        return ()

    @property
    def operands(self) -> tuple[Any, ...]:
        """Its expressions beside the starts of its regions that all threads of a block compute alike."""
        return ()

    @property
    def joins(self) -> tuple[tuple[Tile, str], ...]:
        """The tensors of `writes` whose elements it joins with values atomically, and how: add, max or min."""
        return ()

    @property
    def bodies(self) -> tuple[tuple[Node, ...], ...]:
        """The lists of nodes in it: one of a loop, two of a branch, none of what is no control flow."""
        return ()

    @property
    def starts(self) -> tuple[Any, ...]:
        """Where its regions start."""
        return tuple(start for region in self.regions for start in region.start)

    @property
    def scalars(self) -> tuple[Any, ...]:
        """All expressions that every thread of a block computes alike."""
        return (*self.starts, *self.operands)


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

    Invariant: `dst` has the extents of `src` without `axis`, up to ones; `kind` is ``"sum"``, ``"max"`` or ``"min"``.
    """

    kind: str
    dst: Region
    src: Region
    axis: int
    accumulate: bool

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
        return f"{self.dst} {'accumulates' if self.accumulate else '='} {self.kind} of {self.src} along {self.axis}"


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


Node = Copy | Fill | Gemm | Reduce | Sort | Scan | Parallel | Loop | Branch | Let | Assign | Wait | Signal | Print


def _union(nodes: tuple[Node, ...], what: str) -> tuple[Tile, ...]:
    return tuple(dict.fromkeys(tile for node in nodes for tile in getattr(node, what)))
