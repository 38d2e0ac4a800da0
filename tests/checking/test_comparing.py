"""What is random, and what is right: rounding passes, a term or an element that is wrong doesn't."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.checking.comparing import difference, is_float, random_array, same_bytes, summing_slack

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_standard_normal_or_positive(dtype):
    rng = np.random.default_rng(0)
    normal = random_array(rng, (100, 200), np.dtype(dtype)).astype("float64")
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 1) < 0.05
    positive = random_array(rng, (100, 200), np.dtype(dtype), positive=True)
    assert positive.dtype == np.dtype(dtype)
    assert 0 < positive.astype("float64").max() <= 1
    assert positive.astype("float64").min() >= 0
    assert is_float(positive.dtype)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "bool"])
def test_integers_are_valid_indices(dtype):
    drawn = random_array(np.random.default_rng(0), (1000,), np.dtype(dtype))
    assert drawn.dtype == np.dtype(dtype)
    assert set(drawn.astype("int64").tolist()) == {0, 1}
    assert not is_float(drawn.dtype)


def _product(dtype: str, m: int = 64, n: int = 48, k: int = 512) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operands, and their product in float64 rounded to their type."""
    rng = np.random.default_rng(1)
    a, b = (random_array(rng, shape, np.dtype(dtype)) for shape in ((m, k), (k, n)))
    return a, b, (a.astype("float64") @ b.astype("float64")).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_another_order_of_summing_is_right(dtype):
    a, b, want = _product(dtype)
    backwards = np.zeros(want.shape, "float32")
    for k in reversed(range(a.shape[1])):
        backwards += a[:, k : k + 1].astype("float32") * b[k].astype("float32")
    assert difference(backwards.astype(dtype), want) == ""


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_missing_term_is_wrong(dtype):
    a, b, want = _product(dtype)
    got = (a[:, 1:].astype("float64") @ b[1:].astype("float64")).astype(dtype)
    assert "of its norm, where rounding explains" in difference(got, want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value, words", [(2.0, "is off by"), (np.nan, "inf or NaN"), (np.inf, "inf or NaN")])
def test_a_single_wrong_element_is_wrong(dtype, value, words):
    want = np.ones((1000, 1000), dtype)
    got = want.copy()
    got[999, 999] = value
    assert words in difference(got, want)
    assert words in difference(got[::1].T, want.T)


def test_slack_is_what_sums_in_a_narrow_type_need():
    a, b, want = _product("float16", k=8192)
    got = np.zeros(want.shape, "float16")
    for k in range(a.shape[1]):
        got += a[:, k : k + 1] * b[k]
    assert "of its norm" in difference(got, want)
    assert difference(got, want, slack=2 * 2.0**-11 * 8192**0.5) == ""


def test_what_is_no_number_must_be_the_same():
    want = np.array([1, np.nan, np.inf, -np.inf], "float32")
    assert difference(want.copy(), want) == ""
    rounded = want * np.float32(1 + 2e-7)
    assert not np.array_equal(rounded, want, equal_nan=True)
    assert difference(rounded, want) == ""
    for place in (1, 2, 3):
        got = rounded.copy()
        got[place] = 7
        assert difference(got, want) == "is another number where inf or NaN is wanted"


def test_integers_are_exact():
    want = np.arange(10)
    assert difference(want.copy(), want) == ""
    assert difference(want + (want == 3), want) == "differs in 1 of 10 elements"


def test_zero_is_zero_and_nothing_is_nothing():
    assert difference(np.zeros(4, "float32"), -np.zeros(4, "float32")) == ""
    assert difference(np.full(4, 1e-3, "float32"), np.zeros(4, "float32")) != ""
    assert difference(np.zeros(0, "float32"), np.zeros(0, "float32")) == ""


@pytest.mark.parametrize("dtype, unit", [("float32", 2.0**-24), ("float16", 2.0**-11), ("int32", 0.0)])
def test_slack_grows_with_the_root_of_the_terms(matmul, dtype, unit):
    if dtype != "int32":
        assert summing_slack(matmul(4, 4, 256, dtype)) == pytest.approx(2 * unit * 16)

    @T.prim_func(s_tir=True)
    def copy(A: T.Buffer((8,), dtype), B: T.Buffer((8,), dtype)):
        for i in range(8):
            with T.sblock("B"):
                vi = T.axis.spatial(8, i)
                B[vi] = A[vi]

    assert isinstance(copy, tirx.PrimFunc)
    assert summing_slack(copy) == 0


def test_the_same_bytes_are_told_from_equal_numbers():
    nan = np.array([np.nan, 0.0, 1.0])
    assert same_bytes(nan, nan.copy())
    assert not same_bytes(nan, -nan)
    assert not same_bytes(nan[1:2], -nan[1:2])
    square = np.arange(12).reshape(3, 4)
    assert same_bytes(square.T, square.T.copy())
    assert same_bytes(np.array(7), np.array(7))
    assert same_bytes(square[:0], square[:0])


def test_small_floats_have_no_surprises():
    want = np.ones(3, ml_dtypes.float8_e4m3fn)
    assert difference(want.copy(), want) == ""
    assert difference((want.astype("float32") * 1.5).astype(want.dtype), want) != ""
