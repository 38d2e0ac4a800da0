"""Matrix products, one or a batch of them, with epilogues; in 8-bit floats too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import Epilogue
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Problem, Recipe, counted, only_used, product_slack, stored
from tvm_axe.tile.kernels.tiling import matmul_knobs

EPILOGUE = ("bias", "activation", "residual", "scaled")


def matmul(
    m: Any,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str | None = None,
    transpose_b: bool = True,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    instruction: str | None = None,
    swizzle: int = 1,
    **options: Any,
) -> Recipe:
    """C = epilogue(A B): A (m, k); B (n, k), or (k, n) without `transpose_b`; C (m, n) of `out_dtype`.

    Parameters
    ----------
    m : int or Var
        How many rows there are; a variable where a call says it.
    dtype : str
        Of A and B: ``"float32"``, ``"tf32"`` (float32 on tensor cores), ``"float16"``, ``"bfloat16"`` or
        ``"float8_e4m3fn"``.
    options
        `Epilogue`'s: `bias` of (n,) and `residual` of (m, n), both of `out_dtype`; `scaled` by one float32 for A, one
        for B.
    """
    operand, out, epilogue, rows = stored(dtype), out_dtype or stored(dtype), Epilogue(**options), counted(m)
    b_shape, b_tile = ((n, k), (block_n, block_k)) if transpose_b else ((k, n), (block_k, block_n))

    @T.prim_func
    def matmul(
        A: T.Buffer((m, k), operand),
        B: T.Buffer(b_shape, operand),
        a_scale: T.Buffer((1,), "float32"),
        b_scale: T.Buffer((1,), "float32"),
        bias: T.Buffer((n,), out),
        residual: T.Buffer((m, n), out),
        C: T.Buffer((m, n), out),
    ) -> None:
        with tile.kernel(tile.cdiv(rows, block_m), tile.cdiv(n, block_n), swizzle=swizzle) as (i, j):
            a = tile.shared((block_m, block_k), operand)
            b = tile.shared(b_tile, operand)
            c = tile.fragment((block_m, block_n), "float32")
            tile.fill(c, 0)
            for l in tile.pipelined(tile.cdiv(k, block_k), stages=stages or None):
                tile.copy(A[i * block_m, l * block_k], a)
                tile.copy(B[j * block_n, l * block_k] if transpose_b else B[l * block_k, j * block_n], b)
                tile.gemm(a, b, c, transpose_b=transpose_b, instruction=instruction)
            if not epilogue.empty:
                with tile.parallel(block_m, block_n) as (x, y):
                    if i * block_m + x < rows and j * block_n + y < n:
                        c[x, y] = epilogue.expression(
                            c[x, y], (i * block_m + x, j * block_n + y), (a_scale, b_scale), bias, residual
                        )
            tile.copy(c, C[i * block_m, j * block_n])

    return Recipe((only_used(matmul),), ("A", "B", *epilogue.tensors), ("C",))


def batched_matmul(
    batch: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    transpose_b: bool = True,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    instruction: str | None = None,
    swizzle: int = 1,
) -> Recipe:
    """C[z] = A[z] B[z] for every z of a batch, each as in `matmul`, all of one dtype."""
    operand = stored(dtype)
    b_shape, b_tile = ((n, k), (block_n, block_k)) if transpose_b else ((k, n), (block_k, block_n))

    @T.prim_func
    def batched_matmul(
        A: T.Buffer((batch, m, k), operand),
        B: T.Buffer((batch, *b_shape), operand),
        C: T.Buffer((batch, m, n), operand),
    ) -> None:
        with tile.kernel(batch, tile.cdiv(m, block_m), tile.cdiv(n, block_n), swizzle=swizzle) as (z, i, j):
            a = tile.shared((block_m, block_k), operand)
            b = tile.shared(b_tile, operand)
            c = tile.fragment((block_m, block_n), "float32")
            tile.fill(c, 0)
            for l in tile.pipelined(tile.cdiv(k, block_k), stages=stages or None):
                tile.copy(A[z, i * block_m, l * block_k], a)
                tile.copy(B[z, j * block_n, l * block_k] if transpose_b else B[z, l * block_k, j * block_n], b)
                tile.gemm(a, b, c, transpose_b=transpose_b, instruction=instruction)
            tile.copy(c, C[z, i * block_m, j * block_n])

    return Recipe((tile.read(batched_matmul),), ("A", "B"), ("C",))


# ---- Data and reference ------------------------------------------------------------------------------------------


def inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    """Normally distributed operands, with what the epilogue reads."""
    m, n, k, dtype = (problem[name] for name in ("m", "n", "k", "dtype"))
    out = problem.get("out_dtype") or stored(dtype)
    batch = (problem["batch"],) if "batch" in problem else ()
    b_shape = (n, k) if problem.get("transpose_b", True) else (k, n)
    drawn = {
        "A": normal(rng, (*batch, m, k), stored(dtype)),
        "B": normal(rng, (*batch, *b_shape), stored(dtype)),
        "a_scale": rng.uniform(0.5, 2, 1).astype("float32"),
        "b_scale": rng.uniform(0.5, 2, 1).astype("float32"),
        "bias": normal(rng, (n,), out),
        "residual": normal(rng, (m, n), out),
    }
    return {name: drawn[name] for name in ("A", "B", *epilogue_of(problem).tensors)}


def epilogue_of(problem: Problem) -> Epilogue:
    """The epilogue that a problem asks for."""
    return Epilogue(**{name: problem[name] for name in EPILOGUE if name in problem})


def reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The product in float64; its slack is that of sums of k products."""
    a, b = (arrays[name].astype("float64") for name in ("A", "B"))
    b = np.swapaxes(b, -1, -2) if problem.get("transpose_b", True) else b
    epilogue, dtype = epilogue_of(problem), problem["dtype"]
    magnitude = epilogue.magnitude(np.abs(a) @ np.abs(b), arrays)
    slack = product_slack(dtype, problem.get("out_dtype") or stored(dtype), problem["k"], magnitude)
    return {"C": Expected(epilogue.reference(a @ b, arrays), slack)}


def fp8_matmul(m: int, n: int, k: int, dtype: str, out_dtype: str, **parameters: Any) -> Recipe:
    """C = a_scale b_scale A B^T of 8-bit floats, accumulated in float32."""
    return matmul(m, n, k, dtype, out_dtype, scaled=True, **parameters)


MATMUL = Kernel(
    name="matmul",
    summary="C = activation(A B + bias) + residual",
    make=matmul,
    parameters=matmul_knobs,
    inputs=inputs,
    reference=reference,
    cases=(
        {"m": 128, "n": 256, "k": 128, "dtype": "float32"},
        {"m": 97, "n": 203, "k": 61, "dtype": "float32", "bias": True, "activation": "relu", "residual": True},
        {"m": 1, "n": 1, "k": 1, "dtype": "float32"},
        {"m": 3, "n": 1000, "k": 17, "dtype": "float32", "transpose_b": False},
        {"m": 515, "n": 9, "k": 130, "dtype": "float32", "transpose_b": False, "activation": "silu"},
        {"m": 192, "n": 136, "k": 72, "dtype": "tf32"},
        {"m": 256, "n": 512, "k": 320, "dtype": "bfloat16"},
        {"m": 72, "n": 1, "k": 1031, "dtype": "bfloat16"},
        {"m": 264, "n": 328, "k": 200, "dtype": "bfloat16", "transpose_b": False, "bias": True, "activation": "gelu"},
        {"m": 130, "n": 200, "k": 96, "dtype": "float16", "residual": True},
        {"m": 64, "n": 136, "k": 256, "dtype": "bfloat16", "out_dtype": "float32", "activation": "silu"},
    ),
)

BATCHED_MATMUL = Kernel(
    name="batched_matmul",
    summary="C[z] = A[z] B[z]",
    make=batched_matmul,
    parameters=matmul_knobs,
    inputs=inputs,
    reference=reference,
    cases=(
        {"batch": 3, "m": 65, "n": 129, "k": 33, "dtype": "float32"},
        {"batch": 1, "m": 1, "n": 200, "k": 64, "dtype": "float32", "transpose_b": False},
        {"batch": 5, "m": 128, "n": 72, "k": 136, "dtype": "bfloat16"},
        {"batch": 2, "m": 40, "n": 256, "k": 64, "dtype": "float16", "transpose_b": False},
    ),
)

FP8_MATMUL = Kernel(
    name="fp8_matmul",
    summary="C = a_scale b_scale A B^T of 8-bit floats",
    make=fp8_matmul,
    parameters=matmul_knobs,
    inputs=lambda rng, problem: inputs(rng, {**problem, "scaled": True}),
    reference=lambda problem, arrays: reference({**problem, "scaled": True}, arrays),
    cases=(
        {"m": 128, "n": 256, "k": 256, "dtype": "float8_e4m3fn", "out_dtype": "bfloat16"},
        {"m": 33, "n": 72, "k": 144, "dtype": "float8_e4m3fn", "out_dtype": "float32"},
    ),
)
