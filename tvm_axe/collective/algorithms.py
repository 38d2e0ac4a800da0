"""The ways in which devices with memory of their own do a collective, as plans: moves in phases, each behind the other.

| algorithm | what a device does |
|---|---|
| one-shot | all of its result at once, from its peers' slabs; or it writes its own block to theirs |
| two-shot | of an all-reduce: sums its part of the slabs, and writes the sum to every slab |
| two-step | of an all-reduce that is an exchange: is sent its part's terms, and sends the sum; else as in two shots |
| copy-engine | the same, but what is only copied goes by copy engines, which take no processor |

What is only copied goes to, or comes from, the device itself first, then the next one, and so on around the ring: so at
a time each is sent something by one. Whichever it is, devices meet before the first phase and after the last, and not
in between, since what a phase reads of the one before is the device's own. A sum is in the order of the slabs, whoever
computes it, so all devices have the same bits, and all algorithms have.

An all-reduce of B bytes among n devices takes (n-1) B into each device in one shot, and 2 (n-1)/n B in two, of which
half are written by peers: what has been written has to be seen before the last meeting, which a read has not. So one
shot is for what is small, or for two devices; never in place, where a device would overwrite what a peer still reads.
Two steps take as many bytes as two shots. They are for what is neither small nor large, where devices exchange what
they have (`tvm_axe.collective.cuda.exchange`), and so don't meet before and after.

>>> [str(one) for one in offered("all_reduce", in_place=True)]
['two-shot', 'two-step', 'copy-engine']
>>> (phase,) = phases("all_reduce", Algorithm.ONE_SHOT, (8,), (8,), (), parts=2, rank=1)
>>> phase.moves[0].target
Corner(slabs=(1,), shape=(8,), at=(0,))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from tvm_axe.collective.plan import Corner, Move, plan
from tvm_axe.errors import InputError
from tvm_axe.layout.collectives import Collective
from tvm_axe.layout.traffic import reduced_part

__all__ = ["Algorithm", "Phase", "offered", "phases"]

_SUMMED = Collective.ALL_REDUCE.operation
_KERNELS_ONLY = (Collective.REDUCE_SCATTER.operation, Collective.REDUCE.operation)


class Algorithm(str, Enum):
    """One of the ways."""

    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    TWO_STEP = "two-step"
    COPY_ENGINE = "copy-engine"

    def __str__(self) -> str:
        return self.value

    @staticmethod
    def of(name: str) -> Algorithm:
        """Return the one of that name.

        Raises
        ------
        InputError
            If there is none.
        """
        try:
            return Algorithm(name)
        except ValueError:
            valid = ", ".join(map(str, Algorithm))
            raise InputError(f"collectives: no algorithm is called {name!r}; valid: {valid}") from None


class Phase(NamedTuple):
    """Moves that don't depend on each other."""

    moves: tuple[Move, ...]
    by_engine: bool = False
    """Whether copy engines do them, where they can, or kernels."""
    onwards: bool = False
    """Whether they read the target, which the phase before wrote, instead of the source."""
    twice: bool = False
    """Whether devices that can exchange what they sum do so in two steps instead: each its part, then the sums."""


def offered(name: str, in_place: bool) -> tuple[Algorithm, ...]:
    """Return the algorithms that do a collective, one of `plan.VIEWS`, on a target that is the source or another."""
    if name == _SUMMED:
        return tuple(Algorithm)[1:] if in_place else tuple(Algorithm)
    return (Algorithm.ONE_SHOT,) if name in _KERNELS_ONLY else (Algorithm.ONE_SHOT, Algorithm.COPY_ENGINE)


def phases(
    name: str,
    algorithm: Algorithm,
    source: Sequence[int],
    target: Sequence[int],
    numbers: Sequence[int],
    parts: int,
    rank: int,
) -> list[Phase]:
    """Return what the worker at coordinate `rank` of `parts` does in a collective.

    There are as many phases, of the same kinds, on every device, though some may have no moves.

    Parameters
    ----------
    algorithm : Algorithm
        One that is `offered`.
    name, source, target, numbers, parts, rank
        See `plan`.

    Raises
    ------
    InputError
        If the shapes don't fit each other, or no such algorithm is offered.
    """
    if algorithm not in offered(name, in_place=False):
        raise InputError(f"{name}: there is no algorithm {algorithm} for it; valid: {_listed(offered(name, False))}")
    moves = tuple(plan(name, source, target, numbers, parts, rank))
    if name != _SUMMED:
        moves = tuple(_from_own_on(moves, parts, rank))
        return [Phase(moves, by_engine=algorithm == Algorithm.COPY_ENGINE)]
    if algorithm in (Algorithm.TWO_SHOT, Algorithm.TWO_STEP):
        return [Phase(moves, twice=algorithm == Algorithm.TWO_STEP)]
    size, everywhere = math.prod(source), tuple(range(parts))
    if algorithm == Algorithm.ONE_SHOT:
        whole = [Corner(slabs, (size,), (0,)) for slabs in (everywhere, (rank,))]
        return [Phase((Move((size,), *whole),) if size else ())]
    part = reduced_part(size, parts, rank)
    box = (part.stop - part.start,)
    behind = tuple((rank + shift) % parts for shift in range(1, parts))
    own, others = (Corner(slabs, (size,), (part.start,)) for slabs in ((rank,), behind))
    summed = tuple(replace(move, target=own) for move in moves)
    sent = (Move(box, own, others),) if summed and others.slabs else ()
    return [Phase(summed), Phase(sent, by_engine=True, onwards=True)]


def _from_own_on(moves: Sequence[Move], parts: int, rank: int) -> Iterator[Move]:
    """Moves with what is copied to and from slabs in the order of the devices from this one on, around the ring."""

    def turned(slabs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(slabs, key=lambda slab: (slab - rank) % parts))

    for move in sorted(moves, key=lambda move: [(slab - rank) % parts for slab in move.source.slabs[:1]]):
        yield replace(move, target=replace(move.target, slabs=turned(move.target.slabs)))


def _listed(algorithms: Sequence[Algorithm]) -> str:
    return ", ".join(map(str, algorithms))
