"""Convolutions as products of boxes of pixels, which are loaded with their halo: what stands above and below them.

A box's rows lie one behind the other in shared memory, so the pixels under the next row of the kernel are the same tile
further on, and one load serves all rows of the kernel. The next column is loaded anew, or, for groups of few channels,
lies beside it. A product of windows (`tvm_axe.tile.kernels.convolution`) loads a pixel as often as there are places in
the kernel.

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

_COLUMNS = 64
"""Columns of a block by default, and of a group at least, so that warpgroups have enough to multiply."""

_ROWS = 16
"""What divides the rows of a product."""

_TERMS = 16
"""What divides a product's channels."""

_MERGED = 4
"""Groups that are multiplied as one by default at most: three of four products are with zeros then."""

_FEW = 32
"""Channels of groups, merged or not, whose boxes are loaded with all around them by default."""

_BLOCKS = 4
"""Blocks of a multiprocessor that keep the weights of such groups."""

_TURN, _UNEVEN = 40, 9 / 8
"""What a box takes besides, in rows that are loaded and multiplied, and a row where it takes divisions to say whose."""


@dataclass(frozen=True)
class Boxes:
    """The boxes of a convolution: `rows` x `columns` pixels of the results of each of `images` images.

    A box's pixels are in order of their row, then of the image, then of the column, so that `across` of them make a
    row, and so do those that are loaded.

    With `around`, rows have the pixels beside a box, too. Those under any place of the kernel are then the same tile
    further on, and a product has rows for the pixels beside, which are nobody's.

    Raises
    ------
    TileError
        The convolution's windows are some rows apart, or columns, with `around`: the next pixel's isn't the next then.
    """

    windows: Windows
    rows: int
    columns: int
    images: int
    around: bool = False

    def __post_init__(self) -> None:
        for apart, what in zip(self.windows.strides, ("row", "column") if self.around else ("row",)):
            if apart != 1:
                raise TileError(f"conv2d: boxes with a halo have windows one {what} apart, not {apart}")

    @property
    def _width(self) -> int:
        """Pixels of an image in a row."""
        return self.columns + (self.windows.span[1] - 1 if self.around else 0)

    @property
    def across(self) -> int:
        """Pixels of a row."""
        return self.images * self._width

    @property
    def pixels(self) -> int:
        """Rows of a product: one for each pixel of the results, and those that are nobody's."""
        return tile.cdiv(self.rows * self.across, _ROWS) * _ROWS if self.around else self.rows * self.across

    @property
    def loaded(self) -> int:
        """Pixels under them that one column of the kernel covers, or the kernel."""
        down, beside = (size - 1 for size in self.windows.span)
        return self.pixels + down * self.across + (beside if self.around else 0)

    @property
    def loads(self) -> int:
        """How often these are loaded: for each column of the kernel, or once."""
        return 1 if self.around else self.windows.kernel_width

    def begin(self, y: int, x: int) -> int:
        """With which row those pixels begin that are under a place of the kernel, all loads one behind the other."""
        down, right = self.windows.dilation
        return y * down * self.across + x * (right if self.around else self.loaded)

    @property
    def count(self) -> int:
        """How many boxes there are."""
        return tile.cdiv(self.windows.batch, self.images) * math.prod(self._along)

    @property
    def _along(self) -> tuple[int, int]:
        return tile.cdiv(self.windows.out_height, self.rows), tile.cdiv(self.windows.out_width, self.columns)

    def result(self, box: Any, pixel: Any) -> tuple[Any, Any, Any]:
        """The image, the row and the column of a box's pixel."""
        down, right = self._along
        image, y, x = box // (down * right) * self.images, box // right % down * self.rows, box % right * self.columns
        row, column = pixel // self.across, pixel % self.across
        return image + column // self._width, y + row, x + column % self._width

    def is_result(self, box: Any, pixel: Any) -> Any:
        """Whether the results have a box's pixel; those at edges have fewer, and those beside a box are another's."""
        image, y, x = self.result(box, pixel)
        own = [pixel // self.across < self.rows, pixel % self._width < self.columns] if self.around else []
        windows = self.windows
        return tirx.all(box < self.count, image < windows.batch, y < windows.out_height, x < windows.out_width, *own)

    def source(self, box: Any, pixel: Any) -> tuple[tuple[Any, Any, Any], Any]:
        """Where a pixel that is loaded lies in the images, and whether it does; all loads one behind the other."""
        windows, column = self.windows, 0 if self.around else pixel // self.loaded
        image, y, x = self.result(box, pixel if self.around else pixel % self.loaded)
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
    around: int = 0,
    merged: int = 1,
) -> Recipe:
    """A block has `block_h` x `block_w` pixels of `images` images, of `block_n` of a group's columns.

    With `keepers`, so many blocks keep the weights of each `block_n` columns and take box after box. With `around`
    these load a box once with all that stands around it. `merged` groups are multiplied as one, with zeros between
    them: tensor cores take no less than 16 channels.

    Raises
    ------
    TileError
        Windows are some rows apart, or columns, with `around`. A group has no multiple of 64 channels; with `keepers`,
        more than 64. `around` or `merged` is without `keepers`, or `merged` doesn't divide the groups.
    """
    shape, depth = Boxes(windows, block_h, block_w, images, bool(around)), windows.depth * merged
    if (around or merged > 1) and not keepers:
        raise TileError("conv2d: around and merged are for blocks that keep weights: keepers from 1 on")
    if windows.groups % merged:
        raise TileError(f"conv2d: merged={merged}; valid divides the {windows.groups} groups")
    if depth > _DEPTH if keepers else depth % _DEPTH:
        valid = f"at most {_DEPTH}" if keepers else f"multiples of {_DEPTH}"
        raise TileError(f"conv2d: boxes with a halo have {valid} channels a group, not {depth}")
    product = _Product(shape, epilogue, block_n, merged)
    program = product.kept(stages, keepers) if keepers else product.streamed(stages, swizzle)
    return Recipe((only_used(program),), ("X", "W", *epilogue.tensors), ("Y",))


@dataclass(frozen=True)
class _Product:
    """The product of a convolution's boxes and `block_n` of its weights' columns, by programs of two kinds.

    Groups are multiplied `merged` at a time, as one.
    """

    boxes: Boxes
    epilogue: Epilogue
    block_n: int
    merged: int

    @property
    def _block_k(self) -> int:
        """Channels of a step."""
        return min(self.boxes.windows.depth * self.merged, _DEPTH)

    def _piece(self, channels: int) -> int:
        """Channels that are loaded together, of so many neighbours."""
        return math.gcd(channels, _PIECE // dtype_bits(self.boxes.windows.dtype))

    @property
    def _columns(self) -> int:
        """Columns of the groups that are multiplied as one."""
        return self.boxes.windows.columns * self.merged

    @property
    def _tiles(self) -> int:
        """Tiles of these columns."""
        return tile.cdiv(self._columns, self.block_n)

    @property
    def _grid(self) -> int:
        """Tiles of all columns."""
        return self.boxes.windows.groups // self.merged * self._tiles

    def _image(self, X: tirx.Buffer, t: Any, box: Any, pixel: Any, channel: Any) -> Any:
        """An element under a box, for the columns' tile `t`; zero where there is none."""
        windows = self.boxes.windows
        place, inside = self.boxes.source(box, pixel)
        at = (*place, t // self._tiles * (windows.depth * self.merged) + channel)
        return T.if_then_else(inside, X[at], tirx.const(0, windows.dtype))

    def _weight(self, W: tirx.Buffer, t: Any, n: Any, place: tuple[Any, Any], channel: Any) -> Any:
        """An element of the weights of a tile's `n`th column, zero where there is none."""
        windows, n = self.boxes.windows, t % self._tiles * self.block_n + n
        at = (t // self._tiles * self._columns + n, *place, channel % windows.depth if self.merged > 1 else channel)
        own = [n < self._columns] if self._columns % self.block_n else []
        own += [n // windows.columns == channel // windows.depth] if self.merged > 1 else []
        return T.if_then_else(tirx.all(*own), W[at], tirx.const(0, windows.dtype)) if own else W[at]

    def _multiply(self, a: tirx.Buffer, b: tirx.Buffer, c: tirx.Buffer, beside: int, anew: bool) -> None:
        """The products of so many columns of the kernel, one behind the other, of sums that begin anew or not."""
        for place in range(self.boxes.windows.kernel_height * beside):
            begin = self.boxes.begin(place // beside, place % beside)
            weights = b[place * self.block_n : (place + 1) * self.block_n, :]
            image = a[begin : begin + self.boxes.pixels, :]
            tile.gemm(image, weights, c, transpose_b=True, accumulate=place > 0 or not anew)

    def _result(self, t: Any, box: Any, pixel: Any, n: Any) -> tuple[tuple[Any, ...], Any]:
        """Where an element of a tile's sums belongs in the results, and whether it does."""
        n = t % self._tiles * self.block_n + n
        at = (*self.boxes.result(box, pixel), t // self._tiles * self._columns + n)
        return at, tirx.all(self.boxes.is_result(box, pixel), n < self._columns)

    def streamed(self, stages: int, swizzle: int) -> tirx.PrimFunc:
        """A block a box, which loads of one column of the kernel after the other some channels and their weights."""
        shape, windows, block_n, epilogue = self.boxes, self.boxes.windows, self.block_n, self.epilogue
        (x_shape, w_shape, y_shape), dtype, block_k = windows.shapes, windows.dtype, self._block_k
        chunks, down, piece = windows.depth // block_k, windows.kernel_height, self._piece(block_k)
        steps = windows.kernel_width * chunks

        @T.prim_func
        def conv2d(
            X: T.Buffer(x_shape, dtype),
            W: T.Buffer(w_shape, dtype),
            bias: T.Buffer((windows.out_channels,), dtype),
            residual: T.Buffer(y_shape, dtype),
            Y: T.Buffer(y_shape, dtype),
        ) -> None:
            with tile.kernel(shape.count, self._grid, swizzle=swizzle) as (i, t):
                a = tile.shared((shape.loaded, block_k), dtype)
                b = tile.shared((down * block_n, block_k), dtype)
                c = tile.fragment((shape.pixels, block_n), "float32")
                tile.fill(c, 0)
                for l in tile.pipelined(steps, stages=min(stages, steps)):
                    column, first = T.meta_var(l // chunks), T.meta_var(l % chunks * block_k)
                    with tile.parallel(shape.loaded, block_k // piece, piece) as (x, q, v):
                        pixel = T.meta_var(column * shape.loaded + x)
                        a[x, q * piece + v] = self._image(X, t, i, pixel, first + q * piece + v)
                    with tile.parallel(down * block_n, block_k // piece, piece) as (n, q, v):
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
        (x_shape, w_shape, y_shape), dtype, block_k = windows.shapes, windows.dtype, self._block_k
        beside, places = windows.kernel_width, windows.kernel_height * windows.kernel_width
        turns = tile.cdiv(shape.count, keepers)
        piece, of_group = self._piece(block_k), self._piece(windows.depth)

        @T.prim_func
        def conv2d(
            X: T.Buffer(x_shape, dtype),
            W: T.Buffer(w_shape, dtype),
            bias: T.Buffer((windows.out_channels,), dtype),
            residual: T.Buffer(y_shape, dtype),
            Y: T.Buffer(y_shape, dtype),
        ) -> None:
            with tile.kernel(keepers, self._grid) as (s, t):
                a = tile.shared((shape.loads * shape.loaded, block_k), dtype)
                b = tile.shared((places * block_n, block_k), dtype)
                c = tile.fragment((shape.pixels, block_n), "float32")
                with tile.parallel(places * block_n, block_k // of_group, of_group) as (n, q, v):
                    place = T.meta_var((n // block_n // beside, n // block_n % beside))
                    b[n, q * of_group + v] = self._weight(W, t, n % block_n, place, q * of_group + v)
                for l in tile.pipelined(turns, stages=min(stages, turns)):
                    i = T.meta_var(l * keepers + s)
                    with tile.parallel(shape.loads * shape.loaded, block_k // piece, piece) as (x, q, v):
                        a[x, q * piece + v] = self._image(X, t, i, x, q * piece + v)
                    self._multiply(a, b, c, beside, True)
                    with tile.parallel(shape.pixels, block_n) as (x, n):
                        at, inside = T.meta_var(self._result(t, i, x, n))
                        if inside:
                            Y[at] = T.cast(epilogue.expression(c[x, n], at, None, bias, residual), dtype)

        return conv2d


# ---- Defaults --------------------------------------------------------------------------------------------------------


def knobs(gpu: Gpu, windows: Windows) -> Knobs | None:
    """Boxes for groups of few channels, or for warpgroups; None where products of windows are better.

    That is where windows don't overlap from row to row, and where neither of the two has enough to do.
    """
    if dtype_bits(windows.dtype) != 16 or windows.strides[0] != 1 or windows.kernel_height == 1:
        return None
    return _of_few_channels(gpu, windows) or _of_warpgroups(gpu, windows)


def _of_few_channels(gpu: Gpu, windows: Windows) -> Knobs | None:
    """Boxes with all that stands around them, of as many groups as make the channels of a product of `mma`."""
    merged = _TERMS // math.gcd(windows.depth, _TERMS)
    depth, columns = windows.depth * merged, windows.columns * merged
    fits = windows.strides[1] == 1 and windows.groups % merged == 0 and gpu.by_tensor_cores(windows.dtype)
    if not fits or merged > _MERGED or depth > _FEW or columns > _COLUMNS:
        return None
    tiles, block_n = windows.groups // merged, tile.cdiv(columns, 8) * 8
    weights = windows.kernel_height * windows.kernel_width * block_n

    def keepers(each: Boxes) -> int:
        """Blocks that have room at once, of which none is without a box."""
        room = gpu.shared_bytes // ((weights + 2 * each.loaded) * depth * dtype_bits(windows.dtype) // 8)
        return min(each.count, max(1, min(room, _BLOCKS) * gpu.processors // tiles))

    def cost(each: Boxes) -> tuple[float, int]:
        """Rows that a multiprocessor loads and multiplies, weights too; the first box's loads have nothing beside them.

        Fitted to seven shapes on an H200 (docs/results/2026-12-01-kernels-h200.md).
        """
        rows = (each.pixels + each.loaded) * (1 if each.across.bit_count() == 1 else _UNEVEN)
        turns = tile.cdiv(each.count, keepers(each)) + 0.5
        return tile.cdiv(keepers(each) * tiles, gpu.processors) * (weights + turns * (rows + _TURN)), each.images

    best = min((Boxes(windows, *each, around=True) for each in _shapes_around(windows)), key=cost, default=None)
    if best is None:
        return None
    return {
        "block_h": choose(best.rows, 4, 8, 16),
        "block_w": choose(best.columns, 7, 14, 30),
        "images": choose(best.images, 1, 2),
        "block_n": (block_n,),
        "stages": choose(2, 3),
        "keepers": choose(keepers(best), 2 * keepers(best)),
        "around": (1,),
        "merged": (merged,),
    }


def _shapes_around(windows: Windows) -> Iterator[tuple[int, int, int]]:
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


def _of_warpgroups(gpu: Gpu, windows: Windows) -> Knobs | None:
    """Boxes of 64 pixels whose blocks keep their weights, or of 128; None where these are few, or don't run at once.

    Of as many as that products of windows are as fast, which share weights among more rows.
    """
    fits = windows.depth % _DEPTH == 0 and windows.columns >= _COLUMNS
    if gpu.tensor_cores != "wgmma" or not fits:
        return None
    tiles = windows.groups * tile.cdiv(windows.columns, _COLUMNS)
    have_room = windows.depth == _DEPTH and windows.terms * _COLUMNS * dtype_bits(windows.dtype) // 8 <= _KEPT

    def cost(each: Boxes) -> tuple[int, int, int]:
        """Rows that a multiprocessor loads and multiplies, and all of them.

        Of boxes that have one each, one more or less takes no longer, and those of fewest images are fastest.
        """
        rows, at_most = each.pixels + each.loaded, tile.cdiv(each.count * tiles, gpu.processors)
        return (0, each.images, -each.count) if at_most == 1 else (at_most * rows, each.count * rows, each.images)

    best = min((Boxes(windows, *each) for each in _shapes(64 if have_room else 128, windows)), key=cost)
    each_has = best.count * tiles / gpu.processors  # boxes for a multiprocessor
    keeps = have_room and each_has > 2
    if each_has < _ENOUGH or (each_has > 2 and not keeps):
        return None
    return {
        "block_h": choose(best.rows, 4, 8, 16),
        "block_w": choose(best.columns, 1, 2, 4, 8),
        "images": choose(best.images, 1, 2, 4, 8, 16),
        "block_n": choose(_COLUMNS, 128),
        "stages": choose(3 if keeps or each_has <= 1 else 2, 2, 3),  # two blocks have room with two
        "keepers": choose(gpu.processors // tiles if keeps else 0, 0),
        "swizzle": choose(1 if keeps or tiles == 1 else 8, 1, 4),
    }


def _shapes(pixels: int, windows: Windows) -> Iterator[tuple[int, int, int]]:
    """Boxes of so many pixels, a power of two each way, whose rows are whole atoms of a swizzle."""
    for rows in (16, 8, 4):
        for columns in (8, 4, 2, 1):
            images = pixels // rows // columns
            if images and images * columns % 8 == 0 and images <= windows.batch:
                yield rows, columns, images
