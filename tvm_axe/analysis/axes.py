"""Which parts and digits of buffers' dimensions and of blocks' iterators move together.

An *axis* is a dimension of a buffer or an iterator of a block. Each access links a dimension with iterators. An offset,
and a buffer smaller than the iteration, cut both axes into *parts*; strides cut parts into *digits*. Cuts spread over
the links to a fixed point; then digits that a link joins are one class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tvm import tirx

from tvm_axe.analysis.accesses import LeafBlock
from tvm_axe.analysis.digits import Digit, Index
from tvm_axe.analysis.patterns import REDUCE, SPATIAL
from tvm_axe.analysis.shifts import Axis, Span, Windowed, shifted
from tvm_axe.analysis.sizes import is_symbolic

__all__ = ["Axes", "Segment"]

MOST_PARTS = 64
"""Parts of an axis at most: more are what offsets cut that have nothing to do with each other."""

Piece = tuple[Axis, int]
"""A part of an axis, by its first index."""


class Segment(NamedTuple):
    """A part of an axis: from `begin` to `end`, with the classes of its digits, major first."""

    begin: int
    end: int
    classes: tuple[int, ...]
    reach: tuple[int, int] = (0, 0)


class _Sum(NamedTuple):
    """A dimension's index as digits of several iterators, or some digits of one."""

    axis: Axis
    block: int
    digits: tuple[Digit, ...]
    constant: int
    store: int | None


class Axes:
    """The axes of some blocks, and the classes of their digits.

    Parameters
    ----------
    blocks : Sequence[LeafBlock]
        All blocks of a function.
    outputs : Sequence[Buffer]
        The buffers whose elements are results.
    """

    def __init__(self, blocks: Sequence[LeafBlock], outputs: Sequence[tirx.Buffer]) -> None:
        self.blocks = blocks
        self.buffers: list[tirx.Buffer] = []
        self.extents: dict[Axis, int] = {}
        self.opaque: set[Axis] = set()
        self.symbolic: set[Axis] = set()  # whose extents are no constants; they are one digit, if any
        spans, sums, windows = self._links()
        numbers = {number for number in map(self.number, outputs) if number is not None}
        self.shifted = shifted(blocks, self.extents, spans, windows, {*self.opaque, *_summed(sums)}, numbers)
        self.opaque |= {link.axis for link in windows if link.axis not in self.shifted}
        links = [link for link in spans if link.axis not in self.shifted]
        overlaps, sums = self._cut_parts(links, sums)
        self._cut_digits(overlaps, sums)
        self._join(overlaps, sums)
        self._classes: dict[object, int] = {}
        self._sizes: list[int] = []

    def number(self, buffer: tirx.Buffer) -> int | None:
        """Return the position of a buffer among `buffers`, None if nothing touches it."""
        return next((number for number, other in enumerate(self.buffers) if other.same_as(buffer)), None)

    def _links(self) -> tuple[list[Span], list[_Sum], list[Windowed]]:
        spans, sums, windows, stores = list[Span](), list[_Sum](), list[Windowed](), itertools.count()
        for k, block in enumerate(self.blocks):
            self.extents |= {Axis("block", k, j): extent for j, extent in enumerate(block.extents)}
            self.opaque |= {Axis("block", k, j) for j, kind in enumerate(block.kinds) if kind not in (SPATIAL, REDUCE)}
            self.symbolic |= {Axis("block", k, j) for j in block.symbolic}
            for access in block.accesses:
                number, store = self.number(access.buffer), next(stores) if access.is_store else None
                if number is None:
                    number = len(self.buffers)
                    self.buffers.append(access.buffer)
                for dim, index in enumerate(access.indices):
                    axis, size = Axis("buffer", number, dim), access.shape[dim]
                    self.extents[axis] = size
                    self.symbolic |= {axis} if is_symbolic(access.buffer.shape[dim]) else set()
                    if index is None or not index.digits:
                        if size > 1 or axis in self.symbolic:  # not a sum of digits, or one index
                            self.opaque.add(axis)
                    elif self._is_whole(k, index.digits):
                        spans.append(Span(axis, Axis("block", k, index.digits[0].iterator), index.constant, store))
                    elif index.is_positional:
                        sums.append(_Sum(axis, k, index.digits, index.constant, store))
                    else:
                        windows.append(self._window(axis, k, index, store))
        return spans, sums, windows

    def _is_whole(self, k: int, digits: tuple[Digit, ...]) -> bool:
        """Return whether `digits` are one whole iterator of block `k`, each number in its place."""
        first = digits[0]
        return len(digits) == 1 and first == Digit(1, first.iterator, 1, self.blocks[k].extents[first.iterator])

    def _window(self, axis: Axis, k: int, index: Index, store: int | None) -> Windowed:
        """Return an index as one whole spatial iterator, the longest, and an offset that the others make."""
        whole = [d for d in index.digits if self._is_whole(k, (d,)) and self.blocks[k].kinds[d.iterator] == SPATIAL]
        whole = [d for d in whole if sum(other.iterator == d.iterator for other in index.digits) == 1]
        if not whole:
            return Windowed(axis, None, index.constant, 0, store)
        chosen = max(whole, key=lambda digit: digit.extent)
        return Windowed(axis, Axis("block", k, chosen.iterator), index.constant, index.most - chosen.most, store)

    # ---- Parts

    def _cut_parts(self, links: list[Span], sums: list[_Sum]) -> tuple[list[_Overlap], list[_Sum]]:
        """Cut both axes of each link at the ends of where they overlap.

        Where a load is guarded (a concatenation, padding) the buffer's bounds say as much as the condition.
        """
        spans = [_Overlap(*link[:3], *self._overlap(link), link.store) for link in links]
        spans = [span for span in spans if span.begin < span.end]
        while True:
            cuts = {axis: {0, extent} for axis, extent in self.extents.items()}
            _until_stable(partial(_spread_cuts, spans, cuts), cuts)
            shattered = {axis for axis, at in cuts.items() if len(at) > MOST_PARTS + 1}
            if not shattered:
                break
            broken = [span for span in spans if {span.axis, span.iterator} & shattered]
            self.opaque |= shattered.union(*({span.axis, span.iterator} for span in broken))
            spans = [span for span in spans if not {span.axis, span.iterator} & shattered]
        self.parts = {axis: sorted(at) for axis, at in cuts.items()}
        return spans, [found for link in sums for found in [self._high_digits(link)] if found is not None]

    def _overlap(self, link: Span) -> tuple[int, int]:
        extent, size = self.extents[link.iterator], self.extents[link.axis]
        return max(0, -link.constant), min(extent, size - link.constant)

    def _high_digits(self, link: _Sum) -> _Sum | None:
        """Return a sum without the low digits that are cut into parts or shifted, as half of a head is."""
        below, size = [0, *itertools.accumulate(digit.most for digit in link.digits)], self.extents[link.axis]

        def fits(first: int) -> bool:
            whole = all(len(self.parts[Axis("block", link.block, d.iterator)]) == 2 for d in link.digits[first:])
            return whole and 0 <= link.constant < link.digits[first].coef - below[first]

        first = next((first for first in range(len(link.digits)) if fits(first)), len(link.digits))
        top = link.digits[-1]
        if first == len(link.digits) or len(self.parts[link.axis]) > 2 or size % (top.coef * top.extent):
            self.opaque.add(link.axis)
            return None
        return link._replace(digits=link.digits[first:])

    # ---- Digits

    def _cut_digits(self, spans: list[_Overlap], sums: list[_Sum]) -> None:
        """Cut each part at strides; where of two strides neither divides the other, the part has no digits."""
        strides = {(axis, a): {1, b - a} for axis, at in self.parts.items() for a, b in itertools.pairwise(at)}

        def spread() -> None:
            for span in spans:
                for inner, outer in self._pieces(span):
                    both = strides[inner] | strides[outer]
                    strides[inner] |= both
                    strides[outer] |= both
            for link in sums:
                outer_strides = strides[link.axis, 0]
                for coef, iterator, low, extent in map(_fields, link.digits):
                    inner_strides = strides[Axis("block", link.block, iterator), 0]
                    outer_strides |= {coef, coef * extent}
                    inner_strides |= {low, low * extent}
                    inner_strides |= {
                        low * c // coef for c in outer_strides if coef < c < coef * extent and not c % coef
                    }
                    outer_strides |= {coef * c // low for c in inner_strides if low < c < low * extent and not c % low}

        _until_stable(spread, strides)
        self.strides = {piece: sorted(found) for piece, found in strides.items()}
        self.broken = {piece for piece, at in self.strides.items() if any(b % a for a, b in itertools.pairwise(at))}

    def _pieces(self, span: _Overlap) -> list[tuple[Piece, Piece]]:
        """Return the parts of the iterator, each with that of the buffer's dimension that it is linked with."""
        begins = [begin for begin in self.parts[span.iterator] if span.begin <= begin < span.end]
        return [((span.iterator, begin), (span.axis, begin + span.constant)) for begin in begins]

    def _join(self, spans: list[_Overlap], sums: list[_Sum]) -> None:
        """Make classes of the digits that are linked. A digit is a part and its stride."""
        self._parent: dict[tuple[Piece, int], tuple[Piece, int]] = {
            (piece, stride): (piece, stride) for piece, at in self.strides.items() for stride in at[:-1]
        }
        self.bad = {digit for digit in self._parent if digit[0][0] in self.opaque or digit[0] in self.broken}
        stored: dict[int, set[tuple[Piece, int]]] = {}

        def join(inner: tuple[Piece, int], outer: tuple[Piece, int], store: int | None) -> None:
            if store is not None:
                stored.setdefault(store, set()).add(inner)
            if inner[0] in self.broken or outer[0] in self.broken:
                self.bad |= {digit for digit in (inner, outer) if digit in self._parent}
            else:
                self._parent[self._find(inner)] = self._find(outer)

        for span in spans:
            for inner, outer in self._pieces(span):
                for stride in self.strides[inner][:-1]:
                    join((inner, stride), (outer, stride), span.store)
        for link in sums:
            piece, covered = (link.axis, 0), set[int]()
            for coef, iterator, low, extent in map(_fields, link.digits):
                for stride in [stride for stride in self.strides[piece] if coef <= stride < coef * extent]:
                    inner = (Axis("block", link.block, iterator), 0)
                    join((inner, low * stride // coef), (piece, stride), link.store)
                    covered.add(stride)
            # The others aren't touched here: who has a share of them would have to know which.
            self.bad |= {(piece, stride) for stride in self.strides[piece][:-1] if stride not in covered}
        self._check_stores(stored)

    def _check_stores(self, stored: Mapping[int, set[tuple[Piece, int]]]) -> None:
        """Spoil the iterators' digits that don't say where a store goes: iterations that differ there overwrite others.

        A reduction's iterators are the other way round.
        """
        stores = itertools.count()
        for k, block in enumerate(self.blocks):
            own = [digit for digit in self._parent if digit[0][0].of == "block" and digit[0][0].number == k]
            for _ in block.written:
                covered = stored.get(next(stores), set())
                self.bad |= {
                    digit
                    for digit in own
                    if digit[0][0] not in self.shifted
                    and (digit in covered) == (block.kinds[digit[0][0].position] == REDUCE)
                }

    def _find(self, digit: tuple[Piece, int]) -> tuple[Piece, int]:
        while self._parent[digit] != digit:
            digit = self._parent[digit]
        return digit

    # ---- What was found

    def segments(self, axis: Axis) -> tuple[Segment, ...]:
        """Return the parts of an axis. Classes are numbered as they are met here."""
        if self.extents[axis] == 1 or (axis in self.symbolic and axis in self.opaque):
            return (Segment(0, self.extents[axis], ()),)
        if axis in self.shifted:
            group, extent, reach = self.shifted[axis]
            return (Segment(0, self.extents[axis], (self._named(group, extent),), reach),)
        found = []
        for begin, end in itertools.pairwise(self.parts[axis]):
            piece, classes = (axis, begin), []
            at = self.strides[piece] if piece not in self.broken else []
            for stride, above in reversed(list(itertools.pairwise(at))):
                classes.append(self._named(self._find((piece, stride)), above // stride))
            found.append(Segment(begin, end, tuple(classes)))
        return tuple(found)

    def _named(self, root: object, extent: int) -> int:
        if root not in self._classes:
            self._classes[root] = len(self._sizes)
            self._sizes.append(extent)
        return self._classes[root]

    def classes(self) -> tuple[list[int], set[int], set[int], set[int]]:
        """Return the extents of the classes that `segments` has met, and which are opaque, halos and symbolic."""
        spoiled = {self._find(digit) for digit in self.bad}
        groups = {group for group, *_ in self.shifted.values()}
        opaque = {number for root, number in self._classes.items() if root in spoiled}
        halos = {number for root, number in self._classes.items() if root in groups}
        roots = {self._find(digit) for digit in self._parent if digit[0][0] in self.symbolic}
        return self._sizes, opaque, halos, {number for root, number in self._classes.items() if root in roots}


class _Overlap(NamedTuple):
    """Where an iterator and a dimension lie on each other: index ``i`` from `begin` to `end` on ``i + constant``."""

    axis: Axis
    iterator: Axis
    constant: int
    begin: int
    end: int
    store: int | None


def _fields(digit: Digit) -> tuple[int, int, int, int]:
    return digit.coef, digit.iterator, digit.low, digit.extent


def _summed(sums: Iterable[_Sum]) -> set[Axis]:
    axes = {link.axis for link in sums}
    return axes | {Axis("block", link.block, digit.iterator) for link in sums for digit in link.digits}


def _spread_cuts(spans: list[_Overlap], cuts: dict[Axis, set[int]]) -> None:
    for span in spans:
        if max(len(cuts[span.iterator]), len(cuts[span.axis])) > MOST_PARTS + 1:
            continue
        both = cuts[span.iterator] | {cut - span.constant for cut in cuts[span.axis]}
        inside = {cut for cut in both if span.begin < cut < span.end} | {span.begin, span.end}
        cuts[span.iterator] |= inside
        cuts[span.axis] |= {cut + span.constant for cut in inside}


def _until_stable(step: Callable[[], None], sets: Mapping[Any, set[int]]) -> None:
    before = -1
    while before != (before := sum(map(len, sets.values()))):
        step()
