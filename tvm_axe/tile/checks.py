"""What a tile program must keep on every target; see `tvm_axe.tile.program.read`."""

from __future__ import annotations

from tvm_axe.tile.program import Program


def check(program: Program) -> None:
    """Raise TileError where the program can't be right on any target."""
