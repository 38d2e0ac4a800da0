"""The sizes of element types, by name, without the compiler."""

from __future__ import annotations

import re

from tvm_axe.errors import LayoutError

_DTYPE = re.compile(
    r"(?:bool|(?:u?int|b?float)(?P<bits>[1-9][0-9]{0,3})(?:_[a-z0-9]+)?)(?:x(?P<lanes>[1-9][0-9]{0,3}))?"
)


def dtype_bits(dtype: str) -> int:
    """Return the bits that one element of `dtype` takes in memory; a bool takes 8.

    >>> [dtype_bits(name) for name in ("float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "float16x2")]
    [32, 16, 8, 4, 8, 32]

    Raises
    ------
    LayoutError
        If `dtype` is not the name of a numeric type.
    """
    found = _DTYPE.fullmatch(dtype) if isinstance(dtype, str) else None
    if found is None:
        raise LayoutError(f"dtype must be the name of a numeric type such as 'float32' or 'bfloat16', not {dtype!r}")
    return int(found["bits"] or 8) * int(found["lanes"] or 1)


def dtype_bytes(dtype: str, elements: int) -> int:
    """Return the bytes that `elements` packed elements of `dtype` take, the last byte filled up."""
    return -(-elements * dtype_bits(dtype) // 8)
