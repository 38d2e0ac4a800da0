"""What a thread does of a nest of one block: neighbouring elements together, and sums in registers.

A GPU's memory gives most where a thread asks for 16 bytes at once. So a thread has as many neighbouring elements of
what is stored as 16 bytes hold, *lanes*, where they begin at a multiple of that. Arithmetic stays that of single
elements, which the compiler knows for all types; what is of vectors is copies alone::

    for lane in vectorized(8): x[lane] = X[8 * n + lane]       # one load of 16 bytes
    for lane in unrolled(8): y[lane] = max(x[lane], 0)
    for lane in vectorized(8): Y[8 * n + lane] = y[lane]       # one store

A load that happens under a condition is copied under it, if all lanes have the same one. What all lanes have in common
is loaded once. What isn't beside each other in memory is loaded where it is used. Where a block is a reduction the
loops over its terms are between these copies, and ``y`` is what they add up in, also where a thread has one element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import DataType, ir, tirx
from tvm.sym import Analyzer

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import NestedBlock
from tvm_axe.analysis.expressions import alike, is_zero, loads_in, substitute, uses
from tvm_axe.analysis.guards import guarded_loads
from tvm_axe.analysis.patterns import REDUCE
from tvm_axe.machines.vectors import Elements, Finder, like

__all__ = ["VECTOR", "OfThread", "of_thread"]

VECTOR = 16
"""Bytes that a thread loads or stores at once at most, and what tensors so touched are aligned to."""

_WIDTHS = (16, 8, 4, 2)
_ENOUGH = 1 << 16  # threads; of fewer each has one element, or parts of the GPU were idle
_PIECES = 2  # of 16 bytes, that the widest elements of a thread's take


@dataclass(frozen=True)
class OfThread:
    """What a thread does.

    Attributes
    ----------
    loops : tuple of For
        Those whose iterations are threads'. One may have fewer iterations than it had: groups of lanes.
    body : Stmt
        What is done in an iteration.
    local : tuple of Buffer
        What a thread has for itself.
    vectors : frozenset of Buffer
        What is touched by vectors, and must be aligned to `VECTOR` bytes.
    """

    loops: tuple[tirx.For, ...]
    body: tirx.Stmt
    local: tuple[tirx.Buffer, ...]
    vectors: frozenset[tirx.Buffer]


def of_thread(shared: Sequence[tirx.For], inner: Sequence[tirx.For], nested: NestedBlock) -> OfThread | None:
    """Return what a thread does of a nest of one block; None if that is what stands there.

    Parameters
    ----------
    shared, inner : sequence of For
        The nest's loops whose iterations are threads', and those that the block is reduced over.
    nested : NestedBlock
        The block.
    """
    nest = _read(shared, inner, nested)
    if nest is None:
        return None
    choices = [found for width in _WIDTHS if (found := _lanes(nest, width)) is not None]
    lanes = min(choices, key=lambda each: each.scattered, default=None)  # the widest of the best
    if lanes is None and not inner:
        return None
    return _Writer(nest, lanes).whole()


@dataclass(frozen=True)
class _Nest:
    """A nest of a block that stores an element; expressions are of loops' variables."""

    shared: tuple[tirx.For, ...]
    inner: tuple[tirx.For, ...]
    buffer: tirx.Buffer
    indices: tuple[tirx.Expr, ...]
    value: tirx.Expr
    start: tirx.Expr | None
    """What a reduction begins with; None of a block that is none."""
    mask: tirx.Expr | None


def _read(shared: Sequence[tirx.For], inner: Sequence[tirx.For], nested: NestedBlock) -> _Nest | None:
    """The nest, if it is one of a block whose element can be kept in a register until it is complete."""
    block, store = nested.block, nested.block.body
    if not isinstance(store, tirx.BufferStore) or block.match_buffers or block.alloc_buffers:
        return None
    starts = block.init
    if starts is None and inner:
        return None
    if starts is not None and not (
        isinstance(starts, tirx.BufferStore)
        and starts.buffer.same_as(store.buffer)
        and alike(starts.indices, store.indices)
    ):
        return None
    parts = [store.value, *store.indices, *([] if starts is None else [starts.value])]
    if any(guarded_loads(part) is None for part in parts):
        return None
    own = [load for load in loads_in(parts) if load.source.same_as(store.buffer)]
    if not all(alike(load.indices, store.indices) for load in own):
        return None
    loops = [*shared, *inner]
    if not all(is_zero(loop.min) and isinstance(loop.extent, tirx.IntImm) for loop in loops):
        return None
    first = {loop.loop_var: tirx.const(0, str(loop.loop_var.ty)) for loop in inner}
    analyzer = Analyzer()
    for iterator in block.iter_vars:
        if iterator.iter_type == REDUCE:
            begins = substitute(nested.bound[iterator.var], first)
            if not analyzer.can_prove_equal(begins, iterator.dom.min):
                return None
    bound = functools.partial(substitute, replacements=nested.bound)
    indices = tuple(bound(index) for index in store.indices)
    begin = None if starts is None else bound(starts.value)
    mask = nested.mask
    fixed = [part for part in (*indices, begin, mask) if part is not None]
    if any(uses(part, loop.loop_var) for part in fixed for loop in inner):
        return None
    return _Nest(tuple(shared), tuple(inner), store.buffer, indices, bound(store.value), begin, mask)


@dataclass(frozen=True)
class _Lanes:
    """How many elements a thread has, along which loop, and what it loads before it uses it, in the order of use."""

    width: int
    loop: tirx.For
    stored: Elements
    loaded: tuple[Elements, ...]
    scattered: int
    """How many of an element's operands are loaded for each lane alone."""


def _lanes(nest: _Nest, width: int) -> _Lanes | None:
    """The lanes of that width; None if what is stored can't be shown to be vectors, or it wouldn't be faster."""
    loop = next((loop for loop in reversed(nest.shared) if int(loop.extent) > 1), None)
    total = math.prod(int(loop.extent) for loop in nest.shared)
    if loop is None or int(loop.extent) % width or total // width < _ENOUGH:
        return None
    if nest.mask is not None and uses(nest.mask, loop.loop_var):
        return None
    finder = Finder([*nest.shared, *nest.inner], loop, width)
    stored = finder.vector(nest.buffer, nest.indices)
    if stored is None:
        return None
    loaded, scattered = list[Elements](), 0
    for load, guard in _loads(nest):
        found = finder.loaded(load, guard)
        if found is not None:
            loaded.append(found)
        else:
            scattered += uses(list(load.indices), loop.loop_var)
    vectors = [each for each in loaded if each.dim is not None]
    sizes = [_size(vector.buffer) for vector in (stored, *vectors)]
    if min(sizes) * width > VECTOR or max(sizes) * width > _PIECES * VECTOR:
        return None
    # Of what isn't beside each other a warp's threads ask for more lines at once the more lanes they have.
    return _Lanes(width, loop, stored, tuple(loaded), scattered) if scattered <= len(vectors) else None


def _size(buffer: tirx.Buffer) -> int:
    return DataType(str(buffer.dtype)).itemsize


def _loads(nest: _Nest) -> Iterator[tuple[ir.TensorLoad, tirx.Expr | None]]:
    """The elements that a nest loads, each once, and the condition under which it does so, or None.

    Without the sum that a reduction has so far.
    """
    found: list[tuple[ir.TensorLoad, list[tuple[tirx.Expr, ...]]]] = []
    for part in (nest.value, *([] if nest.start is None else [nest.start])):
        occurring = guarded_loads(part)
        assert occurring is not None  # `_read` has looked
        for load, guards in occurring:
            if nest.start is not None and load.source.same_as(nest.buffer):
                continue
            conditions = next((those for other, those in found if _same(load, other)), None)
            if conditions is None:
                found.append((load, [guards]))
            else:
                conditions.append(guards)
    for load, conditions in found:
        if not all(conditions):  # somewhere there is none
            yield load, None
            continue
        every = [functools.reduce(tirx.And, guards) for guards in conditions]
        distinct = [one for n, one in enumerate(every) if not any(alike([one], [other]) for other in every[:n])]
        yield load, functools.reduce(tirx.Or, distinct)


def _same(load: ir.TensorLoad, other: ir.TensorLoad) -> bool:
    return bool(load.source.same_as(other.source)) and alike(load.indices, other.indices)


class _Writer:
    """Writes what a thread does."""

    def __init__(self, nest: _Nest, lanes: _Lanes | None) -> None:
        self.nest, self.lanes = nest, lanes
        self.width = 1 if lanes is None else lanes.width
        self.result = self._local(nest.buffer, self.width)
        self.had: list[tuple[Elements, tirx.Buffer]] = []  # so far, with indices as they are read

    def _local(self, buffer: tirx.Buffer, count: int) -> tirx.Buffer:
        return tirx.decl_buffer([count], str(buffer.dtype), f"{buffer.name}_own", scope="local", layout=None)

    def whole(self) -> OfThread:
        nest, lanes = self.nest, self.lanes
        before, each = list[tirx.Stmt](), list[tirx.Stmt]()
        for elements in () if lanes is None else lanes.loaded:
            (each if self._is_of_a_term(elements) else before).append(self._loaded(elements))
        if nest.start is not None:
            before.append(self._computed(nest.start))
        term: tirx.Stmt = tirx.stmt_seq(*each, self._computed(nest.value))
        for loop in reversed(nest.inner):
            term = tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, term)
        if lanes is None:
            last: tirx.Stmt = tirx.BufferStore(nest.buffer, tirx.BufferLoad(self.result, [0]), list(nest.indices))
        else:
            last = self._moved(lanes.stored, self.result, store=True)
        body: tirx.Stmt = tirx.stmt_seq(*before, term, last)
        if nest.mask is not None:
            body = tirx.IfThenElse(nest.mask, body, None)
        local = (self.result, *(buffer for _, buffer in self.had))
        if lanes is None:
            return OfThread(nest.shared, body, local, frozenset())
        kind = str(lanes.loop.loop_var.ty)
        extent = tirx.const(int(lanes.loop.extent) // lanes.width, kind)
        groups = tirx.For(lanes.loop.loop_var, lanes.loop.min, extent, tirx.ForKind.SERIAL, lanes.loop.body)
        loops = tuple(groups if loop.same_as(lanes.loop) else loop for loop in nest.shared)
        touched = [each.buffer for each in (lanes.stored, *lanes.loaded) if each.dim is not None]
        return OfThread(loops, body, local, frozenset(touched))

    def _is_of_a_term(self, elements: Elements) -> bool:
        """Whether what is loaded is another with each term of a reduction."""
        parts = [*elements.first, *([] if elements.guard is None else [elements.guard])]
        return any(uses(parts, loop.loop_var) for loop in self.nest.inner)

    def _loaded(self, elements: Elements) -> tirx.Stmt:
        """Elements become a thread's own; those that say which ones they are have become so before."""
        indices, first = (tuple(map(self._with_own, each)) for each in (elements.indices, elements.first))
        guard = None if elements.guard is None else self._with_own(elements.guard)
        elements = Elements(elements.buffer, indices, first, elements.dim, guard)
        local = self._local(elements.buffer, 1 if elements.dim is None else self.width)
        copy = self._moved(elements, local, store=False)
        self.had.append((elements, local))
        return copy if guard is None else tirx.IfThenElse(guard, copy, None)

    def _moved(self, elements: Elements, local: tirx.Buffer, store: bool) -> tirx.Stmt:
        """The copies between memory and a thread's own, of no more than `VECTOR` bytes each."""

        def copy(there: Sequence[tirx.Expr], here: tirx.Expr) -> tirx.Stmt:
            if store:
                return tirx.BufferStore(elements.buffer, tirx.BufferLoad(local, [here]), list(there))
            return tirx.BufferStore(local, tirx.BufferLoad(elements.buffer, list(there)), [here])

        if elements.dim is None:
            return copy(elements.first, tirx.const(0, "int32"))
        width = min(self.width, VECTOR // _size(elements.buffer))
        pieces = []
        for begin in range(0, self.width, width):
            lane = self._lane()
            at = lane + tirx.const(begin, str(lane.ty))
            there = [
                index + like(at, index) if dim == elements.dim else index for dim, index in enumerate(elements.first)
            ]
            pieces.append(_over(lane, width, tirx.ForKind.VECTORIZED, copy(there, at)))
        return tirx.stmt_seq(*pieces)

    def _computed(self, value: tirx.Expr) -> tirx.Stmt:
        """Each lane's element of the result, set to the value."""
        if self.lanes is None:
            at: tirx.Expr = tirx.const(0, "int32")
            return tirx.BufferStore(self.result, self._with_own(value, at), [at])
        lane, var = self._lane(), self.lanes.loop.loop_var
        value = substitute(self._with_own(value, lane), {var: var * tirx.const(self.width, str(var.ty)) + lane})
        return _over(lane, self.width, tirx.ForKind.UNROLLED, tirx.BufferStore(self.result, value, [lane]))

    def _with_own(self, expr: tirx.Expr, lane: tirx.Expr | None = None) -> tirx.Expr:
        """The expression with what the thread has in the place of loads; without a lane, of what all have in common."""

        def on_load(load: ir.TensorLoad) -> tirx.Expr:
            if lane is not None and self.nest.start is not None and load.source.same_as(self.nest.buffer):
                return tirx.BufferLoad(self.result, [lane])
            for elements, local in self.had:
                if load.source.same_as(elements.buffer) and alike(load.indices, elements.indices):
                    if elements.dim is None:
                        return tirx.BufferLoad(local, [0])
                    return load if lane is None else tirx.BufferLoad(local, [lane])
            return load

        return _tvm.structural_map(expr, (ir.TensorLoad, on_load))

    def _lane(self) -> tirx.Var:
        assert self.lanes is not None
        return tirx.Var("lane", str(self.lanes.loop.loop_var.ty))


def _over(lane: tirx.Var, width: int, kind: tirx.ForKind, body: tirx.Stmt) -> tirx.Stmt:
    first, extent = (tirx.const(number, str(lane.ty)) for number in (0, width))
    return tirx.For(lane, first, extent, kind, body)
