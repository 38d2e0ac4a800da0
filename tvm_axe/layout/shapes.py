"""Shapes as arguments: what is accepted, and how one is checked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import check_int, check_number
from tvm_axe.layout.symbolic import Number


def check_extents(shape: Sequence[Number], what: str = "shape") -> tuple[Number, ...]:
    """Return `shape` as a tuple of positive ints or expressions, or raise LayoutError that calls it `what`."""
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise LayoutError(f"{what} must be a sequence of ints such as (64, 128), not {shape!r}")
    return tuple(
        extent if type(extent) is int and 0 < extent < 2**63 else check_number(f"{what}[{dim}]", extent, least=1)
        for dim, extent in enumerate(shape)
    )


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return `shape` as a tuple of positive ints, or raise LayoutError."""
    return tuple(check_int(f"shape[{dim}]", extent, least=1) for dim, extent in enumerate(check_extents(shape)))


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the elements from one index of each dimension to the next one in a row-major array of `shape`.

    >>> dense_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def check_same_rank(**shapes: tuple[Number, ...]) -> None:
    """Raise LayoutError unless the shapes, given by the names of their arguments, have as many dimensions each."""
    (first, one), (second, other) = shapes.items()
    if len(one) != len(other):
        raise LayoutError(
            f"{first} and {second} must have as many dimensions: {show(one)} has {len(one)}, "
            f"and {show(other)} has {len(other)}"
        )


def show(shape: Sequence[Number]) -> str:
    """Return the text of a shape."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
