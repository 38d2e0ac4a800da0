"""What the tests of collectives' algorithms share: a collective by its definition, and the data that it is done on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tvm_axe.collective.ops import summed
from tvm_axe.collective.plan import chunk


class Case(NamedTuple):
    """A collective on slabs of these shapes, whose block along the dims `source` and `target` a device has."""

    name: str
    shape: tuple[int, ...]
    parts: int
    dim: int
    other: int
    number: int

    def block(self, dim: int) -> tuple[int, ...]:
        return (*self.shape[:dim], chunk(self.shape[dim], self.parts, 0).stop, *self.shape[dim + 1 :])

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        whole, block = self.shape, self.block(self.dim)
        return {
            "reduce_scatter": (whole, block),
            "all_gather": (block, whole),
            "all_to_all": (block, self.block(self.other)),
        }.get(self.name, (whole, whole))

    @property
    def numbers(self) -> tuple[int, ...]:
        if self.name in ("all_gather", "all_gather_in_place", "reduce_scatter"):
            return (self.dim,)
        return {
            "all_reduce": (),
            "all_to_all": (self.dim, self.other),
            "send": (self.number,),
        }.get(self.name, (self.number % self.parts,))

    def expected(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """What is in the slabs of the target afterwards, by the definition."""
        found, parts = target.copy(), self.parts

        def rows(dim: int, rank: int) -> tuple[slice, ...]:
            return (slice(None),) * dim + (chunk(self.shape[dim], parts, rank),)

        def few(dim: int, rank: int) -> tuple[slice, ...]:
            mine = chunk(self.shape[dim], parts, rank)
            return (slice(None),) * dim + (slice(0, mine.stop - mine.start),)

        for rank, peer in itertools.product(range(parts), repeat=2):
            if self.name == "all_reduce" or (self.name == "reduce" and rank == self.numbers[0]):
                found[rank] = summed(list(source))
            elif self.name == "reduce_scatter":
                found[rank][few(self.dim, rank)] = summed(list(source))[rows(self.dim, rank)]
            elif self.name == "all_gather":
                found[rank][rows(self.dim, peer)] = source[peer][few(self.dim, peer)]
            elif self.name == "all_gather_in_place":
                found[rank][rows(self.dim, peer)] = source[peer][rows(self.dim, peer)]
            elif self.name == "all_to_all":
                piece = source[peer][few(self.dim, peer)][rows(self.other, rank)]
                found[rank][few(self.other, rank)][rows(self.dim, peer)] = piece
            elif self.name == "send":
                found[rank] = source[(rank - self.number) % parts]
            elif self.name == "broadcast":
                found[rank] = source[self.numbers[0]]
        return found


def values(shape: Sequence[int], dtype: str, seed: int) -> np.ndarray:
    """Random elements, some of them of all ones, which is a NaN of float types."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    random = np.random.default_rng(seed)
    found = random.integers(0, 2, shape) if dtype == "bool" else random.normal(0, 30, shape)
    found = found.astype(kind)
    if dtype != "bool":
        found.view(np.uint8).reshape(*shape, kind.itemsize)[random.random(shape) < 0.05] = 0xFF
    return found


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Assert that these are the same numbers, and NaNs in the same places."""
    if found.dtype.kind in "fV":
        found, expected = found.astype("float64"), expected.astype("float64")
    np.testing.assert_array_equal(found, expected)
