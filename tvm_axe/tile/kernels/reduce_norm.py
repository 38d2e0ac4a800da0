"""RMSNorm of a sum over devices and a residual: an all-reduce that ends as a norm, in one kernel of a mesh.

A block has a row. It tells all peers that the row of its own x is there, loads residual and weight meanwhile, waits for
what they tell, and adds up all devices' rows where they are. With many rows it is worth it that a device norms a share
of them alone and stores it to all: then each row crosses twice, and not once to each.

Not in `KERNELS`, whose kernels are of one device: `tvm_axe.collective.MeshKernel` runs it.
"""

# Without annotations from the future: of `me: T.int32` they make text, which upstream's parser doesn't read.
from collections.abc import Mapping

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.kernel import ROUNDING, Expected, Kernel, Knobs, Problem, Recipe, choose, rounding_slack

_MANY = 16
"""Rows of a device's share from which on a row is normed once, by three devices and more.

Measured on 4 H200s, in microseconds: at 64 rows 11.4, beside 16.5 where all devices read all; at 8, 7.7 beside 6.2. Of
two devices each is sent as many bytes either way, and shares take a meeting more: reading all took 6.9 at 64 rows.
"""
_LONG = 8192
"""Elements of a row that a block of 1,024 threads norms: eight of each, at one load."""


def share_of(devices: int, rows: int) -> int:
    """The rows that each device computes of a sum over devices of so many, to store them to all; 0: each does all."""
    return rows // devices if devices > 2 and rows % devices == 0 and rows // devices >= _MANY else 0


def reduce_norm(devices: int, rows: int, columns: int, dtype: str, epsilon: float = 1e-6, *, share: int = 0) -> Recipe:
    """out = RMSNorm(the sum of x over devices + residual) * weight, whole on every device.

    x and out have a slab of (rows, columns) on each device; residual (rows, columns) and weight (columns,) are each
    device's own, and the same on all. flags are zero to begin with, and zero again when it ends.

    With `share`, a device norms its `share` rows and stores them to all, else each norms all rows.

    Raises
    ------
    TileError
        The shares of the devices aren't all rows.
    """
    if share and share * devices != rows:
        raise TileError(
            f"reduce_norm: shares of {share} rows of {devices} devices are not {rows} rows; valid is 0, or {rows} / "
            f"{devices} where that is whole"
        )
    whole, threads = (devices, rows, columns), 1024 if columns >= _LONG else None

    @T.prim_func
    def reduce_norm(
        x: tile.mesh_tensor(whole, dtype),
        residual: T.Buffer((rows, columns), dtype),
        weight: T.Buffer((columns,), dtype),
        me: T.int32,
        flags: tile.mesh_tensor((devices, devices, rows, 2), "int32"),
        out: tile.mesh_tensor(whole, dtype) if share else T.Buffer((rows, columns), dtype),
    ) -> None:
        with tile.kernel(share or rows, device=me, threads=threads) as i:
            part = tile.fragment((1, columns), dtype)
            total = tile.fragment((1, columns), "float32")
            square = tile.fragment((1, columns), "float32")
            factor = tile.fragment((1,), "float32")
            w = tile.fragment((1, columns), "float32")
            tile.signal(flags[0:devices, me, i, 0])
            tile.copy(residual[me * share + i, 0], total)
            tile.copy(weight[0], w)
            tile.wait(flags[me, 0:devices, i, 0], reset=True)
            for d in range(devices):
                tile.copy(x[d, me * share + i, 0], part)
                with tile.parallel(1, columns) as (r, c):
                    total[r, c] = total[r, c] + T.cast(part[r, c], "float32")
            with tile.parallel(1, columns) as (r, c):
                square[r, c] = total[r, c] * total[r, c]
            tile.sum(square, factor)
            with tile.parallel(1) as r:
                factor[r] = T.rsqrt(factor[r] * T.float32(1 / columns) + T.float32(epsilon))
            with tile.parallel(1, columns) as (r, c):
                total[r, c] = total[r, c] * factor[r] * w[r, c]
            if share > 0:
                for d in range(devices):
                    tile.copy(total, out[d, me * share + i, 0])
                tile.signal(flags[0:devices, me, i, 1])
                tile.wait(flags[me, 0:devices, i, 1], reset=True)
            else:
                tile.copy(total, out[i, 0])

    return Recipe((tile.read(reduce_norm),), ("x", "residual", "weight", "flags"), ("out",))


def _knobs(target: Target, problem: Problem) -> Knobs:
    rows, devices = problem["rows"], problem["devices"]
    if rows % devices or devices == 1:
        return {"share": (0,)}
    return {"share": choose(share_of(devices, rows), 0, rows // devices)}


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    """Random x of all devices, what they have alike, and flags that nobody has set."""
    devices, rows, columns = (problem[name] for name in ("devices", "rows", "columns"))
    return {
        "x": normal(rng, (devices, rows, columns), problem["dtype"]),
        "residual": normal(rng, (rows, columns), problem["dtype"]),
        "weight": normal(rng, (columns,), problem["dtype"]),
        "flags": np.zeros((devices, devices, rows, 2), "int32"),
    }


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The sum is off by devices * 2^-24 of its terms, which the norm divides as the sum; see `rows` for the norm."""
    x, residual, weight = (arrays[name].astype("float64") for name in ("x", "residual", "weight"))
    total, terms = x.sum(axis=0) + residual, np.abs(x).sum(axis=0) + np.abs(residual)
    factor = 1 / np.sqrt(np.square(total).mean(axis=1, keepdims=True) + problem.get("epsilon", 1e-6))
    value = total * factor * weight
    unit = ROUNDING["float32"] * (problem["columns"] / 2 + problem["devices"] + 8)
    slack = rounding_slack(problem["dtype"], unit, np.abs(value)) + unit * np.abs(terms * factor * weight)
    return {"out": Expected(value, slack)}


REDUCE_NORM = Kernel(
    name="reduce_norm",
    summary="out = RMSNorm(sum of x over devices + residual) * weight, on all devices of a mesh axis",
    make=reduce_norm,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"devices": 2, "rows": 3, "columns": 200, "dtype": "float32"},
        {"devices": 2, "rows": 8, "columns": 1024, "dtype": "bfloat16"},
        {"devices": 3, "rows": 48, "columns": 65, "dtype": "float32"},
        {"devices": 4, "rows": 64, "columns": 512, "dtype": "bfloat16"},
        {"devices": 1, "rows": 5, "columns": 33, "dtype": "float16"},
    ),
)
