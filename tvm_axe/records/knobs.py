"""What the knobs of a tile program are in the fastest record of it; `tvm_axe.tile.compile` is told this by name."""

from __future__ import annotations

from pathlib import Path

from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.records.apply import apply_best
from tvm_axe.tile.tunable import knobs_in, tunable

__all__ = ["recorded_knobs"]


def recorded_knobs(program: tirx.PrimFunc, target: Target, work_dir: str | Path) -> tuple[dict[str, int], float] | None:
    """The knobs that a program has in its fastest record, those that aren't its defaults, and its seconds there.

    None where there is no record of it for the target, found as `apply_best` finds one.
    """
    mod, seconds = apply_best(IRModule({"main": tunable(program)}), target, work_dir)
    return (knobs_in(mod["main"]), seconds["main"]) if seconds else None
