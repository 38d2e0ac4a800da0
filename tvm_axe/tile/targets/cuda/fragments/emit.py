"""Code for what threads do by themselves: Fill, Copy, Reduce, Parallel, Let and Assign, given where everything lives.

Both models of a CUDA kernel use it, inside upstream's IR builder::

    threads = Threads(256, tx, lambda: T.evaluate(T.cuda.cta_sync()))
    emitter = Emitter(threads, storages, analyzer, scratch)
    emitter.emit(node)

`threads` are those that hold the fragments, all of which reach every `emit`: their number, the thread's own index
among them, and what makes them wait for each other. `storages` says of every tile where it lives: `Registers` (a 1-D
buffer of each thread, and the `Holding` that says which element is in which register) for fragments and locals,
`Memory` (a buffer and an Axe layout of its addresses) for shared memory and tensors in global memory. `scratch` gives
shared memory for a moment: ``scratch(dtype, size)`` is a 1-D shared buffer that may be the same at every call.

No synchronisation is emitted but around uses of `scratch`: what one node wrote to shared memory and another reads is
the caller's to separate. What is stored to memory by several threads that hold copies is stored by the first of them.
Expressions may hold any variable that is defined where a node is emitted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.tile.program import Assign, Copy, Fill, Let, Node, Parallel, Reduce, Region, Tile
from tvm_axe.tile.targets.cuda.fragments.layout import Holding, linear


@dataclass(frozen=True)
class Threads:
    """The threads that hold fragments: `count` of them, the thread's own `index`, and a barrier among exactly them."""

    count: int
    index: tirx.Expr
    sync: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Registers:
    """A fragment or a local tile: `buffer` is a thread's registers, `origin` says what decided the layout."""

    buffer: tirx.Buffer
    holding: Holding
    origin: str


@dataclass(frozen=True, eq=False)
class Memory:
    """A tile in shared memory or a tensor in global memory.

    Attributes
    ----------
    buffer : 1-D, of elements, if there is a layout; else indexed as the tile is
    layout : the address of an element over the axis ``m``, or None
    offset : added to the address, such as where a ring's slot starts; a multiple of 16 bytes
    """

    buffer: tirx.Buffer
    layout: Layout | ComposeLayout | None = None
    offset: Any = 0

    def address(self, index: Sequence[Any], shape: Sequence[int]) -> list[Any]:
        """The indices into `buffer` of an element of the tile."""
        if self.layout is None:
            return list(index)
        plain = self.layout.tile_layout if isinstance(self.layout, ComposeLayout) else self.layout
        grouped, seps = plain.group(shape)
        address: Any = plain.O["m"]
        for position, start, stop in zip(index, seps, seps[1:]):
            below = 1
            for it in reversed(grouped.D[start:stop]):
                step = position if below == 1 else position // below
                below *= int(it.extent)
                address = address + (step if it is grouped.D[start] else step % it.extent) * it.stride
        if isinstance(self.layout, ComposeLayout):
            address = swizzled(self.layout, address)
        return [address + self.offset]


def swizzled(layout: ComposeLayout, address: Any) -> Any:
    """`ComposeLayout.address` of an expression of the compiler."""
    fine, atom, count = 2**layout.per_element, 2**layout.atom_len, 2**layout.swizzle_len
    row = address // fine
    low, high = (row // atom % count, 1) if layout.swizzle_inner else (row % count, atom)
    return T.bitwise_xor(address, low * high * fine)


class Emitter:
    """See the module.

    Parameters
    ----------
    threads : Threads
    storages : mapping from Tile to Registers or Memory
        Of every tile and tensor that an emitted node touches.
    analyzer : sym.Analyzer
        Knows the ranges of the variables in emitted nodes; what it can't prove to be inside a tensor is guarded.
    scratch : callable
        ``(dtype, size) -> Buffer``, see the module.
    """

    def __init__(
        self,
        threads: Threads,
        storages: Mapping[Tile, Registers | Memory],
        analyzer: sym.Analyzer,
        scratch: Callable[[str, int], tirx.Buffer],
    ) -> None:
        self.threads, self.storages, self.analyzer, self.scratch = threads, storages, analyzer, scratch
        self.tiles: dict[tirx.Buffer, Tile] = {}
        for tile in storages:
            self.tiles.setdefault(tile.buffer, tile)  # a tile of the program before what it is held in meanwhile

    def emit(self, node: Node) -> dict[tirx.Var, tirx.Expr]:
        """Emit a node; of a Let, returns the variable that stands for its name from here on, to be substituted.

        Raises
        ------
        TileError
            A thread would need what another holds.
        """
        from tvm_axe.tile.targets.cuda.fragments import copies, points, reductions  # which use this module's names

        if isinstance(node, Let):
            return {node.var: T.bind(self.expression(node.value))}
        if isinstance(node, Assign):
            held = self.registers(node.tile)
            register = linear([self.expression(i) for i in node.indices], node.tile.shape)
            T.buffer_store(held.buffer, self.expression(node.value), [register])
        elif isinstance(node, Fill):
            copies.fill(self, node)
        elif isinstance(node, Copy):
            copies.copy(self, node)
        elif isinstance(node, Reduce):
            reductions.reduce(self, node)
        elif isinstance(node, Parallel):
            points.parallel(self, node)
        else:
            raise TypeError(f"{type(node).__name__} is the caller's to emit")
        return {}

    def expression(self, expr: Any) -> Any:
        """An expression that every thread computes for itself: its loads from tiles as they are stored."""
        return self.rewritten(expr, {}, lambda tile, load: None)

    def registers(self, tile: Tile) -> Registers:
        """The registers of a fragment or local tile."""
        held = self.storages[tile]
        assert isinstance(held, Registers), tile
        return held

    def memory(self, tile: Tile) -> Memory:
        """The memory of a shared tile or a tensor."""
        stored = self.storages[tile]
        assert isinstance(stored, Memory), tile
        return stored

    def with_tile(self, tile: Tile, stored: Registers | Memory) -> Emitter:
        """An emitter that also knows `tile`."""
        return Emitter(self.threads, {**self.storages, tile: stored}, self.analyzer, self.scratch)

    @contextlib.contextmanager
    def guarded(self, conditions: Sequence[tirx.Expr]) -> Iterator[None]:
        """Under all the conditions."""
        with contextlib.ExitStack() as stack:
            if conditions:
                stack.enter_context(T.If(tirx.all(*conditions)))
                stack.enter_context(T.Then())
            yield

    def rewritten(self, expr: Any, values: Mapping[Any, Any], special: Callable[[Tile, Any], Any]) -> Any:
        """An expression with variables replaced, and loads by what `special` makes of them, or as tiles are stored."""
        refused: list[TileError] = []

        def on_var(var: Any, mutator: Any) -> Any:
            return values.get(var, var)

        def on_load(load: Any, mutator: Any) -> Any:
            try:
                return loaded(load, mutator)
            except TileError as error:  # whose type is lost on the way through upstream
                refused.append(error)
                raise

        def loaded(load: Any, mutator: Any) -> Any:
            tile = self.tiles.get(load.source)
            found = None if tile is None else special(tile, load)
            if found is not None:
                return found
            if tile is not None and tile.scope == "fragment":
                raise TileError(
                    f"{load}: a fragment's elements are spread over threads; valid are reads in `parallel`, by its "
                    "coordinates and constants"
                )
            indices = [mutator.mutate(index) for index in load.indices]
            if tile is None:
                return tirx.BufferLoad(load.source, indices)
            stored = self.storages[tile]
            if isinstance(stored, Registers):
                return tirx.BufferLoad(stored.buffer, [linear(indices, tile.shape)])
            return tirx.BufferLoad(stored.buffer, stored.address(indices, tile.shape))

        def on_call(call: Any, mutator: Any) -> Any:
            call = mutator.default_mutate(call)
            if str(getattr(call.op, "name", "")) == "tirx.exp2" and str(call.ty.dtype) == "float32":
                return _tvm.fast_exp2(call.args[0])
            return call

        try:
            return tvm_ffi.structural_mutate(expr, [(ir.TensorLoad, on_load), (tirx.Var, on_var), (ir.Call, on_call)])
        except RuntimeError:
            if not refused:
                raise
        raise refused[0]


def region_constants(region: Region) -> list[int]:
    """Where a region of a fragment starts.

    Raises
    ------
    TileError
        That is not known at compile time.
    """
    if not all(isinstance(start, (int, tirx.IntImm)) for start in region.start):
        raise TileError(f"{region}: a box of a fragment starts at constants, since its registers are fixed")
    return [int(start) for start in region.start]
