"""The elements that an access reaches, beside brute force."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx

from tvm_axe.analysis.elements import cover, elements

I, J, K = (tirx.Var(name, "int32") for name in "ijk")
SHAPE = (6, 8)
INDICES = {
    "identity": lambda i, j, k: (i, j),
    "swapped": lambda i, j, k: (j, i),
    "reversed": lambda i, j, k: (5 - i, j),
    "rolled": lambda i, j, k: (i, (j + 3) % 8),
    "strided": lambda i, j, k: (i, j * 2 + k),
    "diagonal": lambda i, j, k: (i, i + k),
    "digits": lambda i, j, k: (i // 2 + k, i % 2),
    "constant": lambda i, j, k: (i * 0 + 2, j),
    "xor": lambda i, j, k: (i, j ^ 1),
}
CONDITIONS = {
    "none": lambda i, j, k: None,
    "one variable": lambda i, j, k: i < 2,
    "two variables": lambda i, j, k: i + j < 4,
    "two conditions": lambda i, j, k: (i < 3, j >= 1),
    "nothing": lambda i, j, k: i < 0,
}


def brute(indices, condition, extents) -> np.ndarray | None:
    """The mask of the elements, or None if one is outside."""
    mask = np.zeros(SHAPE, bool)
    for at in product(*map(range, extents)):
        holds = condition(*at)
        if holds is None or np.all(holds):
            element = indices(*at)
            if any(not 0 <= index < extent for index, extent in zip(element, SHAPE)):
                return None
            mask[element] = True
    return mask


def symbolic(condition) -> tirx.Expr | None:
    found = condition(I, J, K)
    return tirx.And(*found) if isinstance(found, tuple) else found


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("name", INDICES)
@given(extents=st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 2)))
def test_elements(name, condition, extents):
    indices, condition = INDICES[name], CONDITIONS[condition]
    found = elements(indices(I, J, K), dict(zip((I, J, K), extents)), SHAPE, symbolic(condition))
    expected = brute(indices, condition, extents)
    if expected is None or (found is None and not expected.any()):  # no piece of what reaches nothing may be beyond
        assert found is None or not cover(SHAPE, [found])
        return
    assert found is not None
    assert np.array_equal(found.whole(), expected)
    assert found.everything == expected.all() == cover(SHAPE, [found])


@given(cut=st.integers(0, 6), gap=st.integers(0, 1))
def test_two_parts_cover(cut, gap):
    """Rows before `cut` and rows from there on are all; not if one is left out."""
    above = elements([I, J], {I: cut, J: 8}, SHAPE, None)
    below = elements([I + (cut + gap), J], {I: max(6 - cut - gap, 0), J: 8}, SHAPE, None)
    assert cover(SHAPE, [above, below]) == (gap == 0 or cut == 6)


def test_what_is_not_seen():
    """Loaded indices, and more points than are looked at; a large whole needs no look at its elements."""
    table = tirx.decl_buffer((6,), "int32")
    assert elements([table[I], J], {I: 6, J: 8}, SHAPE, None) is None
    large = 1 << 15
    assert elements([I + J - J, J], {I: large, J: large}, (large, large), None) is None
    whole = elements([I, J], {I: large, J: large}, (large, large), None)
    assert cover((large, large), [whole])
    half = elements([I, J], {I: large // 2, J: large}, (large, large), None)
    assert not cover((large, large), [half]) and not cover(SHAPE, [])
