"""Which part of a product a CPU's core accumulates in registers at once, and the cycles that it takes so."""

from __future__ import annotations

from math import ceil

MOST_ROWS = 8
"""Rows of a register tile. 14 x 2 vectors are slower than 6 x 4 where the rows of `a` are 4096 bytes apart: 224 and 250
GFLOP/s of 1024 x 1024 x 1024."""

MOST_VECTORS = 4
"""Vectors of a register tile's rows."""


def register_tile(m: int, n: int, lanes: int, registers: int) -> tuple[int, int]:
    """Rows and vectors of the register tile with which an m x n product takes the fewest cycles.

    Registers hold rows * vectors sums, `vectors` vectors of b and one of a. Rows of `a` may be a power of two apart,
    and of such lines a first-level cache keeps 8 to 12.
    """
    candidates = [
        (rows, vectors)
        for vectors in range(1, min(ceil(n / lanes), MOST_VECTORS) + 1)
        for rows in range(1, MOST_ROWS + 1)
        if rows * vectors + vectors + 1 <= registers
    ]
    rows, vectors = min(candidates, key=lambda c: (_half_cycles(m, n, lanes, *c), (c[0] + c[1]) / (c[0] * c[1])))
    return min(rows, m), vectors


def half_cycles(m: int, n: int, lanes: int, registers: int) -> int:
    """The half cycles that a term of an m x n product takes a core, by `register_tile`."""
    return _half_cycles(m, n, lanes, *register_tile(m, n, lanes, registers))


def _half_cycles(m: int, n: int, lanes: int, rows: int, vectors: int) -> int:
    """Of tiles of so many rows and vectors, and of what is left beside them.

    Two multiply-adds and two loads start in a cycle, a multiply-add takes four: a step of the sum, by a tile of r x v,
    takes the most of r * v, r + v and 8 half-cycles, and one more for the loop.
    """

    def tiles(size: int, part: int) -> list[tuple[int, int]]:
        return [(size // part, part)] + ([(1, size % part)] if size % part else [])

    return sum(
        a * b * (max(r * v, r + v, 8) + 1)
        for a, r in tiles(m, min(rows, m))
        for b, v in tiles(ceil(n / lanes), vectors)
    )
