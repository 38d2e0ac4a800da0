"""Tiles by the tensor memory accelerator: which copies it can do, how tiles lie in shared memory for it, and its code.

It moves a box of a tensor of up to five dimensions; what lies outside reads as zero and is not written. A row of the
box is at most as wide as the swizzle, so a tile in shared memory is a row of panels, and a copy is issued for each.

Source: PTX ISA, "Tensors" (boxes, out-of-bound accesses, swizzling modes), and "Data Movement and Conversion
Instructions: cp.async.bulk.tensor".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.script import tirx as T
from tvm.script.tirx import tile as primitives

from tvm_axe import _tvm
from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.strides import advice, has_rows, strides_of

BOX = 256  # the most elements of a box along a dimension
_ALIGNED = 16  # bytes: of the tensor's address and of its strides
_SHARED_ALIGNED = 128  # bytes: of an address in shared memory
_ADDED = ("float32", "float16", "bfloat16", "int32", "uint32")
ATOM_ROWS = 8  # after which a swizzle's pattern begins anew


def item_bytes(dtype: str) -> int:
    """The size of an element."""
    return tvm_ffi.dtype(dtype).bits // 8


def swizzle(tile: Tile) -> int:
    """The widest swizzle of a tile's rows: 3, 2, 1 for 128, 64, 32 bytes; 0 where rows or columns divide by none."""
    rows, columns = matrix(tile)
    width = columns * item_bytes(tile.dtype)
    return next((mode for mode in (3, 2, 1) if width % (16 << mode) == 0 and rows % ATOM_ROWS == 0), 0)


def matrix(tile: Tile) -> tuple[int, int]:
    """A tile's rows, of all its dimensions but the last together, and columns."""
    return math.prod(tile.shape[:-1]), int(tile.shape[-1])


def panel(tile: Tile) -> int:
    """Columns of a panel: of one swizzled row, or of a whole row that isn't swizzled."""
    mode, columns = swizzle(tile), matrix(tile)[1]
    return (16 << mode) // item_bytes(tile.dtype) if mode else columns


def alignment(tile: Tile) -> int:
    """Bytes that a copy into a tile is aligned to: 128, or those after which the swizzle's pattern begins anew.

    Source: PTX ISA, "Tensors" (swizzling modes: 256, 512 and 1024 bytes for 32, 64 and 128).
    """
    return _SHARED_ALIGNED << swizzle(tile)


def slot_bytes(tile: Tile) -> int:
    """How far it is from one slot of a tile to the next, in bytes: its size, padded so that every slot is aligned.

    >>> row = Tile(None, "shared", (32,), "float16")
    >>> row.bytes, slot_bytes(row)
    (64, 128)
    """
    return -(-tile.bytes // alignment(tile)) * alignment(tile)


def slot_elements(tile: Tile) -> int:
    """The same in elements."""
    return slot_bytes(tile) // item_bytes(tile.dtype)


def height(tile: Tile) -> int:
    """Rows of one copy: the most that a box holds, that divide the tile's, and of which each begins aligned; or 0."""
    rows, pitch = matrix(tile)[0], panel(tile) * item_bytes(tile.dtype)
    counts = (count for count in range(-(-rows // BOX), rows + 1) if rows % count == 0)
    return next((rows // n for n in counts if n == 1 or rows // n * pitch % alignment(tile) == 0), 0)


def filled(source: Region, tile: Tile, analyzer: sym.Analyzer) -> int:
    """Rows of a tile that a load of a region fills: those that its tensor has, if it is known to have fewer."""
    rows = matrix(tile)[0]
    along = [d for d, extent in enumerate(source.extents[:-1]) if extent != 1]
    if len(along) != 1 or rows > BOX or source.tile.is_mesh:
        return rows
    size, start = source.tile.shape[along[0]], source.start[along[0]]
    return size if isinstance(size, int) and size < rows and analyzer.can_prove(start == 0) else rows


def shared_layout(tile: Tile, slots: int) -> Any:
    """Where (slot, row, column) of a tile lies, as upstream's layout."""
    mode, shape = swizzle(tile), (slots, *matrix(tile))
    if mode:
        return _tvm.swizzled_layout(tile.dtype, mode, shape)
    return _tvm.memory_layout(shape, (slot_elements(tile), shape[2], 1))


def axe_layout(tile: Tile) -> ComposeLayout | Layout:
    """Where (row, column) of a tile lies in its slot: panel after panel, swizzled."""
    mode, (rows, columns), width = swizzle(tile), matrix(tile), panel(tile)
    plain = Layout.parse(f"S[({rows}, {columns // width}, {width}) : ({width}, {rows * width}, 1)]")
    assert isinstance(plain, Layout)
    if not mode:
        return plain
    return ComposeLayout((16 // item_bytes(tile.dtype)).bit_length() - 1, mode, 3, plain)


def staged_layout(piece: Tile, warpgroups: int, slots: int) -> ComposeLayout | Layout:
    """Where (row, column) of the pieces of all warpgroups lies, of one slot: each has as many rows and all slots."""
    rows, columns = piece.shape
    mode, width = swizzle(piece), panel(piece)
    plain = Layout.parse(
        f"S[({warpgroups}, {rows}, {columns // width}, {width}) : "
        f"({slots * rows * columns}, {width}, {rows * width}, 1)]"
    )
    assert isinstance(plain, Layout)
    return ComposeLayout((16 // item_bytes(piece.dtype)).bit_length() - 1, mode, 3, plain) if mode else plain


def obstacle(tensor: Region, tile: Tile, analyzer: sym.Analyzer, rows: int | None = None) -> str | None:
    """Why a region of a tensor can't be copied to or from a shared tile, as the end of a sentence; None if it can.

    A region may have more than two dimensions: all but the last are the tile's rows, of which so many `rows` are copied
    at once, by default all.
    """
    shape, dtype = tensor.tile.shape, tensor.tile.dtype
    if dtype != tile.dtype:
        return f"it casts {dtype} to {tile.dtype}"
    if len(shape) > 5:
        return f"{tensor.tile.name} has {len(shape)} dimensions, more than 5"
    why = _badly_apart(tensor.tile, analyzer)
    if why:
        return why
    if tensor.extents[-1] != tile.shape[-1]:
        return f"{tensor} doesn't run along the last dimension of {tensor.tile.name} as {tile.name} does"
    if panel(tile) > BOX or panel(tile) * item_bytes(dtype) % _ALIGNED:
        return f"rows of {tile.name} are {tile.shape[-1]} {dtype}; at most {BOX}, in multiples of {_ALIGNED} bytes"
    if not height(tile):
        rows = matrix(tile)[0]
        return (
            f"{rows} rows of {tile.name} are more than {BOX}, and no number of them that divides {rows} takes a "
            f"multiple of {_SHARED_ALIGNED} bytes"
        )
    if not _is_matrix(tensor):
        rows = matrix(tile)[0] if rows is None else rows
        if max(tensor.extents) > BOX:
            return f"{tensor} has more than {BOX} elements along a dimension"
        if _part(tensor, rows) is None:
            return f"{rows} rows of {tensor} are no box of it"
    return None


def _is_matrix(tensor: Region) -> bool:
    """Whether a region has rows along one dimension at most."""
    return sum(extent != 1 for extent in tensor.extents[:-1]) <= 1


def _part(region: Region, rows: int) -> tuple[int, ...] | None:
    """The extents of so many rows of a region, from a multiple of them on; None if they are no box."""
    left, extents = rows, []
    for extent in reversed(region.extents[:-1]):
        taken = math.gcd(extent, left)
        if taken < min(extent, left):
            return None
        extents.append(taken)
        left //= taken
    return tuple(reversed(extents)) if left == 1 else None


def _badly_apart(tensor: Tile, analyzer: sym.Analyzer) -> str | None:
    """Why a tensor's strides aren't TMA's, as the end of a sentence; None if they are."""
    item, name = item_bytes(tensor.dtype), tensor.name
    if not has_rows(tensor):
        apart = strides_of(tensor)[-1]
        return f"neighbours along the last dimension of {name} are {apart} elements apart, and TMA's are 1"
    for dimension in reversed(range(len(tensor.shape) - 1)):
        step = strides_of(tensor)[dimension]
        stride = item * step
        if isinstance(stride, int):
            if stride % _ALIGNED:
                return f"rows of {name} are {stride} bytes apart, no multiple of {_ALIGNED}"
            if not stride and tensor.strides is not None:
                return f"rows of {name} are one row (stride 0 along dimension {dimension}), and TMA's are apart"
        elif not analyzer.can_prove(tirx.floormod(stride, _ALIGNED) == 0):
            # Of row-major order, a row's own extent says how far it is to the next.
            said = step if tensor.strides is not None else tensor.shape[dimension + 1]
            return (
                f"rows of {name} are {stride} bytes apart, which isn't known to be a multiple of {_ALIGNED}; "
                f"{advice(said, _ALIGNED // math.gcd(_ALIGNED, item))} says so"
            )
    return None


def adds(tile: Tile) -> bool:
    """Whether a copy can add to what a tile of global memory holds, as threads of the device would.

    Source: PTX ISA, "cp.reduce.async.bulk.tensor", which is ordered at the scope of the device.
    """
    return tile.dtype in _ADDED and not tile.is_mesh


def load(tile: Tile, buffer: Any, slot: Any, source: Region, rows: int, barrier: Any, tf32: bool) -> None:
    """Emit the copies of a region into a slot of a tile's buffer; they complete on a barrier. `tf32`: rounded to it.

    So many `rows` are loaded: all of the tile's, or those that the tensor has.
    """
    whole, columns = matrix(tile)
    width, tall = _width(source, columns, panel(tile)), _height(source, tile) if rows == whole else rows
    with each(rows // tall) as i, each(columns // width) as j:
        row, column = i * tall, j * width
        part = buffer[slot, row : row + tall, column : column + width]
        from_ = box(source, row, tall, column, width)
        rounding = {"tma_dtype": "tf32"} if tf32 else {}
        primitives.copy_async(part, from_, dispatch=_dispatch(width, panel(tile)), mbar=barrier, **rounding)


def store(
    buffer: Any, place: tuple[Any, ...], target: Region, row: Any, column: Any, atomic: str | None = None
) -> None:
    """Emit the copies of a buffer's matrix at `place` to a region, from (`row`, `column`) on; `atomic`: joined."""
    rows, columns = (int(extent) for extent in buffer.shape[-2:])
    tile = Tile(target.tile.buffer, "shared", (rows, columns), str(buffer.dtype))
    swizzled, tall = panel(tile), _height(target, tile)
    width = _width(target, columns, swizzled)
    joined = {} if atomic is None else {"use_tma_reduce": atomic}
    with each(rows // tall) as i, each(columns // width) as j:
        index = (*place, slice(i * tall, i * tall + tall), slice(j * width, j * width + width))
        to = box(target, row + i * tall, tall, column + j * width, width)
        primitives.copy_async(to, buffer[index], dispatch=_dispatch(width, swizzled), **joined)


def _width(region: Region, columns: int, swizzled: int) -> int:
    """Columns of a copy: all panels at once, as a dimension of the tensor map of their own, where they divide its rows.

    Upstream makes such a map for tensors of up to four dimensions whose strides, if they have some, are constant, for
    boxes that they hold, from a panel's start on.
    """
    shape, start = region.tile.shape, region.start[-1]
    if not _is_matrix(region):
        return swizzled
    whole = len(shape) <= 4 and isinstance(shape[-1], int) and shape[-1] % swizzled == 0
    whole = whole and all(isinstance(stride, int) for stride in region.tile.strides or ())
    holds = all(isinstance(e, int) and e >= box and e > 1 for e, box in zip(shape, region.extents) if box > 1)
    aligned = sym.Analyzer().can_prove(tirx.floormod(start, swizzled) == 0)
    return columns if whole and holds and aligned else swizzled


def _height(region: Region, tile: Tile) -> int:
    """Rows of a copy between a region and a tile: of more than one dimension all, each of which a box holds."""
    return height(tile) if _is_matrix(region) else matrix(tile)[0]


def _dispatch(width: int, swizzled: int) -> str:
    return "tma_auto" if width > swizzled else "tma_explicit"


@contextlib.contextmanager
def each(count: int) -> Iterator[Any]:
    """An unrolled loop; upstream makes a tensor map for every copy that is written out, so none is twice."""
    if count == 1:
        yield 0
        return
    with T.unroll(count) as index:
        yield index


def box(region: Region, row: Any, rows: int, column: Any, width: int) -> tirx.BufferRegion:
    """`rows` x `width` of a region from (`row`, `column`) of it on.

    Of rows along several dimensions `row` is a multiple of `rows`.

    Raises
    ------
    ValueError
        So many rows are no box.
    """
    sides = list(zip(region.start, region.extents))[:-1]
    if _is_matrix(region):  # TMA knows where a tensor ends, so a part needn't divide it
        ranges = [
            ir.Range.from_min_extent(start, extent) if extent == 1 else ir.Range.from_min_extent(start + row, rows)
            for start, extent in sides
        ]
    else:
        part = _part(region, rows)
        if part is None:
            raise ValueError(f"{rows} rows of {region} are no box")
        ranges, inner = [], math.prod(extent for _, extent in sides)
        for (start, extent), taken in zip(sides, part):
            inner //= extent
            at = 0 if taken == extent else tirx.floormod(tirx.floordiv(row, inner), extent)
            ranges.append(ir.Range.from_min_extent(start + at, taken))
    ranges.append(ir.Range.from_min_extent(region.start[-1] + column, width))
    return tirx.BufferRegion(region.tile.buffer, ranges)
