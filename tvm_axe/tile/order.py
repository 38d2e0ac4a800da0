"""The words of order within a row: `argmax`, `argmin`, `sort`, `top_k` and `cumsum` (`tvm_axe.tile.language`).

They give an element's place in its row as an int32, and may give its value with it. The eight largest of each row, the
first of equals first:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def eight(X: T.Buffer((64, 256), "float32"), best: T.Buffer((64, 8), "float32"), at: T.Buffer((64, 8), "int32")):
...     with tile.kernel(16) as i:
...         x = tile.fragment((4, 256), "float32")
...         values = tile.fragment((4, 8), "float32")
...         places = tile.fragment((4, 8), "int32")
...         tile.copy(X[i * 4, 0], x)
...         tile.top_k(x, values, places)
...         tile.copy(values, best[i * 4, 0])
...         tile.copy(places, at[i * 4, 0])
"""

from __future__ import annotations

from typing import Any

from tvm_axe.errors import TileError
from tvm_axe.tile.calls import call

CUMSUM = "axe.cumsum"
"""Name of the call that `cumsum` becomes: of the axis, `reverse` and `exclusive`, then of dst and src."""

ORDERS = ("axe.argmax", "axe.argmin", "axe.sort", "axe.top_k")
"""Names of the calls that the others become: of the axis, whether the largest come first, and which results there are
(`VALUES` and `INDICES`, added up), then of these and of src."""

VALUES, INDICES = 1, 2


def argmax(src: Any, indices: Any, axis: int = -1, *, values: Any = None) -> Any:
    """Where along `axis` the largest element is: the first of equal ones, and the first NaN before all else.

    Parameters
    ----------
    src : Buffer or BufferRegion
        A tile on chip, of a type of up to 32 bits.
    indices : Buffer or BufferRegion
        A tile of int32, of the shape without the axis; the place is counted from where `src` begins.
    axis : int
        The axis along which the element is searched.
    values : Buffer or BufferRegion, optional
        A tile of `src`'s type and `indices`' shape for the largest element itself, a zero of either sign as 0.

    Raises
    ------
    TileError
        A side is no tile and no slice of one.

    Notes
    -----
    Equal elements and NaN are numpy's ``argmax``'s.
    """
    return _order("axe.argmax", src, values, indices, axis, True)


def argmin(src: Any, indices: Any, axis: int = -1, *, values: Any = None) -> Any:
    """Where along `axis` the smallest element is, as `argmax` says of the largest; a NaN comes before all else, too."""
    return _order("axe.argmin", src, values, indices, axis, False)


def sort(src: Any, values: Any = None, indices: Any = None, *, descending: bool = False) -> Any:
    """Sort each row, the last dimension: equal elements stay in order, a NaN is larger than all else.

    Parameters
    ----------
    src : Buffer or BufferRegion
        A tile on chip, of a type of up to 32 bits.
    values : Buffer or BufferRegion, optional
        A tile of the same shape and type for the sorted rows, a zero of either sign as 0.
    indices : Buffer or BufferRegion, optional
        A tile of int32 of the same shape: where in its row of `src` each of them was.
    descending : bool
        Whether the largest come first.

    Raises
    ------
    TileError
        There is neither `values` nor `indices`, or a side is no tile and no slice of one.

    Notes
    -----
    A network without directions (Batcher, "Sorting networks and their applications", 1968).
    """
    return _order("axe.sort", src, values, indices, -1, descending)


def top_k(src: Any, values: Any = None, indices: Any = None, *, largest: bool = True) -> Any:
    """The k largest elements of each row in order, as the first k of `sort`; k is the extent of the results' rows.

    Parameters
    ----------
    src : Buffer or BufferRegion
        A tile on chip, of a type of up to 32 bits.
    values : Buffer or BufferRegion, optional
        A tile of `src`'s type, with k elements in the last dimension.
    indices : Buffer or BufferRegion, optional
        A tile of int32, with as many: where in its row of `src` each of them was.
    largest : bool
        Whether it is the largest, and not the smallest; a NaN is larger than all else.

    Raises
    ------
    TileError
        There is neither `values` nor `indices`, or a side is no tile and no slice of one.
    """
    return _order("axe.top_k", src, values, indices, -1, largest)


def cumsum(src: Any, dst: Any, axis: int = -1, *, reverse: bool = False, exclusive: bool = False) -> Any:
    """Sums along `axis` of each element and those before it.

    Parameters
    ----------
    src, dst : Buffer or BufferRegion
        Two tiles of one shape on chip. 16-bit floats are summed in float32, and each sum is rounded once.
    axis : int
        The axis along which elements are summed.
    reverse : bool
        Whether it is those behind it that are summed, from the end.
    exclusive : bool
        Whether the element itself is left out, so that the first sum is 0.

    Raises
    ------
    TileError
        A side is no tile and no slice of one.
    """
    return call(CUMSUM, (axis, reverse, exclusive), (dst, src))


def _order(name: str, src: Any, values: Any, indices: Any, axis: int, descending: bool) -> Any:
    results = [side for side in (values, indices) if side is not None]
    if not results:
        raise TileError(f"{name.removeprefix('axe.')}: nothing to write; valid are values, indices, or both")
    which = VALUES * (values is not None) + INDICES * (indices is not None)
    return call(name, (axis, descending, which), (*results, src))
