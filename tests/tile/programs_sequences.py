"""Functions of several kernels, and their judges: numpy, and the interpreter, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from interpreter import interpret
from on_cpu import poison
from tvm.script import tirx as T

from tvm_axe import tile


@T.prim_func
def sums(A: T.Buffer((64, 256), "float32"), B: T.Buffer((64,), "float32")):
    """Sums of rows: of pieces, then of the pieces' sums."""
    parts = tile.scratch((2, 64), "float32")
    with tile.kernel(4, 2) as (m, s):
        a = tile.fragment((16, 128), "float32")
        part = tile.fragment((16,), "float32")
        tile.copy(A[m * 16, s * 128], a)
        tile.sum(a, part)
        tile.copy(part, parts[s, m * 16])
    with tile.kernel(2) as m:
        every = tile.fragment((2, 32), "float32")
        total = tile.fragment((32,), "float32")
        tile.copy(parts[0, m * 32], every)
        tile.sum(every, total, axis=0)
        tile.copy(total, B[m * 32])


@T.prim_func
def split(a: T.handle, b: T.handle, c: T.handle, alpha: T.float32):
    """A product whose sums are split, or isn't, of sizes that callers choose."""
    m = T.int32()
    n = T.int32()
    A = T.match_buffer(a, (m, 256), "float16")
    B = T.match_buffer(b, (n, 256), "float16")
    C = T.match_buffer(c, (m, n), "float32")
    tile.assume(n % 8 == 0)
    pieces = tile.knob("pieces", (2, 4, 1))
    P = tile.scratch((pieces, m, n), "float32")
    if pieces == 1:
        with tile.kernel(tile.cdiv(m, 64), tile.cdiv(n, 64)) as (i, j):
            x = tile.shared((64, 64), "float16")
            y = tile.shared((64, 64), "float16")
            z = tile.fragment((64, 64), "float32")
            tile.fill(z, 0)
            for k in tile.pipelined(4):
                tile.copy(A[i * 64, k * 64], x)
                tile.copy(B[j * 64, k * 64], y)
                tile.gemm(x, y, z, transpose_b=True)
            with tile.parallel(64, 64) as (u, v):
                z[u, v] = z[u, v] * alpha
            tile.copy(z, C[i * 64, j * 64])
    else:
        with tile.kernel(tile.cdiv(m, 64), tile.cdiv(n, 64), pieces) as (i, j, p):
            x = tile.shared((64, 64), "float16")
            y = tile.shared((64, 64), "float16")
            z = tile.fragment((64, 64), "float32")
            tile.fill(z, 0)
            for k in tile.pipelined(4 // pieces):
                tile.copy(A[i * 64, (p * (4 // pieces) + k) * 64], x)
                tile.copy(B[j * 64, (p * (4 // pieces) + k) * 64], y)
                tile.gemm(x, y, z, transpose_b=True)
            tile.copy(z, P[p, i * 64, j * 64])
        with tile.kernel(tile.cdiv(m, 16), tile.cdiv(n, 64)) as (i, j):
            every = tile.fragment((pieces, 16, 64), "float32")
            total = tile.fragment((16, 64), "float32")
            tile.copy(P[0, i * 16, j * 64], every)
            tile.sum(every, total, axis=0)
            with tile.parallel(16, 64) as (u, v):
                total[u, v] = total[u, v] * alpha
            tile.copy(total, C[i * 16, j * 64])


@T.prim_func
def quantized(x: T.handle, W: T.Buffer((32, 64), "int8"), y: T.handle):
    """Rows as integers of 8 bits with a scale each, and their product with weights.

    A power of two is divided by, since GPUs divide floats with an error of two units, and all is to be exact.
    """
    n = T.int32()
    X = T.match_buffer(x, (n, 64), "float32")
    Y = T.match_buffer(y, (n, 32), "float32")
    codes = tile.scratch((n, 64), "int8")
    scales = tile.scratch((n,), "float32")
    with tile.kernel(n) as i:
        row = tile.fragment((1, 64), "float32")
        size = tile.fragment((1, 64), "float32")
        most = tile.fragment((1,), "float32")
        tile.copy(X[i, 0], row)
        with tile.parallel(1, 64) as (r, c):
            size[r, c] = T.abs(row[r, c])
        tile.max(size, most)
        tile.copy(most, scales[i])
        with tile.parallel(1, 64) as (r, c):
            codes[i + r, c] = T.cast(T.round(row[r, c] * (T.float32(64) / most[r])), "int8")
    with tile.kernel(tile.cdiv(n, 16)) as i:
        q = tile.shared((16, 64), "int8")
        w = tile.shared((32, 64), "int8")
        s = tile.fragment((16,), "float32")
        dots = tile.fragment((16, 32), "int32")
        out = tile.fragment((16, 32), "float32")
        tile.copy(codes[i * 16, 0], q)
        tile.copy(W, w)
        tile.copy(scales[i * 16], s)
        tile.gemm(q, w, dots, transpose_b=True, accumulate=False)
        with tile.parallel(16, 32) as (r, c):
            out[r, c] = T.cast(dots[r, c], "float32") * (s[r] / T.float32(64))
        tile.copy(out, Y[i * 16, 0])


@T.prim_func
def running(X: T.Buffer((8, 512), "int32"), Y: T.Buffer((8, 512), "int32")):
    """Sums up to each element: of chunks, of the chunks before each, and within chunks."""
    chunks = tile.scratch((8, 8), "int32")
    before = tile.scratch((8, 8), "int32")
    with tile.kernel(8) as c:
        x = tile.fragment((8, 64), "int32")
        total = tile.fragment((8,), "int32")
        tile.copy(X[0, c * 64], x)
        tile.sum(x, total)
        with tile.parallel(8) as r:
            chunks[r, c] = total[r]
    with tile.kernel(1):
        every = tile.fragment((8, 8), "int32")
        scanned = tile.fragment((8, 8), "int32")
        tile.copy(chunks, every)
        tile.cumsum(every, scanned, exclusive=True)
        tile.copy(scanned, before)
    with tile.kernel(8) as c:
        x = tile.fragment((8, 64), "int32")
        y = tile.fragment((8, 64), "int32")
        tile.copy(X[0, c * 64], x)
        tile.cumsum(x, y)
        with tile.parallel(8, 64) as (r, i):
            y[r, i] = y[r, i] + before[r, c]
        tile.copy(y, Y[0, c * 64])


@T.prim_func
def counted(x: T.handle, k: T.int32, Y: T.Buffer((16,), "int32")):
    """How many elements are 0, 1, ... 15, of `k` counts that are joined; the scratch has a scalar as an extent."""
    n = T.int32()
    X = T.match_buffer(x, (n,), "int32")
    counts = tile.scratch((k * 2, 16), "int32")
    with tile.kernel(k * 2) as i, tile.parallel(16) as j:
        counts[i, j] = 0
    with tile.kernel(tile.cdiv(n, 32)) as i, tile.parallel(32) as j:
        if i * 32 + j < n:
            tile.atomic_add(1, counts[i % (k * 2), X[i * 32 + j] % 16])
    with tile.kernel(1):
        total = tile.fragment((16,), "int32")
        row = tile.fragment((16,), "int32")
        tile.fill(total, 0)
        for i in range(k * 2):
            tile.copy(counts[i, 0], row)
            with tile.parallel(16) as j:
                total[j] = total[j] + row[j]
        tile.copy(total, Y)


PROGRAMS = {"sums": sums, "split": split, "quantized": quantized, "running": running, "counted": counted}


def drawn(name: str, rng: np.random.Generator) -> list[Any]:
    """Arguments: integers where sums are then exact, the outputs poisoned; quantized rows have powers of two."""
    if name == "sums":
        return [rng.integers(-9, 9, (64, 256)).astype("float32"), poison(64)]
    if name == "split":
        m, n = int(rng.integers(1, 150)), 8 * int(rng.integers(1, 20))
        a, b = (rng.integers(-3, 4, (size, 256)).astype("float16") for size in (m, n))
        return [a, b, 2.0, poison((m, n))]
    if name == "quantized":
        rows, weights = rng.integers(-64, 65, (37, 64)).astype("float32"), rng.integers(-128, 128, (32, 64))
        rows[:, 5] = 64  # so that scales are powers of two
        return [
            (rows * 2.0 ** rng.integers(-3, 4, (37, 1))).astype("float32"),
            weights.astype("int8"),
            poison((37, 32)),
        ]
    if name == "running":
        return [rng.integers(-1000, 1000, (8, 512)).astype("int32"), poison((8, 512), "int32")]
    return [rng.integers(0, 1000, int(rng.integers(1, 999))).astype("int32"), 3, poison(16, "int32")]


def arguments(name: str, given: list[Any]) -> list[Any]:
    """In the order of the parameters."""
    if name != "split":
        return given
    a, b, alpha, c = given
    return [a, b, c, alpha]


def expected(name: str, given: list[Any]) -> np.ndarray:
    """The output in float64, or in integers."""
    if name == "sums":
        return given[0].astype("float64").sum(1)
    if name == "split":
        return 2 * (given[0].astype("float64") @ given[1].astype("float64").T)
    if name == "quantized":
        return given[0].astype("float64") @ given[1].astype("float64").T
    return given[0].cumsum(1) if name == "running" else np.bincount(given[0] % 16, minlength=16)


def judge(executable: Any, name: str, rng: np.random.Generator, knobs: dict[str, int] | None = None) -> None:
    """Run on fresh data, and compare with numpy and with the interpreter, bit for bit."""
    given = drawn(name, rng)
    program = tile.read_sequence(PROGRAMS[name], knobs)
    want = interpret(program, *arguments(name, given))
    executable(*arguments(name, given))
    out = max(number for number, value in enumerate(given) if isinstance(value, np.ndarray))
    np.testing.assert_array_equal(given[out].astype("float64"), expected(name, given).astype("float64"))
    tensors = [value for value in arguments(name, given) if isinstance(value, np.ndarray)]
    for found, other in zip(tensors, want, strict=True):
        np.testing.assert_array_equal(found.astype(other.dtype), other)
