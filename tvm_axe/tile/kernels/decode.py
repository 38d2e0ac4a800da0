"""Attention of one new query a sequence over a long cache of keys and values: all is reading the cache.

A cache may lie in pages, as Kwon et al. have it ("Efficient Memory Management for Large Language Model Serving with
PagedAttention", 2023): keys and values of a sequence are where a table says, page by page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.attention import (
    MASKED,
    attend,
    check_window,
    drawn_sinks,
    forget,
    group_of,
    mask,
    scale_of,
    soften,
)
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import LOG2E
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Knobs, Problem, Recipe, choose, only_used
from tvm_axe.tile.program import TileProgram

ROWS = 16
"""Rows of the smallest tile of queries that tensor cores take."""

MOST_PAGES = 16
"""The most pages that one tile of keys is loaded from, each by a copy of its own."""


def load_pages(
    cache: Any, table: Any, b: Any, g: Any, to: Any, first: Any, least: Any, most: Any, page: int, count: int
) -> None:
    """Load `count` pages of sequence b and head g, from its `first` on, into the rows of a tile.

    Of pages before `least` and after `most`, of which the table says nothing, these are loaded instead.
    """
    for at in range(count):
        entry = T.min(T.max(first + at, least), most)
        tile.copy(cache[table[b, entry], g, 0, 0], to[at * page : at * page + page, 0 : to.shape[1]])


def decode_attention(
    batch: int,
    heads: int,
    kv_heads: int,
    capacity: int,
    dim: int,
    dtype: str,
    whole: bool = False,
    scale: float | None = None,
    window: int | None = None,
    sinks: bool = False,
    page: int | None = None,
    pages: int | None = None,
    *,
    splits: int,
    block_n: int,
    stages: int = 0,
) -> Recipe:
    """O = softmax(scale Q K^T) V over the first lengths[b] of the keys of every sequence b; scale is 1 / sqrt(dim).

    Q and O are (batch, heads, dim), K and V (batch, kv_heads, capacity, dim). The heads that share keys are the rows of
    one tile; every sequence's keys are split evenly between `splits` blocks, whose results a second program combines.
    What lies behind a sequence's length must be finite. `whole`: all sequences have `capacity` keys, and there are no
    lengths. With a `window` a query sees the last so many keys, and no block of others is loaded; with `sinks`, S
    (heads) of float32 has the score of one key more, as in `attention`.

    With a `page`, K and V are (pages, kv_heads, page, dim), and `table` (batch, capacity / page) of int32 says which
    page has a sequence's keys from ``j * page`` on. It may say anything of pages that no query sees.

    Raises
    ------
    TileError
        kv_heads doesn't divide heads, `scale` is beyond what scores can be multiplied by, a window is less than 1, or
        pages don't divide `capacity` and a tile of keys, or tiles a page.
    """
    group, natural = group_of(heads, kv_heads), scale_of(dim, scale)
    check_window(window, True)
    factor, rows = LOG2E * natural, -(-group // ROWS) * ROWS
    k_shape: tuple[Any, ...] = (batch, kv_heads, capacity, dim)
    each = 0
    if page is not None:
        _check_pages(capacity, page, pages, block_n)
        k_shape, each = (pages, kv_heads, page, dim), block_n // page
    entries = capacity // (page or capacity)

    @T.prim_func
    def attend_pieces(
        Q: T.Buffer((batch, heads, dim), dtype),
        K: T.Buffer(k_shape, dtype),
        V: T.Buffer(k_shape, dtype),
        table: T.Buffer((batch, entries), "int32"),
        lengths: T.Buffer((batch,), "int32"),
        sums: T.Buffer((splits, batch, heads, dim), "float32"),
        tops: T.Buffer((splits, batch, heads), "float32"),
        totals: T.Buffer((splits, batch, heads), "float32"),
    ) -> None:
        with tile.kernel(batch, kv_heads, splits) as (b, g, z):
            q = tile.shared((rows, dim), dtype)
            k = tile.shared((block_n, dim), dtype)
            v = tile.shared((block_n, dim), dtype)
            p = tile.shared((rows, block_n), dtype)
            s = tile.fragment((rows, block_n), "float32")
            o = tile.fragment((rows, dim), "float32")
            top = tile.fragment((rows,), "float32")
            before = tile.fragment((rows,), "float32")
            total = tile.fragment((rows,), "float32")
            row = tile.fragment((rows,), "float32")
            length = capacity if whole else lengths[b]
            oldest = T.meta_var(0 if window is None else T.max(length - window, 0))  # that the query sees
            passed = T.meta_var(0 if window is None else oldest // block_n)
            blocks = tile.cdiv(length, block_n) - passed
            tile.copy(Q[b, g * group, 0], q)  # rows beyond the group are other heads', and not stored
            tile.fill(o, 0)
            tile.fill(total, 0)
            tile.fill(top, MASKED)
            start, stop = T.meta_var(passed + z * blocks // splits), T.meta_var(passed + (z + 1) * blocks // splits)
            for j in tile.pipelined(start, stop, stages=stages or None):
                if page is None:
                    tile.copy(K[b, g, j * block_n, 0], k)
                    tile.copy(V[b, g, j * block_n, 0], v)
                elif each > 1:
                    least, most = T.meta_var(oldest // page), T.meta_var((length - 1) // page)
                    load_pages(K, table, b, g, k, j * each, least, most, page, each)
                    load_pages(V, table, b, g, v, j * each, least, most, page, each)
                else:
                    tile.copy(K[table[b, j * block_n // page], g, j * block_n % page, 0], k)
                    tile.copy(V[table[b, j * block_n // page], g, j * block_n % page, 0], v)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                if (j + 1) * block_n > length:
                    mask(s, rows, block_n, j * block_n, 0, length, False)
                if window is not None:  # noqa: SIM102
                    if j * block_n < oldest:
                        forget(s, rows, block_n, j * block_n, oldest, False)
                soften(s, p, o, top, before, total, row, factor)
                tile.gemm(p, v, o)
            with tile.parallel(rows, dim) as (x, y):
                if x < group:
                    sums[z, b, g * group + x, y] = o[x, y]
            with tile.parallel(rows) as x:
                if x < group:
                    tops[z, b, g * group + x] = top[x]
                    totals[z, b, g * group + x] = total[x]

    given = {"table": page is not None, "lengths": not whole, "S": sinks}
    inputs = ("Q", "K", "V", *(name for name, is_given in given.items() if is_given))
    programs = (only_used(attend_pieces), combined(splits, batch, heads, dim, dtype, natural, sinks))
    return Recipe(programs, inputs, ("O",))


def combined(
    splits: int, batch: int, heads: int, dim: int, dtype: str, scale: float, sinks: bool = False
) -> TileProgram:
    """What pieces of sequences gave, combined: each counts as much as its scores' exponentials add up to.

    A piece has sums of values (splits, batch, heads, dim), the largest score before it was multiplied by `scale`, and
    the sum of exponentials; O is (batch, heads, dim). With `sinks`, S (heads) has the score of one key more.
    """
    factor = LOG2E * scale

    @T.prim_func
    def combine_pieces(
        sums: T.Buffer((splits, batch, heads, dim), "float32"),
        tops: T.Buffer((splits, batch, heads), "float32"),
        totals: T.Buffer((splits, batch, heads), "float32"),
        S: T.Buffer((heads,), "float32"),
        O: T.Buffer((batch, heads, dim), dtype),
    ) -> None:
        with tile.kernel(batch, heads) as (b, h):
            o = tile.fragment((dim,), "float32")
            top = tile.local((1,), "float32")
            total = tile.local((1,), "float32")
            weight = tile.local((1,), "float32")
            top[0] = S[h] * T.float32(1 / scale) if sinks else T.float32(MASKED)
            for z in range(splits):
                top[0] = T.max(top[0], tops[z, b, h])
            tile.fill(o, 0)
            total[0] = T.exp2((S[h] * T.float32(1 / scale) - top[0]) * T.float32(factor)) if sinks else T.float32(0)
            for z in range(splits):
                weight[0] = T.exp2((tops[z, b, h] - top[0]) * T.float32(factor))
                total[0] = total[0] + totals[z, b, h] * weight[0]
                with tile.parallel(dim) as y:
                    o[y] = o[y] + sums[z, b, h, y] * weight[0]
            with tile.parallel(dim) as y:
                o[y] = o[y] / T.max(total[0], T.float32(1e-30))
            tile.copy(o, O[b, h, 0])

    return only_used(combine_pieces)


def _check_pages(capacity: int, page: int, pages: int | None, block_n: int) -> None:
    """Refuse pages that don't go together with tiles of keys.

    Raises
    ------
    TileError
        They don't.
    """
    if pages is None or pages < 1 or page < 1 or capacity % page:
        raise TileError(
            f"decode_attention: pages={pages} of page={page} keys; valid are one or more, of a number of keys that "
            f"divides capacity, {capacity}"
        )
    if (block_n % page and page % block_n) or block_n > MOST_PAGES * page:
        raise TileError(
            f"decode_attention: block_n={block_n} keys in pages of {page}; valid is a number of keys that divides a "
            f"page, or that 1 to {MOST_PAGES} pages have"
        )


def _knobs(target: Target, problem: Problem) -> Knobs:
    """As many pieces as give every multiprocessor at most two blocks, each of two steps or more."""
    machine, page = machine_of(target), problem.get("page")
    if not isinstance(machine, Gpu):
        return {"splits": choose(1, 2, 4, 8), "block_n": _of_pages(page, 128, 64, 256)}
    blocks = _of_pages(page, 128 if machine.by_tensor_cores(problem["dtype"]) else 32, 32, 64, 128)
    wanted = 2 * machine.processors // (problem["batch"] * problem["kv_heads"])
    most = tile.cdiv(min(problem["capacity"], problem.get("window") or problem["capacity"]), 2 * blocks[0])
    return {
        "splits": choose(max(1, min(wanted, most)), 1, 2, 4, 8, 16, 32),
        "block_n": blocks,
        "stages": choose(0, 2, 3, 4),
    }


def _of_pages(page: int | None, default: int, *others: int) -> tuple[int, ...]:
    """Candidates of a tile's keys: those of the numbers that go together with pages, or 16 pages or less."""
    numbers = choose(default, *others)
    if page is None:
        return numbers
    fits = tuple(n for n in numbers if (n % page == 0 or page % n == 0) and n <= MOST_PAGES * page)
    return fits or (page * max(1, min(MOST_PAGES, default // page)),)


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    batch, heads, kv_heads, capacity, dim, dtype = (
        problem[name] for name in ("batch", "heads", "kv_heads", "capacity", "dim", "dtype")
    )
    lengths = rng.integers(1, capacity + 1, batch).astype("int32")
    lengths[-1] = capacity
    page, whole = problem.get("page"), problem.get("whole", False)
    shape = (batch, kv_heads, capacity, dim) if page is None else (problem["pages"], kv_heads, page, dim)
    arrays = {
        "Q": normal(rng, (batch, heads, dim), dtype),
        "K": normal(rng, shape, dtype),
        "V": normal(rng, shape, dtype),
    }
    if page is not None:
        # Sequences may share pages; of those that no query sees the table says what is no page.
        table = rng.integers(0, problem["pages"], (batch, capacity // page)).astype("int32")
        ends = np.full(batch, capacity) if whole else lengths
        oldest = np.maximum(ends - (problem.get("window") or capacity), 0)
        first = np.arange(capacity // page) * page
        unseen = (first >= ends[:, None]) | (first + page <= oldest[:, None])
        arrays["table"] = np.where(unseen, -(1 << 30), table).astype("int32")
    return arrays | ({} if whole else {"lengths": lengths}) | drawn_sinks(rng, problem)


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    q, k, v = (arrays[name].astype("float64") for name in ("Q", "K", "V"))
    group, page = problem["heads"] // problem["kv_heads"], problem.get("page")
    if page is not None:  # a cache as it is without pages; what no query sees is some page
        k, v = (np.concatenate([*pages[arrays["table"].clip(0)].swapaxes(0, 1)], axis=-2) for pages in (k, v))
    value, slack = np.zeros_like(q), np.zeros_like(q)
    for b, length in enumerate(arrays.get("lengths", [problem["capacity"]] * problem["batch"])):
        for h in range(problem["heads"]):
            keys, values = k[b, h // group, :length], v[b, h // group, :length]
            sink, options = arrays["S"][h] if "S" in arrays else None, (problem.get("scale"), problem.get("window"))
            (own, off), _ = attend(q[b, h : h + 1], keys, values, True, problem["dtype"], *options, sink)
            value[b, h], slack[b, h] = own[0], off[0]
    return {"O": Expected(value, slack)}


DECODE_ATTENTION = Kernel(
    name="decode_attention",
    summary="attention of one query a sequence over a long cache, in pages or not, with windows and sinks",
    make=decode_attention,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"batch": 2, "heads": 8, "kv_heads": 2, "capacity": 1000, "dim": 128, "dtype": "bfloat16"},
        {"batch": 1, "heads": 4, "kv_heads": 4, "capacity": 130, "dim": 64, "dtype": "float16"},
        {"batch": 3, "heads": 2, "kv_heads": 1, "capacity": 65, "dim": 64, "dtype": "float32"},
        {"batch": 2, "heads": 8, "kv_heads": 2, "capacity": 1000, "dim": 128, "dtype": "bfloat16", "whole": True},
        {"batch": 1, "heads": 4, "kv_heads": 2, "capacity": 200, "dim": 64, "dtype": "float16", "whole": True,
         "scale": 0.0625},
        {"batch": 3, "heads": 8, "kv_heads": 2, "capacity": 1000, "dim": 128, "dtype": "bfloat16", "window": 200,
         "sinks": True},
        {"batch": 3, "heads": 8, "kv_heads": 2, "capacity": 960, "dim": 128, "dtype": "bfloat16", "page": 16,
         "pages": 70},
        {"batch": 2, "heads": 4, "kv_heads": 4, "capacity": 512, "dim": 64, "dtype": "float16", "page": 256,
         "pages": 5, "window": 100},
        {"batch": 3, "heads": 2, "kv_heads": 1, "capacity": 480, "dim": 64, "dtype": "float32", "page": 48,
         "pages": 12, "window": 130, "sinks": True},
    ),
)  # fmt: skip
