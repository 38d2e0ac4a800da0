"""Whether values are what a stream's type says they are.

Operators that only send values on can't make wrong ones, so values are checked where they come from: inputs, tensors,
initial values, padding, and what functions return.

>>> check = value_check(Tile(2, 3, "float16"), values=True)
>>> print(check(np.zeros((2, 3), "float16")))
None
>>> check(np.zeros((2, 3)))
'an array of (2, 3) float64'
>>> from tvm_axe.stream.types import as_dims
>>> lengths_fault([[1, 2], [3]], as_dims((2, 2)))
'lists of 1 and 2 elements where the dim is 2'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np

from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.stream.memory import Stored
from tvm_axe.stream.types import Buffer, DataType, Dim, Scalar, Selector, Tile, Tuple

Check: TypeAlias = Callable[[Any], str | None]
"""A function from a value to what it is, in words, if that isn't what it should be; else to None."""


def value_check(data: DataType, values: bool) -> Check:
    """Return the check of values of a type.

    Parameters
    ----------
    values : bool
        Whether tiles are arrays; in runs without values they are their (rows, columns).
    """
    if isinstance(data, Tile):
        return _array_check(data) if values else _shape_check(data)
    if isinstance(data, Scalar):
        return _number_check(data.dtype)
    if isinstance(data, Selector):
        return lambda value: None if _selects(value, data.outputs) else seen(value)
    if isinstance(data, Buffer):
        return lambda value: None if isinstance(value, Stored) else seen(value)
    if isinstance(data, Tuple):
        return _tuple_check([value_check(item, values) for item in data.items])
    raise TypeError(data)


def wanted(data: DataType) -> str:
    """Write what a value of a type must be."""
    return f"{data}, different ones of 0 to {data.outputs - 1}" if isinstance(data, Selector) else str(data)


def seen(value: Any) -> str:
    """Write what a value is: of an array its shape and type."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.shape} {value.dtype}"
    text = repr(value)
    if type(value) is tuple and len(value) == 2 and all(isinstance(size, Integral) for size in value):
        return f"the pair {value}"
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def lengths_fault(nested: Any, dims: Sequence[Dim]) -> str | None:
    """Return how long lists are, in words, if they aren't as long as dims say; else None.

    A static dim's lists have its size, and those of a dim that isn't ragged one size.
    """
    lists = [nested]
    for at, dim in enumerate(dims):
        if len(lists) == 1 and at == len(dims) - 1 and not dim.static:
            return None
        found = sorted({len(one) for one in lists})
        wrong = found and (found != [dim.size] if dim.static else not dim.ragged and len(found) > 1)
        if wrong:
            return f"lists of {' and '.join(map(str, found))} elements where the dim is {dim}"
        lists = [one for some in lists for one in some]
    return None


def _array_check(data: Tile) -> Check:
    dtype = np.dtype(data.dtype)
    rows, columns = (size if isinstance(size, int) else None for size in data.shape)

    def check(value: Any) -> str | None:
        if isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 2:
            here, across = value.shape
            if (rows is None or here == rows) and (columns is None or across == columns):
                return None
        return seen(value)

    return check


def _shape_check(data: Tile) -> Check:
    rows, columns = (size if isinstance(size, int) else None for size in data.shape)

    def check(value: Any) -> str | None:
        if type(value) is tuple and len(value) == 2:
            here, across = value
            if here == rows and across == columns:
                return None
            whole = isinstance(here, Integral) and isinstance(across, Integral) and min(int(here), int(across)) >= 0
            if whole and (rows is None or here == rows) and (columns is None or across == columns):
                return None
        return seen(value)

    return check


def _number_check(dtype: str) -> Check:
    if not dtype.startswith(("int", "uint", "bool")):
        return lambda value: None if isinstance(value, (Real, np.generic)) else seen(value)
    bits = dtype_bits(dtype)
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype.startswith("int") else (0, (1 << bits) - 1)
    if dtype == "bool":
        most = 1

    def check(value: Any) -> str | None:
        if type(value) is int and least <= value <= most:
            return None
        whole = isinstance(value, (Integral, np.bool_))
        return None if whole and least <= int(value) <= most else seen(value)

    return check


def _selects(value: Any, outputs: int) -> bool:
    if type(value) is tuple and len(value) == 1 and type(value[0]) is int:
        return 0 <= value[0] < outputs
    if not isinstance(value, (tuple, list)) or not all(isinstance(number, Integral) for number in value):
        return False
    return len(set(value)) == len(value) and all(0 <= number < outputs for number in value)


def _tuple_check(checks: list[Check]) -> Check:
    def check(value: Any) -> str | None:
        if type(value) is not tuple or len(value) != len(checks):
            return seen(value)
        for number, (one, part) in enumerate(zip(checks, value)):
            fault = one(part)
            if fault is not None:
                return f"{fault} as part {number}"
        return None

    return check
