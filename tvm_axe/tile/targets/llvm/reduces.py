"""Sums, maxima, minima and other reductions of a tile along a dimension, by vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir
from tvm.script.ir_builder import tirx as T

from tvm_axe.tile.nodes import Reduce
from tvm_axe.tile.targets.llvm.conversions import compute_dtype, convert
from tvm_axe.tile.targets.llvm.functions import has_vectors
from tvm_axe.tile.targets.llvm.writer import Writer, nest, split

SUMS = 4
"""Vectors that are accumulated side by side along a row: an addition takes as long as four that overlap."""


def write_reduce(writer: Writer, node: Reduce) -> None:
    """Emit ``dst (with itself) = sum, max, min or another reduction of src along the axis``."""
    (_Reduction if node.reducer is None else _OwnReduction)(writer, node).write()


class _Reduction:
    def __init__(self, writer: Writer, node: Reduce) -> None:
        self.writer, self.node = writer, node
        self.dtype, self.kept_as = compute_dtype(node.dtype), compute_dtype(node.dst.tile.dtype)
        self.src, self.dst = writer.exprs(node.src.start), writer.exprs(node.dst.start)
        self.extent = node.src.extents[node.axis]
        self.kept = [dim for dim in node.src.dimensions if dim != node.axis and node.src.extents[dim] > 1]
        self.targets = [dim for dim in node.dst.dimensions if node.dst.extents[dim] > 1]
        storage = writer.plan.storage[node.src.tile]
        self.lanes = writer.plan.machine.lanes(self.dtype)
        self.along = storage.panel is None and storage.contiguous(node.axis)
        target = writer.plan.storage[node.dst.tile]
        self.across = (
            storage.panel is None
            and target.panel is None
            and bool(self.kept)
            and storage.contiguous(self.kept[-1])
            and target.contiguous(self.targets[-1])
        )

    def write(self) -> None:
        spans = [(0, self.node.src.extents[dim]) for dim in self.kept]
        if self.across:
            with nest(spans[:-1]) as outer:
                for first, last, lanes in split(*spans[-1], self.lanes):
                    with T.serial((last - first) // lanes) as i:
                        self._by_columns([*outer, first + i * lanes], lanes)
            return
        with nest(spans) as outer:
            if self.along:
                self._by_vectors(outer)
            else:
                self._by_columns(outer, 1)

    def _by_columns(self, point: list[Any], lanes: int) -> None:
        """Reduce `lanes` neighbours, each along the axis."""
        total = self._register(lanes)
        T.buffer_store(total, self._start(point, lanes), [_vector(0, lanes)])
        with T.serial(self.extent) as k:
            self._add(total, self._source(point, k, lanes), lanes)
        self._finish(point, total[_vector(0, lanes)], lanes)

    def _by_vectors(self, point: list[Any]) -> None:
        """Reduce a row: vectors side by side, then the vectors, then a vector's lanes, then the rest one by one."""
        whole = self.extent // self.lanes
        sums = next(count for count in range(SUMS, 0, -1) if whole % count == 0)
        total = self._register(1)
        T.buffer_store(total, self._start(point, 1), [0])
        if whole:
            parts = [self._register(self.lanes) for _ in range(sums)]
            for part in parts:
                T.buffer_store(part, self._identity(self.lanes), [_vector(0, self.lanes)])
            with T.serial(whole // sums) as step:
                for index, part in enumerate(parts):
                    at = (step * sums + index) * self.lanes
                    self._add(part, self._row(point, at, self.lanes), self.lanes)
            lanes, value = self.lanes, None
            for part in parts:
                found = part[_vector(0, lanes)]
                value = found if value is None else self._combine(value, found)
            while lanes > 2:
                lanes //= 2
                value, dtype = T.Bind(value), f"{self.dtype}x{lanes}"
                value = self._combine(T.vectorlow(dtype, value), T.vectorhigh(dtype, value))
            if lanes == 2:
                value = T.Bind(value)
                value = self._combine(*(T.Shuffle([value], [lane]) for lane in range(2)))
            T.buffer_store(total, self._combine(total[0], value), [0])
        with T.serial(self.extent - whole * self.lanes) as k:
            self._add(total, self._row(point, whole * self.lanes + k, 1), 1)
        self._finish(point, total[0], 1)

    def _register(self, lanes: int) -> Any:
        return T.alloc_buffer((lanes,), self.dtype, scope="local")

    def _start(self, point: list[Any], lanes: int) -> Any:
        if not self.node.accumulate or self.dtype != self.kept_as:
            return self._identity(lanes)
        return self.writer.load(self.node.dst.tile, self._target(point, lanes))

    def _identity(self, lanes: int) -> Any:
        value = self.node.identity(self.dtype)
        return value if lanes == 1 else T.Broadcast(value, lanes)

    def _combine(self, a: Any, b: Any) -> Any:
        return self.node.combined(a, b)

    def _add(self, total: Any, value: Any, lanes: int) -> None:
        where = _vector(0, lanes)
        T.buffer_store(total, self._combine(total[where], value), [where])

    def _finish(self, point: list[Any], value: Any, lanes: int) -> None:
        tile, where = self.node.dst.tile, self._target(point, lanes)
        if self.dtype != self.kept_as:
            value = convert(value, self.kept_as)
            value = self._combine(self.writer.load(tile, where), value) if self.node.accumulate else value
        self.writer.store(tile, where, value)

    def _source(self, point: list[Any], k: Any, lanes: int) -> Any:
        indices = _moved(self.src, [*self.kept, self.node.axis], [*point, k])
        if lanes > 1:
            indices[self.kept[-1]] = T.Ramp(indices[self.kept[-1]], 1, lanes)
        return self._loaded(indices)

    def _row(self, point: list[Any], at: Any, lanes: int) -> Any:
        indices = _moved(self.src, [*self.kept, self.node.axis], [*point, at])
        indices[self.node.axis] = _vector(indices[self.node.axis], lanes)
        return self._loaded(indices)

    def _loaded(self, indices: list[Any]) -> Any:
        return convert(self.writer.load(self.node.src.tile, indices), self.dtype)

    def _target(self, point: list[Any], lanes: int) -> list[Any]:
        indices = _moved(self.dst, self.targets, point)
        if lanes > 1:
            indices[self.targets[-1]] = T.Ramp(indices[self.targets[-1]], 1, lanes)
        return indices


class _OwnReduction(_Reduction):
    """A reduction by a function of scalars, of which upstream makes vectors in a loop over lanes.

    What is combined is in memory each time, since the function may name its values many times.
    """

    def __init__(self, writer: Writer, node: Reduce) -> None:
        super().__init__(writer, node)
        assert node.reducer is not None, node
        self.a, self.b = node.reducer.lhs[0], node.reducer.rhs[0]
        self.lanes = self.lanes if _has_vectors(node) else 1
        self.vector = T.vectorized if writer.guards is None else T.serial  # upstream makes no vectors of calls

    def _by_columns(self, point: list[Any], lanes: int) -> None:
        total = self._register(lanes)
        with self.vector(lanes) as lane:
            T.buffer_store(total, self._start(_shifted(point, lane, lanes), 1), [lane])
        with T.serial(self.extent) as k, self.vector(lanes) as lane:
            self._include(total, lane, self._source(_shifted(point, lane, lanes), k, 1))
        with self.vector(lanes) as lane:
            self._finish(_shifted(point, lane, lanes), total[lane], 1)

    def _by_vectors(self, point: list[Any]) -> None:
        """Reduce a row: by vectors, then halves of the vector, then the rest one by one."""
        total, parts, lanes = self._register(1), self._register(self.lanes), self.lanes
        whole = self.extent // lanes
        T.buffer_store(total, self._start(point, 1), [0])
        if whole:
            with self.vector(lanes) as lane:
                T.buffer_store(parts, self._identity(1), [lane])
            with T.serial(whole) as step, self.vector(lanes) as lane:
                self._include(parts, lane, self._row(point, step * lanes + lane, 1))
            while lanes > 1:
                lanes //= 2
                with self.vector(lanes) as lane:
                    self._include(parts, lane, parts[lane + lanes])
            self._include(total, 0, parts[0])
        with T.serial(self.extent - whole * self.lanes) as k:
            self._include(total, 0, self._row(point, whole * self.lanes + k, 1))
        self._finish(point, total[0], 1)

    def _include(self, total: Any, where: Any, value: Any) -> None:
        """Combine an element of `total` with a value."""
        self.writer.scalars.update({self.a: total[where], self.b: value})
        T.buffer_store(total, self.writer.expr(self.node.combined(self.a, self.b)), [where])


def _has_vectors(node: Reduce) -> bool:
    """Whether all that a function calls has a vector form."""
    found: list[bool] = []

    tvm_ffi.structural_walk(node.reducer, (ir.Call, lambda call: found.append(has_vectors(call))))
    return all(found)


def _shifted(point: list[Any], lane: Any, lanes: int) -> list[Any]:
    """The point of a lane; `point` is that of the first one."""
    return point if lanes == 1 else [*point[:-1], point[-1] + lane]


def _moved(start: Sequence[Any], dims: Sequence[int], offsets: Sequence[Any]) -> list[Any]:
    indices = list(start)
    for dim, offset in zip(dims, offsets):
        indices[dim] = indices[dim] + offset
    return indices


def _vector(start: Any, lanes: int) -> Any:
    return start if lanes == 1 else T.Ramp(start, 1, lanes)
