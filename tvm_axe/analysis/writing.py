"""What has been written of a buffer when a block reads it, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod

import numpy as np
from tvm import tirx

from tvm_axe.analysis.annotations import BIND, OVERLAP, RING
from tvm_axe.analysis.blocks import NestedBlock
from tvm_axe.analysis.elements import elements
from tvm_axe.analysis.expressions import alike, loads_in, substitute, unconditional_loads
from tvm_axe.analysis.patterns import is_copy
from tvm_axe.analysis.values import LIMIT

__all__ = ["Unwritten", "first_unwritten"]

_LEAVES_NONE = {BIND, OVERLAP, RING}
"""Annotations of loops of which a device's kernel has none."""

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
    within : tuple[For, ...]
        Where the buffer lives within iterations of loops, these: what an iteration reads, that one has to write.
    """

    reader: NestedBlock
    buffer: tirx.Buffer
    part: tuple[int, ...] = ()
    within: tuple[tirx.For, ...] = ()


def first_unwritten(blocks: Sequence[NestedBlock], given: Sequence[tirx.Buffer]) -> Unwritten | None:
    """Return the first read of an element that no block before it has written, or None where none is seen.

    An intermediate whose blocks have loops in common lives in an iteration of these: upstream allocates it there. The
    loops of a reduction into it are none of them, nor those that are bound to devices or cut into chunks, which leave
    no loop behind.

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
    around = _lives_within(blocks, given)
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
            within = around[buffer]
            read = _reached(nested, buffer, load.indices, within)
            if read is None or not (read & ~there).any():
                continue
            ours = not any(store.buffer.same_as(each) for each in given)
            kept = within == around.get(store.buffer) and _shape(buffer) == _shape(store.buffer)
            if not (ours and is_copy(block) and kept):
                first = tuple(int(at) for at in np.argwhere(read & ~there)[0])
                return Unwritten(nested, buffer, first[len(within) :], within)
            moved = there
        stored = _reached(nested, store.buffer, store.indices, around.get(store.buffer, ()))
        before = written.get(store.buffer, np.zeros((), bool))
        if stored is None and moved is not None:
            stored = np.ones((), bool)
        if before is None or stored is None:
            written[store.buffer] = None
        else:
            written[store.buffer] = _or_all(before | (stored if moved is None else stored & moved))
    return None


def _lives_within(
    blocks: Sequence[NestedBlock], given: Sequence[tirx.Buffer]
) -> dict[tirx.Buffer, tuple[tirx.For, ...]]:
    """Return by buffer the loops in an iteration of which it is allocated; none of what was `given`."""
    around: dict[tirx.Buffer, tuple[tirx.For, ...]] = {}
    for nested in blocks:
        store = nested.block.body
        for buffer in [store.buffer, *(load.source for load in loads_in([store.value, *store.indices]))]:
            pairs = zip(nested.loops, around.get(buffer, nested.loops))
            around[buffer] = tuple(loop for loop, _ in takewhile(lambda pair: pair[0].same_as(pair[1]), pairs))
        spatial = list(takewhile(lambda driven: all(map(_is_spatial, driven)), nested.driven))
        around[store.buffer] = around[store.buffer][: len(spatial)]
    for buffer, loops in around.items():
        left = tuple(loop for loop in loops if not _LEAVES_NONE & loop.annotations.keys())
        around[buffer] = left if _points(left, buffer) <= LIMIT else ()
    return around | dict.fromkeys(given, ())


def _is_spatial(iterator: tirx.IterVar) -> bool:
    return bool(iterator.iter_type == tirx.IterVar.DataPar)


def _points(loops: Sequence[tirx.For], buffer: tirx.Buffer) -> int:
    """Return how many elements a buffer has in all iterations of loops; too many where that is no number."""
    known = all(isinstance(loop.extent, tirx.IntImm) for loop in loops)
    return prod([*(int(loop.extent) for loop in loops), *_shape(buffer)]) if known else LIMIT + 1


def _reached(
    nested: NestedBlock, buffer: tirx.Buffer, indices: Sequence[tirx.Expr], within: Sequence[tirx.For]
) -> np.ndarray | None:
    """Return a mask of the elements at these indices, by iteration of the loops within; None where that isn't seen."""
    if _points(within, buffer) > LIMIT or not all(isinstance(loop.extent, tirx.IntImm) for loop in nested.loops):
        return None
    extents = {loop.loop_var: int(loop.extent) for loop in nested.loops}
    shape = (*(extents[loop.loop_var] for loop in within), *_shape(buffer))
    at = [*(loop.loop_var for loop in within), *(substitute(index, nested.bound) for index in indices)]
    found = elements(at, extents, shape, nested.mask)
    return None if found is None else found.whole()


def _or_all(mask: np.ndarray) -> np.ndarray | None:
    return None if mask.all() else mask


def _shape(buffer: tirx.Buffer) -> tuple[int, ...]:
    return tuple(int(extent) for extent in buffer.shape)
