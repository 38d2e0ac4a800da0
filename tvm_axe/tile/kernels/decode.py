"""Attention of one new query a sequence over a long cache of keys and values: all is reading the cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.attention import MASKED, attend, group_of, mask, scale_of, soften
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import LOG2E
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Knobs, Problem, Recipe, choose, only_used

ROWS = 16
"""Rows of the smallest tile of queries that tensor cores take."""


def decode_attention(
    batch: int,
    heads: int,
    kv_heads: int,
    capacity: int,
    dim: int,
    dtype: str,
    whole: bool = False,
    scale: float | None = None,
    *,
    splits: int,
    block_n: int,
    stages: int = 0,
) -> Recipe:
    """O = softmax(scale Q K^T) V over the first lengths[b] of the keys of every sequence b; scale is 1 / sqrt(dim).

    Q and O are (batch, heads, dim), K and V (batch, kv_heads, capacity, dim). The heads that share keys are the rows of
    one tile; every sequence's keys are split evenly between `splits` blocks, whose results a second program combines.
    What lies behind a sequence's length must be finite. `whole`: all sequences have `capacity` keys, and there are no
    lengths.

    Raises
    ------
    TileError
        kv_heads doesn't divide heads, or `scale` is beyond what scores can be multiplied by.
    """
    group, factor = group_of(heads, kv_heads), LOG2E * scale_of(dim, scale)
    rows = -(-group // ROWS) * ROWS

    @T.prim_func
    def attend_pieces(
        Q: T.Buffer((batch, heads, dim), dtype),
        K: T.Buffer((batch, kv_heads, capacity, dim), dtype),
        V: T.Buffer((batch, kv_heads, capacity, dim), dtype),
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
            blocks = tile.cdiv(length, block_n)
            tile.copy(Q[b, g * group, 0], q)  # rows beyond the group are other heads', and not stored
            tile.fill(o, 0)
            tile.fill(total, 0)
            tile.fill(top, MASKED)
            for j in tile.pipelined(z * blocks // splits, (z + 1) * blocks // splits, stages=stages or None):
                tile.copy(K[b, g, j * block_n, 0], k)
                tile.copy(V[b, g, j * block_n, 0], v)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                if (j + 1) * block_n > length:
                    mask(s, rows, block_n, j * block_n, 0, length, False)
                soften(s, p, o, top, before, total, row, factor)
                tile.gemm(p, v, o)
            with tile.parallel(rows, dim) as (x, y):
                if x < group:
                    sums[z, b, g * group + x, y] = o[x, y]
            with tile.parallel(rows) as x:
                if x < group:
                    tops[z, b, g * group + x] = top[x]
                    totals[z, b, g * group + x] = total[x]

    @T.prim_func
    def combine_pieces(
        sums: T.Buffer((splits, batch, heads, dim), "float32"),
        tops: T.Buffer((splits, batch, heads), "float32"),
        totals: T.Buffer((splits, batch, heads), "float32"),
        O: T.Buffer((batch, heads, dim), dtype),
    ) -> None:
        with tile.kernel(batch, heads) as (b, h):
            o = tile.fragment((dim,), "float32")
            top = tile.local((1,), "float32")
            total = tile.local((1,), "float32")
            weight = tile.local((1,), "float32")
            top[0] = T.float32(MASKED)
            for z in range(splits):
                top[0] = T.max(top[0], tops[z, b, h])
            tile.fill(o, 0)
            total[0] = T.float32(0)
            for z in range(splits):
                weight[0] = T.exp2((tops[z, b, h] - top[0]) * T.float32(factor))
                total[0] = total[0] + totals[z, b, h] * weight[0]
                with tile.parallel(dim) as y:
                    o[y] = o[y] + sums[z, b, h, y] * weight[0]
            with tile.parallel(dim) as y:
                o[y] = o[y] / T.max(total[0], T.float32(1e-30))
            tile.copy(o, O[b, h, 0])

    inputs = ("Q", "K", "V") if whole else ("Q", "K", "V", "lengths")
    return Recipe((only_used(attend_pieces), tile.read(combine_pieces)), inputs, ("O",))


def _knobs(target: Target, problem: Problem) -> Knobs:
    """As many pieces as give every multiprocessor at most two blocks, each of two steps or more."""
    machine = machine_of(target)
    if not isinstance(machine, Gpu):
        return {"splits": choose(1, 2, 4, 8), "block_n": choose(128, 64, 256)}
    block_n = 32 if problem["dtype"] == "float32" else 128
    wanted = 2 * machine.processors // (problem["batch"] * problem["kv_heads"])
    most = tile.cdiv(problem["capacity"], 2 * block_n)
    return {
        "splits": choose(max(1, min(wanted, most)), 1, 2, 4, 8, 16, 32),
        "block_n": choose(block_n, 32, 64, 128),
        "stages": choose(0, 2, 3, 4),
    }


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    batch, heads, kv_heads, capacity, dim, dtype = (
        problem[name] for name in ("batch", "heads", "kv_heads", "capacity", "dim", "dtype")
    )
    lengths = rng.integers(1, capacity + 1, batch).astype("int32")
    lengths[-1] = capacity
    arrays = {
        "Q": normal(rng, (batch, heads, dim), dtype),
        "K": normal(rng, (batch, kv_heads, capacity, dim), dtype),
        "V": normal(rng, (batch, kv_heads, capacity, dim), dtype),
    }
    return arrays if problem.get("whole", False) else arrays | {"lengths": lengths}


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    q, k, v = (arrays[name].astype("float64") for name in ("Q", "K", "V"))
    group = problem["heads"] // problem["kv_heads"]
    value, slack = np.zeros_like(q), np.zeros_like(q)
    for b, length in enumerate(arrays.get("lengths", [problem["capacity"]] * problem["batch"])):
        for h in range(problem["heads"]):
            keys, values = k[b, h // group, :length], v[b, h // group, :length]
            (own, off), _ = attend(q[b, h : h + 1], keys, values, False, problem["dtype"], problem.get("scale"))
            value[b, h], slack[b, h] = own[0], off[0]
    return {"O": Expected(value, slack)}


DECODE_ATTENTION = Kernel(
    name="decode_attention",
    summary="attention of one query a sequence over a long cache",
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
    ),
)  # fmt: skip
