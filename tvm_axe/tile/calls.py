"""Words that upstream has no tile primitive for: external calls of numbers and regions, which print and parse back.

``axe.cumsum`` and the like are called with their numbers first and then each region, as its first element and its
extents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, tirx
from tvm.script import tirx as T

from tvm_axe.errors import TileError
from tvm_axe.tile.language import shape_of


def corner(side: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """The first element of a tile, a slice or an element, and its extents; None of anything else."""
    if isinstance(side, tirx.Var) and tirx.is_buffer_var(side):
        side = side[tuple(slice(0, extent) for extent in side.shape)]
    if isinstance(side, ir.TensorLoad):
        return side, (1,) * len(side.indices)
    if isinstance(side, ir.TensorRegion):
        return side.source[tuple(r.min for r in side.region)], shape_of(side)
    return None


def call(name: str, numbers: Sequence[int], sides: Sequence[Any]) -> Any:
    """The statement that a word becomes.

    Raises
    ------
    TileError
        A side is no tile and no slice of one.
    """
    arguments: list[Any] = []
    for side in sides:
        found = corner(side)
        if found is None:
            word = name.removeprefix("axe.")
            raise TileError(f"{word}: takes tiles and slices of tiles, got {type(side).__name__}")
        arguments += [found[0], *found[1]]
    return T.evaluate(T.call_extern("int32", name, *(int(number) for number in numbers), *arguments))


def called(stmt: Any) -> str | None:
    """The name of the word that became a statement; None if it is no such call."""
    if not (isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, ir.Call) and stmt.value.args):
        return None
    name = getattr(stmt.value.args[0], "value", None)
    return name if isinstance(name, str) and name.startswith("axe.") else None


def is_nothing(stmt: Any) -> bool:
    """Whether a statement does nothing: a number is evaluated, as where a branch was left out."""
    return isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tirx.IntImm)


def arguments(stmt: tirx.Evaluate, count: int) -> tuple[list[int], list[tuple[Any, tuple[int, ...]]]]:
    """What `call` was given: `count` numbers, and the first element and the extents of each region.

    Raises
    ------
    TileError
        Extents are no constants.
    """
    _, *given = stmt.value.args
    numbers, rest = [int(number) for number in given[:count]], given[count:]
    regions = []
    while rest:
        first, rank = rest[0], len(rest[0].indices)
        extents = rest[1 : 1 + rank]
        if not all(isinstance(extent, tirx.IntImm) for extent in extents):
            said = [str(extent) for extent in extents]
            raise TileError(f"{called(stmt)}: a region of {first.source.name} has no constant extents: {said}")
        regions.append((first, tuple(map(int, extents))))
        rest = rest[1 + rank :]
    return numbers, regions
