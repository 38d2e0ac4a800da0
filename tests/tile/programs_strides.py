"""Programs whose parameters have strides, and data for them."""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile


def random(shape, dtype="float32"):
    """Random numbers."""
    return np.random.default_rng().standard_normal(shape).astype(dtype)


def poisoned(shape, dtype="float32"):
    """What nothing has written."""
    return np.full(shape, np.nan).astype(dtype)


def product(strides_a: tuple = (1536, 1), strides_b: tuple = (264, 1), strides_c: tuple = (272, 1)) -> tirx.PrimFunc:
    """A 512 x 256 product over 512 terms, of tensors with constant strides."""

    @T.prim_func
    def product(
        A: T.Buffer((512, 512), "float16", strides=strides_a),
        B: T.Buffer((512, 256), "float16", strides=strides_b),
        C: T.Buffer((512, 256), "float16", strides=strides_c),
    ):
        with tile.kernel(4, 2) as (i, j):
            a = tile.shared((128, 64), "float16")
            b = tile.shared((64, 128), "float16")
            c = tile.fragment((128, 128), "float32")
            tile.fill(c, 0)
            for k in tile.pipelined(8):
                tile.copy(A[i * 128, k * 64], a)
                tile.copy(B[k * 64, j * 128], b)
                tile.gemm(a, b, c)
            tile.copy(c, C[i * 128, j * 128])

    return product


def open_product(divisor: int) -> tirx.PrimFunc:
    """The same of any number of rows, of tensors whose strides are variables, multiples of a number."""

    @T.prim_func
    def product(a_: T.handle, b_: T.handle, c_: T.handle):
        m, lda, ldb, ldc = T.int32(), T.int32(), T.int32(), T.int32()
        A = T.match_buffer(a_, (m, 512), "float16", strides=(lda, 1))
        B = T.match_buffer(b_, (512, 256), "float16", strides=(ldb, 1))
        C = T.match_buffer(c_, (m, 256), "float16", strides=(ldc, 1))
        tile.assume(tirx.all(lda % divisor == 0, ldb % divisor == 0, ldc % divisor == 0))
        with tile.kernel(tile.cdiv(m, 128), 2) as (i, j):
            a = tile.shared((128, 64), "float16")
            b = tile.shared((64, 128), "float16")
            c = tile.fragment((128, 128), "float32")
            tile.fill(c, 0)
            for k in tile.pipelined(8):
                tile.copy(A[i * 128, k * 64], a)
                tile.copy(B[k * 64, j * 128], b)
                tile.gemm(a, b, c)
            tile.copy(c, C[i * 128, j * 128])

    return product


@T.prim_func
def added(a: T.handle, B: T.Buffer((48, 64), "float32", strides=(1, 48)), c: T.handle, d: T.handle):
    """Columns of a matrix, a transposed one and a row for all, each moved in another way."""
    m, lda, ldc = T.int32(), T.int32(), T.int32()
    A = T.match_buffer(a, (m, 64), "float32", strides=(lda, 1))
    C = T.match_buffer(c, (m, 64), "float32", strides=(ldc, 1))
    D = T.match_buffer(d, (m, 64), "float32", strides=(0, 1))
    with tile.kernel(tile.cdiv(m, 16)) as i:
        x = tile.fragment((16, 64), "float32")
        y = tile.shared((16, 64), "float32")
        tile.copy(A[i * 16, 0], x)
        tile.copy(B[i * 16, 0], y)
        with tile.parallel(16, 64) as (r, k):
            if i * 16 + r < m:
                x[r, k] = x[r, k] + y[r, k] + D[i * 16 + r, k]
        tile.copy(x, C[i * 16, 0])


@T.prim_func
def scattered(
    X: T.Buffer((24, 32), "float32", strides=(40, 1)),
    places: T.Buffer((24,), "int32", strides=(2,)),
    Y: T.Buffer((24, 32), "float32", strides=(1, 25)),
    total: T.Buffer((4, 32), "float32", strides=(64, 2)),
    largest: T.Buffer((4,), "int32", strides=(3,)),
    once: T.Buffer((6,), "int32", strides=(5,)),
):
    """Rows gathered from and stored to where a table says, sums and maxima of elements, and a swap."""
    with tile.kernel(3) as i:
        rows = tile.shared((8, 32), "float32")
        with tile.parallel(8, 32) as (r, k):
            rows[r, k] = X[places[i * 8 + r], k]
        with tile.parallel(8, 32, distinct=True) as (r, k):
            Y[places[i * 8 + r], k] = rows[r, k] * 2.0
        with tile.parallel(8, 32) as (r, k):
            tile.atomic_add(rows[r, k], total[places[i * 8 + r] % 4, k])
        with tile.parallel(8) as r:
            tile.atomic_max(places[i * 8 + r], largest[places[i * 8 + r] % 4])
        with tile.parallel(1) as r:
            tile.atomic_cas(0, i + 1, once[i * 2])


@T.prim_func
def signalled(
    A: T.Buffer((8, 64), "float32", strides=(80, 1)),
    B: T.Buffer((8, 64), "float32", strides=(72, 1)),
    turn: T.int32,
    ready: T.Buffer((8,), "int32", strides=(3,)),
    done: T.Buffer((8,), "int32", strides=(2,)),
):
    with tile.kernel(8) as i:
        a = tile.fragment((1, 64), "float32")
        tile.wait(ready[i], turn)
        tile.copy(A[i, 0], a)
        with tile.parallel(1, 64) as (x, y):
            a[x, y] = a[x, y] * 2.0
        tile.copy(a, B[i, 0])
        tile.signal(done[i], turn)


@T.prim_func
def turned(a: T.handle, b: T.handle):
    """A transposition that is made by strides, of extents that callers give."""
    m, n = T.int32(), T.int32()
    A = T.match_buffer(a, (m, n), "float32", strides=(1, m))
    B = T.match_buffer(b, (m, n), "float32", strides=(n * 2, 1))
    with tile.kernel(m, n) as (i, j), tile.parallel(1) as k:
        B[i, j + k] = A[i, j + k]


def summed(strides_x: tuple, strides_y: tuple, dtype: str) -> tirx.PrimFunc:
    """Rows by copies, by computed addresses and by a gather that runs ahead, added up."""

    @T.prim_func
    def summed(
        X: T.Buffer((48, 40), dtype, strides=strides_x),
        rows: T.Buffer((48,), "int32", strides=(2,)),
        Y: T.Buffer((48, 40), dtype, strides=strides_y),
    ):
        with tile.kernel(3, 2) as (i, j):
            a = tile.shared((16, 32), dtype)
            b = tile.fragment((16, 32), dtype)
            c = tile.fragment((16, 32), dtype)
            tile.fill(c, 0)
            tile.copy(X[i * 16, j * 32], b)
            for k in tile.pipelined(3, stages=2):
                tile.copy(X[k * 16, j * 32], a)
                with tile.parallel(16, 32) as (r, s):
                    c[r, s] = c[r, s] + a[r, s] + b[r, s]
            with tile.parallel(16, 32) as (r, s):
                if j * 32 + s < 40:
                    c[r, s] = c[r, s] + X[rows[i * 16 + r], j * 32 + s]
            tile.copy(c, Y[i * 16, j * 32])

    return summed


@T.prim_func
def doubled(a: T.handle, b: T.handle):
    m, n, lda = T.int32(), T.int32(), T.int32()
    A = T.match_buffer(a, (m, n), "float32", strides=(lda, 1))
    B = T.match_buffer(b, (m, n), "float32", strides=(lda, 1))
    with tile.kernel(m, n) as (i, j), tile.parallel(1) as k:
        B[i, j + k] = A[i, j + k] * 2.0


@T.prim_func
def columns(x: T.handle, b: T.Buffer((16, 32), "float32", strides=(1, 16)), y: T.handle):
    n, ldx = T.int32(), T.int32()
    X = T.match_buffer(x, (n, 32), "float32", strides=(ldx, 1))
    Y = T.match_buffer(y, (n, 32), "float32", strides=(ldx, 1))
    with tile.kernel(tile.cdiv(n, 16)) as i:
        rows = tile.fragment((16, 32), "float32")
        tile.copy(X[i * 16, 0], rows)
        with tile.parallel(16, 32) as (r, k):
            rows[r, k] = rows[r, k] + b[r, k]
        tile.copy(rows, Y[i * 16, 0])
