"""From a tile program to a function that upstream compiles, by target."""

from __future__ import annotations

from importlib import import_module

from tvm import tirx
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.tile.plan import Plan
from tvm_axe.tile.program import read

_HOMES = {"llvm": "tvm_axe.tile.cpu", "cuda": "tvm_axe.tile.cuda"}


def plan(func: tirx.PrimFunc, target: Target) -> Plan:
    """Decide everything about a tile program for a target: layouts, threads, instructions, stages.

    Raises
    ------
    TileError
        The program is malformed (`tvm_axe.tile.program.read`), or the target cannot run it.
    """
    return import_module(_home(target)).plan(read(func), target)


def lower(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Lower a tile program to a function that upstream compiles for the target (pipeline: `tvm_axe.tile.build`).

    Raises
    ------
    TileError
        As `plan`.
    """
    decided = plan(func, target)
    return import_module(_home(target)).lower(decided)


def explain(func: tirx.PrimFunc, target: Target) -> str:
    """Every decision about a tile program on a target, a line each, with its reason."""
    return "\n".join(str(decision) for decision in plan(func, target).decisions)


def _home(target: Target) -> str:
    kind = str(target.kind.name)
    if kind not in _HOMES:
        raise TileError(f"target {kind}: tile programs run on {' and '.join(_HOMES)}")
    return _HOMES[kind]
