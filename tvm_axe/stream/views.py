"""Affine views: in which order the tiles of a tensor or a buffer are read."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from tvm_axe.errors import StreamError


@dataclass(frozen=True)
class View:
    """Positions ``offset + sum of i_k * strides[k]`` for ``0 <= i_k < shape[k]``, the last index fastest.

    >>> View((2, 3), (0, 1)).positions()
    [0, 1, 2, 0, 1, 2]

    Attributes
    ----------
    shape : tuple[int, ...]
        The number of positions in each dim, outermost first; these are dims of the stream that it makes.
    strides : tuple[int, ...]
        The strides in elements of what is viewed, in their row-major order; 0 repeats.
    offset : int
        The first position.

    Raises
    ------
    StreamError
        If shape and strides differ in length or there is none, or a position is negative.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        if not self.shape or len(self.shape) != len(self.strides) or min(self.shape) < 1:
            raise StreamError(f"{self}: shape and strides must be as long, at least 1, and the shape positive")
        if self.offset + sum(min(0, (n - 1) * s) for n, s in zip(self.shape, self.strides)) < 0:
            raise StreamError(f"{self}: some positions are negative")

    @property
    def last(self) -> int:
        """The highest position."""
        return self.offset + sum(max(0, (n - 1) * s) for n, s in zip(self.shape, self.strides))

    def positions(self) -> list[int]:
        """Return all the positions in order."""
        return [self.offset + position for position in _positions(self.shape, self.strides)]

    def stops(self) -> list[int]:
        """Return for each position the highest rank, within the view, that ends after it."""
        return [*_stops(self.shape)]


@functools.lru_cache(maxsize=64)
def _positions(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return all the positions of a view without an offset."""
    axes = [range(0, n * s, s) if s else [0] * n for n, s in zip(shape, strides)]
    return tuple(map(sum, itertools.product(*axes)))


@functools.lru_cache(maxsize=64)
def _stops(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stops behind the positions of a view."""
    spans = [math.prod(shape[at:]) for at in range(len(shape))][::-1]
    return tuple(sum(number % span == 0 for span in spans) for number in range(1, spans[-1] + 1))
