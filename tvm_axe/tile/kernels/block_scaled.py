"""Products of 8-bit floats with a scale for each block: of a row and a few terms in A, of rows and terms in B.

Each block of terms is summed by the tensor cores on its own and then added, times its scales, in float32: the
instructions keep fewer bits of a sum than float32 has, and no scale could come behind all of it.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2, "Fine-Grained Quantization" and "Increasing
Accumulation Precision".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.defaults import VALUES
from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import Epilogue
from tvm_axe.tile.kernels.gemm import epilogue_of
from tvm_axe.tile.kernels.kernel import (
    BYTE_TERMS,
    Expected,
    Kernel,
    Knobs,
    Problem,
    Recipe,
    choose,
    counted,
    only_used,
    slack_of_groups,
    with_extents,
)

BLOCK = 128
"""Terms, and rows of B, that share a scale, as DeepSeek's models have them."""


def block_scaled_matmul(
    m: Any,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str = "bfloat16",
    group: int = BLOCK,
    rows: int = BLOCK,
    *,
    block_m: int,
    block_n: int,
    stages: int = 0,
    swizzle: int = 1,
    **options: Any,
) -> Recipe:
    """C = epilogue(the sum over blocks g of k of a_scales[g, i] b_scales[j / rows, g] times the product of the blocks).

    A is (m, k) and B (n, k), of `dtype`, an 8-bit float; C (m, n) of `out_dtype`. `group` neighbours along k share a
    scale in each row of A, `a_scales` (k / group, m) of float32, and so do `group` of them in `rows` rows of B,
    `b_scales` (n / rows, k / group) of float32, both rounded up.

    Parameters
    ----------
    m : int or Var
        How many rows there are; a variable where a call says it.
    options
        `Epilogue`'s: `bias` of (n,) and `residual` of (m, n), both of `out_dtype`, `activation`.

    Raises
    ------
    TileError
        The type isn't of 8 bits, `group` is no multiple of an instruction's 32 terms, or columns of a tile are of rows
        of B with different scales: `block_n` doesn't divide `rows`.
    """
    if not dtype.startswith("float8"):
        raise TileError(f"block_scaled_matmul: operands are 8-bit floats, got {dtype}")
    if group < 1 or group % BYTE_TERMS:
        raise TileError(f"block_scaled_matmul: group is a multiple of {BYTE_TERMS}, got {group}")
    if rows % block_n:
        raise TileError(f"block_scaled_matmul: block_n divides the rows of a scale, {rows}, got {block_n}")
    epilogue, count, groups = Epilogue(**options), counted(m), tile.cdiv(k, group)
    # A copy of a row of scales runs ahead where 16 bytes divide it (PTX ISA, "Tensor Size, Stride").
    held = tile.shared if isinstance(m, int) and m % 4 == 0 else tile.fragment
    # So do all scales of a row of B: one that is read where it is used is waited for in each step.
    ahead = groups % 4 == 0

    @T.prim_func
    def block_scaled_matmul(
        A: T.Buffer((m, k), dtype),
        B: T.Buffer((n, k), dtype),
        a_scales: T.Buffer((groups, m), "float32"),
        b_scales: T.Buffer((tile.cdiv(n, rows), groups), "float32"),
        bias: T.Buffer((n,), out_dtype),
        residual: T.Buffer((m, n), out_dtype),
        C: T.Buffer((m, n), out_dtype),
    ) -> None:
        with tile.kernel(tile.cdiv(count, block_m), tile.cdiv(n, block_n), swizzle=swizzle) as (i, j):
            a = tile.shared((block_m, group), dtype)
            b = tile.shared((block_n, group), dtype)
            scale = held((block_m,), "float32")
            if ahead:
                others = tile.shared((groups,), "float32")
            part = tile.fragment((block_m, block_n), "float32")
            c = tile.fragment((block_m, block_n), "float32")
            tile.fill(c, 0)
            if ahead:
                tile.copy(b_scales[j * block_n // rows, 0], others)
            for l in tile.pipelined(groups, stages=stages or None):
                tile.copy(A[i * block_m, l * group], a)
                tile.copy(B[j * block_n, l * group], b)
                tile.copy(a_scales[l, i * block_m], scale)
                if not ahead:
                    other: T.float32 = b_scales[j * block_n // rows, l]
                tile.gemm(a, b, part, transpose_b=True, accumulate=False)
                with tile.parallel(block_m, block_n) as (x, y):
                    c[x, y] = c[x, y] + part[x, y] * (scale[x] * (others[l] if ahead else other))
            if not epilogue.empty:
                with tile.parallel(block_m, block_n) as (x, y):
                    if i * block_m + x < count and j * block_n + y < n:
                        c[x, y] = epilogue.expression(c[x, y], (i * block_m + x, j * block_n + y), None, bias, residual)
            tile.copy(c, C[i * block_m, j * block_n])

    program = only_used(block_scaled_matmul)
    return Recipe((program,), ("A", "B", "a_scales", "b_scales", *epilogue.tensors), ("C",))


def _knobs(target: Target, problem: Problem) -> Knobs:
    """128 x 128: two warpgroups hold a block's sums beside all of them. Of few blocks or rows, and on CPUs, smaller.

    Of fewer blocks than there are multiprocessors it is 64 x 64, or 128 x 64 where only those run all at once.
    """
    problem = with_extents(problem, VALUES[-1])
    m, n, machine = problem["m"], problem["n"], machine_of(target)
    most = problem.get("rows", BLOCK)
    if not isinstance(machine, Gpu):
        return {"block_m": choose(64, 32, 128), "block_n": choose(min(64, most), 32)}

    def blocks(rows: int, columns: int) -> int:
        return math.ceil(m / rows) * math.ceil(n / columns)

    fills = blocks(128, 128) >= machine.processors
    is_taller = fills or blocks(128, 64) <= machine.processors < blocks(64, 64)
    return {
        "block_m": choose(128 if is_taller else 64, 64, 128),
        "block_n": choose(min(128 if fills else 64, most), *(columns for columns in (32, 64, 128) if columns <= most)),
        "stages": choose(0, 2, 3, 4, 5, 6),
        "swizzle": choose(16, 1, 4, 8, 32) if m > 64 else (16,),
    }


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    m, n, k, dtype, out = (*(problem[name] for name in ("m", "n", "k", "dtype")), problem.get("out_dtype", "bfloat16"))
    groups, across = -(-k // problem.get("group", BLOCK)), -(-n // problem.get("rows", BLOCK))
    drawn = {
        "A": normal(rng, (m, k), dtype),
        "B": normal(rng, (n, k), dtype),
        "a_scales": np.exp2(rng.uniform(-4, 4, (groups, m))).astype("float32"),
        "b_scales": np.exp2(rng.uniform(-4, 4, (across, groups))).astype("float32"),
        "bias": normal(rng, (n,), out),
        "residual": normal(rng, (m, n), out),
    }
    return {name: drawn[name] for name in ("A", "B", "a_scales", "b_scales", *epilogue_of(problem).tensors)}


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The product of both operands times their scales in float64."""
    n, k, group, rows = problem["n"], problem["k"], problem.get("group", BLOCK), problem.get("rows", BLOCK)
    a, b, own, other = (arrays[name].astype("float64") for name in ("A", "B", "a_scales", "b_scales"))
    a = a * np.repeat(own.T, group, axis=1)[:, :k]
    b = b * np.repeat(np.repeat(other, rows, axis=0)[:n], group, axis=1)[:, :k]
    epilogue = epilogue_of(problem)
    magnitude = epilogue.magnitude(np.abs(a) @ np.abs(b).T, arrays)
    slack = slack_of_groups(problem["dtype"], problem.get("out_dtype", "bfloat16"), k, group, magnitude)
    return {"C": Expected(epilogue.reference(a @ b.T, arrays), slack)}


BLOCK_SCALED_MATMUL = Kernel(
    name="block_scaled_matmul",
    summary="C = activation(A B^T + bias) + residual of 8-bit floats with a scale for each block of terms",
    make=block_scaled_matmul,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"m": 128, "n": 256, "k": 512, "dtype": "float8_e4m3fn"},
        {"m": 256, "n": 384, "k": 1024, "dtype": "float8_e4m3fn", "out_dtype": "float32"},
        {"m": 33, "n": 200, "k": 400, "dtype": "float8_e4m3fn", "bias": True, "activation": "silu"},
        {"m": 1, "n": 72, "k": 144, "dtype": "float8_e4m3fn", "out_dtype": "float32", "group": 32, "rows": 64},
        {"m": 68, "n": 130, "k": 256, "dtype": "float8_e5m2", "group": 64, "residual": True},
    ),
)
