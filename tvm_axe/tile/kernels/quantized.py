"""Products of activations of 8 bits with weights of four bits, that tensor cores multiply in 8 bits.

    C[i, j] = a_scales[i] * sum over groups g of scales[g, j] * (A[i] . (codes[j] - zero[g, j])), over the group's terms

A code less its zero is from -15 to 15, which int8 and float8_e4m3fn both have. So it is decoded without its scale, and
each group is summed by the tensor cores on its own and then added, times its scale, in float32.

Source: Lin et al., "QServe: W4A8KV4 Quantization and System Co-design for Efficient LLM Serving", 2024, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.dequantized import (
    check_packed,
    decoding_knobs,
    fewer_rows,
    most_rows,
    packed,
)
from tvm_axe.tile.kernels.epilogue import Epilogue
from tvm_axe.tile.kernels.gemm import epilogue_of
from tvm_axe.tile.kernels.kernel import (
    BYTE_TERMS,
    Expected,
    Kernel,
    Knobs,
    Problem,
    Recipe,
    counted,
    only_used,
    slack_of_groups,
)
from tvm_axe.tile.kernels.splitting import combine
from tvm_axe.tile.kernels.weights import CODES, code_of, decoded

_TYPES = {"int8": "int32", "float8_e4m3fn": "float32"}
"""The type of the tensor cores' sums by that of what they multiply."""

_OUT = ("bfloat16", "float16", "float32")


def w4a8_matmul(
    m: int | tirx.Var,
    n: int,
    k: int,
    group: int,
    dtype: str,
    out_dtype: str,
    zeros: bool = False,
    middle: int = CODES.middle,
    *,
    splits: int,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    blocks: int = 1,
    **options: Any,
) -> Recipe:
    """C = epilogue(a_scales A V^T), where V[j, i] = (code(j, i) - zero) * scale, and A is of `dtype`, a type of 8 bits.

    A is (m, k), with a scale for each row, `a_scales` (m,) of float32, and C (m, n) of `out_dtype`. B (n, k / 2) of
    uint8 has the codes, from 0 to 15: that of an even i in the low four bits. Each `group` codes of a row share a
    scale, `scales` (k / group, n) of `out_dtype`; with `zeros`, `points` (k / group, n) of uint8 has the code that
    stands for zero, which is `middle` otherwise. Of `m` that isn't known sums aren't split.

    The product is computed transposed, as `w4a16_matmul` does. Each step of `block_k` is summed on its own; int8's
    sums of a group that is all of k, scales by channel, are exact and so go on from step to step.

    Parameters
    ----------
    options
        `Epilogue`'s: `bias` of (n,) and `residual` of (m, n), both of `out_dtype`, `activation`.

    Raises
    ------
    TileError
        `group` doesn't divide k, `block_k` doesn't divide `group`, one of both is no multiple of the 32 terms of an
        instruction, or a type is none of those.
    """
    check_packed("w4a8_matmul", k, group, block_k, dtype, tuple(_TYPES))
    if out_dtype not in _OUT:
        raise TileError(f"w4a8_matmul: out_dtype is one of {', '.join(_OUT)}, got {out_dtype}")
    if group % block_k or block_k % BYTE_TERMS:
        raise TileError(
            f"w4a8_matmul: block_k divides group, and both are multiples of {BYTE_TERMS}, got block_k={block_k} "
            f"and group={group}"
        )
    epilogue, count, groups, steps = Epilogue(**options), counted(m), k // group, k // block_k
    share = tile.cdiv(steps, splits)
    splits = tile.cdiv(steps, share)  # none is empty
    sums, whole = _TYPES[dtype], _go_on(dtype, k, group)

    @T.prim_func
    def w4a8_matmul(
        A: T.Buffer((m, k), dtype),
        B: T.Buffer((n, k // 2), "uint8"),
        a_scales: T.Buffer((m,), "float32"),
        scales: T.Buffer((groups, n), out_dtype),
        points: T.Buffer((groups, n), "uint8"),
        bias: T.Buffer((n,), out_dtype),
        residual: T.Buffer((m, n), out_dtype),
        partial: T.Buffer((splits, m, n), "float32"),
        C: T.Buffer((m, n), out_dtype),
    ) -> None:
        with tile.kernel(
            splits, tile.cdiv(count, block_m), tile.cdiv(n, block_n), blocks_per_sm=blocks if blocks > 1 else None
        ) as (z, i, j):
            raw = tile.shared((block_n, block_k // 2), "uint8")
            a = tile.shared((block_m, block_k), dtype)
            b = tile.fragment((block_n, block_k), dtype)
            part = tile.fragment((block_n, block_m), sums)
            if zeros:
                point = tile.shared((block_n,), "uint8")
            if whole:
                tile.fill(part, 0)
            else:
                scale = tile.shared((block_n,), out_dtype)
                c = tile.fragment((block_n, block_m), "float32")
                tile.fill(c, 0)
            start, stop = T.meta_var(z * share), T.meta_var(T.min((z + 1) * share, steps) if splits > 1 else steps)
            for l in tile.pipelined(start if splits > 1 else 0, stop, stages=stages or None):
                tile.copy(B[j * block_n, l * (block_k // 2)], raw)
                if not whole:
                    tile.copy(scales[l * block_k // group, j * block_n], scale)
                if zeros:
                    tile.copy(points[l * block_k // group, j * block_n], point)
                tile.copy(A[i * block_m, l * block_k], a)
                with tile.parallel(block_n, block_k) as (y, x):
                    zero = T.meta_var(T.bitwise_and(T.cast(point[y], "int32"), 15) if zeros else T.int32(middle))
                    b[y, x] = T.cast(code_of(raw[y, x // 2], x) - zero, dtype)
                tile.gemm(b, a, part, transpose_b=True, accumulate=whole)
                if not whole:
                    with tile.parallel(block_n, block_m) as (y, x):
                        c[y, x] = c[y, x] + T.cast(part[y, x], "float32") * T.cast(scale[y], "float32")
            with tile.parallel(block_n, block_m) as (y, x):
                if i * block_m + x < count and j * block_n + y < n:
                    row, column = T.meta_var(i * block_m + x), T.meta_var(j * block_n + y)
                    total = T.meta_var(
                        T.cast(part[y, x], "float32") * T.cast(scales[0, column], "float32") if whole else c[y, x]
                    )
                    if splits > 1:
                        partial[z, row, column] = total * a_scales[row]
                    else:
                        C[row, column] = T.cast(
                            epilogue.expression(total * a_scales[row], (row, column), None, bias, residual), out_dtype
                        )

    programs = (only_used(w4a8_matmul), *((combine(splits, m, n, out_dtype, epilogue),) if splits > 1 else ()))
    return Recipe(programs, packed(zeros, epilogue, "a_scales"), ("C",))


def _go_on(dtype: str, k: int, group: int) -> bool:
    """Whether sums go on from step to step: they are exact, and all of one scale."""
    return dtype == "int8" and group == k


def _knobs(target: Target, problem: Problem) -> Knobs:
    """Steps that divide a group. A tile whose sums don't go on has them twice, and so no more than 128 rows."""
    fits = tuple(step for step in (128, 64, 32) if problem["group"] % step == 0) or (BYTE_TERMS,)
    most = most_rows(target) if _go_on(problem["dtype"], problem["k"], problem["group"]) else 128
    return decoding_knobs(target, problem, 16 if problem["dtype"] == "int8" else 8, most, fits, fits)


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    m, n, k, group, dtype, out = (problem[name] for name in ("m", "n", "k", "group", "dtype", "out_dtype"))
    whole = dtype == "int8"
    drawn = {
        "A": rng.integers(-127, 128, (m, k)).astype("int8") if whole else normal(rng, (m, k), dtype),
        "B": rng.integers(0, 256, (n, k // 2)).astype("uint8"),
        "a_scales": (rng.uniform(0.5, 2, m) / (64 if whole else 1)).astype("float32"),
        "scales": rng.uniform(0.05, 0.3, (k // group, n)).astype("float32").astype(np.dtype(out)),
        "points": rng.integers(0, 16, (k // group, n)).astype("uint8"),
        "bias": normal(rng, (n,), out),
        "residual": normal(rng, (m, n), out),
    }
    return {name: drawn[name] for name in packed(problem.get("zeros", False), epilogue_of(problem), "a_scales")}


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The product of both operands times their scales in float64."""
    a = arrays["A"].astype("float64") * arrays["a_scales"].astype("float64")[:, None]
    b = decoded(arrays, CODES, problem["group"], problem.get("middle", CODES.middle))
    epilogue = epilogue_of(problem)
    magnitude = epilogue.magnitude(np.abs(a) @ np.abs(b.T), arrays)
    slack = slack_of_groups(problem["dtype"], problem["out_dtype"], problem["k"], problem["group"], magnitude)
    return {"C": Expected(epilogue.reference(a @ b.T, arrays), slack)}


W4A8_MATMUL = Kernel(
    name="w4a8_matmul",
    summary="C = activation(a_scales A V^T + bias) + residual of A of 8 bits and V of four, with scales by group",
    make=w4a8_matmul,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    fewer=fewer_rows,
    cases=(
        {"m": 1, "n": 256, "k": 1024, "group": 128, "dtype": "int8", "out_dtype": "bfloat16"},
        {"m": 16, "n": 160, "k": 512, "group": 64, "dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "zeros": True},
        {"m": 200, "n": 136, "k": 256, "group": 32, "dtype": "int8", "out_dtype": "float16", "bias": True,
         "activation": "silu"},
        {"m": 9, "n": 100, "k": 480, "group": 96, "dtype": "int8", "out_dtype": "float32", "zeros": True,
         "residual": True},
        {"m": 70, "n": 80, "k": 640, "group": 640, "dtype": "int8", "out_dtype": "bfloat16", "zeros": True},
        {"m": 33, "n": 200, "k": 512, "group": 512, "dtype": "float8_e4m3fn", "out_dtype": "float32", "bias": True},
        {"m": 130, "n": 136, "k": 256, "group": 128, "dtype": "float8_e4m3fn", "out_dtype": "float16", "middle": 7},
    ),
)  # fmt: skip
