"""Indices as sums of digits: the same numbers as the expressions, point by point."""

import numpy as np
import pytest
from tvm import tirx

from tvm_axe.analysis.digits import Digit, Index, index_of
from tvm_axe.analysis.values import points, values

I, J = tirx.Var("i", "int32"), tirx.Var("j", "int32")
EXTENTS = {I: 6, J: 16}
SUMS = {
    "an iterator": I,
    "flattened": I * 16 + J,
    "digits": I * 4 + J // 4,
    "low digit": J % 4 + I * 8 + 3,
    "middle digit": J // 2 % 4,
    "digits of a sum": (I * 16 + J) // 4 % 8,
    "remainder of a sum": (I * 16 + J) % 32,
    "offset before a division": (J * 2 + 17) // 16,
    "negative offset": (I * 16 + J // 2 - 8) // 16,
    "scaled remainder": J % 8 * 3 - 5,
}
OTHERS = {
    "reversed": 5 - I,
    "rolled": (I + 3) % 6,
    "product": I * J,
    "across a digit": J // 3,
    "xor": I ^ 5,
    "unknown variable": I + tirx.Var("k", "int32"),
    "unequal cut": (I * 16 + J) % 24 // 5,
}


@pytest.mark.parametrize("name", SUMS)
def test_sum_has_the_same_values(name):
    index = index_of(SUMS[name], {I: (0, 6), J: (1, 16)})
    at = points([I + J], EXTENTS)
    total = index.constant
    for digit in index.digits:
        total = total + digit.coef * ([at[I], at[J]][digit.iterator] // digit.low % digit.extent)
    np.testing.assert_array_equal(*np.broadcast_arrays(total, values(SUMS[name], at)))
    assert list(index.digits) == sorted(index.digits)
    assert index.most == np.max(total - index.constant)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_sum(name):
    assert index_of(OTHERS[name], {I: (0, 6), J: (1, 16)}) is None


def test_an_iterator_of_extent_1_is_no_digit():
    assert index_of(I * 4 + J, {I: (0, 1), J: (1, 4)}) == Index((Digit(1, 1, 1, 4),), 0)


@pytest.mark.parametrize(
    ("expr", "positional"),
    [
        (I * 16 + J, True),
        (I * 20 + J, False),  # 20 isn't a multiple of 16
        (I * 32 + J, True),
        (I + J, False),
        (J // 4 % 4 * 4 + J // 4 % 4, False),
        (J % 4 * 4 + J // 4, True),
    ],
)
def test_positional(expr, positional):
    assert index_of(expr, {I: (0, 6), J: (1, 16)}).is_positional == positional
