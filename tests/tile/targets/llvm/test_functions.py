"""Functions and conversions that vectors do, against numpy in float64."""

import math

import ml_dtypes
import numpy as np
import pytest
import tvm
from on_cpu import aligned, poison, run, target
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.tile import read
from tvm_axe.tile.targets import llvm as cpu

EXACT = {
    "exp": np.exp,
    "exp2": np.exp2,
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


def apply(name, size):
    function = getattr(T, name)

    @T.prim_func
    def applies(A: T.Buffer((size,), "float32"), B: T.Buffer((size,), "float32")):
        with tile.kernel(1) as _:
            t = tile.fragment((size,), "float32")
            tile.copy(A, t)
            with tile.parallel(size) as i:
                t[i] = function(t[i])
            tile.copy(t, B)

    return applies


@pytest.mark.parametrize("name", EXACT)
def test_functions_are_right_to_a_few_units_in_the_last_place(name):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-s, s, 2000) for s in (1e-6, 0.1, 1, 5, 20, 87, 126)]).astype("float32")
    x = np.abs(x) + np.float32(1e-30) if name == "rsqrt" else x
    with np.errstate(all="ignore"):
        want = EXACT[name](x.astype("float64"))
    kept = np.abs(want) < 3e38
    _, found = run(apply(name, len(x)), x, poison(x.shape))
    spacing = np.spacing(np.abs(want[kept]).astype("float32")).astype("float64")
    tiny = np.abs(want[kept]) < 2.0**-126  # such results are 0
    error = np.abs(found[kept] - want[kept]) / spacing
    assert error[~tiny].max() <= 6
    assert np.abs(found[kept])[tiny].max(initial=0) < 2.0**-126


@pytest.mark.parametrize("name", ["exp", "exp2", "tanh", "erf", "sigmoid"])
def test_functions_of_what_is_no_number_or_beyond_all(name):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, 200.0, -200.0, 3e38, -3e38], "float32")
    _, found = run(apply(name, len(x)), x, poison(x.shape))
    with np.errstate(all="ignore"):
        want = EXACT[name](x.astype("float64")).astype("float32")
    want[np.abs(want) < 2.0**-126] = 0
    np.testing.assert_array_equal(found, want)


def test_no_element_is_computed_by_a_call():
    for name in ("exp", "exp2", "tanh", "erf", "sigmoid"):
        lowered = cpu.lower(cpu.decide(read(apply(name, 256)), target()))
        source = tvm.compile(lowered, target=target()).mod.inspect_source()
        assert f"@llvm.{name}" not in source and f"@{name}f(" not in source


# ---- 8-bit floats and bfloat16 ------------------------------------------------------------------------------------


def convert(source, dtype, size):
    @T.prim_func
    def converts(A: T.Buffer((size,), source), B: T.Buffer((size,), dtype)):
        with tile.kernel(1) as _:
            t = tile.shared((size,), source)
            tile.copy(A, t)
            tile.copy(t, B)

    return converts


@pytest.mark.parametrize("mcpu", [None, "x86-64-v3"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_8_bit_float_is_read_and_written_exactly(dtype, mcpu):
    every = np.arange(256, dtype="uint8").view(dtype)
    _, wide = run(convert(dtype, "float32", 256), every, poison((256,)), mcpu=mcpu)
    np.testing.assert_array_equal(wide, every.astype("float32"))
    _, back = run(convert("float32", dtype, 256), wide, poison((256,), dtype), mcpu=mcpu)
    number = np.isfinite(wide)
    np.testing.assert_array_equal(back.view("uint8")[number], every.view("uint8")[number])
    assert np.isnan(back.astype("float32")[np.isnan(wide)]).all()


@pytest.mark.parametrize("mcpu", [None, "x86-64-v3"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_rounding_is_to_the_nearest_even(dtype, mcpu):
    """All numbers of the type, those halfway between neighbours, and what is just beside them."""
    info = ml_dtypes.finfo(dtype)
    bits = np.arange(1 << info.bits, dtype=f"uint{info.bits}").view(dtype).astype("float32")
    numbers = np.unique(bits[np.isfinite(bits)])
    halves = (numbers[1:].astype("float64") + numbers[:-1]) / 2
    x = np.concatenate([numbers, halves, np.nextafter(halves.astype("float32"), np.float32(np.inf))]).astype("float32")
    _, found = run(convert("float32", dtype, len(x)), x, poison(x.shape, dtype), mcpu=mcpu)
    np.testing.assert_array_equal(found.astype("float32"), x.astype(dtype).astype("float32"))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_floats_saturate(dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.array([1e9, -1e9, np.inf, -np.inf, largest * 1.2, 1e-12, -1e-12, 0.0], "float32")
    _, found = run(convert("float32", dtype, 8), aligned(x), poison((8,), dtype))
    np.testing.assert_array_equal(
        found.astype("float32"), np.clip(x, -largest, largest).astype(dtype).astype("float32")
    )
