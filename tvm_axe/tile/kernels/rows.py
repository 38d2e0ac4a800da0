"""What is computed from whole rows in one pass over memory: RMSNorm, layer norm and softmax.

A row is held on chip between its reading and its writing, so it must fit a block's registers: up to 64512 columns.
How many rows there are may be a variable, which a call knows.
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
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import LOG2E
from tvm_axe.tile.kernels.kernel import (
    ROUNDING,
    Expected,
    Kernel,
    Knobs,
    Problem,
    Recipe,
    choose,
    counted,
    only_used,
    power_of_two,
    rounding_slack,
)

SCALED = ("float8_e4m3fn", "int8")
"""The types of eight bits that results are scaled to."""

_HELD = 4096
"""Elements that a block holds at least, where there are rows enough: 16 a thread of 256."""


def rms_norm(
    rows: Any,
    columns: int,
    dtype: str,
    epsilon: float = 1e-6,
    residual: bool = False,
    out_dtype: str | None = None,
    *,
    block_rows: int,
) -> Recipe:
    """Y = S / sqrt(the mean of its row's squares + epsilon) * weight: X and Y (rows, columns), weight (columns,).

    S is X, or with `residual` X + R in float32, which is given back as S of `dtype`: R and S (rows, columns). With an
    `out_dtype` of eight bits, ``"float8_e4m3fn"`` or ``"int8"``, Y is divided by a number of its row, `scales` (rows,)
    of float32, so that its largest element is the type's largest number, and rounded to the nearest; of a row of zeros
    the scale is 1.

    Raises
    ------
    TileError
        `out_dtype` is another type.

    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
    """
    if out_dtype is not None and out_dtype not in SCALED:
        raise TileError(f"rms_norm: out_dtype is one of {', '.join(SCALED)}, got {out_dtype}")
    width, count, out = padded(columns), counted(rows), out_dtype or dtype
    most = float(tirx.max_value(out).value)

    @T.prim_func
    def rms_norm(
        X: T.Buffer((rows, columns), dtype),
        R: T.Buffer((rows, columns), dtype),
        weight: T.Buffer((columns,), dtype),
        S: T.Buffer((rows, columns), dtype),
        scales: T.Buffer((rows,), "float32"),
        Y: T.Buffer((rows, columns), out),
    ) -> None:
        with tile.kernel(tile.cdiv(count, block_rows)) as i:
            x = tile.fragment((block_rows, width), "float32")
            square = tile.fragment((block_rows, width), "float32")
            factor = tile.fragment((block_rows,), "float32")
            w = tile.fragment((width,), "float32")
            tile.copy(X[i * block_rows, 0], x)
            if residual:
                tile.copy(R[i * block_rows, 0], square)
                with tile.parallel(block_rows, width) as (r, c):
                    x[r, c] = x[r, c] + square[r, c]
                tile.copy(x, S[i * block_rows, 0])
            tile.copy(weight[0], w)
            with tile.parallel(block_rows, width) as (r, c):
                square[r, c] = x[r, c] * x[r, c]
            tile.sum(square, factor)
            with tile.parallel(block_rows) as r:
                factor[r] = T.rsqrt(factor[r] * T.float32(1 / columns) + T.float32(epsilon))
            with tile.parallel(block_rows, width) as (r, c):
                x[r, c] = x[r, c] * factor[r] * w[c]
            if out_dtype is not None:
                with tile.parallel(block_rows, width) as (r, c):
                    square[r, c] = T.abs(x[r, c])
                tile.max(square, factor)
                with tile.parallel(block_rows) as r:
                    factor[r] = T.if_then_else(factor[r] == T.float32(0), T.float32(1), factor[r] / T.float32(most))
                tile.copy(factor, scales[i * block_rows])
                with tile.parallel(block_rows, width) as (r, c):
                    x[r, c] = T.max(T.min(x[r, c] / factor[r], T.float32(most)), T.float32(-most))
                if out_dtype == "int8":
                    with tile.parallel(block_rows, width) as (r, c):
                        x[r, c] = T.nearbyint(x[r, c])
            tile.copy(x, Y[i * block_rows, 0])

    given = ("X", *(("R",) if residual else ()), "weight")
    made = (*(("S",) if residual else ()), *(("scales",) if out_dtype else ()), "Y")
    return Recipe((only_used(rms_norm),), given, made)


def layer_norm(rows: Any, columns: int, dtype: str, epsilon: float = 1e-5, *, block_rows: int) -> Recipe:
    """Y = (X less its row's mean) / sqrt(its row's variance + epsilon) * weight + bias: X and Y (rows, columns).

    Source: Ba, Kiros and Hinton, "Layer normalization", 2016.
    """
    width, count = padded(columns), counted(rows)

    @T.prim_func
    def layer_norm(
        X: T.Buffer((rows, columns), dtype),
        weight: T.Buffer((columns,), dtype),
        bias: T.Buffer((columns,), dtype),
        Y: T.Buffer((rows, columns), dtype),
    ) -> None:
        with tile.kernel(tile.cdiv(count, block_rows)) as i:
            x = tile.fragment((block_rows, width), "float32")
            square = tile.fragment((block_rows, width), "float32")
            mean = tile.fragment((block_rows,), "float32")
            factor = tile.fragment((block_rows,), "float32")
            w = tile.fragment((width,), "float32")
            b = tile.fragment((width,), "float32")
            tile.copy(X[i * block_rows, 0], x)
            tile.copy(weight[0], w)
            tile.copy(bias[0], b)
            tile.sum(x, mean)
            with tile.parallel(block_rows) as r:
                mean[r] = mean[r] * T.float32(1 / columns)
            with tile.parallel(block_rows, width) as (r, c):
                x[r, c] = (
                    T.Select(c < columns, x[r, c] - mean[r], T.float32(0)) if width > columns else x[r, c] - mean[r]
                )
            with tile.parallel(block_rows, width) as (r, c):
                square[r, c] = x[r, c] * x[r, c]
            tile.sum(square, factor)
            with tile.parallel(block_rows) as r:
                factor[r] = T.rsqrt(factor[r] * T.float32(1 / columns) + T.float32(epsilon))
            with tile.parallel(block_rows, width) as (r, c):
                x[r, c] = x[r, c] * factor[r] * w[c] + b[c]
            tile.copy(x, Y[i * block_rows, 0])

    return Recipe((tile.read(layer_norm),), ("X", "weight", "bias"), ("Y",))


def softmax(rows: Any, columns: int, dtype: str, *, block_rows: int) -> Recipe:
    """Y = exp(X) over its row's sum, from X less the row's largest element; both (rows, columns)."""
    width, count = padded(columns), counted(rows)

    @T.prim_func
    def softmax(X: T.Buffer((rows, columns), dtype), Y: T.Buffer((rows, columns), dtype)) -> None:
        with tile.kernel(tile.cdiv(count, block_rows)) as i:
            x = tile.fragment((block_rows, width), "float32")
            top = tile.fragment((block_rows,), "float32")
            total = tile.fragment((block_rows,), "float32")
            tile.copy(X[i * block_rows, 0], x)
            if width > columns:
                with tile.parallel(block_rows, width) as (r, c):
                    if c >= columns:
                        x[r, c] = T.float32("-inf")  # which weighs nothing, whatever the largest element is
            tile.max(x, top)
            with tile.parallel(block_rows, width) as (r, c):
                x[r, c] = T.exp2((x[r, c] - top[r]) * T.float32(LOG2E))
            tile.sum(x, total)
            with tile.parallel(block_rows) as r:
                total[r] = T.float32(1) / total[r]
            with tile.parallel(block_rows, width) as (r, c):
                x[r, c] = x[r, c] * total[r]
            tile.copy(x, Y[i * block_rows, 0])

    return Recipe((tile.read(softmax),), ("X",), ("Y",))


def padded(columns: int) -> int:
    """The width of a tile that holds a row: one that any number of threads' vectors divide."""
    return power_of_two(columns) if columns <= 1024 else -(-columns // 1024) * 1024


def _knobs(target: Target, problem: Problem) -> Knobs:
    """As many rows a block as it holds at least; of an unknown number, too: of fewer some of one block are empty."""
    rows = problem["rows"]
    held = max(1, _HELD // padded(problem["columns"])) if isinstance(machine_of(target), Gpu) else 4
    return {"block_rows": choose(min(held, power_of_two(rows)) if isinstance(rows, int) else held, 1, 2, 4, 8, 16)}


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    return {"X": normal(rng, (problem["rows"], problem["columns"]), problem["dtype"], 2.0)}


def _norm_inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    drawn = _inputs(rng, problem) | {"weight": normal(rng, (problem["columns"],), problem["dtype"])}
    if problem.get("residual"):
        drawn["R"] = normal(rng, (problem["rows"], problem["columns"]), problem["dtype"])
    if problem.get("out_dtype") and problem["rows"] > 1:  # a row of zeros, whose scale is 1
        for name in {"X", "R"} & drawn.keys():
            drawn[name][-1] = 0
    return drawn


def _norm_reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The sum of squares is off by columns * 2^-24 relatively at most, its root by half of that.

    An int8 is off where the next one is as near.
    """
    x, weight = (arrays[name].astype("float64") for name in ("X", "weight"))
    found, unit = dict[str, Expected](), ROUNDING["float32"] * (problem["columns"] / 2 + 8)
    if problem.get("residual"):
        x = x + arrays["R"].astype("float64")
        found["S"] = Expected(x, rounding_slack(problem["dtype"], ROUNDING["float32"], np.abs(x)))
    value = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + problem.get("epsilon", 1e-6)) * weight
    out = problem.get("out_dtype")
    if out is None:
        return {**found, "Y": Expected(value, rounding_slack(problem["dtype"], unit, np.abs(value)))}
    top = np.abs(value).max(axis=1)
    scales = np.where(top == 0, 1.0, top / tirx.max_value(out).value)
    found["scales"] = Expected(scales, (unit + 2 * ROUNDING["float32"]) * scales)
    exact, off = value / scales[:, None], 2 * unit + 4 * ROUNDING["float32"]
    if out != "int8":
        return {**found, "Y": Expected(exact, rounding_slack(out, off, np.abs(exact)))}
    nearest, less, more = (np.rint(exact * (1 + far)) for far in (0, -off, off))
    return {**found, "Y": Expected(nearest, np.maximum(np.abs(less - nearest), np.abs(more - nearest)))}


def _layer_inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    return _norm_inputs(rng, problem) | {"bias": normal(rng, (problem["columns"],), problem["dtype"])}


def _layer_reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The mean is off by columns * 2^-24 of the largest element at most, and so is each difference from it."""
    x, weight, bias = (arrays[name].astype("float64") for name in ("X", "weight", "bias"))
    far = x - x.mean(axis=1, keepdims=True)
    factor = 1 / np.sqrt(np.square(far).mean(axis=1, keepdims=True) + problem.get("epsilon", 1e-5))
    unit = ROUNDING["float32"] * (problem["columns"] + 8)
    scaled = far * factor * weight
    # The mean of squares is off by twice what a difference is off, relative to the root that it is divided by.
    off = unit * np.abs(x).max(axis=1, keepdims=True) * factor
    size = np.abs(scaled) * (1 + off / unit) + np.abs(weight) * off / unit + np.abs(bias)
    return {"Y": Expected(scaled + bias, rounding_slack(problem["dtype"], unit, size))}


def _softmax_reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The exponent is rounded as a float32 of its size, the sum is off by columns * 2^-24 relatively at most."""
    x = arrays["X"].astype("float64")
    exponent = x - x.max(axis=1, keepdims=True)
    value = np.exp(exponent)
    value /= value.sum(axis=1, keepdims=True)
    unit = ROUNDING["float32"] * (problem["columns"] + 8 + 4 * np.abs(exponent))
    return {"Y": Expected(value, rounding_slack(problem["dtype"], unit, value))}


_CASES = (
    {"rows": 128, "columns": 1024, "dtype": "float32"},
    {"rows": 7, "columns": 5120, "dtype": "bfloat16"},
    {"rows": 1000, "columns": 1, "dtype": "float32"},
    {"rows": 1, "columns": 3001, "dtype": "float16"},
    {"rows": 33, "columns": 200, "dtype": "bfloat16"},
)

RMS_NORM = Kernel(
    name="rms_norm",
    summary="Y = X / sqrt(mean of the row's squares + epsilon) * weight, of X + R or X, in eight bits or not",
    make=rms_norm,
    parameters=_knobs,
    inputs=_norm_inputs,
    reference=_norm_reference,
    cases=(
        *_CASES,
        {"rows": 33, "columns": 4096, "dtype": "bfloat16", "residual": True},
        {"rows": 9, "columns": 1000, "dtype": "float32", "out_dtype": "int8"},
        {"rows": 130, "columns": 2048, "dtype": "bfloat16", "residual": True, "out_dtype": "int8"},
        {"rows": 17, "columns": 5120, "dtype": "float16", "residual": True, "out_dtype": "float8_e4m3fn"},
        {"rows": 1, "columns": 77, "dtype": "bfloat16", "out_dtype": "float8_e4m3fn"},
    ),
)

LAYER_NORM = Kernel(
    name="layer_norm",
    summary="Y = (X - mean of the row) / sqrt(variance of the row + epsilon) * weight + bias",
    make=layer_norm,
    parameters=_knobs,
    inputs=_layer_inputs,
    reference=_layer_reference,
    cases=_CASES,
)

SOFTMAX = Kernel(
    name="softmax",
    summary="Y = exp(X) / the sum over its row",
    make=softmax,
    parameters=_knobs,
    inputs=_inputs,
    reference=_softmax_reference,
    cases=_CASES,
)
