"""Which thread holds which element of a tile in which register: a fragment's Axe layout, read for emission.

A fragment's layout places its elements on ``tx`` (a thread, 0 to the number of threads - 1) and ``m`` (a register of
it). A `FragmentLayout` has the digits of both: the elements of a thread are walked by one unrolled loop a register
digit, and where a thread stands is computed from its thread digits. An accumulator of ``mma``, 16 x 8 in a warp:

>>> from tvm_axe.layout import Layout
>>> held = FragmentLayout(Layout.parse("S[(2, 8, 4, 2) : (2, 4@tx, 1@tx, 1)]"), (16, 8), 32)
>>> held.registers
4
>>> held.table[5].tolist()  # row-major positions of the elements of thread 5: rows 1 and 9, columns 2 and 3
[10, 11, 74, 75]
>>> [str(digit) for digit in held.register_digits]
['2 steps of 2: 8 rows of dimension 0', '2 steps of 1: 1 rows of dimension 1']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np
from tvm import ir, tirx

from tvm_axe.errors import TileError
from tvm_axe.layout import ComposeLayout, Iter, Layout

THREAD, REGISTER = "tx", "m"


@dataclass(frozen=True)
class Digit:
    """A digit of the number of a thread, or of a register.

    Attributes
    ----------
    extent : int
        How many steps there are.
    stride : int
        How many threads or registers a step goes on.
    dimension : int
        The dimension of the tile along which a step moves the element.
    weight : int
        How far it moves it.
    """

    extent: int
    stride: int
    dimension: int
    weight: int

    def split(self, inner: int) -> tuple[Digit, Digit]:
        """The same as two digits, the inner one of extent `inner`."""
        outer = replace(self, extent=self.extent // inner, stride=self.stride * inner, weight=self.weight * inner)
        return outer, replace(self, extent=inner)

    def __str__(self) -> str:
        return f"{self.extent} steps of {self.stride}: {self.weight} rows of dimension {self.dimension}"


@dataclass(frozen=True)
class FragmentLayout:
    """Which thread of how many holds which element of a tile in which register.

    Invariants, checked when one is made: every register of every thread holds an element of the tile (copies of one
    element are the replicas of the layout), and the steps over threads, and over registers, are the digits of one
    mixed-radix number, so that `start` and `register_digits` compute what `table` says.

    Parameters
    ----------
    layout : Layout
        Where the elements lie, over ``tx`` and ``m``.
    shape : tuple of int
        The tile's extents.
    threads : int
        How many threads there are.

    Raises
    ------
    TileError
        The layout has other axes or offsets, splits no dimension of `shape`, or leaves registers of some threads empty.
    """

    layout: Layout
    shape: tuple[int, ...]
    threads: int

    def __post_init__(self) -> None:
        layout = self.layout
        axes = {it.axis for it in (*layout.D, *layout.R) if it.extent != 1}
        if isinstance(layout, ComposeLayout) or not axes <= {THREAD, REGISTER} or any(v for _, v in layout.O.items()):
            raise TileError(
                f"fragment layout {layout}: valid are layouts over the axes {THREAD} and {REGISTER}, without offset"
            )
        if not layout.admits(self.shape):
            raise TileError(f"fragment layout {layout} doesn't place a tile of shape {self.shape}")
        missing = int((self.table < 0).sum())
        if missing:
            raise TileError(
                f"fragment layout {layout} for shape {self.shape} leaves {missing} of the {self.table.size} registers "
                f"of {self.threads} threads empty; what not every thread holds once needs replicas in R"
            )
        if not np.array_equal(self._computed(), self.table):
            raise TileError(
                f"fragment layout {layout}: the steps over threads and over registers must each be one mixed-radix "
                f"number, every stride the product of the extents below it"
            )

    @cached_property
    def registers(self) -> int:
        """How many a thread has."""
        return int(self.layout.span(REGISTER))

    @cached_property
    def table(self) -> np.ndarray:
        """The row-major position of the element in a register, or -1; of shape (threads, registers)."""
        positions = {axis: np.zeros(1, np.int64) for axis in (THREAD, REGISTER)}
        for it in self.layout.D:
            for axis, held in positions.items():
                step: np.ndarray = np.arange(int(it.extent)) * (int(it.stride) if it.axis == axis else 0)
                positions[axis] = (held[:, None] + step).reshape(-1)
        table = np.full((self.threads, self.registers), -1, np.int64)
        thread, register = positions[THREAD], positions[REGISTER]
        for copy in product(*(range(it.extent) for it in self.layout.R if it.axis == THREAD)):
            at = thread + sum(c * it.stride for c, it in zip(copy, self.replicas))
            if at.max(initial=0) >= self.threads:
                raise TileError(f"fragment layout {self.layout} reaches thread {at.max()} of {self.threads}")
            table[at, register] = np.arange(len(at))
        return table

    @cached_property
    def replicas(self) -> tuple[Any, ...]:
        """The iters of R that copy elements over threads."""
        return tuple(it for it in self.layout.R if it.axis == THREAD)

    @property
    def is_copied(self) -> bool:
        """Whether several threads hold an element."""
        return any(it.extent != 1 for it in self.replicas)

    @cached_property
    def digits(self) -> tuple[tuple[str, Digit], ...]:
        """The digits of the elements, by axis, from the most significant of dimension 0 on."""
        grouped, seps = self.layout.group(self.shape)
        found = []
        for dimension, (start, stop) in enumerate(pairwise(seps)):
            weight = self.shape[dimension]
            for it in grouped.D[start:stop]:
                weight //= int(it.extent)
                if it.extent != 1:
                    found.append((it.axis, Digit(int(it.extent), int(it.stride), dimension, weight)))
        return tuple(found)

    @cached_property
    def thread_digits(self) -> tuple[Digit, ...]:
        """Where in the tile a thread stands."""
        return tuple(digit for axis, digit in self.digits if axis == THREAD)

    @cached_property
    def register_digits(self) -> tuple[Digit, ...]:
        """How a thread's registers go over its elements, the slowest first."""
        return tuple(sorted((digit for axis, digit in self.digits if axis == REGISTER), key=lambda d: -d.stride))

    def start(self, thread: tirx.Expr) -> list[tirx.Expr]:
        """The index of the element in a thread's first register."""
        index: list[Any] = [tirx.const(0, "int32")] * len(self.shape)
        for digit in self.thread_digits:
            step = thread if digit.stride == 1 else thread // digit.stride
            step = step if digit.stride * digit.extent == self.threads else step % digit.extent
            index[digit.dimension] = index[digit.dimension] + step * digit.weight
        return index

    def is_first_copy(self, thread: tirx.Expr) -> tirx.Expr | None:
        """Whether a thread's elements are the first of their copies; None if there is one copy."""
        conditions = [thread // it.stride % it.extent == 0 for it in self.replicas if it.extent != 1]
        return None if not conditions else tirx.all(*conditions)

    def _computed(self) -> np.ndarray:
        """`table` as `start` and the register digits compute it."""
        place = np.arange(self.threads)[:, None] + np.zeros((1, self.registers), np.int64)
        register = np.arange(self.registers)[None, :]
        index = [np.zeros_like(place) for _ in self.shape]
        for axis, digit in self.digits:
            at = place if axis == THREAD else register
            index[digit.dimension] += at // digit.stride % digit.extent * digit.weight
        return np.ravel_multi_index(index, self.shape)


def enumerate_digits(digits: Sequence[Digit]) -> np.ndarray:
    """The registers that nested loops over `digits` visit, in order."""
    visited = np.zeros(1, np.int64)
    for digit in digits:
        visited = (visited[:, None] + np.arange(digit.extent) * digit.stride).reshape(-1)
    return visited


def fit(values: np.ndarray, extents: Sequence[int]) -> tuple[int, list[int]] | None:
    """`values` over the points of a box as ``base + sum of step_k * c_k``; None if it is no such sum.

    Points at which `values` is negative don't count.
    """
    if not extents:
        return (int(values[0]) if values[0] >= 0 else 0), []
    box = values.reshape(extents)
    known = np.argwhere(box >= 0)
    if not len(known):
        return 0, [0] * len(extents)
    steps = []
    for axis in range(len(extents)):
        low, high = np.moveaxis(box, axis, 0)[:-1], np.moveaxis(box, axis, 0)[1:]
        both = (low >= 0) & (high >= 0)
        steps.append(int((high - low)[both][0]) if both.any() else 0)
    base = int(box[tuple(known[0])]) - int(known[0] @ np.array(steps))
    fitted = base + known @ np.array(steps)
    return (base, steps) if np.array_equal(fitted, box[tuple(known.T)]) else None


def refined(digits: Sequence[Digit]) -> list[Digit]:
    """The same loops with every digit split into primes, so that any other mixed radix is a sum over them."""
    found: list[Digit] = []
    for digit in digits:
        rest, factor = digit, 2
        pieces: list[Digit] = []
        while rest.extent > 1:
            if rest.extent % factor:
                factor += 1
                continue
            rest, inner = rest.split(factor)
            pieces.insert(0, inner)
        found += pieces
    return found


_ARITHMETIC: dict[type, Any] = {
    ir.prim.Add: np.add,
    ir.prim.Sub: np.subtract,
    ir.prim.Mul: np.multiply,
    ir.prim.FloorDiv: np.floor_divide,
    ir.prim.FloorMod: np.mod,
    ir.prim.Min: np.minimum,
    ir.prim.Max: np.maximum,
    ir.prim.BitwiseAnd: np.bitwise_and,
}


def evaluate(expr: Any, values: dict[Any, np.ndarray]) -> np.ndarray | None:
    """An integer expression at many points at once; None if it has other parts than `values` and arithmetic."""
    if isinstance(expr, (int, tirx.IntImm)):
        return np.int64(int(expr))
    if expr in values:
        return values[expr]
    if isinstance(expr, tirx.Cast):
        return evaluate(expr.value, values)
    if type(expr) in _ARITHMETIC:
        a, b = evaluate(expr.a, values), evaluate(expr.b, values)
        return None if a is None or b is None else _ARITHMETIC[type(expr)](a, b)
    return None


def linear(index: Sequence[Any], shape: Sequence[int]) -> Any:
    """The row-major position of an index."""
    position: Any = 0
    for value, extent in zip(index, shape):
        position = position * extent + value
    return position


def projected(layout: Layout, shape: Sequence[int], dimensions: Sequence[int]) -> Layout:
    """The layout of what depends on some of a tile's dimensions only, held where a fragment of `layout` needs it.

    Registers are numbered anew without gaps; the steps over threads of the other dimensions become replicas.

    >>> accumulator = Layout.parse("S[(2, 8, 4, 2) : (2, 4@tx, 1@tx, 1)]")
    >>> print(projected(accumulator, (16, 8), [0]))
    S[(2, 8) : (1, 4@tx)] + R[4 : 1@tx]
    """
    grouped, seps = layout.group(shape)
    groups = [grouped.D[start:stop] for start, stop in pairwise(seps)]
    kept = [it for d in dimensions for it in groups[d] if it.extent != 1]
    below, compact = 1, {}
    for it in sorted((it for it in kept if it.axis == REGISTER), key=lambda it: it.stride):
        compact[it.stride] = below
        below *= int(it.extent)
    shard = [Iter(it.extent, compact[it.stride], REGISTER) if it.axis == REGISTER else it for it in kept]
    gone = [it for d, group in enumerate(groups) if d not in dimensions for it in group]
    copies = [it for it in gone if it.axis == THREAD and it.extent != 1]
    return Layout(shard or [Iter(1, 1, REGISTER)], [*layout.R, *copies]).canonicalize()


def everywhere(size: int, threads: int) -> Layout:
    """The layout of a tile of which every thread holds all."""
    return Layout([Iter(size, 1, REGISTER)], [Iter(threads, 1, THREAD)])
