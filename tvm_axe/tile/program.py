"""A tile program, read: what `tvm_axe.tile`'s words became, as a tree that targets lower.

`read` checks what holds on every target (shapes, bounds, races) and refuses the rest. Nodes keep upstream's variables
and expressions; `reads` and `writes` say which tiles and tensors a node touches, so that a target finds dependences
without looking at what kind of node it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from tvm_axe.errors import TileError
from tvm_axe.layout import Layout
from tvm_axe.tile.language import FRAGMENT, GRID, LAYOUT, OPTIONS, STAGES

_OPERATION = "tirx.tile."
_SCOPES = {"global": "global", "shared": "shared", FRAGMENT: "fragment", "local": "local"}


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
    layout: Layout | None = None

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


@dataclass(frozen=True, eq=False)
class Let:
    """A name for a scalar, the same for all threads of a block: ``length = lengths[batch]``."""

    var: tirx.Var
    value: tirx.Expr
    reads: tuple[Tile, ...]
    writes = ()


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


Node = Copy | Fill | Gemm | Reduce | Parallel | Loop | Branch | Let | Assign


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel: its parameters, tiles, grid and options, and what a block does.

    Attributes
    ----------
    func : the function as written
    params : its tensors in global memory, in order
    tiles : the tiles on chip, in order of allocation
    grid : (variable, extent), the slowest first
    options : of `tvm_axe.tile.kernel`, only those given
    body : what a block does, in order
    """

    func: tirx.PrimFunc
    params: tuple[Tile, ...]
    tiles: tuple[Tile, ...]
    grid: tuple[tuple[tirx.Var, tirx.Expr], ...]
    options: Mapping[str, object]
    body: tuple[Node, ...]

    @property
    def name(self) -> str:
        return str(self.func.attrs["global_symbol"]) if "global_symbol" in self.func.attrs else "main"

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
        without constant extents; a copy that leaves a tile, or that starts outside of a tensor; stores of `parallel`
        that race; a pipelined loop with more stages than iterations, or whose iterations race on a shared tile.
    """
    from tvm_axe.tile.checks import check

    program = _Reader(func).program()
    check(program)
    return program


def tiles_of(value: object, known: Mapping[tirx.Buffer, Tile]) -> tuple[Tile, ...]:
    """The tiles and tensors that an expression loads from."""
    found: dict[Tile, None] = {}
    tvm_ffi.structural_walk(value, (ir.TensorLoad, lambda load: found.setdefault(known[load.source])))
    return tuple(found)


def _union(nodes: tuple[Node, ...], what: str) -> tuple[Tile, ...]:
    return tuple(dict.fromkeys(tile for node in nodes for tile in getattr(node, what)))


@dataclass
class _Reader:
    func: tirx.PrimFunc
    known: dict[tirx.Buffer, Tile] = field(default_factory=dict)
    tiles: list[Tile] = field(default_factory=list)

    def program(self) -> Program:
        params = []
        for param in self.func.params:
            buffer = self.func.buffer_map.get(param, None) if not _is_buffer(param) else param
            if buffer is None:
                raise TileError(f"parameter {param.name}: a tile program takes tensors, not scalars")
            tile = Tile(buffer, "global", tuple(_constant(e) for e in buffer.shape), str(buffer.dtype))
            self.known[buffer] = tile
            params.append(tile)
        grid, options, body = self._kernel(self.func.body)
        return Program(self.func, tuple(params), tuple(self.tiles), grid, options, self._nodes(body))

    def _kernel(self, stmt: tirx.Stmt) -> tuple[tuple, dict[str, object], tirx.Stmt]:
        if not (isinstance(stmt, tirx.For) and GRID in stmt.annotations):
            raise TileError(
                "a tile program is one `with tile.kernel(...)` and nothing beside it; "
                f"found {type(stmt).__name__} at its top"
            )
        grid, options = [], {}
        while isinstance(stmt, tirx.For) and GRID in stmt.annotations:
            grid.append((stmt.loop_var, _constant(stmt.extent)))
            for name in OPTIONS:
                if f"axe.{name}" in stmt.annotations:
                    options[name] = _plain(stmt.annotations[f"axe.{name}"])
            stmt = stmt.body
        return tuple(grid), options, stmt

    def _nodes(self, stmt: tirx.Stmt) -> tuple[Node, ...]:
        if isinstance(stmt, tirx.SeqStmt):
            return tuple(node for inner in stmt.seq for node in self._nodes(inner))
        if isinstance(stmt, tirx.AllocBuffer):
            self._allocate(stmt)
            return ()
        return (self._node(stmt),)

    def _allocate(self, stmt: tirx.AllocBuffer) -> None:
        buffer = stmt.buffer
        scope = _SCOPES.get(str(buffer.scope()))
        if scope in (None, "global"):
            raise TileError(f"tile {buffer.name}: scope {buffer.scope()!r}; valid are shared, fragment and local tiles")
        shape = tuple(_constant(extent) for extent in buffer.shape)
        if not all(isinstance(extent, int) and extent > 0 for extent in shape):
            raise TileError(f"tile {buffer.name}: extents are positive constants, got {[str(e) for e in shape]}")
        text = stmt.annotations.get(LAYOUT, None)
        tile = Tile(buffer, scope, shape, str(buffer.dtype), None if text is None else Layout.parse(str(text)))
        self.known[buffer] = tile
        self.tiles.append(tile)

    def _node(self, stmt: tirx.Stmt) -> Node:
        if isinstance(stmt, tirx.TilePrimitiveCall):
            return self._operation(stmt)
        if isinstance(stmt, tirx.For):
            if stmt.kind == tirx.ForKind.PARALLEL:
                return self._parallel(stmt)
            if GRID in stmt.annotations:
                raise TileError("kernel: a kernel inside a kernel")
            stages = stmt.annotations.get(STAGES, None)
            body = self._nodes(stmt.body)
            return Loop(stmt.loop_var, stmt.min, _constant(stmt.extent), None if stages is None else int(stages), body)
        if isinstance(stmt, tirx.IfThenElse):
            otherwise = () if stmt.else_case is None else self._nodes(stmt.else_case)
            return Branch(stmt.condition, self._nodes(stmt.then_case), otherwise)
        if isinstance(stmt, tirx.Bind):
            return Let(stmt.var, stmt.value, tiles_of(stmt.value, self.known))
        if isinstance(stmt, tirx.BufferStore):
            tile = self.known[stmt.buffer]
            if tile.scope != "local":
                raise TileError(
                    f"{tile.name}[{', '.join(map(str, stmt.indices))}] is stored outside of `parallel`, by every "
                    f"thread; valid there are tiles of `local`, and in `with tile.parallel(...)` all others"
                )
            return Assign(tile, tuple(stmt.indices), stmt.value, tiles_of([stmt.value, list(stmt.indices)], self.known))
        raise TileError(f"{type(stmt).__name__} is no part of a tile program:\n{stmt}")

    def _operation(self, call: tirx.TilePrimitiveCall) -> Node:
        kind, args = str(call.op.name).removeprefix(_OPERATION), list(call.args)
        if kind in ("copy", "cast"):
            return Copy(self._region(args[0]), self._region(args[1]), "atomic" in call.config)
        if kind == "fill":
            return Fill(self._region(args[0]), args[1])
        if kind == "gemm":
            d, a, b, c = (self._region(arg) for arg in args[:4])
            alpha, beta = float(args[6]), float(args[7])
            if d.tile is not c.tile or alpha != 1 or beta not in (0, 1):
                raise TileError(
                    f"gemm: {d.tile.name} = {alpha} * a @ b + {beta} * {c.tile.name}; valid is c (+)= a @ b"
                )
            instruction = call.config.get("instruction", None)
            name = None if instruction is None else str(_plain(instruction))
            return Gemm(d, a, b, bool(args[4]), bool(args[5]), beta == 1, name)
        if kind in ("sum", "max", "min"):
            dst, src, axes = self._region(args[0]), self._region(args[1]), [int(axis) for axis in args[2]]
            if len(axes) != 1:
                raise TileError(f"{kind}: along axes {axes}; a tile is reduced along one axis at a time")
            return Reduce(kind, dst, src, axes[0] % len(src.extents), bool(args[3]))
        raise TileError(f"{kind} is no word of tvm_axe.tile; elementwise computation is written in `parallel`")

    def _region(self, region: tirx.BufferRegion) -> Region:
        extents = tuple(_constant(r.extent) for r in region.region)
        if not all(isinstance(extent, int) for extent in extents):
            raise TileError(f"a region of {region.source.name} has no constant extents: {[str(e) for e in extents]}")
        return Region(self.known[region.source], tuple(r.min for r in region.region), extents)

    def _parallel(self, stmt: tirx.For) -> Parallel:
        points, extents = [], []
        while isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.PARALLEL:
            extent = _constant(stmt.extent)
            if not isinstance(extent, int):
                raise TileError(f"parallel: extents are constants, got {extent}")
            points.append(stmt.loop_var)
            extents.append(extent)
            stmt = stmt.body
        accesses: list[tuple[Tile, tuple, bool]] = []

        def on_load(load: ir.TensorLoad) -> None:
            accesses.append((self.known[load.source], tuple(load.indices), False))

        def on_store(store: tirx.BufferStore) -> None:
            accesses.append((self.known[store.buffer], tuple(store.indices), True))

        def refuse(inner: tirx.Stmt) -> None:
            raise TileError(f"parallel: {type(inner).__name__} in its body; valid are stores, names and `if`")

        for kind in (tirx.TilePrimitiveCall, tirx.For, tirx.AllocBuffer):
            tvm_ffi.structural_walk(stmt, (kind, refuse))
        tvm_ffi.structural_walk(stmt, (ir.TensorLoad, on_load))
        tvm_ffi.structural_walk(stmt, (tirx.BufferStore, on_store))
        return Parallel(tuple(points), tuple(extents), stmt, tuple(accesses))


def _is_buffer(param: tirx.Var) -> bool:
    return tirx.is_buffer_var(param)


def _constant(value: Any) -> Any:
    return int(value) if isinstance(value, (int, tirx.IntImm)) else value


def _plain(value: Any) -> Any:
    if isinstance(value, (tirx.IntImm, int)):
        return int(value)
    return str(value) if isinstance(value, (str, ir.StringImm)) else [int(item) for item in value]
