"""Products with weights of four bits, two a byte, or of eight, that the consumer decodes: raw bytes are loaded ahead.

C[i, j] = sum over k of A[i, k] * (number(j, k) - zero[k / group, j]) * scale[k / group, j]

Every tile of rows decodes all weights again. Of many rows it takes less time to decode them once, into scratch memory,
for a product as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import Epilogue
from tvm_axe.tile.kernels.gemm import epilogue_of, matmul
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
    product_slack,
    renamed,
)
from tvm_axe.tile.kernels.splitting import combine
from tvm_axe.tile.kernels.tiling import matmul_knobs
from tvm_axe.tile.kernels.weights import (
    CODES,
    EXPONENTS,
    FLOAT4,
    FP4,
    OF_BYTES,
    Stored,
    Weights,
    decoded,
    scale_of,
    stored_as,
)

_FEW, SOME = 16, 64
"""Rows that tiles are for where it isn't known how many there are: a batch of tokens, or a part of a prompt."""

_WORTH, _MOST = 3, 4
"""Parts of a sum of more than a few rows that are worth being added by another program, at least and at most."""

_EVENER = 1.1
"""By how much two parts of a sum have to share tiles more evenly, so that they are worth being added."""

_TOGETHER = ((_FEW, 4), (32, 3), (SOME, 2))
_TOGETHER_OF_BYTES = ((_FEW, 4), (SOME, 3))
"""How many blocks a multiprocessor runs at once, by rows: one decodes while another waits for its bytes or products.

Each has decoded weights in its registers, of bytes fewer, and sums of as many rows.
"""

_MANY, _MANY_OF_MORE, _MANY_OF_BYTES = 4096, 2048, 1024
"""Rows beyond which weights are decoded once: of codes, of codes with zeros or that are floats, and of bytes.

To decode them in every tile takes longer than to store and load them then, the more so the more it takes
(docs/results/2026-12-01-kernels-h200.md).
"""

TYPES = ("float16", "bfloat16")

DECODING = {4: "w4a16_matmul", 8: "w8a16_matmul"}
"""The kernel of products with weights of so many bits."""


def w4a16_matmul(weights: str | None = None, **problem: Any) -> Recipe:
    """C = epilogue(A V^T), where V[j, i] = (code(j, i) - zero) * scale is of `dtype`, a type of 16 bits.

    A is (m, k) and C (m, n). B (n, k / 2) of uint8 has the codes, from 0 to 15: that of an even i in the low four bits.
    Each `group` codes of a row share a scale, `scales` (k / group, n) of `scale_dtype`, which is `dtype` or float32;
    with `zeros`, `points` (k / group, n) of uint8 has the code that stands for zero, which is `middle` otherwise. C,
    bias and residual are of `out_dtype`, which is `dtype` or float32.

    Parameters
    ----------
    weights
        "float4_e2m1fn" for codes of floats, without zeros, as MXFP4 has them, whose scales are exponents: with
        `scale_dtype` "uint8", s is 2^(s - 127).
    problem
        As `decoding_matmul` has it, tiles and `Epilogue`'s options too.

    Raises
    ------
    TileError
        k is odd, `group` doesn't divide it, it and `block_k` don't divide one another, a type is none of those, or
        another float than 0 is to stand for zero.
    """
    if weights not in (None, FLOAT4):
        raise TileError(f"w4a16_matmul: weights is {FLOAT4}, or left out for integers, got {weights}")
    return decoding_matmul("w4a16_matmul", stored_as(weights), **problem)


def w8a16_matmul(weights: str, **problem: Any) -> Recipe:
    """C = epilogue(A V^T), where V[j, i] = (B[j, i] - zero) * scale is of `dtype`, and B of `weights`, of eight bits.

    A is (m, k), B (n, k) and C (m, n). Each `group` weights of a row share a scale, `scales` (k / group, n) of
    `scale_dtype`, which is `dtype` or float32. With `zeros`, `points` (k / group, n) of B's type has the integer that
    stands for zero, which is `middle` otherwise; of floats it is 0. C, bias and residual are of `out_dtype`, which is
    `dtype` or float32.

    Parameters
    ----------
    weights
        One of `OF_BYTES`.
    problem
        As `decoding_matmul` has it, tiles and `Epilogue`'s options too.

    Raises
    ------
    TileError
        `group` doesn't divide k, it and `block_k` don't divide one another, a type is none of those, or another float
        than 0 is to stand for zero.
    """
    if weights not in OF_BYTES:
        raise TileError(f"w8a16_matmul: weights is one of {', '.join(OF_BYTES)}, got {weights}")
    return decoding_matmul("w8a16_matmul", stored_as(weights), **problem)


def decoding_matmul(
    name: str,
    stored: Stored,
    *,
    n: int,
    k: int,
    group: int,
    dtype: str,
    zeros: bool = False,
    middle: int | None = None,
    scale_dtype: str | None = None,
    out_dtype: str | None = None,
    once: int = 0,
    **problem: Any,
) -> Recipe:
    """The product with weights in few bits, of the kernel of that `name`.

    Parameters
    ----------
    stored
        How the weights lie in memory, V's n rows of k.
    group
        How many neighbours along k share a scale and a zero.
    dtype, scale_dtype, out_dtype
        Of A and what is multiplied; of scales; and of C. The others are the first, or float32; scales of floats of four
        bits may be exponents, of uint8.
    zeros, middle
        Whether a tensor has what stands for zero in each group; else it is `middle`, by default what is usual of
        `stored`.
    once
        Whether weights are decoded once, into scratch memory (`_decoded_once`), and not where they are multiplied
        (`_decoded_in_tiles`).
    problem
        `m`, how many rows A has, a variable where a call says it; the tiles of the one or the other; `Epilogue`'s
        options: `bias` of (n,) and `residual` of (m, n), both of `out_dtype`, `activation`.

    Raises
    ------
    TileError
        As the kernels say.
    """
    if not stored.is_integer and (zeros or middle):
        raise TileError(f"{name}: what stands for zero is for integers, weights is {stored.kind}")
    check_packed(name, k, group, group if once else problem["block_k"], dtype, TYPES, stored.each)
    scale_dtype, out_dtype = scale_dtype or dtype, out_dtype or dtype
    for said, kind, more in (
        ("scale_dtype", scale_dtype, (EXPONENTS,) * (stored == FP4)),
        ("out_dtype", out_dtype, ()),
    ):
        if kind not in (dtype, "float32", *more):
            raise TileError(f"{name}: {said} is {dtype}, as dtype is, or {' or '.join(('float32', *more))}, got {kind}")
    weights = Weights(stored, n, k, group, dtype, scale_dtype, zeros, stored.middle if middle is None else middle)
    return (_decoded_once if once else _decoded_in_tiles)(name, weights, out_dtype, **problem)


def _decoded_in_tiles(
    name: str,
    weights: Weights,
    out_dtype: str,
    *,
    m: int | tirx.Var,
    splits: int,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    blocks: int = 1,
    **options: Any,
) -> Recipe:
    """The product is computed transposed, V A^T, with weights that are decoded into registers.

    From there tensor cores take 64 rows, and A comes on the side that takes any multiple of 8. `splits` blocks share
    each sum, whose parts a second program adds, but where `m` isn't known; a multiprocessor runs `blocks` of them at
    once. Where a row has one scale, it is its sums that are scaled.
    """
    stored, n, k, group, zeros = weights.stored, weights.n, weights.k, weights.group, weights.zeros
    dtype, scale_dtype = weights.dtype, weights.scale_dtype
    epilogue, groups, steps = Epilogue(**options), k // group, tile.cdiv(k, block_k)
    share = tile.cdiv(steps, splits)
    splits = tile.cdiv(steps, share)  # none is empty
    rows, whole = max(1, block_k // group), group == k  # a step's groups, and whether there is but one
    # Of sums scales are waited for where they are used, but where a copy of a row of them runs ahead (16 bytes).
    held = not whole or n * dtype_bits(scale_dtype) % 128 == 0
    count = counted(m)

    @T.prim_func
    def decoding_matmul(
        A: T.Buffer((m, k), dtype),
        B: T.Buffer((n, k // stored.each), stored.dtype),
        scales: T.Buffer((groups, n), scale_dtype),
        points: T.Buffer((groups, n), stored.dtype),
        bias: T.Buffer((n,), out_dtype),
        residual: T.Buffer((m, n), out_dtype),
        partial: T.Buffer((splits, m, n), "float32"),
        C: T.Buffer((m, n), out_dtype),
    ) -> None:
        with tile.kernel(
            splits, tile.cdiv(count, block_m), tile.cdiv(n, block_n), blocks_per_sm=blocks if blocks > 1 else None
        ) as (z, i, j):
            raw = tile.shared((block_n, block_k // stored.each), stored.dtype)
            a = tile.shared((block_m, block_k), dtype)
            b = tile.fragment((block_n, block_k), dtype)
            c = tile.fragment((block_n, block_m), "float32")
            if held:
                scale = tile.shared((rows, block_n), scale_dtype)
            if zeros:
                point = tile.shared((rows, block_n), stored.dtype)
            tile.fill(c, 0)
            if whole and held:
                tile.copy(scales[0, j * block_n], scale)
            start, stop = T.meta_var(z * share), T.meta_var(T.min((z + 1) * share, steps) if splits > 1 else steps)
            for l in tile.pipelined(start if splits > 1 else 0, stop, stages=stages or None):
                tile.copy(B[j * block_n, l * (block_k // stored.each)], raw)
                if not whole:
                    tile.copy(scales[l * block_k // group, j * block_n], scale)
                if zeros:
                    tile.copy(points[l * block_k // group, j * block_n], point)
                tile.copy(A[i * block_m, l * block_k], a)
                with tile.parallel(block_n, block_k) as (y, x):
                    own = T.meta_var(x // group if rows > 1 else 0)
                    own_point = T.meta_var(point[own, y] if zeros else None)
                    if whole:
                        b[y, x] = weights.unscaled(raw, y, x, own_point, dtype)
                    else:
                        b[y, x] = weights.scaled(raw, y, x, own_point, scale[own, y])
                tile.gemm(b, a, c, transpose_b=True)
            with tile.parallel(block_n, block_m) as (y, x):
                if i * block_m + x < count and j * block_n + y < n:
                    own_scale = T.meta_var(scale[0, y] if held else scales[0, j * block_n + y])
                    total = T.meta_var(c[y, x] * scale_of(own_scale, "float32") if whole else c[y, x])
                    if splits > 1:
                        partial[z, i * block_m + x, j * block_n + y] = total
                    else:
                        C[i * block_m + x, j * block_n + y] = T.cast(
                            epilogue.expression(total, (i * block_m + x, j * block_n + y), None, bias, residual),
                            out_dtype,
                        )

    product = only_used(decoding_matmul.with_attr("global_symbol", name))
    programs = (product, *((combine(splits, m, n, out_dtype, epilogue),) if splits > 1 else ()))
    return Recipe(programs, packed(zeros, epilogue), ("C",))


def _decoded_once(name: str, weights: Weights, out_dtype: str, *, m: int, **parameters: Any) -> Recipe:
    """All weights are decoded into scratch memory, n k elements of `dtype`, and a product of them is `matmul`'s."""
    stored, n, k, group, zeros = weights.stored, weights.n, weights.k, weights.group, weights.zeros
    block_n, block_k = 64, _of_groups(group, 256, 128, 64)[0]
    rows, groups = max(1, block_k // group), k // group

    @T.prim_func
    def decode_weights(
        B: T.Buffer((n, k // stored.each), stored.dtype),
        scales: T.Buffer((groups, n), weights.scale_dtype),
        points: T.Buffer((groups, n), stored.dtype),
        decoded: T.Buffer((n, k), weights.dtype),
    ) -> None:
        with tile.kernel(tile.cdiv(n, block_n), tile.cdiv(k, block_k)) as (j, l):
            raw = tile.shared((block_n, block_k // stored.each), stored.dtype)
            scale = tile.shared((rows, block_n), weights.scale_dtype)
            b = tile.fragment((block_n, block_k), weights.dtype)
            if zeros:
                point = tile.shared((rows, block_n), stored.dtype)
                tile.copy(points[l * block_k // group, j * block_n], point)
            tile.copy(B[j * block_n, l * (block_k // stored.each)], raw)
            tile.copy(scales[l * block_k // group, j * block_n], scale)
            with tile.parallel(block_n, block_k) as (y, x):
                own = T.meta_var(x // group if rows > 1 else 0)
                b[y, x] = weights.scaled(raw, y, x, point[own, y] if zeros else None, scale[own, y])
            tile.copy(b, decoded[j * block_n, l * block_k])

    (product,) = matmul(m, n, k, weights.dtype, out_dtype, **parameters).programs
    programs = only_used(decode_weights), renamed(product, {"B": "decoded"}, name)
    return Recipe(programs, packed(zeros, epilogue_of(parameters)), ("C",))


def packed(zeros: bool, epilogue: Epilogue, *of_rows: str) -> tuple[str, ...]:
    """The names of what such a product reads: A and what belongs to its rows, the weights, and its epilogue's."""
    return ("A", "B", *of_rows, "scales", *(("points",) if zeros else ()), *epilogue.tensors)


def check_packed(
    name: str, k: int, group: int, block_k: int, dtype: str, types: Sequence[str], each: int = CODES.each
) -> None:
    """Refuse what isn't packed so, `each` weights an element, or of another type than the kernel called `name` takes.

    Raises
    ------
    TileError
        It isn't.
    """
    if dtype not in types:
        raise TileError(f"{name}: dtype is one of {', '.join(types)}, got {dtype}")
    if k % each or group < 1 or k % group:
        raise TileError(f"{name}: group={group} divides k={k}" + ("; k is even" if each == 2 else ""))
    if block_k % each or (block_k % group and group % block_k):
        is_even = "; it is even" if each == 2 else ""
        raise TileError(f"{name}: block_k={block_k} divides a group of {group}, or is a number of groups{is_even}")


def _knobs(target: Target, problem: Problem) -> Knobs:
    """Steps along k of some groups, or some of which make one: of few rows longer ones; of many a product's tiles."""
    group, m, machine = problem["group"], problem["m"], machine_of(target)
    of_bytes, some = problem.get("weights") in OF_BYTES, not isinstance(m, int) or m > _FEW
    plain = not problem.get("zeros", False) and "weights" not in problem  # codes of four bits, without zeros
    once = isinstance(m, int) and m > (_MANY_OF_BYTES if of_bytes else _MANY if plain else _MANY_OF_MORE)
    if once and isinstance(machine, Gpu) and machine.by_tensor_cores(problem["dtype"]):
        return {**matmul_knobs(target, problem), "once": (1,)}
    few, many = ((128, 256, 64), (64, 32, 128)) if isinstance(machine, Gpu) else ((256, 128), (256, 128))
    if isinstance(machine, Gpu) and machine.tensor_cores == "wgmma" and some and not of_bytes:
        few = (256, 128, 64)  # half as many barriers for as many products
    together = _TOGETHER_OF_BYTES if of_bytes else _TOGETHER
    steps = _of_groups(group, *few), _of_groups(group, *many)
    return decoding_knobs(target, problem, 8, most_rows(target), *steps, together)


def most_rows(target: Target) -> int:
    """The most rows of a tile: with 128 columns, as many sums as a block's registers hold once."""
    machine = machine_of(target)
    return 256 if isinstance(machine, Gpu) and machine.tensor_cores == "wgmma" else 128


def decoding_knobs(
    target: Target,
    problem: Problem,
    step: int,
    most: int,
    few: Sequence[int],
    many: Sequence[int],
    together: Sequence[tuple[int, int]] = _TOGETHER,
) -> Knobs:
    """Tiles of as many rows of A as there are, up to `most`; sums are shared where there are few tiles.

    A tile's rows are a multiple of `step`. `few` and `many` are the candidates of a step along k, of as many rows;
    `together` says how many blocks a multiprocessor runs.
    """
    m, n, k, machine = (*(problem[name] for name in ("m", "n", "k")), machine_of(target))
    if not isinstance(m, int):
        return {**decoding_knobs(target, {**problem, "m": SOME}, step, most, few, many, together), "splits": (1,)}
    block_k = tuple(few if m <= SOME else many)
    if not isinstance(machine, Gpu):
        return {
            "splits": (1,),
            "block_m": choose(min(m, 256), 64),
            "block_n": choose(64, 128),
            "block_k": block_k,
        }
    block_m = min(step * tile.cdiv(m, step), most)
    block_n = 128 if m > SOME else 64
    blocks = next((blocks for rows, blocks in together if m <= rows), 1)
    blocks = blocks if block_k[0] <= 256 else min(2, blocks)
    tiles = tile.cdiv(n, block_n) * tile.cdiv(m, block_m)
    return {
        "splits": choose(_parts(machine, m, tiles, k, block_k[0], blocks), 1, 2, 4, 8),
        "block_m": choose(block_m, 64, 128),
        "block_n": choose(block_n, 64, 128),
        "block_k": block_k,
        "stages": choose(0, 3, 4, 6),
        "blocks": choose(blocks, 1, 2, 3, 4),
    }


def _parts(machine: Gpu, rows: int, tiles: int, terms: int, block_k: int, blocks: int) -> int:
    """Into how many parts a sum is split: as many as run at once, of eight steps at least, or of 1,024 terms.

    Of more than a few rows two parts aren't worth being added, nor are more than four. Of a few they are where
    multiprocessors would have uneven numbers of tiles. Of many rows a block has a multiprocessor for itself, and adding
    a part takes longer than even numbers of tiles would save.
    """
    steps = terms // min(block_k, 128)
    if rows > SOME:
        return max(1, min(machine.processors // tiles, steps // 4))
    parts = max(1, min(blocks * machine.processors // tiles, steps // 8))
    if rows > _FEW:
        return min(parts, _MOST) if parts >= _WORTH else 1

    def evenly(parts: int) -> float:
        """A multiprocessor's blocks on average, over those of the one that has most."""
        each = parts * tiles / machine.processors
        return each / math.ceil(each)

    return 2 if parts == 1 and steps >= 16 and evenly(2) > _EVENER * evenly(1) else parts


def fewer_rows(target: Target, problem: Problem) -> Fewer | None:
    """On a CPU tiles of few rows, where nobody knows how many there will be; a GPU's are of some."""
    known = isinstance(problem["m"], int) or isinstance(machine_of(target), Gpu)
    return None if known else Fewer("m", _FEW, {"block_m": _FEW})


def _of_groups(group: int, *numbers: int) -> tuple[int, ...]:
    """Candidates of a step along k: those that divide a group, or are some groups."""
    fits = tuple(number for number in numbers if group % number == 0 or number % group == 0)
    return fits or (group,)


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    m, n, k, group, dtype = (problem[name] for name in ("m", "n", "k", "group", "dtype"))
    stored, groups = stored_as(problem.get("weights")), (k // group, n)
    scales, kind = rng.uniform(0.05, 0.3, groups).astype("float32"), problem.get("scale_dtype", dtype)

    def whole(shape: tuple[int, ...], most: int | None = None) -> np.ndarray:
        bounds = np.iinfo(stored.dtype)
        return rng.integers(bounds.min, (bounds.max if most is None else most) + 1, shape).astype(stored.dtype)

    drawn = {
        "A": normal(rng, (m, k), dtype),
        "B": normal(rng, (n, k), stored.dtype) if stored.dtype.startswith("float") else whole((n, k // stored.each)),
        "scales": rng.integers(122, 127, groups).astype(kind) if kind == EXPONENTS else scales.astype(kind),
        "bias": normal(rng, (n,), problem.get("out_dtype", dtype)),
        "residual": normal(rng, (m, n), problem.get("out_dtype", dtype)),
    }
    if problem.get("zeros", False):
        drawn["points"] = whole(groups, 15 if stored.each == 2 else None)
    return {name: drawn[name] for name in packed(problem.get("zeros", False), epilogue_of(problem))}


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The product in float64; each weight is rounded to its type once, beside what the sum of k products rounds."""
    stored = stored_as(problem.get("weights"))
    middle = problem.get("middle", stored.middle)
    a, b = arrays["A"].astype("float64"), decoded(arrays, stored, problem["group"], middle)
    epilogue, dtype = epilogue_of(problem), problem["dtype"]
    magnitude = epilogue.magnitude(np.abs(a) @ np.abs(b.T), arrays)
    slack = product_slack(dtype, problem.get("out_dtype", dtype), problem["k"], magnitude) + ROUNDING[dtype] * magnitude
    return {"C": Expected(epilogue.reference(a @ b.T, arrays), slack)}


W4A16_MATMUL = Kernel(
    name="w4a16_matmul",
    summary="C = activation(A V^T + bias) + residual, V of four bits with scales and zero points by group",
    make=w4a16_matmul,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    fewer=fewer_rows,
    cases=(
        {"m": 1, "n": 256, "k": 1024, "group": 128, "dtype": "float16"},
        {"m": 16, "n": 160, "k": 512, "group": 64, "dtype": "bfloat16", "zeros": True},
        {"m": 200, "n": 136, "k": 256, "group": 32, "dtype": "bfloat16", "bias": True, "activation": "silu"},
        {"m": 9, "n": 100, "k": 480, "group": 96, "dtype": "float16", "zeros": True, "residual": True},
        {"m": 64, "n": 72, "k": 130, "group": 130, "dtype": "bfloat16"},
        {"m": 5, "n": 64, "k": 256, "group": 32, "dtype": "float16", "middle": 7},
        {"m": 1, "n": 256, "k": 1024, "group": 32, "dtype": "bfloat16", "weights": "float4_e2m1fn",
         "scale_dtype": "uint8"},
        {"m": 70, "n": 136, "k": 256, "group": 16, "dtype": "float16", "weights": "float4_e2m1fn",
         "scale_dtype": "uint8", "bias": True, "activation": "silu"},
        {"m": 9, "n": 100, "k": 480, "group": 480, "dtype": "bfloat16", "weights": "float4_e2m1fn",
         "scale_dtype": "float32"},
        {"m": 33, "n": 72, "k": 256, "group": 64, "dtype": "float16", "weights": "float4_e2m1fn", "residual": True},
        {"m": 2050, "n": 136, "k": 128, "group": 64, "dtype": "bfloat16", "zeros": True, "bias": True},
    ),
)  # fmt: skip

W8A16_MATMUL = Kernel(
    name="w8a16_matmul",
    summary="C = activation(A V^T + bias) + residual, V of eight bits with scales and zero points by group",
    make=w8a16_matmul,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    fewer=fewer_rows,
    cases=(
        {"m": 1, "n": 256, "k": 1024, "group": 128, "dtype": "bfloat16", "weights": "float8_e4m3fn",
         "scale_dtype": "float32"},
        {"m": 16, "n": 160, "k": 512, "group": 512, "dtype": "bfloat16", "weights": "int8"},
        {"m": 200, "n": 136, "k": 256, "group": 32, "dtype": "float16", "weights": "int8", "bias": True,
         "activation": "silu"},
        {"m": 9, "n": 100, "k": 480, "group": 96, "dtype": "bfloat16", "weights": "uint8", "zeros": True,
         "residual": True},
        {"m": 64, "n": 72, "k": 130, "group": 130, "dtype": "float16", "weights": "float8_e5m2"},
        {"m": 5, "n": 64, "k": 256, "group": 32, "dtype": "float16", "weights": "uint8", "middle": 128,
         "out_dtype": "float32", "bias": True},
        {"m": 1030, "n": 72, "k": 160, "group": 160, "dtype": "float16", "weights": "int8", "activation": "silu"},
    ),
)  # fmt: skip
