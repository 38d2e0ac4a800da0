"""Matrix products of few rows, as a decoder makes for a token of each sequence: all is reading the weights."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.epilogue import Epilogue
from tvm_axe.tile.kernels.gemm import inputs, reference
from tvm_axe.tile.kernels.kernel import Kernel, Knobs, Problem, Recipe, choose, counted, only_used, stored, with_extents
from tvm_axe.tile.kernels.tiling import instructions

_MOST = 256
"""Rows of A that a block has room for at most: what the tensor cores' instructions take at once."""


def skinny_matmul(
    m: Any,
    n: int,
    k: int,
    dtype: str,
    *,
    width: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    instruction: str | None = None,
    **options: Any,
) -> Recipe:
    """C = epilogue(A B^T) for few rows of A (m, k) and many of B (n, k).

    The product is computed transposed, B A^T, so that the weights B come on the side of the tensor cores' instructions
    that takes 64 rows, and A on the side that takes any multiple of 8.

    Parameters
    ----------
    m : int or Var
        How many rows there are; a variable where a call says it.
    width : int
        How many rows a block has room for. Where there are more, each `width` of them read all weights once more.
    """
    operand, epilogue, rows = stored(dtype), Epilogue(**options), counted(m)
    one = isinstance(m, int) and m <= width
    blocks = () if one else (tile.cdiv(rows, width),)

    @T.prim_func
    def skinny_matmul(
        A: T.Buffer((m, k), operand),
        B: T.Buffer((n, k), operand),
        bias: T.Buffer((n,), operand),
        residual: T.Buffer((m, n), operand),
        C: T.Buffer((m, n), operand),
    ) -> None:
        with tile.kernel(tile.cdiv(n, block_n), *blocks) as place:
            j = T.meta_var(place if one else place[0])
            first = T.meta_var(0 if one else place[1] * width)
            b = tile.shared((block_n, block_k), operand)
            a = tile.shared((width, block_k), operand)
            c = tile.fragment((block_n, width), "float32")
            tile.fill(c, 0)
            for l in tile.pipelined(tile.cdiv(k, block_k), stages=stages or None):
                tile.copy(B[j * block_n, l * block_k], b)
                tile.copy(A[first, l * block_k], a)
                tile.gemm(b, a, c, transpose_b=True, instruction=instruction)
            with tile.parallel(block_n, width) as (y, x):
                if first + x < rows and j * block_n + y < n:
                    C[first + x, j * block_n + y] = T.cast(
                        epilogue.expression(c[y, x], (first + x, j * block_n + y), None, bias, residual), operand
                    )

    return Recipe((only_used(skinny_matmul),), ("A", "B", *epilogue.tensors), ("C",))


def _knobs(target: Target, problem: Problem) -> Knobs:
    """Blocks of 64 weight rows unless 128 give every multiprocessor one; steps as deep as leave room for several."""
    problem = with_extents(problem, _MOST)
    m, n, k, dtype = problem["m"], problem["n"], problem["k"], problem["dtype"]
    width = {"width": (-(-m // 8) * 8,)}  # of more rows than there is room for no program is made
    machine = machine_of(target)
    if not isinstance(machine, Gpu):
        return {**width, "block_n": choose(64, 128, 256), "block_k": choose(256, 128, 512)}
    block_n = 128 if n >= 128 * machine.processors else 64
    block_k = 16 if dtype == "float32" else 128 if block_n == 128 or m > 32 or k < 1024 else 256
    return {
        **width,
        "block_n": choose(block_n, 64, 128, 192, 256),
        "block_k": choose(block_k, 64, 128, 256, 512),
        "stages": choose(0, 3, 4, 5, 6, 8),
        **instructions(machine, dtype),
    }


SKINNY_MATMUL = Kernel(
    name="skinny_matmul",
    summary="C = activation(A B^T + bias) + residual for few rows of A",
    make=skinny_matmul,
    parameters=_knobs,
    inputs=inputs,
    reference=reference,
    cases=(
        {"m": 1, "n": 520, "k": 1024, "dtype": "bfloat16"},
        {"m": 16, "n": 100, "k": 776, "dtype": "float16", "bias": True, "activation": "silu"},
        {"m": 3, "n": 65, "k": 333, "dtype": "float32", "residual": True},
        {"m": 64, "n": 256, "k": 512, "dtype": "bfloat16"},
    ),
)
