"""Boxes of tensors as tiles of matrices: which matrix a tensor lies in, off-chip, and which of its tiles a box is.

A tensor of several dimensions is a matrix whose rows are its first dimensions and whose columns are its others, such
that each box that the program moves is a tile of it, one of those that divide it or one that begins anywhere. Where
boxes reach beyond an end, there are zeros, which is what a tile program reads there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_axe.stream.tiled.points import Points
from tvm_axe.stream.types import Tile
from tvm_axe.tile.regions import Region
from tvm_axe.tile.regions import Tile as TileBuffer


@dataclass(frozen=True, eq=False)
class Box:
    """A box of a tensor in each iteration of a nest of loops.

    Attributes
    ----------
    region : Region
        The box, its start in the loops' variables.
    points : Points
        The iterations.
    where : str
        The statement that moves it, in words.
    rows : numpy.ndarray, optional
        How many of its rows are stored, in each iteration; all of them without.
    """

    region: Region
    points: Points
    where: str
    rows: np.ndarray | None = None

    @property
    def starts(self) -> list[np.ndarray]:
        """Where it starts in each dimension, a number an iteration."""
        return [self.points.at(start) for start in self.region.start]


class NoMatrix(Exception):
    """The reason why boxes are no tiles of one matrix."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A tensor as it lies in off-chip memory.

    Attributes
    ----------
    tensor : tvm_axe.tile.regions.Tile
        The tensor.
    shape : tuple[int, ...]
        The tensor's extents.
    padded : tuple[int, ...]
        The extents with what fills them up.
    rows_of : int
        How many dimensions make the rows.
    """

    tensor: TileBuffer
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    rows_of: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return math.prod(self.padded[: self.rows_of])

    @property
    def columns(self) -> int:
        """The number of columns."""
        return math.prod(self.padded[self.rows_of :])

    def tile(self, box: Box) -> Tile:
        """Return the tile that a box is."""
        extents = box.region.extents
        return Tile(math.prod(extents[: self.rows_of]), math.prod(extents[self.rows_of :]), self.tensor.dtype)

    def corners(self, box: Box) -> tuple[np.ndarray, np.ndarray]:
        """Return the row and the column at which the box begins in each iteration."""
        starts = box.starts
        row = _flattened(starts[: self.rows_of], self.padded[: self.rows_of], len(box.points))
        return row, _flattened(starts[self.rows_of :], self.padded[self.rows_of :], len(box.points))

    def numbers(self, box: Box) -> np.ndarray | None:
        """Return the number of the tile, row by row, that the box is in each iteration; None if it is none in some."""
        tile, (row, column) = self.tile(box), self.corners(box)
        if self.rows % tile.rows or self.columns % tile.columns or (row % tile.rows).any():
            return None
        if (column % tile.columns).any():
            return None
        return row // tile.rows * (self.columns // tile.columns) + column // tile.columns

    def elements(self, box: Box) -> np.ndarray:
        """Return the number of the element, row by row, at which the box begins in each iteration."""
        row, column = self.corners(box)
        return row * self.columns + column

    def filled(self, array: np.ndarray) -> np.ndarray:
        """Return an array of the tensor's shape as the matrix."""
        ends = [(0, size - extent) for size, extent in zip(self.padded, self.shape)]
        return np.pad(array, ends).reshape(self.rows, self.columns)

    def cut(self, matrix: np.ndarray) -> np.ndarray:
        """Return the array of the tensor's shape that lies in a matrix."""
        return matrix.reshape(self.padded)[tuple(slice(extent) for extent in self.shape)]


def matrix_of(tensor: TileBuffer, shape: tuple[int, ...], boxes: Sequence[Box]) -> Matrix:
    """Return the matrix that a tensor is, given all the boxes of it that a program moves.

    Raises
    ------
    NoMatrix
        If there is none whose tiles they are.
    """
    reasons = []
    # What is stored in part is a column of rows, if it has one dimension.
    lines = any(box.rows is not None and len(box.region.shape) == 1 for box in boxes)
    for rows_of in [len(shape)] if lines else sorted(range(len(shape)), reverse=True):
        try:
            padded = _padded(shape, boxes, rows_of)
        except NoMatrix as reason:
            reasons.append(reason)
        else:
            return Matrix(tensor, shape, padded, rows_of)
    raise reasons[0]


def _padded(shape: tuple[int, ...], boxes: Sequence[Box], rows_of: int) -> tuple[int, ...]:
    """Return the extents, filled up, if each box is a tile of rows of the first dimensions."""
    padded, whole = list(shape), []
    for box in boxes:
        for dims in (range(rows_of), range(rows_of, len(shape))):
            cut = next((dim for dim in dims if box.region.extents[dim] > 1), None)
            if cut is not None:
                padded[cut] = _up(padded[cut], box.region.extents[cut])
                whole.append((box, [dim for dim in dims if dim > cut]))
    for box in boxes:
        for dim, (start, extent) in enumerate(zip(box.starts, box.region.extents)):
            if not len(start):
                continue
            if start.min() < 0 or start.max() >= max(1, shape[dim]):
                raise NoMatrix(
                    f"it starts outside of the {shape[dim]} elements along dimension {dim} in some iteration: let "
                    "loops end there"
                )
            padded[dim] = max(padded[dim], int(start.max()) + extent)
    for box, behind in whole:
        extents = box.region.extents
        if any(extents[dim] != padded[dim] for dim in behind):
            raise NoMatrix(
                f"its {' x '.join(map(str, extents))} elements don't lie as rows of one length: take all of the "
                "dimensions behind the first that it takes a part of, or one element of each"
            )
    return tuple(padded)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _flattened(starts: Sequence[np.ndarray], extents: Sequence[int], number: int) -> Any:
    """Return the row-major number of the first element."""
    found = np.zeros(number, "int64")
    for start, extent in zip(starts, extents):
        found = found * extent + start
    return found
