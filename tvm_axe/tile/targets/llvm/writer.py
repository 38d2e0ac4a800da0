"""What every operation is written with: loops over points, loads and stores of tiles, the program's expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from tvm_axe import _tvm
from tvm_axe.machines.small_floats import dtype_like
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.llvm.conversions import (
    NARROW,
    bits_of,
    compute_dtype,
    convert,
    narrow,
    of_bits,
    rounded,
    widen,
)
from tvm_axe.tile.targets.llvm.functions import FUNCTIONS
from tvm_axe.tile.targets.llvm.guards import Guards
from tvm_axe.tile.targets.llvm.plan import CpuPlan


@dataclass
class Writer:
    """Writes into the function that is open in upstream's builder.

    Attributes
    ----------
    plan : CpuPlan
        The plan.
    guards : Guards or None
        The bounds checks; None leaves them out.
    buffers : dict from Tile
        The buffers of the tiles on chip.
    scalars : dict from Var
        What the program's variables have become.
    lane : int or Var
        The place in its vector of the point that is written.
    """

    plan: CpuPlan
    guards: Guards | None
    buffers: dict[Tile, Any] = field(default_factory=dict)
    scalars: dict[tirx.Var, Any] = field(default_factory=dict)
    lane: Any = 0

    def __post_init__(self) -> None:
        self.analyzer = self.plan.program.analyzer()
        program = self.plan.program
        self._known = {tile.buffer: tile for tile in (*program.params, *program.tiles)}

    def allocate(self) -> None:
        """Emit the buffers of the tiles."""
        for tile, storage in self.plan.storage.items():
            self.buffers[tile] = T.alloc_buffer(storage.shape, storage.dtype, align=64)

    # ---- Elements ------------------------------------------------------------------------------------------------

    def at(self, tile: Tile, indices: Sequence[Any], filled: bool = False) -> tuple[Any, list[Any]]:
        """The buffer and its indices of an element or, with a ramp for an index, of neighbours.

        With `filled`, elements that fill up the tile's last vectors may be meant.
        """
        storage = self.plan.storage.get(tile)
        if self.guards is not None:
            reach = storage.filled if filled and storage is not None else tile.shape
            indices = self.guards.indices(tile.name, reach, indices)
        return (tile.buffer, list(indices)) if storage is None else (self.buffers[tile], storage.place(indices))

    def load(self, tile: Tile, indices: Sequence[Any]) -> Any:
        """An element, in the type that it is computed with."""
        return convert(self.held(tile, indices), compute_dtype(tile.dtype))

    def held(self, tile: Tile, indices: Sequence[Any], filled: bool = False) -> Any:
        """An element, in the type that the tile is held in."""
        buffer, where = self.at(tile, indices, filled)
        return widen(buffer[tuple(where)])

    def store(self, tile: Tile, indices: Sequence[Any], value: Any, filled: bool = False, exact: bool = False) -> None:
        """Store an element, given in the type that it is computed with; `exact` says that the tile's type has it."""
        buffer, where = self.at(tile, indices, filled)
        if tile not in self.plan.storage:
            value = narrow(value, tile.dtype)
        elif tile.dtype in NARROW:
            value = value if exact else rounded(value, tile.dtype)
        else:
            value = convert(convert(value, tile.dtype), self.plan.storage[tile].dtype)
        T.buffer_store(buffer, value, where)

    # ---- Expressions ---------------------------------------------------------------------------------------------

    def expr(self, value: Any) -> Any:
        """An expression of the program, on the tiles' buffers; narrow numbers in it become float32."""
        if isinstance(value, int):
            return value
        callbacks = (
            (tirx.Var, lambda var: self.scalars.get(var, var)),
            (ir.TensorLoad, lambda load: self.load(self._known[load.source], list(load.indices))),
            (tirx.FloatImm, lambda number: T.float32(number.value) if _narrow(number) else number),
            (tirx.Cast, self._cast),
            (ir.Call, self._call),
            (_ARITHMETIC, lambda node: type(node)(node.a, node.b) if _narrow(node) else node),
            (tirx.Select, lambda node: tirx.Select(node.condition, node.true_value, node.false_value)),
        )
        return _tvm.structural_map(_tvm.structural_map(value, (ir.Call, _with_type)), callbacks)

    def exprs(self, values: Sequence[Any]) -> list[Any]:
        """Several expressions."""
        return [self.expr(value) for value in values]

    def _cast(self, cast: Any) -> Any:
        dtype = str(cast.ty.dtype)
        value = convert(cast.value, compute_dtype(dtype))
        return rounded(value, dtype) if dtype in NARROW else value

    def _call(self, call: Any) -> Any:
        function, dtype = FUNCTIONS.get(str(getattr(call.op, "name", ""))), str(call.ty.dtype)
        if dtype in ("float32", *NARROW) and function is not None:
            return function(call.args[0])
        if _is_reinterpret(call) and dtype in NARROW:
            return of_bits(call.args[0], dtype)
        if _is_reinterpret(call) and len(call.args) == 2:
            return T.reinterpret(dtype_like(dtype, call.args[0]), bits_of(call.args[0], call.args[1].value))
        return tirx.call_intrin("float32", call.op, *call.args) if dtype in NARROW else call


_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max)


def _narrow(value: Any) -> bool:
    return str(value.ty.dtype) in NARROW


def _is_reinterpret(call: ir.Call) -> bool:
    return str(getattr(call.op, "name", "")) == "tirx.reinterpret"


def _with_type(call: ir.Call) -> ir.Call:
    """The call; one that takes the bits of a narrow number has its type, too, as the number becomes float32."""
    if not _is_reinterpret(call) or not _narrow(call.args[0]):
        return call
    return tirx.call_intrin(call.ty.dtype, call.op, *call.args, ir.StringImm(str(call.args[0].ty.dtype)))


def points(
    writer: Writer,
    spans: Sequence[tuple[Any, Any]],
    lanes: int,
    body: Callable[[list[Any]], None],
    panel: int | None = None,
) -> None:
    """Emit `body` for every point from the spans' starts up to their stops, the last dimension by vectors.

    With `panel`, vectors don't reach from one piece of so many elements of the last dimension into the next.
    """
    if any(isinstance(stop, int) and start == stop for start, stop in spans):
        return
    vector = T.vectorized if writer.guards is None else T.serial  # upstream makes no vectors of calls
    *outer, (start, stop) = spans
    with nest(outer) as indices:
        if panel is not None and lanes > 1 and isinstance(start, int) and start == 0:
            whole = stop // panel
            if not isinstance(whole, int) or whole:
                with T.serial(whole) as p:
                    for first, last, width in split(0, panel, lanes):
                        for at in range(first, last, width):
                            with vector(width) as lane:
                                writer.lane = lane
                                body([*indices, p * panel + (at + lane)])
            start = whole * panel
        for first, last, width in split(start, stop, lanes):
            if width == 1:
                with T.serial(last - first) as i:
                    writer.lane = 0
                    body([*indices, first + i])
            else:
                with T.serial((last - first) // width) as i, vector(width) as lane:
                    writer.lane = lane
                    body([*indices, first + i * width + lane])


@contextmanager
def nest(spans: Sequence[tuple[Any, Any]]) -> Iterator[list[Any]]:
    """Loops in order; yields their points."""
    with ExitStack() as loops:
        yield [start + loops.enter_context(T.serial(stop - start)) for start, stop in spans]


def split(start: Any, stop: Any, lanes: int) -> list[tuple[Any, Any, int]]:
    """A span cut where whole vectors end: (start, stop, lanes of a vector), empty pieces left out."""
    extent = stop - start
    if not isinstance(extent, int):
        if lanes == 1:
            return [(start, stop, 1)]
        middle = T.Bind(start + extent // lanes * lanes)
        return [(start, middle, lanes), (middle, stop, 1)]
    pieces, at = [], start
    while extent > 0:
        whole = extent // lanes * lanes
        if whole:
            pieces.append((at, at + whole, lanes))
            at, extent = at + whole, extent - whole
        lanes //= 2
    return pieces
