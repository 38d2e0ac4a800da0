"""Collectives of devices that don't see each other's memory: in rounds, through the memory of their hosts.

`plan` says what a worker sums and where the sum goes. Here its moves are cut into pieces, and the pieces put into
rounds, each so small that what it has on the way fits into a buffer of every worker. In a round

1. each worker copies boxes of its slab into its buffer, which all workers of its host see (`fetches`);
2. what is summed on another host is summed as far as possible and sent there, once (`partials`, `first`);
3. who a move belongs to adds up what came (`sums`);
4. what another host wants is sent there, once, whoever wants it (`second`);
5. each worker copies what it is to have into its slab, from its own or another's buffer (`stores`).

So an all-reduce over hosts of several devices is one within each host, one across, and a gathering within each:
between two hosts goes what they would exchange as single devices. Sums are added in the order of the slabs; of several
hosts, those of each first, and in the type that terms are added in, from which the sum is rounded once.

>>> (each,) = rounds("broadcast", (6,), (6,), (0,), hosts=((0, 1), (2, 3)), dtype="float32", room=4096)
>>> each.fetches
(Fetch(place=Spot(worker=0, start=0, size=6, wide=False), corner=Corner(slabs=(0,), shape=(6,), at=(0,)), box=(6,)),)
>>> [(source.worker, target.worker) for source, target in each.second]
[(0, 2)]
>>> [(store.worker, store.place.worker) for store in each.stores]
[(0, 0), (1, 0), (2, 2), (3, 2)]
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tvm_axe.collective.ops import wide_type
from tvm_axe.collective.plan import VIEWS, Corner, Move, plan
from tvm_axe.errors import InputError

__all__ = ["Fetch", "Round", "Spot", "Store", "Sum", "crossing", "rounds"]

_LINE = 64  # bytes; what is in a buffer begins at a multiple


class Spot(NamedTuple):
    """Where elements are in a worker's buffer: from which byte on, how many, and whether in the type of sums."""

    worker: int
    start: int
    size: int
    wide: bool


class Fetch(NamedTuple):
    """The box at a corner of the slab of a place's worker is copied to the place."""

    place: Spot
    corner: Corner
    box: tuple[int, ...]


class Store(NamedTuple):
    """What is at a place is copied to the box at a corner of a worker's slab."""

    worker: int
    place: Spot
    corner: Corner
    box: tuple[int, ...]


class Sum(NamedTuple):
    """The worker of a place writes the sum of what is at others of its host there, in their order."""

    terms: tuple[Spot, ...]
    place: Spot


@dataclass(frozen=True)
class Round:
    """What workers do in a round, each of them its own part: by their coordinates on the axis.

    `first` and `second` are what goes from a worker's buffer to one's of another host, in order.
    """

    fetches: tuple[Fetch, ...]
    partials: tuple[Sum, ...]
    first: tuple[tuple[Spot, Spot], ...]
    sums: tuple[Sum, ...]
    second: tuple[tuple[Spot, Spot], ...]
    stores: tuple[Store, ...]

    @property
    def is_copied(self) -> bool:
        """Whether what is stored is what was fetched on the same host."""
        return not (self.sums or self.second)


@functools.lru_cache(maxsize=256)
def rounds(
    name: str,
    source: tuple[int, ...],
    target: tuple[int, ...],
    numbers: tuple[int, ...],
    hosts: tuple[tuple[int, ...], ...],
    dtype: str,
    room: int,
) -> tuple[Round, ...]:
    """Return what the workers of a group do in a collective.

    Parameters
    ----------
    name, source, target, numbers
        See `tvm_axe.collective.plan.plan`.
    hosts : tuple of tuple of int
        The workers of each host, by their coordinates on the axis; together all of them.
    dtype : str
        The type of an element.
    room : int
        Bytes that a worker's buffer has for a round.

    Raises
    ------
    InputError
        If the shapes don't fit each other, or not even single elements fit into the buffers.
    """
    parts = sum(map(len, hosts))
    moves = [(rank, move) for rank in range(parts) for move in plan(name, source, target, numbers, parts, rank)]
    most = _most(_Drawing(name, hosts, dtype, moves), room)
    if most < 1:
        raise InputError(f"{name}: an element of each of {parts} workers doesn't fit into a buffer of {room} bytes")
    cut = [[(rank, piece) for piece in _pieces(move, most)] for rank, move in moves]
    columns = itertools.zip_longest(*cut)
    return tuple(_Drawing(name, hosts, dtype, [each for each in column if each]).round() for column in columns)


def crossing(drawn: Sequence[Round], dtype: str) -> int:
    """Return the bytes that go from hosts to others in a collective's rounds, all together.

    >>> hosts = ((0, 1), (2, 3))
    >>> crossing(rounds("all_reduce", (1024,), (1024,), (), hosts=hosts, dtype="float32", room=1 << 20), "float32")
    8192
    """
    narrow, wide = np.dtype(dtype).itemsize, wide_type(np.dtype(dtype)).itemsize
    sent = [place for each in drawn for place, _ in (*each.first, *each.second)]
    return sum(place.size * (wide if place.wide else narrow) for place in sent)


class _Drawing:
    """A round of these moves, with places as they are given out.

    Parameters
    ----------
    name, hosts, dtype
        See `rounds`.
    moves : sequence of (int, Move)
        What is moved in it, with the workers who do.
    """

    def __init__(
        self, name: str, hosts: Sequence[Sequence[int]], dtype: str, moves: Sequence[tuple[int, Move]]
    ) -> None:
        self._views = VIEWS[name]
        self._hosts = hosts
        self._host = {worker: host for host, workers in enumerate(hosts) for worker in workers}
        narrow = np.dtype(dtype)
        self._bytes = narrow.itemsize, wide_type(narrow).itemsize
        self.taken = dict.fromkeys(self._host, 0)
        self.places: list[Spot] = []
        self._terms: dict[tuple[int, Corner, tuple[int, ...]], Spot] = {}
        self._copies: dict[tuple[Spot, int], Spot] = {}
        self._partials: list[Sum] = []
        self._first: list[tuple[Spot, Spot]] = []
        self._sums: list[Sum] = []
        self._second: list[tuple[Spot, Spot]] = []
        self._stores: list[Store] = []
        for worker, move in moves:
            self._move(worker, move)

    def round(self) -> Round:
        """What it comes to."""
        fetches = tuple(Fetch(place, corner, box) for (_, corner, box), place in self._terms.items())
        return Round(
            fetches,
            tuple(self._partials),
            tuple(self._first),
            tuple(self._sums),
            tuple(self._second),
            tuple(self._stores),
        )

    def _move(self, worker: int, move: Move) -> None:
        pulls, pushes = self._views
        terms = [self._term(owner, move) for owner in (move.source.slabs if pulls else (worker,))]
        value = terms[0] if len(terms) == 1 else self._summed(worker, terms)
        for owner in move.target.slabs if pushes else (worker,):
            self._stores.append(Store(owner, self._at(value, self._host[owner]), _own(move.target), move.box))

    def _term(self, owner: int, move: Move) -> Spot:
        """Where a term of a move is; one box of a slab is fetched once, whoever wants it."""
        key = owner, _own(move.source), move.box
        if key not in self._terms:
            self._terms[key] = self._place(owner, math.prod(move.box), False)
        return self._terms[key]

    def _summed(self, worker: int, terms: Sequence[Spot]) -> Spot:
        """Where the sum is, in the buffer of the worker who adds it up."""
        here, into = self._host[worker], list[Spot]()
        for host in range(len(self._hosts)):
            found = [term for term in terms if self._host[term.worker] == host]
            if host != here and found:
                sent = found[0]
                if len(found) > 1:
                    sent = self._place(self._carrier(host, worker), sent.size, True)
                    self._partials.append(Sum(tuple(found), sent))
                came = self._place(worker, sent.size, sent.wide)
                self._first.append((sent, came))
                found = [came]
            into += found
        total = self._place(worker, terms[0].size, False)
        self._sums.append(Sum(tuple(into), total))
        return total

    def _at(self, value: Spot, host: int) -> Spot:
        """Where a value is on a host."""
        if self._host[value.worker] == host:
            return value
        if (value, host) not in self._copies:
            came = self._place(self._carrier(host, value.worker), value.size, value.wide)
            self._copies[value, host] = came
            self._second.append((value, came))
        return self._copies[value, host]

    def _carrier(self, host: int, peer: int) -> int:
        """Who on a host exchanges with a worker of another: each of its workers with as many."""
        members = self._hosts[host]
        return members[peer % len(members)]

    def _place(self, worker: int, size: int, wide: bool) -> Spot:
        place = Spot(worker, self.taken[worker], size, wide)
        self.taken[worker] += -(-size * self._bytes[wide] // _LINE) * _LINE
        self.places.append(place)
        return place

    def elements(self, worker: int, room: int) -> int:
        """How many elements each place of a worker may have, if they share so many bytes evenly."""
        own = [self._bytes[place.wide] for place in self.places if place.worker == worker]
        return (room - len(own) * _LINE) // sum(own) if own else room


def _most(drawing: _Drawing, room: int) -> int:
    """The elements of a piece, for which every worker has room."""
    return min((drawing.elements(worker, room) for worker in drawing.taken), default=1)


def _own(corner: Corner) -> Corner:
    return replace(corner, slabs=(0,))


def _pieces(move: Move, most: int) -> Iterator[Move]:
    """Cut a move into pieces of at most so many elements, runs of rows."""
    box = move.box
    dim = next(dim for dim in range(len(box)) if math.prod(box[dim + 1 :]) <= most)
    rows = max(1, most // math.prod(box[dim + 1 :]))
    for outer in itertools.product(*map(range, box[:dim])):
        for start in range(0, box[dim], rows):
            shift = (*outer, start) + (0,) * (len(box) - dim - 1)
            extent = (1,) * dim + (min(rows, box[dim] - start), *box[dim + 1 :])
            corners = [
                replace(corner, at=tuple(at + by for at, by in zip(corner.at, shift)))
                for corner in (move.source, move.target)
            ]
            yield Move(extent, *corners)
