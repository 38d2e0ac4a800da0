"""What each collective moves: from which slabs of the source, summed, to which slabs of the target.

One worker's part of a collective is a list of `Move`s. `tvm_axe.collective.ops` does them with numpy and
`tvm_axe.collective.kernels` compiles them, so both do the same. Nothing here waits.

In each collective a worker reads what the others wrote before a barrier and writes what they read after the next;
between the two, no two workers write the same element.

>>> (move,) = plan("all_gather", (2, 8), (5, 8), (0,), parts=3, rank=2)
>>> move.box
(1, 8)
>>> move.source
Corner(slabs=(0,), shape=(2, 8), at=(0, 0))
>>> move.target
Corner(slabs=(0, 1, 2), shape=(5, 8), at=(4, 0))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul

from tvm_axe.errors import InputError
from tvm_axe.layout.collectives import Collective
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.layout.traffic import chunk, reduced_part

# Whether the source and the target of a collective are views along the axis, (n, *shape); else the worker's own slab.
VIEWS = {
    Collective.ALL_REDUCE.operation: (True, True),
    Collective.REDUCE_SCATTER.operation: (True, False),
    Collective.ALL_GATHER.operation: (False, True),
    "all_gather_in_place": (True, True),
    Collective.ALL_TO_ALL.operation: (True, False),
    Collective.SEND.operation: (True, False),
    Collective.REDUCE.operation: (True, False),
    Collective.BROADCAST.operation: (True, False),
}


@dataclass(frozen=True)
class Corner:
    """Where a box lies: in which slabs of a group, in slabs of what dense shape, and from which element on."""

    slabs: tuple[int, ...]
    shape: tuple[int, ...]
    at: tuple[int, ...]

    @property
    def start(self) -> int:
        """The number of its first element in a slab."""
        return sum(map(mul, self.at, dense_strides(self.shape)))


@dataclass(frozen=True)
class Move:
    """Write the sum of a box of elements over the slabs of `source` to a box in each of the slabs of `target`.

    The sum is in the order of the slabs, whoever computes it. An own slab is slab 0 of a group of one.
    """

    box: tuple[int, ...]
    source: Corner
    target: Corner

    @property
    def outer(self) -> int:
        """How many of the box's dimensions are to be looped over: what is within the others is contiguous."""
        for dim in range(len(self.box) - 1, 0, -1):
            if not self.box[dim] == self.source.shape[dim] == self.target.shape[dim]:
                return dim
        return 0


def plan(
    name: str, source: Sequence[int], target: Sequence[int], numbers: Sequence[int], parts: int, rank: int
) -> list[Move]:
    """Return what the worker at coordinate `rank` of `parts` does in a collective.

    Parameters
    ----------
    name : str
        One of `VIEWS`.
    source, target : sequence of int
        The shape of a slab of each.
    numbers : sequence of int
        What else the collective takes: see the functions below, which say what each of them is.

    Raises
    ------
    InputError
        If the shapes don't fit each other.
    """
    source, target = tuple(source), tuple(target)
    moves = _PLANS[name](source, target, *numbers, parts=parts, rank=rank)
    moves = [move for move in moves if math.prod(move.box) and move.target.slabs]
    for move in moves:
        for shape, corner in ((source, move.source), (target, move.target)):
            inside = [at + extent <= room for at, extent, room in zip(corner.at, move.box, corner.shape)]
            whole = len(inside) == len(move.box) == len(corner.shape) and math.prod(shape) == math.prod(corner.shape)
            if not (whole and all(inside)):
                raise InputError(
                    f"{name}: slabs of shapes {source} (source) and {target} (target) don't fit each other on a mesh "
                    f"axis of {parts} with the arguments {tuple(numbers)}"
                )
    return moves


def received(name: str, source: Sequence[int], target: Sequence[int], numbers: Sequence[int], parts: int) -> list[int]:
    """Return how many elements each worker of a group receives of the others in a collective.

    It receives what it reads in their slabs, and what they write to its own.

    >>> received("all_gather", (2, 8), (5, 8), (0,), parts=3)
    [24, 24, 32]

    Parameters
    ----------
    name, source, target, numbers, parts
        See `plan`.
    """
    found = [0] * parts
    reads_peers, writes_peers = VIEWS[name]
    for rank in range(parts):
        for move in plan(name, source, target, numbers, parts, rank):
            size = math.prod(move.box)
            found[rank] += size * sum(slab != rank for slab in move.source.slabs) if reads_peers else 0
            for slab in move.target.slabs if writes_peers else ():
                found[slab] += size * (slab != rank)
    return found


_Shape = tuple[int, ...]


def _all_reduce(source: _Shape, target: _Shape, *, parts: int, rank: int) -> list[Move]:
    """Sum this worker's part of the flattened slabs and write it to each slab; the target may be the source."""
    size, everywhere = math.prod(source), tuple(range(parts))
    part = reduced_part(size, parts, rank)
    corner = Corner(everywhere, (size,), (part.start,))
    return [Move((part.stop - part.start,), corner, corner)]


def _reduce_scatter(source: _Shape, target: _Shape, dim: int, *, parts: int, rank: int) -> list[Move]:
    """Sum this worker's block along `dim` into its own slab.

    The block has ceil(extent / parts) rows of `dim`; those past the extent are left as they are.
    """
    mine = chunk(source[dim], parts, rank)
    box = _resized(source, dim, mine)
    whole = Corner(tuple(range(parts)), source, _corner(source, {dim: mine}))
    return [Move(box, whole, Corner((0,), target, _corner(target, {})))]


def _all_gather(source: _Shape, target: _Shape, dim: int, *, parts: int, rank: int) -> list[Move]:
    """Write this worker's own block to its place along `dim` in each slab.

    The block has ceil(extent / parts) rows of `dim`; those past the extent are not copied.
    """
    mine = chunk(target[dim], parts, rank)
    box = _resized(target, dim, mine)
    whole = Corner(tuple(range(parts)), target, _corner(target, {dim: mine}))
    return [Move(box, Corner((0,), source, _corner(source, {})), whole)]


def _all_gather_in_place(source: _Shape, target: _Shape, dim: int, *, parts: int, rank: int) -> list[Move]:
    """Write this worker's block, which lies at its place along `dim` in its own slab, to the others' slabs.

    The target is the source.
    """
    mine = chunk(target[dim], parts, rank)
    at = _corner(target, {dim: mine})
    others = tuple(peer for peer in range(parts) if peer != rank)
    return [Move(_resized(target, dim, mine), Corner((rank,), source, at), Corner(others, target, at))]


def _all_to_all(source: _Shape, target: _Shape, gathered: int, scattered: int, *, parts: int, rank: int) -> list[Move]:
    """Copy this worker's share along `scattered` from every slab, one after the other along `gathered`.

    A slab of the source has ceil(extent / parts) rows of `gathered` and all of `scattered`; the own slab of the target
    has all of `gathered` and ceil(extent / parts) rows of `scattered`. What is past an extent is neither read nor
    written.
    """
    mine = chunk(source[scattered], parts, rank)
    moves = []
    for peer in range(parts):
        theirs = chunk(target[gathered], parts, peer)
        box = _resized(_resized(source, scattered, mine), gathered, theirs)
        piece = Corner((peer,), source, _corner(source, {scattered: mine}))
        moves.append(Move(box, piece, Corner((0,), target, _corner(target, {gathered: theirs}))))
    return moves


def _send(source: _Shape, target: _Shape, shift: int, *, parts: int, rank: int) -> list[Move]:
    """Copy the slab of the worker at coordinate (rank - shift) mod parts: every slab goes `shift` further."""
    return _copy((rank - shift) % parts, source)


def _reduce(source: _Shape, target: _Shape, root: int, *, parts: int, rank: int) -> list[Move]:
    """Sum the slabs, as worker `root`, into the own slab, which may be one of them; the others do nothing."""
    size = (math.prod(source),)
    if rank != root:
        return []
    return [Move(size, Corner(tuple(range(parts)), size, (0,)), Corner((0,), size, (0,)))]


def _broadcast(source: _Shape, target: _Shape, root: int, *, parts: int, rank: int) -> list[Move]:
    """Copy the slab of worker `root`."""
    return _copy(root, source)


_PLANS: dict[str, Callable[..., list[Move]]] = {
    Collective.ALL_REDUCE.operation: _all_reduce,
    Collective.REDUCE_SCATTER.operation: _reduce_scatter,
    Collective.ALL_GATHER.operation: _all_gather,
    "all_gather_in_place": _all_gather_in_place,
    Collective.ALL_TO_ALL.operation: _all_to_all,
    Collective.SEND.operation: _send,
    Collective.REDUCE.operation: _reduce,
    Collective.BROADCAST.operation: _broadcast,
}


def _copy(slab: int, shape: _Shape) -> list[Move]:
    size = (math.prod(shape),)
    return [Move(size, Corner((slab,), size, (0,)), Corner((0,), size, (0,)))]


def _resized(shape: _Shape, dim: int, rows: slice) -> _Shape:
    return (*shape[:dim], rows.stop - rows.start, *shape[dim + 1 :])


def _corner(shape: _Shape, rows: dict[int, slice]) -> _Shape:
    return tuple(rows[dim].start if dim in rows else 0 for dim in range(len(shape)))
