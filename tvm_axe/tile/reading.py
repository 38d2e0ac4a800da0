"""Reading: from upstream's function to a `TileProgram`, whose nodes are in `tvm_axe.tile.nodes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from tvm_axe.errors import TileError
from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.tile import calls
from tvm_axe.tile.arithmetic import plain
from tvm_axe.tile.assuming import assumptions_of
from tvm_axe.tile.atomics import CAS, joined
from tvm_axe.tile.bodies import written_out
from tvm_axe.tile.checks import check
from tvm_axe.tile.cuts import is_sequence
from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.ending import UNTIL, structured
from tvm_axe.tile.flags import ADD, LOADS, ORDERED, RESET, SIGNAL, WAIT
from tvm_axe.tile.knobs import Setting, settings, settled
from tvm_axe.tile.language import DEVICE, DISTINCT, FRAGMENT, GRID, LAYOUT, OPTIONS, STAGES, check_options
from tvm_axe.tile.mesh import check_device, is_mesh_tensor
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
from tvm_axe.tile.order import CUMSUM, INDICES, ORDERS, VALUES
from tvm_axe.tile.printing import PRINT, parts
from tvm_axe.tile.program import TileProgram, name_of
from tvm_axe.tile.reducers import REDUCER, check_reducer, without_choices
from tvm_axe.tile.regions import Region, Tile, constant
from tvm_axe.tile.strides import check_strides, laid_out, own_strides
from tvm_axe.tile.walking import tiles_of

_OPERATION = "tirx.tile."
SCALARS = ("int32", "int64", "float32", "float64")
"""Types of scalar parameters."""

_NESTED = "kernel: a kernel inside a kernel; valid are kernels one after the other, and one grid of up to 3 extents"

_SCOPES = {"global": "global", "shared": "shared", FRAGMENT: "fragment", "local": "local"}


@dataclass
class Reader:
    """Reads one function; `known` has the tile behind each buffer so far, `tiles` those on chip, in order."""

    func: tirx.PrimFunc
    known: dict[tirx.Buffer, Tile] = field(default_factory=dict)
    tiles: list[Tile] = field(default_factory=list)
    grid: tuple[tirx.Var, ...] = ()

    def parameters(self) -> tuple[tuple[Tile, ...], tuple[tirx.Var, ...]]:
        """The tensors and the scalars among the parameters."""
        params, scalars = [], []
        for param in self.func.params:
            if not tirx.is_buffer_var(param):
                if str(param.ty) not in SCALARS:
                    raise TileError(f"parameter {param.name}: {param.ty}; valid scalars are {', '.join(SCALARS)}")
                scalars.append(param)
                continue
            shape = tuple(constant(extent) for extent in param.shape)
            is_mesh, strides = is_mesh_tensor(param), own_strides(param)
            tile = Tile(param, "global", shape, str(param.dtype), is_mesh=is_mesh, strides=strides)
            self.known[param] = tile
            params.append(tile)
        return tuple(params), tuple(scalars)

    def program(self, settings: tuple[Setting, ...] = ()) -> TileProgram:
        params, scalars = self.parameters()
        assumptions, body = assumptions_of(self.func)
        kernel = structured(plain(body))
        grid, options, stmt = self._kernel(kernel)
        self.grid = tuple(var for var, _ in grid)
        device = kernel.annotations.get(DEVICE, None)
        check_device(device, params, scalars)
        if device is not None and any(each.var.same_as(device) for each in assumptions):
            raise TileError(f"assume: {device.name} is the device that runs, 0 to the mesh tensors' number of them")
        nodes = self._nodes(stmt)
        check_strides(params, {tile for node in nodes for tile in node.writes}, scalars)
        return TileProgram(
            self.func,
            params,
            scalars,
            tuple(self.tiles),
            grid,
            options,
            nodes,
            device,
            settings,
            assumptions,
        )

    def _kernel(self, stmt: tirx.Stmt) -> tuple[tuple, dict[str, object], tirx.Stmt]:
        if is_sequence(self.func):
            raise TileError(
                f"{name_of(self.func)}: several kernels, or scratch; valid here is one `with tile.kernel(...)`: "
                "tile.read_sequence reads such functions, each of whose kernels is a program of its own"
            )
        if not (isinstance(stmt, tirx.For) and GRID in stmt.annotations):
            instead = "; a function of blocks is compiled by tvm_axe.compile" if self.func.attrs.get("s_tir") else ""
            raise TileError(
                "a tile program is one `with tile.kernel(...)` and nothing beside it; found "
                f"{type(stmt).__name__} at its top{instead}"
            )
        grid: list[tuple[tirx.Var, Any]] = []
        options: dict[str, object] = {}
        while isinstance(stmt, tirx.For) and GRID in stmt.annotations:
            if int(stmt.annotations[GRID]) != len(grid):
                raise TileError(_NESTED)
            grid.append((stmt.loop_var, constant(stmt.extent)))
            for name in OPTIONS:
                if f"axe.{name}" in stmt.annotations:
                    options[name] = _plain(stmt.annotations[f"axe.{name}"])
            stmt = stmt.body
        check_options({f"axe.{name}": value for name, value in options.items()})
        return tuple(grid), options, stmt

    def _nodes(self, stmt: tirx.Stmt) -> tuple[Node, ...]:
        if isinstance(stmt, tirx.SeqStmt):
            return tuple(node for inner in stmt.seq for node in self._nodes(inner))
        if isinstance(stmt, tirx.AllocBuffer):
            self._allocate(stmt)
            return ()
        if calls.is_nothing(stmt):
            return ()
        return (self._node(stmt),)

    def _allocate(self, stmt: tirx.AllocBuffer) -> None:
        buffer = stmt.buffer
        scope = _SCOPES.get(str(buffer.scope()))
        if scope == "global":
            raise TileError(
                f"tile {buffer.name}: scratch of a kernel; valid is tile.scratch before the first kernel of the "
                "function, and within one shared, fragment and local tiles"
            )
        if scope is None:
            raise TileError(f"tile {buffer.name}: scope {buffer.scope()!r}; valid are shared, fragment and local tiles")
        shape = tuple(constant(extent) for extent in buffer.shape)
        if not all(isinstance(extent, int) and extent > 0 for extent in shape):
            raise TileError(
                f"tile {buffer.name}: extents are positive constants, got {[str(e) for e in shape]}; valid is a name "
                "of a number, T.meta_var(number), and a tile.knob"
            )
        text = stmt.annotations.get(LAYOUT, None)
        tile = Tile(buffer, scope, shape, str(buffer.dtype), None if text is None else _layout(str(text)))
        self.known[buffer] = tile
        self.tiles.append(tile)

    def _node(self, stmt: tirx.Stmt) -> Node:
        if type(stmt) not in _STATEMENTS.types or (
            isinstance(stmt, tirx.Evaluate) and calls.called(stmt) not in _CALLS
        ):
            raise TileError(f"{type(stmt).__name__} is no part of a tile program:\n{stmt}")
        return _STATEMENTS.of(stmt)(self, stmt)

    def _for(self, stmt: tirx.For) -> Node:
        if stmt.kind == tirx.ForKind.PARALLEL:
            return self._parallel(stmt)
        if GRID in stmt.annotations:
            raise TileError(_NESTED)
        stages = stmt.annotations.get(STAGES, None)
        body, until = self._nodes(stmt.body), stmt.annotations.get(UNTIL, None)
        ahead = None if stages is None else int(stages)
        return Loop(stmt.loop_var, stmt.min, constant(stmt.extent), ahead, body, until)

    def _if(self, stmt: tirx.IfThenElse) -> Node:
        otherwise = () if stmt.else_case is None else self._nodes(stmt.else_case)
        return Branch(stmt.condition, self._nodes(stmt.then_case), otherwise)

    def _bind(self, stmt: tirx.Bind) -> Node:
        return Let(stmt.var, stmt.value, tiles_of(stmt.value, self.known))

    def _store(self, stmt: tirx.BufferStore) -> Node:
        tile = self.known[stmt.buffer]
        if tile.scope != "local":  # an element that the block stores once: one point
            return self._once(stmt)
        return Assign(tile, tuple(stmt.indices), stmt.value, tiles_of([stmt.value, list(stmt.indices)], self.known))

    def _once(self, stmt: tirx.Stmt) -> Parallel:
        return self._stored((tirx.Var("once", "int32"),), (1,), written_out(stmt, self.known, _CALLS), distinct=False)

    def _called(self, stmt: tirx.Evaluate) -> Node:
        return _CALLS[str(calls.called(stmt))](self, stmt)

    def _on_flags(self, stmt: tirx.Evaluate) -> Node:
        word, flag, value, mode, *extents = stmt.value.args
        flags = Region(self.known[flag.source], tuple(flag.indices), tuple(int(extent) for extent in extents))
        if str(word.value) == WAIT:
            return Wait(flags, value, bool(int(mode) & RESET), bool(int(mode) & LOADS))
        return Signal(flags, value, bool(int(mode) & ORDERED), bool(int(mode) & ADD))

    def _operation(self, call: tirx.TilePrimitiveCall) -> Node:
        word = str(call.op.name).removeprefix(_OPERATION)
        if word not in _WORDS:
            raise TileError(f"{word} is no word of tvm_axe.tile; elementwise computation is written in `parallel`")
        return _WORDS[word](self, word, call)

    def _copy(self, word: str, call: tirx.TilePrimitiveCall) -> Node:
        atomic = call.config.get("atomic", None)
        dst, src = (self._region(arg) for arg in call.args[:2])
        return Copy(dst, src, None if atomic is None else str(_plain(atomic)))

    def _fill(self, word: str, call: tirx.TilePrimitiveCall) -> Node:
        return Fill(self._region(call.args[0]), call.args[1])

    def _gemm(self, word: str, call: tirx.TilePrimitiveCall) -> Node:
        args = list(call.args)
        d, a, b, c = (self._region(arg) for arg in args[:4])
        alpha, beta = float(args[6]), float(args[7])
        if d.tile is not c.tile or alpha != 1 or beta not in (0, 1):
            raise TileError(f"gemm: {d.tile.name} = {alpha} * a @ b + {beta} * {c.tile.name}; valid is c (+)= a @ b")
        instruction = call.config.get("instruction", None)
        name = None if instruction is None else str(_plain(instruction))
        return Gemm(d, a, b, bool(args[4]), bool(args[5]), beta == 1, name)

    def _reduce(self, word: str, call: tirx.TilePrimitiveCall) -> Node:
        dst, src, axes = self._region(call.args[0]), self._region(call.args[1]), [int(axis) for axis in call.args[2]]
        if len(axes) != 1:
            raise TileError(f"{word}: along axes {axes}; a tile is reduced along one axis at a time")
        reducer, accumulate = call.config.get(REDUCER, None), bool(call.args[3])
        if reducer is not None:
            check_reducer(reducer, src.tile.dtype, dst.tile.dtype, accumulate, f"reduce of {src} into {dst}")
            word, reducer = "reduce", without_choices(reducer)
        return Reduce(word, dst, src, _axis(word, src, axes[0]), accumulate, reducer)

    def _order(self, stmt: tirx.Evaluate) -> Node:
        word = str(calls.called(stmt)).removeprefix("axe.")
        (axis, descending, which), regions = calls.arguments(stmt, 3)
        *results, src = (self._box(*region) for region in regions)
        values = results[0] if which & VALUES else None
        indices = results[-1] if which & INDICES else None
        return Sort(word, values, indices, src, _axis(word, src, axis), bool(descending))

    def _scan(self, stmt: tirx.Evaluate) -> Node:
        (axis, reverse, exclusive), regions = calls.arguments(stmt, 3)
        dst, src = (self._box(*region) for region in regions)
        return Scan(dst, src, _axis("cumsum", src, axis), bool(reverse), bool(exclusive))

    def _print(self, stmt: tirx.Evaluate) -> Node:
        label, where, first, extents = parts(stmt)
        if where and len(where) != len(self.grid):
            raise TileError(f"print of {label!r}: block has {len(where)} coordinates, the grid {len(self.grid)}")
        if not isinstance(first, ir.TensorLoad) or (self.known[first.source].scope == "local" and set(extents) <= {1}):
            node = Print(label, None, first, self.grid, tiles_of(first, self.known))
        else:
            region = self._region(
                tirx.BufferRegion(first.source, list(map(ir.Range.from_min_extent, first.indices, extents)))
            )
            node = Print(label, region, None, self.grid, (region.tile,))
        if not where:
            return node
        return Branch(tirx.all(*(tirx.EQ(var, at) for var, at in zip(self.grid, where))), (node,), ())

    def _box(self, first: ir.TensorLoad, extents: tuple[int, ...]) -> Region:
        return Region(self.known[first.source], tuple(first.indices), extents)

    def _region(self, region: tirx.BufferRegion) -> Region:
        extents = tuple(constant(r.extent) for r in region.region)
        if not all(isinstance(extent, int) for extent in extents):
            raise TileError(f"a region of {region.source.name} has no constant extents: {[str(e) for e in extents]}")
        return Region(self.known[region.source], tuple(r.min for r in region.region), extents)

    def _parallel(self, stmt: tirx.For) -> Parallel:
        points, extents = [], []
        distinct = DISTINCT in stmt.annotations
        while isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.PARALLEL:
            extent = constant(stmt.extent)
            if not isinstance(extent, int):
                raise TileError(f"parallel: extents are constants, got {extent}")
            points.append(stmt.loop_var)
            extents.append(extent)
            stmt = stmt.body
        return self._stored(tuple(points), tuple(extents), written_out(stmt, self.known, _CALLS), distinct)

    def _stored(
        self, points: tuple[tirx.Var, ...], extents: tuple[int, ...], stmt: tirx.Stmt, distinct: bool
    ) -> Parallel:
        """What `stmt` stores at every one of the points."""
        accesses: list[tuple[Tile, tuple, bool]] = []
        joins: dict[tuple[Tile, str], None] = {}

        def on_load(load: ir.TensorLoad) -> None:
            accesses.append((self.known[load.source], tuple(load.indices), False))

        def on_store(store: tirx.BufferStore) -> None:
            tile, how = self.known[store.buffer], joined(store.value)
            accesses.append((tile, tuple(store.indices), True))
            if how is not None:
                joins[tile, how.kind] = None

        tvm_ffi.structural_walk(stmt, (ir.TensorLoad, on_load))
        tvm_ffi.structural_walk(stmt, (tirx.BufferStore, on_store))
        return Parallel(points, extents, stmt, tuple(accesses), distinct, tuple(joins))


_STATEMENTS: TypeTable[Callable[[Reader, Any], Node]] = TypeTable(
    "reading a tile program",
    {
        tirx.Bind: Reader._bind,
        tirx.BufferStore: Reader._store,
        tirx.Evaluate: Reader._called,
        tirx.For: Reader._for,
        tirx.IfThenElse: Reader._if,
        tirx.TilePrimitiveCall: Reader._operation,
    },
)
"""What makes a node of each of upstream's statements."""

_WORDS: dict[str, Callable[[Reader, str, tirx.TilePrimitiveCall], Node]] = {
    "cast": Reader._copy,
    "copy": Reader._copy,
    "fill": Reader._fill,
    "gemm": Reader._gemm,
    "max": Reader._reduce,
    "min": Reader._reduce,
    "sum": Reader._reduce,
}
"""And of each of its tile primitives."""

_CALLS: dict[str | None, Callable[[Reader, tirx.Evaluate], Node]] = {
    WAIT: Reader._on_flags,
    SIGNAL: Reader._on_flags,
    CUMSUM: Reader._scan,
    PRINT: Reader._print,
    CAS: Reader._once,
    **dict.fromkeys(ORDERS, Reader._order),
}
"""And of each of our words that upstream has none of, by the name of the call."""


def read(func: tirx.PrimFunc, knobs: Mapping[str, int] | None = None, reason: str = "set") -> TileProgram:
    """Read a tile program and check what holds on every target.

    Parameters
    ----------
    func : PrimFunc
        The program.
    knobs : mapping from str to int, optional
        What its knobs are (`tvm_axe.tile.knobs`); those that are left out have their defaults.
    reason : str
        Why the knobs are what `knobs` says, for `explain`.

    Raises
    ------
    InputError
        There is no such knob or value, or the program doesn't allow them together.
    TileError
        A `tile.assume` of another form; a parameter with an offset, or outside of global memory; strides that are
        negative, that nothing says, or of what is written and overlaps; mesh tensors of different numbers of devices,
        beside tensors with strides, or without the device's coordinate; no kernel, or statements beside it, or several
        or scratch (`tvm_axe.tile.read_sequence`); a statement that is none of the language's words; a tile without
        constant extents; operands whose shapes, scopes or types don't go together; a copy that leaves a tile, or that
        starts outside of a tensor; an access of `parallel` outside of a tile; points of a `parallel`, or blocks, that
        race; what is read and was never written; a pipelined loop with more stages than iterations, or whose iterations
        race on a shared tile; flags that aren't int32 in global memory, lie outside of their tensor, are touched
        otherwise too, or are set or reset by several blocks; or what is no function.
    """
    check_function(func)
    given = dict(knobs or {})
    program = Reader(placed(settled(func, given))).program(settings(func, given, reason))
    check(program)
    return program


def check_function(func: object) -> None:
    """Refuse what is no function, whatever was to be read of it.

    Raises
    ------
    TileError
        It isn't one.
    """
    if not isinstance(func, tirx.PrimFunc):
        raise TileError(
            f"a {type(func).__name__} is no tile program; valid is a function, @T.prim_func, with tile.kernel"
        )


def placed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function whose parameters lie as their strides say, once they are shown to be what callers have.

    Raises
    ------
    TileError
        One lies elsewhere than in global memory, or not from its first element on; or its strides aren't valid.
    """
    for param in filter(tirx.is_buffer_var, func.params):
        _check_place(param)
    return laid_out(func)


def _check_place(param: tirx.Buffer) -> None:
    """Refuse a tensor that a caller's tensor can't be: elsewhere than in global memory, or not from its start."""
    scope, offset = str(param.scope()), param.elem_offset
    if scope != "global":
        raise TileError(
            f"parameter {param.name}: scope {scope!r}; valid are tensors in global memory, from which a tile of that "
            "scope is copied (tile.shared, tile.fragment, tile.local)"
        )
    if not isinstance(offset, tirx.Var) and not sym.Analyzer().can_prove_equal(offset, 0):  # a variable is the caller's
        raise TileError(
            f"parameter {param.name}: elem_offset {offset}; valid is a tensor from its first element, elem_offset 0: "
            "take all of the tensor, and index from there"
        )


def _axis(word: str, src: Region, axis: int) -> int:
    """An axis counted from the first dimension."""
    if not -len(src.extents) <= axis < len(src.extents):
        raise TileError(f"{word} of {src}: along axis {axis}; valid is {-len(src.extents)} to {len(src.extents) - 1}")
    return axis % len(src.extents)


def _layout(text: str) -> Layout | ComposeLayout:
    return ComposeLayout.parse(text) if text.startswith(ComposeLayout.__name__) else Layout.parse(text)


def _plain(value: Any) -> Any:
    if isinstance(value, (tirx.IntImm, int)):
        return int(value)
    return str(value) if isinstance(value, (str, ir.StringImm)) else [int(item) for item in value]
