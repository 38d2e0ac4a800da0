"""Convolutions of images, grouped ones too, as products whose left operand is never stored.

A row of the product is a pixel of the result, a column one of its channels, and a term a channel of a pixel under the
window. Tiles of rows are gathered where they are multiplied, with zeros for padding, so images are read as they lie and
no matrix of windows is made. Where channels of a pixel lie together, loads take 16 bytes of them: of groups of a
multiple of 8 channels of 16 bits, or 4 of 32. Of an even number of channels of 16 bits loads take less, and of an odd
one, such as an image's three colours, single elements, which don't run ahead.

Depthwise convolutions have one term a pixel and nothing that tensor cores could share, so their tiles are boxes of
pixels, loaded once with what stands around them (`tvm_axe.tile.kernels.depthwise`); so are those of few channels a
group on GPUs (`tvm_axe.tile.kernels.halos`). On Hopper a product's rows are boxes, too, which TMA loads
(`tvm_axe.tile.kernels.boxed`).

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels import boxed, depthwise, halos
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import Epilogue
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Knobs, Problem, Recipe, choose, only_used, product_slack
from tvm_axe.tile.kernels.windows import Windows

_EPILOGUE = ("bias", "activation", "residual")
_PIECE = 128
"""Bits that a load takes at most."""

_AT_ONCE = {128: (2, 1.0), 64: (3, 1.1)}
"""By rows of a block of 128 columns: how many a multiprocessor has room for, and how long it takes for a row.

By wgmma on an H200, in the time for a row of a block of 128.
"""


def conv2d(
    batch: int,
    height: int,
    width: int,
    channels: int,
    out_channels: int,
    kernel_height: int,
    kernel_width: int,
    dtype: str,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    bias: bool = False,
    activation: str = "none",
    residual: bool = False,
    **parameters: Any,
) -> Recipe:
    """Y = epilogue(the sum of X under each window times W), of one type, summed in float32.

    X is (batch, height, width, channels), W (out_channels, kernel_height, kernel_width, channels / groups), and Y
    (batch, out_height, out_width, out_channels), where a pixel of Y is at every place of a window of the kernel that
    lies in the image with `padding` zeros on both sides of it.

    Parameters
    ----------
    strides, padding, dilation : pair of int
        Of the height and the width, as `Windows` has them.
    groups : int
        Each group of channels gives a group of as many parts of the results' channels.
    bias, activation, residual
        `Epilogue`'s: `bias` of (out_channels,) and `residual` of the shape of Y.

    Raises
    ------
    TileError
        `Windows` refuses it.
    """
    extents = (batch, height, width, channels, out_channels, kernel_height, kernel_width)
    windows = Windows(*extents, dtype, strides, padding, dilation, groups)
    epilogue = Epilogue(bias=bias, activation=activation, residual=residual)
    if "keepers" in parameters:
        return halos.boxes(windows, epilogue, **parameters)
    if "images" in parameters:
        return boxed.boxes(windows, epilogue, **parameters)
    if "block_h" in parameters:
        return depthwise.boxes(windows, epilogue, **parameters)
    return _product(windows, epilogue, **parameters)


def _product(
    windows: Windows,
    epilogue: Epilogue,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    instruction: str | None = None,
    swizzle: int = 1,
) -> Recipe:
    """Each group's product, its depth the pixels of the kernel and, of each, the channels of the group."""
    x_shape, w_shape, y_shape = windows.shapes
    dtype, depth, columns, terms = windows.dtype, windows.depth, windows.columns, windows.terms
    pixels, kernel_width = windows.pixels, windows.kernel_width
    piece = math.gcd(depth, block_k, _PIECE // dtype_bits(dtype))
    across = tile.cdiv(columns, block_n)  # tiles of a group: those of one row share its pixels, whichever group's
    whole = depth % block_k == 0  # steps then have one pixel of the kernel each, and the same for all threads

    def term(l: Any, q: Any) -> tuple[Any, Any, Any]:
        """The pixel of the kernel, by its row and column, and the channel, with which a piece of terms begins."""
        if whole:
            pixel, channel = l // (depth // block_k), l % (depth // block_k) * block_k + q * piece
        else:
            pixel, channel = (l * block_k + q * piece) // depth, (l * block_k + q * piece) % depth
        return pixel // kernel_width, pixel % kernel_width, channel

    def image(X: tirx.Buffer, z: Any, row: Any, first: tuple[Any, Any, Any], l: Any, q: Any, v: Any) -> Any:
        """An element of a row's window, zero where there is none."""
        image, y, x = _pixel(windows, row)
        y = y * windows.strides[0] + first[0] * windows.dilation[0] - windows.padding[0]
        x = x * windows.strides[1] + first[1] * windows.dilation[1] - windows.padding[1]
        conditions = windows.inside(y, x)
        conditions += [row < pixels] if pixels % block_m else []
        conditions += [l * block_k + q * piece < terms] if terms % block_k else []
        value = X[image, y, x, z * depth + first[2] + v]
        return T.if_then_else(tirx.all(*conditions), value, tirx.const(0, dtype)) if conditions else value

    def weight(W: tirx.Buffer, z: Any, column: Any, first: tuple[Any, Any, Any], l: Any, q: Any, v: Any) -> Any:
        """An element of a column's weights, zero where there is none."""
        conditions = [column < columns] if columns % block_n else []
        conditions += [l * block_k + q * piece < terms] if terms % block_k else []
        value = W[z * columns + column, first[0], first[1], first[2] + v]
        return T.if_then_else(tirx.all(*conditions), value, tirx.const(0, dtype)) if conditions else value

    @T.prim_func
    def conv2d(
        X: T.Buffer(x_shape, dtype),
        W: T.Buffer(w_shape, dtype),
        bias: T.Buffer((windows.out_channels,), dtype),
        residual: T.Buffer(y_shape, dtype),
        Y: T.Buffer(y_shape, dtype),
    ) -> None:
        with tile.kernel(tile.cdiv(pixels, block_m), windows.groups * across, swizzle=swizzle) as (i, t):
            z, j = T.meta_var(t // across), T.meta_var(t % across)
            a = tile.shared((block_m, block_k), dtype)
            b = tile.shared((block_n, block_k), dtype)
            c = tile.fragment((block_m, block_n), "float32")
            tile.fill(c, 0)
            for l in tile.pipelined(tile.cdiv(terms, block_k), stages=stages or None):
                with tile.parallel(block_m, block_k // piece, piece) as (x, q, v):
                    a[x, q * piece + v] = image(X, z, i * block_m + x, term(l, q), l, q, v)
                if whole:
                    tile.copy(
                        W[
                            z * columns + j * block_n : z * columns + j * block_n + block_n,
                            term(l, 0)[0],
                            term(l, 0)[1],
                            term(l, 0)[2] : term(l, 0)[2] + block_k,
                        ],
                        b,
                    )
                else:
                    with tile.parallel(block_n, block_k // piece, piece) as (y, q, v):
                        b[y, q * piece + v] = weight(W, z, j * block_n + y, term(l, q), l, q, v)
                tile.gemm(a, b, c, transpose_b=True, instruction=instruction)
            with tile.parallel(block_m, block_n) as (x, y):
                if i * block_m + x < pixels and j * block_n + y < columns:
                    at = (*_pixel(windows, i * block_m + x), z * columns + j * block_n + y)
                    Y[at] = T.cast(epilogue.expression(c[x, y], at, None, bias, residual), dtype)

    return Recipe((only_used(conv2d),), ("X", "W", *epilogue.tensors), ("Y",))


def _pixel(windows: Windows, row: Any) -> tuple[Any, Any, Any]:
    """The image, and the row and the column in it, of a row of the product."""
    rows, columns = windows.out_height, windows.out_width
    return row // (rows * columns), row // columns % rows, row % columns


# ---- Defaults --------------------------------------------------------------------------------------------------------


def _knobs(target: Target, problem: Problem) -> Knobs:
    windows, machine = windows_of(problem), machine_of(target)
    boxes = depthwise.knobs(machine, windows)
    if isinstance(machine, Gpu):
        boxes = halos.knobs(machine, windows) or boxed.knobs(machine, windows) or boxes
    if boxes is not None:
        return boxes
    if not isinstance(machine, Gpu):
        # Tiles of A are copied, so as many channels share them as there are, and tiles of both stay in a cache.
        block_k = next((size for size in (256, 128, 64) if windows.depth % size == 0), min(windows.terms, 256))
        return {
            "block_m": choose(min(64, windows.pixels), 16, 32, 128),
            "block_n": choose(min(128, windows.columns), 32, 64, 256),
            "block_k": choose(block_k, 64, 128, 512),
        }
    instructions = _instructions(machine, windows)
    block_m, block_n = _gpu_block(machine, windows, instructions[0])
    block_k = _steps(machine, windows)
    return {
        "block_m": choose(block_m, 32, 64, 128, 256),
        "block_n": choose(block_n, *(size for size in (16, 32, 64, 128) if size < windows.columns + 16)),
        "block_k": choose(block_k, 16, 32, 64),
        "stages": choose(_stages(machine, windows, block_m + block_n, block_k), 0, 2, 3, 4, 5),
        "swizzle": choose(8, 1, 4, 16) if windows.out_channels > block_n else (1,),
        "instruction": instructions,
    }


def _instructions(gpu: Gpu, windows: Windows) -> tuple[str, ...]:
    """The instructions of products, the best first: of few columns a warpgroup's waits for its operands."""
    if not gpu.by_tensor_cores(windows.dtype):
        return ("fma",)
    if gpu.tensor_cores != "wgmma":
        return ("mma",)
    return ("wgmma", "mma") if windows.columns >= 32 else ("mma", "wgmma")


def _gpu_block(gpu: Gpu, windows: Windows, instruction: str) -> tuple[int, int]:
    """As many columns as a group has, up to 128, and rows so that multiprocessors have a block, or by wgmma two.

    Of fewer blocks of 128 columns than that, wgmma has 64. Of more it has 128 or 64 rows, of which two or three blocks
    have room at once, whichever leave fewer multiprocessors idle at the end.
    """
    wide = next((size for size in (8, 16, 32, 64) if windows.columns <= size), 128)
    if not gpu.by_tensor_cores(windows.dtype):
        wide = max(16, min(wide, 64))
    enough = gpu.processors * (2 if instruction == "wgmma" else 1)

    def blocks(rows: int) -> int:
        return windows.groups * math.ceil(windows.pixels / rows) * math.ceil(windows.columns / wide)

    def time(rows: int) -> float:
        at_once, each = _AT_ONCE[rows]
        return math.ceil(blocks(rows) / gpu.processors / at_once) * at_once * rows * each

    if instruction == "wgmma" and wide == 128 and blocks(64) > enough:
        return min(_AT_ONCE, key=time), wide
    if instruction == "wgmma" and blocks(128) < enough:
        wide = min(wide, 64)
    return next((rows for rows in (128, 64) if blocks(rows) >= enough), 64), wide


def _steps(gpu: Gpu, windows: Windows) -> int:
    """Terms of a step: those of one pixel of the kernel where 64 or 32 divide its channels, or of whole pixels."""
    if not gpu.by_tensor_cores(windows.dtype):
        return 16
    if windows.depth % 32 == 0:
        return 64 if windows.depth % 64 == 0 and gpu.tensor_cores == "wgmma" else 32  # three slots of 64 have room
    if windows.terms <= 64:
        return 16 * math.ceil(windows.terms / 16)
    return next((size for size in (64, 48) if size % windows.depth == 0 and windows.terms % size == 0), 32)


def _stages(gpu: Gpu, windows: Windows, rows: int, block_k: int) -> int:
    """Slots for steps of so many rows, of A and B; of four, three blocks are to have room.

    Of one step, and elsewhere than on Hopper, the plan decides.
    """
    steps = math.ceil(windows.terms / block_k)
    if steps == 1 or gpu.tensor_cores != "wgmma" or not gpu.by_tensor_cores(windows.dtype):
        return 0
    if steps <= 3:
        return 2
    return 4 if 3 * 4 * rows * block_k * dtype_bits(windows.dtype) // 8 <= gpu.shared_bytes else 3


# ---- Data and reference ----------------------------------------------------------------------------------------------


def windows_of(problem: Problem) -> Windows:
    """The windows of a problem."""
    return Windows(**{name: value for name, value in problem.items() if name not in _EPILOGUE})


def _epilogue_of(problem: Problem) -> Epilogue:
    return Epilogue(**{name: problem[name] for name in _EPILOGUE if name in problem})


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    windows = windows_of(problem)
    x_shape, w_shape, y_shape = windows.shapes
    shapes = {"X": x_shape, "W": w_shape, "bias": (windows.out_channels,), "residual": y_shape}
    drawn = {name: normal(rng, shape, windows.dtype) for name, shape in shapes.items()}
    return {name: drawn[name] for name in ("X", "W", *_epilogue_of(problem).tensors)}


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """Windows as numpy slides them over padded images, in float64."""
    windows, epilogue = windows_of(problem), _epilogue_of(problem)
    x, w = (arrays[name].astype("float64") for name in "XW")
    sums, sizes = _slid(windows, x, w), _slid(windows, np.abs(x), np.abs(w))
    slack = product_slack(windows.dtype, windows.dtype, windows.terms, epilogue.magnitude(sizes, arrays))
    return {"Y": Expected(epilogue.reference(sums, arrays), slack)}


def _slid(windows: Windows, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    (top, left), (down, right), (below, beside) = windows.padding, windows.strides, windows.dilation
    padded = np.pad(x, ((0, 0), (top, top), (left, left), (0, 0)))
    views = np.lib.stride_tricks.sliding_window_view(padded, windows.span, axis=(1, 2))
    views = views[:, ::down, ::right, :, ::below, ::beside]
    found = [
        np.einsum("byxcij,nijc->byxn", views[..., g * windows.depth : (g + 1) * windows.depth, :, :], part)
        for g, part in enumerate(np.split(w, windows.groups))
    ]
    return np.concatenate(found, axis=-1)


CONV2D = Kernel(
    name="conv2d",
    summary="Y = activation(windows of X times W + bias) + residual, of images with their channels last",
    make=conv2d,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"batch": 2, "height": 9, "width": 7, "channels": 64, "out_channels": 72, "kernel_height": 3,
         "kernel_width": 3, "padding": (1, 1), "dtype": "bfloat16"},
        {"batch": 1, "height": 30, "width": 29, "channels": 3, "out_channels": 64, "kernel_height": 7,
         "kernel_width": 7, "strides": (2, 2), "padding": (3, 3), "dtype": "float16", "bias": True,
         "activation": "relu"},
        {"batch": 3, "height": 8, "width": 8, "channels": 96, "out_channels": 130, "kernel_height": 1,
         "kernel_width": 1, "dtype": "bfloat16", "residual": True, "activation": "silu"},
        {"batch": 1, "height": 12, "width": 11, "channels": 32, "out_channels": 32, "kernel_height": 3,
         "kernel_width": 3, "padding": (1, 1), "groups": 8, "dtype": "bfloat16"},
        {"batch": 1, "height": 10, "width": 13, "channels": 64, "out_channels": 128, "kernel_height": 3,
         "kernel_width": 3, "padding": (2, 0), "strides": (1, 2), "groups": 2, "dtype": "float16", "bias": True},
        {"batch": 2, "height": 16, "width": 17, "channels": 24, "out_channels": 40, "kernel_height": 3,
         "kernel_width": 2, "padding": (4, 2), "dilation": (4, 3), "dtype": "bfloat16", "residual": True},
        {"batch": 2, "height": 7, "width": 9, "channels": 40, "out_channels": 40, "kernel_height": 7,
         "kernel_width": 7, "padding": (3, 3), "groups": 40, "dtype": "bfloat16", "bias": True},
        {"batch": 1, "height": 11, "width": 6, "channels": 5, "out_channels": 5, "kernel_height": 3,
         "kernel_width": 4, "strides": (2, 1), "dilation": (1, 2), "padding": (0, 3), "groups": 5, "dtype": "float32",
         "activation": "gelu", "residual": True},
        {"batch": 1, "height": 5, "width": 6, "channels": 6, "out_channels": 12, "kernel_height": 3,
         "kernel_width": 3, "padding": (1, 1), "groups": 6, "dtype": "float16"},
        {"batch": 2, "height": 6, "width": 5, "channels": 10, "out_channels": 9, "kernel_height": 2,
         "kernel_width": 3, "padding": (1, 2), "strides": (3, 1), "dtype": "float32", "bias": True,
         "activation": "silu", "residual": True},
        {"batch": 1, "height": 1, "width": 1, "channels": 1, "out_channels": 1, "kernel_height": 1,
         "kernel_width": 1, "dtype": "float32"},
    ),
)  # fmt: skip
