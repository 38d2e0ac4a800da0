"""Matrix products whose sums are shared between blocks, for shapes with fewer tiles than multiprocessors.

Split-K cuts every sum into the same number of pieces, which a second program adds; stream-K cuts the whole work into
equal pieces, one a block, wherever the tiles' borders are, and adds atomically.

Source: Osama et al., "Stream-K: work-centric parallel decomposition for dense matrix-matrix multiplication on the GPU",
PPoPP 2023.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.machines import machine_of
from tvm_axe.tile.kernels.epilogue import Epilogue
from tvm_axe.tile.kernels.gemm import inputs, reference
from tvm_axe.tile.kernels.kernel import Kernel, Knobs, Problem, Recipe, choose, only_used, stored
from tvm_axe.tile.kernels.tiling import matmul_knobs
from tvm_axe.tile.program import TileProgram

COMBINED = (8, 128)
"""The tile of the programs that add or convert what others left in scratch memory."""


def split_k_matmul(
    m: int,
    n: int,
    k: int,
    dtype: str,
    *,
    splits: int,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    instruction: str | None = None,
    swizzle: int = 1,
    **options: Any,
) -> Recipe:
    """C = epilogue(A B^T): `splits` partial products in scratch memory, then their sum; the same bits every time."""
    operand = stored(dtype)
    steps = tile.cdiv(k, block_k)
    share = tile.cdiv(steps, splits)
    splits = tile.cdiv(steps, share)  # none is empty

    @T.prim_func
    def partial_products(
        A: T.Buffer((m, k), operand), B: T.Buffer((n, k), operand), partial: T.Buffer((splits, m, n), "float32")
    ) -> None:
        with tile.kernel(splits, tile.cdiv(m, block_m), tile.cdiv(n, block_n), swizzle=swizzle) as (z, i, j):
            a = tile.shared((block_m, block_k), operand)
            b = tile.shared((block_n, block_k), operand)
            c = tile.fragment((block_m, block_n), "float32")
            tile.fill(c, 0)
            stop = T.min((z + 1) * share, steps)
            for l in tile.pipelined(z * share, stop, stages=stages or None):
                tile.copy(A[i * block_m, l * block_k], a)
                tile.copy(B[j * block_n, l * block_k], b)
                tile.gemm(a, b, c, transpose_b=True, instruction=instruction)
            tile.copy(c, partial[z, i * block_m, j * block_n])

    return Recipe(
        (tile.read(partial_products), combine(splits, m, n, stored(dtype), Epilogue(**options))),
        ("A", "B", *Epilogue(**options).tensors),
        ("C",),
    )


def combine(splits: int, m: int, n: int, out: str, epilogue: Epilogue) -> TileProgram:
    """The program C = epilogue(the sum of `partial`'s m x n slices)."""
    rows, columns = COMBINED

    @T.prim_func
    def combine(
        partial: T.Buffer((splits, m, n), "float32"),
        bias: T.Buffer((n,), out),
        residual: T.Buffer((m, n), out),
        C: T.Buffer((m, n), out),
    ) -> None:
        with tile.kernel(tile.cdiv(m, rows), tile.cdiv(n, columns)) as (i, j):
            piece = tile.fragment((rows, columns), "float32")
            c = tile.fragment((rows, columns), "float32")
            tile.fill(c, 0)
            for z in range(splits):
                tile.copy(partial[z, i * rows, j * columns], piece)
                with tile.parallel(rows, columns) as (x, y):
                    c[x, y] = c[x, y] + piece[x, y]
            if not epilogue.empty:
                with tile.parallel(rows, columns) as (x, y):
                    if i * rows + x < m and j * columns + y < n:
                        c[x, y] = epilogue.expression(c[x, y], (i * rows + x, j * columns + y), None, bias, residual)
            tile.copy(c, C[i * rows, j * columns])

    return only_used(combine)


def stream_k_matmul(
    m: int,
    n: int,
    k: int,
    dtype: str,
    *,
    workers: int,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    instruction: str | None = None,
) -> Recipe:
    """C = A B^T: the (tile, step) pairs in one line, of which each of `workers` blocks takes an equal stretch.

    A tile on whose sum several work is added up atomically, in no order, in float32 that starts as zero.
    """
    operand = stored(dtype)
    across, steps = tile.cdiv(n, block_n), tile.cdiv(k, block_k)
    pairs = tile.cdiv(m, block_m) * across * steps
    rows, columns = COMBINED

    @T.prim_func
    def clear(total: T.Buffer((m, n), "float32")) -> None:
        with tile.kernel(tile.cdiv(m, rows), tile.cdiv(n, columns)) as (i, j):
            zero = tile.fragment((rows, columns), "float32")
            tile.fill(zero, 0)
            tile.copy(zero, total[i * rows, j * columns])

    @T.prim_func
    def stretches(
        A: T.Buffer((m, k), operand), B: T.Buffer((n, k), operand), total: T.Buffer((m, n), "float32")
    ) -> None:
        with tile.kernel(workers) as w:
            a = tile.shared((block_m, block_k), operand)
            b = tile.shared((block_n, block_k), operand)
            c = tile.fragment((block_m, block_n), "float32")
            first = T.meta_var(w * pairs // workers)
            last = T.meta_var((w + 1) * pairs // workers)
            for t in range(first // steps, tile.cdiv(last, steps)):
                tile.fill(c, 0)
                for l in tile.pipelined(
                    T.max(first - t * steps, 0), T.min(last - t * steps, steps), stages=stages or None
                ):
                    tile.copy(A[t // across * block_m, l * block_k], a)
                    tile.copy(B[t % across * block_n, l * block_k], b)
                    tile.gemm(a, b, c, transpose_b=True, instruction=instruction)
                tile.copy(c, total[t // across * block_m, t % across * block_n], atomic="add")

    @T.prim_func
    def convert(total: T.Buffer((m, n), "float32"), C: T.Buffer((m, n), operand)) -> None:
        with tile.kernel(tile.cdiv(m, rows), tile.cdiv(n, columns)) as (i, j):
            c = tile.fragment((rows, columns), "float32")
            tile.copy(total[i * rows, j * columns], c)
            tile.copy(c, C[i * rows, j * columns])

    return Recipe((tile.read(clear), tile.read(stretches), tile.read(convert)), ("A", "B"), ("C",))


def _split_knobs(target: Target, problem: Problem) -> Knobs:
    """As many pieces as multiprocessors are left over, each of two steps or more."""
    knobs = matmul_knobs(target, problem)
    block_m, block_n, block_k = (int(knobs[name][0]) for name in ("block_m", "block_n", "block_k"))
    tiles = tile.cdiv(problem["m"], block_m) * tile.cdiv(problem["n"], block_n)
    most = tile.cdiv(problem["k"], 2 * block_k)
    return {**knobs, "splits": choose(max(1, min(machine_of(target).processors // tiles, most)), 1, 2, 3, 4, 6, 8, 16)}


def _stream_knobs(target: Target, problem: Problem) -> Knobs:
    knobs = {name: values for name, values in matmul_knobs(target, problem).items() if name != "swizzle"}
    processors = machine_of(target).processors
    return {**knobs, "workers": choose(processors, 2 * processors)}


SPLIT_K_MATMUL = Kernel(
    name="split_k_matmul",
    summary="C = activation(A B^T + bias) + residual, each sum in pieces that a second program adds",
    make=split_k_matmul,
    parameters=_split_knobs,
    inputs=inputs,
    reference=reference,
    cases=(
        {"m": 64, "n": 72, "k": 1500, "dtype": "float32", "bias": True, "activation": "gelu"},
        {"m": 1, "n": 130, "k": 2048, "dtype": "bfloat16", "residual": True},
        {"m": 130, "n": 1, "k": 64, "dtype": "float16"},
    ),
)

STREAM_K_MATMUL = Kernel(
    name="stream_k_matmul",
    summary="C = A B^T, an equal stretch of the work for every block",
    make=stream_k_matmul,
    parameters=_stream_knobs,
    inputs=inputs,
    reference=reference,
    cases=(
        {"m": 200, "n": 328, "k": 520, "dtype": "float32"},
        {"m": 384, "n": 256, "k": 1000, "dtype": "bfloat16"},
        {"m": 1, "n": 1, "k": 3, "dtype": "float32"},
    ),
)
