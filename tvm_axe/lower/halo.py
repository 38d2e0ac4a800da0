"""Halos: what a nest reads of a shared dimension is each device's piece and a little of its neighbours'.

A nest that is shared over the devices c of an axis and reads a buffer at ``v - 1`` and ``v + 1`` reads, of 4 elements a
device, ``[c * 4 - 1, c * 4 + 5)``. A buffer of its own can hold that, a row for each device, which is all that has to
be moved::

    H[c, j] = X[c * 4 - 1 + j]        Y[v] = H[v // 4, v % 4] + H[v // 4, v % 4 + 2]

It begins at a multiple of the device's number, so that reads at a stride have halos as well, and those of fewer rows
than the buffer has. What is beyond the buffer isn't copied, and only on a condition read. Of a dimension that is read
at one place, as a step of a loop over time reads the step before, the copy has that place alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import element, is_at_hand
from tvm_axe.analysis.expressions import alike, loads_in, substitute, uses, variables_of
from tvm_axe.analysis.values import points, values
from tvm_axe.layout import Mesh
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.pieces import linear, with_block
from tvm_axe.lower.program import Access, Block, ScheduledProgram

__all__ = ["Halo", "halo_of"]


@dataclass(frozen=True, eq=False)
class Halo:
    """What each device of an axis reads of a dimension: ``extent`` elements from ``first + step * device`` on.

    Attributes
    ----------
    buffer : Buffer
        The buffer that is read.
    dim : int
        Its dimension.
    axis : str
        The mesh axis whose devices share that dimension, and the reading.
    step, first, extent : int
        In elements. `first` is negative where a device's first elements are before its own.
    fixed : mapping
        Of dimensions that are read at one place that place; the copy has an extent of 1 there.
    """

    buffer: tirx.Buffer
    dim: int
    axis: str
    step: int
    first: int
    extent: int
    fixed: Mapping[int, int]

    def copy(self, mesh: Mesh) -> tirx.Buffer:
        """Return a buffer for it: for each device of the axis a row, as dimension `dim`, of `extent` elements."""
        shape = [1 if dim in self.fixed else int(extent) for dim, extent in enumerate(self.buffer.shape)]
        shape[self.dim : self.dim + 1] = [mesh.axis_size(self.axis), self.extent]
        return tirx.decl_buffer(shape, self.buffer.dtype, f"{self.buffer.name}_halo", layout=None)

    def source(self, at: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """Return where in the buffer the element `at` of the copy comes from."""
        device, place = at[self.dim], at[self.dim + 1]
        found = [*at[: self.dim], device * self.step + place + self.first, *at[self.dim + 2 :]]
        return [index + self.fixed.get(dim, 0) for dim, index in enumerate(found)]

    def exists(self, at: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return whether the element `at` of the copy is one of the buffer."""
        place = self.source(at)[self.dim]
        return tirx.all(place >= 0, place < self.buffer.shape[self.dim])

    def read_by(self, nest: tirx.Stmt, program: ScheduledProgram, copy: tirx.Buffer) -> tirx.Stmt:
        """Return the nest with its loads of the buffer made of `copy`."""
        realizes = list[s_tir.SBlockRealize]()
        tvm_ffi.structural_walk(nest, (s_tir.SBlockRealize, realizes.append))
        for block in program.blocks():
            reads = any(access.buffer.same_as(self.buffer) for access in block.accesses)
            if reads and any(block.realize.same_as(realize) for realize in realizes):
                nest = with_block(nest, block.realize, self._reading(block, program, copy))
        return nest

    def _has(self, load: ir.TensorLoad) -> bool:
        """Whether a load of the buffer is at the places that are fixed."""
        return all(_is(load.indices[dim], place) for dim, place in self.fixed.items())

    def _reading(self, block: Block, program: ScheduledProgram, copy: tirx.Buffer) -> s_tir.SBlockRealize:
        statement = block.realize.block
        device, own = _in_iterators(block, program, self.axis)

        def on_load(load: ir.TensorLoad) -> ir.TensorLoad:
            if not (load.source.same_as(self.buffer) and self._has(load)) or is_at_hand(load, statement.body):
                return load
            rest = _rest(block, program, self.axis, self.step, load.indices[self.dim])
            place = substitute(rest - self.first, own)
            at = [index - self.fixed.get(dim, 0) for dim, index in enumerate(load.indices)]
            return tirx.BufferLoad(copy, [*at[: self.dim], device, place, *at[self.dim + 1 :]])

        body = _tvm.structural_map(statement.body, (ir.TensorLoad, on_load))
        reads = [region for region in statement.reads if not region.source.same_as(self.buffer)]
        left = [load for load in loads_in(body) if load.source.same_as(self.buffer) or load.source.same_as(copy)]
        reads += [element(load.source, load.indices) for load in left]
        changed = s_tir.SBlock(
            statement.iter_vars, reads, statement.writes, statement.name_hint, body, statement.init,
            annotations=dict(statement.annotations),
        )  # fmt: skip
        return s_tir.SBlockRealize(block.realize.iter_values, block.realize.predicate, changed)


def halo_of(program: ScheduledProgram, blocks: Sequence[Block], buffer: tirx.Buffer, sharding: Sharding) -> Halo | None:
    """Return the halo of a buffer of which the blocks of a nest read what none of them writes; None if they gather it.

    That is so if one of them isn't shared over the axis; if the dimension has several axes; or if what a device reads
    isn't seen to be less than all. What a block reads of the element that it writes is none of it.
    """
    accesses = [(block, access) for block in blocks for access in _read_of(block, buffer)]
    leaving = [dim for dim, cut in enumerate(sharding.cuts) if any(not sharding.holds(a, dim) for _, a in accesses)]
    if not leaving or len(sharding.cuts[leaving[0]]) != 1 or sharding.partial or sharding.root is not None:
        return None
    dim, (axis,) = leaving[0], sharding.cuts[leaving[0]]
    fixed = fixed_in([a.indices for _, a in accesses if not sharding.holds(a, dim)], sharding, dim)
    accesses = [(b, a) for b, a in accesses if all(_is(a.indices[other], place) for other, place in fixed.items())]
    if any(axis not in block.device for block, _ in accesses):
        return None
    steps = {_step(program, axis, access.indices[dim]) for _, access in accesses}
    known = steps - {None} or {sharding.piece(dim)}
    if len(known) != 1:
        return None
    (step,) = known
    assert step is not None
    spans = [_span(block, program, axis, step, access, dim) for block, access in accesses]
    found = [span for span in spans if span is not None]
    if len(found) < len(spans):
        return None
    first = min(least for least, _ in found)
    extent = max(largest for _, largest in found) + 1 - first
    return Halo(buffer, dim, axis, step, first, extent, fixed) if extent < int(buffer.shape[dim]) else None


def fixed_in(places: Sequence[Sequence[tirx.Expr]], sharding: Sharding, dim: int) -> dict[int, int]:
    """Of each dimension but `dim`, and that isn't shared, at one place of which all the accesses are, that place."""
    fixed = {}
    for other, cut in enumerate(sharding.cuts):
        first = places[0][other]
        if other != dim and not cut and isinstance(first, tirx.IntImm):
            fixed.update({other: int(first)} if all(_is(at[other], int(first)) for at in places) else {})
    return fixed


def _is(index: tirx.Expr, place: int) -> bool:
    return isinstance(index, tirx.IntImm) and int(index) == place


def _read_of(block: Block, buffer: tirx.Buffer) -> list[Access]:
    """What a block reads of a buffer but for the element that it writes."""
    own = [access for access in block.accesses if access.buffer.same_as(buffer)]
    stores = [access for access in own if access.is_write]
    reads = [access for access in own if not access.is_write]
    return [read for read in reads if not any(alike(read.indices, store.indices) for store in stores)]


def _step(program: ScheduledProgram, axis: str, index: tirx.Expr) -> int | None:
    """By how much an index grows from one device to the next; None where it doesn't grow evenly."""
    step, _ = linear(index, program.coordinates[axis])
    return step if step is not None and step > 0 else None


def _rest(block: Block, program: ScheduledProgram, axis: str, step: int, index: tirx.Expr) -> tirx.Expr:
    """What an index, in the block's iterators, is beyond `step` times the device: in coordinates and what is local."""
    replaced = substitute(index, {iterator.whole.var: iterator.replacement for iterator in block.iterators})
    return block.analyzer.simplify(replaced - program.coordinates[axis] * step)


def _span(
    block: Block, program: ScheduledProgram, axis: str, step: int, access: Access, dim: int
) -> tuple[int, int] | None:
    """The least and the largest place, from `step` times the device on, that an access reads on any device."""
    coordinate = program.coordinates[axis]
    rest = block.analyzer.simplify(access.indices[dim] - coordinate * step)
    local = {it.local.var: int(it.local.dom.extent) for it in block.iterators if it.local is not None}
    if not variables_of(rest) <= {coordinate, *local} or loads_in(rest):
        return None
    if not uses(rest, coordinate):
        bounds = block.analyzer.const_int_bound(rest)
        return int(bounds.min_value), int(bounds.max_value)
    extents = {coordinate: program.mesh.axis_size(axis), **local}
    shared = [it for it in block.iterators if uses(it.replacement, coordinate)]
    exist = [it.replacement < it.whole.dom.extent for it in shared if variables_of(it.replacement) <= extents.keys()]
    at = points([rest, *exist], extents)
    found = [None] if at is None else [values(each, at) for each in (rest, *exist)]
    if any(each is None for each in found):
        return None
    places, *existing = np.broadcast_arrays(*found)
    read = places[np.logical_and.reduce([np.ones(places.shape, bool), *existing])]
    return (int(read.min()), int(read.max())) if read.size else None


def _in_iterators(block: Block, program: ScheduledProgram, axis: str) -> tuple[tirx.Expr, Mapping[tirx.Var, tirx.Expr]]:
    """The device's coordinate in terms of the block's iterators, and in terms of these all that a place is made of."""
    device: tirx.Expr | None = None
    own: dict[tirx.Var, tirx.Expr] = {}
    for iterator in block.iterators:
        axes = [a for a in block.device if uses(iterator.replacement, program.coordinates[a])]
        steps = {a: linear(iterator.replacement, program.coordinates[a])[0] or 1 for a in axes}
        if axis in steps and device is None:
            device = iterator.whole.var // steps[axis]
            if any(step > steps[axis] for step in steps.values()):
                device = device % program.mesh.axis_size(axis)
        if iterator.local is not None:
            own[iterator.local.var] = iterator.whole.var % min(steps.values()) if steps else iterator.whole.var
    assert device is not None
    return device, {**own, program.coordinates[axis]: device}
