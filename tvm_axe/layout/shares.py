"""Shares: how one mesh axis deals out the indices of a dimension, part by part, whether or not it divides them.

A dimension of a packed tensor is several sequences of blocks, one behind the other; heads of keys may be fewer than
the devices, which then hold the same ones; and blocks need not divide. So a share is a sequence of *runs*. In a run a
device holds ``size`` neighbouring values of one digit, from its own start on, and all values of the digits around it:

>>> blocks = Share.blocks(8, 2)
>>> packed = Share.joined([blocks, Share.blocks(4, 2)])
>>> print(packed, packed.indices(1).tolist())
4@0 4@1 | 2@0 2@1 [4, 5, 6, 7, 10, 11]
>>> print(Share.blocks(2, 4))
1@0+1 1@2+3
>>> print(Share.blocks(8, 3), [Share.blocks(8, 3).indices(device).tolist() for device in range(3)])
3@0 3@1 3@2 [[0, 1, 2], [2, 3, 4], [5, 6, 7]]

All devices hold equally many indices. Where these don't divide, shares overlap: what two devices hold both compute, so
that there is no padding that a function would have to be kept from, and indices stay in range. Where each index must
count once, as a term of a sum does, it is its *owner's*, the first device that holds it.

Where runs divide, a share is a `Layout` (`Share.iters`); `Layout` alone has no overlaps, and no two sequences of blocks
of different lengths in one dimension.

Of a dimension whose extent calls decide a share is blocks, too, by one rule for every extent n: ceil(n / devices)
indices from ``min(device * ceil(n / devices), n - ceil(n / devices))`` on. It has the numbers of a typical extent, by
which costs are compared, and says what it is at another:

>>> rows = Share.of_any(128, 2)
>>> print(rows, rows.at(5), rows.at(5).indices(1).tolist(), rows == Share.blocks(128, 2))
1/2@0 1/2@1 1/2@0 1/2@1 [2, 3, 4] False
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.iters import Iter, make_iter

__all__ = ["Run", "Share", "spans_of"]


@dataclass(frozen=True)
class Run:
    """Neighbouring indices, ``outer * extent * inner`` of them, of whose middle digit each device holds a few values.

    Attributes
    ----------
    outer, extent, inner : int
        How many values each digit has, the major one first.
    starts : tuple[int, ...]
        The first value of the middle digit that each device holds.
    size : int
        How many it holds.
    symbolic : bool
        Whether these are the numbers of a typical extent, of one that calls decide; then it is all of a share.
    """

    outer: int
    extent: int
    inner: int
    starts: tuple[int, ...]
    size: int
    symbolic: bool = False

    @property
    def length(self) -> int:
        """How many indices there are."""
        return self.outer * self.extent * self.inner

    @property
    def local(self) -> int:
        """How many a device holds."""
        return self.outer * self.size * self.inner

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of them."""
        return self.size == self.extent and not self.symbolic

    def owned(self) -> tuple[int, ...]:
        """Return for each device how many of the values that it holds, from its start on, are another's."""
        found, stop = [], 0
        for start in self.starts:  # which ascend; of what is whole all but the first device have nothing
            found.append(min(self.size, max(0, stop - start)))
            stop = max(stop, start + self.size)
        return tuple(found)

    def around(self, outer: int, inner: int) -> Run:
        """Return the run with more digits before and behind."""
        return Run(self.outer * outer, self.extent, self.inner * inner, self.starts, self.size)

    def canonical(self) -> Run:
        """Return the equal run with as much as there can be in the inner digit; a whole one has one digit alone."""
        if self.symbolic:
            return self
        if self.is_whole:
            return Run(1, self.length, 1, (0,) * len(self.starts), self.length)
        unit = math.gcd(self.extent, self.size, *self.starts)
        starts = tuple(start // unit for start in self.starts)
        return Run(self.outer, self.extent // unit, self.inner * unit, starts, self.size // unit)


@dataclass(frozen=True)
class Share:
    """What each device along a mesh axis holds of a dimension. Equal shares are equal objects.

    Attributes
    ----------
    runs : tuple[Run, ...]
        One behind the other.
    """

    runs: tuple[Run, ...]

    @staticmethod
    @lru_cache(maxsize=4096)
    def whole(extent: int, devices: int) -> Share:
        """Return the share by which every device holds everything."""
        return Share.of([Run(1, extent, 1, (0,) * devices, extent)])

    @staticmethod
    def blocks(extent: int, devices: int) -> Share:
        """Return the share in blocks of ceil(extent / devices), which overlap a little each where it doesn't divide.

        Each begins at floor(device * extent / devices): near to where blocks of a finer digit begin, so that little has
        to move between the two, and no device's block is all another's if there are enough indices. More devices than
        indices hold each index in groups, as far as the indices divide the devices.
        """
        size = -(-extent // devices)
        starts = [device * extent // devices for device in range(devices)]
        return Share.of([Run(1, extent, 1, tuple(starts), size)])

    @staticmethod
    def of_any(typical: int, devices: int) -> Share:
        """Return the share in blocks of a dimension of any extent, which typically is `typical`."""
        size = -(-typical // devices)
        starts = tuple(min(device * size, typical - size) for device in range(devices))
        return Share((Run(1, typical, 1, starts, size, devices > 1),))

    def at(self, extent: int) -> Share:
        """Return what a share of any extent is at one; another share is what it is."""
        return Share.of_any(extent, self.devices) if self.is_symbolic else self

    @staticmethod
    def of(runs: Sequence[Run]) -> Share:
        """Return the share of these runs: equal neighbours are one."""
        found: list[Run] = []
        for run in (run.canonical() for run in runs if run.length):
            last = found[-1] if found else None
            if last is not None and last.is_whole and run.is_whole:
                found[-1] = Run(1, last.length + run.length, 1, run.starts, last.length + run.length)
            elif last is not None and (last.extent, last.inner, last.starts, last.size) == (
                run.extent, run.inner, run.starts, run.size,
            ):  # fmt: skip
                found[-1] = Run(last.outer + run.outer, run.extent, run.inner, run.starts, run.size)
            else:
                found.append(run)
        return Share(tuple(found))

    @staticmethod
    def joined(shares: Sequence[Share]) -> Share:
        """Return the share of dimensions that are put one behind the other."""
        return Share.of([run for share in shares for run in share.runs])

    @property
    def devices(self) -> int:
        """How many devices the axis has."""
        return len(self.runs[0].starts)

    @property
    def is_symbolic(self) -> bool:
        """Whether it is of a dimension whose extent calls decide."""
        return len(self.runs) == 1 and self.runs[0].symbolic

    @cached_property
    def extent(self) -> int:
        """The dimension's extent."""
        return sum(run.length for run in self.runs)

    @cached_property
    def local(self) -> int:
        """How many indices each device holds."""
        return sum(run.local for run in self.runs)

    @property
    def is_whole(self) -> bool:
        """Whether every device holds everything."""
        return all(run.is_whole for run in self.runs)

    @cached_property
    def is_even(self) -> bool:
        """Whether it is one sequence of equal blocks, a block a device, in their order: what collectives deal out."""
        if len(self.runs) != 1 or self.runs[0].outer > 1 or self.is_whole or self.is_symbolic:
            return False
        run = self.runs[0]
        return run.starts == tuple(device * run.size for device in range(self.devices)) and (
            run.extent == run.size * self.devices
        )

    def begins(self) -> tuple[tuple[int, int], ...]:
        """Return the first index of each run, in the dimension and among those that a device holds."""
        found = [(0, 0)]
        for run in self.runs:
            found.append((found[-1][0] + run.length, found[-1][1] + run.local))
        return tuple(found[:-1])

    def indices(self, device: int) -> NDArray[np.int64]:
        """Return the indices that a device holds, in the order in which they lie there."""
        parts = []
        for run, (begin, _) in zip(self.runs, self.begins()):
            outer, held, inner = np.ix_(
                np.arange(run.outer), run.starts[device] + np.arange(run.size), np.arange(run.inner)
            )
            parts.append((begin + (outer * run.extent + held) * run.inner + inner).ravel())
        return np.concatenate(parts)

    def spans(self, device: int) -> list[slice]:
        """Return the same as slices of the dimension, one behind the other."""
        return spans_of(self.indices(device))

    def around(self, outer: int, inner: int) -> Share | None:
        """Return the share of a dimension with more digits before and behind.

        None where several runs, or any extent, would repeat.
        """
        if self.is_symbolic:
            return self if outer == inner == 1 else None
        if outer > 1 and len(self.runs) > 1:
            return Share.of([run.around(1, inner) for _ in range(outer) for run in self.runs]) if outer <= 8 else None
        return Share.of([run.around(outer, inner) for run in self.runs])

    def part(self, begin: int, end: int) -> Share | None:
        """Return the share of the indices from `begin` to `end`; None where that cuts blocks."""
        if self.is_symbolic:
            return self if (begin, end) == (0, self.extent) else None
        found = []
        for run, (first, _) in zip(self.runs, self.begins()):
            low, high = max(begin, first) - first, min(end, first + run.length) - first
            if low >= high:
                continue
            unit = 1 if run.is_whole else run.extent * run.inner
            if low % unit or high % unit:
                return None
            if run.is_whole:
                found.append(Run(1, high - low, 1, run.starts, high - low))
            else:
                found.append(Run((high - low) // unit, run.extent, run.inner, run.starts, run.size))
        return Share.of(found)

    def iters(self, axis: str, stride: int) -> tuple[tuple[Iter, ...], tuple[Iter, ...]] | None:
        """Return the share as iters of a `Layout`: those of the dimension, and those that number copies.

        Parameters
        ----------
        axis : str
            The mesh axis.
        stride : int
            How far apart neighbouring indices lie in a device's memory.

        Returns
        -------
        iters : tuple or None
            None where a share is no layout: runs that differ, or overlap.
        """
        if len(self.runs) > 1 or self.is_symbolic:
            return None
        (run,), memory = self.runs, LINEAR_MEMORY
        if run.is_whole:
            return (make_iter(run.extent, stride, memory),), (make_iter(self.devices, 1, axis),)
        group = run.starts.count(0)
        blocks = self.devices // group
        if run.starts != tuple(device // group * run.size for device in range(self.devices)) or (
            run.size * blocks != run.extent
        ):
            return None
        inside = stride * run.inner
        found = [
            make_iter(run.outer, inside * run.size, memory),
            make_iter(blocks, group, axis),
            make_iter(run.size * run.inner, stride, memory),
        ]
        copies = (make_iter(group, 1, axis),) if group > 1 else ()
        return tuple(it for it in found if int(it.extent) > 1), copies

    def __str__(self) -> str:
        return " | ".join(map(_shown, self.runs))


def spans_of(at: NDArray[np.int64]) -> list[slice]:
    """Return indices as slices of neighbouring ones, in their order."""
    if not len(at):
        return [slice(0, 0)]
    cuts = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
    return [slice(int(at[a]), int(at[b - 1]) + 1) for a, b in pairwise(cuts)]


def _shown(run: Run) -> str:
    """Return a run as its blocks, each with the devices that hold it."""
    if run.symbolic:
        return " ".join(f"1/{len(run.starts)}@{device}" for device in range(len(run.starts)))
    if run.is_whole:
        return f"{run.length}"
    holders: dict[int, list[str]] = {}
    for device, start in enumerate(run.starts):
        holders.setdefault(start, []).append(str(device))
    blocks = " ".join(f"{run.size * run.inner}@{'+'.join(devices)}" for devices in holders.values())
    return blocks if run.outer == 1 else f"{run.outer}({blocks})"
