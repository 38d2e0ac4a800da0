"""Convolutions of groups of few channels, as products of boxes of pixels that are loaded once, with their halo.

A box's rows lie one behind the other in shared memory, with the pixels beside them, so the pixels under any place of
the kernel are the same tile from another row on. A product of windows (`tvm_axe.tile.kernels.convolution`) loads a
pixel as often as there are places in the kernel.

Blocks keep the weights of their columns and take box after box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.machines import Gpu
from tvm_axe.tile.kernels.epilogue import Epilogue
from tvm_axe.tile.kernels.kernel import Knobs, Recipe, choose, only_used
from tvm_axe.tile.kernels.windows import Boxes, Windows

_PIECE = 128
"""Bits that a load takes."""

_DEPTH = 64
"""Channels of a product at most, which a swizzled row has of 16 bits."""

_COLUMNS = 64
"""Columns of a product at most by default."""

_ROWS = 16
"""What divides the rows of a product."""

_TERMS = 16
"""What divides a product's channels."""

_MERGED = 4
"""Groups that are multiplied as one by default at most: three of four products are with zeros then."""

_FEW = 32
"""Channels of groups, merged or not, that are few."""

_BLOCKS = 4
"""Blocks of a multiprocessor that keep the weights of such groups."""

_TURN, _UNEVEN = 40, 9 / 8
"""What a box takes besides, in rows that are loaded and multiplied, and a row where it takes divisions to say whose."""


@dataclass(frozen=True)
class Surrounded(Boxes):
    """Boxes whose rows have the pixels beside a box, too, and what stands above and below.

    A box's pixels are in order of their row, then of the image, then of the column, so that `across` of them make a
    row, and so do those that are loaded. A product has rows for the pixels beside, which are nobody's.
    """

    @property
    def _width(self) -> int:
        """Pixels of an image in a row."""
        return self.columns + self.windows.span[1] - 1

    @property
    def across(self) -> int:
        """Pixels of a row."""
        return self.images * self._width

    @property
    def pixels(self) -> int:
        """Rows of a product: one for each pixel of the results, and those that are nobody's."""
        return tile.cdiv(self.rows * self.across, _ROWS) * _ROWS

    @property
    def loaded(self) -> int:
        """Pixels under them that the kernel covers."""
        down, beside = (size - 1 for size in self.windows.span)
        return self.pixels + down * self.across + beside

    def begin(self, y: int, x: int) -> int:
        """With which row those pixels begin that are under a place of the kernel."""
        down, right = self.windows.dilation
        return y * down * self.across + x * right

    def place(self, box: Any, pixel: Any) -> tuple[Any, Any, Any]:
        """The image, the row and the column of a box's pixel."""
        image, y, x = self.corner(box)
        row, column = pixel // self.across, pixel % self.across
        return image + column // self._width, y + row, x + column % self._width

    def is_result(self, box: Any, pixel: Any) -> Any:
        """Whether the results have a box's pixel; those at edges have fewer, and those beside a box are another's."""
        own = pixel // self.across < self.rows, pixel % self._width < self.columns
        return tirx.all(box < self.count, *self.windows.is_result(*self.place(box, pixel)), *own)

    def source(self, box: Any, pixel: Any) -> tuple[tuple[Any, Any, Any], Any]:
        """Where a pixel that is loaded lies in the images, and whether it does."""
        windows, (image, y, x) = self.windows, self.place(box, pixel)
        at = image, y - windows.padding[0], x - windows.padding[1]
        return at, tirx.all(box < self.count, *windows.is_pixel(*at))


def boxes(
    windows: Windows,
    epilogue: Epilogue,
    *,
    block_h: int,
    block_w: int,
    images: int,
    block_n: int,
    stages: int,
    keepers: int,
    merged: int = 1,
) -> Recipe:
    """A block has `block_h` x `block_w` pixels of `images` images at a time, of `block_n` of a group's columns.

    So many blocks, `keepers`, keep the weights of each `block_n` columns and take box after box. `merged` groups are
    multiplied as one, with zeros between them: tensor cores take no less than 16 channels.

    Raises
    ------
    TileError
        Windows are some pixels apart: the next one's pixels aren't the next then. Groups that are multiplied as one
        have more than 64 channels, or `merged` doesn't divide the groups.
    """
    if tuple(windows.strides) != (1, 1):
        raise TileError(f"conv2d: boxes with a halo have windows one pixel apart, not {tuple(windows.strides)}")
    if windows.groups % merged:
        raise TileError(f"conv2d: merged={merged}; valid divides the {windows.groups} groups")
    depth, columns = windows.depth * merged, windows.columns * merged
    if depth > _DEPTH:
        raise TileError(f"conv2d: boxes with a halo have at most {_DEPTH} channels a product, not {depth}")
    shape, dtype = Surrounded(windows, block_h, block_w, images), windows.dtype
    x_shape, w_shape, y_shape = windows.shapes
    down, beside, across = windows.kernel_height, windows.kernel_width, tile.cdiv(columns, block_n)
    turns = tile.cdiv(shape.count, keepers)
    piece, of_group = (math.gcd(size, _PIECE // dtype_bits(dtype)) for size in (depth, windows.depth))

    def image(X: tirx.Buffer, t: Any, box: Any, pixel: Any, channel: Any) -> Any:
        """An element under a box, for the columns' tile `t`; zero where there is none."""
        (z, y, x), inside = shape.source(box, pixel)
        return T.if_then_else(inside, X[z, y, x, t // across * depth + channel], tirx.const(0, dtype))

    def weight(W: tirx.Buffer, t: Any, row: Any, channel: Any) -> Any:
        """An element of the weights of a tile's columns, for one place after the other; zero where there is none."""
        place, n = row // block_n, t % across * block_n + row % block_n
        at = (t // across * columns + n, place // beside, place % beside, channel % windows.depth)
        own = [n < columns] if columns % block_n else []
        own += [n // windows.columns == channel // windows.depth] if merged > 1 else []
        return T.if_then_else(tirx.all(*own), W[at], tirx.const(0, dtype)) if own else W[at]

    def multiply(a: tirx.Buffer, b: tirx.Buffer, c: tirx.Buffer) -> None:
        """The products of all places of the kernel."""
        for place in range(down * beside):
            begin = shape.begin(place // beside, place % beside)
            weights = b[place * block_n : (place + 1) * block_n, :]
            tile.gemm(a[begin : begin + shape.pixels, :], weights, c, transpose_b=True, accumulate=place > 0)

    def result(t: Any, box: Any, pixel: Any, n: Any) -> tuple[tuple[Any, ...], Any]:
        """Where an element of a tile's sums belongs in the results, and whether it does."""
        n = t % across * block_n + n
        inside = tirx.all(shape.is_result(box, pixel), n < columns)
        return (*shape.place(box, pixel), t // across * columns + n), inside

    @T.prim_func
    def conv2d(
        X: T.Buffer(x_shape, dtype),
        W: T.Buffer(w_shape, dtype),
        bias: T.Buffer((windows.out_channels,), dtype),
        residual: T.Buffer(y_shape, dtype),
        Y: T.Buffer(y_shape, dtype),
    ) -> None:
        with tile.kernel(keepers, windows.groups // merged * across) as (s, t):
            a = tile.shared((shape.loaded, depth), dtype)
            b = tile.shared((down * beside * block_n, depth), dtype)
            c = tile.fragment((shape.pixels, block_n), "float32")
            with tile.parallel(down * beside * block_n, depth // of_group, of_group) as (n, q, v):
                b[n, q * of_group + v] = weight(W, t, n, q * of_group + v)
            for l in tile.pipelined(turns, stages=min(stages, turns)):
                i = T.meta_var(l * keepers + s)
                with tile.parallel(shape.loaded, depth // piece, piece) as (x, q, v):
                    a[x, q * piece + v] = image(X, t, i, x, q * piece + v)
                multiply(a, b, c)
                with tile.parallel(shape.pixels, block_n) as (x, n):
                    at, inside = T.meta_var(result(t, i, x, n))
                    if inside:
                        Y[at] = T.cast(epilogue.expression(c[x, n], at, None, bias, residual), dtype)

    return Recipe((only_used(conv2d),), ("X", "W", *epilogue.tensors), ("Y",))


# ---- Defaults --------------------------------------------------------------------------------------------------------


def knobs(gpu: Gpu, windows: Windows) -> Knobs | None:
    """Boxes for groups of few channels, as many at once as make those of a product of `mma`; None for others."""
    merged = _TERMS // math.gcd(windows.depth, _TERMS)
    depth, columns = windows.depth * merged, windows.columns * merged
    fits = tuple(windows.strides) == (1, 1) and windows.kernel_height > 1 and windows.groups % merged == 0
    if not fits or dtype_bits(windows.dtype) != 16 or not gpu.by_tensor_cores(windows.dtype):
        return None
    if merged > _MERGED or depth > _FEW or columns > _COLUMNS:
        return None
    tiles, block_n = windows.groups // merged, tile.cdiv(columns, 8) * 8
    weights = windows.kernel_height * windows.kernel_width * block_n

    def keepers(each: Surrounded) -> int:
        """Blocks that have room at once, of which none is without a box."""
        room = gpu.shared_bytes // ((weights + 2 * each.loaded) * depth * dtype_bits(windows.dtype) // 8)
        return min(each.count, max(1, min(room, _BLOCKS) * gpu.processors // tiles))

    def cost(each: Surrounded) -> tuple[float, int]:
        """Rows that a multiprocessor loads and multiplies, weights too; the first box's loads have nothing beside them.

        Fitted to seven shapes on an H200 (docs/results/2026-12-01-kernels-h200.md).
        """
        rows = (each.pixels + each.loaded) * (1 if each.across.bit_count() == 1 else _UNEVEN)
        turns = tile.cdiv(each.count, keepers(each)) + 0.5
        return tile.cdiv(keepers(each) * tiles, gpu.processors) * (weights + turns * (rows + _TURN)), each.images

    best = min((Surrounded(windows, *each) for each in _shapes(windows)), key=cost, default=None)
    if best is None:
        return None
    return {
        "block_h": choose(best.rows, 4, 8, 16),
        "block_w": choose(best.columns, 7, 14, 30),
        "images": choose(best.images, 1, 2),
        "block_n": (block_n,),
        "stages": choose(2, 3),
        "keepers": choose(keepers(best), 2 * keepers(best)),
        "merged": (merged,),
    }


def _shapes(windows: Windows) -> Iterator[tuple[int, int, int]]:
    """Boxes whose products have whole tiles of 64 rows, of which at most half are beside the box.

    They are of several images where an image's rows aren't parted.
    """
    beside = windows.span[1] - 1
    for parts in range(1, windows.out_width // max(1, beside) + 1):
        columns = tile.cdiv(windows.out_width, parts)
        for images in (1, 2, 4) if parts == 1 else (1,):
            across = images * (columns + beside)
            for pixels in (64, 128, 256):
                rows = pixels // across
                if rows and images <= windows.batch and tile.cdiv(rows * across, _ROWS) * _ROWS == pixels:
                    yield rows, columns, images
