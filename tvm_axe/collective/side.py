"""The side stream: copies, waits and flags that a device does beside a kernel, told in the order of the program.

| function | tensors | numbers | what the side stream does |
|---|---|---|---|
| `axe.fork` | | blocks | begins behind all that the device was told before |
| `axe.wait_count` | words | shift, group, least | goes on once a counter of this device's is at least so large |
| `axe.copy` | source, target (n, *slab) | rows, slot, shift, first, stop | copies columns of rows to a peer's slab |
| `axe.flag` | words (n, *slab) | shift, group | sets a flag of a peer's, behind the copies to it before |
| `axe.join` | | left | ends before all that the device is told next, but for the last `left` forks' part |
| `axe.NAME:beside` | a collective's | the collective's | does the device's part of it, which meets no peer |

A GPU has several copy engines, of which each takes some microseconds to begin. So what is made for one peer, a slot of
its own, is waited for and copied in that order, beside what is made for others; what a device has for all, slot 0, is
copied to one after the other, since several at once are slower. A flag is behind the last copy to its peer. Behind
these steps, all but a fork and a join have the name of a mesh axis, whose n devices take part; (n, *shape) is the view
along it. Numbers are the same on all devices: the peer of device d is d + shift, around the ring. The kernel beside the
side stream has so many *blocks*, which wait for what others' ends set, and so must all be running; 0 if it waits for
nothing. *NAME* is a collective, one of `plan.VIEWS`: a barrier before the fork says that its peers are ready for it,
and one behind the join that they are done.

*Words* are int32 of shape ``(2, n, groups)``, a slab a device. In the first half, `[0, d, g]` is the flag that device d
sets when what it sends in group g has arrived; in the second, `[1, d, g]` counts what this device's kernel has made for
device d in group g. The program clears its own before all devices meet, so that each run sets them anew.

A *copy* sees a slab as a matrix of its last dimension's columns, and that as slots of `rows` rows: from a source's slot
number (d + slot), or its only one, to the target's slot number d, columns `first` to before `stop`. So what device d
sends always lands in the slot that has its number.

>>> rectangle((2, 3, 8), (2, 3, 8), 2, 0, 3, 1, 1, 0, 4)
Rectangle(peer=1, source=3, target=0, rows=3, first=0, stop=4)

On a GPU the side stream is a stream with branches, and copy engines copy (`tvm_axe.collective.cuda.side`). On the host
the worker itself does each step where it stands in the program, which here says the meaning of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tvm_axe.errors import WorkerError

__all__ = ["BESIDE", "COUNTERS", "FLAGS", "STEPS", "Branching", "Rectangle", "rectangle", "step"]

STEPS: Mapping[str, int] = MappingProxyType({"fork": 0, "wait_count": 1, "copy": 2, "flag": 1, "join": 0})
"""The steps, with how many tensors each takes."""

BESIDE = ":beside"
"""What the name of a collective ends with that is told to the side stream."""

FLAGS, COUNTERS = 0, 1
"""The halves of the words."""


class Rectangle(NamedTuple):
    """What a copy moves: to which device; from and to which row of the slabs, as matrices; which columns."""

    peer: int
    source: int
    target: int
    rows: int
    first: int
    stop: int


def rectangle(
    source: Sequence[int],
    target: Sequence[int],
    devices: int,
    rank: int,
    rows: int,
    slot: int,
    shift: int,
    first: int,
    stop: int,
) -> Rectangle:
    """Return what a copy moves.

    Parameters
    ----------
    source, target : sequence of int
        The shapes of a slab of each.
    devices, rank : int
        How many devices the axis has, and which this one is.
    rows, slot, shift, first, stop : int
        The step's numbers.
    """
    slots = math.prod(source[:-1]) // rows
    assert source[-1] == target[-1] and math.prod(target[:-1]) == devices * rows and slots in (1, devices)
    return Rectangle((rank + shift) % devices, (rank + slot) % slots * rows, rank * rows, rows, first, stop)


class Branching:
    """On which branch of the side stream each step is: 0 for what is for all and the nearest peer, others from 1 on."""

    def __init__(self) -> None:
        self._copied: dict[int, int] = {}

    def branch(self, name: str, numbers: Sequence[int]) -> int:
        """Return the branch of the next step.

        >>> branching = Branching()
        >>> branching.branch("wait_count", (2, 0, 3)), branching.branch("copy", (4, 2, 2, 0, 8))
        (1, 1)
        >>> branching.branch("flag", (2, 0)), branching.branch("copy", (4, 0, 2, 0, 8))
        (1, 0)
        >>> branching.branch("flag", (2, 1))
        0
        """
        if name == "flag":
            return self._copied.get(numbers[0], 0)
        branch = max(0, numbers[1 if name == "copy" else 0] - 1)
        if name == "copy":
            self._copied[numbers[2]] = branch
        return branch


def step(name: str, tensors: Sequence[np.ndarray], numbers: Sequence[int], rank: int) -> None:
    """Do a step in the host's memory, now.

    Parameters
    ----------
    name : str
        One of `STEPS`.
    tensors : sequence of numpy.ndarray
        As the step takes them.
    numbers : sequence of int
        Likewise.
    rank : int
        This device's coordinate on the axis.

    Raises
    ------
    WorkerError
        A counter isn't as large as is waited for: nothing here could still count.
    """
    if name == "wait_count":
        (words,), (shift, group, least) = tensors, numbers
        peer = (rank + shift) % words.shape[1]
        if words[COUNTERS, peer, group] < least:
            raise WorkerError(
                f"axe.wait_count: {words[COUNTERS, peer, group]} of {least} tiles for device {peer} in group {group} "
                "are made, and on the host none is made beside a wait; it belongs behind the kernel"
            )
    elif name == "copy":
        source, target = tensors
        moved = rectangle(source.shape, target.shape[1:], len(target), rank, *numbers)
        columns = slice(moved.first, moved.stop)
        taken = source.reshape(-1, source.shape[-1])[moved.source : moved.source + moved.rows, columns]
        _matrix(target[moved.peer])[moved.target : moved.target + moved.rows, columns] = taken
    elif name == "flag":
        (words,), (shift, group) = tensors, numbers
        words[(rank + shift) % len(words), FLAGS, rank, group] = 1


def _matrix(slab: np.ndarray) -> np.ndarray:
    """A view of a dense slab as a matrix."""
    matrix = slab.view()
    matrix.shape = (-1, slab.shape[-1])  # which refuses to copy
    return matrix
