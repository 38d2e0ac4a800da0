"""What streams carry and how long they are: tiles, selectors, buffers; dims that are static, dynamic or ragged.

A stream's rank and data type are fixed when a program is built; the size of a dim may be known then (an int), only when
the program runs (a symbol), or differ from place to place (ragged). Dims are written outermost first.

>>> B = sympy.Symbol("B")
>>> stream = StreamType((B, ragged("L"), 4), Tile(1, 64, "bfloat16"))
>>> print(stream)
[B, ~L, 4] of Tile(1, 64, bfloat16)
>>> stream.rank, stream.count
(3, 4*L)

A ragged dim's symbol stands for the sum of its sizes over all the outer dims, so that a ragged dim absorbs them: above,
there are L lists of 4 tiles whatever B is.

Source: Streaming Tensor Programs (arXiv 2511.07776), sections 3.1 and 3.2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import sympy

from tvm_axe.errors import StreamError
from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.layout.dtypes import dtype_bits

Size: TypeAlias = int | sympy.Expr
"""A number that is known when the program is built, or an expression of what is known when it runs."""
AnyLayout: TypeAlias = Layout | ComposeLayout


@dataclass(frozen=True)
class Dim:
    """A dim of a stream.

    Attributes
    ----------
    size : int or sympy.Expr
        How many elements; of a ragged dim, the sum over all the outer dims.
    ragged : bool
        Whether it differs between the positions of the outer dims.

    Raises
    ------
    StreamError
        If the size is no number of elements, or a ragged dim has none.
    """

    size: Size
    ragged: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", as_size("dim", self.size, least=0))
        if self.ragged and self.static:
            raise StreamError(f"a ragged dim takes a symbol for the sum of its sizes, not the number {self.size}")

    @property
    def static(self) -> bool:
        """Whether the size is known when the program is built."""
        return isinstance(self.size, int)

    def __str__(self) -> str:
        return f"~{self.size}" if self.ragged else str(self.size)


def ragged(name: str) -> Dim:
    """Return a ragged dim with a symbol of that name for the sum of its sizes."""
    return Dim(symbol(name), ragged=True)


def symbol(name: str) -> sympy.Symbol:
    """Return the symbol of that name as this package makes them: a number of things."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


def as_size(what: str, value: object, least: int = 1) -> Size:
    """Return a number of elements as an int or an expression.

    Raises
    ------
    StreamError
        If it is neither, or less than `least`.
    """
    size = int(value) if isinstance(value, sympy.Integer) else value
    if isinstance(size, int) and not isinstance(size, bool) and size >= least:
        return size
    if isinstance(size, sympy.Expr):
        return size
    raise StreamError(f"{what} must be a whole number from {least} on or a sympy expression, not {value!r}")


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes; 1 of none."""
    found: Size = 1
    for size in sizes:
        found = found * size
    return as_size("product", found, least=0)


def differ(a: Size, b: Size) -> bool:
    """Return whether two sizes are surely not equal."""
    return a != b and bool(sympy.sympify(a - b).is_nonzero)


@dataclass(frozen=True)
class Tile:
    """A matrix of elements of one type.

    Attributes
    ----------
    rows, columns : int or sympy.Expr
        The shape; an expression where it is known only when the program runs.
    dtype : str
        The type of the elements.
    layout : Layout or ComposeLayout, optional
        The layout of the elements in on-chip memory; only static tiles have one.

    Raises
    ------
    StreamError
        If the shape is no shape, or the layout doesn't fit it.
    """

    rows: Size
    columns: Size
    dtype: str = "float32"
    layout: AnyLayout | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", as_size("rows", self.rows, least=0))
        object.__setattr__(self, "columns", as_size("columns", self.columns, least=0))
        if self.layout is not None:
            if not self.static:
                raise StreamError(f"{self}: a layout needs static rows and columns")
            if not self.layout.admits(self.shape):
                raise StreamError(f"{self}: layout {self.layout} doesn't place {math.prod(self.shape)} elements")

    @property
    def shape(self) -> tuple:
        """Rows and columns."""
        return (self.rows, self.columns)

    @property
    def static(self) -> bool:
        """Whether the shape is known when the program is built."""
        return isinstance(self.rows, int) and isinstance(self.columns, int)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return -(-dtype_bits(self.dtype) // 8)

    @property
    def bytes(self) -> Size:
        """Bytes of the tile."""
        return product((self.rows, self.columns, self.itemsize))

    def __str__(self) -> str:
        return f"Tile({self.rows}, {self.columns}, {self.dtype})"


@dataclass(frozen=True)
class Selector:
    """A choice among `outputs` streams: a multi-hot vector, whose value is the tuple of the numbers that are set."""

    outputs: int

    def __post_init__(self) -> None:
        as_size("outputs", self.outputs)

    @property
    def bytes(self) -> Size:
        """Bytes of the vector, a bit an output."""
        return -(-self.outputs // 8)

    def __str__(self) -> str:
        return f"Selector({self.outputs})"


@dataclass(frozen=True)
class Scalar:
    """A number: an address, a length, a mark of padding."""

    dtype: str = "int64"

    @property
    def bytes(self) -> Size:
        """Bytes of the number."""
        return -(-dtype_bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"Scalar({self.dtype})"


@dataclass(frozen=True, init=False)
class Buffer:
    """A reference to a tensor of tiles in on-chip memory.

    Attributes
    ----------
    tile : Tile
        What it holds.
    shape : tuple[Dim, ...]
        How many, outermost first.
    """

    tile: Tile
    shape: tuple[Dim, ...]

    def __init__(self, tile: Tile, shape: Sequence[Dim | Size]) -> None:
        object.__setattr__(self, "tile", tile)
        object.__setattr__(self, "shape", as_dims(shape))

    @property
    def bytes(self) -> Size:
        """Bytes of what it refers to; of a ragged buffer, of all the buffers of the stream."""
        return product((count(self.shape), self.tile.bytes))

    def __str__(self) -> str:
        return f"Buffer({show_dims(self.shape)} of {self.tile})"


@dataclass(frozen=True)
class Tuple:
    """Several values that travel together."""

    items: tuple[DataType, ...]

    @property
    def bytes(self) -> Size:
        """Bytes of them all."""
        return sum((item.bytes for item in self.items), 0)

    def __str__(self) -> str:
        return f"Tuple({', '.join(map(str, self.items))})"


DataType: TypeAlias = Tile | Selector | Scalar | Buffer | Tuple


def as_dims(shape: Sequence[Dim | Size]) -> tuple[Dim, ...]:
    """Return the dims of a shape whose regular ones may be given by their sizes."""
    if not isinstance(shape, Iterable):
        raise StreamError(f"a shape is a sequence of dims, such as ({shape},), not {shape!r}")
    return tuple(dim if isinstance(dim, Dim) else Dim(dim) for dim in shape)


def show_dims(dims: Sequence[Dim]) -> str:
    """Write dims as a type does."""
    return f"[{', '.join(map(str, dims))}]"


def count(dims: Sequence[Dim]) -> Size:
    """Return how many elements a tensor of these dims has; a ragged dim absorbs those outside of it."""
    found: Size = 1
    for dim in dims:
        found = dim.size if dim.ragged else product((found, dim.size))
    return found


def merged(dims: Sequence[Dim], outermost: bool) -> Dim:
    """Return the one dim that the dims become when they are flattened.

    Parameters
    ----------
    outermost : bool
        Whether there is no dim outside of them; if there is, a ragged dim among them makes the result ragged.
    """
    return Dim(count(dims), ragged=not outermost and any(dim.ragged for dim in dims))


@dataclass(frozen=True, init=False)
class StreamType:
    """A tensor of values, sent one after the other.

    Attributes
    ----------
    shape : tuple[Dim, ...]
        Outermost first; its length is the stream's rank. Sizes may be given instead of regular dims.
    data : Tile, Selector, Scalar, Buffer or Tuple
        What each element is.
    """

    shape: tuple[Dim, ...]
    data: DataType

    def __init__(self, shape: Sequence[Dim | Size], data: DataType) -> None:
        object.__setattr__(self, "shape", as_dims(shape))
        object.__setattr__(self, "data", data)
        if not self.shape:
            raise StreamError(f"a stream of {self.data} needs a shape of at least one dim")
        if self.shape[0].ragged:
            raise StreamError(f"shape {show_dims(self.shape)}: the outermost dim has one size, so it isn't ragged")

    @property
    def rank(self) -> int:
        """The number of dims; the whole stream is closed by the stop token of that number."""
        return len(self.shape)

    @functools.cached_property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """The symbols that are sizes of its dims, or the rows of its tiles."""
        sizes = [dim.size for dim in self.shape] + ([self.data.rows] if isinstance(self.data, Tile) else [])
        return tuple(size for size in sizes if isinstance(size, sympy.Symbol))

    @property
    def count(self) -> Size:
        """The number of elements in all."""
        return count(self.shape)

    @property
    def bytes(self) -> Size:
        """The bytes of all the elements."""
        return self.data.bytes if self.has_ragged_buffers else product((self.count, self.data.bytes))

    @property
    def has_ragged_buffers(self) -> bool:
        """Whether the elements are buffers whose size differs, so that their type counts all of them together."""
        return isinstance(self.data, Buffer) and any(dim.ragged for dim in self.data.shape)

    def __str__(self) -> str:
        return f"{show_dims(self.shape)} of {self.data}"


def shapes_differ(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Return whether two shapes surely differ: in rank, or in a dim whose sizes can't be equal."""
    if len(a) != len(b):
        return True
    return any(not (x.ragged or y.ragged) and differ(x.size, y.size) for x, y in zip(a, b))


def data_differ(a: DataType, b: DataType) -> bool:
    """Return whether two data types surely differ: in kind, in a dtype or in a size."""
    if isinstance(a, Tile) and isinstance(b, Tile):
        return a.dtype != b.dtype or differ(a.rows, b.rows) or differ(a.columns, b.columns)
    if isinstance(a, Buffer) and isinstance(b, Buffer):
        return data_differ(a.tile, b.tile) or shapes_differ(a.shape, b.shape)
    if isinstance(a, Tuple) and isinstance(b, Tuple):
        return len(a.items) != len(b.items) or any(map(data_differ, a.items, b.items))
    return a != b
