"""Attention of sequences of many lengths, packed one behind the other without padding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.tile.kernels.attention import (
    attend,
    attention_knobs,
    begin,
    check_window,
    drawn_sinks,
    forget,
    group_of,
    mask,
    normalize,
    scale_of,
    soften,
)
from tvm_axe.tile.kernels.data import normal, offsets
from tvm_axe.tile.kernels.epilogue import LOG2E
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Problem, Recipe, only_used


def packed_attention(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    longest: int,
    dim: int,
    dtype: str,
    causal: bool = False,
    window: int | None = None,
    sinks: bool = False,
    *,
    block_m: int,
    block_n: int,
    stages: int = 0,
) -> Recipe:
    """`attention` of sequences of many lengths, one behind the other without padding.

    Q and O are (queries, heads, dim), K and V (keys, kv_heads, dim); the rows of sequence b are q_starts[b] to
    q_starts[b + 1], and likewise k_starts'. None has more than `longest` queries; causal ones have as many keys as
    queries at least. All values of K and V must be finite. `window` and `sinks` are `attention`'s.

    Raises
    ------
    TileError
        kv_heads doesn't divide heads, or a window is less than 1 or of queries that aren't causal.
    """
    group, natural = group_of(heads, kv_heads), scale_of(dim, None)
    factor = LOG2E * natural
    check_window(window, causal)

    @T.prim_func
    def packed_attention(
        Q: T.Buffer((queries, heads, dim), dtype),
        K: T.Buffer((keys, kv_heads, dim), dtype),
        V: T.Buffer((keys, kv_heads, dim), dtype),
        q_starts: T.Buffer((batch + 1,), "int32"),
        k_starts: T.Buffer((batch + 1,), "int32"),
        S: T.Buffer((heads,), "float32"),
        O: T.Buffer((queries, heads, dim), dtype),
    ) -> None:
        with tile.kernel(batch, heads, tile.cdiv(longest, block_m)) as (b, h, i):
            q = tile.shared((block_m, dim), dtype)
            k = tile.shared((block_n, dim), dtype)
            v = tile.shared((block_n, dim), dtype)
            s = tile.fragment((block_m, block_n), "float32")
            p = tile.fragment((block_m, block_n), dtype)
            o = tile.fragment((block_m, dim), "float32")
            top = tile.fragment((block_m,), "float32")
            before = tile.fragment((block_m,), "float32")
            total = tile.fragment((block_m,), "float32")
            row = tile.fragment((block_m,), "float32")
            first = q_starts[b] + i * block_m
            stop = q_starts[b + 1]
            origin = k_starts[b]
            there = k_starts[b + 1] - origin
            if first < stop:
                own = there - (stop - first) + 1  # keys that the block's first query sees, if causal
                seen = T.min(own + (block_m - 1), there) if causal else there
                everywhere = T.min(own, there) if causal else there
                oldest = T.meta_var(own - (window or 0))  # that the block's first query sees
                passed = T.meta_var(0 if window is None else T.max(oldest, 0) // block_n)
                tile.copy(Q[first : first + block_m, h, 0:dim], q)
                begin(o, top, total, S[h] if sinks else None, natural)
                for j in tile.pipelined(passed, tile.cdiv(seen, block_n), stages=stages or None):
                    at = T.meta_var(origin + j * block_n)
                    tile.copy(K[at : at + block_n, h // group, 0:dim], k)
                    tile.copy(V[at : at + block_n, h // group, 0:dim], v)
                    tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                    if (j + 1) * block_n > everywhere:
                        mask(s, block_m, block_n, j * block_n, own, there, causal)
                    if window is not None:  # noqa: SIM102
                        if j * block_n < oldest + (block_m - 1):
                            forget(s, block_m, block_n, j * block_n, oldest, True)
                    soften(s, p, o, top, before, total, row, factor)
                    tile.gemm(p, v, o)
                normalize(o, top, total, row, factor)
                if first + block_m <= stop:
                    tile.copy(o, O[first : first + block_m, h, 0:dim])
                else:
                    with tile.parallel(block_m, dim) as (x, y):
                        if first + x < stop:
                            O[first + x, h, y] = T.cast(o[x, y], dtype)

    inputs = ("Q", "K", "V", "q_starts", "k_starts", *(("S",) if sinks else ()))
    return Recipe((only_used(packed_attention),), inputs, ("O",))


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    """Sequences of at most `longest` queries; causal ones have some keys more than queries, others any number."""
    batch, queries, keys, longest = (problem[name] for name in ("batch", "queries", "keys", "longest"))
    q_starts = offsets(rng, queries, batch)
    while np.diff(q_starts).max() > longest:
        q_starts = offsets(rng, queries, batch)
    k_starts = offsets(rng, keys, batch)
    if problem.get("causal", False):
        k_starts = q_starts + offsets(rng, keys - queries, batch)
    dim, dtype = problem["dim"], problem["dtype"]
    return {
        "Q": normal(rng, (queries, problem["heads"], dim), dtype),
        "K": normal(rng, (keys, problem["kv_heads"], dim), dtype),
        "V": normal(rng, (keys, problem["kv_heads"], dim), dtype),
        "q_starts": q_starts,
        "k_starts": k_starts.astype("int32"),
        **drawn_sinks(rng, problem),
    }


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    q, k, v = (arrays[name].astype("float64") for name in ("Q", "K", "V"))
    group, causal, dtype = problem["heads"] // problem["kv_heads"], problem.get("causal", False), problem["dtype"]
    value, slack = np.zeros_like(q), np.zeros_like(q)
    q_starts, k_starts = arrays["q_starts"], arrays["k_starts"]
    for first, stop, origin, end in zip(q_starts, q_starts[1:], k_starts, k_starts[1:]):
        for h in range(problem["heads"] if stop > first else 0):
            keys, values = k[origin:end, h // group], v[origin:end, h // group]
            sink = arrays["S"][h] if "S" in arrays else None
            own, _ = attend(q[first:stop, h], keys, values, causal, dtype, None, problem.get("window"), sink)
            value[first:stop, h], slack[first:stop, h] = own
    return {"O": Expected(value, slack)}


PACKED_ATTENTION = Kernel(
    name="packed_attention",
    summary="attention of sequences of many lengths, packed",
    make=packed_attention,
    parameters=attention_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"batch": 3, "heads": 2, "kv_heads": 1, "queries": 400, "keys": 500, "longest": 300, "dim": 64,
         "dtype": "bfloat16", "causal": True},
        {"batch": 4, "heads": 2, "kv_heads": 2, "queries": 333, "keys": 401, "longest": 250, "dim": 128,
         "dtype": "float16"},
        {"batch": 2, "heads": 1, "kv_heads": 1, "queries": 70, "keys": 90, "longest": 70, "dim": 64,
         "dtype": "float32", "causal": True},
        {"batch": 3, "heads": 2, "kv_heads": 1, "queries": 400, "keys": 500, "longest": 300, "dim": 64,
         "dtype": "bfloat16", "causal": True, "window": 70, "sinks": True},
    ),
)  # fmt: skip
