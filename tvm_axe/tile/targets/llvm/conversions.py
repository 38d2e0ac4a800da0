"""Numbers from one type to another, the narrow floats among them.

Numbers narrower than float32 are computed with in float32, and rounded where they are stored or cast. Upstream's own
conversions leave the rounding to bfloat16 out where a value stays in the function, and those of 8-bit floats are wrong
for zeros, subnormal numbers and NaN, and fail on vectors. So these are arithmetic on bits; values may be vectors.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

FLOAT8 = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}
"""The 8-bit floats: bits of the mantissa, the exponent's bias."""

NARROW = ("float16", "bfloat16", *FLOAT8)
"""The types that are computed with in float32."""


def compute_dtype(dtype: str) -> str:
    """The type that elements of `dtype` are computed with."""
    return "float32" if dtype in NARROW else dtype


def convert(value: Any, dtype: str) -> Any:
    """`value` as `dtype`, neither of which is narrow."""
    return value if _element(value) == dtype else T.Cast(_lanes(dtype, value), value)


def widen(value: Any) -> Any:
    """What is loaded from memory, in the type that it is computed with."""
    dtype = _element(value)
    if dtype in FLOAT8:
        return _from_float8(T.Cast(_lanes("uint32", value), T.reinterpret(_lanes("uint8", value), value)), dtype)
    if dtype == "bfloat16":
        bits = T.Cast(_lanes("uint32", value), T.reinterpret(_lanes("uint16", value), value))
        return T.reinterpret(_lanes("float32", value), bits << _uint(16, value))
    return convert(value, compute_dtype(dtype))


def narrow(value: Any, dtype: str) -> Any:
    """A number of the type that `dtype` is computed with, as `dtype`: rounded to the nearest, ties to even.

    8-bit floats saturate, as a GPU's conversions do.
    """
    if dtype in FLOAT8:
        return T.reinterpret(_lanes(dtype, value), T.Cast(_lanes("uint8", value), _to_float8(value, dtype)))
    if dtype == "bfloat16":
        bits = _to_bfloat16(value) >> _uint(16, value)
        return T.reinterpret(_lanes("bfloat16", value), T.Cast(_lanes("uint16", value), bits))
    return convert(value, dtype)


def rounded(value: Any, dtype: str) -> Any:
    """The number of the narrow `dtype` that is nearest to a float32, still as a float32."""
    if dtype in FLOAT8:
        return _from_float8(_to_float8(value, dtype), dtype)
    if dtype == "bfloat16":
        return T.reinterpret(_lanes("float32", value), _to_bfloat16(value) & _uint(0xFFFF0000, value))
    return convert(convert(value, dtype), "float32")


def _to_bfloat16(value: Any) -> Any:
    """Bits whose upper half is the bfloat16 nearest to a float32; a NaN stays one."""
    bits = T.reinterpret(_lanes("uint32", value), value)
    odd = (bits >> _uint(16, value)) & _uint(1, value)
    quiet = bits | _uint(0x400000, value)
    return T.Select(
        (bits & _uint(0x7FFFFFFF, value)) > _uint(0x7F800000, value), quiet, bits + odd + _uint(0x7FFF, value)
    )


def _from_float8(bits: Any, dtype: str) -> Any:
    """The float32 that an 8-bit float stands for: shifted into place, the exponent is wrong by a power of two."""
    mantissa, bias = FLOAT8[dtype]
    size = bits & _uint(0x7F, bits)
    shifted = T.reinterpret(_lanes("float32", bits), size << _uint(23 - mantissa, bits))
    number = shifted * _float(2.0 ** (127 - bias), bits)
    if dtype == "float8_e4m3fn":
        number = T.Select(size == _uint(0x7F, bits), _float(float("nan"), bits), number)
    else:
        beyond = T.Select(size == _uint(0x7C, bits), _float(float("inf"), bits), _float(float("nan"), bits))
        number = T.Select(size >= _uint(0x7C, bits), beyond, number)
    return T.Select(bits >= _uint(0x80, bits), -number, number)


def _to_float8(value: Any, dtype: str) -> Any:
    """The bits of the 8-bit float nearest to a float32.

    Rounding a normal number is integer arithmetic on the bits that stay; of a subnormal one the adder does it, which
    rounds what is below the last place of the large number that is added.
    """
    mantissa, bias = FLOAT8[dtype]
    drop = 23 - mantissa
    bits = T.reinterpret(_lanes("uint32", value), value)
    size = bits & _uint(0x7FFFFFFF, value)
    magnitude = T.reinterpret(_lanes("float32", value), size)
    limit = _float(tirx.max_value(dtype).value, value)
    capped = T.reinterpret(_lanes("uint32", value), T.Select(magnitude < limit, magnitude, limit))
    odd = (capped >> _uint(drop, value)) & _uint(1, value)
    halves = capped + odd + _uint((1 << (drop - 1)) - 1, value)
    normal = (halves >> _uint(drop, value)) - _uint((127 - bias) << mantissa, value)
    unit = _float(2.0 ** (1 - bias - mantissa + 23), value)  # its last place is the 8-bit float's smallest number
    subnormal = T.reinterpret(_lanes("uint32", value), magnitude + unit) - T.reinterpret(_lanes("uint32", value), unit)
    finite = T.Select(magnitude < _float(2.0 ** (1 - bias), value), subnormal, normal)
    found = T.Select(size > _uint(0x7F800000, value), _uint(0x7F, value), finite)
    return found | ((bits >> _uint(24, value)) & _uint(0x80, value))


def _element(value: Any) -> str:
    return str(value.ty.dtype).partition("x")[0]


def _lanes(dtype: str, like: Any) -> str:
    """`dtype` with as many lanes as a value."""
    lanes = int(like.ty.dtype.lanes)
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _uint(number: int, like: Any) -> Any:
    return _constant(T.uint32(number), like)


def _float(number: float, like: Any) -> Any:
    return _constant(T.float32(number), like)


def _constant(number: tirx.Expr, like: Any) -> Any:
    lanes = int(like.ty.dtype.lanes)
    return number if lanes == 1 else T.Broadcast(number, lanes)
