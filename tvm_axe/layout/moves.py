"""Moves: what one collective or one local operation makes of a placement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tvm_axe.layout.collectives import Collective
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.placement import Placement


class Move(NamedTuple):
    """One step, as in a plan, without its cost."""

    kind: str
    axes: tuple[str, ...]
    gathered: int | None
    cut: int | None
    after: Placement


def moves(at: Placement, shape: Sequence[int], mesh: Mesh, sums: frozenset[str]) -> Iterator[Move]:
    """Return every move but the permutes from a placement of `shape` that leads to one that fits.

    An axis joins a dimension's blocks, or cuts them, as its minor axis: blocks of a major axis are no unions of blocks.
    Whole values become terms of a sum only over the axes in `sums`: to add zeros may save a latency, and costs memory.
    """
    return (move for move in (*_collectives(at, mesh), *_locals(at, mesh, sums)) if move.after.fits(shape, mesh))


def permutes(at: Placement, shape: Sequence[int], mesh: Mesh) -> Iterator[Move]:
    """Return every permute: they lead to the placements of the same sums with as many blocks in every dimension."""
    old = _digits(at, mesh)
    for after in _rearranged(at, mesh):
        if after != at and after.fits(shape, mesh):
            new = _digits(after, mesh)
            # Data crosses along the axes that become another digit of a block's number.
            yield Move("permute", tuple(a for a in mesh.names if old.get(a) != new.get(a)), None, None, after)


def _collectives(at: Placement, mesh: Mesh) -> Iterator[Move]:
    for axis in sorted(at.partial, key=mesh.names.index):
        summed = Placement(at.cuts, at.partial - {axis})
        yield Move(Collective.ALL_REDUCE.operation, (axis,), None, None, summed)
        for dim in range(len(at.cuts)):
            yield Move(Collective.REDUCE_SCATTER.operation, (axis,), None, dim, _cut(summed, dim, axis))
    for dim, cut in enumerate(at.cuts):
        if cut:
            joined = _joined(at, dim)
            yield Move(Collective.ALL_GATHER.operation, cut[-1:], dim, None, joined)
            for other in range(len(at.cuts)):
                if other != dim:
                    yield Move(Collective.ALL_TO_ALL.operation, cut[-1:], dim, other, _cut(joined, other, cut[-1]))


def _locals(at: Placement, mesh: Mesh, sums: frozenset[str]) -> Iterator[Move]:
    for axis, size in mesh.axes.items():
        if size > 1 and axis not in at.axes:
            for dim in range(len(at.cuts)):
                yield Move("slice", (axis,), None, dim, _cut(at, dim, axis))
            if axis in sums:
                yield Move("mask", (axis,), None, None, Placement(at.cuts, at.partial | {axis}))
    for dim, cut in enumerate(at.cuts):
        if cut and cut[-1] in sums:
            yield Move("mask", cut[-1:], dim, None, Placement(_joined(at, dim).cuts, at.partial | {cut[-1]}))


def _cut(at: Placement, dim: int, axis: str) -> Placement:
    """Return `at` with `axis` as the minor axis of `dim`."""
    return Placement((*at.cuts[:dim], (*at.cuts[dim], axis), *at.cuts[dim + 1 :]), at.partial)


def _joined(at: Placement, dim: int) -> Placement:
    """Return `at` without the minor axis of `dim`."""
    return Placement((*at.cuts[:dim], at.cuts[dim][:-1], *at.cuts[dim + 1 :]), at.partial)


def _rearranged(at: Placement, mesh: Mesh) -> Iterator[Placement]:
    """Yield the placements of the same sums that cut every dimension into as many blocks, `at` among them."""
    free = tuple(axis for axis, size in mesh.axes.items() if size > 1 and axis not in at.partial)
    blocks = [math.prod(mesh[axis] for axis in cut) for cut in at.cuts]

    def arrange(cuts: tuple[tuple[str, ...], ...], left: tuple[str, ...]) -> Iterator[Placement]:
        if len(cuts) == len(blocks):
            yield Placement(cuts, at.partial)
            return
        for cut in _orders(left, blocks[len(cuts)], mesh):
            yield from arrange((*cuts, cut), tuple(axis for axis in left if axis not in cut))

    return arrange((), free)


def _orders(axes: tuple[str, ...], blocks: int, mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """Yield every sequence of `axes` whose sizes multiply to `blocks`."""
    if blocks == 1:
        yield ()
    for axis in axes:
        if blocks > 1 and blocks % mesh[axis] == 0:
            for rest in _orders(tuple(a for a in axes if a != axis), blocks // mesh[axis], mesh):
                yield (axis, *rest)


def _digits(at: Placement, mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Return the digit of a block number that each axis is: its dimension, and the blocks that one step skips."""
    found = {}
    for dim, cut in enumerate(at.cuts):
        for place, axis in enumerate(cut):
            found[axis] = (dim, math.prod(mesh[minor] for minor in cut[place + 1 :]))
    return found


def permutation(before: Placement, after: Placement, mesh: Mesh) -> tuple[int, ...]:
    """Return for each device the one whose block under `before` it has under `after`; see Step.sources.

    Along axes that held replicas before and cut afterwards, any copy will do: the devices that are to share a block
    count through its copies.
    """
    old, new = _digits(before, mesh), _digits(after, mesh)
    copies = [axis for axis in mesh.names if axis in new and axis not in old]
    sharing = [axis for axis in mesh.names if axis in old and axis not in new]
    sources = []
    for device in range(mesh.size):
        blocks, coords = after.blocks(mesh, device), mesh.coords(device)
        place = {axis: blocks[dim] // skip % mesh[axis] for axis, (dim, skip) in old.items()}
        rank = 0
        for axis in sharing:
            rank = rank * mesh[axis] + coords[axis]
        for axis in reversed(copies):
            rank, place[axis] = divmod(rank, mesh[axis])
        sources.append(mesh.device({**coords, **place}))
    return tuple(sources)
