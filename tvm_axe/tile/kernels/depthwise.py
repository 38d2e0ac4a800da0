"""Convolutions of each few channels by themselves: boxes of pixels, loaded once with what stands around them.

Depthwise ones have one channel a group, and nothing that tensor cores could share; of four they would share little. On
GPUs a thread has a strip of a row's pixels: the windows of neighbours are mostly the same pixels, which it then loads
and converts once for a row of the kernel (docs/decisions/0142-strips-of-pixels.md).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.layout import Layout
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.machines import Gpu, Machine
from tvm_axe.tile.kernels.epilogue import Epilogue
from tvm_axe.tile.kernels.kernel import Knobs, Recipe, choose, only_used
from tvm_axe.tile.kernels.windows import Windows

_ROOM = 40 << 10
"""Bytes of shared memory that a box may take, so that some blocks run at once."""

_FEW = 4
"""Channels of a group at most, of images and of results, on a GPU."""

_MOST = 32
"""Channels of a block at most there: of more, fewer blocks run at once."""

_LANES = 4
"""Channels of a thread that has a strip of pixels."""

_CHANNELS = 32
"""Channels of a block of strips, or twice as many."""

_LITTLE = 9
"""Places of a kernel at most of which twice as many channels are better: a pixel's are a whole line of the cache."""

_STRIPS, _SHORT = (7, 8), 4
"""Pixels of a strip."""

_HEIGHTS = (8, 7, 14, 16)
"""Rows of a block of strips, the best first where they leave as little over."""

_WARP = 32

_LEAST = 8
"""Pixels of a box at least: of fewer, what stands around them is most of what is loaded."""


def boxes(windows: Windows, epilogue: Epilogue, *, block_h: int, block_w: int, block_n: int, strip: int = 0) -> Recipe:
    """A block has `block_h` x `block_w` pixels of `block_n` channels, and all of the image that their windows cover.

    With `strip`, a thread of a GPU has so many pixels of a row, of `_LANES` channels: what windows of neighbours have
    in common it loads once.

    Raises
    ------
    TileError
        The channels of a block are those of no whole groups. A row has no whole strips, a block's channels no whole
        `_LANES`, or groups have more channels than one, with `strip`.
    """
    x_shape, w_shape, y_shape = windows.shapes
    dtype, channels, out_channels, depth = windows.dtype, windows.channels, windows.out_channels, windows.depth
    if block_n % windows.columns:
        raise TileError(f"conv2d: block_n={block_n}; valid are multiples of a group's {windows.columns} channels")
    if strip and (block_w % strip or block_n % _LANES or max(depth, windows.columns) > 1):
        raise TileError(
            f"conv2d: strip={strip}; valid are parts of block_w={block_w} with a multiple of {_LANES} channels, not "
            f"{block_n}, and groups of one channel"
        )
    block_c = _channels(windows, block_n)
    rows, columns = _covered(windows, block_h, block_w)
    across, down = tile.cdiv(windows.out_width, block_w), tile.cdiv(windows.out_height, block_h)
    kernel_width, places = windows.kernel_width, windows.kernel_height * windows.kernel_width

    def weight(W: tirx.Buffer, term: Any, channel: Any) -> Any:
        place = term // depth
        at = T.min(channel, out_channels - 1), place // kernel_width, place % kernel_width, term % depth
        return T.cast(W[at], "float32")

    def products(x_tile: tirx.Buffer, w: tirx.Buffer, m: Any, n: Any, p: Any) -> Iterator[Any]:
        """The products of a pixel under the window, one for each of the group's channels."""
        y = m // block_w * windows.strides[0] + p // kernel_width * windows.dilation[0]
        x = m % block_w * windows.strides[1] + p % kernel_width * windows.dilation[1]
        first = n // windows.columns * depth
        return (T.cast(x_tile[y, x, first + q], "float32") * w[p * depth + q, n] for q in range(depth))

    def added(total: Any, x_tile: tirx.Buffer, w: tirx.Buffer, m: Any, n: Any, step: Any) -> Any:
        """The sum with the products of a step."""
        places = (step * at_once + place for place in range(at_once))
        terms = (term for p in places for term in products(x_tile, w, m, n, p))
        return functools.reduce(operator.add, terms, total)

    at_once = kernel_width if strip else 1  # places of a step
    threads = _threads(block_h, block_w, block_n, strip) if strip else None
    layout = _strips(block_h, block_w, block_n, strip) if strip else None
    beside = _unlike(columns, block_c * dtype_bits(dtype) // 8) if strip else columns

    @T.prim_func
    def depthwise_conv2d(
        X: T.Buffer(x_shape, dtype),
        W: T.Buffer(w_shape, dtype),
        bias: T.Buffer((windows.out_channels,), dtype),
        residual: T.Buffer(y_shape, dtype),
        Y: T.Buffer(y_shape, dtype),
    ) -> None:
        with tile.kernel(windows.batch, down * across, tile.cdiv(out_channels, block_n), threads=threads) as (z, i, j):
            x_tile = tile.shared((rows, beside, block_c), dtype)
            w = tile.shared((places * depth, block_n), "float32")
            c = tile.fragment((block_h * block_w, block_n), "float32", layout=layout)
            first_y, first_x = T.meta_var(i // across * block_h), T.meta_var(i % across * block_w)
            top = T.meta_var(first_y * windows.strides[0])
            left = T.meta_var(first_x * windows.strides[1])
            tile.fill(x_tile, 0)
            with tile.parallel(rows, columns, block_c) as (y, x, n):
                # An `if`, and no choice of a value, so that neighbouring channels are loaded together.
                if (
                    top - windows.padding[0] + y >= 0
                    and top - windows.padding[0] + y < windows.height
                    and left - windows.padding[1] + x >= 0
                    and left - windows.padding[1] + x < windows.width
                    and j * block_c + n < channels
                ):
                    x_tile[y, x, n] = X[z, top - windows.padding[0] + y, left - windows.padding[1] + x, j * block_c + n]
            with tile.parallel(places * depth, block_n) as (p, n):
                w[p, n] = weight(W, p, j * block_n + n)
            tile.fill(c, 0)
            for step in range(places // at_once):
                with tile.parallel(block_h * block_w, block_n) as (m, n):
                    c[m, n] = added(c[m, n], x_tile, w, m, n, step)
            with tile.parallel(block_h * block_w, block_n) as (m, n):
                if (
                    first_y + m // block_w < windows.out_height
                    and first_x + m % block_w < windows.out_width
                    and j * block_n + n < out_channels
                ):
                    at = (z, first_y + m // block_w, first_x + m % block_w, j * block_n + n)
                    Y[at] = T.cast(epilogue.expression(c[m, n], at, None, bias, residual), dtype)

    return Recipe((only_used(depthwise_conv2d),), ("X", "W", *epilogue.tensors), ("Y",))


def _threads(block_h: int, block_w: int, block_n: int, strip: int) -> int:
    """How many threads have a strip of a block each."""
    return block_h * (block_w // strip) * (block_n // _LANES)


def _strips(block_h: int, block_w: int, block_n: int, strip: int) -> Layout:
    """Where a block's sums lie: `_LANES` channels of a strip's pixels in each thread."""
    groups, strips = block_n // _LANES, block_w // strip
    made = Layout.parse(
        f"S[({block_h}, {strips}, {strip}, {groups}, {_LANES}) : "
        f"({strips * groups}@tx, {groups}@tx, {_LANES}, 1@tx, 1)]"
    )
    assert isinstance(made, Layout)
    return made


def _unlike(columns: int, pixel: int) -> int:
    """Pixels of a row in shared memory, of so many bytes each, so that the next row's begins in other banks."""
    return columns if columns * pixel % 128 else columns + 1


def _covered(windows: Windows, block_h: int, block_w: int) -> tuple[int, int]:
    """The pixels that the windows of a box cover, by height and width."""
    (down, right), (rows, columns) = windows.strides, windows.span
    return (block_h - 1) * down + rows, (block_w - 1) * right + columns


def _sides(machine: Machine, extent: int) -> list[int]:
    """How long a box may be along an extent of the results, the best first: on a GPU 16 where one box has it all."""
    whole = isinstance(machine, Gpu) and 8 < extent <= 16
    return [size for size in (16, 8, 4, 2, 1) if size < 2 * extent and (size < 16 or whole)]


def _channels(windows: Windows, block_n: int) -> int:
    """How many of the image's channels so many of the results' are of."""
    return block_n // windows.columns * windows.depth


def knobs(machine: Machine, windows: Windows) -> Knobs | None:
    """Boxes that have room with their surroundings; None if no pixel's window has, or products are better.

    Products are where a group has more channels than few, and on a CPU more than one: neighbours of a vector are then
    of several channels each.
    """
    return (_of_strips(machine, windows) if isinstance(machine, Gpu) else None) or _of_boxes(machine, windows)


def _of_strips(gpu: Gpu, windows: Windows) -> Knobs | None:
    """Boxes of two strips a row, where channels fill a warp's share of them; None where they don't, or have no room.

    Measured on an H200 (docs/results/2026-12-01-boxes-h200.md). Windows that are some pixels apart have less in common,
    and few blocks should each be done soon: both have short strips.
    """
    if max(windows.depth, windows.columns) > 1 or dtype_bits(windows.dtype) != 16 or windows.channels < _CHANNELS:
        return None
    places = windows.kernel_height * windows.kernel_width

    def padded(extent: int, size: int) -> int:
        return tile.cdiv(extent, size) * size

    def room(block_h: int) -> int:
        rows, columns = _covered(windows, block_h, block_w)
        return (rows * (columns + 1) * dtype_bits(windows.dtype) // 8 + 4 * places) * block_n

    def has_whole_warps(block_h: int) -> bool:
        return _threads(block_h, block_w, block_n, strip) % _WARP == 0

    strip, heights, block_n = min(_STRIPS, key=lambda size: padded(windows.out_width, size)), _HEIGHTS, _CHANNELS
    pixels, blocks = 2 * strip * _HEIGHTS[0], tile.cdiv(windows.channels, _CHANNELS)
    if windows.strides[1] > 1 or tile.cdiv(windows.pixels, pixels) * blocks <= gpu.processors:
        strip, heights = _SHORT, _HEIGHTS[::-1]
    elif places <= _LITTLE and windows.channels % (2 * _CHANNELS) == 0:
        block_n = 2 * _CHANNELS
    block_w = strip if windows.out_width <= strip else 2 * strip
    fitting = [size for size in heights if has_whole_warps(size) and room(size) <= _ROOM]
    if not fitting:
        return None
    return {
        "block_h": choose(min(fitting, key=lambda size: padded(windows.out_height, size)), *fitting),
        "block_w": choose(block_w, strip, 2 * strip),
        "block_n": choose(block_n, _CHANNELS, 2 * _CHANNELS),
        "strip": (strip,),
    }


def _of_boxes(machine: Machine, windows: Windows) -> Knobs | None:
    """Boxes whose pixels are spread over threads, or that a core has one after the other."""
    few = _FEW if isinstance(machine, Gpu) else 1
    if max(windows.depth, windows.columns) > few:
        return None
    item = dtype_bits(windows.dtype) // 8
    places = windows.kernel_height * windows.kernel_width * windows.depth
    piece = max(16 // item, windows.columns)

    def room(block_h: int, block_w: int, block_n: int) -> int:
        rows, columns = _covered(windows, block_h, block_w)
        return rows * columns * item * _channels(windows, block_n) + 4 * places * block_n

    heights, widths = (_sides(machine, extent) for extent in (windows.out_height, windows.out_width))
    most = _MOST if isinstance(machine, Gpu) else min(64, windows.out_channels)
    sizes = [size for size in (most, 32, 16, piece) if size <= most and size < windows.out_channels + piece]
    sizes = [size for size in dict.fromkeys(sizes) if size % windows.columns == 0]
    for block_h, block_w in zip(heights, widths):
        for block_n in sizes:  # fewer channels before smaller boxes, which load more around them
            if room(block_h, block_w, block_n) <= _ROOM and block_h * block_w >= min(_LEAST, windows.pixels):
                return {
                    "block_h": choose(block_h, *(size for size in (4, 8, 16) if room(size, block_w, block_n) <= _ROOM)),
                    "block_w": choose(block_w, *(size for size in (4, 8, 16) if room(block_h, size, block_n) <= _ROOM)),
                    "block_n": choose(block_n, *(size for size in sizes if room(block_h, block_w, size) <= _ROOM)),
                }
    return None
