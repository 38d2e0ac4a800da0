"""A tile program, read: what `tvm_axe.tile`'s words became, as a tree that targets lower.

`read` checks what holds on every target (shapes, bounds, races) and refuses the rest. Nodes keep upstream's variables
and expressions; `reads` and `writes` say which tiles and tensors a node touches, so that a target finds dependences
without looking at what kind of node it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from tvm_axe.layout import ComposeLayout, Layout


@dataclass(frozen=True, eq=False)
class Tile:
    """A tile on chip, or a parameter in global memory.

    Attributes
    ----------
    buffer : upstream's variable, which names it in the program
    scope : ``"global"``, ``"shared"``, ``"fragment"`` or ``"local"``
    shape : extents; those of a parameter may be expressions
    layout : as annotated, or None to be inferred
    """

    buffer: tirx.Buffer
    scope: str
    shape: tuple
    dtype: str
    layout: Layout | ComposeLayout | None = None

    @property
    def name(self) -> str:
        return str(self.buffer.name)

    @property
    def bytes(self) -> int:
        """Size without padding, in bytes; only of a tile on chip."""
        return math.prod(self.shape) * tvm_ffi.dtype(self.dtype).bits // 8

    def __str__(self) -> str:
        return f"{self.scope} {self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Region:
    """A box of a tile: where it starts, an expression a dimension, and its constant extents."""

    tile: Tile
    start: tuple
    extents: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents without the ones that the other side of a copy may not have; at least one."""
        return tuple(extent for extent in self.extents if extent != 1) or (1,)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions of the tile that `shape`'s extents are of."""
        found = tuple(d for d, extent in enumerate(self.extents) if extent != 1)
        return found or (len(self.extents) - 1,)

    @property
    def whole(self) -> bool:
        """Whether it is all of the tile."""
        return self.extents == self.tile.shape

    def overruns(self, analyzer: sym.Analyzer) -> tuple[int, ...]:
        """The dimensions in which it isn't proved to end inside the tile; only in global memory are there any."""
        pairs = enumerate(zip(self.start, self.extents, self.tile.shape))
        return tuple(d for d, (start, extent, size) in pairs if not analyzer.can_prove(start + extent <= size))

    def __str__(self) -> str:
        if self.whole and all(isinstance(constant(s), int) and int(s) == 0 for s in self.start):
            return self.tile.name
        parts = (f"{s}" if e == 1 else f"{s}:{s + e}" for s, e in zip(self.start, self.extents))
        return f"{self.tile.name}[{', '.join(parts)}]"


@dataclass(frozen=True, eq=False)
class Copy:
    dst: Region
    src: Region
    atomic: bool

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.src.tile,)

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.dst.tile,)

    def __str__(self) -> str:
        return f"copy {self.src} to {self.dst}" + (", adding atomically" if self.atomic else "")


@dataclass(frozen=True, eq=False)
class Fill:
    dst: Region
    value: tirx.Expr
    reads = ()

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.dst.tile,)

    def __str__(self) -> str:
        return f"fill {self.dst} with {self.value}"


@dataclass(frozen=True, eq=False)
class Gemm:
    """``c (+)= a @ b`` of m x k and k x n; `instruction` as annotated, or None."""

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

    def __str__(self) -> str:
        a, b = (f"{r}.T" if t else f"{r}" for r, t in ((self.a, self.transpose_a), (self.b, self.transpose_b)))
        return f"{self.c} {'+=' if self.accumulate else '='} {a} @ {b}"


@dataclass(frozen=True, eq=False)
class Reduce:
    """`kind` (``"sum"``, ``"max"`` or ``"min"``) along one axis of `src`, into `dst` or added to what it holds."""

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

    def __str__(self) -> str:
        return f"{self.dst} {'accumulates' if self.accumulate else '='} {self.kind} of {self.src} along {self.axis}"


@dataclass(frozen=True, eq=False)
class Parallel:
    """Elements stored for every point of `extents`; `body` is upstream's statement, `accesses` all that it touches.

    An access is (tile, indices, is it a store).
    """

    vars: tuple[tirx.Var, ...]
    extents: tuple[int, ...]
    body: tirx.Stmt
    accesses: tuple[tuple[Tile, tuple, bool], ...]

    @cached_property
    def reads(self) -> tuple[Tile, ...]:
        return tuple(dict.fromkeys(tile for tile, _, stores in self.accesses if not stores))

    @cached_property
    def writes(self) -> tuple[Tile, ...]:
        return tuple(dict.fromkeys(tile for tile, _, stores in self.accesses if stores))

    def __str__(self) -> str:
        return f"parallel {' x '.join(map(str, self.extents))} into {', '.join(t.name for t in self.writes)}"


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop in order. `stages` is None for an ordinary one, 0 for a pipelined one whose stages are to be inferred."""

    var: tirx.Var
    start: tirx.Expr
    extent: tirx.Expr
    stages: int | None
    body: tuple[Node, ...]

    @cached_property
    def reads(self) -> tuple[Tile, ...]:
        return _union(self.body, "reads")

    @cached_property
    def writes(self) -> tuple[Tile, ...]:
        return _union(self.body, "writes")

    def __str__(self) -> str:
        start, stop = constant(self.start), sym.Analyzer().simplify(self.start + self.extent)
        span = f"{stop}" if isinstance(start, int) and start == 0 else f"{start}, {stop}"
        if self.stages is None:
            return f"for {self.var.name} in range({span})"
        return f"for {self.var.name} in pipelined({span}{f', stages={self.stages}' if self.stages else ''})"


@dataclass(frozen=True, eq=False)
class Branch:
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

    def __str__(self) -> str:
        return f"if {self.condition}"


@dataclass(frozen=True, eq=False)
class Let:
    """A name for a scalar, the same for all threads of a block: ``length = lengths[batch]``."""

    var: tirx.Var
    value: tirx.Expr
    reads: tuple[Tile, ...]
    writes = ()

    def __str__(self) -> str:
        return f"{self.var.name} = {self.value}"


@dataclass(frozen=True, eq=False)
class Assign:
    """An element of a local tile, the same for all threads: ``count[0] = count[0] + 1``."""

    tile: Tile
    indices: tuple
    value: tirx.Expr
    reads: tuple[Tile, ...]

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.tile,)

    def __str__(self) -> str:
        return f"{self.tile.name}[{', '.join(map(str, self.indices))}] = {self.value}"


@dataclass(frozen=True, eq=False)
class Wait:
    """Go on when every flag is at least `value`; with `reset` the flags are set to 0 then."""

    flags: Region
    value: tirx.Expr
    reset: bool

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.flags.tile,)

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.flags.tile,) if self.reset else ()

    def __str__(self) -> str:
        return f"wait for {self.flags} >= {self.value}" + (", then reset" if self.reset else "")


@dataclass(frozen=True, eq=False)
class Signal:
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

    def __str__(self) -> str:
        return f"signal {self.flags} {'+=' if self.add else '='} {self.value}" + ("" if self.ordered else ", at once")


Node = Copy | Fill | Gemm | Reduce | Parallel | Loop | Branch | Let | Assign | Wait | Signal


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel: its parameters, tiles, grid and options, and what a block does.

    Attributes
    ----------
    func : the function as written
    params : its tensors in global memory, in order
    scalars : its scalar parameters, in order, between the tensors or behind them
    tiles : the tiles on chip, in order of allocation
    grid : (variable, extent), the slowest first
    options : of `tvm_axe.tile.kernel`, only those given
    body : what a block does, in order
    """

    func: tirx.PrimFunc
    params: tuple[Tile, ...]
    scalars: tuple[tirx.Var, ...]
    tiles: tuple[Tile, ...]
    grid: tuple[tuple[tirx.Var, tirx.Expr], ...]
    options: Mapping[str, object]
    body: tuple[Node, ...]

    @property
    def name(self) -> str:
        return str(self.func.attrs["global_symbol"]) if "global_symbol" in self.func.attrs else "main"

    def __str__(self) -> str:
        """What was read, a line a tile and a node; it reads like the source."""
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        grid = ", ".join(f"{var.name} < {extent}" for var, extent in self.grid)
        lines = [f"kernel {self.name}({', '.join(str(p.name) for p in self.func.params)}) for {grid}{options}"]
        lines += [f"    scalar {scalar.name}: {scalar.ty}" for scalar in self.scalars]
        lines += [f"    {tile}" for tile in (*self.params, *self.tiles)]
        return "\n".join([*lines, *_lines(self.body, "    ")])

    def nodes(self) -> Iterator[Node]:
        """Every node, loops and branches before what is in them."""
        return walk(self.body)

    def analyzer(self) -> sym.Analyzer:
        """An analyzer that knows the ranges of the grid's and the loops' variables."""
        analyzer = sym.Analyzer()
        for var, extent in self.grid:
            analyzer.bind(var, ir.Range.from_min_extent(0, extent))
        for node in self.nodes():
            if isinstance(node, Loop):
                analyzer.bind(node.var, ir.Range.from_min_extent(node.start, node.extent))
        return analyzer


def _lines(body: tuple[Node, ...], indent: str) -> Iterator[str]:
    for node in body:
        nested = isinstance(node, Loop | Branch)
        yield f"{indent}{node}{':' if nested else ''}"
        if isinstance(node, Loop):
            yield from _lines(node.body, indent + "    ")
        elif isinstance(node, Branch):
            yield from _lines(node.then, indent + "    ")
            if node.otherwise:
                yield f"{indent}else:"
                yield from _lines(node.otherwise, indent + "    ")


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """Every node of a body, loops and branches before what is in them."""
    for node in body:
        yield node
        if isinstance(node, Loop):
            yield from walk(node.body)
        elif isinstance(node, Branch):
            yield from walk(node.then + node.otherwise)


def read(func: tirx.PrimFunc) -> Program:
    """Read a tile program and check what holds on every target.

    Raises
    ------
    TileError
        No kernel, or more than one, or statements beside it; a statement that is none of the language's words; a tile
        without constant extents; operands whose shapes, scopes or types don't go together; a copy that leaves a tile,
        or that starts outside of a tensor; an access of `parallel` outside of a tile; points of a `parallel`, or
        blocks, that race; what is read and was never written; a pipelined loop with more stages than iterations, or
        whose iterations race on a shared tile; flags that aren't int32 in global memory, lie outside of their tensor,
        are touched otherwise too, or are set or reset by several blocks.
    """
    from tvm_axe.tile.checks import check
    from tvm_axe.tile.reading import Reader

    program = Reader(func).program()
    check(program)
    return program


def tiles_of(value: object, known: Mapping[tirx.Buffer, Tile]) -> tuple[Tile, ...]:
    """The tiles and tensors that an expression loads from."""
    found: dict[Tile, None] = {}
    tvm_ffi.structural_walk(value, (ir.TensorLoad, lambda load: found.setdefault(known[load.source])))
    return tuple(found)


def substitute(nodes: tuple[Node, ...], values: Mapping[tirx.Var, tirx.Expr]) -> tuple[Node, ...]:
    """The nodes with variables replaced by expressions; tiles stay, and nodes in which nothing changes do too."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Tile | str | int | None):
            return value
        if isinstance(value, tuple):
            mapped = tuple(replaced(item) for item in value)
            return value if all(a is b for a, b in zip(mapped, value)) else mapped
        if isinstance(value, Region | Node):
            changes = {f.name: replaced(getattr(value, f.name)) for f in fields(value)}
            changed = {name: new for name, new in changes.items() if new is not getattr(value, name)}
            return replace(value, **changed) if changed else value
        mapped = substitute_in(value, values)
        return value if mapped.same_as(value) else mapped

    return tuple(replaced(node) for node in nodes) if values else nodes


def substitute_in(value: Any, values: Mapping[tirx.Var, tirx.Expr]) -> Any:
    """An expression or a statement with variables, and the tensors it loads from, replaced."""
    return tvm_ffi.structural_map(value, (tirx.Var, lambda var: values.get(var, var)))


def _union(nodes: tuple[Node, ...], what: str) -> tuple[Tile, ...]:
    return tuple(dict.fromkeys(tile for node in nodes for tile in getattr(node, what)))


def constant(value: Any) -> Any:
    """An integer where a value is one, else the value."""
    return int(value) if isinstance(value, (int, tirx.IntImm)) else value
