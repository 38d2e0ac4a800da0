"""Which register tiles a contraction may take, and which is the most promising (`tvm_axe.nests.registers`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm.target import Target

from tvm_axe.machines.target import vector_bits, vector_registers
from tvm_axe.nests.contraction import Contraction

__all__ = ["Tile", "divisors", "lanes_of", "outermost", "samples_known", "terms_of", "tiles"]

_ROWS = (1, 2, 4, 6, 7, 8, 12, 14, 16)
_VECTORS = (1, 2, 3, 4, 6, 8)
_IN_FLIGHT = 14  # multiply-adds that hide their own latency and that of loads
_NARROW = 128  # bits: what is left of a vector for columns that don't divide a wider one
_FEW = 10  # multiply-adds of a vector of W: with fewer, W is wanted faster than it comes from beyond the first cache
_FIRST = 20 << 10  # bytes that stay in a core's first cache, beside what of A is multiplied: of a panel, or sums
_LARGE = 1 << 18  # bytes of a panel from which on parts of it pay
_FAR = 4096  # bytes between rows: a page, and a set of the first cache
_WASTE = 1 / 16  # of the rows of the last tiles; upstream's rules never waste any


@dataclass(frozen=True)
class Tile:
    """What fixes the shape of a contraction's trace.

    Attributes
    ----------
    rows
        The loops whose innermost parts are the tile's rows, each with its factor.
    vectors
        Vectors of a row.
    packed
        Whether each thread copies the panel of W that it is about to use into a buffer of its own.
    apart
        Whether A is padded before all else, and not by each piece of work for itself.
    ahead
        Whether all panels of W are packed before all else, by a block that can be split off; instead of `packed`.
    parts
        Of how many parts the last loop over terms is, each of which goes through all rows of a piece.
    """

    rows: tuple[tuple[int, int], ...]
    vectors: int
    packed: bool
    apart: bool = False
    ahead: bool = False
    parts: int = 1

    @property
    def accumulators(self) -> int:
        """Vector registers that hold sums."""
        return prod(factor for _, factor in self.rows) * self.vectors

    def __str__(self) -> str:
        rows = prod(factor for _, factor in self.rows)
        weights = "packed ahead" if self.ahead else "packed in panels" if self.packed else "in place"
        parts = f", terms in {self.parts} parts" if self.parts > 1 else ""
        return f"tiles of {rows} row{'s' if rows > 1 else ''} x {self.vectors} vectors, weights {weights}{parts}"


def tiles(match: Contraction, target: Target, vectors: int | None = None) -> list[Tile]:
    """The tiles worth trying, of so many vectors if that is given.

    With W's vectors and one of A they fit the register file; they keep at least half as many multiply-adds in flight
    as the best of them; and they don't exceed the result. The most promising come first; none where the columns of a
    convolution leave but a little of a vector. Where W may be packed ahead it is: its panels then cost nothing.
    """
    lanes = lanes_of(match, target)
    width = match.width if match.plain else (match.run or match.width)
    if not match.plain and lanes * match.bits < _NARROW:
        return []
    found = []
    for rows, nv in ((rows, nv) for nv in ((vectors,) if vectors else _VECTORS) for rows in _row_tiles(match)):
        mr, nr = prod(factor for _, factor in rows), nv * lanes
        divides = width % nr == 0 and match.vector not in match.open
        if mr * nv + nv + 1 > vector_registers(target) or not (divides or (match.plain and nv <= -(-width // lanes))):
            continue
        # In place W's vectors must be whole and in one piece.
        in_place = divides and not match.made and match.weights_dim == match.weights_rank - 1
        # Rows that can't be cut in pieces would have each piece pad all of A.
        alone = match.computed and not _divisible(match, rows)
        places = [(False, True)] if match.free else [(False, False)] * in_place + [(True, False)]
        found += [
            Tile(rows, nv, packed, apart, before, parts)
            for parts in _parts(match, rows, nr)
            for apart in ((True,) if alone else (False, True) if match.computed else (False,))
            for packed, before in places
        ]
    busiest = max((tile.accumulators for tile in found), default=0)
    return sorted(
        (tile for tile in found if 2 * tile.accumulators >= busiest),
        key=lambda tile: _promise(match, tile, lanes),
        reverse=True,
    )


def samples_known(match: Contraction, tile: Tile) -> tuple[bool, bool, bool]:
    """Whether the loops are known of which `register_tile` samples the pieces, in its order: rows, columns, terms."""
    loops = outermost(match, dict(tile.rows)), match.vector, terms_of(match, tile.rows)[-1]
    return tuple(loop not in match.open for loop in loops)  # type: ignore[return-value]


def _parts(match: Contraction, rows: tuple[tuple[int, int], ...], columns: int) -> tuple[int, ...]:
    """Of how many parts a tile's terms may be, the most promising first."""
    mr, last = prod(factor for _, factor in rows), match.extents[terms_of(match, rows)[-1]]
    count = prod(match.extents[n] for n in match.rows)
    row = columns * match.bits // 8
    panel = row * prod(match.extents[n] for n in match.reductions)
    if match.plain or match.phases or match.transposed or match.open:
        return (1,)
    if not (mr < min(count, _FEW) and panel > _LARGE and count * row <= _FIRST):
        return (1,)
    parts = next((n for n in divisors(last) if panel <= n * _FIRST), 1)
    return (parts, 1) if parts > 1 else (1,)


def _divisible(match: Contraction, rows: tuple[tuple[int, int], ...]) -> bool:
    """Whether the rows' outermost loop can be cut into pieces of several tiles, or in two."""
    factors = dict(rows)
    loop = outermost(match, factors)
    extent = -(-match.extents[loop] // match.phases.get(loop, 1) // factors.get(loop, 1))
    return any(extent % pieces == 0 for pieces in range(2, max(2, extent // 2) + 1))


def _promise(match: Contraction, tile: Tile, lanes: int) -> tuple[float, float, bool, bool]:
    """What speaks for a tile, the most important first: a key to sort by.

    The useful part of what it has in flight, up to what hides latencies; how little it loads for that; W packed where
    its rows are far apart; and padding that is in the cache when it is read.
    """
    steps = [(match.extents[loop] // match.phases.get(loop, 1), factor) for loop, factor in tile.rows]
    steps.append((match.width, tile.vectors * lanes))
    useful = prod(extent / (-(-extent // step) * step) for extent, step in steps)
    # A that has the columns too is loaded as often as it is multiplied, but by rows that overlap.
    rows = tile.accumulators // tile.vectors
    reuse = tile.accumulators / (rows + tile.vectors) if match.run else 1 / tile.vectors
    far = match.width * match.bits // 8 >= _FAR
    # Of one row every element of W is read once, and that is what takes the time.
    many = prod(match.extents[n] for n in match.rows) > 1
    busy = min(tile.accumulators, _IN_FLIGHT) if many else 1
    return useful * busy, reuse, tile.packed == (far and many), not tile.apart


def _row_tiles(match: Contraction) -> list[tuple[tuple[int, int], ...]]:
    """Rows of a tile: part of the innermost loop over rows, or all of it and part of the next, and so on."""
    found = []
    for rows in _row_counts(match):
        factors, rest = [], rows
        for loop in reversed(match.rows):
            extent = match.extents[loop] // match.phases.get(loop, 1)
            if loop in match.open and not (match.plain and rest <= extent):
                break
            if rest <= extent:
                waste = -(-extent // rest) * rest / extent - 1
                if match.plain or waste <= _WASTE:
                    factors.append((loop, rest))
                    found.append(tuple(factors))
                break
            if rest % extent:
                break
            factors.append((loop, extent))
            rest //= extent
    return found


def _row_counts(match: Contraction) -> list[int]:
    """How many rows a tile may have: the usual, and what divides an innermost loop that those don't."""
    extent = match.extents[match.rows[-1]] // match.phases.get(match.rows[-1], 1)
    return sorted({*_ROWS} | {n for n in range(1, max(_ROWS) + 1) if extent % n == 0})


def lanes_of(match: Contraction, target: Target) -> int:
    """Elements of C in a vector: a register's worth, or a power of two that fits a narrower result."""
    full = vector_bits(target) // match.bits
    if match.plain:
        return min(full, 1 << (match.width.bit_length() - 1))
    width = match.run or match.width
    return min(full, width & -width)


def terms_of(match: Contraction, tile_rows: tuple[tuple[int, int], ...]) -> list[int]:
    """The loops of the sum, outermost first; the innermost is unrolled.

    Where the last moves A's rows, each of its steps reads what the one before did but for a row. Unrolled, LLVM would
    keep all of that in registers, of which there are none left. So loops that do that come first.
    """
    rows = {loop for loop, _ in tile_rows}
    moving = [n for n in match.reductions if match.windows.get(n, frozenset()) & rows]
    others = [n for n in match.reductions if n not in moving]
    if match.reductions[-1] not in moving or not others:
        return list(match.reductions)
    return moving + sorted(others, key=lambda n: match.extents[n] > 1)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def outermost(match: Contraction, factors: dict[int, int]) -> int:
    """The loop over rows that is cut into pieces of work: the first that the tile leaves something of."""
    left = {n: -(-match.extents[n] // match.phases.get(n, 1) // factors.get(n, 1)) for n in match.rows}
    return next((n for n, extent in left.items() if extent > 1), match.rows[0])
