"""The iterations of a nest of loops, in order: which there are, and the values that expressions have in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, tirx

from tvm_axe.errors import StreamError
from tvm_axe.stream.tiled.expressions import Evaluator
from tvm_axe.stream.types import Dim, ragged
from tvm_axe.tile.walking import variables_in


class Points:
    """The iterations of a nest of loops, outermost first, which are the elements of a stream.

    Attributes
    ----------
    dims : tuple[Dim, ...]
        A dim for each loop; ragged where a loop's length depends on the loops around it.
    outer : Points, optional
        Those of the nest without its innermost loop; None of what is in no loop, and of a side.
    side : Side, optional
        Where only some iterations of others are meant, which.
    """

    def __init__(
        self,
        values: Mapping[tirx.Var, np.ndarray],
        number: int,
        dims: tuple[Dim, ...],
        lengths: tuple[np.ndarray, ...],
        tensors: Mapping[tirx.Var, np.ndarray],
        outer: Points | None = None,
        side: Side | None = None,
    ) -> None:
        self._values, self._number, self.dims, self._lengths = dict(values), number, dims, lengths
        self._tensors, self.outer, self.side = tensors, outer, side

    @classmethod
    def outside(cls, known: Mapping[tirx.Var, Any], tensors: Mapping[tirx.Var, np.ndarray]) -> Points:
        """Return the one point outside of all loops, at which variables and tensors have known values."""
        return cls({var: np.full(1, value) for var, value in known.items()}, 1, (), (), tensors)

    def __len__(self) -> int:
        return self._number

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The number of iterations of each loop; None if one isn't always as long."""
        return None if any(dim.ragged for dim in self.dims) else tuple(int(dim.size) for dim in self.dims)

    @property
    def always(self) -> bool:
        """Whether the innermost loop has an iteration in each of the loops around it."""
        return bool(self._lengths) and len(self._lengths[-1]) > 0 and int(self._lengths[-1].min()) > 0

    def knows(self, var: tirx.Var) -> bool:
        """Return whether a variable, or what a local tile of one number holds, has a value at each point."""
        return var in self._values

    def gives(self, buffer: tirx.Var) -> bool:
        """Return whether a tensor's elements are known before the program runs."""
        return buffer in self._tensors

    def settles(self, expr: Any) -> bool:
        """Return whether an expression has a value at each point, before the program runs."""
        found: list[Any] = []
        if not isinstance(expr, int):
            tvm_ffi.structural_walk(expr, (ir.TensorLoad, lambda load: found.append(load.source)))
        known = all(source in self._tensors or self.knows(source) for source in found)
        return known and all(self.knows(var) or var in self._tensors for var in variables_in(expr))

    def at(self, expr: Any) -> np.ndarray:
        """Return an expression's value at each point.

        Raises
        ------
        StreamError
            If it is loaded from outside of a tensor.
        """
        return np.broadcast_to(np.asarray(Evaluator(self._values, self._loaded)(expr)), (self._number,))

    def along(self, expr: Any, var: tirx.Var, extent: int) -> np.ndarray:
        """Return an expression's value at each point, a row each, for so many values of another variable from 0 on."""
        values = {known: column[:, None] for known, column in self._values.items()}
        found = Evaluator({**values, var: np.arange(extent)}, self._loaded)(expr)
        return np.broadcast_to(found, (self._number, extent))

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
        return Points(
            values, int(lengths.sum()), (*self.dims, dim), (*self._lengths, lengths), self._tensors, outer=self
        )

    def on(self, side: Side) -> Points:
        """Return those iterations that are on a side of a choice, one after the other in one dim."""
        values = {known: column[side.mask] for known, column in self._values.items()}
        number = int(side.mask.sum())
        return Points(values, number, (Dim(number),), (np.array([number]),), self._tensors, side=side)

    def nested(self, values: list) -> list:
        """Return values, one a point, as nested lists, a level a loop."""
        found = values
        for lengths in reversed(self._lengths):
            stops = np.cumsum(lengths)
            found = [found[stop - length : stop] for stop, length in zip(stops.tolist(), lengths.tolist())]
        return found[0]

    def _loaded(self, load: Any, at: Evaluator) -> Any:
        if load.source in self._values:
            return self._values[load.source]
        array, places = self._tensors[load.source], np.broadcast_arrays(*(at(index) for index in load.indices))
        for place, size in zip(places, array.shape):
            if ((place < 0) | (place >= size)).any():
                raise StreamError(f"{load} is outside of the tensor that is given, of shape {array.shape}")
        return array[tuple(places)].astype("int64" if array.dtype.kind in "iu" else array.dtype)


@dataclass(frozen=True, eq=False)
class Side:
    """A side of a choice that is made in each iteration.

    Attributes
    ----------
    whole : Points
        The iterations.
    holds : numpy.ndarray
        The choice in each: whether the first side is taken.
    first : bool
        Whether this is the first side.
    """

    whole: Points
    holds: np.ndarray
    first: bool

    @property
    def mask(self) -> np.ndarray:
        """Whether this side is taken, in each iteration."""
        return self.holds if self.first else ~self.holds

    def excludes(self, other: Side | None) -> bool:
        """Return whether another is the other side of the same choice."""
        return other is not None and other.holds is self.holds and other.first is not self.first
