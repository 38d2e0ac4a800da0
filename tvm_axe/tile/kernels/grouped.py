"""A matrix product for each group of rows, as of the experts of a mixture.

Rows are sorted by group, and how many each group has is data: ``starts`` says where each begins. What runs over the
rows is cut into tiles group by group, so a tile has one matrix. A mixture of experts is two of these: one `gated`,
``silu(X G^T) * (X U^T)``, and one back to the model's width, `weighted` by what the router says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.data import normal, offsets
from tvm_axe.tile.kernels.epilogue import ACTIVATIONS, STEEPEST
from tvm_axe.tile.kernels.kernel import (
    Expected,
    Kernel,
    Knobs,
    Problem,
    Recipe,
    choose,
    only_used,
    product_slack,
    stored,
)
from tvm_axe.tile.kernels.tiling import instructions, matmul_knobs

_SLOTS = 256
"""Tiles that a block of the first program finds."""


def grouped_matmul(
    rows: int,
    n: int,
    k: int,
    groups: int,
    dtype: str,
    transpose_b: bool = True,
    activation: str = "none",
    gated: bool = False,
    weighted: bool = False,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    turned: int = 0,
    stages: int = 0,
    instruction: str | None = None,
    swizzle: int = 1,
) -> Recipe:
    """Y[r] = activation(X[r] W[g]^T) for the rows r of group g, which are starts[g] to starts[g + 1].

    X is (rows, k), Y (rows, n), and W (groups, n, k), or (groups, k, n) without `transpose_b`. `starts` ascends and
    stays within the rows; rows that are in no group, before the first or behind the last, are left as they are.

    Parameters
    ----------
    gated : bool
        W has twice the columns: those of the gate, then the others. Y = activation(X G^T) * (X U^T).
    weighted : bool
        Rows of Y are multiplied by `weights`, float32 of (rows,).
    turned : int
        Not 0: the product is computed transposed, so that the rows come on the side of the tensor cores' instructions
        that takes any multiple of 8, and not 64. For groups of few rows.
    """
    operand, wide, across = stored(dtype), 2 * n if gated else n, bool(turned)
    # A group begins at most one tile that isn't full, and none if it has no row.
    tiles = rows // block_m + min(groups, rows)
    w_shape = (groups, wide, k) if transpose_b else (groups, k, wide)
    w_tile = (block_n, block_k) if transpose_b else (block_k, block_n)
    c_tile = (block_n, block_m) if across else (block_m, block_n)
    if activation not in ACTIVATIONS:
        raise TileError(f"grouped_matmul: activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")

    def w_at(w: tirx.Buffer, group: Any, column: Any, term: Any) -> Any:
        return w[group, column, term] if transpose_b else w[group, term, column]

    def multiply(x: tirx.Buffer, w: tirx.Buffer, c: tirx.Buffer) -> Any:
        if across:
            return tile.gemm(w, x, c, transpose_a=not transpose_b, transpose_b=True, instruction=instruction)
        return tile.gemm(x, w, c, transpose_b=transpose_b, instruction=instruction)

    def finished(value: Any, up: Any, weight: Any) -> Any:
        value = ACTIVATIONS[activation](value)
        value = value * up if gated else value
        return value * weight if weighted else value

    @T.prim_func
    def grouped_matmul(
        X: T.Buffer((rows, k), operand),
        W: T.Buffer(w_shape, operand),
        starts: T.Buffer((groups + 1,), "int32"),
        weights: T.Buffer((rows,), "float32"),
        tile_group: T.Buffer((tiles,), "int32"),
        tile_row: T.Buffer((tiles,), "int32"),
        Y: T.Buffer((rows, n), operand),
    ) -> None:
        with tile.kernel(tiles, tile.cdiv(n, block_n), swizzle=swizzle) as (t, j):
            x_tile = tile.shared((block_m, block_k), operand)
            w = tile.shared(w_tile, operand)
            c = tile.fragment(c_tile, "float32")
            if gated:
                w_up = tile.shared(w_tile, operand)
                up = tile.fragment(c_tile, "float32")
            group = tile_group[t]
            if group >= 0:
                row = tile_row[t]
                stop = starts[group + 1]
                tile.fill(c, 0)
                if gated:
                    tile.fill(up, 0)
                for l in tile.pipelined(tile.cdiv(k, block_k), stages=stages or None):
                    tile.copy(X[row, l * block_k], x_tile)
                    tile.copy(w_at(W, group, j * block_n, l * block_k), w)
                    multiply(x_tile, w, c)
                    if gated:
                        tile.copy(w_at(W, group, n + j * block_n, l * block_k), w_up)
                        multiply(x_tile, w_up, up)
                if across:
                    with tile.parallel(block_n, block_m) as (y, x):
                        if row + x < stop and j * block_n + y < n:
                            Y[row + x, j * block_n + y] = T.cast(
                                finished(c[y, x], up[y, x] if gated else None, weights[row + x]), operand
                            )
                else:
                    if activation != "none" or gated or weighted:
                        with tile.parallel(block_m, block_n) as (x, y):
                            if row + x < stop:
                                c[x, y] = finished(c[x, y], up[x, y] if gated else None, weights[row + x])
                    if row + block_m <= stop:
                        tile.copy(c, Y[row, j * block_n])
                    else:
                        with tile.parallel(block_m, block_n) as (x, y):
                            if row + x < stop and j * block_n + y < n:
                                Y[row + x, j * block_n + y] = T.cast(c[x, y], operand)

    given = ("X", "W", "starts", *(("weights",) if weighted else ()))
    return Recipe((tile.read(_find_tiles(groups, tiles, block_m)), only_used(grouped_matmul)), given, ("Y",))


def _find_tiles(groups: int, tiles: int, block_m: int) -> tirx.PrimFunc:
    """The group and the first row of each tile, group by group; group -1 behind the last.

    Running sums of how many tiles the groups have, in as many steps as the number of groups has digits; then each tile
    counts the groups that end before it, in as many steps again.
    """
    digits = groups.bit_length()

    @T.prim_func
    def find_tiles(
        starts: T.Buffer((groups + 1,), "int32"),
        tile_group: T.Buffer((tiles,), "int32"),
        tile_row: T.Buffer((tiles,), "int32"),
    ) -> None:
        with tile.kernel(tile.cdiv(tiles, _SLOTS)) as b:
            until = tile.shared((groups,), "int32")
            sums = tile.shared((groups,), "int32")
            ended = tile.fragment((_SLOTS,), "int32")
            with tile.parallel(groups) as g:
                until[g] = (starts[g + 1] - starts[g] + (block_m - 1)) // block_m
            for digit in range(digits):
                with tile.parallel(groups) as g:
                    sums[g] = until[g] + T.if_then_else(
                        g >= T.shift_left(1, digit), until[T.max(g - T.shift_left(1, digit), 0)], 0
                    )
                tile.copy(sums, until)
            tile.fill(ended, 0)
            for digit in range(digits):
                with tile.parallel(_SLOTS) as s:
                    step: T.let = T.shift_right(1 << (digits - 1), digit)
                    ended[s] = ended[s] + T.if_then_else(
                        ended[s] + step <= groups and until[T.min(ended[s] + step, groups) - 1] <= b * _SLOTS + s,
                        step,
                        0,
                    )
            with tile.parallel(_SLOTS) as s:
                if b * _SLOTS + s < tiles:
                    tile_group[b * _SLOTS + s] = T.if_then_else(ended[s] < groups, ended[s], -1)
                    tile_row[b * _SLOTS + s] = starts[T.min(ended[s], groups - 1)] + block_m * (
                        b * _SLOTS + s - T.if_then_else(ended[s] > 0, until[T.max(ended[s] - 1, 0)], 0)
                    )

    return find_tiles


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    rows, n, k, groups = (problem[name] for name in ("rows", "n", "k", "groups"))
    operand, wide = stored(problem["dtype"]), 2 * n if problem.get("gated", False) else n
    w_shape = (wide, k) if problem.get("transpose_b", True) else (k, wide)
    drawn = {
        "X": normal(rng, (rows, k), operand),
        "W": normal(rng, (groups, *w_shape), operand),
        "starts": offsets(rng, rows, groups),
    }
    return drawn | ({"weights": rng.uniform(0, 1, rows).astype("float32")} if problem.get("weighted", False) else {})


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The rows that are in groups."""
    n, dtype, starts = problem["n"], problem["dtype"], arrays["starts"]
    x, w = (arrays[name].astype("float64") for name in ("X", "W"))
    w = np.swapaxes(w, -1, -2) if problem.get("transpose_b", True) else w
    bounds = list(itertools.pairwise(starts))
    sums = np.concatenate([x[a:b] @ w[g] for g, (a, b) in enumerate(bounds)])
    sizes = np.concatenate([np.abs(x[a:b]) @ np.abs(w[g]) for g, (a, b) in enumerate(bounds)])
    activation = problem.get("activation", "none")
    value = ACTIVATIONS[activation](sums[:, :n])
    magnitude = sizes[:, :n] * (1 if activation == "none" else STEEPEST)
    if problem.get("gated", False):
        # Both factors are off by rounding: by the sums' relative error of what the other may be at most.
        magnitude = magnitude * np.abs(sums[:, n:]) + np.abs(value) * sizes[:, n:]
        value = value * sums[:, n:]
    if problem.get("weighted", False):
        weights = arrays["weights"][starts[0] : starts[-1], None].astype("float64")
        value, magnitude = value * weights, magnitude * weights
    return {"Y": Expected(value, product_slack(dtype, stored(dtype), problem["k"], magnitude))}


def tiles_of_groups(target: Target, problem: Problem, average: int) -> Knobs:
    """The tiles of a product with the rows of an average group; transposed where these are few.

    A tile of a gate has two accumulators, and as many columns less. Transposed, a tile has as many rows as most groups:
    by a normal distribution's measure, the average and two standard deviations of an even routing.
    """
    machine = machine_of(target)
    dtype = problem["dtype"]
    found = dict(matmul_knobs(target, {**problem, "m": average, "batch": problem["groups"]}))
    if problem.get("gated", False):
        halves = [size // 2 for size in found["block_n"] if isinstance(size, int) and size % 16 == 0]
        found["block_n"] = tuple(dict.fromkeys(size for size in halves if size >= 16)) or found["block_n"]
    if not isinstance(machine, Gpu) or dtype == "float32" or machine.tensor_cores != "wgmma":
        return {**found, "turned": (0,)}
    most = 8 * math.ceil((average + 2 * math.sqrt(average)) / 8)
    if most > 64:
        return {**found, "turned": (0, 1)}
    return {
        "block_m": choose(most, 8, 16, 32, 64, 128),
        "block_n": choose(64 if problem.get("gated", False) else 128, 64, 128, 192),
        "block_k": choose(128, 32, 64, 256),
        "turned": (1,),
        "stages": choose(0, 2, 3, 4, 5, 6),
        "swizzle": choose(1, 4, 8, 16),
        **instructions(machine, dtype),
    }


def _knobs(target: Target, problem: Problem) -> Knobs:
    return tiles_of_groups(target, problem, tile.cdiv(problem["rows"], problem["groups"]))


GROUPED_MATMUL = Kernel(
    name="grouped_matmul",
    summary="Y[rows of g] = activation(X[rows of g] W[g]^T), gated and weighted, for ragged groups g",
    make=grouped_matmul,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"rows": 300, "n": 136, "k": 72, "groups": 4, "dtype": "float32"},
        {"rows": 513, "n": 200, "k": 128, "groups": 8, "dtype": "bfloat16"},
        {"rows": 1, "n": 8, "k": 8, "groups": 3, "dtype": "float16"},
        {"rows": 700, "n": 96, "k": 136, "groups": 5, "dtype": "bfloat16", "activation": "silu", "gated": True},
        {"rows": 130, "n": 72, "k": 64, "groups": 9, "dtype": "bfloat16", "activation": "silu", "gated": True,
         "weighted": True, "transpose_b": False},
        {"rows": 260, "n": 264, "k": 200, "groups": 2, "dtype": "float16", "transpose_b": False, "weighted": True,
         "activation": "relu"},
    ),
)  # fmt: skip
