"""Numbers from one type to another, the narrow floats among them.

Numbers narrower than float32 are computed with in float32, and rounded where they are stored or cast. Upstream's own
conversions leave the rounding to bfloat16 out where a value stays in the function, and those of 8-bit floats are wrong
for zeros, subnormal numbers and NaN, and fail on vectors. So these are arithmetic on bits; values may be vectors.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from tvm_axe.machines.small_floats import FLOAT8, dtype_like, narrowed, uint_like, widened

NARROW = ("float16", "bfloat16", *FLOAT8)
"""The types that are computed with in float32."""


def compute_dtype(dtype: str) -> str:
    """The type that elements of `dtype` are computed with."""
    return "float32" if dtype in NARROW else dtype


def convert(value: Any, dtype: str) -> Any:
    """`value` as `dtype`, neither of which is narrow."""
    return value if _element(value) == dtype else T.Cast(dtype_like(dtype, value), value)


def widen(value: Any) -> Any:
    """What is loaded from memory, in the type that it is computed with."""
    dtype = _element(value)
    return of_bits(value, dtype) if dtype in (*FLOAT8, "bfloat16") else convert(value, compute_dtype(dtype))


def of_bits(bits: Any, dtype: str) -> Any:
    """The number of the narrow `dtype` that has some bits, integers of its width, in the type it is computed with."""
    if dtype in FLOAT8:
        return widened(T.Cast(dtype_like("uint32", bits), T.reinterpret(dtype_like("uint8", bits), bits)), dtype)
    unsigned = T.reinterpret(dtype_like("uint16", bits), bits)
    if dtype == "bfloat16":
        shifted = T.Cast(dtype_like("uint32", bits), unsigned) << uint_like(16, bits)
        return T.reinterpret(dtype_like("float32", bits), shifted)
    return convert(T.reinterpret(dtype_like(dtype, bits), unsigned), "float32")


def bits_of(value: Any, dtype: str) -> Any:
    """The bits of a number of the narrow `dtype` that is computed with as another type, as unsigned integers."""
    if dtype in FLOAT8:
        return T.Cast(dtype_like("uint8", value), narrowed(value, dtype, saturating=True))
    if dtype == "bfloat16":
        return T.Cast(dtype_like("uint16", value), _to_bfloat16(value) >> uint_like(16, value))
    return T.reinterpret(dtype_like("uint16", value), convert(value, dtype))


def narrow(value: Any, dtype: str) -> Any:
    """A number of the type that `dtype` is computed with, as `dtype`: rounded to the nearest, ties to even.

    8-bit floats saturate, as a GPU's conversions do.
    """
    if dtype in (*FLOAT8, "bfloat16"):
        return T.reinterpret(dtype_like(dtype, value), bits_of(value, dtype))
    return convert(value, dtype)


def rounded(value: Any, dtype: str) -> Any:
    """The number of the narrow `dtype` that is nearest to a float32, still as a float32."""
    if dtype in FLOAT8:
        return widened(narrowed(value, dtype, saturating=True), dtype)
    if dtype == "bfloat16":
        return T.reinterpret(dtype_like("float32", value), _to_bfloat16(value) & uint_like(0xFFFF0000, value))
    return convert(convert(value, dtype), "float32")


def _to_bfloat16(value: Any) -> Any:
    """Bits whose upper half is the bfloat16 nearest to a float32; a NaN stays one."""
    bits = T.reinterpret(dtype_like("uint32", value), value)
    odd = (bits >> uint_like(16, value)) & uint_like(1, value)
    quiet = bits | uint_like(0x400000, value)
    return T.Select(
        (bits & uint_like(0x7FFFFFFF, value)) > uint_like(0x7F800000, value),
        quiet,
        bits + odd + uint_like(0x7FFF, value),
    )


def _element(value: Any) -> str:
    return str(value.ty.dtype).partition("x")[0]
