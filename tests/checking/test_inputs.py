"""What functions are checked on: valid indices, integers that nothing rounds, numbers that differ."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.checking import products
from tvm_axe.checking.exactness import exact_magnitude
from tvm_axe.checking.inputs import Indices, distinct_values, indices_of, other_data, small_integers
from tvm_axe.checking.reference import Reference

NONE = Indices({}, False)


@T.prim_func(s_tir=True)
def gather(
    X: T.Buffer((9, 4), "float32"),
    at: T.Buffer((5,), "int32"),
    place: T.Buffer((7,), "int32"),
    count: T.Buffer((3,), "int32"),
    Y: T.Buffer((5, 4), "float32"),
):
    for i, j in T.grid(5, 4):
        with T.sblock("y"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = X[at[vi] + 2, vj] + X[at[place[vi]], vj] + T.Cast("float32", count[0])


def test_indices_stay_within_what_they_index():
    found = indices_of(gather)
    assert found == Indices({"at": 6, "place": 4}, computed=False)
    rng = np.random.default_rng(0)
    for drawn in (small_integers(gather, found, 3, rng), distinct_values(gather, found, 3, rng)):
        assert sorted(set(drawn["at"].tolist())) == sorted(drawn["at"].tolist()) and drawn["at"].max() <= 6
        assert 0 <= drawn["place"].min() <= drawn["place"].max() <= 4
        assert abs(drawn["count"]).max() <= 3
    assert np.isnan(other_data(gather, found, 3, rng)["X"]).all()


def test_indices_that_are_computed():
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((9,), "float32"), at: T.Buffer((5,), "int32"), Y: T.Buffer((5,), "float32")):
        I = T.sblock_alloc_buffer((5,), "int32")
        for i in range(5):
            with T.sblock("i"):
                vi = T.axis.spatial(5, i)
                I[vi] = at[vi] + 1
        for i in range(5):
            with T.sblock("y"):
                vi = T.axis.spatial(5, i)
                Y[vi] = X[I[vi]]

    found = indices_of(func)
    assert found == Indices({"at": 1}, computed=True)
    assert not np.isnan(other_data(func, found, 3, np.random.default_rng(0))["X"]).any(), "it would be an index"


def test_values_differ():
    rng = np.random.default_rng(0)
    drawn = distinct_values(gather, NONE, 3, rng)["X"]
    assert len(set(drawn.flatten().tolist())) == drawn.size and drawn.min() < -1 and drawn.max() > 1
    positive = distinct_values(gather, NONE, 3, rng, positive=True)["X"]
    assert 0 < positive.min() < positive.max() < 1


def _sum(dtype: str, terms: int, factor: float = 1.0) -> tirx.PrimFunc:
    by, zero = tirx.const(factor, dtype), tirx.const(0, dtype)

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((terms,), dtype), Y: T.Buffer((1,), dtype)):
        for i, k in T.grid(1, terms):
            with T.sblock("y"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    Y[vi] = zero
                Y[vi] = Y[vi] + A[vk] * by

    return func


@pytest.mark.parametrize(
    ("func", "magnitude"),
    [
        (_sum("float16", 40), 50),  # 2000 of 2048
        (_sum("float16", 41), 20),
        (_sum("float16", 2048), 1),
        (_sum("float16", 2049), None),
        (_sum("bfloat16", 5), 50),
        (_sum("bfloat16", 6), 20),
        (_sum("float32", 100, 0.5), 50),
        (_sum("float16", 40, 0.5), 50),  # halves count as integers do
        (_sum("float32", 100, 0.1), None),
        (_sum("int8", 2), 50),
        (_sum("int8", 3), 20),
        (_sum("int8", 200), None),
    ],
)
def test_integers_that_nothing_rounds(func, magnitude):
    assert exact_magnitude(func, NONE) == magnitude


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_exact_integers_are_exact_in_any_order(dtype):
    func = _sum(dtype, 30)
    magnitude = exact_magnitude(func, NONE)
    values = np.full(30, magnitude, dtype)
    values[::2] *= -1
    for order in (values, np.sort(values.astype("float32")).astype(dtype)):
        total = np.zeros((), dtype)
        for value in order:
            total = (total + value).astype(dtype)
        assert float(total) == 0


def test_what_rounds():
    @T.prim_func(s_tir=True)
    def exponential(A: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("y"):
                vi = T.axis.spatial(4, i)
                Y[vi] = T.exp(A[vi])

    assert exact_magnitude(exponential, NONE) is None

    @T.prim_func(s_tir=True)
    def largest(A: T.Buffer((4, 5), "float16"), Y: T.Buffer((4,), "float16")):
        for i, k in T.grid(4, 5):
            with T.sblock("y"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    Y[vi] = T.min_value("float16")
                Y[vi] = T.max(Y[vi], T.if_then_else(vk < 3, A[vi, vk], T.float16(0)))

    assert exact_magnitude(largest, NONE) == 50


# ---- The reference -----------------------------------------------------------------------------------------------


def test_float64_takes_the_place_of_every_float():
    func = _sum("float16", 8, 0.1)
    wide = _tvm.widened(func)
    assert {str(param.dtype) for param in wide.params} == {"float64"} and "float16" not in wide.script()
    (y,) = Reference(func)({"A": np.arange(8, dtype="float16")}).arrays["Y"]
    assert y == pytest.approx(28 * float(np.float16(0.1)), rel=1e-15)


def test_products_of_large_functions_are_numpys(monkeypatch, matmul):
    func = matmul(12, 10, 16, "float32")
    names = [param.name for param in func.params]
    drawn = distinct_values(func, NONE, 1, np.random.default_rng(0))
    given = {name: drawn[name] for name in names[:2]}
    plain = Reference(func)(given)
    monkeypatch.setattr(products, "_MANY", 0.0)
    assert products.own_products(func) is not None
    fast = Reference(func)(given)
    for name in names:
        np.testing.assert_allclose(fast.arrays[name], plain.arrays[name], rtol=1e-12, atol=1e-12)


def test_bits_taken_for_another_type_are_not_widened():
    @T.prim_func(s_tir=True)
    def bits(A: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "int32")):
        for i in range(4):
            with T.sblock("y"):
                vi = T.axis.spatial(4, i)
                Y[vi] = T.reinterpret("int32", A[vi])

    reference = Reference(bits)
    assert not reference.wide
    given = np.array([1, 2, 3, 4], "float32")
    np.testing.assert_array_equal(reference({"A": given}).arrays["Y"], given.view("int32"))
