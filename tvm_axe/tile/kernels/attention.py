"""Attention forward, of sequences of one length, in one pass over the keys with an online softmax.

Source: Dao, "FlashAttention-2", 2023, algorithm 1; Shah et al., "FlashAttention-3", 2024, for what a GPU overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import LOG2E
from tvm_axe.tile.kernels.kernel import (
    ROUNDING,
    Expected,
    Fewer,
    Kernel,
    Knobs,
    Problem,
    Recipe,
    choose,
    counted,
    only_used,
    rounding_slack,
)

MASKED = -(2.0**100)
"""The score of a key that a query doesn't see. (With an infinity, queries that have seen none would subtract
infinities; with anything but a power of two, a multiply-add of it and `scale` would leave the product's rounding error,
which is enough for an infinite weight.)"""

UNSEEN = MASKED / 2
"""The largest score before a query has seen a key: far below every score and far above `MASKED`, whose weight is 0 so
from the beginning. It is a power of two for the same reason."""

_LONGER = 1.3
"""How much longer a block takes for 192 queries than for 128, of narrow heads."""

SCALES = (2.0**-20, 2.0**20)
"""The least and the largest scale of scores: `MASKED` by it is far from every score, and no infinity."""


@T.inline
def mask(s: Any, rows: int, columns: int, first_key: Any, first_seen: Any, keys: Any, causal: bool) -> None:
    """Mask, of keys from `first_key` on, those that aren't there; causal: and those after the row's own, which sees
    `first_seen` keys in the first row and one more in each."""
    with tile.parallel(rows, columns) as (x, y):
        if first_key + y >= (T.min(keys, first_seen + x) if causal else keys):
            s[x, y] = T.float32(MASKED)


@T.inline
def forget(s: Any, rows: int, columns: int, first_key: Any, oldest: Any, moves: bool) -> None:
    """Mask, of keys from `first_key` on, those before the row's oldest: `oldest` in the first row and, if it moves, one
    more in each."""
    with tile.parallel(rows, columns) as (x, y):
        if first_key + y < (oldest + x if moves else oldest):
            s[x, y] = T.float32(MASKED)


@T.inline
def begin(o: Any, top: Any, total: Any, sink: Any, scale: float) -> None:
    """Nothing seen; or a `sink`, the score of a key whose value is zero, unless it is None."""
    tile.fill(o, 0)
    if sink is None:
        tile.fill(total, 0)
        tile.fill(top, UNSEEN)
    else:
        tile.fill(total, 1)
        tile.fill(top, sink * T.float32(1 / scale))


@T.inline
def soften(s: Any, p: Any, o: Any, top: Any, before: Any, total: Any, row: Any, scale: float) -> None:
    """Scores `s` to weights `p`; what was summed before is scaled to the new largest score `top`."""
    tile.copy(top, before)
    tile.max(s, top, axis=1, accumulate=True)
    with tile.parallel(*s.shape) as (x, y):
        s[x, y] = T.exp2(s[x, y] * T.float32(scale) - top[x] * T.float32(scale))
    tile.sum(s, row, axis=1)
    with tile.parallel(s.shape[0]) as x:
        before[x] = T.exp2((before[x] - top[x]) * T.float32(scale))
        total[x] = total[x] * before[x] + row[x]
    tile.copy(s, p)
    with tile.parallel(*o.shape) as (x, y):
        o[x, y] = o[x, y] * before[x]


@T.inline
def normalize(o: Any, top: Any, total: Any, row: Any, scale: float) -> None:
    """Weighted sums `o` to averages, zero where there were no keys; `total` becomes the log of the scores' sum."""
    with tile.parallel(o.shape[0]) as x:
        row[x] = T.float32(1) / T.max(total[x], T.float32(1e-30))
        total[x] = T.log(total[x]) + top[x] * T.float32(scale / LOG2E)
    with tile.parallel(*o.shape) as (x, y):
        o[x, y] = o[x, y] * row[x]


def attention(
    batch: Any,
    heads: int,
    kv_heads: int,
    queries: Any,
    keys: Any,
    dim: int,
    dtype: str,
    causal: bool = False,
    logsumexp: bool = False,
    order: str = "hhhh",
    scale: float | None = None,
    window: int | None = None,
    sinks: bool = False,
    *,
    block_m: int,
    block_n: int,
    stages: int = 0,
) -> Recipe:
    """O = softmax(scale Q K^T) V for every sequence and head, of `dtype`, summed in float32; scale is 1 / sqrt(dim).

    Batch, queries and keys that aren't known are variables; queries and keys are one if they are alike. Causal asks for
    as many keys as queries at least, which of variables the caller knows.
    Q and O are (batch, heads, queries, dim), K and V (batch, kv_heads, keys, dim); each of the kv_heads serves
    heads / kv_heads neighbouring ones. Causal: the last query sees all keys, each before it one less. With `logsumexp`,
    L (batch, heads, queries) of float32 is the log of the sum of the scores' exponentials. `order` has a letter for
    each of Q, K, V and O: h if its heads come before its tokens as above, t if its tokens come first.

    With a `window`, a causal query sees that many keys at most, the last ones; blocks of keys that none of a block's
    queries sees are not loaded. With `sinks`, S (heads) of float32 has the score, as `scale` has made it, of one key
    more, which every query of the head sees and whose value is zero: it takes its weight from the others. S is finite.

    Raises
    ------
    TileError
        kv_heads doesn't divide heads, a causal query would see no key, `order` isn't such a word, `scale` is beyond
        what scores can be multiplied by, or a window is less than 1 or of queries that aren't causal.
    """
    group, natural = group_of(heads, kv_heads), scale_of(dim, scale)
    check_window(window, causal)
    known = isinstance(queries, int) and isinstance(keys, int)
    alike = not known and not isinstance(queries, int) and queries.same_as(keys)
    if causal and known and keys < queries:
        raise TileError(f"attention: causal needs as many keys as queries at least, got {keys} for {queries}")
    q_shape, k_shape, v_shape, o_shape = shapes(batch, heads, kv_heads, queries, keys, dim, order)
    q_first, k_first, v_first, o_first = (letter == "h" for letter in order)
    factor, cut = LOG2E * natural, _cut_blocks(queries, keys, block_m, block_n, causal) if known else None
    rows, stop = counted(queries), counted(keys)
    shift = 0 if alike else stop - rows

    @T.prim_func
    def attention(
        Q: T.Buffer(q_shape, dtype),
        K: T.Buffer(k_shape, dtype),
        V: T.Buffer(v_shape, dtype),
        S: T.Buffer((heads,), "float32"),
        O: T.Buffer(o_shape, dtype),
        L: T.Buffer((batch, heads, queries), "float32"),
    ) -> None:
        with tile.kernel(counted(batch), heads, tile.cdiv(rows, block_m)) as (b, h, i):
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
            seen = T.meta_var(T.min((i + 1) * block_m + shift, stop) if causal else stop)
            blocks = T.meta_var(tile.cdiv(seen, block_n))
            oldest = T.meta_var(i * block_m + (shift + 1 - (window or 0)))  # that the block's first query sees
            passed = T.meta_var(0 if window is None else T.max(oldest, 0) // block_n)  # blocks that none sees any more
            tile.copy(Q[b, h, i * block_m, 0] if q_first else Q[b, i * block_m : i * block_m + block_m, h, 0:dim], q)
            begin(o, top, total, S[h] if sinks else None, natural)
            # The blocks that the mask cuts come first: Hopper takes the first out of the loop, which then has no mask.
            for step in tile.pipelined(blocks - passed, stages=stages or None):
                first_key = T.meta_var((blocks - 1 - step) * block_n)
                g, stop_key = T.meta_var(h // group), T.meta_var(first_key + block_n)
                tile.copy(K[b, g, first_key, 0] if k_first else K[b, first_key:stop_key, g, 0:dim], k)
                tile.copy(V[b, g, first_key, 0] if v_first else V[b, first_key:stop_key, g, 0:dim], v)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                if cut is None:  # decided here; the next line at run time
                    if stop_key > (T.min(stop, i * block_m + shift + 1) if causal else stop):
                        mask(s, block_m, block_n, first_key, i * block_m + shift + 1, stop, causal)
                elif cut > 0:  # noqa: SIM102
                    if step < cut:
                        mask(s, block_m, block_n, first_key, i * block_m + shift + 1, keys, causal)
                if window is not None:  # noqa: SIM102
                    if first_key < oldest + (block_m - 1):
                        forget(s, block_m, block_n, first_key, oldest, True)
                soften(s, p, o, top, before, total, row, factor)
                tile.gemm(p, v, o)
            normalize(o, top, total, row, factor)
            tile.copy(o, O[b, h, i * block_m, 0] if o_first else O[b, i * block_m : i * block_m + block_m, h, 0:dim])
            if logsumexp:
                tile.copy(total, L[b, h, i * block_m])

    inputs = ("Q", "K", "V", "S") if sinks else ("Q", "K", "V")
    return Recipe((only_used(attention),), inputs, ("O", "L") if logsumexp else ("O",))


def check_window(window: int | None, causal: bool) -> None:
    """Refuse a window of no keys, and one of queries that see later keys.

    Raises
    ------
    TileError
        It is one of these.
    """
    if window is not None and (window < 1 or not causal):
        raise TileError(f"attention: window is 1 key or more of a causal query, got {window} with causal={causal}")


def shapes(
    batch: Any, heads: int, kv_heads: int, queries: Any, keys: Any, dim: int, order: str
) -> list[tuple[Any, Any, Any, int]]:
    """The shapes of Q, K, V and O in an order of their heads and tokens, as `attention` takes it.

    Raises
    ------
    TileError
        `order` isn't four letters of h and t.
    """
    if len(order) != 4 or set(order) - {"h", "t"}:
        raise TileError(f"attention: order is four letters, each h (heads first) or t (tokens first), got {order!r}")
    sides = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    return [(batch, *(side if letter == "h" else (side[1], side[0])), dim) for side, letter in zip(sides, order)]


def scale_of(dim: int, scale: float | None) -> float:
    """What scores are multiplied by: `scale`, or 1 / sqrt(dim) without one.

    Raises
    ------
    TileError
        The largest product would not be the largest score, or that of a masked key would leave float32.
    """
    if scale is None:
        return 1 / math.sqrt(dim)
    if not SCALES[0] <= scale <= SCALES[1]:
        raise TileError(f"attention: scale is from {SCALES[0]:g} to {SCALES[1]:g}, got {scale!r}")
    return scale


def _cut_blocks(queries: int, keys: int, block_m: int, block_n: int, causal: bool) -> int:
    """How many of the last blocks of keys that a block of queries sees are not seen by all of it, at most."""
    if not causal:
        return int(keys % block_n != 0)
    shift = keys - queries
    return max(
        tile.cdiv(min(first + block_m + shift, keys), block_n) - min(first + shift + 1, keys) // block_n
        for first in range(0, queries, block_m)
    )


def group_of(heads: int, kv_heads: int) -> int:
    """How many neighbouring heads each of the kv_heads serves.

    Raises
    ------
    TileError
        kv_heads doesn't divide heads.
    """
    if heads % kv_heads:
        raise TileError(f"attention: kv_heads divides heads, got {kv_heads} of {heads}")
    return heads // kv_heads


def attention_knobs(target: Target, problem: Problem) -> Knobs:
    """128 queries and 128 keys at once with wgmma, two warpgroups of 64 rows; what fits elsewhere.

    Heads of more than 128 elements have 64 keys at once: with 128 registers are spilled and no product is deferred. Of
    up to 64 elements there is room for a third warpgroup, where that is worth it: what threads compute takes longer
    than the products there, and is beside those of two others.
    On a CPU they are cut evenly, since what is beyond the last is computed as well, where their number is known.
    """
    machine = machine_of(target)
    if not isinstance(machine, Gpu):
        queries, keys = problem.get("longest", problem["queries"]), problem["keys"]
        long = not isinstance(keys, int) or keys > 256
        rows = _part(queries, 128, 4) if isinstance(queries, int) else 64
        at_once = 128 if problem.get("causal", False) or long else 256
        columns = _part(keys, at_once, 16) if isinstance(keys, int) else at_once
        return {"block_m": choose(rows, 32, 64), "block_n": choose(columns, 64, 256)}
    if not machine.by_tensor_cores(problem["dtype"]):
        return {"block_m": choose(64, 32), "block_n": choose(32, 64), "stages": choose(0, 2)}
    wgmma = machine.tensor_cores == "wgmma"
    three = wgmma and problem["dim"] <= 64 and _fills_three(problem, machine)
    columns = 128 if wgmma and problem["dim"] <= 128 else 64
    rows, stages = (192, 2) if three else (128, 0)
    columns = 96 if three and problem.get("causal", False) else columns
    return {
        "block_m": choose(rows, 64, 128, 192),
        "block_n": choose(columns, 64, 96, 128, 160),
        "stages": choose(stages, 0, 2, 3),
    }


def _fills_three(problem: Problem, machine: Gpu) -> bool:
    """Whether blocks of three warpgroups are done sooner, each of which takes longer: where there are many."""
    extents = [problem[name] for name in ("batch", "heads")] + [problem.get("longest", problem["queries"])]
    if not all(isinstance(extent, int) for extent in extents):
        return False
    batch, heads, queries = extents

    def rounds(rows: int) -> int:
        return math.ceil(batch * heads * math.ceil(queries / rows) / machine.processors)

    return rounds(192) * _LONGER < rounds(128)


def fewer_queries(target: Target, problem: Problem) -> Fewer | None:
    """On a CPU a token isn't to be computed as 64."""
    known = isinstance(problem["queries"], int) or isinstance(machine_of(target), Gpu)
    return None if known else Fewer("queries", 16, {"block_m": 8, "block_n": 64})


def _part(extent: int, most: int, step: int) -> int:
    """The extent cut evenly into the fewest parts of at most so much, up to a multiple of the step."""
    return tile.cdiv(tile.cdiv(extent, tile.cdiv(extent, most)), step) * step


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    batch, heads, kv_heads = problem["batch"], problem["heads"], problem["kv_heads"]
    order = problem.get("order", "hhhh")
    own = shapes(batch, heads, kv_heads, problem["queries"], problem["keys"], problem["dim"], order)
    arrays = {name: normal(rng, shape, problem["dtype"]) for name, shape in zip("QKV", own)}
    return arrays | drawn_sinks(rng, problem)


def drawn_sinks(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    """S of a problem with sinks: some weigh as much as all keys, some next to nothing."""
    heads = int(problem["heads"])
    return {"S": rng.uniform(-4, 8, heads).astype("float32")} if problem.get("sinks", False) else {}


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool,
    dtype: str,
    scale: float | None = None,
    window: int | None = None,
    sink: float | None = None,
    seen: np.ndarray | None = None,
) -> tuple[Expected, Expected]:
    """O and L of one head, (queries, dim) and (queries,), in float64; of keys that are `seen`, (queries, keys), alone.

    A score is a sum of dim products, off by `score` at most; a weight changes by as much, relatively, and its type
    rounds it once, or twice with the exponential; the average's slack is that of weights that far off.
    """
    scale = scale_of(q.shape[1], scale)
    scores = np.where(in_place(len(q), len(k), causal, window), q @ k.T * scale, -np.inf)
    if seen is not None:
        scores[~seen] = -np.inf
    if sink is not None:
        scores = np.concatenate([scores, np.full((len(q), 1), sink)], axis=1)
        v = np.concatenate([v, np.zeros_like(v, shape=(1, v.shape[1]))])
    top = scores.max(axis=1, keepdims=True, initial=-np.inf)
    nothing = np.isneginf(top)
    weights = np.exp(scores - np.where(nothing, 0.0, top))
    total = np.where(nothing, 1.0, weights.sum(axis=1, keepdims=True))  # of nothing zeros are the average
    exact = ROUNDING["float32"]
    # The sum of |q k| is at most |q| |k|; exp2's argument is of that size too, in float32.
    size = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(k, axis=1).max(initial=0.0) * scale + abs(sink or 0.0)
    score = 2 * exact * (q.shape[1] + 8) * size
    off = 2 * score + (2 * ROUNDING[dtype] if dtype != "float32" else 0.0) + exact * (4 * len(k) + 16)
    slack = rounding_slack(dtype, off, weights / total @ np.abs(v))
    l = np.log(total) + top
    l_slack = np.where(nothing, 0.0, off + 2 * exact * (1 + np.abs(l)))
    return Expected(weights / total @ v, slack), Expected(l[:, 0], l_slack[:, 0])


def in_place(queries: int, keys: int, causal: bool, window: int | None) -> np.ndarray:
    """Which keys each query sees by its place, (queries, keys) of truth values: all, or causally those of a window."""
    last, columns = np.arange(queries)[:, None] + (keys - queries), np.arange(keys)
    return (columns <= last) & (columns > last - (window or keys + 1)) if causal else np.ones((queries, keys), bool)


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    order = problem.get("order", "hhhh")
    q, k, v = (
        arrays[name].astype("float64") if letter == "h" else arrays[name].astype("float64").swapaxes(1, 2)
        for name, letter in zip("QKV", order)
    )
    group, causal = problem["heads"] // problem["kv_heads"], problem.get("causal", False)
    heads = [
        attend(
            q[b, h],
            k[b, h // group],
            v[b, h // group],
            causal,
            problem["dtype"],
            problem.get("scale"),
            problem.get("window"),
            arrays["S"][h] if "S" in arrays else None,
        )
        for b in range(problem["batch"])
        for h in range(problem["heads"])
    ]
    outputs = dict(zip("OL", zip(*heads)))
    if not problem.get("logsumexp", False):
        del outputs["L"]
    lead = (problem["batch"], problem["heads"])
    found = {name: _stacked(parts, lead) for name, parts in outputs.items()}
    if order[3] == "t":
        found["O"] = Expected(*(array.swapaxes(1, 2) for array in found["O"]))
    return found


def _stacked(parts: Sequence[Expected], lead: tuple[int, ...]) -> Expected:
    value, slack = (np.stack(arrays).reshape(*lead, *arrays[0].shape) for arrays in zip(*parts))
    return Expected(value, slack)


ATTENTION = Kernel(
    name="attention",
    summary="O = softmax(scale Q K^T) V, causal or not, with grouped heads, windows and sinks",
    make=attention,
    parameters=attention_knobs,
    inputs=_inputs,
    reference=_reference,
    fewer=fewer_queries,
    cases=(
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 200, "keys": 200, "dim": 64, "dtype": "float32",
         "causal": True},
        {"batch": 2, "heads": 2, "kv_heads": 2, "queries": 256, "keys": 384, "dim": 128, "dtype": "bfloat16"},
        {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 300, "keys": 301, "dim": 128, "dtype": "bfloat16",
         "causal": True, "logsumexp": True},
        {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 1, "keys": 33, "dim": 64, "dtype": "float16"},
        {"batch": 1, "heads": 3, "kv_heads": 1, "queries": 65, "keys": 1, "dim": 64, "dtype": "bfloat16",
         "logsumexp": True},
        {"batch": 2, "heads": 12, "kv_heads": 12, "queries": 128, "keys": 128, "dim": 32, "dtype": "float16",
         "order": "tttt"},
        {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 300, "keys": 300, "dim": 128, "dtype": "bfloat16",
         "causal": True, "order": "hhtt"},
        {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 70, "keys": 90, "dim": 64, "dtype": "float32",
         "order": "thtt"},
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 90, "keys": 130, "dim": 64, "dtype": "bfloat16",
         "causal": True, "scale": 0.25},
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 300, "keys": 450, "dim": 64, "dtype": "bfloat16",
         "causal": True, "window": 100, "logsumexp": True},
        {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 400, "keys": 400, "dim": 128, "dtype": "bfloat16",
         "causal": True, "window": 128, "sinks": True, "order": "tttt"},
        {"batch": 1, "heads": 2, "kv_heads": 2, "queries": 70, "keys": 70, "dim": 64, "dtype": "float32",
         "causal": True, "window": 1, "sinks": True, "logsumexp": True},
        {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 65, "keys": 130, "dim": 64, "dtype": "float16",
         "sinks": True, "scale": 0.25},
        {"batch": 3, "heads": 22, "kv_heads": 11, "queries": 384, "keys": 390, "dim": 64, "dtype": "bfloat16",
         "causal": True, "logsumexp": True},
        {"batch": 1, "heads": 66, "kv_heads": 66, "queries": 370, "keys": 150, "dim": 48, "dtype": "float16",
         "sinks": True},
    ),
)  # fmt: skip
