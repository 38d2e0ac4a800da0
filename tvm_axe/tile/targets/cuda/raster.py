"""The order in which a grid's points are taken: from a block's index, or a tile's, to its point.

Blocks that run at once share operands in cache when their points lie in a compact piece of the grid, so rows of points
are taken in groups: within a group the last dimension but one runs fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

_Division = Callable[[Any, Any], tirx.Expr]


def points(extents: Sequence[int | tirx.Expr]) -> int | tirx.Expr:
    """How many points a grid has."""
    total: int | tirx.Expr = 1
    for extent in extents:
        total = total * extent
    return total


def division(extents: Sequence[int | tirx.Expr]) -> tuple[_Division, _Division]:
    """How numbers that aren't negative are divided by what is made of extents: quotient and remainder.

    Of unknown extents toward zero, which is the same: else upstream would look for a divisor's sign wherever the
    quotient goes, for seconds a kernel.
    """
    known = all(isinstance(extent, int) for extent in extents)
    return (tirx.floordiv, tirx.floormod) if known else (tirx.truncdiv, tirx.truncmod)


def coordinates(
    index: tirx.Expr, extents: Sequence[int | tirx.Expr], swizzle: int = 1, backwards: Sequence[bool] = ()
) -> list[tirx.Expr]:
    """The point that is taken `index`-th.

    Law: for `index` in 0 .. points(extents) - 1 every point comes once.

    Parameters
    ----------
    index : Expr
        The number of the point, at least 0 and less than ``points(extents)``.
    extents : sequence of int or Expr
        The grid's extents, the slowest first.
    swizzle : int
        How many consecutive points of the last dimension but one are taken before the last one advances; 1 is
        row-major order. The last group may have fewer.
    backwards : sequence of bool, optional
        The dimensions that are taken from their end.
    """
    found: list[tirx.Expr] = []
    rest, outer = index, list(extents)
    quotient, remainder = division(extents)
    if len(outer) > 1 and swizzle > 1:
        rows, columns = outer[-2:]
        outer = outer[:-2]
        inner = remainder(rest, rows * columns) if outer else rest
        rest = quotient(rest, rows * columns)
        group = quotient(inner, swizzle * columns)
        within = remainder(inner, swizzle * columns)
        even = isinstance(rows, int) and rows % swizzle == 0
        height = swizzle if even else tirx.min(swizzle, rows - group * swizzle)
        found = [group * swizzle + remainder(within, height), quotient(within, height)]
    while outer:
        extent = outer.pop()
        found.insert(0, remainder(rest, extent) if outer else rest)
        rest = quotient(rest, extent)
    reverse = list(backwards) or [False] * len(found)
    return [extent - 1 - at if back else at for at, extent, back in zip(found, extents, reverse)]
