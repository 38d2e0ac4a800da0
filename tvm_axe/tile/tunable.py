"""A tile program as what schedules are of: a function of one block, on which annotations say what its knobs are.

A search has traces of a function's blocks, and records hold traces. So a tile program is tuned as a function that has
the program as an attribute, and a block that reads and writes what that does; its schedules are annotations.
What compiles it (`tvm_axe.lower.tiles`) puts the program in its place, with the knobs as annotated.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KNOB, PROGRAM
from tvm_axe.tile.language import GRID
from tvm_axe.tile.sequences import read_function

__all__ = ["BLOCK", "is_tile_program", "knobs_in", "program_of", "tunable"]

BLOCK = "program"
"""The name of the block."""


def is_tile_program(func: tirx.PrimFunc) -> bool:
    """Whether a function has the grid of a tile program (`tvm_axe.tile.kernel`)."""
    found: list[bool] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, lambda loop: found.append(GRID in loop.annotations)))
    return any(found)


def tunable(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function that stands for a tile program while it is tuned, of the same parameters in the same order.

    Raises
    ------
    TileError
        The program with its knobs' defaults is none.
    """
    program = read_function(func)
    params = [
        tirx.decl_buffer(list(param.shape), param.dtype, str(param.name))
        if tirx.is_buffer_var(param)
        else tirx.Var(str(param.name), param.ty)
        for param in func.params
    ]
    own = dict(zip(program.func.params, params))
    written = {tile.buffer for node in program.nodes() for tile in node.writes}
    read_ = {tile.buffer for node in program.nodes() for tile in node.reads}
    reads, writes = (
        [
            tirx.BufferRegion(own[tile.buffer], [ir.Range(0, extent) for extent in tile.shape])
            for tile in program.params
            if tile.buffer in touched
        ]
        for touched in (read_, written)
    )
    block = s_tir.SBlock([], reads, writes, BLOCK, tirx.Evaluate(0))
    root = s_tir.SBlock([], [], [], "root", s_tir.SBlockRealize([], True, block))
    # As text, since a function that is an attribute doesn't print; the same one wherever it is written.
    plain = str(ir.save_json(_tvm.without_places(tirx.PrimFunc(func.params, func.body, func.ret_type))))
    return tirx.PrimFunc(params, s_tir.SBlockRealize([], True, root)).with_attrs(
        {"global_symbol": program.name, "s_tir": True, PROGRAM: plain}
    )


def program_of(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The tile program that a function stands for; None if it is for none."""
    return ir.load_json(str(func.attrs[PROGRAM])) if func.attrs and PROGRAM in func.attrs else None


def knobs_in(func: tirx.PrimFunc) -> dict[str, int]:
    """The knobs that a schedule of `tunable` has set, by name."""
    found: dict[str, int] = {}

    def on_block(block: s_tir.SBlock) -> None:
        for key, value in block.annotations.items():
            if str(key).startswith(f"{KNOB}."):
                found[str(key).removeprefix(f"{KNOB}.")] = int(value)

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, on_block))
    return found
