"""Tile programs for Hopper's tensor cores, as functions of their shapes."""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile

MASKED = -(2.0**100)
"""The score of a key that a row doesn't see; a power of two, so that its product with the scale is exact."""


def matmul(
    m: int,
    n: int,
    k: int,
    block: tuple[int, int, int] = (128, 256, 64),
    dtype: str = "bfloat16",
    out: str | None = None,
    stages: int | None = None,
    transpose_a: bool = False,
    transpose_b: bool = True,
    instruction: str | None = None,
    **options: object,
) -> tirx.PrimFunc:
    """C = A B: A (m, k), or (k, m) with `transpose_a`; B (k, n), or (n, k) with `transpose_b`."""
    bm, bn, bk = block
    out = out or dtype
    total = "int32" if dtype == "int8" else "float32"
    a_shape, a_tile = ((k, m), (bk, bm)) if transpose_a else ((m, k), (bm, bk))
    b_shape, b_tile = ((n, k), (bn, bk)) if transpose_b else ((k, n), (bk, bn))

    @T.prim_func
    def func(A: T.Buffer(a_shape, dtype), B: T.Buffer(b_shape, dtype), C: T.Buffer((m, n), out)):
        with tile.kernel(tile.cdiv(m, bm), tile.cdiv(n, bn), **options) as (i, j):
            a = tile.shared(a_tile, dtype)
            b = tile.shared(b_tile, dtype)
            c = tile.fragment((bm, bn), total)
            tile.fill(c, 0)
            for l in tile.pipelined(tile.cdiv(k, bk), stages=stages):
                tile.copy(A[l * bk, i * bm] if transpose_a else A[i * bm, l * bk], a)
                tile.copy(B[j * bn, l * bk] if transpose_b else B[l * bk, j * bn], b)
                tile.gemm(a, b, c, transpose_a=transpose_a, transpose_b=transpose_b, instruction=instruction)
            tile.copy(c, C[i * bm, j * bn])

    return func


def attention(
    batch: int,
    heads: int,
    tokens: int,
    head: int = 128,
    block: tuple[int, int] = (128, 128),
    causal: bool = False,
    dtype: str = "bfloat16",
    **options: object,
) -> tirx.PrimFunc:
    """O = softmax(Q K^T / sqrt(head)) V, each of (batch, heads, tokens, head); tokens divide by both blocks."""
    bm, bn = block
    scale = head**-0.5 * 1.4426950408889634

    def last(i: tirx.Expr) -> tirx.Expr | int:
        """The last block of keys that a block of rows sees; the mask cuts through it, so it comes first."""
        return tile.cdiv((i + 1) * bm, bn) - 1 if causal else tokens // bn - 1

    @T.prim_func
    def func(
        Q: T.Buffer((batch, heads, tokens, head), dtype),
        K: T.Buffer((batch, heads, tokens, head), dtype),
        V: T.Buffer((batch, heads, tokens, head), dtype),
        O: T.Buffer((batch, heads, tokens, head), dtype),
    ):
        with tile.kernel(batch, heads, tokens // bm, **options) as (b, h, i):
            q = tile.shared((bm, head), dtype)
            k = tile.shared((bn, head), dtype)
            v = tile.shared((bn, head), dtype)
            s = tile.fragment((bm, bn), "float32")
            p = tile.fragment((bm, bn), dtype)
            o = tile.fragment((bm, head), "float32")
            top = tile.fragment((bm,), "float32")
            before = tile.fragment((bm,), "float32")
            total = tile.fragment((bm,), "float32")
            row = tile.fragment((bm,), "float32")
            tile.copy(Q[b, h, i * bm, 0], q)
            tile.fill(o, 0)
            tile.fill(total, 0)
            tile.fill(top, MASKED)
            for step in tile.pipelined(last(i) + 1):
                tile.copy(K[b, h, (last(i) - step) * bn, 0], k)
                tile.copy(V[b, h, (last(i) - step) * bn, 0], v)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                if causal:  # noqa: SIM102 (decided here; the next line at run time)
                    if (last(i) - step + 1) * bn > i * bm:
                        with tile.parallel(bm, bn) as (x, y):
                            if (last(i) - step) * bn + y > i * bm + x:
                                s[x, y] = T.float32(MASKED)
                tile.copy(top, before)
                tile.max(s, top, axis=1, accumulate=True)
                with tile.parallel(bm, bn) as (x, y):
                    s[x, y] = T.exp2(s[x, y] * T.float32(scale) - top[x] * T.float32(scale))
                tile.sum(s, row, axis=1)
                with tile.parallel(bm) as x:
                    before[x] = T.exp2((before[x] - top[x]) * T.float32(scale))
                    total[x] = total[x] * before[x] + row[x]
                tile.copy(s, p)
                with tile.parallel(bm, head) as (x, y):
                    o[x, y] = o[x, y] * before[x]
                tile.gemm(p, v, o)
            with tile.parallel(bm) as x:
                total[x] = T.float32(1) / total[x]
            with tile.parallel(bm, head) as (x, y):
                o[x, y] = o[x, y] * total[x]
            tile.copy(o, O[b, h, i * bm, 0])

    return func


def through_shared(m: int, n: int, k: int) -> tirx.PrimFunc:
    """C = (A B^T rounded) B2: the first product is staged in shared memory by the threads for the second."""

    @T.prim_func
    def func(
        A: T.Buffer((m, k), "bfloat16"),
        B: T.Buffer((128, k), "bfloat16"),
        D: T.Buffer((n, 128), "bfloat16"),
        C: T.Buffer((m, n), "bfloat16"),
    ):
        with tile.kernel(tile.cdiv(m, 128), tile.cdiv(n, 128)) as (i, j):
            a = tile.shared((128, 64), "bfloat16")
            b = tile.shared((128, 64), "bfloat16")
            d = tile.shared((128, 128), "bfloat16")
            staged = tile.shared((128, 128), "bfloat16")
            first = tile.fragment((128, 128), "float32")
            second = tile.fragment((128, 128), "float32")
            tile.fill(first, 0)
            for l in tile.pipelined(tile.cdiv(k, 64)):
                tile.copy(A[i * 128, l * 64], a)
                tile.copy(B[0, l * 64], b)
                tile.gemm(a, b, first, transpose_b=True)
            tile.copy(first, staged)
            tile.copy(D[j * 128, 0], d)
            tile.gemm(staged, d, second, transpose_b=True, accumulate=False)
            tile.copy(second, C[i * 128, j * 128])

    return func


HELD = ("before the loop", "in it", "in an outer one", "in an arm", "another", "another in the arm of its use")
"""Where `held` loads its left operand."""


def held(where: str) -> tirx.PrimFunc:
    """Y = 2^(A B^T / 16 - t) D: A (256, 64) is a fragment, B and D (512, 64), t (512); where A is loaded, `where` says.

    Within an outer loop of two it is done twice, and Y the sum. Another one each time is rows of B, from 32 times the
    number of the step on, whatever the block.
    """
    arm, outer = where == "in an arm", where == "in an outer one"
    same, before = where == "another in the arm of its use", where == "before the loop"

    @T.prim_func
    def func(
        A: T.Buffer((256, 64), "bfloat16"),
        B: T.Buffer((512, 64), "bfloat16"),
        D: T.Buffer((512, 64), "bfloat16"),
        t: T.Buffer((512,), "float32"),
        Y: T.Buffer((256, 64), "float32"),
    ):
        with tile.kernel(2) as i:
            a = tile.fragment((128, 64), "bfloat16")
            b = tile.shared((64, 64), "bfloat16")
            d = tile.shared((64, 64), "bfloat16")
            less = tile.shared((64,), "float32")
            s = tile.fragment((128, 64), "float32")
            p = tile.fragment((128, 64), "bfloat16")
            y = tile.fragment((128, 64), "float32")
            tile.fill(y, 0)
            if before:
                tile.copy(A[i * 128, 0], a)

            @T.inline
            def add(j: Any) -> None:
                """What keys of a step add."""
                tile.copy(B[j * 64, 0], b)
                tile.copy(t[j * 64], less)
                tile.copy(D[j * 64, 0], d)
                if arm:  # noqa: SIM102
                    if j == 0:
                        tile.copy(A[i * 128, 0], a)
                if where == "in it":
                    tile.copy(A[i * 128, 0], a)
                if where == "another":
                    tile.copy(B[j * 32, 0], a)
                if same:
                    if j >= 0:
                        tile.copy(B[j * 32, 0], a)
                        tile.gemm(a, b, s, transpose_b=True, accumulate=False)
                else:
                    tile.gemm(a, b, s, transpose_b=True, accumulate=False)
                with tile.parallel(128, 64) as (x, z):
                    s[x, z] = T.exp2(s[x, z] * T.float32(1 / 16) - less[z])
                tile.copy(s, p)
                tile.gemm(p, d, y)

            if outer:
                for _ in range(2):
                    tile.copy(A[i * 128, 0], a)
                    for j in tile.pipelined(8):
                        add(j)
            else:
                for j in tile.pipelined(8):
                    add(j)
            tile.copy(y, Y[i * 128, 0])

    return func


def wide_values(queries: int, keys: int) -> tirx.PrimFunc:
    """Attention of which values have more columns than a warpgroup has registers for: Q, K (.., 128), V (keys, 512)."""

    @T.prim_func
    def func(
        Q: T.Buffer((queries, 128), "bfloat16"),
        K: T.Buffer((keys, 128), "bfloat16"),
        V: T.Buffer((keys, 512), "bfloat16"),
        O: T.Buffer((queries, 512), "float32"),
    ):
        with tile.kernel(tile.cdiv(queries, 64)) as i:
            q = tile.shared((64, 128), "bfloat16")
            k = tile.shared((64, 128), "bfloat16")
            v = tile.shared((64, 512), "bfloat16")
            p = tile.shared((64, 64), "bfloat16")
            s = tile.fragment((64, 64), "float32")
            o = tile.fragment((64, 512), "float32")
            row = tile.fragment((64,), "float32")
            total = tile.fragment((64,), "float32")
            tile.copy(Q[i * 64, 0], q)
            tile.fill(o, 0)
            tile.fill(total, 0)
            for j in tile.pipelined(tile.cdiv(keys, 64)):
                tile.copy(K[j * 64, 0], k)
                tile.copy(V[j * 64, 0], v)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                with tile.parallel(64, 64) as (x, y):
                    s[x, y] = T.if_then_else(
                        j * 64 + y < keys, T.exp2(s[x, y] * T.float32(1.4426950408889634 / 16)), T.float32(0)
                    )
                tile.sum(s, row, axis=1)
                with tile.parallel(64) as x:
                    total[x] = total[x] + row[x]
                tile.copy(s, p)
                tile.gemm(p, v, o)
            with tile.parallel(64, 512) as (x, y):
                o[x, y] = o[x, y] / total[x]
            tile.copy(o, O[i * 64, 0])

    return func


def batched(batch: int, m: int, n: int, k: int) -> tirx.PrimFunc:
    """Products with a bias and a relu, whose number along k differs: those with 0 write the relu of the bias."""

    @T.prim_func
    def func(
        A: T.Buffer((batch, m, k), "float16"),
        B: T.Buffer((batch, n, k), "float16"),
        bias: T.Buffer((n,), "float32"),
        lengths: T.Buffer((batch,), "int32"),
        C: T.Buffer((batch, m, n), "float16"),
    ):
        with tile.kernel(batch, tile.cdiv(m, 128), tile.cdiv(n, 64)) as (b, i, j):
            a = tile.shared((128, 64), "float16")
            w = tile.shared((64, 64), "float16")
            c = tile.fragment((128, 64), "float32")
            steps = lengths[b]
            tile.fill(c, 0)
            for l in tile.pipelined(steps):
                tile.copy(A[b, i * 128, l * 64], a)
                tile.copy(B[b, j * 64, l * 64], w)
                tile.gemm(a, w, c, transpose_b=True)
            with tile.parallel(128, 64) as (x, y):
                if j * 64 + y < n:
                    c[x, y] = T.max(c[x, y] + bias[j * 64 + y], T.float32(0))
            tile.copy(c, C[b, i * 128, j * 64])

    return func


def chained(m: int, n: int, branch: bool = False) -> tirx.PrimFunc:
    """O = (Q K^T rounded) V, block of keys after block of keys; with `branch` only of the odd ones."""

    @T.prim_func
    def func(
        Q: T.Buffer((m, 64), "float16"),
        K: T.Buffer((n, 64), "float16"),
        V: T.Buffer((n, 64), "float16"),
        O: T.Buffer((m, 64), "float16"),
    ):
        with tile.kernel(tile.cdiv(m, 128)) as i:
            q = tile.shared((128, 64), "float16")
            k = tile.shared((64, 64), "float16")
            v = tile.shared((64, 64), "float16")
            s = tile.fragment((128, 64), "float32")
            p = tile.fragment((128, 64), "float16")
            o = tile.fragment((128, 64), "float32")
            tile.copy(Q[i * 128, 0], q)
            tile.fill(o, 0)
            for j in tile.pipelined(tile.cdiv(n, 64)):
                tile.copy(K[j * 64, 0], k)
                tile.copy(V[j * 64, 0], v)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                tile.copy(s, p)
                if branch:
                    if j % 2 == 1:
                        tile.gemm(p, v, o)
                else:
                    tile.gemm(p, v, o)
            tile.copy(o, O[i * 128, 0])

    return func


def listed(which: int) -> tirx.PrimFunc:
    """O = (Q K^T rounded) V over the blocks of keys in a list of counts[which], which may have none; scores are cut."""

    @T.prim_func
    def func(
        Q: T.Buffer((128, 64), "float16"),
        K: T.Buffer((512, 64), "float16"),
        V: T.Buffer((512, 64), "float16"),
        counts: T.Buffer((3,), "int32"),
        indices: T.Buffer((8,), "int32"),
        O: T.Buffer((128, 64), "float16"),
    ):
        with tile.kernel(1):
            q = tile.shared((128, 64), "float16")
            k = tile.shared((64, 64), "float16")
            v = tile.shared((64, 64), "float16")
            s = tile.fragment((128, 64), "float32")
            p = tile.fragment((128, 64), "float16")
            o = tile.fragment((128, 64), "float32")
            tile.copy(Q[0, 0], q)
            tile.fill(o, 0)
            for j in tile.pipelined(counts[which]):
                tile.copy(K[indices[j] * 64, 0], k)
                tile.copy(V[indices[j] * 64, 0], v)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                if indices[j] > 1:
                    with tile.parallel(128, 64) as (x, y):
                        s[x, y] = T.max(s[x, y], T.float32(0))
                tile.copy(s, p)
                tile.gemm(p, v, o)
            tile.copy(o, O[0, 0])

    return func


def scaled(rows: int, columns: int, dtype: str = "float16", steps: int = 5, stages: int | None = None) -> tirx.PrimFunc:
    """C = A A^T summed over the steps; D sums small tiles of S, one a step, of any size."""

    @T.prim_func
    def func(
        A: T.Buffer((128, 64 * steps), "float16"),
        S: T.Buffer((steps * rows, columns), dtype),
        C: T.Buffer((128, 128), "float32"),
        D: T.Buffer((rows, columns), "float32"),
    ):
        with tile.kernel(1):
            s = tile.shared((rows, columns), dtype)
            a = tile.shared((128, 64), "float16")
            c = tile.fragment((128, 128), "float32")
            d = tile.fragment((rows, columns), "float32")
            tile.fill(c, 0)
            tile.fill(d, 0)
            for l in tile.pipelined(steps, stages=stages):
                tile.copy(S[l * rows, 0], s)
                tile.copy(A[0, l * 64], a)
                tile.gemm(a, a, c, transpose_b=True)
                with tile.parallel(rows, columns) as (x, y):
                    d[x, y] = d[x, y] + T.cast(s[x, y], "float32")
            tile.copy(c, C[0, 0])
            tile.copy(d, D[0, 0])

    return func


def few_rows(rows: int, blocks: int = 1, dtype: str = "float16", step: int = 64) -> tirx.PrimFunc:
    """C = A B^T, of fewer rows than tiles have, and D sums the rows of the tiles of A, those that are none, too."""

    @T.prim_func
    def func(
        A: T.Buffer((rows, 5 * step), dtype),
        B: T.Buffer((40, 5 * step), dtype),
        C: T.Buffer((rows, 40), "float32"),
        D: T.Buffer((blocks, step), "float32"),
    ):
        with tile.kernel(blocks) as m:
            a = tile.shared((64, step), dtype)
            b = tile.shared((64, step), dtype)
            c = tile.fragment((64, 64), "float32")
            d = tile.fragment((64, step), "float32")
            total = tile.fragment((step,), "float32")
            tile.fill(c, 0)
            tile.fill(d, 0)
            for l in tile.pipelined(5):
                tile.copy(A[m * 64, l * step], a)
                tile.copy(B[0, l * step], b)
                tile.gemm(a, b, c, transpose_b=True)
                with tile.parallel(64, step) as (x, y):
                    d[x, y] = d[x, y] + T.cast(a[x, y], "float32")
            tile.copy(c, C[m * 64, 0])
            tile.sum(d, total, axis=0)
            tile.copy(total, D[m, 0])

    return func


def poisoned(size: int = 220 << 10) -> tirx.PrimFunc:
    """Fills all of the multiprocessors' shared memory with NaN."""

    @T.prim_func
    def func(Y: T.Buffer((264,), "float32")):
        with tile.kernel(264) as m:
            a = tile.shared((size // 4,), "float32")
            y = tile.fragment((1,), "float32")
            with tile.parallel(size // 4) as i:
                a[i] = T.float32(float("nan"))
            with tile.parallel(1) as i:
                y[i] = a[m * 200]
            tile.copy(y, Y[m])

    return func


def scaled_tiles(
    tiles: int, rows: int, columns: int, steps: int, by: str, out: str = "float32", stages: int | None = None
) -> tirx.PrimFunc:
    """C, tile by tile of so many rows, sums the steps' products of A and B, each times its scales.

    `by` says what has scales, ``"rows"``, ``"columns"`` or ``"both"``; threads read them from circular buffers.
    """

    @T.prim_func
    def func(
        A: T.Buffer((tiles * rows, 64 * steps), "float16"),
        B: T.Buffer((columns, 64 * steps), "float16"),
        S: T.Buffer((steps, tiles * rows), "float32"),
        R: T.Buffer((steps, columns), "float32"),
        C: T.Buffer((tiles * rows, columns), out),
    ):
        with tile.kernel(tiles) as t:
            a = tile.shared((rows, 64), "float16")
            b = tile.shared((columns, 64), "float16")
            of_rows = tile.shared((rows,), "float32")
            of_columns = tile.shared((columns,), "float32")
            part = tile.fragment((rows, columns), "float32")
            c = tile.fragment((rows, columns), "float32")
            tile.fill(c, 0)
            for l in tile.pipelined(steps, stages=stages):
                tile.copy(A[t * rows, l * 64], a)
                tile.copy(B[0, l * 64], b)
                if by != "columns":
                    tile.copy(S[l, t * rows], of_rows)
                if by != "rows":
                    tile.copy(R[l, 0], of_columns)
                tile.gemm(a, b, part, transpose_b=True, accumulate=False)
                with tile.parallel(rows, columns) as (x, y):
                    row = T.meta_var(T.float32(1) if by == "columns" else of_rows[x])
                    column = T.meta_var(T.float32(1) if by == "rows" else of_columns[y])
                    c[x, y] = c[x, y] + part[x, y] * (row * column)
            tile.copy(c, C[t * rows, 0])

    return func
