"""Tiles, and regions of them: what the nodes of a tile program move and compute on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import sym, tirx

from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.tile.arithmetic import plain


@dataclass(frozen=True, eq=False)
class Tile:
    """A tile on chip, or a parameter in global memory.

    Attributes
    ----------
    buffer : Buffer
        Upstream's variable, which names the tile in the program.
    scope : str
        ``"global"``, ``"shared"``, ``"fragment"`` or ``"local"``.
    shape : tuple
        The extents, constants; those of a parameter may be expressions.
    dtype : str
        The type of an element.
    layout : Layout or ComposeLayout or None
        The layout as annotated; None is one to be inferred.
    is_mesh : bool
        Whether it is a tensor of the mesh, whose dimension 0 is the device (`tvm_axe.tile.mesh`).
    strides : tuple or None
        Of a parameter that isn't row-major, how many elements apart neighbours along each dimension are, constants or
        expressions; `tvm_axe.tile.strides.strides_of` has those of all others, too.
    """

    buffer: tirx.Buffer
    scope: str
    shape: tuple
    dtype: str
    layout: Layout | ComposeLayout | None = None
    is_mesh: bool = False
    strides: tuple | None = None

    @property
    def name(self) -> str:
        return str(self.buffer.name)

    @property
    def bytes(self) -> int:
        """Size without padding, in bytes; only of a tile on chip."""
        return math.prod(self.shape) * tvm_ffi.dtype(self.dtype).bits // 8

    def __str__(self) -> str:
        apart = "" if self.strides is None else f" with strides ({', '.join(map(str, self.strides))})"
        of = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return f"{'mesh' if self.is_mesh else self.scope} {self.name}: {of}{apart}"


def first_strided(tiles: Iterable[Tile]) -> Tile | None:
    """The first of some tensors that has strides, for whoever takes none; None if all are row-major."""
    return next((tile for tile in tiles if tile.strides is not None), None)


@dataclass(frozen=True, eq=False)
class Region:
    """A box of a tile.

    Attributes
    ----------
    tile : Tile
        The tile or tensor that it is a part of.
    start : tuple of Expr
        Where it starts, a dimension of the tile each.
    extents : tuple of int
        Its extents, as many.
    in_front : bool
        Whether it may begin in front of its tensor, as what a back end makes of loads under conditions does.
    """

    tile: Tile
    start: tuple
    extents: tuple[int, ...]
    in_front: bool = False

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

    def begins_at(self, dimension: int, step: int) -> bool:
        """Whether it begins at a multiple of `step` along a dimension, for all values of variables."""
        return bool(sym.Analyzer().can_prove_equal(self.start[dimension] % step, 0))

    def overruns(self, analyzer: sym.Analyzer) -> tuple[int, ...]:
        """The dimensions in which it isn't proved to end inside the tile; only in global memory are there any."""
        pairs = enumerate(zip(self.start, self.extents, self.tile.shape))
        return tuple(d for d, (start, extent, size) in pairs if not _ends_within(analyzer, start + extent, size))

    def __str__(self) -> str:
        if self.whole and all(isinstance(constant(s), int) and int(s) == 0 for s in self.start):
            return self.tile.name
        parts = (f"{s}" if e == 1 else f"{s}:{s + e}" for s, e in zip(self.start, self.extents))
        return f"{self.tile.name}[{', '.join(parts)}]"


def _ends_within(analyzer: sym.Analyzer, end: Any, size: Any) -> bool:
    """Whether a region's end is proved to be inside; where sizes are open, by all that is known of them."""
    if not isinstance(size, int) and not isinstance(end, int) and str(size.ty) != str(end.ty):
        # A grid runs up to an extent in its own, narrower type. Wrapped to that, what is at least 0 is never more.
        size = plain(tirx.Cast(str(end.ty), size))
    inside = end <= size
    if isinstance(inside, bool):
        return inside
    known = isinstance(size, int)
    return bool(
        analyzer.can_prove(inside)
        or (not known and analyzer.can_prove(inside, sym.analyzer.ProofStrength.SYMBOLIC_BOUND))
    )


def constant(value: Any) -> Any:
    """An integer where a value is one, else the value."""
    return int(value) if isinstance(value, (int, tirx.IntImm)) else value
