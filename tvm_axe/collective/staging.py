"""A worker's part of collectives through the memory of its host: copies beside the device's work, and sums on the host.

What is done is data (`rounds`). Each worker has a buffer that all workers of its host map, of two halves: while what
one round has brought goes to the device, what the next needs comes from it into the other half. A worker meets the
others of its host when it has fetched, and again if there is something to be summed or to come from other hosts. It
doesn't arrive before what it stores of the round before has left the buffers; so a half is free again once the round
behind it has been met for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import numpy as np
import tvm_ffi

from tvm_axe import _tvm
from tvm_axe.collective import ops
from tvm_axe.collective.plan import VIEWS, Corner
from tvm_axe.collective.rounds import Round, Spot, Sum, rounds
from tvm_axe.layout import Mesh

__all__ = ["BUFFER", "Copies", "HostCopies", "Staging", "neighbours_within"]

BUFFER = 16 << 20
"""Bytes of each worker's buffer: halves of two or three pieces, each long enough for a bus to reach its rate."""

Parcel = tuple[int, np.ndarray]


class Copies(ABC):
    """How a device copies boxes of its slabs to memory of the host, and back, beside what it is doing."""

    @abstractmethod
    def begin(self) -> None:
        """Have the copies from now on come behind what the device has been told."""

    @abstractmethod
    def fetch(self, slab: tvm_ffi.Tensor, corner: Corner, box: tuple[int, ...], array: np.ndarray) -> None:
        """Copy the box at a corner of the slab that begins where a tensor does to a dense array."""

    @abstractmethod
    def fetched(self) -> None:
        """Return when all that was fetched is there."""

    @abstractmethod
    def store(self, slab: tvm_ffi.Tensor, corner: Corner, box: tuple[int, ...], array: np.ndarray) -> None:
        """Copy a dense array to the box at a corner of the slab that begins where a tensor does."""

    @abstractmethod
    def stored(self) -> None:
        """Return when all that was stored is there, for what the device is told from now on."""

    def close(self) -> None:  # noqa: B027
        """Give back what it has."""


class HostCopies(Copies):
    """Copies of slabs that are in the host's memory, made at once."""

    def begin(self) -> None:
        """Nothing was told that isn't done."""

    def fetch(self, slab: tvm_ffi.Tensor, corner: Corner, box: tuple[int, ...], array: np.ndarray) -> None:
        array[...] = self._box(slab, corner, box)

    def fetched(self) -> None:
        """Nothing is left to wait for."""

    def store(self, slab: tvm_ffi.Tensor, corner: Corner, box: tuple[int, ...], array: np.ndarray) -> None:
        self._box(slab, corner, box)[...] = array

    def stored(self) -> None:
        """Nothing is left to wait for."""

    @staticmethod
    def _box(slab: tvm_ffi.Tensor, corner: Corner, box: tuple[int, ...]) -> np.ndarray:
        found = _tvm.as_array(slab)
        own = found[np.newaxis] if found.size == math.prod(corner.shape) else found[:1]  # of a view: all are the own
        return ops.boxes(own, dataclasses.replace(corner, slabs=(0,)), box)[0]


class Staging:
    """A worker's side of the collectives along axes whose devices don't see each other's memory.

    Parameters
    ----------
    copies : Copies
        What copies to and from its device.
    buffers : numpy.ndarray
        The buffers of all workers, (workers, 2, bytes of a half); of another host's nothing is there.
    mesh : Mesh
        The devices.
    rank : int
        Its number.
    hosts : sequence of collection of int
        The workers of each host.
    meet : callable
        Returns when all the workers of the host have called it.
    exchange : callable, optional
        Sends arrays to workers of other hosts and receives arrays from them; with one host nobody calls it.
    """

    def __init__(
        self,
        copies: Copies,
        buffers: np.ndarray,
        mesh: Mesh,
        rank: int,
        hosts: Sequence[Collection[int]],
        meet: Callable[[], None],
        exchange: Callable[[Sequence[Parcel], Sequence[Parcel]], None] | None = None,
    ) -> None:
        self._copies, self._buffers, self._mesh, self._rank = copies, buffers, mesh, rank
        self._hosts, self._meet, self._exchange = hosts, meet, exchange
        self._half = 0

    def collective(
        self, name: str, source: tvm_ffi.Tensor, target: tvm_ffi.Tensor, numbers: Sequence[int], axis: str
    ) -> None:
        """Do the worker's part of a collective along an axis, on views or slabs as `plan.VIEWS` says.

        Of views of the group only the own slab is looked at.

        Raises
        ------
        InputError
            If the shapes don't fit each other.
        """
        group = self._mesh.group(self._rank, axis)
        slabs = [tuple(tensor.shape)[is_view:] for tensor, is_view in zip((source, target), VIEWS[name])]
        hosts = neighbours_within(group, self._hosts)
        dtype = np.dtype(str(source.dtype))
        told = tuple(int(number) for number in numbers)
        drawn = rounds(name, *slabs, told, hosts, dtype.name, self._buffers.shape[2])
        try:
            self._run(drawn, source, target, group, dtype)
        except BaseException:
            self._copies.fetched()  # or they come into what is used next
            raise
        finally:
            self._copies.stored()

    def settle(self) -> None:
        """Begin anew, after a command that failed."""
        self._half = 0

    def close(self) -> None:
        """Give back what it has."""
        self._copies.close()

    def _run(
        self,
        drawn: Sequence[Round],
        source: tvm_ffi.Tensor,
        target: tvm_ffi.Tensor,
        group: Sequence[int],
        dtype: np.dtype,
    ) -> None:
        me = group.index(self._rank)
        self._copies.begin()
        if drawn:
            self._fetch(drawn[0], source, group, me, dtype)
        for at, each in enumerate(drawn):
            here = functools.partial(self._array, group, dtype, self._half)
            self._copies.fetched()
            self._copies.stored()
            self._meet()
            self._half = 1 - self._half
            if at + 1 < len(drawn):
                self._fetch(drawn[at + 1], source, group, me, dtype)
            if not each.is_copied:
                self._add(each.partials, me, here)
                self._ship(each.first, group, me, here)
                self._add(each.sums, me, here)
                self._ship(each.second, group, me, here)
                self._meet()
            for store in each.stores:
                if store.worker == me:
                    self._copies.store(target, store.corner, store.box, here(store.place).reshape(store.box))

    def _fetch(self, each: Round, source: tvm_ffi.Tensor, group: Sequence[int], me: int, dtype: np.dtype) -> None:
        for place, corner, box in each.fetches:
            if place.worker == me:
                array = self._array(group, dtype, self._half, place)
                self._copies.fetch(source, corner, box, array.reshape(box))

    def _add(self, sums: Sequence[Sum], me: int, here: Callable[[Spot], np.ndarray]) -> None:
        for terms, place in sums:
            if place.worker == me:
                found = [here(term) for term in terms]
                out = here(place)
                if all(term.dtype == out.dtype for term in found):
                    out[...] = ops.summed(found)
                else:
                    wide = ops.wide_type(out.dtype)
                    out[...] = ops.summed([term.astype(wide) for term in found]).astype(out.dtype)

    def _ship(
        self,
        shipments: Sequence[tuple[Spot, Spot]],
        group: Sequence[int],
        me: int,
        here: Callable[[Spot], np.ndarray],
    ) -> None:
        sends = [(group[came.worker], here(sent)) for sent, came in shipments if sent.worker == me]
        receives = [(group[sent.worker], here(came)) for sent, came in shipments if came.worker == me]
        if sends or receives:
            assert self._exchange is not None  # there are other hosts
            self._exchange(sends, receives)

    def _array(self, group: Sequence[int], dtype: np.dtype, half: int, place: Spot) -> np.ndarray:
        kind = ops.wide_type(dtype) if place.wide else dtype
        nbytes = place.size * kind.itemsize
        return self._buffers[group[place.worker], half, place.start : place.start + nbytes].view(kind)


def neighbours_within(group: Sequence[int], parts: Sequence[Collection[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the places in a group of those of its members that are in one part, for each part that has any.

    >>> neighbours_within((1, 3, 5), [(0, 1, 2, 3), (4, 5)])
    ((0, 1), (2,))
    """
    found = [tuple(place for place, member in enumerate(group) if member in part) for part in parts]
    return tuple(each for each in found if each)
