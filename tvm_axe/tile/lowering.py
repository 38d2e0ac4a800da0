"""From a tile program to a function that upstream compiles, by the target's back end."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, overload

from tvm import tirx
from tvm.target import Target

from tvm_axe.machines import resolve_target
from tvm_axe.tile.backend import tile_backend_of
from tvm_axe.tile.plans import Decision, Plan, SequencePlan
from tvm_axe.tile.program import TileProgram, TileSequence
from tvm_axe.tile.sequences import read_function
from tvm_axe.tile.sequencing import in_sequence
from tvm_axe.tile.strides import with_checks

Written: TypeAlias = tirx.PrimFunc | TileProgram | TileSequence
"""A tile program, as written or as read."""


@overload
def plan(program: TileProgram, target: str | Target) -> Plan: ...


@overload
def plan(program: TileSequence, target: str | Target) -> SequencePlan: ...


@overload
def plan(program: Written, target: str | Target) -> Plan | SequencePlan: ...


def plan(program: Written, target: str | Target) -> Plan | SequencePlan:
    """Decide everything about a tile program for a target: layouts, threads, instructions, stages.

    Of a function of several kernels it is decided for each by itself.

    Parameters
    ----------
    program : PrimFunc, TileProgram or TileSequence
        A tile program, as written or as read; knobs of one as written have their defaults.
    target : str or Target
        As `tvm_axe.machines.target.resolve_target` takes it, such as ``"llvm"`` or ``"cuda:sm_80"``.

    Raises
    ------
    TileError
        The program is malformed (`tvm_axe.tile.read`), or the target cannot run it.
    """
    target = resolve_target(target)
    if not isinstance(program, TileProgram | TileSequence):
        program = read_function(program)
    if isinstance(program, TileSequence):
        plans = tuple(_planned(kernel, target) for kernel in program.kernels)
        return SequencePlan(program=program, target=target, kernels=plans)
    return _planned(program, target)


def _planned(program: TileProgram, target: Target) -> Plan:
    backend = tile_backend_of(target)
    decided = backend.plan(program, target)
    if not backend.untried:
        return decided
    said = Decision("target", backend.name, "what is compiled for it was never run: nobody had such a device")
    return replace(decided, decisions=(said, *decided.decisions))


def lower(program: Written, target: str | Target) -> tirx.PrimFunc:
    """Lower a tile program to a function that upstream compiles for the target (pipeline: `tvm_axe.tile.build`).

    Raises
    ------
    TileError
        As `plan`.
    """
    decided = plan(program, target)
    return in_sequence(decided) if isinstance(decided, SequencePlan) else emit(decided)


def emit(decided: Plan, apart: int = 1) -> tirx.PrimFunc:
    """The function that `lower` gives, where the plan is there already.

    `apart` is how many slabs of a mesh tensor there are from a device's to the next one's along the program's axis:
    more than one where the mesh has axes behind that one (`tvm_axe.collective.tensor.peers_of`).
    """
    written = {tile: None for node in decided.program.body for tile in node.writes}
    return with_checks(tile_backend_of(decided.target).emit(decided, apart), written)


def explain(program: Written, target: str | Target) -> str:
    """Say every decision about a tile program on a target, a line each, with its reason.

    Raises
    ------
    TileError
        As `plan`.
    """
    return plan(program, target).explain()
