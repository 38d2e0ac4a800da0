"""Arithmetic of 16-bit floats is computed in float32 and rounded once, and what a program rounds stays rounded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np
import pytest
import tvm_ffi
from tvm import ir, tirx
from tvm.script import tirx as T

from tvm_axe.analysis.rounding import rounded_once

N = 512
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST = {"float16": 2.0**-24, "bfloat16": 2.0**-133}  # what denormal numbers are multiples of

Pair = Callable[[np.ndarray, np.ndarray], np.ndarray]
PAIRS: Mapping[type, Pair] = {
    tirx.Add: np.add, tirx.Sub: np.subtract, tirx.Mul: np.multiply, tirx.Max: np.maximum, tirx.Min: np.minimum,
    tirx.Div: np.divide, tirx.GT: operator.gt, tirx.LT: operator.lt,
}  # fmt: skip
FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "tirx.tanh": np.tanh,
    "tirx.sigmoid": lambda x: (1 / (1 + np.exp(-x.astype("float64")))).astype(x.dtype),
}


def computed(value: tirx.Expr, given: Mapping[str, np.ndarray], dtype: str | None = None) -> np.ndarray:
    """An expression's numbers, each node's in its own type; or all in `dtype`."""

    def at(node: tirx.Expr) -> np.ndarray:
        own = dtype or str(node.ty.dtype)
        if isinstance(node, tirx.Var):
            return given[str(node.name)].astype(own)
        if isinstance(node, tirx.FloatImm):
            return np.full(N, node.value, own)
        if isinstance(node, tirx.Cast):
            return at(node.value).astype(own)
        if isinstance(node, tirx.Select):
            return np.where(at(node.condition), at(node.true_value), at(node.false_value))
        if isinstance(node, ir.Call):
            arguments = [at(arg) for arg in node.args]
            return np.where(*arguments) if node.op.name == "prim.if_then_else" else FUNCTIONS[node.op.name](*arguments)
        return PAIRS[type(node)](at(node.a), at(node.b))

    return at(value)


def rounds(value: tirx.Expr) -> int:
    """How many casts to 16 bits an expression has."""
    found: list[tirx.Cast] = []
    tvm_ffi.structural_walk(value, (tirx.Cast, found.append))
    return sum(str(cast.ty.dtype) in ROUNDING for cast in found)


def drawn(rng: np.random.Generator, leaves: list[tirx.Expr], depth: int) -> tirx.Expr:
    """A random expression whose values stay below some dozens, of sums, products, extremes, choices and functions."""
    if depth == 0:
        return leaves[rng.integers(len(leaves))]
    a, b, c = (drawn(rng, leaves, depth - 1) for _ in range(3))
    match rng.integers(7):
        case 0:
            return a + b
        case 1:
            return a - b
        case 2:
            return T.tanh(a) * b
        case 3:
            return T.max(a, b)
        case 4:
            return a * T.sigmoid(b)
        case 5:
            return tirx.Select(leaves[0] > leaves[1], a, b) + T.if_then_else(leaves[1] > leaves[2], c, a)
        case _:
            return T.min(a, b) / (T.sigmoid(c) + leaves[-1])


@pytest.mark.parametrize("dtype", sorted(ROUNDING))
def test_random_expressions_are_off_by_one_rounding(dtype):
    """Beside errors of float32, which are far smaller; where each node is rounded, some are off by more."""
    beyond = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        given = {name: rng.standard_normal(N).astype(dtype) for name in "xyz"}
        leaves = [*(tirx.Var(name, dtype) for name in given), tirx.FloatImm(dtype, 0.5)]
        value = drawn(rng, leaves, int(rng.integers(1, 4)))
        made = rounded_once(value)
        assert made.ty.dtype == value.ty.dtype
        exact = computed(value, given, "float64")
        most = ROUNDING[dtype] * np.abs(exact) + 3e-5 + LEAST[dtype]
        assert (np.abs(computed(made, given).astype("float64") - exact) <= most).all(), (seed, value)
        assert rounds(made) <= 1, (seed, made)
        beyond += not (np.abs(computed(value, given).astype("float64") - exact) <= most).all()
    assert beyond > 20


def test_what_a_program_rounds_stays_rounded():
    x, y = tirx.Var("x", "bfloat16"), tirx.Var("y", "float32")
    given = {"x": np.full(N, 3.0, "bfloat16"), "y": np.full(N, 1 + 2.0**-10, "float32")}
    value = tirx.Cast("float32", tirx.Cast("bfloat16", y) * x)
    assert (computed(rounded_once(value), given) == 3.0).all()
    assert (computed(rounded_once(tirx.Cast("float32", tirx.Cast("bfloat16", y * y))), given) == 1.0).all()


def test_what_is_compared_is_rounded():
    """As what another kernel would have stored: the same comparison gives the same everywhere."""
    x = tirx.Var("x", "bfloat16")
    given = {"x": np.full(N, 1 + 2.0**-7, "bfloat16")}
    exact = 1 + 2.0**-6 + 2.0**-14
    assert computed(x * x, given, "float64")[0] == exact
    larger = rounded_once(x * x > tirx.FloatImm("bfloat16", 1 + 2.0**-6))
    assert not computed(larger, given).any()
    chosen = rounded_once(tirx.Select(x * x > x, x + x, x * x))
    assert rounds(chosen) == 2


def test_other_types_are_left_as_they_are():
    for dtype in ("float32", "float64", "int32", "float8_e4m3fn"):
        x = tirx.Var("x", dtype)
        for value in (x + x, T.max(x, x) * x, tirx.Select(x > x, x, x + x)):
            assert tvm_ffi.structural_equal(rounded_once(value), value)
