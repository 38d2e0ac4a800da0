"""The iterations of a nest of loops, in order: which there are, and the values that expressions have in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import tirx

from tvm_axe.stream.tiled.expressions import Evaluator
from tvm_axe.stream.types import Dim, ragged


class Points:
    """The iterations of a nest of loops, outermost first, which are the elements of a stream.

    Attributes
    ----------
    dims : tuple[Dim, ...]
        A dim for each loop; ragged where a loop's length depends on the loops around it.
    """

    def __init__(
        self, values: Mapping[tirx.Var, np.ndarray], number: int, dims: tuple[Dim, ...], lengths: tuple[np.ndarray, ...]
    ) -> None:
        self._values, self._number, self.dims, self._lengths = dict(values), number, dims, lengths

    @classmethod
    def outside(cls, known: Mapping[tirx.Var, Any]) -> Points:
        """Return the one point outside of all loops, at which variables have known values."""
        return cls({var: np.full(1, value) for var, value in known.items()}, 1, (), ())

    def __len__(self) -> int:
        return self._number

    @property
    def depth(self) -> int:
        """The number of loops."""
        return len(self.dims)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The number of iterations of each loop; None if one isn't always as long."""
        return None if any(dim.ragged for dim in self.dims) else tuple(int(dim.size) for dim in self.dims)

    def knows(self, var: tirx.Var) -> bool:
        """Return whether a variable has a value at each point."""
        return var in self._values

    def at(self, expr: Any) -> np.ndarray:
        """Return an expression's value at each point."""
        return np.broadcast_to(np.asarray(Evaluator(self._values)(expr)), (self._number,))

    def named(self, var: tirx.Var, value: Any) -> None:
        """Let a variable stand for an expression from now on."""
        self._values[var] = self.at(value)

    def inside(self, var: tirx.Var, start: Any, extent: Any, name: str) -> Points:
        """Return the iterations of a loop in this nest; `name` is that of its dim where that is ragged."""
        first, lengths = self.at(start), np.maximum(self.at(extent), 0)
        values = {known: np.repeat(column, lengths) for known, column in self._values.items()}
        before = np.repeat(np.cumsum(lengths) - lengths, lengths)
        values[var] = np.repeat(first, lengths) + np.arange(int(lengths.sum())) - before
        even = len(lengths) > 0 and bool((lengths == lengths[0]).all())
        dim = Dim(int(lengths[0])) if even else ragged(name)
        return Points(values, int(lengths.sum()), (*self.dims, dim), (*self._lengths, lengths))

    def nested(self, values: np.ndarray) -> list:
        """Return values, one a point, as nested lists, a level a loop."""
        found: list = values.tolist()
        for lengths in reversed(self._lengths):
            stops = np.cumsum(lengths)
            found = [found[stop - length : stop] for stop, length in zip(stops.tolist(), lengths.tolist())]
        return found[0]
