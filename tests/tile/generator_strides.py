"""Strides of random programs' parameters: rows of larger tensors, other orders of dimensions, rows that are all one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from strided import Spread

if TYPE_CHECKING:
    from generator import Maker


def spread(maker: Maker) -> None:
    """Give some of the parameters strides, constants or variables, of which the program may assume something."""
    for at, array in enumerate(maker.arrays):
        if not maker.choose([True, False]):
            continue
        strides = _strides(maker, at, array)
        names = [maker.choose([None, None, f"apart{at}_{d}"]) for d in range(array.ndim)]
        said = ", ".join(repr(name) if name else str(stride) for name, stride in zip(names, strides))
        maker.params[at] = f"{maker.params[at][:-1]}, strides=({said},))"
        maker.arrays[at] = Spread(array, strides).view
        for dimension, (name, stride) in enumerate(zip(names, strides)):
            if name is not None:
                divisor = maker.choose([d for d in (1, 2, 4, 8, 16) if stride % d == 0])
                own = maker.params[at].partition(":")[0]
                maker.head.append(f"    tile.assume({own}.strides[{dimension}] % {divisor} == 0)")


def _strides(maker: Maker, at: int, array: np.ndarray) -> list[int]:
    """Strides by which no two elements are one, or, of a matrix of mere data, all rows or all columns are."""
    order = maker.choose([range(array.ndim), range(array.ndim), range(array.ndim)[::-1]])
    strides, step = [0] * array.ndim, 1
    for dimension in reversed(order):
        step = maker.choose([step, step, step + 1, -(-step // 8) * 8 + 8, 3 * step])
        strides[dimension] = step
        step *= array.shape[dimension]
    if maker.params[at][0] in "XABE" and array.ndim == 2 and maker.choose([False, False, True]):
        same = maker.choose([0, 1])
        array[...] = array.take([0], axis=same)
        strides[same] = 0
    return strides
