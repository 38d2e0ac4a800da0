"""Casts of integers of few values to 16-bit floats: which are made by adding, and that these are the same numbers."""

import re

import numpy as np
import pytest
from tvm import ir, sym, tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.stream.tiled.expressions import Evaluator
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
        ("int32", "float16", lambda x: x % 256, True),
        ("int32", "float16", lambda x: x % 256 - 128, True),
        ("int32", "bfloat16", lambda x: x % 256, False),  # 256 values: bfloat16 has 128 of one exponent
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


def pairs(value, columns=2, dtype="bfloat16"):
    """The lowered program that decodes a left operand, of which a thread has neighbours along k."""

    total = "int32" if dtype == "int8" else "float32"

    @T.prim_func
    def func(A: T.Buffer((64, 128 // columns), "uint8"), B: T.Buffer((64, 128), dtype), C: T.Buffer((64, 64), total)):
        with tile.kernel(1):
            raw = tile.shared((64, 128 // columns), "uint8")
            a, b = tile.fragment((64, 128), dtype), tile.shared((64, 128), dtype)
            c = tile.fragment((64, 64), total)
            tile.copy(A[0, 0], raw)
            tile.copy(B[0, 0], b)
            tile.fill(c, 0)
            with tile.parallel(64, 128) as (i, j):
                a[i, j] = T.cast(value(T.cast(raw[i, j // columns], "int32"), j), dtype)
            tile.gemm(a, b, c, transpose_b=True)
            tile.copy(c, C[0, 0])

    return tile.lower(func, Target({"kind": "cuda", "arch": "sm_90a"})).script()


@pytest.mark.parametrize(
    "value, columns, both",
    [
        (lambda byte, j: (byte >> (j % 2 * 4) & 15) - 8, 2, True),
        (lambda byte, j: (byte >> (j % 2 * 4) & 15) + (byte & 3), 2, False),  # two terms take bits
        (lambda byte, j: (byte >> (j % 2 * 4) & 7) - 4, 2, True),
        (lambda byte, j: (byte >> (j % 4 * 2) & 3) - 2, 4, False),  # of four a byte two aren't the lowest
        (lambda byte, j: (byte >> (4 - j % 2 * 4) & 15) - 8, 2, False),  # the first has the upper bits
        (lambda byte, j: (byte & 15) - 8, 1, False),
    ],
)
def test_which_codes_are_made_in_pairs(value, columns, both):
    assert ("axe_upper_half" in pairs(value, columns)) == both


def test_a_number_that_may_carry_is_made_by_itself():
    """A cast of the user's own wraps, and a pair of such would reach from one into the other."""
    keep = pairs(lambda byte, j: (byte >> (j % 2 * 4) & 15) - 8)
    wraps = pairs(lambda byte, j: T.cast((byte >> (j % 2 * 4) & 15) - 8, "uint16") & 127)
    assert "axe_upper_half" in keep and "axe_upper_half" not in wraps


@pytest.mark.parametrize("least, less", [(0x6400, False), (0x6400 - 8, False), (0x6400, True)])
def test_the_bits_of_a_pair(least, less):
    """Of every byte, and of every number less."""
    byte, zero = tirx.Var("byte", "uint8"), tirx.Var("zero", "uint8")
    numbers = [(tirx.Cast("int32", byte) >> tirx.const(shift, "int32") & 15) + least for shift in (0, 4)]
    numbers = [number - tirx.Cast("int32", zero) if less else number for number in numbers]
    word = small_integers._word(*map(small_integers._codes, numbers), sym.Analyzer())
    evaluated = Evaluator({byte: np.arange(256)[:, None], zero: np.arange(256)[None]})
    lower, upper = map(evaluated, numbers)
    np.testing.assert_array_equal(of_pair(word, evaluated), lower + (upper << 16))


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize(
    "mask, first, last, both",
    [
        (15, 0, 12, True),
        (7, 0, 12, True),
        (15, 0, 16, False),
        (15, -4, 8, False),
        (255, 0, 8, True),
        (255, 0, 12, False),
    ],
)
def test_the_bits_of_a_pair_in_a_word(mask, first, last, both, wraps):
    """Those 16 apart, at any place that is known to leave them in the word; its sign is one of the bits."""
    word, place = tirx.Var("word", "int32"), tirx.Var("place", "int32")
    analyzer = sym.Analyzer()
    analyzer.bind(place, ir.Range(first // 4, last // 4 + 1))
    shifts = [place * 4 + apart for apart in (0, 16)]
    numbers = [(word >> (shift & 31 if wraps else shift) & mask) + 0x4300 for shift in shifts]
    found = small_integers._word(*map(small_integers._codes, numbers), analyzer)
    assert (found is not None) == both
    if found is not None:
        words = np.random.default_rng(0).integers(-(2**31), 2**31, (1000, 1))
        evaluated = Evaluator({word: words, place: np.arange(last // 4 + 1)[None]})
        lower, upper = (evaluated(number) for number in numbers)
        np.testing.assert_array_equal(of_pair(found, evaluated), lower + (upper << 16))


@pytest.mark.parametrize("places", [(6, 15), (9, 15), (6, 8), (6, 2)])
def test_floats_of_four_bits_in_pairs(places):
    """Magnitudes and signs, at a place each; where they would overlap, or nothing has the room, each is by itself."""
    byte = tirx.Var("byte", "uint8")

    def number(first):
        bits = tirx.Cast("int32", byte)
        return (bits >> first & 7) * (1 << places[0]) + (bits >> first + 3 & 1) * (1 << places[1])

    numbers = [number(tirx.const(first, "int32")) for first in (0, 4)]
    word = small_integers._word(*map(small_integers._codes, numbers), sym.Analyzer())
    assert (word is not None) == (places in ((6, 15), (9, 15)))
    if word is not None:
        evaluated = Evaluator({byte: np.arange(256)})
        lower, upper = map(evaluated, numbers)
        np.testing.assert_array_equal(of_pair(word, evaluated) & 0xFFFFFFFF, lower + (upper << 16))


def words(value):
    """The lowered program that decodes a left operand of eight codes a word, in the order in which threads hold it."""

    @T.prim_func
    def func(A: T.Buffer((64, 16), "uint32"), B: T.Buffer((64, 128), "bfloat16"), C: T.Buffer((64, 64), "float32")):
        with tile.kernel(1):
            raw = tile.shared((64, 16), "uint32")
            a, b = tile.fragment((64, 128), "bfloat16"), tile.shared((64, 128), "bfloat16")
            c = tile.fragment((64, 64), "float32")
            tile.copy(A[0, 0], raw)
            tile.copy(B[0, 0], b)
            tile.fill(c, 0)
            with tile.parallel(64, 128) as (i, j):
                word = T.meta_var(T.reinterpret("int32", raw[i, j // 32 * 4 + j % 8 // 2]))
                a[i, j] = T.cast(value(word, j), "bfloat16")
            tile.gemm(a, b, c, transpose_b=True)
            tile.copy(c, C[0, 0])

    return tile.lower(func, Target({"kind": "cuda", "arch": "sm_90a"})).script()


def test_codes_of_a_word_are_made_in_pairs():
    """A code and the fourth behind it, whose bits are 16 apart; of neighbours each is made by itself."""
    apart = words(lambda word, j: (word >> (j % 32 // 16 * 8 + j % 16 // 8 * 4 + j % 2 * 16) & 15) - 8)
    neighbours = words(lambda word, j: (word >> (j % 32 // 16 * 16 + j % 16 // 8 * 8 + j % 2 * 4) & 15) - 8)
    assert "axe_upper_half" in apart and "axe_upper_half" not in neighbours


def of_pair(word, evaluated):
    """What a pair is: of a device function the bits of a mask, and others."""
    if not isinstance(word, ir.Call):
        return evaluated(word)
    mask, others = (int(text, 16) for text in re.findall(r"axe_bits_(\w+)_(\w+)", str(word))[0])
    return evaluated(word.args[1]) & mask | others


@pytest.mark.parametrize(
    "value, columns, four",
    [
        (lambda byte, j: (byte >> (j % 2 * 4) & 15) - 8, 2, True),
        (lambda byte, j: (byte >> (j % 2 * 4) & 15) + 100, 2, True),
        (lambda byte, j: (byte >> (j % 2 * 4) & 7) - 4, 2, False),  # a float may be
        (lambda byte, j: (byte >> (j % 2 * 4) & 15) + (byte & 3), 2, False),
        (lambda byte, j: (byte >> (j % 2 * 4) & 15) - j % 2, 2, False),  # the second of each has less
        (lambda byte, j: (byte >> (j % 4 * 2) & 3) - 2, 4, False),
        (lambda byte, j: (byte & 15) - 8, 1, False),
    ],
)
def test_which_codes_are_made_in_quads(value, columns, four):
    assert ("axe_in_place" in pairs(value, columns, "int8")) == four


def test_integers_that_wrap_are_made_by_themselves():
    assert "axe_in_place" not in pairs(lambda byte, j: (byte >> (j % 2 * 4) & 15) + 113, 2, "int8")
    assert "axe_in_place" not in pairs(lambda byte, j: (byte >> (j % 2 * 4) & 15) - 128, 2, "int8")


@pytest.mark.parametrize(
    "dtype, name", [("float8_e4m3fn", "axe_e4m3_less_1032"), ("float8_e5m2", "axe_e5m2_less_1032")]
)
def test_floats_of_eight_bits_are_made_in_quads(dtype, name):
    assert name in pairs(lambda byte, j: (byte >> (j % 2 * 4) & 15) - 8, 2, dtype)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("less", [0, 8, None])
def test_the_bits_of_a_quad(dtype, less):
    """Of all pairs of bytes, less a number or what a variable has of 0 to 15."""
    first, second, zero = (tirx.Var(name, "uint8") for name in ("first", "second", "zero"))
    taken = tirx.Cast("int32", zero) & 15 if less is None else less
    codes = [
        tirx.Cast("int32", byte) >> tirx.const(shift, "int32") & 15 for byte in (first, second) for shift in (0, 4)
    ]
    word = small_integers._quad(dtype, [code - taken for code in codes], sym.Analyzer())
    every = np.arange(256)
    evaluated = Evaluator({first: every[:, None, None], second: every[None, :, None], zero: np.arange(16)})
    numbers = [evaluated(code - taken) for code in codes]
    shape = np.broadcast_shapes(*(np.shape(number) for number in numbers))
    expected = np.stack([np.broadcast_to(number, shape) for number in numbers], axis=-1)
    if dtype == "int8":
        found = np.ascontiguousarray(evaluated(word.args[1]).astype("uint32"))[..., None].view("int8")
    else:
        (unit,) = {*re.findall(r"axe_e4m3_less_(\d+)", str(word))}
        both = [of_pair(each, evaluated).astype("uint32")[..., None].view("float16") for each in word.args[1:3]]
        both = [np.broadcast_to(each, (*shape, 2)) for each in both]
        found = (np.concatenate(both, axis=-1) - np.float16(int(unit))).astype(np.dtype(dtype)).astype("int64")
    np.testing.assert_array_equal(found, expected)


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
