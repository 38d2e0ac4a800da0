"""Columns about tile programs whose knobs are tuned: what the knobs are, and what they make of the program."""

from __future__ import annotations

import math

from tvm import tirx

from tvm_axe.errors import AxeError
from tvm_axe.meta.model.features.locality import log
from tvm_axe.tile.knobs import declared
from tvm_axe.tile.nodes import Gemm, Loop
from tvm_axe.tile.sequences import read_function
from tvm_axe.tile.tunable import knobs_in, program_of

__all__ = ["knob_columns"]

_KNOBS = 8  # of which a program rarely has more; those behind them are told by what they make of it
_DERIVED = ("knob_blocks", "knob_shared", "knob_fragments", "knob_products", "knob_steps", "knob_stages")


def knob_columns(func: tirx.PrimFunc) -> dict[str, float]:
    """The columns, by name; all of them 0 for a function that stands for no tile program.

    They are the first knobs in order, and of the program with these: blocks, bytes of tiles in shared memory and in
    fragments, what is multiplied in a block at a time, how often its longest loop runs, and the stages of its loops; of
    several kernels those of all.
    """
    columns = {**{f"knob_{n}": 0.0 for n in range(_KNOBS)}, **dict.fromkeys(_DERIVED, 0.0)}
    program = program_of(func)
    if program is None:
        return columns
    values = knobs_in(func)
    for n, knob in enumerate(declared(program)[:_KNOBS]):
        value = values.get(knob.name, knob.default)
        columns[f"knob_{n}"] = math.copysign(log(abs(value)), value)
    try:
        made = read_function(program, values)
    except AxeError:  # it will fail for that when it is built
        return columns
    loops = [node for node in made.nodes() if isinstance(node, Loop)]
    lengths = [extent for loop in loops if isinstance(extent := loop.extent, int)]
    tiles = [tile for kernel in made.kernels for tile in kernel.tiles]
    held = {scope: sum(tile.bytes for tile in tiles if tile.scope == scope) for scope in ("shared", "fragment")}
    blocks = (math.prod(extent for _, extent in each.grid if isinstance(extent, int)) for each in made.kernels)
    return columns | {
        "knob_blocks": log(sum(blocks)),
        "knob_shared": log(held["shared"]),
        "knob_fragments": log(held["fragment"]),
        "knob_products": log(sum(math.prod(node.shape) for node in made.nodes() if isinstance(node, Gemm))),
        "knob_steps": log(max(lengths, default=0)),
        "knob_stages": float(max((loop.stages or 0 for loop in loops), default=0)),
    }
