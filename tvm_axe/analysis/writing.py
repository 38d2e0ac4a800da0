"""What has been written of a buffer when a block reads it, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod

import numpy as np
from tvm import ir, tirx

from tvm_axe.analysis.annotations import BIND, OVERLAP, RING
from tvm_axe.analysis.blocks import NestedBlock
from tvm_axe.analysis.elements import elements
from tvm_axe.analysis.expressions import alike, loads_in, substitute, unconditional_loads
from tvm_axe.analysis.patterns import is_move
from tvm_axe.analysis.values import LIMIT, points, values

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

    What an earlier iteration of a loop around reader and writer has written is there, as state that a loop carries from
    step to step; chunks go in an order of their own, so each has what it writes itself. A block that only moves
    elements into an intermediate may take along what wasn't written; its target hasn't been either, then. Elements that
    are read on a condition, or at an index that is loaded, aren't looked at, nor those of an intermediate of more than
    `LIMIT`, in the steps of a loop that carries it.

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
        stored = _reached(nested, store.buffer, store.indices, around.get(store.buffer, ()))
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
            missing = _missing(blocks, nested, load, there, within)
            if missing is None or not missing.any():
                continue
            if is_move(block) and store.buffer in around and not any(store.buffer.same_as(each) for each in given):
                stored = _taken_along(nested, load, there, within, around[store.buffer])
                continue
            first = tuple(int(at) for at in np.argwhere(missing)[0])
            return Unwritten(nested, buffer, first[-len(buffer.shape) :], within)
        before = written.get(store.buffer, np.zeros((), bool))
        written[store.buffer] = None if before is None or stored is None else _or_all(before | stored)
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


def _missing(
    blocks: Sequence[NestedBlock],
    reader: NestedBlock,
    load: ir.TensorLoad,
    there: np.ndarray,
    within: Sequence[tirx.For],
) -> np.ndarray | None:
    """Return a mask of what isn't there when it is read, by iteration of loops that carry it; None if that isn't seen.

    A block writes before another reads in the same iteration of all loops around both, if it stands before it, or in an
    earlier one.
    """
    buffer, shape = load.source, _shape(load.source)
    writers = [
        (at, writer, sum(1 for _ in takewhile(lambda pair: pair[0].same_as(pair[1]), zip(reader.loops, writer.loops))))
        for at, writer in enumerate(blocks)
        if writer.block.body.buffer.same_as(buffer)
    ]
    writers = [each for each in writers if each[2]]  # what other nests wrote is there
    most, least = max((common for _, _, common in writers), default=0), 0
    for number, loop in enumerate(reader.loops, 1):
        least = number if any(loop.same_as(each) for each in within) else least
    fitting = [count for count in range(least, most + 1) if _points(reader.loops[:count], buffer) <= LIMIT]
    if not fitting or (fitting[-1] == least < most):
        return None
    loops = reader.loops[: fitting[-1]]
    read = _reached(reader, buffer, load.indices, loops)
    if read is None:
        return None
    kept = [any(loop.same_as(each) for each in within) for loop in loops]
    found = there.reshape(*(int(loop.extent) if own else 1 for loop, own in zip(loops, kept)), *shape)
    position = next(at for at, each in enumerate(blocks) if each is reader)
    for at, writer, common in writers:
        around = loops[:common]
        mask = _reached(writer, buffer, writer.block.body.indices, around)
        if mask is None:
            return None
        ordered = [not own and not {OVERLAP, RING} & loop.annotations.keys() for loop, own in zip(around, kept)]
        earlier = _by_then(mask, ordered, inclusive=at < position)
        found = found | earlier.reshape(*earlier.shape[: len(around)], *[1] * (len(loops) - len(around)), *shape)
    return read & ~found


def _by_then(mask: np.ndarray, ordered: Sequence[bool], inclusive: bool) -> np.ndarray:
    """Return what is true by each iteration of the leading dimensions that are `ordered`, or before it."""
    steps = [dim for dim, each in enumerate(ordered) if each]
    others = [dim for dim in range(mask.ndim) if dim not in steps]
    moved = mask.transpose(*steps, *others)
    flat = moved.reshape(prod(moved.shape[: len(steps)]), *moved.shape[len(steps) :])
    so_far = np.logical_or.accumulate(flat, axis=0)
    if not inclusive:
        so_far = np.concatenate([np.zeros_like(so_far[:1]), so_far[:-1]])
    return so_far.reshape(moved.shape).transpose(*np.argsort([*steps, *others]))


def _taken_along(
    nested: NestedBlock,
    load: ir.TensorLoad,
    there: np.ndarray,
    within: Sequence[tirx.For],
    target_within: Sequence[tirx.For],
) -> np.ndarray | None:
    """Return a mask of the elements that a block stores of what was there, by iteration; None where that isn't seen."""
    store = nested.block.body
    if not all(isinstance(loop.extent, tirx.IntImm) for loop in nested.loops):
        return None
    extents = {loop.loop_var: int(loop.extent) for loop in nested.loops}
    source = [*(loop.loop_var for loop in within), *(substitute(index, nested.bound) for index in load.indices)]
    target = [*(loop.loop_var for loop in target_within), *(substitute(index, nested.bound) for index in store.indices)]
    exprs = [*source, *target, *([] if nested.mask is None else [nested.mask])]
    at = points(exprs, extents)
    found = [None] if at is None else [values(expr, at) for expr in exprs]
    if any(each is None for each in found):
        return None
    places = np.broadcast_arrays(*found, *(at or {}).values())[: len(exprs)]
    holds = places[-1].astype(bool) if nested.mask is not None else np.ones(places[0].shape, bool)
    where = [place[holds] for place in places[: len(source) + len(target)]]
    known = np.broadcast_to(there, [*(extents[loop.loop_var] for loop in within), *_shape(load.source)])
    mask = np.zeros([*(extents[loop.loop_var] for loop in target_within), *_shape(store.buffer)], bool)
    there_already = known[tuple(where[: len(source)])]
    mask[tuple(place[there_already] for place in where[len(source) :])] = True
    return mask


def _or_all(mask: np.ndarray) -> np.ndarray | None:
    return None if mask.all() else mask


def _shape(buffer: tirx.Buffer) -> tuple[int, ...]:
    return tuple(int(extent) for extent in buffer.shape)
