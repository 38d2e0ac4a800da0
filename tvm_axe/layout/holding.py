"""Holdings: which elements of a tensor each device of a mesh holds, and where in its memory, for any layout.

A layout's domain is the tensor's shape, each dimension padded to what its iters multiply to. So an index is a number
for each iter, a digit; a digit on a mesh axis says which device, one on linear memory where on it. Read backwards, a
device's coordinates are the digits of what it holds. This is the form in which all that a mesh can hold is alike:
blocks, cyclic blocks, several axes on one dimension that they don't divide, another order of devices or of memory,
replicas over a part of an axis, a tensor on one device, and terms of a sum.

>>> from tvm_axe.layout import Layout, Mesh
>>> cyclic = Holding.of(Layout.parse("S[(3, 2, 2) : (2, 1@x, 1)]"), (11,), Mesh({"x": 2}))
>>> for device in range(2):
...     print(cyclic.held(device).elements.tolist(), "at", cyclic.held(device).addresses.tolist())
[0, 1, 4, 5, 8, 9] at [0, 1, 2, 3, 4, 5]
[2, 3, 6, 7, 10] at [0, 1, 2, 3, 4]

Source: Axe (arXiv:2601.19092), sections 2.2 and 3.2; the digits are those of its appendix B, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.fitting import Digit, Digits, digits_of, fit
from tvm_axe.layout.iters import Iter
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.shapes import check_shape
from tvm_axe.layout.sharding import Cuts, block_iters, block_shape
from tvm_axe.layout.symbolic import Number

__all__ = ["Held", "Holding", "Terms", "received", "terms_between"]


class Held(NamedTuple):
    """What one device holds: elements, by their row-major number in the tensor, and the addresses they lie at."""

    elements: NDArray[np.int64]
    addresses: NDArray[np.int64]


@dataclass(frozen=True)
class Holding:
    """A layout of a tensor on a mesh, in digits.

    `Holding.of` makes one. What it computes with may be ints, arrays of them, or expressions of the compiler.

    Attributes
    ----------
    layout : Layout
        The layout.
    shape : tuple[int, ...]
        The tensor's shape, without padding and without terms of sums.
    mesh : Mesh
        The devices.
    dims : tuple[Digits, ...]
        The digits of each dimension, the major one first.
    terms : tuple[Iter, ...]
        The leading iters, which number the terms of a sum.
    """

    layout: Layout
    shape: tuple[int, ...]
    mesh: Mesh
    dims: tuple[Digits, ...]
    terms: tuple[Iter, ...]

    @staticmethod
    def of(layout: Layout, shape: Sequence[int], mesh: Mesh, sums: bool = True) -> Holding:
        """Return what `layout` gives a tensor of `shape` on `mesh`.

        Parameters
        ----------
        layout : Layout
            Iters on mesh axes and on linear memory. Their extents multiply, dimension by dimension, to the shape, or to
            the least that its blocks come to. Leading iters on mesh axes beyond that number the terms of a sum; what
            may be read either way is a sum if else several axes would cut a dimension unevenly.
        shape : Sequence[int]
            The tensor's shape.
        mesh : Mesh
            The devices.
        sums : bool
            Whether there may be terms of a sum.

        Raises
        ------
        LayoutError
            If the layout names an axis that the mesh lacks or that is neither a mesh axis nor linear memory, reaches
            beyond the mesh, stores an element twice on a device or two at one address, or doesn't fit the shape in
            exactly one way.
        """
        shape = check_shape(shape)
        return Holding(layout, shape, mesh, *fit(layout, shape, mesh, sums))

    @staticmethod
    def in_blocks(
        shape: Sequence[int],
        mesh: Mesh,
        cuts: Cuts,
        memory: Layout | None = None,
        partial: Collection[str] = (),
        root: tuple[str, int] | None = None,
    ) -> Holding:
        """Return the holding in which mesh axes cut each dimension into blocks.

        It says what the layout alone may leave open: which dimension an axis cuts, where one of them has extent 1.

        Parameters
        ----------
        shape : Sequence[int]
            The tensor's shape.
        mesh : Mesh
            The devices.
        cuts : tuple[tuple[str, ...], ...]
            The mesh axes that cut each dimension, the major one first, as `Placement.cuts`.
        memory : Layout, optional
            Where a block's elements lie on its device; row-major where it is left out.
        partial : Collection[str]
            The mesh axes whose devices hold terms of a sum, as `Placement.partial`.
        root : tuple[str, int], optional
            A mesh axis, and the coordinate on it of the devices that alone hold the tensor.
        """
        shape = check_shape(shape)
        shard, copies = block_iters(shape, mesh, cuts, [axis for axis in mesh.names if axis in partial])
        on_mesh = {it.axis: it for it in shard if it.axis != LINEAR_MEMORY}
        row_major = Layout([it for it in shard if it.axis == LINEAR_MEMORY]), [*range(len(shape) + 1)]
        lying, seps = row_major if memory is None else memory.group(block_shape(shape, mesh, cuts))
        dims = tuple(
            digits_of([*(on_mesh[axis] for axis in cut if axis in on_mesh), *lying.D[start:stop]])
            for cut, (start, stop) in zip(cuts, pairwise(seps))
        )
        terms = tuple(it for it in shard if it.axis in partial)
        offset = dict(lying.O)
        if root is not None:
            copies, offset[root[0]] = tuple(it for it in copies if it.axis != root[0]), root[1]
        layout = Layout([*terms, *(digit.it for digits in dims for digit in digits)], copies, offset)
        return Holding(layout, shape, mesh, dims, terms)

    @cached_property
    def size(self) -> int:
        """Elements of each device's memory, from address 0 to the last one that the layout reaches."""
        return int(self.layout.bounds(LINEAR_MEMORY)[1]) + 1

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The elements that a device holds of each dimension, padding included."""
        return tuple(
            math.prod(int(digit.it.extent) for digit in digits if digit.it.axis == LINEAR_MEMORY)
            for digits in self.dims
        )

    @cached_property
    def is_row_major(self) -> bool:
        """Whether a device's memory is an array of the shape `local`, row-major."""
        stride = 1
        for digits in reversed(self.dims):
            for digit in reversed(digits):
                if digit.it.axis == LINEAR_MEMORY and int(digit.it.extent) > 1:
                    if int(digit.it.stride) != stride:
                        return False
                    stride *= int(digit.it.extent)
        return not self.layout.O[LINEAR_MEMORY]

    @property
    def slab(self) -> tuple[int, ...]:
        """The shape of a device's memory: `local` if it lies row-major, else one dimension."""
        return self.local if self.is_row_major else (self.size,)

    @cached_property
    def memory(self) -> Layout:
        """Where the elements of the array `local` lie on their device."""
        digits = [digit for digits in self.dims for digit in digits if digit.it.axis == LINEAR_MEMORY]
        iters = [digit.it for digit in digits if int(digit.it.extent) > 1]
        return Layout(iters, (), {LINEAR_MEMORY: self.layout.O[LINEAR_MEMORY]})

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which devices hold different elements, or some of them none."""
        return tuple(
            axis
            for axis, size in self.mesh.axes.items()
            if size > 1 and math.prod(int(it.extent) for it in self.layout.R if it.axis == axis) != size
        )

    def digits(self, coords: Mapping[str, Any]) -> dict[Iter, Any]:
        """Return the number of each iter on a mesh axis, by the iter, for the device at `coords`.

        They are in range also where the device holds nothing.
        """
        return {run.it: run.number(coords[run.it.axis]) for runs in self._runs.values() for run in runs}

    def conditions(self, coords: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """Return pairs: the device at `coords` holds elements if those of each are equal. None if all devices do."""
        own = self.digits(coords)
        return [
            (self._coordinate(axis, own), coords[axis])
            for axis, size in self.mesh.axes.items()
            if math.prod(int(run.it.extent) for run in self._runs[axis])
            != size  # distinct points: no more than devices
        ]

    def device(self, index: Sequence[Any], reader: Mapping[str, Any], term: Mapping[Iter, Any]) -> dict[str, Any]:
        """Return the coordinates of the device that holds the element at `index`, of several the one like `reader`.

        Parameters
        ----------
        index : Sequence
            An index in the tensor.
        reader : Mapping[str, Any]
            Coordinates; where there are copies, the device that holds what the reader itself would.
        term : Mapping[Iter, Any]
            The numbers of the terms of a sum, and of the digits that are known besides.
        """
        own = self.digits(reader)
        numbers = {it: own[it] for it in self.layout.R}
        for digits, at in zip(self.dims, index):
            numbers.update({digit.it: _number(digit, digits, at) for digit in digits if digit.it.axis in self.mesh})
        numbers.update(term)
        return {axis: self._coordinate(axis, numbers) for axis in self.mesh.names}

    def address(self, index: Sequence[Any]) -> Any:
        """Return where on its device the element at `index` lies."""
        at: Any = int(self.layout.O[LINEAR_MEMORY])
        for digits, position in zip(self.dims, index):
            for digit in digits:
                if digit.it.axis == LINEAR_MEMORY:
                    at = at + _number(digit, digits, position) * int(digit.it.stride)
        return at

    def number(self, digit: Digit, index: Sequence[Any]) -> Any:
        """Return one digit of the element at `index`."""
        dim = next(dim for dim, digits in enumerate(self.dims) if digit in digits)
        return _number(digit, self.dims[dim], index[dim])

    def indices(self, device: int) -> list[NDArray[np.int64]] | None:
        """Return the indices of what `device` holds, dimension by dimension, or None if it holds nothing by intent.

        It holds the elements at all their combinations. Padding is left out, so that there may be none.
        """
        coords = self.mesh.coords(device)
        if any(at != own for at, own in self.conditions(coords)):
            return None
        own = self.digits(coords)
        found: list[NDArray[np.int64]] = []
        for digits, extent in zip(self.dims, self.shape):
            at = np.zeros(1, np.int64)
            for digit in digits:
                steps = np.arange(int(digit.it.extent)) if digit.it.axis == LINEAR_MEMORY else np.array([own[digit.it]])
                at = (at[:, None] + steps * digit.radix).ravel()
            found.append(at[at < extent])
        return found

    def held(self, device: int) -> Held:
        """Return what `device` holds, by increasing digits."""
        indices = self.indices(device)
        if indices is None:
            return Held(np.empty(0, np.int64), np.empty(0, np.int64))
        grid = [np.asarray(at) for at in np.meshgrid(*indices, indexing="ij", sparse=True)]
        counts = tuple(len(at) for at in indices)
        flat = np.zeros(counts, np.int64)
        for at, extent in zip(grid, self.shape):
            flat = flat * extent + at
        return Held(flat.ravel(), np.broadcast_to(np.asarray(self.address(grid), np.int64), counts).ravel())

    def term(self, device: int) -> tuple[int, ...]:
        """Return which term of the sum `device` holds: a number for each of `terms`."""
        own = self.digits(self.mesh.coords(device))
        return tuple(int(own[it]) for it in self.terms)

    @cached_property
    def _runs(self) -> dict[str, tuple[_Run, ...]]:
        """The iters on each mesh axis, read as the digits of its coordinate."""
        iters = [*self.terms, *(digit.it for digits in self.dims for digit in digits), *self.layout.R]
        return {
            axis: _runs_of([it for it in iters if it.axis == axis], self.layout.O[axis]) for axis in self.mesh.names
        }

    def _coordinate(self, axis: str, numbers: Mapping[Iter, Any]) -> Any:
        at: Any = int(self.layout.O[axis])
        for run in self._runs[axis]:
            at = at + numbers[run.it] * int(run.it.stride)
        return at


class _Run(NamedTuple):
    """An iter on a mesh axis: its number is ``(coordinate - first) // step % extent``, backwards if `falls`."""

    it: Iter
    first: int
    step: int
    falls: bool

    def number(self, coordinate: Any) -> Any:
        number = (coordinate - self.first) // self.step % int(self.it.extent)
        return int(self.it.extent) - 1 - number if self.falls else number


def _runs_of(iters: Sequence[Iter], offset: Number) -> tuple[_Run, ...]:
    first = int(offset) + sum((int(it.extent) - 1) * int(it.stride) for it in iters if int(it.stride) < 0)
    return tuple(_Run(it, first, abs(int(it.stride)), int(it.stride) < 0) for it in iters)


def _number(digit: Digit, digits: Digits, index: Any) -> Any:
    """Return a digit of an index; the major one of a dimension needs no remainder."""
    above = index // digit.radix if digit.radix > 1 else index
    return above if digit is digits[0] else above % int(digit.it.extent)


class Terms(NamedTuple):
    """What becomes of the terms of a sum between two layouts.

    Attributes
    ----------
    stay : tuple[Iter, ...]
        Those that both have.
    summed : tuple[Iter, ...]
        Those of the source alone.
    made : dict[Iter, Digit or None]
        Those of the target alone: an element becomes the term whose number is this digit of it, as the device that
        holds it then keeps it; or, where that is None, the first term.
    """

    stay: tuple[Iter, ...]
    summed: tuple[Iter, ...]
    made: dict[Iter, Digit | None]


def terms_between(source: Holding, target: Holding) -> Terms:
    """Return what becomes of the terms of a sum."""

    def alike(it: Iter) -> bool:
        return source.layout.O[it.axis] == target.layout.O[it.axis]

    stay = tuple(it for it in source.terms if it in target.terms and alike(it))
    cutting = {digit.it: digit for digits in source.dims for digit in digits if alike(digit.it)}
    made = {it: cutting.get(it) for it in target.terms if it not in stay}
    return Terms(stay, tuple(it for it in source.terms if it not in stay), made)


def received(source: Holding, target: Holding, device: int) -> int:
    """Return how many elements `device` needs of others for what it holds as `target` says, given `source`.

    Every element comes from a device that holds it, the device itself if it does, and a sum takes all of its terms
    (`terms_between`).
    """
    indices = target.indices(device)
    if indices is None:
        return 0
    coords = target.mesh.coords(device)
    own, wanted = source.digits(coords), target.digits(coords)
    terms = terms_between(source, target)
    if any(digit is None and wanted[it] for it, digit in terms.made.items()):
        return 0
    here = all(at == coordinate for at, coordinate in source.conditions(coords))
    needed, held = 1, int(here and all(own[it] == wanted[it] for it in terms.stay))
    for digits, at in zip(source.dims, indices):
        numbers = {digit: _number(digit, digits, at) for digit in digits if digit.it.axis in source.mesh}
        becomes = [number == wanted[digit.it] for digit, number in numbers.items() if digit in terms.made.values()]
        matches = [number == own[digit.it] for digit, number in numbers.items()]
        needed *= _count(len(at), becomes)
        held *= _count(len(at), [*becomes, *matches])
    return math.prod(int(it.extent) for it in terms.summed) * needed - held


def _count(among: int, conditions: Sequence[NDArray[np.bool_]]) -> int:
    """Return how many of the indices of a dimension meet all conditions."""
    return int(np.logical_and.reduce(conditions).sum()) if conditions else among
