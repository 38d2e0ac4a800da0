"""Axes that are read at several small offsets: stencils and the windows of convolutions, whose shares have halos.

Offsets between two axes that differ would cut both into ever smaller parts. Where they are small the axes are taken
whole, as one class, and it is followed backwards from the results which indices around its own each index needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from tvm_axe.analysis.accesses import LeafBlock
from tvm_axe.analysis.patterns import SPATIAL

__all__ = ["Axis", "Shifted", "Span", "Windowed", "shifted"]

SMALL = 4
"""An offset is small if it is this part of an axis at most; rotary embeddings join the two halves of one."""


class Axis(NamedTuple):
    """Dimension `position` of a buffer, or iterator `position` of a block, each by its number."""

    of: Literal["buffer", "block"]
    number: int
    position: int


class Span(NamedTuple):
    """An index that is one whole iterator and a constant. `store`: the number of the store that has it, if one does."""

    axis: Axis
    iterator: Axis
    constant: int
    store: int | None


class Windowed(NamedTuple):
    """An index that is a whole spatial iterator, if there is one, and from `constant` to `constant` + `width`."""

    axis: Axis
    iterator: Axis | None
    constant: int
    width: int
    store: int | None


class Shifted(NamedTuple):
    """An axis whose indices from ``t + reach[0]`` to ``t + reach[1]`` belong to index t of `group`, of some extent."""

    group: Axis
    extent: int
    reach: tuple[int, int]


class _Read(NamedTuple):
    axis: Axis
    iterator: Axis
    low: int
    high: int
    is_store: bool


def shifted(
    blocks: Sequence[LeafBlock],
    extents: Mapping[Axis, int],
    spans: Iterable[Span],
    windows: Sequence[Windowed],
    unfit: set[Axis],
    outputs: set[int],
) -> dict[Axis, Shifted]:
    """Return the axes that move together in spite of different offsets.

    A dimension of extent 1 never does: index 0 is also how those read it that don't care.

    Parameters
    ----------
    unfit : set[Axis]
        The axes that are also used in another way.
    outputs : set[int]
        The numbers of the buffers that are results.
    """
    reads = [_Read(link.axis, link.iterator, link.constant, link.constant, link.store is not None) for link in spans]
    unfit = unfit | {link.axis for link in windows if link.iterator is None}
    for link in windows:
        if link.iterator is not None:
            high = link.constant + link.width
            reads.append(_Read(link.axis, link.iterator, link.constant, high, link.store is not None))
    found: dict[Axis, Shifted] = {}
    for group in _groups(reads):
        axes = {axis for link in group for axis in (link.axis, link.iterator)}
        if axes & unfit or any(extents[axis] == 1 for axis in axes) or not _offsets_differ(group, extents):
            continue
        reach = _reaches(blocks, group, axes, extents, outputs)
        results = {axis for axis in axes if axis.of == "buffer" and axis.number in outputs}
        if reach is not None and len({extents[axis] for axis in results}) == 1:
            extent, name = extents[min(results)], min(axes)
            found |= {axis: Shifted(name, extent, reach[axis]) for axis in axes}
    return found


def _groups(links: Iterable[_Read]) -> list[list[_Read]]:
    """Return the links that have axes in common, directly or through others."""
    groups: list[tuple[set[Axis], list[_Read]]] = []
    for link in links:
        ends = {link.axis, link.iterator}
        joined = [group for group in groups if group[0] & ends]
        groups = [group for group in groups if not group[0] & ends]
        groups.append((ends.union(*(axes for axes, _ in joined)), [one for _, part in joined for one in part] + [link]))
    return [group for _, group in groups]


def _offsets_differ(group: list[_Read], extents: Mapping[Axis, int]) -> bool:
    """Return whether two ways from one axis to another have offsets that differ, if only by little."""
    if any(link.low < link.high for link in group):
        return True
    at = {group[0].iterator: 0}
    waiting = list(group)
    while waiting:
        ready = [link for link in waiting if link.axis in at or link.iterator in at]
        for link in ready:
            here = at.get(link.iterator, at.get(link.axis, 0) - link.low)
            at[link.iterator] = here
            off = abs(at.setdefault(link.axis, here + link.low) - here - link.low)
            if off and SMALL * off <= min(extents[link.axis], extents[link.iterator]):
                return True
        waiting = [link for link in waiting if link not in ready]
    return False


def _reaches(
    blocks: Sequence[LeafBlock],
    group: list[_Read],
    axes: set[Axis],
    extents: Mapping[Axis, int],
    outputs: set[int],
) -> dict[Axis, tuple[int, int]] | None:
    """Return which indices around its own each index of the results needs on each axis; None where that isn't seen."""
    if len({axis[:2] for axis in axes}) < len(axes):
        return None  # two dimensions of a buffer, or two iterators of a block
    for axis in axes:
        if axis.of == "block":
            written = [link.axis.number for link in group if link.iterator == axis and link.is_store]
            stores = len(blocks[axis.number].written)
            if blocks[axis.number].kinds[axis.position] != SPATIAL or len(written) != stores:
                return None
    if any(link.is_store and link.low < link.high for link in group):
        return None
    need = {axis: (0, 0) for axis in axes if axis.of == "buffer" and axis.number in outputs}
    for _ in range(2 * len(blocks) + 2):
        before = dict(need)
        for link in group:
            here, there = (link.axis, link.iterator) if link.is_store else (link.iterator, link.axis)
            low, high = (-link.low, -link.high) if link.is_store else (link.low, link.high)
            if here in need:
                first, last = need[here][0] + low, need[here][1] + high
                old = need.get(there, (first, last))
                need[there] = (min(first, old[0]), max(last, old[1]))
        if need == before:
            return need if need.keys() == axes else None
    return None  # what is read is written in the same way, as in a scan
