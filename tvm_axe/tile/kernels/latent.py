"""Attention of one new query a sequence over latent vectors, which are keys of all heads, and values in a part.

Source: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", 2024, section
2.1, where what heads have of their own is in the query already (multi-head latent attention).
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
from tvm_axe.tile.kernels.attention import MASKED, attend, mask, scale_of, soften
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.decode import ROWS, combined
from tvm_axe.tile.kernels.epilogue import LOG2E
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Knobs, Problem, Recipe, choose, only_used

WIDEST = 256
"""Columns of the output that the registers of a warpgroup hold, or of a block where warps don't share columns."""

_APART = 3072
"""Bytes of shared memory that barriers and what warps tell each other take."""


def mla_decode(
    batch: int,
    heads: int,
    capacity: int,
    dim: int,
    rope: int,
    dtype: str,
    scale: float | None = None,
    *,
    rows: int,
    parts: int,
    splits: int,
    block_n: int,
    stages: int = 0,
) -> Recipe:
    """O = softmax(scale Q KV^T) KV[:, :dim] over the first lengths[b] latent vectors of every sequence b.

    Q is (batch, heads, dim + rope), KV (batch, capacity, dim + rope) and O (batch, heads, dim), all of `dtype`; scale
    is 1 / sqrt(dim + rope). What lies behind a sequence's length must be finite.

    `rows` heads are a tile. A block gives ``dim / parts`` columns of the output, for which each computes the scores, of
    one of `splits` pieces of a sequence; a second program combines the pieces.

    Raises
    ------
    TileError
        `scale` is beyond what scores can be multiplied by, or `parts` doesn't divide `dim`.
    """
    if parts < 1 or dim % parts:
        raise TileError(f"mla_decode: parts divides dim, got {parts} of {dim}")
    natural, part, tiles = scale_of(dim + rope, scale), dim // parts, tile.cdiv(heads, rows)
    factor = LOG2E * natural

    @T.prim_func
    def attend_latents(
        Q: T.Buffer((batch, heads, dim + rope), dtype),
        KV: T.Buffer((batch, capacity, dim + rope), dtype),
        lengths: T.Buffer((batch,), "int32"),
        sums: T.Buffer((splits, batch, heads, dim), "float32"),
        tops: T.Buffer((splits, batch, heads), "float32"),
        totals: T.Buffer((splits, batch, heads), "float32"),
    ) -> None:
        with tile.kernel(batch, tiles * parts, splits) as (b, i, z):
            q = tile.shared((rows, dim), dtype)
            turned = tile.shared((rows, rope), dtype)
            latent = tile.shared((block_n, dim), dtype)
            place = tile.shared((block_n, rope), dtype)
            if parts > 1:
                v = tile.shared((block_n, part), dtype)
            p = tile.shared((rows, block_n), dtype)
            s = tile.fragment((rows, block_n), "float32")
            o = tile.fragment((rows, part), "float32")
            top = tile.fragment((rows,), "float32")
            before = tile.fragment((rows,), "float32")
            total = tile.fragment((rows,), "float32")
            row = tile.fragment((rows,), "float32")
            h, c = T.meta_var(i // parts * rows), T.meta_var(i % parts * part)  # the first head, the first column
            length = lengths[b]
            blocks = tile.cdiv(length, block_n)
            tile.copy(Q[b, h, 0], q)
            tile.copy(Q[b, h : h + rows, dim : dim + rope], turned)
            tile.fill(o, 0)
            tile.fill(total, 0)
            tile.fill(top, MASKED)
            for j in tile.pipelined(z * blocks // splits, (z + 1) * blocks // splits, stages=stages or None):
                tile.copy(KV[b, j * block_n, 0], latent)
                tile.copy(KV[b, j * block_n : j * block_n + block_n, dim : dim + rope], place)
                if parts > 1:
                    tile.copy(KV[b, j * block_n : j * block_n + block_n, c : c + part], v)
                tile.gemm(q, latent, s, transpose_b=True, accumulate=False)
                tile.gemm(turned, place, s, transpose_b=True)
                if (j + 1) * block_n > length:
                    mask(s, rows, block_n, j * block_n, 0, length, False)
                soften(s, p, o, top, before, total, row, factor)
                tile.gemm(p, v if parts > 1 else latent, o)
            with tile.parallel(rows, part) as (x, y):
                if h + x < heads:
                    sums[z, b, h + x, c + y] = o[x, y]
            if i % parts == 0:
                with tile.parallel(rows) as x:
                    if h + x < heads:
                        tops[z, b, h + x] = top[x]
                        totals[z, b, h + x] = total[x]

    programs = (only_used(attend_latents), combined(splits, batch, heads, dim, dtype, natural))
    return Recipe(programs, ("Q", "KV", "lengths"), ("O",))


def _knobs(target: Target, problem: Problem) -> Knobs:
    """Tiles of 64 heads by warpgroups, of fewer heads too; of keys as many as leave room for two slots of them.

    Two warpgroups share the columns, so that a block reads what 64 heads share once, and computes their scores once.
    Warps that share the rows of one product share the columns of the other with tiles of 16 heads alone.
    """
    machine = machine_of(target)
    if not isinstance(machine, Gpu):
        return {"rows": choose(16, 64), "parts": choose(1), "splits": choose(1, 2, 4), "block_n": choose(64, 128)}
    dim, width = problem["dim"], 4 if problem["dtype"] == "float32" else 2
    by_warpgroups = machine.tensor_cores == "wgmma" and machine.by_tensor_cores(problem["dtype"])
    rows = 64 if by_warpgroups else ROWS
    widest = WIDEST * (2 if rows == 64 else 1)
    parts = next(n for n in range(tile.cdiv(dim, widest), dim + 1) if dim % n == 0)
    whole = dim + problem["rope"]
    each = whole + (dim // parts if parts > 1 else 0)
    fits = [n for n in (64, 32) if width * (rows * (whole + n) + 2 * n * each) + _APART <= machine.shared_bytes]
    block_n = next(iter(fits), 16)
    wanted = machine.processors // (problem["batch"] * tile.cdiv(problem["heads"], rows) * parts)
    most = tile.cdiv(problem["capacity"], 2 * block_n)
    return {
        "rows": choose(rows, ROWS, 64),
        "parts": choose(parts, 1, 2, 4),
        "splits": choose(max(1, min(wanted, most)), 1, 2, 4, 8, 16),
        "block_n": choose(block_n, 16, 32, 64),
        "stages": choose(0, 1, 2, 3),
    }


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    batch, heads, capacity, dtype = (problem[name] for name in ("batch", "heads", "capacity", "dtype"))
    whole = problem["dim"] + problem["rope"]
    lengths = rng.integers(1, capacity + 1, batch).astype("int32")
    lengths[-1] = capacity
    q, kv = normal(rng, (batch, heads, whole), dtype), normal(rng, (batch, capacity, whole), dtype)
    return {"Q": q, "KV": kv, "lengths": lengths}


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    q, kv = (arrays[name].astype("float64") for name in ("Q", "KV"))
    value, slack = (np.zeros((*q.shape[:2], problem["dim"])) for _ in range(2))
    for b, length in enumerate(arrays["lengths"]):
        keys: Any = kv[b, :length]
        values = keys[:, : problem["dim"]]
        (value[b], slack[b]), _ = attend(q[b], keys, values, False, problem["dtype"], problem.get("scale"))
    return {"O": Expected(value, slack)}


MLA_DECODE = Kernel(
    name="mla_decode",
    summary="attention of one query a sequence over latent vectors that all heads share, as DeepSeek's models have it",
    make=mla_decode,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"batch": 2, "heads": 64, "capacity": 300, "dim": 512, "rope": 64, "dtype": "bfloat16"},
        {"batch": 3, "heads": 16, "capacity": 200, "dim": 128, "rope": 64, "dtype": "float16", "scale": 0.125},
        {"batch": 2, "heads": 5, "capacity": 65, "dim": 64, "rope": 32, "dtype": "float32"},
    ),
)
