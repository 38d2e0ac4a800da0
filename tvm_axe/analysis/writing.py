"""What has been written of a buffer when a block reads it, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from tvm import tirx

from tvm_axe.analysis.blocks import NestedBlock
from tvm_axe.analysis.elements import elements
from tvm_axe.analysis.expressions import alike, loads_in, substitute, unconditional_loads
from tvm_axe.analysis.patterns import is_copy
from tvm_axe.analysis.values import LIMIT

__all__ = ["Unwritten", "first_unwritten"]

_Written = dict[tirx.Buffer, np.ndarray | None]
"""By buffer a mask of the elements that have been written; None where that may be all of them."""


@dataclass(frozen=True, eq=False)
class Unwritten:
    """A block that reads what nothing has written.

    Attributes
    ----------
    reader : NestedBlock
        The block.
    buffer : Buffer
        What it reads.
    part : tuple[int, ...]
        The first element that was not written; none where nothing was.
    """

    reader: NestedBlock
    buffer: tirx.Buffer
    part: tuple[int, ...] = ()


def first_unwritten(blocks: Sequence[NestedBlock], given: Sequence[tirx.Buffer]) -> Unwritten | None:
    """Return the first read of an element that no block before it has written, or None where none is seen.

    A copy into an intermediate may take along what wasn't written; its target hasn't been either, then. Elements that
    are read on a condition, or at an index that is loaded, aren't looked at, nor those of an intermediate of more than
    `LIMIT`.

    Parameters
    ----------
    blocks : Sequence[NestedBlock]
        The blocks of a function, in order.
    given : Sequence[Buffer]
        What was written before: its parameters.
    """
    written: _Written = dict.fromkeys(given)
    for nested in blocks:
        block, store = nested.block, nested.block.body
        moved: np.ndarray | None = None
        certain = unconditional_loads(store)
        for load in loads_in(store):
            buffer = load.source
            if block.init is not None and buffer.same_as(store.buffer) and alike(load.indices, store.indices):
                continue  # the sum's own running value
            if buffer not in written:
                return Unwritten(nested, buffer)
            there = written[buffer]
            if there is None or not any(load.same_as(each) for each in certain):
                continue
            read = _reached(nested, buffer, load.indices)
            if read is None or not (read & ~there).any():
                continue
            ours = not any(store.buffer.same_as(each) for each in given)
            if not (ours and is_copy(block) and there.shape == _shape(store.buffer)):
                return Unwritten(nested, buffer, tuple(int(at) for at in np.argwhere(read & ~there)[0]))
            moved = there
        stored = _reached(nested, store.buffer, store.indices)
        before = written.get(store.buffer, np.zeros((), bool))
        if stored is None and moved is not None:
            stored = np.ones((), bool)
        if before is None or stored is None:
            written[store.buffer] = None
        else:
            written[store.buffer] = _or_all(before | (stored if moved is None else stored & moved))
    return None


def _reached(nested: NestedBlock, buffer: tirx.Buffer, indices: Sequence[tirx.Expr]) -> np.ndarray | None:
    """Return a mask of the elements at these indices; None where that isn't seen."""
    shape = _shape(buffer)
    if prod(shape) > LIMIT or not all(isinstance(loop.extent, tirx.IntImm) for loop in nested.loops):
        return None
    extents = {loop.loop_var: int(loop.extent) for loop in nested.loops}
    found = elements([substitute(index, nested.bound) for index in indices], extents, shape, nested.mask)
    return None if found is None else found.whole()


def _or_all(mask: np.ndarray) -> np.ndarray | None:
    return None if mask.all() else mask


def _shape(buffer: tirx.Buffer) -> tuple[int, ...]:
    return tuple(int(extent) for extent in buffer.shape)
