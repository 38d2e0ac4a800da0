"""Functions on tiles, for `Stream.map`, `Stream.accum` and `Stream.scan`.

A function knows the type of its result and its FLOPs for tiles of any shape, symbolic ones included, so that a program
can be typed, measured and simulated without computing anything.

>>> from tvm_axe.stream import Tile
>>> from tvm_axe.stream.types import symbol
>>> f, rows = matmul(), symbol("R")
>>> a, b = Tile(rows, 64), Tile(64, 32)
>>> print(f.result(a, b), f.flops(a, b))
Tile(R, 32, float32) 4096*R
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tvm_axe.errors import StreamError
from tvm_axe.stream.types import DataType, Scalar, Size, Tile, as_size, differ, product


@dataclass(frozen=True, eq=False)
class TileFunction:
    """A function of values, and what is known of it.

    Attributes
    ----------
    name : str
        The name in messages, pictures and traces.
    call : Callable
        A function from arrays to an array, or on numbers if `on_numbers`.
    result : Callable
        A function from the arguments' types to the result's; it raises `StreamError` if they don't fit.
    flops : Callable
        A function from the arguments' types to the FLOPs, a number or an expression.
    combine : Callable
        A function that joins a state with what `call` makes of the next elements, in Accum and Scan.
    initial : Any, optional
        The state before the first element; without, that is what the function makes of the first one, and an empty list
        has no result.
    grows : int, optional
        The dim of tiles that `combine` puts parts behind each other in: 0 rows, 1 columns; without, a state has the
        shape of what the function makes.
    on_numbers : bool
        Whether it computes numbers or selectors, which runs without values need too: of such, or of tiles, which are
        their (rows, columns) there.
    cycles : int, optional
        The cycles that it takes, whatever its FLOPs.
    """

    name: str
    call: Callable[..., Any]
    result: Callable[..., DataType]
    flops: Callable[..., Size]
    combine: Callable[[Any, Any], Any] = operator.add
    initial: Any = None
    grows: int | None = None
    on_numbers: bool = False
    cycles: int | None = None

    def __call__(self, *values: Any) -> Any:
        """Compute the function of `values`."""
        return self.call(*values)

    def accumulate(self, state: Any, *values: Any) -> Any:
        """Return the state after the next elements."""
        part = self.call(*values)
        return part if state is None else self.combine(state, part)

    def grown(self, state: Any, part: Any) -> Any:
        """Return the shape of the state after a part of that shape."""
        if state is None or self.grows is None:
            return part
        return (state[0] + part[0], part[1]) if self.grows == 0 else (part[0], state[1] + part[1])

    def starting(self, initial: Any) -> TileFunction:
        """Return the function with another initial state, an array or a number."""
        return replace(self, initial=initial)

    def costing(self, flops: Callable[..., Size] | None = None, cycles: int | None = None) -> TileFunction:
        """Return the function with its FLOPs, or the cycles that it takes, stated otherwise."""
        return replace(self, flops=flops or self.flops, cycles=self.cycles if cycles is None else cycles)


@functools.cache
def matmul(transposed: bool = False) -> TileFunction:
    """Return the function ``a @ b``, or ``a @ b.T``, in float32 or wider; 2 FLOPs a product. Accumulated, their sum."""

    def result(a: DataType, b: DataType) -> Tile:
        x, y = _tiles("matmul", a, b)
        inner, columns = (y.columns, y.rows) if transposed else (y.rows, y.columns)
        if differ(x.columns, inner):
            raise StreamError(f"matmul: {x.columns} columns meet {inner} rows")
        return Tile(x.rows, columns, x.dtype)

    def call(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        wide = np.result_type(a.dtype, np.float32)
        return (a.astype(wide) @ (b.T if transposed else b).astype(wide)).astype(a.dtype)

    def flops(a: Tile, b: Tile) -> Size:
        return product((2, a.rows, a.columns, b.rows if transposed else b.columns))

    return TileFunction("matmul", call, result, flops)


def elementwise(name: str, call: Callable[..., np.ndarray], each: int = 1, **more: Any) -> TileFunction:
    """Return a function of tiles of one shape, or of one row or one column, whose result has that shape.

    Parameters
    ----------
    call : Callable
        A function from arrays to an array.
    each : int
        FLOPs an element of the result.
    """

    def result(*arguments: DataType) -> Tile:
        tiles = _tiles(name, *arguments)
        rows, columns = _wider(name, [t.rows for t in tiles]), _wider(name, [t.columns for t in tiles])
        return Tile(rows, columns, tiles[0].dtype)

    def flops(*arguments: Tile) -> Size:
        found = result(*arguments)
        return product((each, found.rows, found.columns))

    return TileFunction(name, call, result, flops, **more)


@functools.cache
def add() -> TileFunction:
    """Return the function ``a + b``."""
    return _arithmetic("add", np.add)


@functools.cache
def sub() -> TileFunction:
    """Return the function ``a - b``."""
    return _arithmetic("sub", np.subtract)


@functools.cache
def mul() -> TileFunction:
    """Return the function ``a * b``."""
    return _arithmetic("mul", np.multiply)


@functools.cache
def div() -> TileFunction:
    """Return the function ``a / b`` of floats."""
    return _arithmetic("div", np.divide, floats=True)


@functools.cache
def scale(factor: float) -> TileFunction:
    """Return the function ``a * factor``."""
    return elementwise("scale", lambda a: (a * factor).astype(a.dtype))


@functools.cache
def exp() -> TileFunction:
    """Return the function ``e ** a`` of floats; 4 FLOPs an element."""
    return _arithmetic("exp", np.exp, 4, floats=True)


@functools.cache
def rsqrt() -> TileFunction:
    """Return the function ``1 / sqrt(a)`` of floats; 4 FLOPs an element."""
    return _arithmetic("rsqrt", lambda a: (1 / np.sqrt(a)).astype(a.dtype), 4, floats=True)


@functools.cache
def silu() -> TileFunction:
    """Return the function ``a / (1 + e ** -a)`` of floats; 8 FLOPs an element."""
    return _arithmetic("silu", lambda a: (a / (1 + np.exp(-a))).astype(a.dtype), 8, floats=True)


@functools.cache
def maximum() -> TileFunction:
    """Return the function that takes the larger of two elements."""
    return _arithmetic("maximum", np.maximum)


@functools.cache
def sum_tiles() -> TileFunction:
    """Return the function that sums tiles, as an accumulation."""
    return elementwise("sum_tiles", np.copy)


@functools.cache
def max_tiles() -> TileFunction:
    """Return the function that takes the largest elements of tiles, as an accumulation."""
    return elementwise("max_tiles", np.copy, combine=np.maximum)


@functools.cache
def row_sum() -> TileFunction:
    """Return the function that sums each row to a column; as an accumulation it sums the rows of all the tiles."""
    return _by_row("row_sum", lambda a: a.sum(axis=1, keepdims=True, dtype=a.dtype))


@functools.cache
def row_max() -> TileFunction:
    """Return the function that takes each row's largest element; as an accumulation, over the rows of all tiles."""
    return _by_row("row_max", lambda a: a.max(axis=1, keepdims=True), combine=np.maximum)


@functools.cache
def retile(axis: int = 0) -> TileFunction:
    """Return the function that puts tiles into one, as an accumulation; it takes no time.

    They are put below each other, or with `axis` 1 beside each other. (STeP, arXiv 2511.07776,
    section 3.2: RetileRow and RetileCol.)

    Raises
    ------
    StreamError
        If `axis` is neither 0 nor 1.
    """
    if axis not in (0, 1):
        raise StreamError(f"retile: axis {axis!r} is none of a tile's; valid are 0, its rows, and 1, its columns")
    return elementwise(
        "retile" if axis == 0 else "retile_columns",
        lambda a: a,
        0,
        combine=lambda state, part: np.concatenate([state, part], axis=axis),
        grows=axis,
        cycles=0,
    )


def number(
    name: str, call: Callable[..., Any], result: DataType | None = None, initial: Any = None, cycles: int = 1
) -> TileFunction:
    """Return a function of numbers and selectors: metadata, which is computed in runs without values too.

    There, what it made for one unit may be taken for another one that is alike.

    Parameters
    ----------
    call : Callable
        A function from Python numbers, or tuples for selectors, to one; as an accumulation, from the state and those.
    result : DataType
        The type of what it returns; an int64 by default.
    cycles : int
        The cycles that it takes.
    """
    return _Folding(
        name, call, lambda *_: result or Scalar(), lambda *_: 0, initial=initial, on_numbers=True, cycles=cycles
    )


class _Folding(TileFunction):
    """A function that takes the state as its first argument where there is one."""

    def accumulate(self, state: Any, *values: Any) -> Any:
        return values[0] if state is None else self.call(state, *values)


def _arithmetic(
    name: str, call: Callable[..., np.ndarray], each: int = 1, floats: bool = False, **more: Any
) -> TileFunction:
    """Return an elementwise function of tiles of one dtype, which is the result's."""
    function = elementwise(name, call, each, **more)

    def result(*arguments: DataType) -> DataType:
        found = function.result(*arguments)
        dtypes = list(dict.fromkeys(tile.dtype for tile in _tiles(name, *arguments)))
        if len(dtypes) > 1:
            raise StreamError(f"{name} takes tiles of one dtype, not of {' and '.join(dtypes)}")
        if floats and not dtypes[0].startswith(("float", "bfloat")):
            raise StreamError(f"{name} takes tiles of floats, not of {dtypes[0]}")
        return found

    return replace(function, result=result)


def _by_row(name: str, call: Callable[..., np.ndarray], **more: Any) -> TileFunction:
    def result(a: DataType) -> Tile:
        (tile,) = _tiles(name, a)
        return Tile(tile.rows, 1, tile.dtype)

    return TileFunction(name, call, result, lambda a: product((a.rows, a.columns)), **more)


def _tiles(name: str, *arguments: DataType) -> list[Tile]:
    for argument in arguments:
        if not isinstance(argument, Tile):
            raise StreamError(f"{name} takes tiles, not {argument}")
    return list(arguments)  # type: ignore[arg-type]


def _wider(name: str, sizes: list[Size]) -> Size:
    """Return the size of what tiles of those sizes make together, where a size of 1 is repeated."""
    found = sizes[0]
    for size in sizes[1:]:
        if found == 1:
            found = size
        elif size != 1 and differ(found, size):
            raise StreamError(f"{name}: sizes {found} and {size} don't fit")
    return as_size(name, found, least=0)
