"""From a tile program to a function that upstream compiles, by target."""

from __future__ import annotations

from importlib import import_module

from tvm import tirx
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.machines.target import resolve_target
from tvm_axe.tile.plan import Plan
from tvm_axe.tile.program import read

_HOMES = {"llvm": "tvm_axe.tile.targets.llvm", "cuda": "tvm_axe.tile.targets.cuda"}


def plan(func: tirx.PrimFunc, target: str | Target) -> Plan:
    """Decide everything about a tile program for a target: layouts, threads, instructions, stages.

    Parameters
    ----------
    func : PrimFunc
        A tile program.
    target : str or Target
        As `tvm_axe.machines.target.resolve_target` takes it, such as ``"llvm"`` or ``"cuda:sm_80"``.

    Raises
    ------
    TileError
        The program is malformed (`tvm_axe.tile.program.read`), or the target cannot run it.
    """
    target = resolve_target(target)
    return import_module(_home(target)).plan(read(func), target)


def lower(func: tirx.PrimFunc, target: str | Target) -> tirx.PrimFunc:
    """Lower a tile program to a function that upstream compiles for the target (pipeline: `tvm_axe.tile.build`).

    Raises
    ------
    TileError
        As `plan`.
    """
    return emit(plan(func, target))


def emit(decided: Plan) -> tirx.PrimFunc:
    """The function that `lower` gives, where the plan is there already."""
    return import_module(_home(decided.target)).lower(decided)


def explain(func: tirx.PrimFunc, target: str | Target) -> str:
    """Every decision about a tile program on a target, a line each, with its reason."""
    return plan(func, target).explain()


def _home(target: Target) -> str:
    kind = str(target.kind.name)
    if kind not in _HOMES:
        raise TileError(f"target {kind}: tile programs run on {' and '.join(_HOMES)}")
    return _HOMES[kind]
