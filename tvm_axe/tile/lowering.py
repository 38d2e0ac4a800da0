"""From a tile program to a function that upstream compiles, by the target's back end."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.target import Target

from tvm_axe.machines import resolve_target
from tvm_axe.tile.backend import tile_backend_of
from tvm_axe.tile.plans import Decision, Plan
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.reading import read
from tvm_axe.tile.strides import with_checks


def plan(program: tirx.PrimFunc | TileProgram, target: str | Target) -> Plan:
    """Decide everything about a tile program for a target: layouts, threads, instructions, stages.

    Parameters
    ----------
    program : PrimFunc or TileProgram
        A tile program, as written or as read; knobs of one as written have their defaults.
    target : str or Target
        As `tvm_axe.machines.target.resolve_target` takes it, such as ``"llvm"`` or ``"cuda:sm_80"``.

    Raises
    ------
    TileError
        The program is malformed (`tvm_axe.tile.read`), or the target cannot run it.
    """
    target = resolve_target(target)
    backend = tile_backend_of(target)
    decided = backend.plan(program if isinstance(program, TileProgram) else read(program), target)
    if not backend.untried:
        return decided
    said = Decision("target", backend.name, "what is compiled for it was never run: nobody had such a device")
    return replace(decided, decisions=(said, *decided.decisions))


def lower(program: tirx.PrimFunc | TileProgram, target: str | Target) -> tirx.PrimFunc:
    """Lower a tile program to a function that upstream compiles for the target (pipeline: `tvm_axe.tile.build`).

    Raises
    ------
    TileError
        As `plan`.
    """
    return emit(plan(program, target))


def emit(decided: Plan, apart: int = 1) -> tirx.PrimFunc:
    """The function that `lower` gives, where the plan is there already.

    `apart` is how many slabs of a mesh tensor there are from a device's to the next one's along the program's axis:
    more than one where the mesh has axes behind that one (`tvm_axe.collective.tensor.peers_of`).
    """
    written = {tile: None for node in decided.program.body for tile in node.writes}
    return with_checks(tile_backend_of(decided.target).emit(decided, apart), written)


def explain(program: tirx.PrimFunc | TileProgram, target: str | Target) -> str:
    """Say every decision about a tile program on a target, a line each, with its reason.

    Raises
    ------
    TileError
        As `plan`.
    """
    return plan(program, target).explain()
