"""Tile programs for the uniform model: every word of the language, and every way in which its threads share work."""

import math

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile

UNIFORM = "uniform"


def matmul(
    m: int,
    n: int,
    k: int,
    block: tuple[int, int, int] = (64, 64, 32),
    dtype: str = "float16",
    out: str = "float32",
    total: str = "float32",
    transpose_a: bool = False,
    transpose_b: bool = False,
    stages: int | None = None,
    instruction: str | None = None,
    **options: object,
) -> tirx.PrimFunc:
    """C = A B: A (m, k), or (k, m) with `transpose_a`; B (k, n), or (n, k) with `transpose_b`."""
    bm, bn, bk = block
    a_shape, a_tile = ((k, m), (bk, bm)) if transpose_a else ((m, k), (bm, bk))
    b_shape, b_tile = ((n, k), (bn, bk)) if transpose_b else ((k, n), (bk, bn))

    @T.prim_func
    def matmul(A: T.Buffer(a_shape, dtype), B: T.Buffer(b_shape, dtype), C: T.Buffer((m, n), out)):
        with tile.kernel(tile.cdiv(m, bm), tile.cdiv(n, bn), roles=UNIFORM, **options) as (i, j):
            a = tile.shared(a_tile, dtype)
            b = tile.shared(b_tile, dtype)
            c = tile.fragment((bm, bn), total)
            tile.fill(c, 0)
            for t in tile.pipelined(tile.cdiv(k, bk), stages=stages):
                if transpose_a:
                    tile.copy(A[t * bk, i * bm], a)
                else:
                    tile.copy(A[i * bm, t * bk], a)
                if transpose_b:
                    tile.copy(B[j * bn, t * bk], b)
                else:
                    tile.copy(B[t * bk, j * bn], b)
                tile.gemm(a, b, c, transpose_a=transpose_a, transpose_b=transpose_b, instruction=instruction)
            tile.copy(c, C[i * bm, j * bn])

    return matmul


def attention(length: int, head: int, block: int = 64, dtype: str = "float16") -> tirx.PrimFunc:
    """O = softmax(Q K^T / sqrt(head)) V of one head: the probabilities stay in registers as a left operand."""
    scale = math.log2(math.e) / math.sqrt(head)

    @T.prim_func
    def attention(
        Q: T.Buffer((length, head), dtype),
        K: T.Buffer((length, head), dtype),
        V: T.Buffer((length, head), dtype),
        O: T.Buffer((length, head), dtype),
    ):
        with tile.kernel(length // block, threads=128, roles=UNIFORM) as m:
            q = tile.shared((block, head), dtype)
            k = tile.shared((block, head), dtype)
            v = tile.shared((block, head), dtype)
            s = tile.fragment((block, block), "float32")
            p = tile.fragment((block, block), dtype)
            o = tile.fragment((block, head), "float32")
            top = tile.fragment((block,), "float32")
            before = tile.fragment((block,), "float32")
            part = tile.fragment((block,), "float32")
            total = tile.fragment((block,), "float32")
            tile.copy(Q[m * block, 0], q)
            tile.fill(o, 0)
            tile.fill(total, 0)
            tile.fill(top, -1e30)
            for j in tile.pipelined(length // block):
                tile.copy(K[j * block, 0], k)
                tile.copy(V[j * block, 0], v)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                tile.copy(top, before)
                tile.max(s, top, accumulate=True)
                with tile.parallel(block, block) as (x, y):
                    s[x, y] = T.exp2(s[x, y] * T.float32(scale) - top[x] * T.float32(scale))
                tile.sum(s, part)
                with tile.parallel(block) as x:
                    total[x] = total[x] * T.exp2((before[x] - top[x]) * T.float32(scale)) + part[x]
                with tile.parallel(block, head) as (x, y):
                    o[x, y] = o[x, y] * T.exp2((before[x] - top[x]) * T.float32(scale))
                tile.copy(s, p)
                tile.gemm(p, v, o)
            with tile.parallel(block, head) as (x, y):
                o[x, y] = o[x, y] / total[x]
            tile.copy(o, O[m * block, 0])

    return attention


def rows(count: int, columns: int, block: int, dtype: str, kind: str) -> tirx.PrimFunc:
    """Y = X less its row's `kind`, the result of the row held by all threads that hold parts of it."""
    reduce = {"sum": tile.sum, "max": tile.max, "min": tile.min}[kind]

    @T.prim_func
    def rows(X: T.Buffer((count, columns), dtype), Y: T.Buffer((count, columns), dtype), R: T.Buffer((count,), dtype)):
        with tile.kernel(tile.cdiv(count, block)) as i:
            x = tile.fragment((block, columns), dtype)
            r = tile.fragment((block,), dtype)
            tile.copy(X[i * block, 0], x)
            reduce(x, r)
            with tile.parallel(block, columns) as (a, b):
                x[a, b] = x[a, b] - r[a]
            tile.copy(x, Y[i * block, 0])
            tile.copy(r, R[i * block])

    return rows


def columns(count: int, width: int, dtype: str = "float32") -> tirx.PrimFunc:
    """The smallest of every column, of pieces of 32 rows one after the other; and the largest of all, in a local."""

    @T.prim_func
    def columns(X: T.Buffer((count, width), dtype), Y: T.Buffer((width,), dtype), Z: T.Buffer((1,), dtype)):
        with tile.kernel(1):
            x = tile.fragment((32, width), dtype)
            least = tile.fragment((width,), dtype)
            most = tile.fragment((1,), dtype)
            negative = tile.fragment((width,), dtype)
            tile.fill(least, 100)
            for i in range(count // 32):
                tile.copy(X[i * 32, 0], x)
                tile.min(x, least, 0, accumulate=True)
            with tile.parallel(width) as j:
                negative[j] = -least[j]
            tile.max(negative, most)
            tile.copy(least, Y)
            tile.copy(most, Z)

    return columns


def transposed(m: int, n: int, dtype: str, block: int = 64) -> tirx.PrimFunc:
    """Y = X^T through shared memory."""

    @T.prim_func
    def transposed(X: T.Buffer((m, n), dtype), Y: T.Buffer((n, m), dtype)):
        with tile.kernel(tile.cdiv(m, block), tile.cdiv(n, block)) as (i, j):
            s = tile.shared((block, block), dtype)
            f = tile.fragment((block, block), dtype)
            tile.copy(X[i * block, j * block], s)
            with tile.parallel(block, block) as (a, b):
                f[a, b] = s[b, a]
            tile.copy(f, Y[j * block, i * block])

    return transposed


def segments(count: int, width: int) -> tirx.PrimFunc:
    """Sums of rows start[s] to start[s + 1], whose number only the data knows; empty ones give -1."""

    @T.prim_func
    def segments(
        X: T.Buffer((64, width), "float32"),
        start: T.Buffer((count + 1,), "int32"),
        Y: T.Buffer((count, width), "float32"),
    ):
        with tile.kernel(count) as s:
            first = start[s]
            length = start[s + 1] - first
            x = tile.fragment((width,), "float32")
            total = tile.fragment((width,), "float32")
            done = tile.local((1,), "int32")
            tile.fill(total, 0)
            done[0] = 0
            for i in range(length):
                tile.copy(X[first + i, 0:width], x)
                with tile.parallel(width) as j:
                    total[j] = total[j] + x[j]
                done[0] = done[0] + 1
            if length == 0:
                tile.fill(total, -1)
            with tile.parallel(width) as j:
                total[j] = total[j] + T.cast(done[0], "float32")
            tile.copy(total, Y[s, 0:width])

    return segments


def gathered(count: int, width: int) -> tirx.PrimFunc:
    """Y[i] = X[where[i]] if that is a row, scattered to the place that `to` says; else nothing is written."""

    @T.prim_func
    def gathered(
        X: T.Buffer((count, width), "float16"),
        where: T.Buffer((count,), "int32"),
        to: T.Buffer((count,), "int32"),
        Y: T.Buffer((count, width), "float16"),
    ):
        with tile.kernel(1):
            f = tile.fragment((count, width), "float16")
            s = tile.shared((count, width), "float16")
            tile.fill(s, 0)
            with tile.parallel(count, width) as (i, j):
                f[i, j] = T.float16(0)
                if where[i] >= 0:
                    f[i, j] = X[where[i], j]
            with tile.parallel(count, width, distinct=True) as (i, j):
                s[to[i], j] = f[i, j]
            with tile.parallel(count, width) as (i, j):
                if j < width - 3:
                    Y[i, j] = s[count - 1 - i, j] + T.float16(1)

    return gathered


def split(m: int, n: int, k: int, parts: int) -> tirx.PrimFunc:
    """C += A B^T, the parts of k added by blocks of their own."""
    share = k // parts

    @T.prim_func
    def split(A: T.Buffer((m, k), "bfloat16"), B: T.Buffer((n, k), "bfloat16"), C: T.Buffer((m, n), "float32")):
        with tile.kernel(parts, tile.cdiv(m, 32), roles=UNIFORM) as (p, i):
            a = tile.shared((32, 32), "bfloat16")
            b = tile.shared((n, 32), "bfloat16")
            c = tile.fragment((32, n), "float32")
            tile.fill(c, 0)
            for t in tile.pipelined(share // 32, stages=2):
                tile.copy(A[i * 32, p * share + t * 32], a)
                tile.copy(B[0, p * share + t * 32], b)
                tile.gemm(a, b, c, transpose_b=True)
            tile.copy(c, C[i * 32, 0], atomic="add")

    return split


def chain(m: int, n: int) -> tirx.PrimFunc:
    """X to shared memory, to a fragment, to another type, to a part of shared memory and out, by pieces."""

    @T.prim_func
    def chain(X: T.Buffer((m, n), "float32"), Y: T.Buffer((m, n), "bfloat16"), Z: T.Buffer((8, n), "float32")):
        with tile.kernel(tile.cdiv(m, 32)) as i:
            s = tile.shared((32, n), "float32")
            f = tile.fragment((32, n), "float32")
            g = tile.fragment((32, n), "bfloat16")
            h = tile.shared((2, 32, n), "bfloat16")
            back = tile.shared((32, n), "bfloat16")
            tile.copy(X[i * 32, 0], s)
            tile.copy(s, f)
            tile.cast(f, g)
            tile.copy(g, h[1, 0:32, 0:n])
            tile.copy(h[1, 0:32, 0:n], back)
            tile.copy(back[0:16, 0:n], Y[i * 32, 0])
            tile.copy(back[16:32, 0:n], Y[i * 32 + 16, 0])
            if i == 0:
                tile.copy(f[8:16, 0:n], Z[0:8, 0:n])

    return chain


def unlike(m: int, n: int) -> tirx.PrimFunc:
    """A product's accumulator copied to a fragment whose layout is another: threads exchange elements."""

    @T.prim_func
    def unlike(A: T.Buffer((m, 64), "float16"), B: T.Buffer((n, 64), "float16"), C: T.Buffer((m, n), "float32")):
        with tile.kernel(1, threads=128, roles=UNIFORM):
            a = tile.shared((m, 64), "float16")
            b = tile.shared((n, 64), "float16")
            c = tile.fragment((m, n), "float32")
            d = tile.fragment((m, n), "float32", layout=coalesced((m, n), 4, 128))
            tile.copy(A, a)
            tile.copy(B, b)
            tile.gemm(a, b, c, transpose_b=True, accumulate=False)
            tile.copy(c, d)
            tile.copy(d[0:16, 0:n], d[16:32, 0:n])
            tile.copy(d, C)

    return unlike


def coalesced(shape: tuple[int, ...], vector: int, threads: int):
    from tvm_axe.tile.targets.cuda.fragments.infer import coalesced as layout

    return layout(shape, vector, threads)[0]


def reused(n: int) -> tirx.PrimFunc:
    """A shared tile that is written and read in turns, in a loop and across it."""

    @T.prim_func
    def reused(X: T.Buffer((8, n), "float32"), Y: T.Buffer((8, n), "float32")):
        with tile.kernel(1):
            s = tile.shared((n,), "float32")
            f = tile.fragment((n,), "float32")
            tile.fill(f, 1)
            tile.copy(f, s)
            for i in range(8):
                with tile.parallel(n) as j:
                    f[j] = s[n - 1 - j] + X[i, j]
                tile.copy(f, s)
                tile.copy(s, Y[i, 0:n])

    return reused


def fused(m: int, n: int, block: int = 32) -> tirx.PrimFunc:
    """Y = X * weight + residual straight from memory, and Z = Y of a fragment with a row's factor, of other types."""

    @T.prim_func
    def fused(
        X: T.Buffer((m, n), "bfloat16"),
        weight: T.Buffer((n,), "bfloat16"),
        residual: T.Buffer((m, n), "float32"),
        factor: T.Buffer((m,), "float32"),
        Y: T.Buffer((m, n), "float32"),
        Z: T.Buffer((m, n), "bfloat16"),
    ):
        with tile.kernel(m // block) as i:
            f = tile.fragment((block, n), "float32")
            s = tile.shared((block, n), "float32")
            with tile.parallel(block, n) as (r, c):
                Y[i * block + r, c] = (
                    T.cast(X[i * block + r, c], "float32") * T.cast(weight[c], "float32") + residual[i * block + r, c]
                )
            with tile.parallel(block, n) as (r, c):
                f[r, c] = Y[i * block + r, c] * factor[i * block + r]
                s[r, c] = f[r, c] + T.float32(1)
            with tile.parallel(block, n) as (r, c):
                f[r, c] = f[r, c] + s[r, c] + T.cast(X[i * block + r, c], "float32")
                Z[i * block + r, c] = T.cast(f[r, c] + residual[i * block + r, n - 1 - c], "bfloat16")

    return fused


def reduced_memory(m: int, n: int) -> tirx.PrimFunc:
    """Sums of a shared tile's rows, added to a shared tile; the largest of each column of one of its parts."""

    @T.prim_func
    def reduced_memory(X: T.Buffer((m, n), "float32"), Y: T.Buffer((m,), "float32"), Z: T.Buffer((n,), "float32")):
        with tile.kernel(1):
            s = tile.shared((m, n), "float32")
            rows = tile.shared((m,), "float32")
            most = tile.fragment((n,), "float32")
            tile.copy(X, s)
            tile.fill(rows, 1)
            tile.sum(s, rows, accumulate=True)
            tile.max(s[0 : m // 2, 0:n], most, 0)
            tile.copy(rows, Y)
            tile.copy(most, Z)

    return reduced_memory


def converted(source: str, target: str, n: int = 64) -> tirx.PrimFunc:
    """Y = X in another type, by a copy into shared memory; Z = Y back, in `parallel`."""

    @T.prim_func
    def converted(X: T.Buffer((64, n), source), Y: T.Buffer((64, n), target), Z: T.Buffer((64, n), source)):
        with tile.kernel(2) as i:
            s = tile.shared((32, n), target)
            x = tile.fragment((32, n), source)
            y = tile.fragment((32, n), target)
            tile.copy(X[i * 32, 0], s)
            tile.copy(s, y)
            with tile.parallel(32, n) as (r, c):
                x[r, c] = T.cast(y[r, c], source)
            tile.copy(y, Y[i * 32, 0])
            tile.copy(x, Z[i * 32, 0])

    return converted
