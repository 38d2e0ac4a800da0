"""Where a tile's elements lie in a core's memory: in rows, in panels for a matrix product, or as annotated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_axe.errors import TileError
from tvm_axe.layout import ComposeLayout, Iter, Layout, memory_size
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.layout.symbolic import Symbolic
from tvm_axe.tile.regions import Tile


@dataclass(frozen=True)
class Storage:
    """A tile's buffer.

    Attributes
    ----------
    tile : Tile
        The tile.
    dtype : str
        The type that its elements are held in: the tile's own, or a wider one.
    shape : tuple of int
        The buffer's extents.
    layout : Layout or ComposeLayout
        Where in the buffer, seen as one line of memory, an element lies; of the tile's shape, the dimension that
        vectors lie along filled up to whole vectors.
    panel : tuple of (int, int) or None
        The dimension and the width of panels: so many neighbours along the dimension lie side by side, the other of the
        two last dimensions follows, then the next panel. None without panels.
    """

    tile: Tile
    dtype: str
    shape: tuple[int, ...]
    layout: Layout | ComposeLayout
    panel: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * dtype_bits(self.dtype) // 8

    @property
    def filled(self) -> tuple[int, ...]:
        """The tile's shape with what fills up its last vectors."""
        if self.annotated:
            return self.tile.shape
        if self.panel is None:
            return self.shape
        dimension, width = self.panel
        return tuple(_round_up(e, width) if d == dimension else e for d, e in enumerate(self.tile.shape))

    @property
    def annotated(self) -> bool:
        """Whether elements lie as the program says, at addresses that vectors needn't fit."""
        return self.layout is self.tile.layout

    def contiguous(self, dimension: int) -> bool:
        """Whether neighbours along a dimension of the tile are neighbours in memory, in a panel at least."""
        if self.annotated:
            return False
        return dimension == (len(self.tile.shape) - 1 if self.panel is None else self.panel[0])

    def place(self, indices: Sequence[Any]) -> list[Any]:
        """The indices of the buffer at which the tile's element lies."""
        if self.annotated:
            (point,) = self.layout.apply(*indices, shape=self.tile.shape)
            address = point[LINEAR_MEMORY]
            return [address.expr if isinstance(address, Symbolic) else tirx.IntImm("int32", address)]
        if self.panel is None:
            return list(indices)
        dimension, width = self.panel
        across, along = indices[dimension], indices[_other(indices, dimension)]
        if isinstance(across, tirx.Ramp):  # neighbours within a panel
            across, lanes = across.base, across.lanes
            return [*indices[:-2], across // width, along, tirx.Ramp(across % width, 1, lanes)]
        return [*indices[:-2], across // width, along, across % width]


def in_rows(tile: Tile, dtype: str, multiple: int = 1) -> Storage:
    """Row-major, the rows filled up to a multiple of so many elements."""
    shape = (*tile.shape[:-1], _round_up(tile.shape[-1], multiple))
    return Storage(tile, dtype, shape, Layout(Iter(e, s, LINEAR_MEMORY) for e, s in zip(shape, dense_strides(shape))))


def in_panels(tile: Tile, dtype: str, dimension: int, width: int) -> Storage:
    """Panels of `width` along one of the two last dimensions, filled up to whole ones."""
    lead, along = tile.shape[:-2], tile.shape[_other(tile.shape, dimension)]
    panels = -(-tile.shape[dimension] // width)
    shape = (*lead, panels, along, width)
    *outer, between, step, _ = (Iter(e, s, LINEAR_MEMORY) for e, s in zip(shape, dense_strides(shape)))
    across = [between, Iter(width, 1, LINEAR_MEMORY)]
    inner = [*across, step] if dimension == len(tile.shape) - 2 else [step, *across]
    return Storage(tile, dtype, shape, Layout([*outer, *inner]), (dimension, width))


def as_annotated(tile: Tile, dtype: str) -> Storage:
    """As the program's annotation says.

    Raises
    ------
    TileError
        If it is no layout of linear memory that admits the tile's shape.
    """
    assert tile.layout is not None
    try:
        size = memory_size(tile.layout)
        tile.layout.apply(*(0 for _ in tile.shape), shape=tile.shape)
    except ValueError as error:
        raise TileError(f"{tile}: its annotated layout can't be one of memory: {error}") from error
    return Storage(tile, dtype, (size,), tile.layout)


def _other(shape: Sequence[Any], dimension: int) -> int:
    """The other one of the two last dimensions."""
    return 2 * len(shape) - 3 - dimension


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
