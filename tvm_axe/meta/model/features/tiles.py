"""Columns about tile kernels, whose blocks are opaque to everything that reads loops: the annotations say it all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.target import Target

from tvm_axe.analysis.annotations import TILE
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.meta.model.features.locality import log
from tvm_axe.meta.model.features.nest import Access, Nest
from tvm_axe.schedule.tiles import PRODUCTS

__all__ = ["tile_columns"]

_PARAMETERS = ("block_m", "block_n", "block_k", "stages", "swizzle", "splits", "workers")
_PREFIX = f"{TILE}."
_ROLES: dict[tuple[int, ...], str] = {(1, 0, 1): "m", (0, 1, 1): "n", (1, 1, 0): "k", (1, 1, 1): "batch"}


def tile_columns(found: Sequence[Nest], target: Target) -> dict[str, float]:
    """The columns, by name; all of them 0 where no block is computed by a tile kernel.

    Parameters
    ----------
    found
        The function's nests, as scheduled.
    target
        A resolved target.
    """
    chosen = [nest for nest in found if TILE in nest.annotations]
    nest = max(chosen, key=lambda nest: nest.iterations) if chosen else None
    kernel = None if nest is None else str(nest.annotations[TILE])
    values = {} if nest is None else {name: _value(nest, name) for name in _PARAMETERS}
    columns = {f"tile_{name}": float(name == kernel) for name in PRODUCTS}
    columns |= {f"tile_{name}": log(values.get(name, 0)) for name in _PARAMETERS}
    return columns | (_derived(nest, values, target) if nest is not None else dict.fromkeys(_DERIVED, 0.0))


_DERIVED = ("tile_blocks", "tile_balance", "tile_waste", "tile_bytes", "tile_operands", "tile_steps", "tile_resident")


def _derived(nest: Nest, values: dict[str, int], target: Target) -> dict[str, float]:
    """What the parameters amount to for this problem: blocks and waves of them, padding, bytes a block works on."""
    machine = machine_of(target)
    gpu = machine if isinstance(machine, Gpu) else None
    m, n, k, batch, size = _problem(nest)
    rows, columns, depth = (values[name] or extent for name, extent in (("block_m", m), ("block_n", n), ("block_k", k)))
    splits = max(1, values["splits"])
    blocks = batch * math.ceil(m / rows) * math.ceil(n / columns) * splits
    workers = values["workers"] or machine.processors
    steps = math.ceil(k / depth / splits)
    operands = (rows + columns) * depth * size * max(1, values["stages"] if gpu else 1)
    padded = math.ceil(m / rows) * rows * math.ceil(n / columns) * columns * math.ceil(k / depth) * depth
    return {
        "tile_blocks": log(blocks),
        "tile_balance": blocks / (math.ceil(blocks / workers) * workers),
        "tile_waste": padded / (m * n * k),
        "tile_bytes": log(rows * columns * 4),
        "tile_operands": log(operands),
        "tile_steps": log(steps),
        "tile_resident": float(min(8, gpu.shared_bytes // operands)) if gpu else 0.0,
    }


def _value(nest: Nest, name: str) -> int:
    """A parameter as annotated; 0, which the kernels take as their own choice, where it isn't."""
    value = nest.annotations.get(_PREFIX + name, 0)
    return value if isinstance(value, int) else 0


def _problem(nest: Nest) -> tuple[int, int, int, int, float]:
    """m, n, k, batch and the operands' size of the product that a block computes: by which loops move which operand."""
    out = nest.accesses[-1]
    operands = [a for a in nest.accesses if a.buffer != out.buffer]
    left, right = operands[0], operands[-1]  # one access where a matrix is multiplied with itself
    extents = {"m": 1, "n": 1, "k": 1, "batch": 1}
    for n, loop in enumerate(nest.loops):
        moves = tuple(_moves(access, n) for access in (left, right, out))
        role = _ROLES.get(moves)
        if role is not None:
            extents[role] *= loop.extent
    return extents["m"], extents["n"], extents["k"], extents["batch"], left.bytes


def _moves(access: Access, loop: int) -> int:
    return int(any(steps.get(loop) for steps in access.steps))
