"""Convolutions as products whose rows are boxes of pixels, which TMA loads for each place of the kernel, and stores.

The pixels under one place of the kernel are the box, moved: in front of an image, or behind it, too, where there are
zeros. So one instruction loads them where threads took a pixel each (`tvm_axe.tile.targets.cuda.boxes`).
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.machines import Gpu
from tvm_axe.tile.kernels.epilogue import Epilogue
from tvm_axe.tile.kernels.kernel import Knobs, Recipe, choose, only_used
from tvm_axe.tile.kernels.tiling import wgmma_block
from tvm_axe.tile.kernels.windows import Boxes, Windows

_DEPTH = 64
"""Channels of a step, which a swizzled row has of 16 bits."""

_COLUMNS = 64
"""Columns of a group at least, so that warpgroups have enough to multiply."""

_SIDES = (1, 2, 4, 8, 16, 32)
"""Rows and columns of boxes of which a warpgroup's 64 pixels are a box, too."""

_NARROW = 2
"""Columns of a box that are best: of neighbours that are loaded at the same time, more is the same."""


def boxes(
    windows: Windows,
    epilogue: Epilogue,
    *,
    block_h: int,
    block_w: int,
    images: int,
    block_n: int,
    stages: int = 0,
    swizzle: int = 1,
) -> Recipe:
    """A block has `block_h` x `block_w` pixels of `images` images, of `block_n` of a group's columns.

    Raises
    ------
    TileError
        Windows are some pixels apart, whose pixels are no box, or a group has no multiple of 64 channels.
    """
    if tuple(windows.strides) != (1, 1):
        raise TileError(f"conv2d: boxes have windows one pixel apart, not {tuple(windows.strides)}")
    if windows.depth % _DEPTH:
        raise TileError(f"conv2d: boxes have multiples of {_DEPTH} channels a group, not {windows.depth}")
    shape = Boxes(windows, block_h, block_w, images)
    (x_shape, w_shape, y_shape), dtype = windows.shapes, windows.dtype
    pixels, piece = images * block_h * block_w, 128 // dtype_bits(dtype)
    depth, columns, beside = windows.depth, windows.columns, windows.kernel_width
    chunks, across = depth // _DEPTH, tile.cdiv(columns, block_n)
    steps = windows.kernel_height * beside * chunks

    def image(X: tirx.Buffer, i: Any, place: Any, at: tuple[Any, Any, Any], channel: Any) -> Any:
        """An element of a box's pixel, by its image, row and column, under a place of the kernel; zero outside."""
        first, top, left = shape.corner(i)
        z = first + at[0]
        y = top + place // beside * windows.dilation[0] - windows.padding[0] + at[1]
        x = left + place % beside * windows.dilation[1] - windows.padding[1] + at[2]
        return T.if_then_else(tirx.all(*windows.is_pixel(z, y, x)), X[z, y, x, channel], tirx.const(0, dtype))

    def result(t: Any, i: Any, pixel: Any, n: Any) -> tuple[tuple[Any, ...], Any]:
        """Where a sum of the `t`th tile of columns belongs in the results, and whether it does."""
        first, top, left = shape.corner(i)
        z, y, x = first + pixel // (block_h * block_w), top + pixel // block_w % block_h, left + pixel % block_w
        n = t % across * block_n + n
        return (z, y, x, t // across * columns + n), tirx.all(*windows.is_result(z, y, x), n < columns)

    @T.prim_func
    def conv2d(
        X: T.Buffer(x_shape, dtype),
        W: T.Buffer(w_shape, dtype),
        bias: T.Buffer((windows.out_channels,), dtype),
        residual: T.Buffer(y_shape, dtype),
        Y: T.Buffer(y_shape, dtype),
    ) -> None:
        with tile.kernel(shape.count, windows.groups * across, swizzle=swizzle) as (i, t):
            a = tile.shared((pixels, _DEPTH), dtype)
            b = tile.shared((block_n, _DEPTH), dtype)
            c = tile.fragment((pixels, block_n), "float32")
            tile.fill(c, 0)
            for l in tile.pipelined(steps, stages=stages or None):
                place, first = T.meta_var(l // chunks), T.meta_var(l % chunks * _DEPTH)
                with tile.parallel(images, block_h, block_w, _DEPTH // piece, piece) as (z, y, x, q, v):
                    a[(z * block_h + y) * block_w + x, q * piece + v] = image(
                        X, i, place, (z, y, x), t // across * depth + first + (q * piece + v)
                    )
                n = T.meta_var(t // across * columns + t % across * block_n)
                tile.copy(W[n : n + block_n, place // beside, place % beside, first : first + _DEPTH], b)
                tile.gemm(a, b, c, transpose_b=True)
            if not epilogue.empty:  # in its own parallel, so that what follows is a box that is stored
                with tile.parallel(pixels, block_n) as (x, n):
                    at, inside = T.meta_var(result(t, i, x, n))
                    if inside:
                        c[x, n] = epilogue.expression(c[x, n], at, None, bias, residual)
            with tile.parallel(pixels, block_n) as (x, n):
                at, inside = T.meta_var(result(t, i, x, n))
                if inside:
                    Y[at] = T.cast(c[x, n], dtype)

    return Recipe((only_used(conv2d),), ("X", "W", *epilogue.tensors), ("Y",))


def knobs(gpu: Gpu, windows: Windows) -> Knobs | None:
    """Boxes of the size that the product takes the least time with; None where TMA loads none, or columns are few."""
    fits = windows.depth % _DEPTH == 0 and windows.columns >= _COLUMNS and tuple(windows.strides) == (1, 1)
    if gpu.tensor_cores != "wgmma" or dtype_bits(windows.dtype) != 16 or not fits:
        return None

    def boxes_of(rows: int) -> Boxes:
        """Of so many pixels the fewest, which are narrow, and of few images."""
        shapes = ((down, across, rows // down // across) for down, across in product(_SIDES, _SIDES))
        fitting = [Boxes(windows, *each) for each in shapes if 0 < each[2] <= windows.batch and math.prod(each) == rows]
        return min(fitting, key=lambda each: (each.count, max(each.columns, _NARROW), each.images))

    rows, columns = wgmma_block(gpu, lambda rows: boxes_of(rows).count * rows * windows.groups, windows.columns)
    best = boxes_of(rows)
    return {
        "block_h": choose(best.rows, *_SIDES[1:-1]),
        "block_w": choose(best.columns, *_SIDES[1:-1]),
        "images": choose(best.images, *_SIDES),
        "block_n": choose(columns, 64, 128, 192, 256),
        "stages": choose(0, 3, 4, 5),
        "swizzle": choose(8, 1, 16),
    }
