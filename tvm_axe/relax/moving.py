"""What it takes to move values between forms, each move worked out once: what a search for forms asks most.

In which forms a value is held is a number, by which states of the search are hashed and compared at once.

>>> from tvm_axe.layout.shares import Share
>>> rows, value = Form(0, Share.blocks(8, 2)), Value("x", (8,), "float32", "value", (8,))
>>> moving = Moving([value], 2, Link(latency=1e-6, bandwidth=1e9))
>>> halves, everything = (moving.number(frozenset({form})) for form in (rows, WHOLE))
>>> found = moving.cheapest(0, halves, WHOLE)
>>> print(found.how.kind, "of", found.source, found.after == everything)
all_gather of S0[4@0 4@1] True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvm_axe.layout import Link
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.relax.forms import WHOLE, Form, Move, move
from tvm_axe.relax.graph import Value

__all__ = ["Made", "Moving"]


class Made(NamedTuple):
    """How a form of a value is made of those in which it is held: of which, what it costs, and how it is held then."""

    how: Move
    cost: float
    source: Form
    after: int


class Moving:
    """What moves of values cost.

    Parameters
    ----------
    values : Sequence[Value]
        The values, by number.
    devices : int
        How many the axis has.
    link : Link
        Between two of them.
    """

    def __init__(self, values: Sequence[Value], devices: int, link: Link) -> None:
        self.devices, self.link = devices, link
        # Seconds a byte that is moved costs beyond the time that it takes.
        self.toll = 0.0
        kinds: dict[tuple[tuple[int, ...], int], int] = {}
        each = [(value.typical, max(1, dtype_bytes(value.dtype, 1))) for value in values]
        self.kinds = [kinds.setdefault(kind, len(kinds)) for kind in each]  # of one kind moves cost the same
        self._of_kind = list(kinds)
        self._numbers: dict[frozenset[Form], int] = {}
        self._ways: list[frozenset[Form]] = []
        self._made: dict[tuple[int, int, Form, float], Made | None] = {}
        self._reached: dict[tuple[int, tuple[int, ...], float], NDArray[np.float64]] = {}

    def number(self, forms: frozenset[Form]) -> int:
        """The number of a way to hold a value."""
        found = self._numbers.setdefault(forms, len(self._ways))
        if found == len(self._ways):
            self._ways.append(forms)
        return found

    def between(self, value: int, source: Form, target: Form) -> Move | None:
        """What makes one form of a value of another."""
        return move(source, target, *self._of_kind[self.kinds[value]], self.devices, self.link)

    def cheapest(self, value: int, held: int, target: Form) -> Made | None:
        """How a value that is held in the way of a number is had in a form at the least cost; None if it can't be."""
        key = self.kinds[value], held, target, self.toll
        if key not in self._made:
            forms = self._ways[held]
            ways = [
                (how.seconds + self.toll * how.bytes, how, form)
                for form in forms
                if (how := self.between(value, form, target)) is not None
            ]
            found = None
            if ways:
                cost, how, source = min(ways, key=lambda way: way[0])
                found = Made(how, cost, source, self._after(held, target))
            self._made[key] = found
        return self._made[key]

    def _after(self, held: int, target: Form) -> int:
        """How a value is held that is moved to a form; what is held whole is as good as any share of it."""
        forms = self._ways[held]
        if WHOLE in forms:
            return held
        return self.number(
            frozenset({WHOLE}) if target == WHOLE else frozenset(f for f in forms if not f.partial) | {target}
        )

    def reaches(self, value: int, held: tuple[int, ...]) -> NDArray[np.float64]:
        """The time from each way to hold a value to each other."""
        key = self.kinds[value], held, self.toll
        if key not in self._reached:
            found = np.zeros((len(held), len(held)))
            for i, have in enumerate(held):
                for j, want in enumerate(held):
                    for form in self._ways[want] - self._ways[have]:
                        made = self.cheapest(value, have, form)
                        found[i, j] += math.inf if made is None else made.cost
            self._reached[key] = found
        return self._reached[key]
