"""How wide the accesses of tensors with strides are, which `explain` says, with what would make them wider."""

from __future__ import annotations

import tvm_ffi
from tvm import sym

from tvm_axe.tile.plans import Decision
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.strides import advice, are_pieces, has_rows, strides_of
from tvm_axe.tile.targets.cuda.fragments.walk import vector_lengths


def widths(program: TileProgram) -> tuple[Decision, ...]:
    """A decision for each tensor with strides: how many of its elements a thread moves at once at most."""
    analyzer = program.analyzer()
    return tuple(_width(tile, analyzer) for tile in program.params if tile.strides is not None)


def _width(tile: Tile, analyzer: sym.Analyzer) -> Decision:
    longest, *shorter = vector_lengths(tvm_ffi.dtype(tile.dtype).bits)
    if are_pieces(tile, longest, analyzer):
        reason = "its rows begin at multiples of 16 bytes"
        return Decision(str(tile), f"up to {longest} elements at once", reason, "tiles")
    length = next(length for length in shorter if are_pieces(tile, length, analyzer))
    choice = f"slow, {'an element' if length == 1 else f'{length} elements'} at a time"
    if not has_rows(tile):
        reason = (
            f"neighbours along its last dimension are {strides_of(tile)[-1]} elements apart; a parameter whose last "
            "dimension is that of stride 1 has vectors, and TMA"
        )
        return Decision(str(tile), choice, reason, "tiles")
    dimension, stride = next(
        (dimension, stride)
        for dimension, stride in enumerate(strides_of(tile)[:-1])
        if not analyzer.can_prove(stride % longest == 0)
    )
    said = (
        f"is no multiple of {longest}; rows that are padded to one have vectors of 16 bytes, and TMA"
        if isinstance(stride, int)
        else f"isn't known to be a multiple of {longest}; {advice(stride, longest)} gives vectors of 16 bytes, and TMA"
    )
    return Decision(str(tile), choice, f"its stride along dimension {dimension}, {stride}, {said}", "tiles")
