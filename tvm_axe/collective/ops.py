"""The collectives of one worker with numpy, over the slabs of its group that it sees side by side. Nothing here waits.

The engine `threads` and the collectives that are methods of `Workers` run these. Float types of less than four bytes
are added in float32 and the sum is rounded once.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from tvm_axe.collective.plan import VIEWS, Corner, plan

_FLOATS = "fV"  # numpy's kinds of float types; V: those that ml_dtypes adds
_BLOCK = 1 << 15  # elements summed at a time: what was summed is still in the cache when it is sent on


def collective(name: str, source: np.ndarray, target: np.ndarray, *numbers: int, rank: int) -> None:
    """Do one worker's part of a collective; see `tvm_axe.collective.plan` for what that is.

    Parameters
    ----------
    name : str
        One of `plan.VIEWS`, which also says which of the arrays has the group's axis as dimension 0, in the order of
        the coordinates.
    source, target : numpy.ndarray
        The views; a slab is dense.
    *numbers : int
        The collective's other arguments.
    rank : int
        This worker's coordinate on the axis.

    Raises
    ------
    ValueError
        If a slab isn't dense.
    """
    sources, targets = (
        array if is_view else array[np.newaxis] for array, is_view in zip((source, target), VIEWS[name])
    )
    parts = len(sources if VIEWS[name][0] else targets)
    for move in plan(name, sources.shape[1:], targets.shape[1:], numbers, parts, rank):
        terms, outs = boxes(sources, move.source, move.box), boxes(targets, move.target, move.box)
        step = max(1, _BLOCK // math.prod(move.box[1:]))
        for start in range(0, move.box[0], step):
            rows = slice(start, start + step)
            total = summed([term[rows] for term in terms])
            for out in outs:
                out[rows] = total


def boxes(group: np.ndarray, corner: Corner, box: tuple[int, ...]) -> list[np.ndarray]:
    """Return the box at `corner` of each of its slabs, as views."""
    inside = tuple(slice(at, at + extent) for at, extent in zip(corner.at, box))
    slabs = [group[slab, ...] for slab in corner.slabs]
    for slab in slabs:
        if not slab.flags.c_contiguous:  # reshape would copy it, and what is written to the copy would be lost
            raise ValueError(f"a slab must be dense, not of strides {slab.strides} for shape {slab.shape}")
    return [slab.reshape(corner.shape)[inside] for slab in slabs]


def wide_type(dtype: np.dtype) -> np.dtype:
    """Return the type in which elements of a type are added."""
    return np.dtype(np.float32) if dtype.kind in _FLOATS and dtype.itemsize < 4 else dtype


def summed(terms: list[np.ndarray]) -> np.ndarray:
    """Return the sum in the order of the terms, in memory of its own unless there is only one."""
    if len(terms) == 1:
        return terms[0]
    dtype = terms[0].dtype
    wide = wide_type(dtype)
    if wide != dtype:
        return functools.reduce(np.add, [term.astype(wide) for term in terms]).astype(dtype)
    total = terms[0] + terms[1]
    for term in terms[2:]:
        np.add(total, term, out=total)
    return total
