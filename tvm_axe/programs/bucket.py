"""Buckets: many tensors in the rows of one matrix, so that one kernel and one collective take them all.

>>> import numpy as np
>>> bucket = Bucket({"weight": (3, 3), "bias": (3,)}, width=4)
>>> bucket.shape, bucket.owners.tolist()
((4, 4), [0, 0, 0, 1])
>>> matrix = bucket.zeros()
>>> bucket.views(matrix)["bias"][:] = 1
>>> matrix[3].tolist()
[1.0, 1.0, 1.0, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from tvm_axe.errors import InputError

__all__ = ["Bucket"]


class Bucket:
    """The place of each of many tensors in a matrix: whole rows, of which the last one is padded.

    A whole row belongs to one tensor, so that what is shared out or summed by rows (a device's slice, the norm of each
    tensor) never cuts through an element, and the row says whose it is.

    Parameters
    ----------
    shapes : Mapping[str, tuple[int, ...]]
        The tensors, in order.
    width : int
        Elements in a row.

    Attributes
    ----------
    shapes : Mapping[str, tuple[int, ...]]
        The tensors' shapes by name, as they were given.
    rows : Mapping[str, slice]
        The rows of each tensor.
    owners : numpy.ndarray
        The position among `shapes` of the tensor that each row belongs to; int32.

    Raises
    ------
    InputError
        If there is no tensor, one is empty, or the width isn't positive.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], width: int) -> None:
        if width < 1:
            raise InputError(f"Bucket: width must be at least 1, not {width}")
        empty = [name for name, shape in shapes.items() if math.prod(shape) < 1]
        if empty or not shapes:
            raise InputError(f"Bucket: every tensor needs an element, and {', '.join(empty) or 'there is no tensor'}")
        self.shapes = MappingProxyType(dict(shapes))
        self.width = width
        counts = [-(-math.prod(shape) // width) for shape in shapes.values()]
        ends = np.cumsum(counts).tolist()
        self.rows = MappingProxyType({name: slice(end - n, end) for name, n, end in zip(shapes, counts, ends)})
        self.owners = np.repeat(np.arange(len(counts), dtype="int32"), counts)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix: rows, width."""
        return len(self.owners), self.width

    def zeros(self, dtype: str = "float32") -> np.ndarray:
        """Return a matrix for the tensors; its padding must stay zero where norms are taken."""
        return np.zeros(self.shape, dtype)

    def views(self, matrix: np.ndarray) -> dict[str, np.ndarray]:
        """Return the tensors in `matrix`, by name, as views: nothing is copied.

        Raises
        ------
        InputError
            If `matrix` has another shape, or its rows don't lie one after the other.
        """
        if matrix.shape != self.shape or not matrix.flags.c_contiguous:
            raise InputError(
                f"Bucket.views: the matrix must be a dense one of shape {self.shape}, not of shape {matrix.shape} with "
                f"strides {matrix.strides}"
            )
        return {
            name: matrix[rows].reshape(-1)[: math.prod(self.shapes[name])].reshape(self.shapes[name])
            for name, rows in self.rows.items()
        }
