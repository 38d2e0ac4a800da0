"""Convolutions as products of boxes of pixels, which are loaded with their halo: what stands above and below them.

A box's rows lie one behind the other in shared memory, so the pixels under the next row of the kernel are the same tile
further on, and one load serves all rows of the kernel. The next column is loaded anew. A product of windows
(`tvm_axe.tile.kernels.convolution`) loads a pixel as often as there are places in the kernel.

Where all weights of a block's columns have room, blocks keep them and take box after box.
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
from tvm_axe.tile.kernels.windows import Windows

_PIECE = 128
"""Bits that a load takes."""

_KEPT = 80 << 10
"""Bytes of weights that a block keeps at most, so that boxes have room beside them."""

_ENOUGH = 0.8
"""Boxes for each multiprocessor at least; of fewer, smaller tiles of rows use more of them."""

_DEPTH = 64
"""Channels of a step, which a swizzled row has of 16 bits."""


@dataclass(frozen=True)
class Boxes:
    """The boxes of a convolution: `rows` x `columns` pixels of the results of each of `images` images.

    A box's pixels are in order of their row, then of the image, then of the column, so that `across` of them make a
    row, and so do those that are loaded.

    Raises
    ------
    TileError
        The convolution's windows are some rows apart: the next pixel's isn't the next row then.
    """

    windows: Windows
    rows: int
    columns: int
    images: int

    def __post_init__(self) -> None:
        if self.windows.strides[0] != 1:
            raise TileError(f"conv2d: boxes with a halo have windows one row apart, not {self.windows.strides[0]}")

    @property
    def across(self) -> int:
        """Pixels of a row."""
        return self.images * self.columns

    @property
    def pixels(self) -> int:
        """Pixels of the results: the rows of a product."""
        return self.rows * self.across

    @property
    def loaded(self) -> int:
        """Pixels under them that one column of the kernel covers."""
        return (self.rows + self.windows.span[0] - 1) * self.across

    @property
    def count(self) -> int:
        """How many boxes there are."""
        return tile.cdiv(self.windows.batch, self.images) * math.prod(self._along)

    @property
    def _along(self) -> tuple[int, int]:
        return tile.cdiv(self.windows.out_height, self.rows), tile.cdiv(self.windows.out_width, self.columns)

    def _first(self, box: Any) -> tuple[Any, Any, Any]:
        """The image, the row and the column with which a box begins."""
        down, right = self._along
        return box // (down * right) * self.images, box // right % down * self.rows, box % right * self.columns

    def result(self, box: Any, pixel: Any) -> tuple[Any, Any, Any]:
        """The image, the row and the column of a box's pixel."""
        image, y, x = self._first(box)
        return (
            image + pixel % self.across // self.columns,
            y + pixel // self.across,
            x + pixel % self.across % self.columns,
        )

    def is_result(self, box: Any, pixel: Any) -> Any:
        """Whether the results have a box's pixel; those at edges have fewer."""
        image, y, x = self.result(box, pixel)
        windows = self.windows
        return tirx.all(box < self.count, image < windows.batch, y < windows.out_height, x < windows.out_width)

    def source(self, box: Any, pixel: Any, column: Any) -> tuple[tuple[Any, Any, Any], Any]:
        """Where a pixel that is loaded for a column of the kernel lies in the images, and whether it does."""
        windows = self.windows
        image, y, x = self.result(box, pixel)
        y = y - windows.padding[0]
        x = x * windows.strides[1] + column * windows.dilation[1] - windows.padding[1]
        inside = (y >= 0, y < windows.height, x >= 0, x < windows.width)
        return (image, y, x), tirx.all(box < self.count, image < windows.batch, *inside)


def boxes(
    windows: Windows,
    epilogue: Epilogue,
    *,
    block_h: int,
    block_w: int,
    images: int,
    block_n: int,
    stages: int,
    keepers: int = 0,
    swizzle: int = 1,
) -> Recipe:
    """A block has `block_h` x `block_w` pixels of `images` images, of `block_n` of a group's columns.

    With `keepers`, so many blocks keep the weights of each `block_n` columns and take box after box.

    Raises
    ------
    TileError
        Windows are some rows apart, or a group has no multiple of 64 channels; with `keepers`, other than 64.
    """
    shape, depth = Boxes(windows, block_h, block_w, images), windows.depth
    if depth % _DEPTH or (keepers and depth != _DEPTH):
        valid = f"{_DEPTH}" if keepers else f"multiples of {_DEPTH}"
        raise TileError(f"conv2d: boxes with a halo have {valid} channels a group, not {depth}")
    product = _Product(shape, epilogue, block_n)
    program = product.kept(stages, keepers) if keepers else product.streamed(stages, swizzle)
    return Recipe((only_used(program),), ("X", "W", *epilogue.tensors), ("Y",))


@dataclass(frozen=True)
class _Product:
    """The product of a convolution's boxes and `block_n` of its weights' columns, by programs of two kinds."""

    boxes: Boxes
    epilogue: Epilogue
    block_n: int

    @property
    def _pieces(self) -> tuple[int, int]:
        """How a step's channels are loaded: so many pieces of so many."""
        piece = _PIECE // dtype_bits(self.boxes.windows.dtype)
        return _DEPTH // piece, piece

    @property
    def _tiles(self) -> int:
        """Tiles of a group's columns."""
        return tile.cdiv(self.boxes.windows.columns, self.block_n)

    def _image(self, X: tirx.Buffer, t: Any, box: Any, pixel: Any, column: Any, channel: Any) -> Any:
        """An element under a box, for the columns' tile `t`; zero where there is none."""
        windows = self.boxes.windows
        place, inside = self.boxes.source(box, pixel, column)
        at = (*place, t // self._tiles * windows.depth + channel)
        return T.if_then_else(inside, X[at], tirx.const(0, windows.dtype))

    def _weight(self, W: tirx.Buffer, t: Any, n: Any, place: tuple[Any, Any], channel: Any) -> Any:
        """An element of the weights of a tile's `n`th column, zero where there is none."""
        columns, dtype = self.boxes.windows.columns, self.boxes.windows.dtype
        n = t % self._tiles * self.block_n + n
        at = (t // self._tiles * columns + n, *place, channel)
        value = W[at]
        return T.if_then_else(n < columns, value, tirx.const(0, dtype)) if columns % self.block_n else value

    def _multiply(self, a: tirx.Buffer, b: tirx.Buffer, c: tirx.Buffer, beside: int, anew: bool) -> None:
        """The products of so many columns of the kernel, one behind the other, of sums that begin anew or not."""
        windows, pixels = self.boxes.windows, self.boxes.pixels
        for place in range(windows.kernel_height * beside):
            first = place % beside * self.boxes.loaded + place // beside * windows.dilation[0] * self.boxes.across
            weights = b[place * self.block_n : (place + 1) * self.block_n, :]
            tile.gemm(a[first : first + pixels, :], weights, c, transpose_b=True, accumulate=place > 0 or not anew)

    def _result(self, t: Any, box: Any, pixel: Any, n: Any) -> tuple[tuple[Any, ...], Any]:
        """Where an element of a tile's sums belongs in the results, and whether it does."""
        columns, n = self.boxes.windows.columns, t % self._tiles * self.block_n + n
        at = (*self.boxes.result(box, pixel), t // self._tiles * columns + n)
        return at, tirx.all(self.boxes.is_result(box, pixel), n < columns)

    def streamed(self, stages: int, swizzle: int) -> tirx.PrimFunc:
        """A block a box, which loads of one column of the kernel after the other 64 channels and their weights."""
        shape, windows, block_n, epilogue = self.boxes, self.boxes.windows, self.block_n, self.epilogue
        (x_shape, w_shape, y_shape), dtype, (pieces, piece) = windows.shapes, windows.dtype, self._pieces
        chunks, down = windows.depth // _DEPTH, windows.kernel_height

        @T.prim_func
        def conv2d(
            X: T.Buffer(x_shape, dtype),
            W: T.Buffer(w_shape, dtype),
            bias: T.Buffer((windows.out_channels,), dtype),
            residual: T.Buffer(y_shape, dtype),
            Y: T.Buffer(y_shape, dtype),
        ) -> None:
            with tile.kernel(shape.count, windows.groups * self._tiles, swizzle=swizzle) as (i, t):
                a = tile.shared((shape.loaded, _DEPTH), dtype)
                b = tile.shared((down * block_n, _DEPTH), dtype)
                c = tile.fragment((shape.pixels, block_n), "float32")
                tile.fill(c, 0)
                for l in tile.pipelined(windows.kernel_width * chunks, stages=stages):
                    column, first = T.meta_var(l // chunks), T.meta_var(l % chunks * _DEPTH)
                    with tile.parallel(shape.loaded, pieces, piece) as (x, q, v):
                        a[x, q * piece + v] = self._image(X, t, i, x, column, first + q * piece + v)
                    with tile.parallel(down * block_n, pieces, piece) as (n, q, v):
                        place = T.meta_var((n // block_n, column))
                        b[n, q * piece + v] = self._weight(W, t, n % block_n, place, first + q * piece + v)
                    self._multiply(a, b, c, 1, False)
                with tile.parallel(shape.pixels, block_n) as (x, n):
                    at, inside = T.meta_var(self._result(t, i, x, n))
                    if inside:
                        Y[at] = T.cast(epilogue.expression(c[x, n], at, None, bias, residual), dtype)

        return conv2d

    def kept(self, stages: int, keepers: int) -> tirx.PrimFunc:
        """So many blocks for a tile of columns keep all of its weights, and load box after box for them."""
        shape, windows, block_n, epilogue = self.boxes, self.boxes.windows, self.block_n, self.epilogue
        (x_shape, w_shape, y_shape), dtype, (pieces, piece) = windows.shapes, windows.dtype, self._pieces
        beside, places = windows.kernel_width, windows.kernel_height * windows.kernel_width

        @T.prim_func
        def conv2d(
            X: T.Buffer(x_shape, dtype),
            W: T.Buffer(w_shape, dtype),
            bias: T.Buffer((windows.out_channels,), dtype),
            residual: T.Buffer(y_shape, dtype),
            Y: T.Buffer(y_shape, dtype),
        ) -> None:
            with tile.kernel(keepers, windows.groups * self._tiles) as (s, t):
                a = tile.shared((beside * shape.loaded, _DEPTH), dtype)
                b = tile.shared((places * block_n, _DEPTH), dtype)
                c = tile.fragment((shape.pixels, block_n), "float32")
                with tile.parallel(places * block_n, pieces, piece) as (n, q, v):
                    place = T.meta_var((n // block_n // beside, n // block_n % beside))
                    b[n, q * piece + v] = self._weight(W, t, n % block_n, place, q * piece + v)
                for l in tile.pipelined(tile.cdiv(shape.count, keepers), stages=stages):
                    i = T.meta_var(l * keepers + s)
                    with tile.parallel(beside * shape.loaded, pieces, piece) as (x, q, v):
                        pixel, column = T.meta_var(x % shape.loaded), T.meta_var(x // shape.loaded)
                        a[x, q * piece + v] = self._image(X, t, i, pixel, column, q * piece + v)
                    self._multiply(a, b, c, beside, True)
                    with tile.parallel(shape.pixels, block_n) as (x, n):
                        at, inside = T.meta_var(self._result(t, i, x, n))
                        if inside:
                            Y[at] = T.cast(epilogue.expression(c[x, n], at, None, bias, residual), dtype)

        return conv2d


# ---- Defaults --------------------------------------------------------------------------------------------------------


def knobs(gpu: Gpu, windows: Windows) -> Knobs | None:
    """Boxes of 128 pixels, or of 64 whose blocks keep their weights; None where products of windows are better.

    That is where windows don't overlap from row to row, where a step hasn't a swizzled row's channels, and where boxes
    are few.
    """
    fits = windows.strides[0] == 1 and windows.kernel_height > 1 and windows.depth % _DEPTH == 0
    if gpu.tensor_cores != "wgmma" or dtype_bits(windows.dtype) != 16 or not fits or windows.columns < _DEPTH:
        return None
    block_n = _DEPTH
    tiles = windows.groups * tile.cdiv(windows.columns, block_n)
    keeps = windows.depth == _DEPTH and windows.terms * block_n * 2 <= _KEPT
    pixels = 64 if keeps else 128
    candidates = [Boxes(windows, *each) for each in _shapes(pixels, windows)]
    at_once = [each for each in candidates if each.count * tiles <= gpu.processors]
    if at_once:  # each has a multiprocessor for itself, and one more or less takes no longer: fewest images are fastest
        best = min(at_once, key=lambda each: (each.images, -each.count))
    else:
        best = min(candidates, key=lambda each: (each.count * (each.pixels + each.loaded), each.images))
    if best.count * tiles < _ENOUGH * gpu.processors:
        return None
    keepers = gpu.processors // tiles if keeps and best.count * tiles >= 4 * gpu.processors else 0
    return {
        "block_h": choose(best.rows, 4, 8, 16),
        "block_w": choose(best.columns, 1, 2, 4, 8),
        "images": choose(best.images, 1, 2, 4, 8, 16),
        "block_n": choose(block_n, 128),
        "stages": choose(3 if keepers or at_once else 2, 2, 3),
        "keepers": choose(keepers, 0),
        "swizzle": choose(1 if keepers or tiles == 1 else 8, 1, 4),
    }


def _shapes(pixels: int, windows: Windows) -> Iterator[tuple[int, int, int]]:
    """Boxes of so many pixels, a power of two each way, whose rows are whole atoms of a swizzle."""
    for rows in (16, 8, 4):
        for columns in (8, 4, 2, 1):
            images = pixels // rows // columns
            if images and images * columns % 8 == 0 and images <= windows.batch:
                yield rows, columns, images
