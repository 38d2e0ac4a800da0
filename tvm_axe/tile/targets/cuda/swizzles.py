"""Layouts of tiles in shared memory under which the accesses that a program makes have no bank conflicts.

A row of a tile is cut into pieces of 16 bytes, which are exchanged by an XOR with bits of the row's number. Which bits
is found by trying: `tvm_axe.layout.bank_conflicts` counts, for every way in which the program accesses the tile, how
often two lanes of a warp meet in a bank, and the layout with the fewest conflicts is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import tvm_ffi

from tvm_axe.layout import Access, ComposeLayout, Iter, Layout, bank_conflicts
from tvm_axe.layout.swizzle import as_composed

PIECE = 16
"""Bytes that one lane takes at most."""


def choose(shape: tuple[int, ...], dtype: str, accesses: Sequence[Access]) -> tuple[Layout | ComposeLayout, str]:
    """The layout of a tile, and how well it serves `accesses`, in words.

    >>> layout, why = choose((64, 64), "float16", [Access("float16", "row", 8), Access("float16", "column", 8)])
    >>> print(layout)
    ComposeLayout(3, 3, 3, S[4096 : 1])
    >>> why
    'no bank conflicts in 2 kinds of access'
    """
    tile = shape[-2:] if len(shape) > 1 else shape
    counts = {layout: sum(bank_conflicts(layout, tile, access).conflicts for access in accesses)
              for layout in candidates(tile, dtype)}  # fmt: skip
    best = min(counts, key=lambda layout: counts[layout])  # the first of the best: the simplest
    kinds = f"{len(accesses)} kind{'' if len(accesses) == 1 else 's'} of access"
    why = f"{counts[best]} bank conflicts in {kinds}" if counts[best] else f"no bank conflicts in {kinds}"
    return _repeated(best, shape), why


def same_layout(a: Layout | ComposeLayout, b: Layout | ComposeLayout) -> bool:
    """Whether two layouts place every element alike."""
    return a == b or (a.size() == b.size() and as_composed(a).equivalent(b))


def candidates(tile: tuple[int, ...], dtype: str) -> Iterator[Layout | ComposeLayout]:
    """Row-major; swizzled by different bits of the row's number; and with rows a piece longer."""
    plain = Layout([Iter(math.prod(tile), 1, "m")])
    yield plain
    if len(tile) < 2:
        return
    rows, columns = tile
    bits = int(tvm_ffi.dtype(dtype).bits)
    fine, pieces = PIECE * 8 // bits, columns * bits // 8 // PIECE
    if columns * bits // 8 % PIECE:
        return
    width = (pieces & -pieces).bit_length() - 1  # pieces that XOR may exchange: the power of two in a row
    length = min(3, width)
    if length:
        first = max(3, (pieces - 1).bit_length())
        for atom in range(first, first + 4):
            span = 2 ** (fine.bit_length() - 1 + atom + length)
            if rows * columns % span == 0:
                yield ComposeLayout(fine.bit_length() - 1, length, atom, plain)
    yield Layout([Iter(rows, columns + fine, "m"), Iter(columns, 1, "m")])


def _repeated(layout: Layout | ComposeLayout, shape: tuple[int, ...]) -> Layout | ComposeLayout:
    """The layout of the last two dimensions, one after the other for those in front of them."""
    lead = math.prod(shape[:-2])
    if lead == 1:
        return layout
    span = int(layout.span())
    plain = layout.tile_layout if isinstance(layout, ComposeLayout) else layout
    outer = Layout([Iter(lead, span, "m"), *plain.D])
    if not isinstance(layout, ComposeLayout):
        return outer
    return ComposeLayout(layout.per_element, layout.swizzle_len, layout.atom_len, outer)
