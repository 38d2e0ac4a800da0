"""What both models of a CUDA block decide alike: the grid's order, and whether its blocks are persistent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_axe.machines import Gpu
from tvm_axe.tile.nodes import Copy, Loop
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.cuda import raster
from tvm_axe.tile.walking import substitute_in, variables_in

GROUP = 16
"""Rows of tiles taken together where both operands are reused; measured best for products of 2048 to 8192."""


@dataclass(frozen=True, eq=False)
class Grid:
    """In which order blocks take a grid's points.

    Attributes
    ----------
    dimensions : tuple of (Var, Expr)
        The program's variables and their extents, the slowest first.
    most : int
        How many blocks the GPU runs at once: persistent ones are no more.
    persistent : bool
        Whether each block takes point after point.
    swizzle : int
        Rows of points taken together, as in `raster.coordinates`.
    backwards : tuple of bool
        The dimensions that are taken from their end.
    overlaps : bool
        Whether the kernel may be launched before the one before it is over (programmatic dependent launch).
    """

    dimensions: tuple[tuple[tirx.Var, Any], ...]
    most: int
    persistent: bool
    swizzle: int
    backwards: tuple[bool, ...]
    overlaps: bool

    @property
    def extents(self) -> list[Any]:
        """The extents, the slowest first."""
        return [extent for _, extent in self.dimensions]

    @property
    def tiles(self) -> int | tirx.Expr:
        """How many points there are."""
        return raster.points(self.extents)

    @property
    def blocks(self) -> int | tirx.Expr:
        """How many blocks are launched."""
        if not self.persistent:
            return self.tiles
        return min(self.most, self.tiles) if isinstance(self.tiles, int) else tirx.min(self.most, self.tiles)

    def turns(self, block: tirx.Expr) -> tirx.Expr:
        """How many points a persistent block takes."""
        quotient, _ = raster.division(self.extents)
        return quotient(self.tiles - block + self.blocks - 1, self.blocks)

    def point(self, index: tirx.Expr) -> dict[tirx.Var, tirx.Expr]:
        """The program's variables at the point taken `index`-th."""
        at = raster.coordinates(index, self.extents, self.swizzle, self.backwards)
        return {var: value for (var, _), value in zip(self.dimensions, at)}


def decide_grid(
    program: TileProgram, gpu: Gpu, decisions: Decisions, *, fills_processor: bool, resident: int = 1
) -> Grid:
    """Decide the order of the grid, whether blocks are persistent, and when the kernel may be launched.

    Parameters
    ----------
    program : TileProgram
        The program.
    gpu : Gpu
        The GPU that it is to run on.
    decisions : Decisions
        Where the decisions are written.
    fills_processor : bool
        Whether a block leaves no room for another on its multiprocessor; only then is one persistent unless told to be.
    resident : int
        How many blocks a multiprocessor is to run at once.
    """
    options, variables = program.options, [var for var, _ in program.grid]
    loops = [node for node in program.nodes() if isinstance(node, Loop)]
    uneven = [loop for loop in loops if not isinstance(loop.extent, int | tirx.IntImm) or loop.until is not None]
    given = options.get("order") == "given"
    backwards = tuple(not given and _grows(program, uneven, i) for i in range(len(variables)))
    if any(backwards):
        names = ", ".join(str(var.name) for var, back in zip(variables, backwards) if back)
        decisions.add(
            "grid", f"{names} from its end", "the longest loops start first, so that short ones fill the gaps"
        )
    swizzle = _swizzle(program, decisions)
    tiles, most = raster.points([extent for _, extent in program.grid]), gpu.processors * resident
    persistent = False
    if "persistent" in options:
        persistent = bool(options["persistent"])
        decisions.add("grid", "persistent" if persistent else "one block a tile", "as annotated")
    elif fills_processor and isinstance(tiles, int) and tiles > most and not uneven:
        persistent = True
        decisions.add("grid", f"{most} persistent blocks", f"{tiles} tiles of equal work: loads of the next run ahead")
    elif fills_processor and not isinstance(tiles, int) and not uneven:
        persistent = True
        decisions.add(
            "grid",
            f"at most {most} persistent blocks",
            "any number of tiles of equal work: loads of the next run ahead",
        )
    else:
        why = (
            "extents of loops differ from tile to tile"
            if uneven
            else f"{tiles} tiles on {gpu.processors} multiprocessors"
        )
        decisions.add("grid", "one block a tile", why)
    if gpu.dependent_launch:
        decisions.add("launch", "as the kernel before ends its last block", "launching runs beside that one's writes")
    return Grid(program.grid, most, persistent, swizzle, backwards, gpu.dependent_launch)


def _swizzle(program: TileProgram, decisions: Decisions) -> int:
    if "swizzle" in program.options:
        swizzle = int(program.options["swizzle"])  # type: ignore[call-overload]
        decisions.add("grid", f"groups of {swizzle} rows", "as annotated")
        return int(swizzle)
    if _both_reused(program):
        decisions.add(
            "grid", f"groups of {GROUP} rows", "tiles are loaded by row and by column: blocks side by side share both"
        )
        return GROUP
    return 1


def _grows(program: TileProgram, loops: list[Loop], dimension: int) -> bool:
    var, extent = program.grid[dimension]
    analyzer = program.analyzer()
    if not isinstance(extent, int) or extent < 2:
        return False
    for loop in loops:
        if var in variables_in(loop.extent):
            first, last = (substitute_in(loop.extent, {var: tirx.const(at, "int32")}) for at in (0, extent - 1))
            if analyzer.can_prove(last > first):
                return True
    return False


def _both_reused(program: TileProgram) -> bool:
    """Whether the last two dimensions of the grid each choose a tile that the other doesn't."""
    if len(program.grid) < 2:
        return False
    row, column = (var for var, _ in program.grid[-2:])
    copies = (node for node in program.nodes() if isinstance(node, Copy) and node.dst.tile.scope == "shared")
    chosen = [variables_in(*copy.src.start) & {row, column} for copy in copies]
    return {row} in chosen and {column} in chosen
