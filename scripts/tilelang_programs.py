"""Programs of TileLang that scripts/bench_gpu.py runs beside the package's kernels, and which knobs are tried of each.

They take the tensors of the package's kernels of the same name, by the same names and layouts. Each is written as
TileLang's documentation and examples write such programs: tiles, `T.gemm`, `T.Pipelined`; sequences are split between
blocks where they are long, and weights of four bits are decoded in registers into the left operand. What their host
code would do before a launch (which rows are whose) is done before anything is timed.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tilelang.language as T
from tilelang_attention import block_sparse_attention, decode_attention, mla_decode
from tilelang_written import F32, LOG2E, Knobs, Problem, Written, every, of

# ---- Weights of four bits ----------------------------------------------------------------------------------------


def w4a16_matmul(problem: Problem, *, rows: int, columns: int, depth: int, stages: int, splits: int) -> Written:
    """Weights are the left operand, decoded in registers; sums over parts of k are added by a second program."""
    m, n, k, group, dtype = of(problem, "m", "n", "k", "group")
    part = k // splits
    assert part % depth == 0 and group % depth == 0 and n % columns == 0
    target, kept = ((m, n), dtype) if splits == 1 else ((splits, m, n), T.float32)

    @T.prim_func
    def multiply(
        A: T.Tensor((m, k), dtype),
        B: T.Tensor((n, k // 2), T.uint8),
        scales: T.Tensor((k // group, n), dtype),
        C: T.Tensor(target, kept),
    ):
        with T.Kernel(n // columns, T.ceildiv(m, rows), splits, threads=128 if columns <= 64 else 256) as (x, y, z):
            a = T.alloc_shared((rows, depth), dtype)
            raw = T.alloc_shared((columns, depth // 2), T.uint8)
            codes = T.alloc_fragment((columns, depth // 2), T.uint8)
            step = T.alloc_shared((columns,), dtype)
            w = T.alloc_fragment((columns, depth), dtype)
            c = T.alloc_fragment((columns, rows), T.float32)
            T.use_swizzle(10)
            T.clear(c)
            for i in T.Pipelined(part // depth, num_stages=stages):
                first = z * part + i * depth
                T.copy(B[x * columns : (x + 1) * columns, first // 2 : first // 2 + depth // 2], raw)
                T.copy(A[y * rows : (y + 1) * rows, first : first + depth], a)
                T.copy(scales[first // group, x * columns : (x + 1) * columns], step)
                T.copy(raw, codes)
                for p, q in T.Parallel(columns, depth):
                    code = (codes[p, q // 2] >> T.cast((q % 2) * 4, T.uint8)) & T.uint8(15)
                    w[p, q] = (T.cast(code, dtype) - T.cast(8, dtype)) * step[p]
                T.gemm(w, a, c, transpose_B=True)
            for p, q in T.Parallel(columns, rows):
                if y * rows + q < m:
                    if splits == 1:
                        C[y * rows + q, x * columns + p] = T.cast(c[p, q], dtype)
                    else:
                        C[z, y * rows + q, x * columns + p] = c[p, q]

    given = ("A", "B", "scales")
    if splits == 1:
        return Written((multiply,), ((*given, "C"),))

    @T.prim_func
    def add(parts: T.Tensor((splits, m, n), T.float32), C: T.Tensor((m, n), dtype)):
        with T.Kernel(n // 256, m, threads=128) as (x, y):
            total = T.alloc_fragment((256,), T.float32)
            T.clear(total)
            for z in T.serial(splits):
                for p in T.Parallel(256):
                    total[p] = total[p] + parts[z, y, x * 256 + p]
            for p in T.Parallel(256):
                C[y, x * 256 + p] = T.cast(total[p], dtype)

    scratch = {"parts": ((splits, m, n), F32)}
    return Written((multiply, add), ((*given, "parts"), ("parts", "C")), scratch)


def w4a16_vector(problem: Problem, *, warps: int) -> Written:
    """One row of A: a warp a column of C, eight bytes of codes a lane at once, and no tensor cores."""
    m, n, k, group, dtype = of(problem, "m", "n", "k", "group")
    span = 32 * 16
    assert m == 1 and k % span == 0 and group % 16 == 0 and n % warps == 0

    @T.prim_func
    def multiply(
        A: T.Tensor((m, k), dtype),
        B: T.Tensor((n, k // 2), T.uint8),
        scales: T.Tensor((k // group, n), dtype),
        C: T.Tensor((m, n), dtype),
    ):
        with T.Kernel(n // warps, threads=(32, warps)) as x:
            lane, warp = T.get_thread_binding(0), T.get_thread_binding(1)
            codes = T.alloc_local((8,), T.uint8)
            a = T.alloc_local((16,), dtype)
            part = T.alloc_local((1,), T.float32)
            total = T.alloc_local((1,), T.float32)
            total[0] = T.float32(0)
            column = x * warps + warp
            for i in T.serial(k // span):
                first = i * span + lane * 16
                for v in T.vectorized(8):
                    codes[v] = B[column, first // 2 + v]
                for v in T.vectorized(8):
                    a[v] = A[0, first + v]
                for v in T.vectorized(8):
                    a[8 + v] = A[0, first + 8 + v]
                part[0] = T.float32(0)
                for v in T.unroll(16):
                    code = T.cast((codes[v // 2] >> T.cast((v % 2) * 4, T.uint8)) & T.uint8(15), T.float32)
                    part[0] = part[0] + T.cast(a[v], T.float32) * (code - T.float32(8))
                total[0] = total[0] + part[0] * T.cast(scales[first // group, column], T.float32)
            total[0] = T.warp_reduce_sum(total[0])
            if lane == 0:
                C[0, column] = T.cast(total[0], dtype)

    return Written((multiply,), (("A", "B", "scales", "C"),))


# ---- Chunks of tokens --------------------------------------------------------------------------------------------

CHUNKED = ("batch", "length", "heads", "groups", "dim", "state", "chunk")


def chunk_state(problem: Problem, *, columns: int, depth: int, stages: int, threads: int) -> Written:
    """A block a head and chunk: X, weighted and transposed in registers, times B."""
    batch, length, heads, groups, dim, state, chunk, dtype = of(problem, *CHUNKED)
    chunks, group = length // chunk, heads // groups

    @T.prim_func
    def sum_up(
        X: T.Tensor((batch, length, heads, dim), dtype),
        B: T.Tensor((batch, length, groups, state), dtype),
        dt: T.Tensor((batch, heads, chunks, chunk), T.float32),
        dA: T.Tensor((batch, heads, chunks, chunk), T.float32),
        states: T.Tensor((batch, chunks, heads, dim, state), dtype),
    ):
        with T.Kernel(state // columns, batch * chunks, heads, threads=threads) as (j, z, h):
            x = T.alloc_shared((depth, dim), dtype)
            b = T.alloc_shared((depth, columns), dtype)
            step = T.alloc_shared((depth,), T.float32)
            da = T.alloc_shared((depth,), T.float32)
            weight = T.alloc_fragment((depth,), T.float32)
            xt = T.alloc_fragment((dim, depth), dtype)
            s = T.alloc_fragment((dim, columns), T.float32)
            own, c = z // chunks, z % chunks
            last = dA[own, h, c, chunk - 1]
            T.clear(s)
            for k in T.Pipelined(chunk // depth, num_stages=stages):
                first = c * chunk + k * depth
                T.copy(X[own, first : first + depth, h, 0:dim], x)
                T.copy(B[own, first : first + depth, h // group, j * columns : (j + 1) * columns], b)
                T.copy(dt[own, h, c, k * depth : (k + 1) * depth], step)
                T.copy(dA[own, h, c, k * depth : (k + 1) * depth], da)
                for q in T.Parallel(depth):
                    weight[q] = T.exp2((last - da[q]) * LOG2E) * step[q]
                for p, q in T.Parallel(dim, depth):
                    xt[p, q] = T.cast(T.cast(x[q, p], T.float32) * weight[q], dtype)
                T.gemm(xt, b, s)
            T.copy(s, states[own, c, h, 0:dim, j * columns : (j + 1) * columns])

    return Written((sum_up,), (("X", "B", "dt", "dA", "states"),))


def chunk_scan(problem: Problem, *, rows: int, depth: int, stages: int, threads: int) -> Written:
    """A block some tokens of a head's chunk: what the state before gives, and what the tokens up to each do."""
    batch, length, heads, groups, dim, state, chunk, dtype = of(problem, *CHUNKED)
    chunks, group = length // chunk, heads // groups

    @T.prim_func
    def scan(
        CB: T.Tensor((batch, chunks, groups, chunk, chunk), dtype),
        X: T.Tensor((batch, length, heads, dim), dtype),
        dt: T.Tensor((batch, heads, chunks, chunk), T.float32),
        dA: T.Tensor((batch, heads, chunks, chunk), T.float32),
        C: T.Tensor((batch, length, groups, state), dtype),
        states: T.Tensor((batch, chunks, heads, dim, state), dtype),
        D: T.Tensor((heads,), T.float32),
        Y: T.Tensor((batch, length, heads, dim), dtype),
    ):
        with T.Kernel(heads, chunk // rows, batch * chunks, threads=threads) as (h, i, z):
            c = T.alloc_shared((rows, state), dtype)
            before = T.alloc_shared((dim, state), dtype)
            cb = T.alloc_shared((rows, depth), dtype)
            x = T.alloc_shared((depth, dim), dtype)
            own_x = T.alloc_shared((rows, dim), dtype)
            step = T.alloc_shared((depth,), T.float32)
            da = T.alloc_shared((depth,), T.float32)
            until = T.alloc_fragment((rows,), T.float32)
            w = T.alloc_fragment((rows, depth), dtype)
            y = T.alloc_fragment((rows, dim), T.float32)
            b, n, g = z // chunks, z % chunks, h // group
            row = n * chunk + i * rows
            T.copy(dA[b, h, n, i * rows : (i + 1) * rows], until)
            T.copy(C[b, row : row + rows, g, 0:state], c)
            T.copy(states[b, n, h, 0:dim, 0:state], before)
            T.gemm(c, before, y, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            for p, q in T.Parallel(rows, dim):
                y[p, q] = y[p, q] * T.exp2(until[p] * LOG2E)
            for k in T.Pipelined(T.ceildiv((i + 1) * rows, depth), num_stages=stages):
                first = n * chunk + k * depth
                T.copy(CB[b, n, g, i * rows : (i + 1) * rows, k * depth : (k + 1) * depth], cb)
                T.copy(X[b, first : first + depth, h, 0:dim], x)
                T.copy(dt[b, h, n, k * depth : (k + 1) * depth], step)
                T.copy(dA[b, h, n, k * depth : (k + 1) * depth], da)
                for p, q in T.Parallel(rows, depth):
                    seen = k * depth + q <= i * rows + p
                    decay = T.exp2(T.if_then_else(seen, (until[p] - da[q]) * LOG2E, T.float32(-1e30))) * step[q]
                    w[p, q] = T.cast(T.cast(cb[p, q], T.float32) * decay, dtype)
                T.gemm(w, x, y, policy=T.GemmWarpPolicy.FullRow)
            T.copy(X[b, row : row + rows, h, 0:dim], own_x)
            for p, q in T.Parallel(rows, dim):
                y[p, q] = y[p, q] + T.cast(own_x[p, q], T.float32) * D[h]
            T.copy(y, Y[b, row : row + rows, h, 0:dim])

    return Written((scan,), (("CB", "X", "dt", "dA", "C", "states", "D", "Y"),))


# ---- Products of which each group of rows has its own matrix -----------------------------------------------------


def grouped_matmul(problem: Problem, *, rows: int, columns: int, depth: int, stages: int) -> Written:
    """A block some rows of a group, and columns; with a gate, both halves of the matrix in one block."""
    count, groups, n, k, dtype = of(problem, "rows", "groups", "n", "k")
    gated = problem.get("gated", False)
    wide, blocks = (2 * n if gated else n), count // rows + groups
    assert n % columns == 0 and k % depth == 0 and problem.get("activation") in (("silu",) if gated else (None,))

    @T.prim_func
    def multiply(
        X: T.Tensor((count, k), dtype),
        W: T.Tensor((groups, wide, k), dtype),
        whose: T.Tensor((blocks,), T.int32),
        firsts: T.Tensor((blocks,), T.int32),
        stops: T.Tensor((blocks,), T.int32),
        Y: T.Tensor((count, n), dtype),
    ):
        with T.Kernel(n // columns, blocks, threads=128 if rows <= 64 else 256) as (j, i):
            x = T.alloc_shared((rows, depth), dtype)
            w = T.alloc_shared((columns, depth), dtype)
            y = T.alloc_fragment((rows, columns), T.float32)
            if gated:
                other = T.alloc_shared((columns, depth), dtype)
                up = T.alloc_fragment((rows, columns), T.float32)
                T.clear(up)
            T.clear(y)
            first, stop, own = firsts[i], stops[i], whose[i]
            if first < stop:
                for s in T.Pipelined(k // depth, num_stages=stages):
                    T.copy(X[first : first + rows, s * depth : (s + 1) * depth], x)
                    T.copy(W[own, j * columns : (j + 1) * columns, s * depth : (s + 1) * depth], w)
                    T.gemm(x, w, y, transpose_B=True)
                    if gated:
                        T.copy(W[own, n + j * columns : n + (j + 1) * columns, s * depth : (s + 1) * depth], other)
                        T.gemm(x, other, up, transpose_B=True)
                for p, q in T.Parallel(rows, columns):
                    if first + p < stop:
                        if gated:
                            gate = y[p, q] / (1.0 + T.exp2(-y[p, q] * LOG2E))
                            Y[first + p, j * columns + q] = T.cast(gate * up[p, q], dtype)
                        else:
                            Y[first + p, j * columns + q] = T.cast(y[p, q], dtype)

    def tables(made: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        bounds = made["starts"].tolist()
        each = [
            (own, at, stop)
            for own, (start, stop) in enumerate(itertools.pairwise(bounds))
            for at in range(start, stop, rows)
        ]
        each += [(0, 0, 0)] * (blocks - len(each))
        columns_ = (torch.tensor(column, dtype=torch.int32, device="cuda") for column in zip(*each))
        return dict(zip(("whose", "firsts", "stops"), columns_))

    return Written((multiply,), (("X", "W", "whose", "firsts", "stops", "Y"),), tables=tables)


# ---- Which knobs are tried ---------------------------------------------------------------------------------------


def candidates(kernel: str, problem: Problem) -> Iterator[tuple[Callable[..., Written], Knobs]]:
    """The programs of a kernel and the knobs that are tried of each; none where TileLang has no program here."""
    if kernel == "decode_attention":
        page = problem.get("page") or problem["capacity"]
        splits = (1, 2, 4) if problem["batch"] * problem["kv_heads"] >= 64 else (8, 16)
        for knobs in every(rows=(64,), keys=(64, 128), stages=(2, 3), splits=splits):
            if page % knobs["keys"] == 0:
                yield decode_attention, knobs
    elif kernel == "block_sparse_attention":
        blocks = {"rows": (64, 128), "keys": (64, 128)}
        for knobs in every(**blocks, stages=(1, 2), threads=(128, 256)):
            whole = problem["query_block"] % knobs["rows"] == 0 and problem["key_block"] % knobs["keys"] == 0
            if whole and knobs["threads"] == 2 * knobs["rows"]:
                yield block_sparse_attention, knobs
    elif kernel == "mla_decode":
        splits = (1, 2) if problem["batch"] * problem["heads"] >= 64 * 64 else (4, 8)
        rows = min(64, problem["heads"])
        for knobs in every(rows=(rows,), keys=(32, 64), stages=(1, 2), splits=splits, threads=(128, 256)):
            yield mla_decode, knobs
    elif kernel == "w4a16_matmul" and problem["m"] <= 64:
        if problem["m"] == 1:
            yield from ((w4a16_vector, knobs) for knobs in every(warps=(4, 8)))
        rows = 16 if problem["m"] <= 16 else 64
        for knobs in every(rows=(rows,), columns=(64, 128), depth=(128,), stages=(3,), splits=(1, 4)):
            yield w4a16_matmul, knobs
    elif kernel == "w4a16_matmul":
        for rows, columns, stages in ((128, 128, 3), (256, 128, 3), (128, 256, 2)):
            yield w4a16_matmul, {"rows": rows, "columns": columns, "depth": 64, "stages": stages, "splits": 1}
    elif kernel == "chunk_state":
        for knobs in every(columns=(64, 128), depth=(64,), stages=(2, 4), threads=(128,)):
            yield chunk_state, knobs
    elif kernel == "chunk_scan":
        for knobs in every(rows=(64, 128), depth=(32, 64), stages=(1, 2), threads=(128,)):
            yield chunk_scan, knobs
    elif kernel == "grouped_matmul":
        few = problem["rows"] < 64 * problem["groups"]
        for rows in (64,) if few else (64, 128):
            for knobs in every(rows=(rows,), columns=(64, 128), depth=(64,), stages=(3, 4)):
                if problem["n"] % knobs["columns"] == 0:
                    yield grouped_matmul, knobs
