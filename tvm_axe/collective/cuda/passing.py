"""Collectives by a communicator: between devices that don't see each other's memory, of one host or of several.

What the communicator does itself, on what lies as it wants it, it does: sums of the types that it adds, and copies of
whole slabs or of blocks one behind the other. Sums are then in an order, and with roundings, of its own. All else is
what `plan` says, of any type and any extents: each device is sent the boxes that it sums, adds them up in the order of
the slabs, and sends the sum to those whose slabs it belongs to. A box that isn't contiguous goes through scratch
memory.

Nothing here waits, and nothing asks the host again: it is all told to one stream.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from tvm_axe.collective.algorithms import Phase
from tvm_axe.collective.cuda.moving import Side
from tvm_axe.collective.plan import VIEWS, Corner, Move, plan
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.layout.collectives import Collective

__all__ = ["ADDED", "Communicator", "Parcel", "Passing"]

ADDED = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "uint32", "int64", "uint64")
"""The types that a communicator adds."""

_ALL_REDUCE, _REDUCE = Collective.ALL_REDUCE.operation, Collective.REDUCE.operation
_BROADCAST, _ALL_GATHER = Collective.BROADCAST.operation, Collective.ALL_GATHER.operation
_REDUCE_SCATTER = Collective.REDUCE_SCATTER.operation


class Parcel(NamedTuple):
    """What goes to a device or comes from it: its coordinate, an address, and how many bytes."""

    peer: int
    address: int
    nbytes: int


class Communicator(ABC):
    """What the devices of a group do together, on contiguous memory at addresses of their own.

    All of them call the same, in the same order.
    """

    @abstractmethod
    def all_reduce(self, source: int, target: int, count: int, dtype: str) -> None:
        """Make the target the sum of the sources, of so many elements of a type of `ADDED`; they may be the same."""

    @abstractmethod
    def reduce(self, source: int, target: int, count: int, dtype: str, root: int) -> None:
        """The same at one device; the other targets are left as they are."""

    @abstractmethod
    def reduce_scatter(self, source: int, target: int, count: int, dtype: str) -> None:
        """Make the target, of so many elements, the device's part of the sum of sources that have all parts."""

    @abstractmethod
    def all_gather(self, source: int, target: int, nbytes: int) -> None:
        """Make the target the sources, of so many bytes each, one behind the other; a source may be at its place."""

    @abstractmethod
    def broadcast(self, source: int, target: int, nbytes: int, root: int) -> None:
        """Make the target the source of one device."""

    @abstractmethod
    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send and receive all of these at the same time; between two devices they are in the same order."""


class Moving(Protocol):
    """What moves boxes between a device's own memory, as `Mover` does."""

    def run(self, phases: Sequence[Phase], source: Side, target: Side) -> None:
        """Do what the phases say."""


class Scratch:
    """Memory of a device that collectives use one after the other.

    Parameters
    ----------
    get : callable
        Returns the address of so many bytes that nobody else has, for as long as this is used.
    least : int
        Bytes to ask for at least.
    """

    _LINE = 256

    def __init__(self, get: Callable[[int], int], least: int = 32 << 20) -> None:
        self._get, self._least = get, least
        self._parts: list[tuple[int, int]] = []
        self._part = self._used = 0

    def begin(self) -> None:
        """Give out all of it anew."""
        self._part = self._used = 0

    def take(self, nbytes: int) -> int:
        """Return the address of so many bytes."""
        nbytes = -(-nbytes // self._LINE) * self._LINE
        while True:
            if self._part == len(self._parts):
                length = max(nbytes, self._least)
                self._parts.append((self._get(length), length))
            address, length = self._parts[self._part]
            if self._used + nbytes <= length:
                self._used += nbytes
                return address + self._used - nbytes
            self._part, self._used = self._part + 1, 0


class Passing:
    """A device's collectives along a mesh axis.

    Parameters
    ----------
    communicator : Communicator
        That of its group.
    moving : Moving
        What moves within its memory.
    scratch : Scratch
        Memory for what is on its way.
    parts, rank : int
        How many devices the group has, and the coordinate of this one.
    """

    def __init__(self, communicator: Communicator, moving: Moving, scratch: Scratch, parts: int, rank: int) -> None:
        self._communicator, self._moving, self._scratch = communicator, moving, scratch
        self._parts, self._rank = parts, rank

    def collective(self, name: str, source: Side, target: Side, numbers: Sequence[int]) -> None:
        """Do a collective on sides of which only the own slab is touched, the one at the device's coordinate if many.

        Raises
        ------
        InputError
            If the shapes don't fit each other, or the type isn't one that devices add.
        """
        one, other = (self._own(side) for side in (source, target))
        if not self._natively(name, one, other, tuple(numbers)):
            self._scratch.begin()
            self._by_moves(name, one, other, tuple(numbers))

    def _own(self, side: Side) -> Side:
        return side._replace(slabs=(side.slabs[self._rank if len(side.slabs) > 1 else 0],))

    def _natively(self, name: str, source: Side, target: Side, numbers: tuple[int, ...]) -> bool:
        """Have the communicator do it, if it does that, on what lies like this; all devices decide alike."""
        (here,), (there,) = source.slabs, target.slabs
        count, adds, comm = math.prod(source.shape), source.dtype in ADDED, self._communicator
        for rank in range(self._parts):
            plan(name, source.shape, target.shape, numbers, self._parts, rank)  # raises if shapes don't fit
        if name == _ALL_REDUCE and adds and count:
            comm.all_reduce(here, there, count, source.dtype)
        elif name == _REDUCE and adds and count:
            comm.reduce(here, there, count, source.dtype, numbers[0])
        elif name == _BROADCAST and count:
            comm.broadcast(here, there, source.nbytes, numbers[0])
        elif name == _REDUCE_SCATTER and adds and count and self._is_even(source.shape, numbers[0]):
            if math.prod(target.shape) * self._parts != count:
                return False
            comm.reduce_scatter(here, there, count // self._parts, source.dtype)
        elif name == _ALL_GATHER and count and self._is_even(target.shape, numbers[0]):
            if count * self._parts != math.prod(target.shape):
                return False
            comm.all_gather(here, there, source.nbytes)
        elif name == "all_gather_in_place" and count and self._is_even(target.shape, numbers[0]):
            block = target.nbytes // self._parts
            comm.all_gather(here + self._rank * block, there, block)
        else:
            return False
        return True

    def _is_even(self, shape: tuple[int, ...], dim: int) -> bool:
        """Whether blocks along a dimension are of one size, and lie one behind the other."""
        return math.prod(shape[:dim]) == 1 and shape[dim] % self._parts == 0

    def _by_moves(self, name: str, source: Side, target: Side, numbers: tuple[int, ...]) -> None:
        plans = _plans(name, source.shape, target.shape, numbers, self._parts)
        pulls, pushes = VIEWS[name]
        me, sends, receives = self._rank, list[Parcel](), list[Parcel]()
        mine: list[tuple[Move, list[int]]] = []
        for peer, move in plans:
            owners = move.source.slabs if pulls else (peer,)
            nbytes = _nbytes(move, source.dtype)
            if peer == me:
                terms = [self._packed(source, move) if owner == me else self._scratch.take(nbytes) for owner in owners]
                receives += [Parcel(owner, term, nbytes) for owner, term in zip(owners, terms) if owner != me]
                mine.append((move, terms))
            elif me in owners:
                sends.append(Parcel(peer, self._packed(source, move), nbytes))
        self._exchange(sends, receives)

        sends, receives = [], []
        unpacked: list[tuple[Move, int]] = []
        own = iter(mine)
        for peer, move in plans:
            owners = move.target.slabs if pushes else (peer,)
            nbytes = _nbytes(move, source.dtype)
            if peer == me:
                _, terms = next(own)
                if owners == (me,):
                    self._add(terms, move, target)
                    continue
                total = terms[0]
                if len(terms) > 1:
                    total = self._scratch.take(nbytes)
                    self._add(terms, replace(move, target=_whole(move.box)), _side([total], move.box, target.dtype))
                sends += [Parcel(owner, total, nbytes) for owner in owners if owner != me]
                if me in owners:
                    unpacked.append((move, total))
            elif me in owners:
                place = _place(target, move.target, move.box)
                if place is None:
                    place = self._scratch.take(nbytes)
                    unpacked.append((move, place))
                receives.append(Parcel(peer, place, nbytes))
        self._exchange(sends, receives)
        for move, total in unpacked:
            self._add([total], move, target)

    def _exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        if sends or receives:
            self._communicator.exchange(sends, receives)

    def _packed(self, side: Side, move: Move) -> int:
        """Where the box of the own slab lies contiguously."""
        place = _place(side, move.source, move.box)
        if place is None:
            place = self._scratch.take(_nbytes(move, side.dtype))
            moved = Move(move.box, replace(move.source, slabs=(0,)), _whole(move.box))
            self._moving.run([Phase((moved,))], side, _side([place], move.box, side.dtype))
        return place

    def _add(self, terms: Sequence[int], move: Move, target: Side) -> None:
        """Write the sum of boxes, each contiguous, to the box of the own slab."""
        source = replace(_whole(move.box), slabs=tuple(range(len(terms))))
        moved = Move(move.box, source, replace(move.target, slabs=(0,)))
        self._moving.run([Phase((moved,))], _side(terms, move.box, target.dtype), target)


@functools.lru_cache(maxsize=256)
def _plans(
    name: str, source: tuple[int, ...], target: tuple[int, ...], numbers: tuple[int, ...], parts: int
) -> list[tuple[int, Move]]:
    """What every device of a group does, each step with its device's coordinate."""
    return [(rank, move) for rank in range(parts) for move in plan(name, source, target, numbers, parts, rank)]


def _place(side: Side, corner: Corner, box: tuple[int, ...]) -> int | None:
    """Where a box of a slab begins, if it is contiguous.

    >>> _place(Side((1000,), (4, 6), "float32"), Corner((0,), (4, 6), (1, 0)), (2, 6))
    1024
    >>> _place(Side((1000,), (4, 6), "float32"), Corner((0,), (4, 6), (1, 1)), (2, 5))
    """
    first = next(itertools.chain(_longer(box), [len(box)]))
    if box[first + 1 :] != corner.shape[first + 1 :]:
        return None
    return side.slabs[0] + corner.start * check_dtype(side.dtype).itemsize


def _longer(box: tuple[int, ...]) -> Iterator[int]:
    return (dim for dim, extent in enumerate(box) if extent != 1)


def _whole(box: tuple[int, ...]) -> Corner:
    return Corner((0,), box, (0,) * len(box))


def _side(addresses: Sequence[int], box: tuple[int, ...], dtype: str) -> Side:
    return Side(tuple(addresses), box, dtype)


def _nbytes(move: Move, dtype: str) -> int:
    return math.prod(move.box) * check_dtype(dtype).itemsize
