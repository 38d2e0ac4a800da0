"""A matrix product whose matrix each row chooses, as tokens choose experts: ``Y[r] = X[r] W[labels[r]]``.

Nothing is asked of the labels. Rows that follow each other and have one label are computed together, in tiles, so what
is sorted by label is as fast as groups (`tvm_axe.tile.kernels.grouped`), and what isn't is right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.grouped import tiles_of_groups
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Knobs, Problem, Recipe, product_slack, stored

_CHUNK = 256
"""Rows that a block of the first two programs looks at."""


def gathered_matmul(
    rows: int,
    n: int,
    k: int,
    groups: int,
    dtype: str,
    transpose_b: bool = True,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    turned: int = 0,
    stages: int = 0,
    instruction: str | None = None,
    swizzle: int = 1,
) -> Recipe:
    """Y[r] = X[r] W[labels[r]]^T: X (rows, k), W (groups, n, k), or (groups, k, n) without `transpose_b`; Y (rows, n).

    Rows whose label is none of a group are zero. Two programs list the tiles' first rows: a tile begins where the label
    changes, and at each multiple of `block_m`. Where that is more often than sorted labels make it, blocks of the third
    program take several tiles each.

    Parameters
    ----------
    turned : int
        Not 0: the product is computed transposed, as `grouped_matmul` is for groups of few rows.
    """
    operand, across = stored(dtype), bool(turned)
    slots = tile.cdiv(rows, block_m) + min(groups, rows)
    w_shape, w_tile = ((n, k), (block_n, block_k)) if transpose_b else ((k, n), (block_k, block_n))
    c_tile = (block_n, block_m) if across else (block_m, block_n)

    @T.prim_func
    def gathered_matmul(
        X: T.Buffer((rows, k), operand),
        W: T.Buffer((groups, *w_shape), operand),
        used: T.Buffer((1,), "int32"),
        tile_row: T.Buffer((rows + 1,), "int32"),
        tile_group: T.Buffer((rows,), "int32"),
        Y: T.Buffer((rows, n), operand),
    ) -> None:
        with tile.kernel(slots, tile.cdiv(n, block_n), swizzle=swizzle, persistent=True) as (t, j):
            x_tile = tile.shared((block_m, block_k), operand)
            w = tile.shared(w_tile, operand)
            c = tile.fragment(c_tile, "float32")
            for turn in range((used[0] - t + (slots - 1)) // slots):
                row = tile_row[t + turn * slots]
                stop = tile_row[t + turn * slots + 1]
                group = tile_group[t + turn * slots]
                tile.fill(c, 0)
                if group >= 0:
                    for l in tile.pipelined(tile.cdiv(k, block_k), stages=stages or None):
                        tile.copy(X[row, l * block_k], x_tile)
                        tile.copy(
                            W[group, j * block_n, l * block_k] if transpose_b else W[group, l * block_k, j * block_n], w
                        )
                        if across:
                            tile.gemm(w, x_tile, c, transpose_a=not transpose_b, transpose_b=True)
                        else:
                            tile.gemm(x_tile, w, c, transpose_b=transpose_b, instruction=instruction)
                if across:
                    with tile.parallel(block_n, block_m) as (y, x):
                        if row + x < stop and j * block_n + y < n:
                            Y[row + x, j * block_n + y] = T.cast(c[y, x], operand)
                elif row + block_m <= stop:
                    tile.copy(c, Y[row, j * block_n])
                else:
                    with tile.parallel(block_m, block_n) as (x, y):
                        if row + x < stop and j * block_n + y < n:
                            Y[row + x, j * block_n + y] = T.cast(c[x, y], operand)

    programs = (*map(tile.read, _listing(rows, groups, block_m)), tile.read(gathered_matmul))
    return Recipe(programs, ("X", "W", "labels"), ("Y",))


def _listing(rows: int, groups: int, block_m: int) -> tuple[tirx.PrimFunc, tirx.PrimFunc]:
    """What lists the tiles: how many begin in each chunk of rows, and then where, and with which group or -1.

    Behind the last stands the number of rows, where that one ends.
    """
    chunks, steps = tile.cdiv(rows, _CHUNK), (_CHUNK - 1).bit_length()

    def begins(labels: tirx.Buffer, row: Any) -> Any:
        inside = T.min(row, rows - 1)
        another = labels[inside] != labels[T.max(inside - 1, 0)]
        begun = tirx.all(row < rows, tirx.any(row % block_m == 0, another))
        return T.if_then_else(begun, T.int32(1), T.int32(0))

    @T.prim_func
    def count_tiles(labels: T.Buffer((rows,), "int32"), counts: T.Buffer((chunks,), "int32")) -> None:
        with tile.kernel(chunks) as chunk:
            begun = tile.fragment((1, _CHUNK), "int32")
            count = tile.fragment((1,), "int32")
            with tile.parallel(1, _CHUNK) as (z, x):
                begun[z, x] = begins(labels, chunk * _CHUNK + x)
            tile.sum(begun, count)
            with tile.parallel(1) as z:
                counts[chunk + z] = count[z]

    @T.prim_func
    def list_tiles(
        labels: T.Buffer((rows,), "int32"),
        counts: T.Buffer((chunks,), "int32"),
        used: T.Buffer((1,), "int32"),
        tile_row: T.Buffer((rows + 1,), "int32"),
        tile_group: T.Buffer((rows,), "int32"),
    ) -> None:
        with tile.kernel(chunks) as chunk:
            earlier = tile.fragment((1, chunks), "int32")
            before = tile.fragment((1,), "int32")
            until = tile.shared((_CHUNK,), "int32")
            sums = tile.shared((_CHUNK,), "int32")
            with tile.parallel(1, chunks) as (z, x):
                earlier[z, x] = T.if_then_else(x < chunk, counts[x], 0)
            tile.sum(earlier, before)
            with tile.parallel(_CHUNK) as x:
                until[x] = begins(labels, chunk * _CHUNK + x)
            for step in range(steps):
                with tile.parallel(_CHUNK) as x:
                    sums[x] = until[x] + T.if_then_else(
                        x >= T.shift_left(1, step), until[T.max(x - T.shift_left(1, step), 0)], 0
                    )
                tile.copy(sums, until)
            # Tiles have numbers of their own: sums that grow by one where a tile begins.
            with tile.parallel(_CHUNK, distinct=True) as x:
                if begins(labels, chunk * _CHUNK + x) == 1:
                    at: T.let = before[0] + until[x] - 1
                    label: T.let = labels[T.min(chunk * _CHUNK + x, rows - 1)]
                    tile_row[at] = chunk * _CHUNK + x
                    tile_group[at] = T.if_then_else(label >= 0 and label < groups, label, -1)
            if chunk == chunks - 1:
                with tile.parallel(1) as z:
                    used[z] = before[z] + until[_CHUNK - 1]
                    tile_row[before[z] + until[_CHUNK - 1]] = rows

    return count_tiles, list_tiles


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    """Labels are sorted but for some, and some are none of a group."""
    rows, n, k, groups = (problem[name] for name in ("rows", "n", "k", "groups"))
    operand = stored(problem["dtype"])
    labels = np.sort(rng.integers(-1, groups + 1, rows)).astype("int32")
    moved = rng.random(rows) < 0.1
    labels[moved] = rng.integers(-1, groups + 1, int(moved.sum()))
    w_shape = (n, k) if problem.get("transpose_b", True) else (k, n)
    return {"X": normal(rng, (rows, k), operand), "W": normal(rng, (groups, *w_shape), operand), "labels": labels}


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    x, w = (arrays[name].astype("float64") for name in ("X", "W"))
    w = np.swapaxes(w, -1, -2) if problem.get("transpose_b", True) else w
    value = np.zeros((len(x), problem["n"]))
    magnitude = np.zeros_like(value)
    for group in range(problem["groups"]):
        own = arrays["labels"] == group
        value[own], magnitude[own] = x[own] @ w[group], np.abs(x[own]) @ np.abs(w[group])
    return {"Y": Expected(value, product_slack(problem["dtype"], stored(problem["dtype"]), problem["k"], magnitude))}


def _knobs(target: Target, problem: Problem) -> Knobs:
    return tiles_of_groups(target, problem, math.ceil(problem["rows"] / problem["groups"]))


GATHERED_MATMUL = Kernel(
    name="gathered_matmul",
    summary="Y[r] = X[r] W[labels[r]]^T for any labels",
    make=gathered_matmul,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"rows": 300, "n": 136, "k": 72, "groups": 4, "dtype": "float32", "transpose_b": False},
        {"rows": 513, "n": 200, "k": 128, "groups": 8, "dtype": "bfloat16"},
        {"rows": 1, "n": 8, "k": 8, "groups": 3, "dtype": "float16"},
        {"rows": 700, "n": 96, "k": 136, "groups": 5, "dtype": "bfloat16", "transpose_b": False},
    ),
)
