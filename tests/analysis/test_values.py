"""Values of integer expressions, point by point, are those that the expressions have on numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx

from tvm_axe.analysis.values import LIMIT, points, values

A, B = tirx.Var("a", "int32"), tirx.Var("b", "int32")
FORMS = [
    lambda a, b, n: a * n + b,
    lambda a, b, n: (a - b) // n,
    lambda a, b, n: (a - b) % n,
    lambda a, b, n: (a ^ n) + b,
    lambda a, b, n: (a & n) | b,
    lambda a, b, n: (a << 1) - (b >> 1),
]


@given(form=st.sampled_from(FORMS), n=st.integers(1, 7), first=st.integers(1, 6), second=st.integers(1, 6))
def test_arithmetic(form, n, first, second):
    at = points([form(A, B, n)], {A: first, B: second})
    found = np.broadcast_to(values(form(A, B, n), at), (first, second))
    assert found.tolist() == [[form(a, b, n) for b in range(second)] for a in range(first)]


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (tirx.Min(A, tirx.IntImm("int32", 2)), [0, 1, 2, 2]),
        (tirx.Max(A, tirx.IntImm("int32", 2)), [2, 2, 2, 3]),
        (tirx.Select(A < 2, A, tirx.IntImm("int32", 9)), [0, 1, 9, 9]),
        (tirx.And(A >= 1, A != 2), [False, True, False, True]),
        (tirx.Or(A < 1, A > 2), [True, False, False, True]),
        (tirx.Not(tirx.EQ(A, tirx.IntImm("int32", 2))), [True, True, False, True]),
        (tirx.Cast("int64", A), [0, 1, 2, 3]),
        (tirx.Cast("int64", tirx.Cast("float64", A * 30) * tirx.const(0.7, "float64")), [0, 21, 42, 62]),
        (tirx.truncdiv(A - 3, 2), [-1, -1, 0, 0]),
        (tirx.truncmod(A - 3, 2), [-1, 0, -1, 0]),
        (tirx.if_then_else(A < 3, A, A - 3), [0, 1, 2, 0]),
    ],
)
def test_other_operations(expr, expected):
    assert values(expr, {A: np.arange(4)}).tolist() == expected


def test_what_is_not_known():
    table = tirx.decl_buffer((4,), "int32")
    assert values(table[A], {A: np.arange(4)}) is None
    assert values(A + B, {A: np.arange(4)}) is None


def test_points():
    """Only of the variables that are used, and not too many."""
    assert points([A], {A: 3, B: LIMIT})[A].tolist() == [0, 1, 2]
    assert points([A + B], {A: 3, B: LIMIT}) is None
    assert points([tirx.IntImm("int32", 1)], {A: 3}) == {}
