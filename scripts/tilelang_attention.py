"""Attention over caches and over lists of blocks, written in TileLang, which scripts/bench_gpu.py runs beside ours."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tilelang.language as T
from tilelang_written import F32, LOG2E, Problem, Written, of


def decode_attention(problem: Problem, *, rows: int, keys: int, stages: int, splits: int) -> Written:
    """A block takes the heads that share keys and a part of a sequence's; a second program combines the parts."""
    batch, heads, kv_heads, capacity, dim, dtype = of(problem, "batch", "heads", "kv_heads", "capacity", "dim")
    group, page = heads // kv_heads, problem.get("page")
    pages, entries = problem.get("pages", 1), capacity // (page or capacity)
    cache = (pages, kv_heads, page, dim) if page else (batch, kv_heads, capacity, dim)
    factor, part = LOG2E / math.sqrt(dim), capacity // splits
    assert part % keys == 0 and (page is None or page % keys == 0)

    @T.prim_func
    def attend(
        Q: T.Tensor((batch, heads, dim), dtype),
        K: T.Tensor(cache, dtype),
        V: T.Tensor(cache, dtype),
        table: T.Tensor((batch, entries), T.int32),
        lengths: T.Tensor((batch,), T.int32),
        sums: T.Tensor((splits, batch, heads, dim), T.float32),
        levels: T.Tensor((splits, batch, heads), T.float32),
    ):
        with T.Kernel(batch, kv_heads, splits, threads=128) as (b, g, z):
            q = T.alloc_shared((rows, dim), dtype)
            k = T.alloc_shared((keys, dim), dtype)
            v = T.alloc_shared((keys, dim), dtype)
            s = T.alloc_fragment((rows, keys), T.float32)
            p = T.alloc_fragment((rows, keys), dtype)
            o = T.alloc_fragment((rows, dim), T.float32)
            top = T.alloc_fragment((rows,), T.float32)
            before = T.alloc_fragment((rows,), T.float32)
            shrink = T.alloc_fragment((rows,), T.float32)
            row = T.alloc_fragment((rows,), T.float32)
            total = T.alloc_fragment((rows,), T.float32)
            for x, y in T.Parallel(rows, dim):
                q[x, y] = Q[b, g * group + T.min(x, group - 1), y]  # rows beyond the group are not stored
            T.clear(o)
            T.clear(total)
            T.fill(top, -1e30)
            length = lengths[b]
            for j in T.Pipelined(T.ceildiv(T.min(T.max(length - z * part, 0), part), keys), num_stages=stages):
                first = z * part + j * keys
                if page:
                    T.copy(K[table[b, first // page], g, first % page : first % page + keys, :], k)
                else:
                    T.copy(K[b, g, first : first + keys, :], k)
                T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                for x, y in T.Parallel(rows, keys):
                    s[x, y] = T.if_then_else(first + y < length, s[x, y], T.float32(-1e30))
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for x in T.Parallel(rows):
                    shrink[x] = T.exp2((before[x] - top[x]) * factor)
                for x, y in T.Parallel(rows, keys):
                    s[x, y] = T.exp2(s[x, y] * factor - top[x] * factor)
                T.reduce_sum(s, row, dim=1)
                for x in T.Parallel(rows):
                    total[x] = total[x] * shrink[x] + row[x]
                for x, y in T.Parallel(rows, dim):
                    o[x, y] = o[x, y] * shrink[x]
                T.copy(s, p)
                if page:
                    T.copy(V[table[b, first // page], g, first % page : first % page + keys, :], v)
                else:
                    T.copy(V[b, g, first : first + keys, :], v)
                T.gemm(p, v, o, policy=T.GemmWarpPolicy.FullRow)
            for x, y in T.Parallel(rows, dim):
                if x < group:
                    sums[z, b, g * group + x, y] = o[x, y] / T.max(total[x], 1e-30)
            for x in T.Parallel(rows):
                if x < group:
                    levels[z, b, g * group + x] = T.log2(T.max(total[x], 1e-30)) + top[x] * factor

    if page:
        return in_parts(attend, ("Q", "K", "V", "table", "lengths"), (splits, batch, heads, dim), dtype)
    unused = {"no table": ((batch, entries), "int32")}
    return in_parts(attend, ("Q", "K", "V", *unused, "lengths"), (splits, batch, heads, dim), dtype, unused)


def block_sparse_attention(problem: Problem, *, rows: int, keys: int, stages: int, threads: int) -> Written:
    """A block takes a tile of queries and loops over its list of blocks of keys; where it is causal each is masked."""
    batch, heads, kv_heads, queries, length, dim, dtype = of(
        problem, "batch", "heads", "kv_heads", "queries", "keys", "dim"
    )
    query_block, key_block, width, causal = (problem[name] for name in ("query_block", "key_block", "width", "causal"))
    factor, group = LOG2E / math.sqrt(dim), heads // kv_heads
    lists, parts = queries // query_block, key_block // keys
    assert query_block % rows == 0 and key_block % keys == 0 and queries == length
    assert (problem["mask_batch"], problem["mask_heads"]) == (batch, heads)

    @T.prim_func
    def attend(
        Q: T.Tensor((batch, heads, queries, dim), dtype),
        K: T.Tensor((batch, kv_heads, length, dim), dtype),
        V: T.Tensor((batch, kv_heads, length, dim), dtype),
        counts: T.Tensor((batch, heads, lists), T.int32),
        indices: T.Tensor((batch, heads, lists, width), T.int32),
        O: T.Tensor((batch, heads, queries, dim), dtype),
    ):
        with T.Kernel(queries // rows, heads, batch, threads=threads) as (i, h, b):
            q = T.alloc_shared((rows, dim), dtype)
            k = T.alloc_shared((keys, dim), dtype)
            v = T.alloc_shared((keys, dim), dtype)
            s = T.alloc_fragment((rows, keys), T.float32)
            p = T.alloc_fragment((rows, keys), dtype)
            o = T.alloc_fragment((rows, dim), T.float32)
            top = T.alloc_fragment((rows,), T.float32)
            before = T.alloc_fragment((rows,), T.float32)
            shrink = T.alloc_fragment((rows,), T.float32)
            row = T.alloc_fragment((rows,), T.float32)
            total = T.alloc_fragment((rows,), T.float32)
            T.copy(Q[b, h, i * rows : (i + 1) * rows, :], q)
            T.clear(o)
            T.clear(total)
            T.fill(top, -1e30)
            own = i * rows // query_block
            for j in T.Pipelined(counts[b, h, own] * parts, num_stages=stages):
                first = indices[b, h, own, j // parts] * key_block + j % parts * keys
                T.copy(K[b, h // group, first : first + keys, :], k)
                if causal:
                    for x, y in T.Parallel(rows, keys):
                        s[x, y] = T.if_then_else(i * rows + x >= first + y, T.float32(0), T.float32(-1e30))
                else:
                    T.clear(s)
                T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for x in T.Parallel(rows):
                    shrink[x] = T.exp2((before[x] - top[x]) * factor)
                for x, y in T.Parallel(rows, keys):
                    s[x, y] = T.exp2(s[x, y] * factor - top[x] * factor)
                T.reduce_sum(s, row, dim=1)
                for x in T.Parallel(rows):
                    total[x] = total[x] * shrink[x] + row[x]
                for x, y in T.Parallel(rows, dim):
                    o[x, y] = o[x, y] * shrink[x]
                T.copy(s, p)
                T.copy(V[b, h // group, first : first + keys, :], v)
                T.gemm(p, v, o, policy=T.GemmWarpPolicy.FullRow)
            for x, y in T.Parallel(rows, dim):
                o[x, y] = o[x, y] / T.max(total[x], 1e-30)
            T.copy(o, O[b, h, i * rows : (i + 1) * rows, :])

    return Written((attend,), (("Q", "K", "V", "counts", "indices", "O"),))


def mla_decode(problem: Problem, *, rows: int, keys: int, stages: int, splits: int, threads: int) -> Written:
    """Heads share a latent vector a key, whose first columns are values too; a tile of it serves both products."""
    batch, heads, capacity, dim, rope, dtype = of(problem, "batch", "heads", "capacity", "dim", "rope")
    factor, part = LOG2E / math.sqrt(dim + rope), capacity // splits
    assert part % keys == 0 and heads % rows == 0

    @T.prim_func
    def attend(
        Q: T.Tensor((batch, heads, dim + rope), dtype),
        KV: T.Tensor((batch, capacity, dim + rope), dtype),
        lengths: T.Tensor((batch,), T.int32),
        sums: T.Tensor((splits, batch, heads, dim), T.float32),
        levels: T.Tensor((splits, batch, heads), T.float32),
    ):
        with T.Kernel(heads // rows, batch, splits, threads=threads) as (h, b, z):
            q = T.alloc_shared((rows, dim), dtype)
            turned = T.alloc_shared((rows, rope), dtype)
            latent = T.alloc_shared((keys, dim), dtype)
            rotated = T.alloc_shared((keys, rope), dtype)
            p = T.alloc_shared((rows, keys), dtype)
            s = T.alloc_fragment((rows, keys), T.float32)
            o = T.alloc_fragment((rows, dim), T.float32)
            top = T.alloc_fragment((rows,), T.float32)
            before = T.alloc_fragment((rows,), T.float32)
            shrink = T.alloc_fragment((rows,), T.float32)
            row = T.alloc_fragment((rows,), T.float32)
            total = T.alloc_fragment((rows,), T.float32)
            T.copy(Q[b, h * rows : (h + 1) * rows, 0:dim], q)
            T.copy(Q[b, h * rows : (h + 1) * rows, dim : dim + rope], turned)
            T.clear(o)
            T.clear(total)
            T.fill(top, -1e30)
            length = lengths[b]
            for j in T.Pipelined(T.ceildiv(T.min(T.max(length - z * part, 0), part), keys), num_stages=stages):
                first = z * part + j * keys
                T.copy(KV[b, first : first + keys, 0:dim], latent)
                T.copy(KV[b, first : first + keys, dim : dim + rope], rotated)
                T.gemm(q, latent, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol, clear_accum=True)
                T.gemm(turned, rotated, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                for x, y in T.Parallel(rows, keys):
                    s[x, y] = T.if_then_else(first + y < length, s[x, y], T.float32(-1e30))
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for x in T.Parallel(rows):
                    shrink[x] = T.exp2((before[x] - top[x]) * factor)
                for x, y in T.Parallel(rows, keys):
                    s[x, y] = T.exp2(s[x, y] * factor - top[x] * factor)
                T.reduce_sum(s, row, dim=1)
                T.copy(s, p)
                for x in T.Parallel(rows):
                    total[x] = total[x] * shrink[x] + row[x]
                for x, y in T.Parallel(rows, dim):
                    o[x, y] = o[x, y] * shrink[x]
                T.gemm(p, latent, o, policy=T.GemmWarpPolicy.FullCol)
            for x, y in T.Parallel(rows, dim):
                sums[z, b, h * rows + x, y] = o[x, y] / T.max(total[x], 1e-30)
            for x in T.Parallel(rows):
                levels[z, b, h * rows + x] = T.log2(T.max(total[x], 1e-30)) + top[x] * factor

    return in_parts(attend, ("Q", "KV", "lengths"), (splits, batch, heads, dim), dtype)


def in_parts(
    attend: Any,
    given: Sequence[str],
    shape: tuple[int, int, int, int],
    dtype: Any,
    scratch: Mapping[str, tuple[Sequence[int], str]] = MappingProxyType({}),
) -> Written:
    """A program that leaves what parts of a sequence give in `sums` and `levels`, and one that combines them.

    Parts are weighted by the sum of their exponentials, whose logarithms `levels` has.
    """
    splits, batch, heads, dim = shape

    @T.prim_func
    def combine(
        sums: T.Tensor((splits, batch, heads, dim), T.float32),
        levels: T.Tensor((splits, batch, heads), T.float32),
        O: T.Tensor((batch, heads, dim), dtype),
    ):
        with T.Kernel(heads, batch, threads=128) as (h, b):
            o = T.alloc_fragment((dim,), T.float32)
            top = T.alloc_var(T.float32, init=-1e30)
            total = T.alloc_var(T.float32, init=0.0)
            T.clear(o)
            for z in T.serial(splits):
                top = T.max(top, levels[z, b, h])
            for z in T.serial(splits):
                total = total + T.exp2(levels[z, b, h] - top)
            for z in T.serial(splits):
                for y in T.Parallel(dim):
                    o[y] = o[y] + sums[z, b, h, y] * (T.exp2(levels[z, b, h] - top) / total)
            for y in T.Parallel(dim):
                O[b, h, y] = T.cast(o[y], dtype)

    parts = {"sums": (shape, F32), "levels": (shape[:3], F32)}
    return Written((attend, combine), ((*given, *parts), (*parts, "O")), {**parts, **scratch})
