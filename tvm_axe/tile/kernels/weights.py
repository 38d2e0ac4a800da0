"""Weights of few bits: how they lie in memory, and the numbers that their codes stand for.

A byte has one weight, or the codes of two, that of an even column in its low four bits. A code is an integer, or a
float of four bits, as MXFP4 has them: a sign, two bits of exponent and one of mantissa.

>>> decoded({"B": np.array([[0xF1]], "uint8"), "scales": np.ones((1, 1))}, FP4, group=2, middle=0)
array([[ 0.5, -6. ]])

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023, sections 5.3.3, 5.4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from tvm.script import tirx as T

from tvm_axe.errors import TileError

OF_BYTES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
"""Types of weights of eight bits."""

FLOAT4 = "float4_e2m1fn"
"""The type of weights that are floats of four bits."""

EXPONENTS = "uint8"
"""The type of scales that are powers of two: of s it is 2^(s - 127), for s from 1 to 254, MX's e8m0."""

_MIDDLE = 8

_PLACES = {"float16": (9, 14), "bfloat16": (6, 126)}
"""By type where a code's exponent and mantissa go, and the power of two that the number is too small by, then."""


class Stored(NamedTuple):
    """How weights lie in memory.

    Attributes
    ----------
    dtype : str
        The type of the tensor.
    each : int
        How many weights an element of it has.
    kind : str
        The type of a weight.
    """

    dtype: str
    each: int
    kind: str

    @property
    def is_integer(self) -> bool:
        """Whether weights are integers, of which one may stand for zero."""
        return not self.kind.startswith("float")

    @property
    def middle(self) -> int:
        """What stands for zero where neither a tensor nor the problem says so."""
        return _MIDDLE if self == CODES else 0

    def number(self, raw: Any, row: Any, column: Any, dtype: str) -> Any:
        """The weight of a row and column as it is stored: of eight bits; a code, of 32; or a float of `dtype`."""
        if self.each == 1:
            return raw[row, column]
        byte = raw[row, column // 2]
        return _float4(byte, column, dtype) if self == FP4 else code_of(byte, column)


CODES = Stored("uint8", 2, "uint4")
"""Two integers of four bits in each byte."""

FP4 = Stored("uint8", 2, FLOAT4)
"""Two floats of four bits in each byte."""


def stored_as(weights: str | None) -> Stored:
    """How weights of a type lie in memory; without one they are codes of four bits.

    Raises
    ------
    TileError
        It is none of `OF_BYTES` and `FLOAT4`.
    """
    if weights is None:
        return CODES
    if weights not in (*OF_BYTES, FLOAT4):
        raise TileError(f"weights is one of {', '.join((*OF_BYTES, FLOAT4))}, got {weights}")
    return FP4 if weights == FLOAT4 else Stored(weights, 1, weights)


def code_of(byte: Any, column: Any) -> Any:
    """The code of a column in the byte that has it."""
    return T.bitwise_and(T.shift_right(T.cast(byte, "int32"), column % 2 * 4), T.int32(15))


def _float4(byte: Any, column: Any, dtype: str) -> Any:
    """The float of a column, of 16 bits: its bits where that type has them, times what it is too small by then.

    Its exponents begin at that of the type's smallest numbers, so that they, which have no leading one, are right too.
    """
    (place, less), first = _PLACES[dtype], column % 2 * 4
    bits = T.cast(byte, "int32")
    magnitude = T.bitwise_and(T.shift_right(bits, first), T.int32(7)) * T.int32(1 << place)
    sign = T.bitwise_and(T.shift_right(bits, first + 3), T.int32(1)) * T.int32(1 << 15)
    return T.reinterpret(dtype, T.cast(magnitude + sign, "uint16")) * T.FloatImm(dtype, 2.0**less)


def scale_of(scale: Any, dtype: str) -> Any:
    """A scale as a number of `dtype`, which is bfloat16 or float32 where scales are exponents."""
    if str(scale.ty) != EXPONENTS:
        return T.cast(scale, dtype)
    bits = T.cast(scale, "int32")
    if dtype == "bfloat16":
        return T.reinterpret(dtype, T.cast(bits * T.int32(1 << 7), "uint16"))
    return T.reinterpret("float32", bits * T.int32(1 << 23))


@dataclass(frozen=True)
class Weights:
    """The weights of a product, and what a program makes of a tile of them.

    Attributes
    ----------
    stored : Stored
        How they lie in memory.
    n, k : int
        How many rows there are, and how many weights a row has.
    group : int
        How many neighbours along k share a scale and what stands for zero.
    dtype, scale_dtype : str
        Of what is multiplied, and of scales.
    zeros : bool
        Whether a tensor has what stands for zero in each group.
    of_zero : int
        What stands for it elsewhere.
    """

    stored: Stored
    n: int
    k: int
    group: int
    dtype: str
    scale_dtype: str
    zeros: bool
    of_zero: int

    def unscaled(self, raw: Any, y: Any, x: Any, point: Any, made: str) -> Any:
        """The weight at row `y` and column `x` of a tile `raw`, less what stands for zero, of type `made`.

        A float is of `dtype`. `point` is the tensor's element that stands for zero, None where none does.
        """
        number = self.stored.number(raw, y, x, self.dtype)
        if self.stored == FP4:
            return number
        if point is not None:
            return T.cast(number, made) - T.cast(point, made)
        if self.stored.each == 2:
            return T.cast(number - T.int32(self.of_zero), made)
        return T.cast(number, made) - T.cast(T.int32(self.of_zero), made) if self.of_zero else T.cast(number, made)

    def scaled(self, raw: Any, y: Any, x: Any, point: Any, scale: Any) -> Any:
        """The same weight times the tensor's element `scale`, of `dtype`."""
        # Either type has all integers up to 256: codes are made in pairs, and a point once for its group.
        made = self.scale_dtype if self.stored.each == 1 else self.dtype
        # Powers of two are bfloat16's, too, and scale it without rounding.
        powers = "bfloat16" if self.dtype == "bfloat16" else "float32"
        scaled = self.scale_dtype if self.scale_dtype != EXPONENTS else powers
        return T.cast(T.cast(self.unscaled(raw, y, x, point, made), scaled) * scale_of(scale, scaled), self.dtype)


def decoded(arrays: Mapping[str, np.ndarray], stored: Stored, group: int, middle: int) -> np.ndarray:
    """V of B, scales and points, (n, k) in float64: weights less their zeros, times the scales, not rounded."""
    numbers, scales = arrays["B"], arrays["scales"]
    if stored.each == 2:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(len(numbers), -1)
    if stored == FP4:
        numbers = numbers.view(ml_dtypes.float4_e2m1fn)
    if scales.dtype == EXPONENTS:
        scales = np.exp2(scales.astype("float64") - 127)
    zeros = arrays["points"].astype("float64").T.repeat(group, axis=1) if "points" in arrays else middle
    return (numbers.astype("float64") - zeros) * scales.astype("float64").T.repeat(group, axis=1)
