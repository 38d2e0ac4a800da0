"""Attention over some blocks of keys alone: each block of queries has a list of those that it sees.

The lists are as FlexAttention's block masks have them (Dong et al., "Flex Attention", 2024): how many blocks, and
which, in rows of one width. Of a `torch.nn.attention.flex_attention.BlockMask` they are::

    seen = block_mask.to_dense()  # (batch or 1, heads or 1, rows, columns), whole blocks and cut ones
    counts = seen.sum(-1, dtype=torch.int32)
    indices = seen.argsort(dim=-1, descending=True, stable=True).int()

What is in a list is seen whole, but causally, in a window and up to the last key; a `mask_mod` that cuts blocks
otherwise is another mask.

Sources of such patterns: Child et al., "Generating Long Sequences with Sparse Transformers", 2019; Zaheer et al., "Big
Bird", 2020; Jiang et al., "MInference", 2024.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.attention import (
    attend,
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
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import LOG2E
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Knobs, Problem, Recipe, choose, only_used


def block_sparse_attention(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    dim: int,
    dtype: str,
    query_block: int,
    key_block: int,
    width: int,
    mask_batch: int = 1,
    mask_heads: int = 1,
    causal: bool = False,
    logsumexp: bool = False,
    scale: float | None = None,
    window: int | None = None,
    sinks: bool = False,
    *,
    block_m: int,
    block_n: int,
    stages: int = 0,
    blocks: int = 1,
) -> Recipe:
    """`attention` of each block of `query_block` queries over the blocks of `key_block` keys in its list alone.

    Q and O are (batch, heads, queries, dim), K and V (batch, kv_heads, keys, dim). `counts` (mask_batch, mask_heads,
    rows) of int32 says how many blocks of keys each of the rows of blocks of queries sees, ``rows = ceil(queries /
    query_block)``, and the first so many of `indices` (mask_batch, mask_heads, rows, width) of int32 which, in any
    order, each at most once. What stands behind them may be anything. mask_batch is batch or 1, for all sequences;
    mask_heads divides heads, and each serves heads / mask_heads neighbouring ones: 1, kv_heads and heads are usual.

    What is in a list is seen whole but for what its place rules out: keys behind the last; causal, those after the
    query's own (the last query's own is the last key), and with a `window` those before its last so many. A query that
    sees no key, since its list is empty or for its place, gives zeros, and -inf in L. `logsumexp`, `scale` and `sinks`
    are `attention`'s.

    Raises
    ------
    TileError
        kv_heads or mask_heads don't divide heads, mask_batch isn't 1 or batch, there are more queries than keys though
        they are causal, tiles don't divide blocks, or a scale or a window is none.
    """
    group, natural = group_of(heads, kv_heads), scale_of(dim, scale)
    check_window(window, causal)
    _check_mask(batch, heads, mask_batch, mask_heads, width)
    if causal and keys < queries:
        raise TileError(
            f"block_sparse_attention: causal needs as many keys as queries at least, got {keys} for {queries}"
        )
    if query_block % block_m or key_block % block_n:
        raise TileError(
            f"block_sparse_attention: tiles of {block_m} queries and {block_n} keys; valid are numbers that divide "
            f"query_block={query_block} and key_block={key_block}"
        )
    factor, share = LOG2E * natural, heads // mask_heads
    rows, tiles, parts = tile.cdiv(queries, query_block), query_block // block_m, key_block // block_n
    resident = blocks if blocks > 1 else None
    shift, cut = keys - queries, causal or keys % key_block > 0

    @T.prim_func
    def block_sparse_attention(
        Q: T.Buffer((batch, heads, queries, dim), dtype),
        K: T.Buffer((batch, kv_heads, keys, dim), dtype),
        V: T.Buffer((batch, kv_heads, keys, dim), dtype),
        counts: T.Buffer((mask_batch, mask_heads, rows), "int32"),
        indices: T.Buffer((mask_batch, mask_heads, rows, width), "int32"),
        S: T.Buffer((heads,), "float32"),
        O: T.Buffer((batch, heads, queries, dim), dtype),
        L: T.Buffer((batch, heads, queries), "float32"),
    ) -> None:
        with tile.kernel(batch, heads, tile.cdiv(queries, block_m), blocks_per_sm=resident) as (b, h, i):
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
            z, g = T.meta_var(0 if mask_batch == 1 else b), T.meta_var(h // share)
            own = T.meta_var(i * block_m + (shift + 1))  # keys that the tile's first query sees, if causal
            oldest = T.meta_var(own - (window or 0))
            everywhere = T.meta_var(T.min(own, keys) if causal else keys)
            count = counts[z, g, i // tiles]
            tile.copy(Q[b, h, i * block_m, 0], q)
            begin(o, top, total, S[h] if sinks else None, natural)
            for step in tile.pipelined(count * parts, stages=stages or None):
                first = indices[z, g, i // tiles, step // parts] * key_block + step % parts * block_n
                tile.copy(K[b, h // group, first, 0], k)
                tile.copy(V[b, h // group, first, 0], v)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                if cut:  # noqa: SIM102
                    if first + block_n > everywhere:
                        mask(s, block_m, block_n, first, own, keys, causal)
                if window is not None:  # noqa: SIM102
                    if first < oldest + (block_m - 1):
                        forget(s, block_m, block_n, first, oldest, True)
                soften(s, p, o, top, before, total, row, factor)
                tile.gemm(p, v, o)
            normalize(o, top, total, row, factor)
            tile.copy(o, O[b, h, i * block_m, 0])
            if logsumexp:
                tile.copy(total, L[b, h, i * block_m])

    inputs = ("Q", "K", "V", "counts", "indices", *(("S",) if sinks else ()))
    return Recipe((only_used(block_sparse_attention),), inputs, ("O", "L") if logsumexp else ("O",))


def _check_mask(batch: int, heads: int, mask_batch: int, mask_heads: int, width: int) -> None:
    """Refuse lists that aren't those of each sequence and head.

    Raises
    ------
    TileError
        They aren't, or have no room.
    """
    if mask_batch not in (1, batch) or mask_heads < 1 or heads % mask_heads or width < 1:
        raise TileError(
            f"block_sparse_attention: lists of mask_batch={mask_batch} sequences and mask_heads={mask_heads} heads, of "
            f"width={width} blocks; valid are 1 or {batch} sequences, a number of heads that divides {heads}, and 1 "
            f"block or more"
        )


def _knobs(target: Target, problem: Problem) -> Knobs:
    """Tiles that are blocks, or parts of them where blocks are larger than `attention`'s tiles.

    With wgmma, blocks of 64 queries are one warpgroup's, so a multiprocessor runs two at once; then, and for wide
    heads, tiles have 64 keys, so that registers hold what a deferred product takes.
    """
    machine, q, k = machine_of(target), problem["query_block"], problem["key_block"]
    if not isinstance(machine, Gpu):
        return {"block_m": _parts(q, 64, 32), "block_n": _parts(k, 128, 64)}
    if not machine.by_tensor_cores(problem["dtype"]):
        return {"block_m": _parts(q, 64, 32), "block_n": _parts(k, 32, 64), "stages": choose(0, 2)}
    if machine.tensor_cores != "wgmma":
        return {"block_m": _parts(q, 128, 64), "block_n": _parts(k, 64, 128), "stages": choose(0, 2, 3)}
    rows, dim = _parts(q, 128, 64), problem["dim"]
    columns = 128 if dim <= (64 if rows[0] <= 64 else 128) else 64
    blocks = 2 if rows[0] <= 64 and dim <= 128 else 1
    return {
        "block_m": rows,
        "block_n": _parts(k, columns, 64, 128),
        "stages": choose(0, 2, 3),
        "blocks": choose(blocks, 1, 2),
    }


def _parts(block: int, default: int, *others: int) -> tuple[int, ...]:
    """Candidates of a tile's extent: the largest part of a block up to the default, and the others that are parts."""
    largest = max(n for n in range(1, min(block, default) + 1) if block % n == 0)
    return choose(largest, *(n for n in others if block % n == 0))


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    """Rows of every number of blocks, none and all among them; what no row has says what is no block."""
    batch, heads, kv_heads, dim, dtype, width = (
        problem[name] for name in ("batch", "heads", "kv_heads", "dim", "dtype", "width")
    )
    queries, keys = problem["queries"], problem["keys"]
    rows, columns = tile.cdiv(queries, problem["query_block"]), tile.cdiv(keys, problem["key_block"])
    lead = (problem.get("mask_batch", 1), problem.get("mask_heads", 1), rows)
    most = min(width, columns)
    counts = rng.integers(0, most + 1, lead)
    counts.flat[0], counts.flat[-1] = 0, most
    order = rng.random((*lead, columns)).argsort(axis=-1)[..., :width]
    indices = np.full((*lead, width), -(1 << 20))
    listed = np.arange(order.shape[-1]) < counts[..., None]
    indices[..., : order.shape[-1]][listed] = order[listed]
    return {
        "Q": normal(rng, (batch, heads, queries, dim), dtype),
        "K": normal(rng, (batch, kv_heads, keys, dim), dtype),
        "V": normal(rng, (batch, kv_heads, keys, dim), dtype),
        "counts": counts.astype("int32"),
        "indices": indices.astype("int32"),
        **drawn_sinks(rng, problem),
    }


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    q, k, v = (arrays[name].astype("float64") for name in ("Q", "K", "V"))
    heads, options = problem["heads"], (problem.get("scale"), problem.get("window"))
    group, share = heads // problem["kv_heads"], heads // problem.get("mask_heads", 1)
    o, l = Expected(np.zeros_like(q), np.zeros_like(q)), Expected(np.zeros(q.shape[:3]), np.zeros(q.shape[:3]))
    for b, h in np.ndindex(q.shape[:2]):
        of = (b if problem.get("mask_batch", 1) > 1 else 0, h // share)
        seen = np.zeros((q.shape[2], k.shape[2]), bool)
        for i, (count, listed) in enumerate(zip(arrays["counts"][of], arrays["indices"][of])):
            for j in listed[:count]:
                rows, columns = (
                    slice(at * block, (at + 1) * block)
                    for at, block in ((i, problem["query_block"]), (j, problem["key_block"]))
                )
                seen[rows, columns] = True
        sink = arrays["S"][h] if "S" in arrays else None
        causal, dtype = problem.get("causal", False), problem["dtype"]
        own = attend(q[b, h], k[b, h // group], v[b, h // group], causal, dtype, *options, sink, seen)
        for whole, part in zip((*o, *l), (*own[0], *own[1])):
            whole[b, h] = part
    return {"O": o, "L": l} if problem.get("logsumexp", False) else {"O": o}


BLOCK_SPARSE_ATTENTION = Kernel(
    name="block_sparse_attention",
    summary="attention of each block of queries over the blocks of keys in its list",
    make=block_sparse_attention,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 200, "keys": 300, "dim": 128, "dtype": "bfloat16",
         "query_block": 128, "key_block": 128, "width": 3, "mask_heads": 2},
        {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 300, "keys": 310, "dim": 64, "dtype": "float16",
         "query_block": 128, "key_block": 64, "width": 6, "mask_heads": 2, "causal": True, "logsumexp": True},
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 130, "keys": 130, "dim": 32, "dtype": "float32",
         "query_block": 64, "key_block": 48, "width": 2, "mask_heads": 2, "logsumexp": True, "scale": 0.25},
        {"batch": 2, "heads": 2, "kv_heads": 2, "queries": 200, "keys": 260, "dim": 64, "dtype": "bfloat16",
         "query_block": 64, "key_block": 64, "width": 7, "mask_batch": 2, "causal": True, "window": 70, "sinks": True},
        {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 512, "keys": 512, "dim": 128, "dtype": "bfloat16",
         "query_block": 256, "key_block": 256, "width": 2},
    ),
)  # fmt: skip
