"""How a block's threads go over the points of a tile operation: unrolled steps, and where each thread stands.

A walk's steps are nested unrolled loops. `FragmentWalk` follows a fragment, so that each thread meets the elements in
its own registers; `StridedWalk`, of points that no fragment fixes, takes them row-major, `vector` neighbours a thread,
all the threads side by side. Both know at compile time, as numpy arrays, which point every thread meets at every step,
by which other fragments' registers are found (`find_registers`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.errors import TileError
from tvm_axe.tile.targets.cuda.fragments.layout import Digit, FragmentLayout, enumerate_digits, fit, linear, refined


class Walk:
    """What the two kinds share.

    Attributes
    ----------
    extents : tuple of int
        How many points there are, a dimension each.
    threads : int
        How many threads walk.
    vector : int
        How many neighbouring points of the last dimension a step takes; the step's point is the first.
    digits : list of Digit
        The steps.
    points : list of array
        For every dimension, of shape (threads, steps): the coordinate of the point that a thread meets at a step.
    inside : array
        Of shape (threads, steps): whether there is a point.
    """

    extents: tuple[int, ...]
    threads: int
    vector: int
    digits: list[Digit]
    points: list[np.ndarray]
    inside: np.ndarray

    @contextlib.contextmanager
    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[list[tirx.Expr]]:
        """Open the unrolled loops, or some of them in order; yields a step's coordinates."""
        with contextlib.ExitStack() as loops:
            yield [loops.enter_context(T.unroll(digit.extent)) for digit in self.digits[start:stop]]

    def index(self, thread: tirx.Expr, steps: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """The point that a thread meets at a step."""
        raise NotImplementedError

    def conditions(self, thread: tirx.Expr, steps: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """What holds where there is a point; empty if there always is one."""
        raise NotImplementedError

    def first_copy(self, thread: tirx.Expr) -> list[tirx.Expr]:
        """What holds in one thread of those that meet the same point; empty if one does."""
        raise NotImplementedError


class FragmentWalk(Walk):
    """Over a box of a fragment, each thread over the elements that it holds.

    Parameters
    ----------
    fragment : FragmentLayout
        The layout of the fragment.
    start, extents : sequence of int
        The box, a dimension of the fragment each.
    vector : int
        How many registers a step takes, which must be neighbours in the last dimension that has an extent.
    """

    def __init__(self, fragment: FragmentLayout, start: Sequence[int], extents: Sequence[int], vector: int = 1) -> None:
        self.fragment, self.start, self.extents = fragment, tuple(start), tuple(extents)
        self.threads, self.vector = fragment.threads, vector
        digits = list(fragment.register_digits)
        if vector > 1:
            digits[-1] = digits[-1].split(vector)[0]
        self.digits = refined(digits)
        held = fragment.table[:, enumerate_digits(self.digits)]
        elements = np.unravel_index(held, fragment.shape)
        self.points = [axis - low for axis, low in zip(elements, self.start)]
        outside = [(p < 0) | (p >= extent) for p, extent in zip(self.points, self.extents)]
        self._cut = [bool(out.any()) for out in outside]
        self.inside = ~np.logical_or.reduce(outside)

    def index(self, thread: tirx.Expr, steps: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        index = self.fragment.start(thread)
        for step, digit in zip(steps, self.digits):
            index[digit.dimension] = index[digit.dimension] + step * digit.weight
        return [position - low if low else position for position, low in zip(index, self.start)]

    def conditions(self, thread: tirx.Expr, steps: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        index = self.index(thread, steps)
        found = []
        for position, low, extent, is_cut in zip(index, self.start, self.extents, self._cut):
            found += [position >= 0] if is_cut and low else []
            found += [position < extent] if is_cut else []
        return found

    def first_copy(self, thread: tirx.Expr) -> list[tirx.Expr]:
        condition = self.fragment.is_first_copy(thread)
        return [] if condition is None else [condition]

    def register(self, steps: Sequence[tirx.Expr]) -> tirx.Expr:
        """The first register of a step."""
        return sum((step * digit.stride for step, digit in zip(steps, self.digits)), tirx.const(0, "int32"))


class StridedWalk(Walk):
    """Over all points of `extents`, row-major, `vector` neighbours of the last dimension a thread at a time.

    With `lanes`, steps go over these neighbours too.
    """

    def __init__(self, extents: Sequence[int], threads: int, vector: int = 1, lanes: bool = False) -> None:
        self.extents, self.threads, self.vector = tuple(extents), threads, vector
        self._pieces = (*self.extents[:-1], self.extents[-1] // vector)
        total = math.prod(self._pieces)
        count = -(-total // threads)
        self._lanes = refined([Digit(vector, 1, len(extents) - 1, 1)]) if lanes else []
        self.digits = [Digit(count, 1, 0, 1), *self._lanes]
        piece = np.arange(threads)[:, None] + threads * np.arange(count)[None, :]
        lane = enumerate_digits(self._lanes)
        self.inside = np.repeat(piece < total, len(lane), axis=1)
        points = np.unravel_index(np.minimum(piece, total - 1), self._pieces)
        self.points = [np.repeat(axis, len(lane), axis=1) for axis in points]
        self.points[-1] = self.points[-1] * vector + np.tile(lane, count)

    def _piece(self, thread: tirx.Expr, steps: Sequence[tirx.Expr]) -> tirx.Expr:
        return steps[0] * self.threads + thread

    def index(self, thread: tirx.Expr, steps: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        rest = self._piece(thread, steps)
        index: list[tirx.Expr] = []
        for extent in reversed(self._pieces[1:]):
            index.insert(0, rest % extent if extent > 1 else tirx.const(0, "int32"))
            rest = rest // extent if extent > 1 else rest
        index.insert(0, rest)
        lane = sum(step * digit.weight for step, digit in zip(steps[1:], self._lanes))
        return [*index[:-1], index[-1] * self.vector + lane]

    def conditions(self, thread: tirx.Expr, steps: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        return [] if self.inside.all() else [self._piece(thread, steps) < math.prod(self._pieces)]

    def first_copy(self, thread: tirx.Expr) -> list[tirx.Expr]:
        return []


def find_registers(walk: Walk, fragment: FragmentLayout, index: Sequence[np.ndarray]) -> tuple[int, list[int]] | None:
    """Where each thread has, in its own registers, the elements that it needs at the steps of a walk.

    Parameters
    ----------
    walk : Walk
        The walk.
    fragment : FragmentLayout
        The layout of the tile whose elements are needed.
    index : sequence of array
        The element needed: for each dimension of the tile, an array of shape (threads, steps).

    Returns
    -------
    tuple or None
        The register as ``base + sum of coefficient * step``; None if some thread doesn't have what it needs, or not in
        the register in which the others have theirs.

    Raises
    ------
    TileError
        An element outside of the tile.
    """
    inside = walk.inside
    parts = [np.broadcast_to(part, inside.shape) for part in index]
    for dimension, (part, extent) in enumerate(zip(parts, fragment.shape)):
        if ((part < 0) | (part >= extent))[inside].any():
            raise TileError(
                f"dimension {dimension} of a fragment of shape {fragment.shape} is indexed from {part[inside].min()} "
                f"to {part[inside].max()}; valid is 0 to {extent - 1}"
            )
    wanted = np.where(inside, linear(parts, fragment.shape), 0)
    register_of = np.empty(fragment.table.max() + 1, np.int64)
    register_of[fragment.table] = np.arange(fragment.registers)
    register = register_of[wanted]
    has = np.take_along_axis(fragment.table, register, axis=1) == wanted
    if not (has | ~inside).all():
        return None
    lowest = np.where(inside, register, np.iinfo(np.int64).max).min(axis=0)
    highest = np.where(inside, register, -1).max(axis=0)
    needed = highest >= 0
    if (lowest != highest)[needed].any():
        return None
    return fit(np.where(needed, highest, -1), [digit.extent for digit in walk.digits])


def covers(walk: Walk, fragment: FragmentLayout, index: Sequence[np.ndarray]) -> bool:
    """Whether every thread that holds a copy of an element of `index` meets it: then all copies are written."""
    wanted = np.broadcast_to(linear(index, fragment.shape), walk.inside.shape)
    written = np.zeros(fragment.table.max() + 1, bool)
    written[wanted[walk.inside]] = True
    thread = np.broadcast_to(np.arange(walk.threads)[:, None], wanted.shape)
    met = np.unique((thread * len(written) + wanted)[walk.inside])
    return int(written[fragment.table].sum()) == len(met)


def vector_lengths(bits: int) -> Iterator[int]:
    """How many elements of `bits` one access may take, the most (16 bytes) first."""
    length: Any = 128 // bits
    while length:
        yield length
        length //= 2
