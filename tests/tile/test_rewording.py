"""What upstream computes wrongly or not at all: shifts whose amounts may be negative, truth values as operands."""

import numpy as np
import pytest
from on_cpu import agree
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError

TRUTHS = {
    "equal": lambda a, b: a == b,
    "unequal": lambda a, b: a != b,
    "less": lambda a, b: a < b,
    "at most": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "at least": lambda a, b: a >= b,
    "max": T.max,
    "min": T.min,
    "select": lambda a, b: T.Select(a, b, a),
    "xor": T.bitwise_xor,
    "and": T.bitwise_and,
    "or": T.bitwise_or,
    "not": lambda a, b: T.And(T.bitwise_not(a), b),
    "of floats": lambda a, b: T.Cast("bool", T.Cast("float32", a) - T.Cast("float32", b)),
}


@pytest.mark.parametrize("where", ["points", "data"])
@pytest.mark.parametrize("truth", TRUTHS)
def test_truth_values_are_operands(truth, where):
    of = TRUTHS[truth]

    @T.prim_func
    def func(X: T.Buffer((8, 16), "int32"), Y: T.Buffer((8, 16), "int32")):
        with tile.kernel(1), tile.parallel(8, 16) as (i, j):
            if where == "points":
                Y[i, j] = T.if_then_else(of(i < 3, j < 5), 7, 1)
            else:
                Y[i, j] = T.if_then_else(of(X[i, j] < 3, j < X[i, j]), 7, 1)

    agree(func, np.random.default_rng(0).integers(-9, 20, (8, 16)).astype("int32"), np.zeros((8, 16), "int32"))


@pytest.mark.parametrize("shift", [T.shift_left, T.shift_right])
@pytest.mark.parametrize("then", ["mod", "div", "compare", "min"])
def test_shifts_whose_amount_a_condition_keeps_positive(shift, then):
    """Upstream bounds them as if the amount of any point were a bound of all."""
    behind = {
        "mod": lambda x: x % 2,
        "div": lambda x: x // 2,
        "compare": lambda x: T.if_then_else(x > 0, 1, 2),
        "min": lambda x: T.min(x, 1),
    }[then]

    @T.prim_func
    def func(Y: T.Buffer((8, 8, 8), "int32")):
        with tile.kernel(1):
            for k in range(8):
                with tile.parallel(8, 8) as (i, j):
                    if k >= j:
                        Y[k, i, j] = behind(shift(i, k - j))

    agree(func, np.zeros((8, 8, 8), "int32"))


def computing(case: str) -> tirx.PrimFunc:
    @T.prim_func
    def func(Y: T.Buffer((8, 8), "int32")):
        with tile.kernel(1), tile.parallel(8, 8) as (i, j):
            if case == "added":
                Y[i, j] = T.Cast("int32", (i < 3) + (j < 3))
            else:
                Y[i, j] = T.Cast("int32", (i < 3) * (j < 3))

    return func


@pytest.mark.parametrize("case", ["added", "multiplied"])
def test_arithmetic_with_truth_values_is_refused(case):
    with pytest.raises(TileError, match="computes with truth values; valid are their T.Cast to int32"):
        tile.read(computing(case))
