"""What the layout tests share: the map of a layout by its definition, worked out without the package."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable

import pytest

from tvm_axe.layout import Layout

Point = frozenset[tuple[str, int]]
"""The positions on each axis where they aren't 0."""


def points_of(layout: Layout, x: int) -> frozenset[Point]:
    """f_L(x): the digits of x over D's extents, the last the fastest, and every choice of R's."""
    digits = []
    for it in reversed(layout.D):
        digits.append(x % it.extent)
        x //= it.extent
    found = set()
    for copies in itertools.product(*(range(it.extent) for it in layout.R)):
        total = defaultdict(int, layout.O)
        for step, it in zip((*reversed(digits), *copies), (*layout.D, *layout.R)):
            total[it.axis] += step * it.stride
        found.add(frozenset((axis, position) for axis, position in total.items() if position))
    return frozenset(found)


@pytest.fixture(scope="session")
def whole_map() -> Callable[[Layout], tuple[frozenset[Point], ...]]:
    """The function from a layout to its points, element by element, as definition 2.3 of the paper has them."""
    return lambda layout: tuple(points_of(layout, x) for x in range(math.prod(it.extent for it in layout.D)))
