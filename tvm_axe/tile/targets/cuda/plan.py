"""What both models of a CUDA block decide alike: the grid's order, and whether its blocks are persistent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.plan import Plan
from tvm_axe.tile.program import Copy, Loop, Program, substitute_in
from tvm_axe.tile.targets.cuda import raster

GROUP = 16
"""Rows of tiles taken together where both operands are reused; measured best for products of 2048 to 8192."""


@dataclass
class CudaPlan(Plan):
    """A plan for a CUDA target.

    Attributes
    ----------
    persistent : whether each block takes tile after tile
    swizzle : rows of tiles taken together, as `raster.coordinates`
    backwards : the grid's dimensions that are taken from their end
    """

    persistent: bool = False
    swizzle: int = 1
    backwards: tuple[bool, ...] = field(default=())

    @property
    def extents(self) -> list[Any]:
        """Of the grid, the slowest first."""
        return [extent for _, extent in self.program.grid]

    @property
    def tiles(self) -> int | tirx.Expr:
        """Points of the grid."""
        return raster.points(self.extents)

    @property
    def blocks(self) -> int | tirx.Expr:
        """How many are launched."""
        if not self.persistent:
            return self.tiles
        most = gpu_of(self.target).processors
        return min(most, self.tiles) if isinstance(self.tiles, int) else tirx.min(most, self.tiles)

    def point(self, index: tirx.Expr) -> dict[tirx.Var, tirx.Expr]:
        """The grid's variables at the tile taken `index`-th."""
        at = raster.coordinates(index, self.extents, self.swizzle, self.backwards)
        return {var: value for (var, _), value in zip(self.program.grid, at)}

    def await_previous(self) -> None:
        """Emit the wait for the kernel before, which must precede the first access to global memory.

        Nothing lets the next kernel start before this one's last block ends (``griddepcontrol.launch_dependents``): its
        blocks would crowd on the multiprocessors that are free first, and be as far from memory as that happens to be.
        """
        if self.overlaps:
            T.evaluate(T.ptx.griddepcontrol.wait())


def gpu_of(target: Target) -> Gpu:
    """The GPU that a CUDA target is."""
    machine = machine_of(target)
    assert isinstance(machine, Gpu), machine
    return machine


def decide_grid(plan: CudaPlan, fills_processor: bool) -> None:
    """Decide the order of the grid, whether blocks are persistent, and when the kernel may be launched.

    Parameters
    ----------
    fills_processor : bool
        Whether a block leaves no room for another on its multiprocessor; only then is one persistent unless told to be.
    """
    program = plan.program
    options, variables = program.options, [var for var, _ in program.grid]
    loops = [node for node in program.nodes() if isinstance(node, Loop)]
    uneven = [loop for loop in loops if not isinstance(loop.extent, int | tirx.IntImm)]
    given = options.get("order") == "given"
    plan.backwards = tuple(not given and _grows(program, uneven, i) for i in range(len(variables)))
    if any(plan.backwards):
        names = ", ".join(str(var.name) for var, back in zip(variables, plan.backwards) if back)
        plan.decide("grid", f"{names} from its end", "the longest loops start first, so that short ones fill the gaps")
    if "swizzle" in options:
        plan.swizzle = int(options["swizzle"])  # type: ignore[call-overload]
        plan.decide("grid", f"groups of {plan.swizzle} rows", "as annotated")
    elif _both_reused(program):
        plan.swizzle = GROUP
        plan.decide(
            "grid", f"groups of {GROUP} rows", "tiles are loaded by row and by column: blocks side by side share both"
        )
    most = gpu_of(plan.target).processors
    if "persistent" in options:
        plan.persistent = bool(options["persistent"])
        plan.decide("grid", "persistent" if plan.persistent else "one block a tile", "as annotated")
    elif fills_processor and isinstance(plan.tiles, int) and plan.tiles > most and not uneven:
        plan.persistent = True
        plan.decide(
            "grid", f"{most} persistent blocks", f"{plan.tiles} tiles of equal work: loads of the next run ahead"
        )
    else:
        why = "extents of loops differ from tile to tile" if uneven else f"{plan.tiles} tiles on {most} multiprocessors"
        plan.decide("grid", "one block a tile", why)
    if gpu_of(plan.target).dependent_launch:
        plan.overlaps = True
        plan.decide("launch", "as the kernel before ends its last block", "launching runs beside that one's writes")


def variables_in(values: Iterable[Any]) -> set[tirx.Var]:
    """The variables, and the tensors loaded from, in expressions."""
    found: set[tirx.Var] = set()
    for value in values:
        if not isinstance(value, int):
            tvm_ffi.structural_walk(value, (tirx.Var, found.add))
    return found


def _grows(program: Program, loops: list[Loop], dimension: int) -> bool:
    var, extent = program.grid[dimension]
    analyzer = program.analyzer()
    for loop in loops:
        if var in variables_in([loop.extent]):
            first, last = (substitute_in(loop.extent, {var: tirx.const(at, "int32")}) for at in (0, extent - 1))
            if isinstance(extent, int) and extent > 1 and analyzer.can_prove(last > first):
                return True
    return False


def _both_reused(program: Program) -> bool:
    """Whether the last two dimensions of the grid each choose a tile that the other doesn't."""
    if len(program.grid) < 2:
        return False
    row, column = (var for var, _ in program.grid[-2:])
    copies = (node for node in program.nodes() if isinstance(node, Copy) and node.dst.tile.scope == "shared")
    chosen = [variables_in(copy.src.start) & {row, column} for copy in copies]
    return {row} in chosen and {column} in chosen
