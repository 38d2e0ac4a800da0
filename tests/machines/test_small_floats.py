"""Casts from and to floats of eight bits on a CPU: those of ml_dtypes, for all of 256 numbers and for any float32."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm import te

import tvm_axe as axe

TYPES = ["float8_e4m3fn", "float8_e4m3", "float8_e5m2"]


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    source = te.placeholder(array.shape, str(array.dtype), name="source")
    func = te.create_prim_func([source, te.compute(array.shape, lambda i: source[i].astype(dtype))])
    return axe.compile(func, work_dir=None)(array)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("source", [*TYPES, "float8_e8m0fnu"])
def test_all_numbers_are_widened(source: str, dtype: str) -> None:
    array = np.arange(256).astype("uint8").view(np.dtype(source))
    with np.errstate(over="ignore", invalid="ignore"):
        want = array.astype("float32").astype(dtype)
    np.testing.assert_array_equal(cast(array, dtype).astype("float64"), want.astype("float64"))


@pytest.mark.parametrize("source", ["float32", "float16"])
@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_are_rounded_to_the_nearest(dtype: str, source: str) -> None:
    rng = np.random.default_rng(6)
    own = np.arange(256).astype("uint8").view(np.dtype(dtype)).astype("float32")
    finite = np.sort(own[np.isfinite(own)])
    between = (finite[1:] + finite[:-1]) / 2  # of which the even neighbour is the result
    scales = np.exp2(rng.integers(-24, 18, 2000)).astype("float32")
    drawn = rng.standard_normal(2000, dtype="float32") * scales
    edges = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 464, 465, 61440, 61441, 1e30, 1e-40], "float32")
    with np.errstate(over="ignore"):
        array = np.concatenate([own, between, np.nextafter(between, np.float32(0)), drawn, edges]).astype(source)
        want = array.astype("float32").astype(dtype)
    got = cast(array, dtype)
    assert str(got.dtype) == dtype == want.dtype.name and ml_dtypes.finfo(dtype).bits == 8
    np.testing.assert_array_equal(got.astype("float32"), want.astype("float32"))
    signs = np.signbit(got.astype("float32")) == np.signbit(want.astype("float32"))
    assert signs[~np.isnan(want.astype("float32"))].all()
