"""Products whose operands lie in memory in any order of dimensions, or are parts of tensors.

A problem names the dimension of each operand that an index runs over, as in Einstein's notation: ``a="b i h x"`` with
``b="h x j"`` and ``c="b i j"`` sums over h and x. One dimension each of the rows, the columns and the sum is cut into
tiles, which TMA or plain loads take from where they lie; the others are more blocks, or more steps of the sum. So
nothing is transposed or copied first, as a product of matrices of attention's heads or of experts otherwise would be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tvm import ir, tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Knobs, Problem, Recipe, product_slack, stored
from tvm_axe.tile.kernels.tiling import matmul_knobs
from tvm_axe.tile.reading import read

__all__ = ["EINSUM", "Dim", "Operands"]

_LEAST = 16
"""Rows, columns or terms that a tile has at least: what tensor cores take."""


@dataclass(frozen=True)
class Dim:
    """A dimension of an operand, and what runs over it.

    Attributes
    ----------
    index : str
        The index that runs over it; empty for one element of it.
    extent : int
        How many elements the index runs over; 1 without an index.
    size : int
        How many the tensor has.
    start : int or str
        The first of them, or the name of a scalar that says it.
    """

    index: str
    extent: int
    size: int
    start: int | str = 0

    @property
    def whole(self) -> bool:
        """Whether the index runs over all of the tensor's elements."""
        return self.extent == self.size

    def __str__(self) -> str:
        part = "" if self.whole else f"/{self.size}+{self.start}"
        return f"{self.index}:{self.extent}{part}"


def described(dims: Sequence[Dim]) -> str:
    """The text of an operand's dimensions, as problems have it: ``"b:2 i:128/512+o0 :1/3+2"``."""
    return " ".join(map(str, dims))


def dims_of(text: str) -> tuple[Dim, ...]:
    """The dimensions that a text is of.

    Raises
    ------
    TileError
        If it is none's.
    """
    found = []
    for word in text.split():
        match = re.fullmatch(r"([a-z]\w*)?:(\d+)(?:/(\d+)\+(\w+))?", word)
        if match is None:
            raise TileError(f"einsum: {word!r} is no dimension; valid are such as i:128, i:128/512+64 and :1/3+2")
        index, extent, size, start = match.groups()
        first = 0 if start is None else int(start) if start.isdigit() else start
        found.append(Dim(index or "", int(extent), int(size or extent), first))
    return tuple(found)


@dataclass(frozen=True)
class Operands:
    """What runs over what.

    Attributes
    ----------
    first, second : tuple of Dim
        The factors' dimensions, as they are given.
    c : tuple of Dim
        The result's.
    swapped : bool
        Whether the second has the rows, and the first the columns.
    """

    first: tuple[Dim, ...]
    second: tuple[Dim, ...]
    c: tuple[Dim, ...]
    swapped: bool

    @classmethod
    def of(cls, first: tuple[Dim, ...], second: tuple[Dim, ...], c: tuple[Dim, ...]) -> Operands | None:
        """The operands, the rows before the columns in the result; None if there are no rows, columns or sum."""
        one, other = ({dim.index for dim in dims if dim.index} for dims in (first, second))
        free = [dim.index for dim in c if dim.index and (dim.index in one) != (dim.index in other)]
        if not ({*free} & one and {*free} & other and (one & other) - {dim.index for dim in c}):
            return None
        return cls(first, second, c, free[-1] in one)  # what lies last is the columns'

    @classmethod
    def parse(cls, first: str, second: str, c: str) -> Operands:
        """The operands of which these are the texts.

        Raises
        ------
        TileError
            If they are none's.
        """
        found = cls.of(dims_of(first), dims_of(second), dims_of(c))
        if found is None:
            raise TileError(f"einsum: {c} of {first} and {second} has no rows, no columns or no sum")
        return found

    @property
    def a(self) -> tuple[Dim, ...]:
        """The dimensions of the factor that has the rows."""
        return self.second if self.swapped else self.first

    @property
    def b(self) -> tuple[Dim, ...]:
        """Those of the factor that has the columns."""
        return self.first if self.swapped else self.second

    @property
    def texts(self) -> dict[str, str]:
        """Their texts, as a problem has them."""
        return {name: described(dims) for name, dims in (("a", self.first), ("b", self.second), ("c", self.c))}

    @cached_property
    def extents(self) -> dict[str, int]:
        """How long each index is."""
        return {dim.index: dim.extent for dim in (*self.a, *self.b, *self.c) if dim.index}

    @cached_property
    def row(self) -> str:
        """The index of the rows that is cut into tiles: the longest, of these the last."""
        return self._longest([i for i in self._indices(self.c) if i in self._indices(self.a)], self.b)

    @cached_property
    def column(self) -> str:
        """That of the columns: what lies last in C."""
        return [i for i in self._indices(self.c) if i in self._indices(self.b) and i not in self._indices(self.a)][-1]

    @cached_property
    def term(self) -> str:
        """That of the sum: the longest, of these what lies last in A."""
        return self._longest([i for i in self._indices(self.a) if i in self._indices(self.b)], self.c)

    def _longest(self, indices: Sequence[str], without: Sequence[Dim]) -> str:
        mine = [index for index in indices if index not in self._indices(without)]
        return max(reversed(mine), key=lambda index: self.extents[index])

    @staticmethod
    def _indices(dims: Sequence[Dim]) -> list[str]:
        return [dim.index for dim in dims if dim.index]

    @cached_property
    def steps(self) -> list[str]:
        """The other indices of the sum, outermost first."""
        return [i for i in self._indices(self.a) if i not in self._indices(self.c) and i != self.term]

    @cached_property
    def blocks(self) -> list[str]:
        """The indices of the batch, and the rows and columns that aren't cut, outermost first."""
        return [index for index in self._indices(self.c) if index not in (self.row, self.column)]

    def comes_first(self, dims: Sequence[Dim], first: str, second: str) -> bool:
        """Whether an index comes before another in an operand."""
        names = self._indices(dims)
        return names.index(first) < names.index(second)

    @property
    def transpose_b(self) -> bool:
        """Whether the right operand lies with the terms of its columns in a row."""
        return not self.comes_first(self.b, self.term, self.column)

    def problem(self, dtype: str) -> dict[str, Any]:
        """What the tiles are chosen for."""
        batch = math.prod(self.extents[index] for index in self.blocks)
        m, n, k = (self.extents[index] for index in (self.row, self.column, self.term))
        return {"m": m, "n": n, "k": k, "dtype": dtype, "batch": batch, "transpose_b": self.transpose_b}


def _divided(index: str, owners: Sequence[tuple[Dim, ...]]) -> bool:
    """Whether tiles must divide an index: what is beyond it in an operand isn't the tensor's end."""
    return any(dim.index == index and not dim.whole for dims in owners for dim in dims)


def _parts(number: Any, extents: Sequence[int]) -> list[Any]:
    """A number as one for each of several extents, the first the slowest."""
    found: list[Any] = []
    for extent in reversed(extents[1:]):
        found.append(number % extent if extent > 1 else 0)
        number = number // extent if extent > 1 else number
    return [number, *reversed(found)] if extents else []


def einsum(
    a: str,
    b: str,
    c: str,
    dtype: str,
    out_dtype: str | None = None,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    instruction: str | None = None,
    swizzle: int = 1,
) -> Recipe:
    """C = the sum over what A and B share and C hasn't; `a`, `b` and `c` are the texts of their dimensions (`Dim`).

    Parameters
    ----------
    dtype : str
        Of A and B: ``"float32"``, ``"float16"`` or ``"bfloat16"``.

    Raises
    ------
    TileError
        If tiles don't divide what is a part of a tensor.
    """
    spec = Operands.parse(a, b, c)
    operand, out = stored(dtype), out_dtype or stored(dtype)
    for index, block, owners in (
        (spec.row, block_m, (spec.c,)),
        (spec.column, block_n, (spec.c,)),
        (spec.term, block_k, (spec.a, spec.b)),
    ):
        if _divided(index, owners) and spec.extents[index] % block:
            raise TileError(f"einsum: tiles of {block} don't divide {index}:{spec.extents[index]}, a part of a tensor")
    cut = {spec.row: block_m, spec.column: block_n, spec.term: block_k}
    transpose_a = not spec.comes_first(spec.a, spec.row, spec.term)
    transpose_b = spec.transpose_b
    a_tile = (block_k, block_m) if transpose_a else (block_m, block_k)
    b_tile = (block_n, block_k) if transpose_b else (block_k, block_n)
    shapes = [tuple(dim.size for dim in dims_of(text)) for text in (a, b, c)]
    batch = [spec.extents[index] for index in spec.blocks]
    sums = [spec.extents[index] for index in spec.steps]
    rows, columns, terms = (math.ceil(spec.extents[index] / cut[index]) for index in cut)
    scalars: dict[str, tirx.Var] = {}

    def operands(first: tirx.Buffer, second: tirx.Buffer) -> tuple[tirx.Buffer, tirx.Buffer]:
        """What has the rows, and what has the columns."""
        return (second, first) if spec.swapped else (first, second)

    def part(buffer: tirx.Buffer, dims: Sequence[Dim], z: Any, i: Any, j: Any, step: Any) -> tirx.BufferRegion:
        """The tile of an operand."""
        at = dict(zip(spec.blocks, _parts(z, batch)))
        at |= {spec.row: i * block_m, spec.column: j * block_n}
        at |= dict(zip((*spec.steps, spec.term), _parts(step, (*sums, terms))))
        at[spec.term] = at[spec.term] * block_k
        ranges = []
        for dim in dims:
            start = dim.start
            if isinstance(start, str):
                start = scalars.setdefault(start, tirx.Var(start, "int32"))
            first = start + at[dim.index] if dim.index else start
            ranges.append(ir.Range.from_min_extent(first, cut.get(dim.index, 1)))
        return tirx.BufferRegion(buffer, ranges)

    @T.prim_func(check_well_formed=False)  # scalars, of any number, become parameters below
    def einsum(A: T.Buffer(shapes[0], operand), B: T.Buffer(shapes[1], operand), C: T.Buffer(shapes[2], out)) -> None:
        with tile.kernel(math.prod(batch), rows, columns, swizzle=swizzle) as (z, i, j):
            left = tile.shared(a_tile, operand)
            right = tile.shared(b_tile, operand)
            total = tile.fragment((block_m, block_n), "float32")
            tile.fill(total, 0)
            for step in tile.pipelined(math.prod(sums) * terms, stages=stages or None):
                tile.copy(part(operands(A, B)[0], spec.a, z, i, j, step), left)
                tile.copy(part(operands(A, B)[1], spec.b, z, i, j, step), right)
                tile.gemm(left, right, total, transpose_a=transpose_a, transpose_b=transpose_b, instruction=instruction)
            tile.copy(total, part(C, spec.c, z, i, j, 0))

    whole = tirx.PrimFunc([*einsum.params, *scalars.values()], einsum.body, einsum.ret_type, einsum.attrs)
    return Recipe((read(whole),), ("A", "B"), ("C",))


def knobs(target: Target, problem: Problem) -> Knobs:
    """Tiles of the indices that are cut; only such as divide what is a part of a tensor."""
    spec = Operands.parse(*(str(problem[name]) for name in "abc"))
    found = dict(matmul_knobs(target, spec.problem(str(problem["dtype"]))))
    for name, index, owners in (
        ("block_m", spec.row, (spec.c,)),
        ("block_n", spec.column, (spec.c,)),
        ("block_k", spec.term, (spec.a, spec.b)),
    ):
        if _divided(index, owners):
            extent = spec.extents[index]
            able = [int(size) for size in found[name] if extent % int(size) == 0]
            largest = max((size for size in range(_LEAST, 257, _LEAST) if extent % size == 0), default=extent)
            found[name] = tuple(able) or (largest,)
    return found


# ---- Data and reference ----------------------------------------------------------------------------------------------


def inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    """Normally distributed operands."""
    shapes = {name: tuple(dim.size for dim in dims_of(problem[name.lower()])) for name in "AB"}
    return {name: normal(rng, shape, stored(problem["dtype"])) for name, shape in shapes.items()}


def reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """The sum in float64; all of C is written."""
    spec = Operands.parse(*(str(problem[name]) for name in "abc"))
    letters = {index: chr(ord("a") + number) for number, index in enumerate(spec.extents)}
    texts = []
    parts = []
    for name in "AB":
        dims = dims_of(problem[name.lower()])
        ranges = tuple(
            slice(int(dim.start), int(dim.start) + dim.extent) if dim.index else int(dim.start) for dim in dims
        )
        parts.append(arrays[name].astype("float64")[ranges])
        texts.append("".join(letters[dim.index] for dim in dims if dim.index))
    equation = f"{texts[0]},{texts[1]}->{''.join(letters[dim.index] for dim in dims_of(problem['c']))}"
    terms = math.prod(spec.extents[index] for index in (*spec.steps, spec.term))
    magnitude = np.einsum(equation, *(np.abs(part) for part in parts))
    out = problem.get("out_dtype") or stored(problem["dtype"])
    return {"C": Expected(np.einsum(equation, *parts), product_slack(problem["dtype"], out, terms, magnitude))}


EINSUM = Kernel(
    name="einsum",
    summary="C[b i j] = sum of A[i k b] B[k b j], in any order of dimensions, of parts of tensors",
    make=einsum,
    parameters=knobs,
    inputs=inputs,
    reference=reference,
    cases=(
        {"a": "h:6 b:2 i:40 x:24", "b": "h:6 x:24 j:72", "c": "b:2 i:40 j:72", "dtype": "float32"},
        {"a": "b:2 i:130 k:64", "b": "w:3 h:4 k:64 x:32", "c": "h:4 w:3 b:2 i:130 x:32", "dtype": "float16"},
        {"a": "h:3 :1/3+0 i:64 x:64", "b": "h:3 :1/3+1 j:64 x:64", "c": "h:3 i:64 j:64", "dtype": "bfloat16"},
        {"a": "s:2 e:3 c:33 h:40", "b": "e:3 h:40 f:48", "c": "s:2 e:3 c:33 f:48", "dtype": "float32"},
        {"a": "k:96 i:128", "b": "k:96 j:64", "c": "j:64 i:128", "dtype": "float16", "out_dtype": "float32"},
        {"a": "i:64/128+32 k:32/64+32", "b": "j:40 k:32/96+64", "c": "i:64 j:40", "dtype": "float32"},
    ),
)
