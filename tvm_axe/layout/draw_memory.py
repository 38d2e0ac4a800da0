"""Pictures of memory as words of 4 bytes: what one access of a warp touches, by bank or by sector."""

from __future__ import annotations

from collections import Counter

from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.memory import BANKS, SECTOR, WORD, Access, bank_conflicts, lane_addresses, sectors_touched
from tvm_axe.layout.picture import NAMED, Cell, Entry, Picture, ranges
from tvm_axe.layout.swizzle import ComposeLayout

LINE_WORDS = 32  # a row of the picture: 128 bytes
GREEN, RED, YELLOW = NAMED[2], NAMED[3], NAMED[1]


def draw_banks(layout: Layout | ComposeLayout, shape: tuple[int, ...], access: Access) -> Picture:
    """Return the words of shared memory that a warp touches, a column a bank, and how many conflicts there are."""
    served = bank_conflicts(layout, shape, access)
    crowded = {(n, bank): words for n, lanes in enumerate(served.phases) for bank, words in served.crowd(lanes).items()}
    lanes, elements = _lanes_of(served.words), _elements_of(layout, shape, access)
    phase_of = {lane: number for number, phase in enumerate(served.phases) for lane in phase}
    rows = []
    for line in _lines(lanes):
        cells = []
        for word in range(line * LINE_WORDS, (line + 1) * LINE_WORDS):
            touching = lanes.get(word, [])
            crowd = max((crowded[phase_of[lane], word % BANKS] for lane in touching), default=0)
            cells.append(Cell(("t" + ranges(touching), elements[word]), int(crowd > 1)) if touching else Cell())
        rows.append((f"{line * LINE_WORDS * WORD}", tuple(cells)))
    most = Counter[int]()
    for (_, bank), words in crowded.items():
        most[bank] = max(most[bank], words)
    rows.append(
        ("at once", tuple(Cell((str(most[b]),), int(most[b] > 1)) if most[b] else Cell() for b in range(BANKS)))
    )
    phases = len(served.phases)
    verdict = f"{served.ways}-way conflicts" if served.conflicts else "no conflict"
    notes = (
        f"{_what(shape, access)}: the 4-byte words of shared memory that the lanes t touch, by bank",
        f"{verdict}: {phases + served.conflicts} cycles for {phases} {'phase' if phases == 1 else 'phases'}, "
        f"{served.conflicts} of them conflicts",
    )
    legend = (Entry("a word alone in its bank", GREEN), Entry("words that share a bank wait for each other", RED))
    return Picture(str(layout), notes, tuple(map(str, range(BANKS))), tuple(rows), legend)


def draw_sectors(layout: Layout | ComposeLayout, shape: tuple[int, ...], access: Access) -> Picture:
    """Return the words of global memory that a warp touches, in their sectors, and how much of what moves is used."""
    moved = sectors_touched(layout, shape, access)
    lanes, elements = _lanes_of(moved.words), _elements_of(layout, shape, access)
    rows = []
    for line in _lines(lanes):
        cells = []
        for word in range(line * LINE_WORDS, (line + 1) * LINE_WORDS):
            if word in lanes:
                cells.append(Cell(("t" + ranges(lanes[word]), elements[word]), 0))
            else:
                cells.append(Cell((), 1) if word * WORD // SECTOR in moved.sectors else Cell())
        rows.append((f"{line * LINE_WORDS * WORD}", tuple(cells)))
    notes = (
        f"{_what(shape, access)}: the 4-byte words of global memory that the lanes t touch, by {SECTOR}-byte sector",
        f"{len(moved.sectors)} sectors, {SECTOR * len(moved.sectors)} bytes moved for {moved.useful} bytes touched: "
        f"efficiency {100 * moved.efficiency:.3g}%",
    )
    legend = (Entry("touched", GREEN), Entry("moved with its sector, and not touched", YELLOW))
    columns = tuple(str(word * WORD) for word in range(LINE_WORDS))
    return Picture(str(layout), notes, columns, tuple(rows), legend, group=SECTOR // WORD)


def _lanes_of(words: dict[int, tuple[int, ...]]) -> dict[int, list[int]]:
    """Return the lanes that touch each word."""
    found: dict[int, list[int]] = {}
    for lane, touched in words.items():
        for word in touched:
            found.setdefault(word, []).append(lane)
    return found


def _elements_of(layout: Layout | ComposeLayout, shape: tuple[int, ...], access: Access) -> dict[int, str]:
    """Return the indices of the elements that each word holds a part of, of those that are touched."""
    bits, elements = dtype_bits(access.dtype), access.elements(shape)
    found: dict[int, set[int]] = {}
    for lane, start in lane_addresses(layout, shape, access).items():
        for number, element in enumerate(elements[lane]):
            first = 8 * start + number * bits
            for word in range(first // (8 * WORD), (first + bits - 1) // (8 * WORD) + 1):
                found.setdefault(word, set()).add(element)
    return {word: _indices(positions, shape) for word, positions in found.items()}


def _indices(positions: set[int], shape: tuple[int, ...]) -> str:
    """Return row-major positions as indices, those of a dimension that differ as a range: 3,0-1."""
    parts: list[str] = []
    below = 1
    for extent in reversed(shape):
        parts.insert(0, ranges(sorted({position // below % extent for position in positions})))
        below *= extent
    return ",".join(parts)


def _lines(words: dict[int, list[int]]) -> list[int]:
    """Return the lines of 128 bytes that hold one of the words."""
    return sorted({word // LINE_WORDS for word in words})


def _what(shape: tuple[int, ...], access: Access) -> str:
    lanes = access.lanes if isinstance(access.lanes, str) else f"lanes {access.lanes}"
    take = f", {access.vector} elements a lane" if access.vector > 1 else ""
    return f"{'x'.join(map(str, shape))} {access.dtype}, one {lanes} access of a warp{take}"
