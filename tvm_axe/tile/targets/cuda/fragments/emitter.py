"""What the code of a block's threads needs to know: which threads there are, and where every tile lives.

`Threads` are those that hold the fragments: their number, the thread's own index among them, and what makes them wait
for each other. `Registers` (a 1-D buffer of each thread, and the `FragmentLayout` that says which element is in which
register) is where fragments and locals live, `Memory` (a buffer and an Axe layout of its addresses) where shared tiles
and tensors in global memory do. An `Emitter` has both, and expressions as threads compute them; `fragments.emit` emits
nodes with it.
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
from tvm_axe.tile.assuming import multiples
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.targets.cuda.fragments.layout import FragmentLayout, linear
from tvm_axe.tile.walking import substitute_in


@dataclass(frozen=True)
class Threads:
    """The threads that hold fragments.

    Attributes
    ----------
    count : int
        How many there are.
    index : Expr
        The thread's own number among them.
    sync : callable
        It emits a barrier among exactly them.
    """

    count: int
    index: tirx.Expr
    sync: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Registers:
    """Where a fragment or a local tile lives.

    Attributes
    ----------
    buffer : Buffer
        A thread's registers, 1-D.
    fragment : FragmentLayout
        Which element is in which register of which thread.
    origin : str
        What decided the layout, for errors.
    """

    buffer: tirx.Buffer
    fragment: FragmentLayout
    origin: str


@dataclass(frozen=True, eq=False)
class Memory:
    """A tile in shared memory or a tensor in global memory.

    Attributes
    ----------
    buffer : Buffer
        It is 1-D, of elements, if there is a layout; else it is indexed as the tile is.
    layout : Layout or ComposeLayout or None
        The address of an element over the axis ``m``.
    offset : Expr
        It is added to the address, such as where a circular buffer's slot starts; a multiple of 16 bytes.
    """

    buffer: tirx.Buffer
    layout: Layout | ComposeLayout | None = None
    offset: Any = 0

    def address(self, index: Sequence[Any], shape: Sequence[int], length: int = 1) -> list[Any]:
        """The indices into `buffer` of an element of the tile, the first of `length` that are one piece of memory."""
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
            address = swizzled(self.layout, address, length)
        return [address + self.offset]


def swizzled(layout: ComposeLayout, address: Any, length: int = 1) -> Any:
    """`ComposeLayout.address` of an expression of the compiler, a multiple of `length` elements.

    Upstream knows of no number that an exclusive or divides by, and loads one element at a time, by a vector of indices
    that it has no code for, where it can't show that all are one aligned piece. So `length` is a factor of it. Of
    single elements pieces are exchanged and places in them added, and bits that stay are added to those that change, so
    that a thread's next ones are at constant offsets.
    """
    fine, atom, count = 2**layout.per_element, 2**layout.atom_len, 2**layout.swizzle_len
    row = address // fine
    low, high = (row // atom % count, 1) if layout.swizzle_inner else (row % count, atom)
    if length == 1 or fine % length:
        return _exchanged(row, low * high, count * high) * fine + address % fine
    factor = fine // length
    return _exchanged(address // length, low * high * factor, count * high * factor) * length


def _exchanged(number: Any, bits: Any, end: int) -> Any:
    """A number with some bits exchanged, all of them below a power of two."""
    return number // end * end + T.bitwise_xor(number % end, bits)


def tensors(program: TileProgram) -> dict[Tile, Memory]:
    """Where a program's tensors are: the parameters, or their memory with sizes that are seen to be multiples.

    Upstream's code generator makes a vector of neighbours only where it sees that the address is one's, and knows
    nothing of what is assumed. So an extent or a stride `k` that is a multiple of 64 is written ``k // 64 * 64``.
    """
    multiple = {var: var // divisor * divisor for var, divisor in multiples(program.assumptions).items()}

    def seen(sizes: Sequence[Any]) -> list[Any]:
        return [substitute_in(size, multiple) if isinstance(size, ir.Expr) else size for size in sizes]

    found: dict[Tile, Memory] = {}
    for tile in program.params:
        shape, strides = seen(tile.shape), None if tile.strides is None else seen(tile.strides)
        buffer = tile.buffer
        if any(own is not size for own, size in zip((*tile.shape, *(tile.strides or ())), (*shape, *(strides or ())))):
            layout = {} if strides is None else {"layout": _tvm.memory_layout(shape, strides)}
            buffer = T.decl_buffer(shape, tile.dtype, data=tile.buffer.data, strides=strides, **layout)
        found[tile] = Memory(buffer)
    return found


class Emitter:
    """Where code is written: inside upstream's IR builder, by all threads that hold fragments.

    Parameters
    ----------
    threads : Threads
        The threads that hold fragments, all of which reach whatever is emitted.
    storages : mapping from Tile to Registers or Memory
        Where every tile and tensor lives that an emitted node touches.
    analyzer : sym.Analyzer
        It knows the ranges of the variables in emitted nodes; what it can't prove to be inside a tensor is guarded.
    scratch : callable
        ``(dtype, size) -> Buffer``: shared memory for a moment, a 1-D buffer that may be the same at every call.
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
