"""Gradients of attention: of keys and values in a pass over the queries, and of the queries in the same or in another.

In one pass the gradients of queries are added up in memory, in any order, where TMA adds whole tiles. In two passes,
the second of them over the keys, nothing is added atomically, so the same inputs give the same bits; the price is that
scores are computed in both. A pass goes over all that a tile sees or, with `Lists`, over the blocks in its list.

Source: Dao, "FlashAttention-2", 2023, algorithm 2, whose loop over keys is a program of its own in two passes.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels import gradients
from tvm_axe.tile.kernels.attention import check_window, group_of, scale_of, shapes
from tvm_axe.tile.kernels.block_sparse import Lists
from tvm_axe.tile.kernels.epilogue import LOG2E
from tvm_axe.tile.kernels.kernel import Kernel, Problem, Recipe, choose, only_used
from tvm_axe.tile.program import TileProgram

_AT_ONCE = {64: 128, 128: 64}
"""By columns of a head, how many queries at a time TMA adds the gradients of in one pass, beside 128 keys."""

_WIDE = 128
"""The most columns of a head whose gradients of 64 keys a warpgroup's registers hold."""

ROWS = 64
"""Rows of which a block sums the products of the output and its gradient."""

SPAN = 1024
"""Rows whose part in the gradient of a sink a block adds up at a time."""


def attention_backward(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    dim: int,
    dtype: str,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    sinks: bool = False,
    deterministic: bool = False,
    *,
    key_rows: int,
    key_step: int,
    query_rows: int,
    query_step: int,
    stages: int = 0,
    passes: int = 2,
    lists: Lists | None = None,
) -> Recipe:
    """The gradients dQ, dK and dV of a loss by Q, K and V of `attention`, from dO, that by O.

    All but L are of `dtype`: Q, O, dO and dQ are (batch, heads, queries, dim), K, V, dK and dV (batch, kv_heads, keys,
    dim). L (batch, heads, queries) of float32 is what `attention` gives with `logsumexp`. Sums are of float32. A block
    has `key_rows` keys and takes `key_step` queries at a time, or `query_rows` queries and `query_step` keys. With a
    `window` and with `sinks` they are those of `attention` with these; of S (heads) of float32 there is dS, too.

    With `lists` they are those of `block_sparse_attention`, whose `counts` and `indices` it takes, and the same blocks
    by columns: `query_counts` (lists.batch, lists.heads, columns) of int32 and `query_indices` (lists.batch,
    lists.heads, columns, lists.query_width) say which blocks of queries see each block of keys.

    With `passes` of 1 the gradients of queries are added up in float32 in memory, whose order isn't given: the last bit
    of dQ may differ from one call to the next, as the default of PyTorch has it. Where that may not be the problem says
    `deterministic`, and takes two.

    Raises
    ------
    TileError
        kv_heads doesn't divide heads, a causal query would see no key, `scale` is beyond what scores can be multiplied
        by, or a window is less than 1 or of queries that aren't causal. Or in one pass key_rows divides neither
        key_step nor dim, or gradients are to be deterministic.
    """
    group, natural = group_of(heads, kv_heads), scale_of(dim, scale)
    check_window(window, causal)
    if causal and keys < queries:
        raise TileError(f"attention_backward: causal needs as many keys as queries at least, got {keys} for {queries}")
    q_shape, k_shape, *_ = shapes(batch, heads, kv_heads, queries, keys, dim, "hhhh")
    # Rows of whole blocks, so that TMA takes them whatever the number of queries is.
    l_shape, factor, shift = (batch, heads, ROWS * tile.cdiv(queries, ROWS)), LOG2E * natural, keys - queries
    own = lists or Lists(queries, keys, 1, 1, 1, 1)
    row_lists = (own.batch, own.heads, tile.cdiv(queries, own.query_block))
    column_lists = (own.batch, own.heads, tile.cdiv(keys, own.key_block))
    share, behind = heads // own.heads, keys % (query_step if lists is None else own.key_block) != 0
    # In one pass the gradients of a step's queries are a product of the rows of all warpgroups, or else of its columns.
    at_once = passes == 1
    turned = at_once and key_step % key_rows != 0
    # Registers don't hold what more than one product takes, too. Sums of wide heads are of columns, whose warpgroups
    # read all of what they multiply.
    wide = dim > _WIDE
    weights = tile.shared if wide else tile.fragment
    held = tile.shared if wide or at_once else tile.fragment
    persistent = False if at_once else None  # which would take registers as well
    early = at_once and window is None  # beside what threads compute, where registers are left for it
    if at_once and deterministic:
        raise TileError("attention_backward: passes=1 adds in any order; valid for deterministic gradients is 2")
    if turned and dim % key_rows:
        raise TileError(
            f"attention_backward: key_rows={key_rows}; valid in one pass is a number that divides key_step={key_step} "
            f"or dim={dim}"
        )

    @T.prim_func
    def gradients_of_keys(
        Q: T.Buffer(q_shape, dtype),
        K: T.Buffer(k_shape, dtype),
        V: T.Buffer(k_shape, dtype),
        query_counts: T.Buffer(column_lists, "int32"),
        query_indices: T.Buffer((*column_lists, own.query_width), "int32"),
        dO: T.Buffer(q_shape, dtype),
        tops: T.Buffer(l_shape, "float32"),
        delta: T.Buffer(l_shape, "float32"),
        dK: T.Buffer(k_shape, dtype),
        dV: T.Buffer(k_shape, dtype),
        added: T.Buffer(q_shape, "float32"),
    ) -> None:
        with tile.kernel(batch, kv_heads, tile.cdiv(keys, key_rows), persistent=persistent) as (b, g, j):
            k = tile.shared((key_rows, dim), dtype)
            v = tile.shared((key_rows, dim), dtype)
            q = tile.shared((key_step, dim), dtype)
            do = tile.shared((key_step, dim), dtype)
            top = tile.shared((key_step,), "float32")
            d = tile.shared((key_step,), "float32")
            if at_once:
                dq = tile.fragment((dim, key_step) if turned else (key_step, dim), "float32")
            if turned:
                leaving = tile.shared((key_step, dim), "float32")
            s = tile.fragment((key_rows, key_step), "float32")
            ds = tile.fragment((key_rows, key_step), "float32")
            p = weights((key_rows, key_step), dtype)
            dp = held((key_rows, key_step), dtype)
            dk = tile.fragment((key_rows, dim), "float32")
            dv = tile.fragment((key_rows, dim), "float32")
            tile.copy(K[b, g, j * key_rows, 0], k)
            tile.copy(V[b, g, j * key_rows, 0], v)
            tile.fill(dk, 0)
            tile.fill(dv, 0)

            @T.inline
            def add(h: Any, first: Any) -> None:
                """What queries from `first` on of the head h add."""
                tile.copy(Q[b, h, first, 0], q)
                tile.copy(tops[b, h, first], top)
                tile.copy(dO[b, h, first, 0], do)
                tile.copy(delta[b, h, first], d)
                tile.gemm(k, q, s, transpose_b=True, accumulate=False)
                tile.gemm(v, do, ds, transpose_b=True, accumulate=False)
                with tile.parallel(key_rows, key_step) as (x, y):
                    s[x, y] = T.exp2(s[x, y] * T.float32(factor) - top[y])
                if causal:  # noqa: SIM102
                    if (j + 1) * key_rows > first + shift + 1:
                        with tile.parallel(key_rows, key_step) as (x, y):
                            if j * key_rows + x > first + y + shift:
                                s[x, y] = 0.0
                if window is not None:  # noqa: SIM102
                    if j * key_rows + window < first + shift + key_step:
                        with tile.parallel(key_rows, key_step) as (x, y):
                            if j * key_rows + x + window <= first + y + shift:
                                s[x, y] = 0.0
                with tile.parallel(key_rows, key_step) as (x, y):
                    ds[x, y] = s[x, y] * (ds[x, y] - d[y])
                tile.copy(s, p)
                if early:
                    tile.gemm(p, do, dv)
                tile.copy(ds, dp)
                if turned:
                    tile.gemm(k, dp, dq, transpose_a=True, accumulate=False)
                elif at_once:
                    tile.gemm(dp, k, dq, transpose_a=True, accumulate=False)
                if not early:
                    tile.gemm(p, do, dv)
                tile.gemm(dp, q, dk)
                if turned:
                    with tile.parallel(dim, key_step) as (x, y):
                        leaving[y, x] = dq[x, y]
                    tile.atomic_add(leaving, added[b, h, first, 0])
                elif at_once:
                    tile.atomic_add(dq, added[b, h, first, 0])

            for r in range(group):
                if lists is None:
                    begin = T.meta_var(T.max(j * key_rows - shift, 0) // key_step if causal else 0)
                    last = T.meta_var((j + 1) * key_rows + (window or 0) - 1 - shift)  # query that a window reaches
                    end = T.meta_var(queries if window is None else T.max(T.min(last, queries), 0))
                    for i in tile.pipelined(begin, tile.cdiv(end, key_step), stages=stages or None):
                        add(g * group + r, i * key_step)
                else:
                    z, m = T.meta_var(0 if own.batch == 1 else b), T.meta_var((g * group + r) // share)
                    column, parts = T.meta_var(j * key_rows // own.key_block), T.meta_var(own.query_block // key_step)
                    count = query_counts[z, m, column]
                    for i in tile.pipelined(count * parts, stages=stages or None):
                        row = query_indices[z, m, column, i // parts]
                        add(g * group + r, row * own.query_block + i % parts * key_step)
            with tile.parallel(key_rows, dim) as (x, y):
                dk[x, y] = dk[x, y] * T.float32(natural)
            tile.copy(dk, dK[b, g, j * key_rows, 0])
            tile.copy(dv, dV[b, g, j * key_rows, 0])

    @T.prim_func
    def gradients_of_queries(
        Q: T.Buffer(q_shape, dtype),
        K: T.Buffer(k_shape, dtype),
        V: T.Buffer(k_shape, dtype),
        counts: T.Buffer(row_lists, "int32"),
        indices: T.Buffer((*row_lists, own.width), "int32"),
        dO: T.Buffer(q_shape, dtype),
        tops: T.Buffer(l_shape, "float32"),
        delta: T.Buffer(l_shape, "float32"),
        dQ: T.Buffer(q_shape, dtype),
    ) -> None:
        with tile.kernel(batch, heads, tile.cdiv(queries, query_rows)) as (b, h, i):
            q = tile.shared((query_rows, dim), dtype)
            do = tile.shared((query_rows, dim), dtype)
            k = tile.shared((query_step, dim), dtype)
            v = tile.shared((query_step, dim), dtype)
            top = tile.fragment((query_rows,), "float32")
            d = tile.fragment((query_rows,), "float32")
            s = tile.fragment((query_rows, query_step), "float32")
            ds = tile.fragment((query_rows, query_step), "float32")
            dp = tile.fragment((query_rows, query_step), dtype)
            dq = tile.fragment((query_rows, dim), "float32")
            tile.copy(Q[b, h, i * query_rows, 0], q)
            tile.copy(dO[b, h, i * query_rows, 0], do)
            tile.copy(tops[b, h, i * query_rows], top)
            tile.copy(delta[b, h, i * query_rows], d)
            tile.fill(dq, 0)

            @T.inline
            def add(first: Any) -> None:
                """What keys from `first` on add."""
                tile.copy(K[b, h // group, first, 0], k)
                tile.copy(V[b, h // group, first, 0], v)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                tile.gemm(do, v, ds, transpose_b=True, accumulate=False)
                with tile.parallel(query_rows, query_step) as (x, y):
                    s[x, y] = T.exp2(s[x, y] * T.float32(factor) - top[x])
                with tile.parallel(query_rows, query_step) as (x, y):
                    ds[x, y] = ds[x, y] - d[x]
                if causal or behind:  # noqa: SIM102
                    if first + query_step > (T.min(keys, i * query_rows + shift + 1) if causal else keys):
                        with tile.parallel(query_rows, query_step) as (x, y):
                            if first + y >= (T.min(keys, i * query_rows + x + shift + 1) if causal else keys):
                                s[x, y] = 0.0
                if window is not None:  # noqa: SIM102
                    if first + window < (i + 1) * query_rows + shift:
                        with tile.parallel(query_rows, query_step) as (x, y):
                            if first + y + window <= i * query_rows + x + shift:
                                s[x, y] = 0.0
                with tile.parallel(query_rows, query_step) as (x, y):
                    ds[x, y] = s[x, y] * ds[x, y]
                tile.copy(ds, dp)
                tile.gemm(dp, k, dq)

            if lists is None:
                seen = T.meta_var(T.min((i + 1) * query_rows + shift, keys) if causal else keys)
                oldest = T.meta_var(0 if window is None else T.max(i * query_rows + shift + 1 - window, 0))
                for j in tile.pipelined(oldest // query_step, tile.cdiv(seen, query_step), stages=stages or None):
                    add(j * query_step)
            else:
                z, row = T.meta_var(0 if own.batch == 1 else b), T.meta_var(i * query_rows // own.query_block)
                parts = T.meta_var(own.key_block // query_step)
                count = counts[z, h // share, row]
                for j in tile.pipelined(count * parts, stages=stages or None):
                    column = indices[z, h // share, row, j // parts]
                    add(column * own.key_block + j % parts * query_step)
            with tile.parallel(query_rows, dim) as (x, y):
                dq[x, y] = dq[x, y] * T.float32(natural)
            tile.copy(dq, dQ[b, h, i * query_rows, 0])

    sums = _sums(batch, heads, queries, dim, dtype, l_shape, at_once)
    of_queries = _scaled(batch, heads, queries, dim, dtype, natural) if at_once else only_used(gradients_of_queries)
    both = (only_used(gradients_of_keys), of_queries)
    listed = () if lists is None else ("counts", "indices", "query_counts", "query_indices")
    if not sinks:
        return Recipe((sums, *both), ("Q", "K", "V", *listed, "O", "L", "dO"), ("dQ", "dK", "dV"))
    programs = (sums, *both, _of_sinks(batch, heads, queries, l_shape))
    return Recipe(programs, ("Q", "K", "V", *listed, "S", "O", "L", "dO"), ("dQ", "dK", "dV", "dS"))


def _of_sinks(batch: int, heads: int, queries: int, l_shape: tuple[int, int, int]) -> TileProgram:
    """The gradient of each head's sink, whose value is zero: what its weight in each row takes from the others."""

    @T.prim_func
    def gradients_of_sinks(
        S: T.Buffer((heads,), "float32"),
        tops: T.Buffer(l_shape, "float32"),
        delta: T.Buffer(l_shape, "float32"),
        dS: T.Buffer((heads,), "float32"),
    ) -> None:
        with tile.kernel(heads) as h:
            terms = tile.fragment((1, SPAN), "float32")
            total = tile.fragment((1,), "float32")
            tile.fill(terms, 0)
            for b in range(batch):
                for i in range(tile.cdiv(queries, SPAN)):
                    with tile.parallel(1, SPAN) as (x, y):
                        row = T.meta_var(T.min(i * SPAN + y, queries - 1))
                        weight = T.meta_var(T.exp2(S[h] * T.float32(LOG2E) - tops[b, h, row]))
                        terms[x, y] = T.if_then_else(
                            i * SPAN + y < queries, terms[x, y] - weight * delta[b, h, row], terms[x, y]
                        )
            tile.sum(terms, total, axis=1)
            tile.copy(total, dS[h])

    return tile.read(gradients_of_sinks)


def _scaled(batch: int, heads: int, queries: int, dim: int, dtype: str, factor: float) -> TileProgram:
    """The gradients of queries, of what all steps have added up."""

    @T.prim_func
    def gradients_of_queries(
        added: T.Buffer((batch, heads, queries, dim), "float32"), dQ: T.Buffer((batch, heads, queries, dim), dtype)
    ) -> None:
        with tile.kernel(batch, heads, tile.cdiv(queries, ROWS)) as (b, h, i):
            dq = tile.fragment((ROWS, dim), "float32")
            tile.copy(added[b, h, i * ROWS, 0], dq)
            with tile.parallel(ROWS, dim) as (x, y):
                dq[x, y] = dq[x, y] * T.float32(factor)
            tile.copy(dq, dQ[b, h, i * ROWS, 0])

    return tile.read(gradients_of_queries)


def _sums(
    batch: int, heads: int, queries: int, dim: int, dtype: str, l_shape: tuple[int, int, int], at_once: bool
) -> TileProgram:
    """Of each row the exponent of two that its weights are divided by, and delta, the sum of O dO.

    The latter is what the gradient of a row's weights loses since they sum to 1. Both are zero behind the last row. In
    one pass the gradients of queries begin as zeros here.
    """

    @T.prim_func
    def sums_of_rows(
        O: T.Buffer((batch, heads, queries, dim), dtype),
        dO: T.Buffer((batch, heads, queries, dim), dtype),
        L: T.Buffer((batch, heads, queries), "float32"),
        tops: T.Buffer(l_shape, "float32"),
        delta: T.Buffer(l_shape, "float32"),
        added: T.Buffer((batch, heads, queries, dim), "float32"),
    ) -> None:
        with tile.kernel(batch, heads, tile.cdiv(queries, ROWS)) as (b, h, i):
            o = tile.fragment((ROWS, dim), dtype)
            do = tile.fragment((ROWS, dim), dtype)
            product = tile.fragment((ROWS, dim), "float32")
            d = tile.fragment((ROWS,), "float32")
            tile.copy(O[b, h, i * ROWS, 0], o)
            tile.copy(dO[b, h, i * ROWS, 0], do)
            with tile.parallel(ROWS, dim) as (x, y):
                product[x, y] = T.cast(o[x, y], "float32") * T.cast(do[x, y], "float32")
            tile.sum(product, d)
            tile.copy(d, delta[b, h, i * ROWS])
            with tile.parallel(ROWS) as x:
                own = T.meta_var(L[b, h, T.min(i * ROWS + x, queries - 1)] * T.float32(LOG2E))
                tops[b, h, i * ROWS + x] = T.if_then_else(i * ROWS + x < queries, own, T.float32(0))
            if at_once:
                nothing = tile.fragment((ROWS, dim), "float32")
                tile.fill(nothing, 0)
                tile.copy(nothing, added[b, h, i * ROWS, 0])

    return only_used(sums_of_rows)


def knobs(target: Target, problem: Problem) -> dict[str, tuple[int, ...]]:
    """One pass where TMA adds what leaves it, unless gradients are to be deterministic; else two."""
    found, machine = knobs_of_passes(target, problem), machine_of(target)
    wgmma = isinstance(machine, Gpu) and machine.tensor_cores == "wgmma" and problem["dtype"] != "float32"
    if wgmma and problem["dim"] in _AT_ONCE and not problem.get("deterministic", False):
        found["key_step"] = choose(_AT_ONCE[problem["dim"]], *found["key_step"])
        return found | {"passes": choose(1, 2)}
    return found | {"passes": choose(2)}


def knobs_of_passes(target: Target, problem: Problem) -> dict[str, tuple[int, ...]]:
    """Of two passes: 128 rows, two warpgroups of 64, beside 64 at a time: both gradients of keys are in registers.

    Of wide heads they are in those of two warpgroups for 64 keys.
    """
    machine = machine_of(target)
    if not isinstance(machine, Gpu):
        return {"key_rows": choose(64), "key_step": choose(64), "query_rows": choose(64), "query_step": choose(64)}
    if problem["dtype"] == "float32":
        return {"key_rows": choose(32), "key_step": choose(32), "query_rows": choose(32), "query_step": choose(32)}
    wgmma, stages = machine.tensor_cores == "wgmma", {"stages": choose(0, 2, 3)}
    if problem["dim"] > _WIDE:
        step = choose(64 if wgmma else 32, 64, 32)
        rows = choose(64, 128) if wgmma else choose(64)
        return {"key_rows": choose(64), "key_step": step, "query_rows": rows, "query_step": step, **stages}
    narrow = problem["dim"] <= 64
    fewer = narrow and not wgmma and problem.get("window") is not None  # with 64, its mask spills registers
    return {
        "key_rows": choose(128, 64),
        "key_step": choose(64 if wgmma or not narrow else 32, 64, 32, 128),
        "query_rows": choose(128, 64),
        "query_step": choose(128 if narrow and wgmma else 32 if fewer else 64, 64, 32),
        **stages,
    }


ATTENTION_BACKWARD = Kernel(
    name="attention_backward",
    summary="dQ, dK and dV of attention, causal or not, with grouped heads, windows and sinks",
    make=attention_backward,
    parameters=knobs,
    inputs=gradients.inputs,
    reference=gradients.expected,
    cases=(
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 100, "keys": 100, "dim": 64, "dtype": "float32",
         "causal": True},
        {"batch": 2, "heads": 2, "kv_heads": 2, "queries": 256, "keys": 384, "dim": 128, "dtype": "bfloat16"},
        {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 300, "keys": 301, "dim": 128, "dtype": "bfloat16",
         "causal": True},
        {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 1, "keys": 33, "dim": 64, "dtype": "float16"},
        {"batch": 1, "heads": 3, "kv_heads": 1, "queries": 130, "keys": 257, "dim": 64, "dtype": "float16",
         "causal": True, "scale": 0.25},
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 140, "keys": 200, "dim": 64, "dtype": "bfloat16",
         "causal": True, "window": 62, "sinks": True},
        {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 200, "keys": 300, "dim": 128, "dtype": "bfloat16",
         "deterministic": True},
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 200, "keys": 300, "dim": 64, "dtype": "bfloat16"},
        {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 140, "keys": 200, "dim": 128, "dtype": "float16",
         "causal": True, "window": 62, "sinks": True},
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 140, "keys": 200, "dim": 256, "dtype": "bfloat16",
         "causal": True},
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 130, "keys": 140, "dim": 96, "dtype": "float16"},
    ),
)  # fmt: skip
