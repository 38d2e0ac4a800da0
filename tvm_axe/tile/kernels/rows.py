"""What is computed from whole rows in one pass over memory: RMSNorm, layer norm and softmax.

A row is held on chip between its reading and its writing, so it must fit a block's registers: up to 64512 columns.
How many rows there are may be a variable, which a call knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
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
    power_of_two,
    rounding_slack,
)

_HELD = 4096
"""Elements that a block holds at least, where there are rows enough: 16 a thread of 256."""


def rms_norm(rows: Any, columns: int, dtype: str, epsilon: float = 1e-6, *, block_rows: int) -> Recipe:
    """Y = X / sqrt(the mean of its row's squares + epsilon) * weight: X and Y (rows, columns), weight (columns,).

    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
    """
    width, count = padded(columns), counted(rows)

    @T.prim_func
    def rms_norm(
        X: T.Buffer((rows, columns), dtype),
        weight: T.Buffer((columns,), dtype),
        Y: T.Buffer((rows, columns), dtype),
    ) -> None:
        with tile.kernel(tile.cdiv(count, block_rows)) as i:
            x = tile.fragment((block_rows, width), "float32")
            square = tile.fragment((block_rows, width), "float32")
            factor = tile.fragment((block_rows,), "float32")
            w = tile.fragment((width,), "float32")
            tile.copy(X[i * block_rows, 0], x)
            tile.copy(weight[0], w)
            with tile.parallel(block_rows, width) as (r, c):
                square[r, c] = x[r, c] * x[r, c]
            tile.sum(square, factor)
            with tile.parallel(block_rows) as r:
                factor[r] = T.rsqrt(factor[r] * T.float32(1 / columns) + T.float32(epsilon))
            with tile.parallel(block_rows, width) as (r, c):
                x[r, c] = x[r, c] * factor[r] * w[c]
            tile.copy(x, Y[i * block_rows, 0])

    return Recipe((tile.read(rms_norm),), ("X", "weight"), ("Y",))


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
    return _inputs(rng, problem) | {"weight": normal(rng, (problem["columns"],), problem["dtype"])}


def _norm_reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The sum of squares is off by columns * 2^-24 relatively at most, its root by half of that."""
    x, weight = (arrays[name].astype("float64") for name in ("X", "weight"))
    value = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + problem.get("epsilon", 1e-6)) * weight
    unit = ROUNDING["float32"] * (problem["columns"] / 2 + 8)
    return {"Y": Expected(value, rounding_slack(problem["dtype"], unit, np.abs(value)))}


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
    summary="Y = X / sqrt(mean of the row's squares + epsilon) * weight",
    make=rms_norm,
    parameters=_knobs,
    inputs=_norm_inputs,
    reference=_norm_reference,
    cases=_CASES,
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
