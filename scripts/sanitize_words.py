"""Small tile programs with each word that no kernel has, for scripts/sanitize.py: beside the tests' interpreter.

Tensors end within tiles, so that a load or store behind an end would be one behind the tensor, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.tile.kernels.convolution import conv2d
from tvm_axe.tile.program import TileProgram, TileSequence
from tvm_axe.tile.sequences import read_function

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "tile"))

ROWS, COLUMNS = 70, 100


@T.prim_func
def order(
    X: T.Buffer((ROWS, COLUMNS), "float32"),
    places: T.Buffer((ROWS,), "int32"),
    least: T.Buffer((ROWS,), "int32"),
    sorted_: T.Buffer((ROWS, 128), "float32"),
    best: T.Buffer((ROWS, 5), "float32"),
    whose: T.Buffer((ROWS, 5), "int32"),
    sums: T.Buffer((ROWS, COLUMNS), "float32"),
) -> None:
    with tile.kernel(tile.cdiv(ROWS, 16)) as m:
        x = tile.fragment((16, 128), "float32")
        place = tile.fragment((16,), "int32")
        low = tile.fragment((16,), "int32")
        all_ = tile.shared((16, 128), "float32")
        some = tile.fragment((16, 5), "float32")
        own = tile.fragment((16, 5), "int32")
        total = tile.fragment((16, 128), "float32")
        tile.copy(X[m * 16, 0], x)
        tile.argmax(x, place)
        tile.argmin(x, low)
        tile.sort(x, all_, descending=True)
        tile.top_k(x, some, own)
        tile.cumsum(x, total)
        tile.copy(place, places[m * 16])
        tile.copy(low, least[m * 16])
        tile.copy(all_, sorted_[m * 16, 0])
        tile.copy(some, best[m * 16, 0])
        tile.copy(own, whose[m * 16, 0])
        tile.copy(total, sums[m * 16, 0])


@T.prim_func
def atomics(
    X: T.Buffer((ROWS, COLUMNS), "float32"),
    where: T.Buffer((ROWS,), "int32"),
    counts: T.Buffer((7,), "int32"),
    sums: T.Buffer((16, COLUMNS), "float32"),
    most: T.Buffer((16, COLUMNS), "float32"),
    halves: T.Buffer((7,), "float16"),
) -> None:
    with tile.kernel(tile.cdiv(ROWS, 16)) as m:
        x = tile.fragment((16, 128), "float32")
        tile.copy(X[m * 16, 0], x)
        with tile.parallel(16) as i:
            if m * 16 + i < ROWS:
                tile.atomic_add(T.int32(1), counts[where[m * 16 + i]])
                tile.atomic_add(T.float16(1), halves[where[m * 16 + i]])
        tile.copy(x, sums[0, 0], atomic="add")
        tile.atomic_max(x, most[0, 0])


@T.prim_func
def random(seed: T.int64, X: T.Buffer((ROWS, COLUMNS), "float32"), Y: T.Buffer((ROWS, COLUMNS), "float32")) -> None:
    with tile.kernel(tile.cdiv(ROWS, 16)) as m:
        x = tile.fragment((16, 128), "float32")
        tile.copy(X[m * 16, 0], x)
        with tile.parallel(16, 128) as (i, j):
            x[i, j] = T.if_then_else(tile.random(seed, (m * 16 + i) * 128 + j) < T.float32(0.25), T.float32(0), x[i, j])
        tile.copy(x, Y[m * 16, 0])


@T.prim_func
def ending(
    X: T.Buffer((ROWS, COLUMNS), "float32"), steps: T.Buffer((ROWS,), "int32"), Y: T.Buffer((ROWS, COLUMNS), "float32")
) -> None:
    with tile.kernel(ROWS) as i:
        x = tile.fragment((128,), "float32")
        tile.copy(X[i, 0], x)
        n = steps[i]
        while n > 1:
            n = n // 2
            with tile.parallel(128) as j:
                x[j] = x[j] + 1.0
            if n == 7:
                break
        for k in range(5):
            if k == steps[i]:
                continue
            with tile.parallel(128) as j:
                x[j] = x[j] * 2.0
        tile.copy(x, Y[i, 0])


@T.prim_func
def gathered(
    X: T.Buffer((ROWS, 128), "float16"),
    rows: T.Buffer((50,), "int32"),
    W: T.Buffer((128, 72), "float16"),
    Y: T.Buffer((50, 72), "float32"),
) -> None:
    with tile.kernel(1) as m:
        x = tile.shared((64, 64), "float16")
        w = tile.shared((64, 128), "float16")
        y = tile.fragment((64, 128), "float32")
        tile.fill(y, 0)
        for k in tile.pipelined(2, stages=2):
            with tile.parallel(64, 64) as (i, j):
                x[i, j] = T.if_then_else(m * 64 + i < 50, X[rows[T.min(m * 64 + i, 49)], k * 64 + j], T.float16(0))
            tile.copy(W[k * 64, 0], w)
            tile.gemm(x, w, y)
        tile.copy(y, Y[m * 64, 0])


@T.prim_func
def printed(X: T.Buffer((ROWS, COLUMNS), "float32"), Y: T.Buffer((ROWS,), "float32")) -> None:
    with tile.kernel(tile.cdiv(ROWS, 64)) as m:
        x = tile.fragment((64, 128), "float32")
        y = tile.fragment((64,), "float32")
        tile.copy(X[m * 64, 0], x)
        tile.max(x, y)
        tile.print("largest", y[3], block=(0,))
        tile.print("X", X[m * 64 + 4 : m * 64 + 8, 98:100], block=(1,))
        tile.copy(y, Y[m * 64])


@T.prim_func
def profiled(
    A: T.Buffer((ROWS, 256), "float16"), B: T.Buffer((256, 200), "float16"), C: T.Buffer((ROWS, 200), "float32")
) -> None:
    with tile.kernel(1, 2) as (m, n):
        a = tile.shared((128, 64), "float16")
        b = tile.shared((64, 128), "float16")
        c = tile.fragment((128, 128), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(4, stages=3):
            tile.copy(A[m * 128, k * 64], a)
            tile.copy(B[k * 64, n * 128], b)
            tile.gemm(a, b, c)
        tile.copy(c, C[m * 128, n * 128])


def either(a: Any, b: Any) -> Any:
    """The one of two whole numbers that is farther from 0; of -a and a, a."""
    return T.if_then_else(T.abs(a) == T.abs(b), T.max(a, b), T.if_then_else(T.abs(a) < T.abs(b), b, a))


@T.prim_func
def reduced(
    X: T.Buffer((ROWS, COLUMNS), "float32"),
    farthest: T.Buffer((ROWS,), "float32"),
    columns: T.Buffer((COLUMNS,), "float32"),
) -> None:
    with tile.kernel(1):
        x = tile.fragment((128, 128), "float32")
        of_rows = tile.fragment((128,), "float32")
        of_columns = tile.shared((128,), "float32")
        tile.copy(X[0, 0], x)
        tile.reduce(x, of_rows, either, identity=0)
        tile.copy(of_rows, farthest[0])
        tile.reduce(x, of_columns, either, axis=0, identity=0)
        tile.copy(of_columns, columns[0])


@T.prim_func
def strided(
    X: T.Buffer((ROWS, COLUMNS), "float32", strides=(COLUMNS + 12, 1)),
    Y: T.Buffer((ROWS, COLUMNS), "float32", strides=(1, ROWS + 2)),
) -> None:
    with tile.kernel(tile.cdiv(ROWS, 16)) as m:
        x = tile.shared((16, 128), "float32")
        tile.copy(X[m * 16, 0], x)
        with tile.parallel(16, 128) as (i, j):
            if m * 16 + i < ROWS and j < COLUMNS:
                Y[m * 16 + i, j] = x[i, j] + X[m * 16 + i, COLUMNS - 1 - j]


@T.prim_func
def sequence(X: T.Buffer((ROWS, COLUMNS), "float32"), Y: T.Buffer((ROWS, COLUMNS), "float32")) -> None:
    total = tile.scratch((ROWS,), "float32")
    with tile.kernel(tile.cdiv(ROWS, 16)) as m:
        x = tile.fragment((16, 128), "float32")
        s = tile.fragment((16,), "float32")
        tile.copy(X[m * 16, 0], x)
        tile.sum(x, s)
        tile.copy(s, total[m * 16])
    with tile.kernel(ROWS) as i, tile.parallel(COLUMNS) as j:
        Y[i, j] = X[i, j] * total[ROWS - 1 - i]


@T.prim_func
def parts(
    A: T.Buffer((72, 128), "float16"), B: T.Buffer((72, 128), "float16"), C: T.Buffer((64, 64), "float32")
) -> None:
    with tile.kernel(1):
        a = tile.shared((72, 128), "float16")
        b = tile.shared((72, 128), "float16")
        c = tile.fragment((64, 64), "float32")
        tile.copy(A, a)
        tile.copy(B, b)
        tile.fill(c, 0)
        tile.gemm(a[3:67, 64:128], b[8:72, 8:72], c, transpose_b=True)
        tile.copy(c, C)


def boxes(**given: Any) -> Any:
    """A convolution whose boxes lie over edges of images."""
    windows = {"batch": 2, "height": 9, "width": 11, "channels": 64, "kernel_height": 3, "kernel_width": 3}
    return conv2d(**windows, padding=(1, 1), dtype="float16", **given).programs[0]


WORDS: Mapping[str, Any] = {
    **{
        func.attrs["global_symbol"]: func
        for func in (order, atomics, random, ending, gathered, printed, profiled, reduced, strided, sequence, parts)
    },
    "boxes": boxes(out_channels=72, block_h=8, block_w=4, images=2, block_n=64, stages=2),
    "halo": boxes(out_channels=32, groups=4, block_h=8, block_w=6, images=2, block_n=8, stages=2, keepers=2),
}
"""Programs by name."""

_LIMITS = {"where": 7, "steps": 100, "rows": ROWS}
"""What integers are less than."""


def drawn(program: TileProgram | TileSequence, rng: np.random.Generator) -> list[Any]:
    """Arguments of whole numbers, so that sums are exact, and outputs poisoned, or zero if they are added to."""
    made: list[Any] = [int(rng.integers(1 << 40)) for _ in program.scalars]
    written = {tile_.buffer for node in program.nodes() for tile_ in node.writes}
    for param in program.params:
        shape, dtype = tuple(map(int, param.shape)), param.dtype
        if param.buffer in written:
            empty = 0 if program.name == "atomics" else np.nan if "float" in dtype else 77
            values = np.full(shape, empty).astype(dtype)
        else:
            most = 2 if program.name == "conv2d" else 9  # its sums are to be exact in 16 bits
            low, high = (0, _LIMITS[param.name]) if dtype == "int32" else (-most, most + 1)
            values = rng.integers(low, high, shape).astype(dtype)
        made.append(values if param.strides is None else _apart(values, param.strides))
    return made


def _apart(values: np.ndarray, strides: Sequence[int]) -> np.ndarray:
    """The same numbers, so many elements apart; the last of them ends the memory."""
    reach = sum((extent - 1) * stride for extent, stride in zip(values.shape, strides))
    memory, steps = np.zeros(reach + 1, values.dtype), [stride * values.itemsize for stride in strides]
    found = np.lib.stride_tricks.as_strided(memory, values.shape, steps)
    found[...] = values
    return found


def fault(name: str, target: Target, rng: np.random.Generator) -> str:
    """What a program has wrong on a target, or nothing."""
    from interpreter import interpret

    word = WORDS[name]
    program = word if isinstance(word, TileProgram) else read_function(word)
    executable = tile.compile(program, target)
    arguments = drawn(program, rng)
    expected = [each for each in interpret(program, *arguments) if isinstance(each, np.ndarray)]
    run: Callable[..., object] = executable
    if name == "profiled" and "cuda" in str(target.kind.name):
        run = executable.profile
    run(*arguments)
    arrays = [each for each in arguments if isinstance(each, np.ndarray)]
    for param, array, wanted in zip(program.params, arrays, expected, strict=True):
        if not np.array_equal(array, wanted, equal_nan="float" in param.dtype):
            return f"{param.name} differs in {int((array != wanted).sum())} places"
    return ""
