"""Transposed copies, through shared memory, so that both sides are read and written in whole lines."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Knobs, Problem, Recipe, choose


def transpose(rows: int, columns: int, dtype: str, *, block_m: int, block_n: int) -> Recipe:
    """Y = X^T: X (rows, columns), Y (columns, rows)."""

    @T.prim_func
    def transpose(X: T.Buffer((rows, columns), dtype), Y: T.Buffer((columns, rows), dtype)) -> None:
        with tile.kernel(tile.cdiv(rows, block_m), tile.cdiv(columns, block_n)) as (i, j):
            x = tile.shared((block_m, block_n), dtype)
            y = tile.fragment((block_n, block_m), dtype)
            tile.copy(X[i * block_m, j * block_n], x)
            with tile.parallel(block_n, block_m) as (c, r):
                y[c, r] = x[r, c]
            tile.copy(y, Y[j * block_n, i * block_m])

    return Recipe((tile.read(transpose),), ("X",), ("Y",))


def _knobs(target: Target, problem: Problem) -> Knobs:
    """Rows of 256 bytes on a GPU: whole lines of both sides, and enough of them in flight."""
    extent = 256 // np.dtype(problem["dtype"]).itemsize if isinstance(machine_of(target), Gpu) else 64
    return {"block_m": choose(extent, 32, 64, 128), "block_n": choose(extent, 32, 64, 128)}


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    return {"X": normal(rng, (problem["rows"], problem["columns"]), problem["dtype"])}


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """Exact."""
    value = arrays["X"].astype("float64").T
    return {"Y": Expected(value, np.zeros_like(value))}


TRANSPOSE = Kernel(
    name="transpose",
    summary="Y = X^T",
    make=transpose,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"rows": 128, "columns": 192, "dtype": "float32"},
        {"rows": 1000, "columns": 77, "dtype": "bfloat16"},
        {"rows": 1, "columns": 333, "dtype": "float16"},
        {"rows": 65, "columns": 1, "dtype": "float32"},
    ),
)
