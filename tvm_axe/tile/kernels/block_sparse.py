"""Attention over some blocks of keys alone: each block of queries has a list of those that it sees.

The lists are as FlexAttention's block masks have them (Dong et al., "Flex Attention", 2024): how many blocks, and
which, in rows of one width. Of a `torch.nn.attention.flex_attention.BlockMask` they are::

    seen = block_mask.to_dense()  # (batch or 1, heads or 1, rows, columns), whole blocks and cut ones
    counts = seen.sum(-1, dtype=torch.int32)
    indices = seen.argsort(dim=-1, descending=True, stable=True).int()

Their gradients take the same blocks by columns, too: which blocks of queries see each block of keys::

    query_counts = seen.sum(-2, dtype=torch.int32)
    query_indices = seen.mT.contiguous().argsort(dim=-1, descending=True, stable=True).int()

or of the lists alone, `lists_of_queries`.

What is in a list is seen whole, but causally, in a window and up to the last key; a `mask_mod` that cuts blocks
otherwise is another mask.

Sources of such patterns: Child et al., "Generating Long Sequences with Sparse Transformers", 2019; Zaheer et al., "Big
Bird", 2020; Jiang et al., "MInference", 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import InputError, TileError
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


@dataclass(frozen=True)
class Lists:
    """The blocks that see each other: of keys for each block of queries, and of queries for each block of keys.

    Attributes
    ----------
    query_block, key_block : int
        Queries and keys of a block.
    width, query_width : int
        The room in a list of blocks of keys, and in one of blocks of queries.
    batch, heads : int
        How many sequences and heads have lists of their own.
    """

    query_block: int
    key_block: int
    width: int
    query_width: int
    batch: int
    heads: int


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
    query_width: int | None = None,
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
    are `attention`'s. With a `query_width` the program takes `query_counts` and `query_indices`, too, and leaves them
    alone: they are what an operator keeps for `block_sparse_attention_backward`.

    Raises
    ------
    TileError
        kv_heads or mask_heads don't divide heads, mask_batch isn't 1 or batch, there are more queries than keys though
        they are causal, tiles don't divide blocks, or a scale or a window is none.
    """
    group, natural = group_of(heads, kv_heads), scale_of(dim, scale)
    check_window(window, causal)
    check_lists("block_sparse_attention", batch, heads, mask_batch, mask_heads, width)
    if causal and keys < queries:
        raise TileError(
            f"block_sparse_attention: causal needs as many keys as queries at least, got {keys} for {queries}"
        )
    if query_block % block_m or key_block % block_n:
        raise TileError(
            f"block_sparse_attention: tiles of {block_m} queries and {block_n} keys; valid are numbers that divide "
            f"query_block={query_block} and key_block={key_block}"
        )
    factor, share, columns = LOG2E * natural, heads // mask_heads, tile.cdiv(keys, key_block)
    rows, tiles, steps = tile.cdiv(queries, query_block), query_block // block_m, key_block // block_n
    resident = blocks if blocks > 1 else None
    shift, cut = keys - queries, causal or keys % key_block > 0

    @T.prim_func
    def block_sparse_attention(
        Q: T.Buffer((batch, heads, queries, dim), dtype),
        K: T.Buffer((batch, kv_heads, keys, dim), dtype),
        V: T.Buffer((batch, kv_heads, keys, dim), dtype),
        counts: T.Buffer((mask_batch, mask_heads, rows), "int32"),
        indices: T.Buffer((mask_batch, mask_heads, rows, width), "int32"),
        query_counts: T.Buffer((mask_batch, mask_heads, columns), "int32"),
        query_indices: T.Buffer((mask_batch, mask_heads, columns, query_width or 1), "int32"),
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
            for step in tile.pipelined(count * steps, stages=stages or None):
                first = indices[z, g, i // tiles, step // steps] * key_block + step % steps * block_n
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

    kept = () if query_width is None else ("query_counts", "query_indices")
    inputs = ("Q", "K", "V", "counts", "indices", *kept, *(("S",) if sinks else ()))
    return Recipe((only_used(block_sparse_attention, kept),), inputs, ("O", "L") if logsumexp else ("O",))


def check_lists(kernel: str, batch: int, heads: int, mask_batch: int, mask_heads: int, width: int) -> None:
    """Refuse lists that aren't those of each sequence and head.

    Raises
    ------
    TileError
        They aren't, or have no room.
    """
    if mask_batch not in (1, batch) or mask_heads < 1 or heads % mask_heads or width < 1:
        raise TileError(
            f"{kernel}: lists of mask_batch={mask_batch} sequences and mask_heads={mask_heads} heads, of "
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
        return {"block_m": parts(q, 64, 32), "block_n": parts(k, 128, 64)}
    if not machine.by_tensor_cores(problem["dtype"]):
        return {"block_m": parts(q, 64, 32), "block_n": parts(k, 32, 64), "stages": choose(0, 2)}
    if machine.tensor_cores != "wgmma":
        return {"block_m": parts(q, 128, 64), "block_n": parts(k, 64, 128), "stages": choose(0, 2, 3)}
    rows, dim = parts(q, 128, 64), problem["dim"]
    columns = 128 if dim <= (64 if rows[0] <= 64 else 128) else 64
    blocks = 2 if rows[0] <= 64 and dim <= 128 else 1
    return {
        "block_m": rows,
        "block_n": parts(k, columns, 64, 128),
        "stages": choose(0, 2, 3),
        "blocks": choose(blocks, 1, 2),
    }


def parts(block: int, default: int, *others: int) -> tuple[int, ...]:
    """Candidates of a tile's extent: the largest part of a block up to the default, and the others that are parts."""
    largest = max(n for n in range(1, min(block, default) + 1) if block % n == 0)
    return choose(largest, *(n for n in others if block % n == 0))


# ---- Data and reference ------------------------------------------------------------------------------------------


def inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
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
        **transposed(problem, counts, indices),
        **drawn_sinks(rng, problem),
    }


def transposed(problem: Problem, counts: np.ndarray, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The lists of queries of a problem that has a `query_width`."""
    width = problem.get("query_width")
    if width is None:
        return {}
    columns = tile.cdiv(problem["keys"], problem["key_block"])
    return dict(zip(("query_counts", "query_indices"), lists_of_queries(counts, indices, columns, width)))


def lists_of_queries(
    counts: Any, indices: Any, columns: int, query_width: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """By which blocks of queries each block of keys is seen, of the lists that `block_sparse_attention` takes.

    Parameters
    ----------
    counts, indices : array of int, (sequences, heads, rows) and (sequences, heads, rows, width)
        How many blocks of keys each block of queries sees, and which. What stands behind them may be anything.
    columns : int
        How many blocks of keys there are.
    query_width : int, optional
        The room in a list of queries; without it, for all rows.

    Returns
    -------
    query_counts, query_indices : array of int32, (sequences, heads, columns) and (sequences, heads, columns, room)
        What `block_sparse_attention_backward` takes, by rows in order; -1 behind them.

    Raises
    ------
    InputError
        The arrays' shapes don't belong together, a list has more blocks than room, a block that there isn't, or one
        twice, or a list of queries has no room.

    Examples
    --------
    >>> counts, indices = lists_of_queries([[[1, 2]]], [[[[0, 9], [2, 0]]]], columns=3)
    >>> counts.tolist(), indices.tolist()
    ([[[2, 0, 1]]], [[[[0, 1], [-1, -1], [1, -1]]]])
    """
    counts, indices = np.asarray(counts), np.asarray(indices)
    if counts.ndim != 3 or indices.shape[:-1] != counts.shape:
        raise InputError(
            f"lists_of_queries: counts has a number for each list in the last axis of indices, (sequences, heads, "
            f"rows) and (sequences, heads, rows, width); got {counts.shape} and {indices.shape}"
        )
    width, rows = indices.shape[-1], counts.shape[-1]
    _refuse((counts < 0) | (counts > width), counts, f"counts has 0 to {width} blocks, as indices has room for")
    own = np.arange(width) < counts[..., None]
    _refuse(own & ((indices < 0) | (indices >= columns)), indices, f"a block of keys is from 0 to {columns - 1}")
    times = np.zeros((*counts.shape, columns), int)
    at = np.nonzero(own)
    np.add.at(times, (*at[:3], indices[own]), 1)
    _refuse(times > 1, times, "a list has a block of keys at most once; number of times by block")
    seen = times.astype(bool).swapaxes(-1, -2)
    found, room = seen.sum(axis=-1, dtype="int32"), rows if query_width is None else query_width
    _refuse(found > room, found, f"query_width={room} is as many blocks of queries as see one of keys, or more")
    order = np.argsort(~seen, axis=-1, kind="stable")[..., :room]
    listed = np.full((*found.shape, room), -1, "int32")
    listed[..., : order.shape[-1]] = np.where(np.arange(order.shape[-1]) < found[..., None], order, -1)
    return found, listed


def _refuse(wrong: np.ndarray, values: np.ndarray, rule: str) -> None:
    """Raise with the rule and the first element that breaks it.

    Raises
    ------
    InputError
        One does.
    """
    if wrong.any():
        place = tuple(int(at[0]) for at in np.nonzero(wrong))
        raise InputError(f"lists_of_queries: {rule}; got {int(values[place])} at {place}")


def listed(problem: Problem, arrays: Mapping[str, np.ndarray], b: int, h: int) -> np.ndarray:
    """Which keys each query of a head sees by its list: (queries, keys) of truth values."""
    of = (b if problem.get("mask_batch", 1) > 1 else 0, h // (problem["heads"] // problem.get("mask_heads", 1)))
    seen = np.zeros((problem["queries"], problem["keys"]), bool)
    for i, (count, blocks) in enumerate(zip(arrays["counts"][of], arrays["indices"][of])):
        for j in blocks[:count]:
            rows, columns = (
                slice(at * block, (at + 1) * block)
                for at, block in ((i, problem["query_block"]), (j, problem["key_block"]))
            )
            seen[rows, columns] = True
    return seen


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    q, k, v = (arrays[name].astype("float64") for name in ("Q", "K", "V"))
    heads, options = problem["heads"], (problem.get("scale"), problem.get("window"))
    group = heads // problem["kv_heads"]
    o, l = Expected(np.zeros_like(q), np.zeros_like(q)), Expected(np.zeros(q.shape[:3]), np.zeros(q.shape[:3]))
    for b, h in np.ndindex(q.shape[:2]):
        sink = arrays["S"][h] if "S" in arrays else None
        causal, dtype = problem.get("causal", False), problem["dtype"]
        own = attend(
            q[b, h], k[b, h // group], v[b, h // group], causal, dtype, *options, sink, listed(problem, arrays, b, h)
        )
        for whole, part in zip((*o, *l), (*own[0], *own[1])):
            whole[b, h] = part
    return {"O": o, "L": l} if problem.get("logsumexp", False) else {"O": o}


BLOCK_SPARSE_ATTENTION = Kernel(
    name="block_sparse_attention",
    summary="attention of each block of queries over the blocks of keys in its list",
    make=block_sparse_attention,
    parameters=_knobs,
    inputs=inputs,
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
