"""A matrix product for each group of rows, as of the experts of a mixture."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.tile.kernels.data import normal, offsets
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Knobs, Problem, Recipe, product_slack, stored
from tvm_axe.tile.kernels.tiling import matmul_knobs


def grouped_matmul(
    rows: int,
    n: int,
    k: int,
    groups: int,
    dtype: str,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    instruction: str | None = None,
    swizzle: int = 1,
) -> Recipe:
    """Y[r] = X[r] W[g]^T for the rows r of group g, starts[g] to starts[g + 1]: X (rows, k), W (groups, n, k).

    How the rows fall into groups is data: the first program finds the group and the first row of every tile, of which
    there are at most as many as full ones plus one a group.
    """
    operand = stored(dtype)
    tiles = rows // block_m + groups

    @T.prim_func
    def find_tiles(
        starts: T.Buffer((groups + 1,), "int32"),
        tile_group: T.Buffer((tiles,), "int32"),
        tile_row: T.Buffer((tiles,), "int32"),
    ) -> None:
        with tile.kernel(tiles) as t:
            before = tile.local((1,), "int32")
            group = tile.local((1,), "int32")
            row = tile.local((1,), "int32")
            before[0] = 0
            group[0] = -1
            row[0] = 0
            for g in range(groups):
                first = starts[g]
                count = (starts[g + 1] - first + (block_m - 1)) // block_m
                if t >= before[0] and t < before[0] + count:
                    group[0] = g
                    row[0] = first + (t - before[0]) * block_m
                before[0] = before[0] + count
            with tile.parallel(1) as x:
                tile_group[t + x] = group[0]
                tile_row[t + x] = row[0]

    @T.prim_func
    def grouped_matmul(
        X: T.Buffer((rows, k), operand),
        W: T.Buffer((groups, n, k), operand),
        starts: T.Buffer((groups + 1,), "int32"),
        tile_group: T.Buffer((tiles,), "int32"),
        tile_row: T.Buffer((tiles,), "int32"),
        Y: T.Buffer((rows, n), operand),
    ) -> None:
        with tile.kernel(tiles, tile.cdiv(n, block_n), swizzle=swizzle) as (t, j):
            a = tile.shared((block_m, block_k), operand)
            b = tile.shared((block_n, block_k), operand)
            c = tile.fragment((block_m, block_n), "float32")
            group = tile_group[t]
            if group >= 0:
                row = tile_row[t]
                stop = starts[group + 1]
                tile.fill(c, 0)
                for l in tile.pipelined(tile.cdiv(k, block_k), stages=stages or None):
                    tile.copy(X[row, l * block_k], a)
                    tile.copy(W[group, j * block_n, l * block_k], b)
                    tile.gemm(a, b, c, transpose_b=True, instruction=instruction)
                if row + block_m <= stop:
                    tile.copy(c, Y[row, j * block_n])
                else:
                    with tile.parallel(block_m, block_n) as (x, y):
                        if row + x < stop and j * block_n + y < n:
                            Y[row + x, j * block_n + y] = T.cast(c[x, y], operand)

    return Recipe((tile.read(find_tiles), tile.read(grouped_matmul)), ("X", "W", "starts"), ("Y",))


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    rows, n, k, groups = (problem[name] for name in ("rows", "n", "k", "groups"))
    operand = stored(problem["dtype"])
    x, w = normal(rng, (rows, k), operand), normal(rng, (groups, n, k), operand)
    return {"X": x, "W": w, "starts": offsets(rng, rows, groups)}


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    x, w = (arrays[name].astype("float64") for name in ("X", "W"))
    bounds = list(zip(arrays["starts"], arrays["starts"][1:]))
    value = np.concatenate([x[a:b] @ w[g].T for g, (a, b) in enumerate(bounds)])
    magnitude = np.concatenate([np.abs(x[a:b]) @ np.abs(w[g]).T for g, (a, b) in enumerate(bounds)])
    dtype = problem["dtype"]
    return {"Y": Expected(value, product_slack(dtype, stored(dtype), problem["k"], magnitude))}


def _knobs(target: Target, problem: Problem) -> Knobs:
    """The tiles of a product with the rows of an average group."""
    average = tile.cdiv(problem["rows"], problem["groups"])
    return matmul_knobs(target, {**problem, "m": average, "batch": problem["groups"]})


GROUPED_MATMUL = Kernel(
    name="grouped_matmul",
    summary="Y[rows of g] = X[rows of g] W[g]^T for ragged groups g",
    make=grouped_matmul,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"rows": 300, "n": 136, "k": 72, "groups": 4, "dtype": "float32"},
        {"rows": 513, "n": 200, "k": 128, "groups": 8, "dtype": "bfloat16"},
        {"rows": 1, "n": 8, "k": 8, "groups": 3, "dtype": "float16"},
    ),
)
