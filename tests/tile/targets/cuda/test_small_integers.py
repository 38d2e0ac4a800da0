"""Casts of integers of few values to 16-bit floats: which are made by adding, and that these are the same numbers."""

import doctest

import numpy as np
import pytest
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.tile.targets.cuda.instructions import small_integers

AMPERE = Target({"kind": "cuda", "arch": "sm_80"})


def text(source, target, value):
    """The lowered program that stores `value` of an element of a tensor, cast."""

    @T.prim_func
    def func(A: T.Buffer((64,), source), B: T.Buffer((64,), target)):
        with tile.kernel(1), tile.parallel(64) as i:
            B[i] = T.cast(value(A[i]), target)

    return tile.lower(func, AMPERE).script()


def code(byte):
    return T.bitwise_and(T.shift_right(T.cast(byte, "int32"), 4), T.int32(15)) - 8


@pytest.mark.parametrize(
    "source, target, value, adds",
    [
        ("uint8", "float16", lambda x: x, True),
        ("int8", "float16", lambda x: x, True),
        ("uint8", "bfloat16", lambda x: x, False),  # 256 values: bfloat16 has 128 of one exponent
        ("uint8", "bfloat16", code, True),
        ("int32", "float16", lambda x: x, False),
        ("int32", "float16", lambda x: x % 1024 - 1000, True),
        ("int32", "float16", lambda x: x % 1024 + 1025, False),  # the least less 1024 is negative
        ("uint8", "float32", code, False),
        ("float32", "float16", lambda x: x, False),
    ],
)
def test_which_casts_are_additions(source, target, value, adds):
    assert ("reinterpret" in text(source, target, value)) == adds


@pytest.mark.parametrize("dtype", small_integers.UNITS)
def test_they_are_the_same_numbers(dtype):
    bits, unit = small_integers.UNITS[dtype]
    for low in range(-unit, unit + 1):
        numbers = np.arange(low, low + unit)
        floats = (numbers + (bits - low)).astype("uint16").view(np.dtype(dtype))
        assert ((floats - np.array(unit - low, np.dtype(dtype))).astype("int64") == numbers).all(), low


def test_the_examples():
    assert doctest.testmod(small_integers).failed == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", small_integers.UNITS)
def test_on_the_gpu(dtype, cuda):
    _, unit = small_integers.UNITS[dtype]

    @T.prim_func
    def func(A: T.Buffer((4 * unit,), "int32"), B: T.Buffer((4 * unit,), dtype)):
        with tile.kernel(1), tile.parallel(4 * unit) as i:
            B[i] = T.cast(tirx.FloorMod(A[i], T.int32(unit)) - unit // 3, dtype)

    numbers = np.arange(-2 * unit, 2 * unit, dtype="int32")
    out = np.full(4 * unit, np.nan, np.dtype(dtype))
    tile.compile(func, "cuda")(numbers, out)
    assert (out.astype("int64") == numbers % unit - unit // 3).all()
