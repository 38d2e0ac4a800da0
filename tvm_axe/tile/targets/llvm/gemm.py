"""Products of tiles: register tiles of accumulators over panels.

    for each group of vectors of c's columns:        # b's panel of them stays in the first-level cache
        for each group of rows:
            accumulators = c's rows and vectors
            for k: accumulators += broadcast(a[row, k]) * b[k, vector]
            c's rows and vectors = accumulators

The accumulators are an array that is indexed by constants alone, which LLVM keeps in registers. Rows that a tensor
doesn't have, where `a` is read in place, are computed from its last row and not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvm_axe.tile.nodes import Copy, Gemm
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.targets.llvm.conversions import compute_dtype, convert
from tvm_axe.tile.targets.llvm.copies import write_copy
from tvm_axe.tile.targets.llvm.plan import Micro, packed_b
from tvm_axe.tile.targets.llvm.writer import Writer, nest


def write_gemm(writer: Writer, node: Gemm) -> None:
    """Emit ``c (+)= a @ b``."""
    if node in writer.plan.packed:
        write_copy(writer, Copy(packed_b(writer.plan.packed, node), node.b, atomic=None))
    _Product(writer, node).write()


class _Product:
    def __init__(self, writer: Writer, node: Gemm) -> None:
        self.writer, self.node = writer, node
        self.micro: Micro = writer.plan.micro[node]
        self.m, self.n, self.k = node.shape
        self.dtype = compute_dtype(node.c.tile.dtype)
        self.a = _matrix(writer, node.a, node.transpose_a)
        self.b = _matrix(writer, packed_b(writer.plan.packed, node), node.transpose_b)
        self.c = _matrix(writer, node.c, False)
        self.depth: Any = self.k
        self.rows: Any = self.m  # those that `a` has
        copy = writer.plan.in_place.get(node.a.tile)
        if copy is not None:
            self.a = self._moved(copy.src)

    def _moved(self, source: Region) -> _Matrix:
        """`a` where it was to be copied from, and how much of it there is."""
        writer, tile = self.writer, source.tile
        start = writer.exprs(source.start)
        for dim, offset in zip(source.dimensions, writer.exprs(self.node.a.start)):
            start[dim] = start[dim] + offset
        row, column = source.dimensions
        beyond = source.overruns(writer.analyzer)
        if row in beyond:
            self.rows = T.Bind(T.max(T.min(tile.shape[row] - start[row], self.m), 0))
        if column in beyond:
            self.depth = T.Bind(T.max(T.min(tile.shape[column] - start[column], self.k), 0))
        return _Matrix(writer, tile, start, (row, column))

    def write(self) -> None:
        lanes = self.micro.lanes
        vectors = -(-self.n // lanes) if self.micro.filled else self.n // lanes
        accumulate = self.node.accumulate
        if not accumulate and self.rows is not self.m:
            accumulate = True  # rows that `a` doesn't have are 0
            with nest([(0, self.m), (0, self.n)]) as (i, j):
                self.writer.store(self.node.c.tile, self.c.at(i, j), tirx.const(0, self.dtype))
        step = self.micro.vectors
        if vectors >= step:
            with T.serial(vectors // step) as panel:
                self._columns(panel * (step * lanes), step, lanes, accumulate)
        if vectors % step:
            self._columns(vectors // step * step * lanes, vectors % step, lanes, accumulate)
        for j in range(vectors * lanes, self.n):
            self._columns(j, 1, 1, accumulate)

    def _columns(self, j: Any, vectors: int, lanes: int, accumulate: bool) -> None:
        """A group of columns, all rows."""
        step = self.micro.rows
        whole = self.rows // step
        with T.serial(whole) as tile:
            self._tile(tile * step, step, j, vectors, lanes, accumulate, limit=None)
        if not isinstance(self.rows, int):
            with T.If(self.rows % step > 0), T.Then():
                self._tile(whole * step, step, j, vectors, lanes, accumulate, limit=self.rows)
        elif self.rows % step:
            self._tile(whole * step, self.rows % step, j, vectors, lanes, accumulate, limit=None)

    def _tile(self, i: Any, rows: int, j: Any, vectors: int, lanes: int, accumulate: bool, limit: Any) -> None:
        """One register tile; with `limit`, of its rows only those below it exist."""
        writer, tile = self.writer, self.node.c.tile
        sums = T.alloc_buffer((rows * vectors * lanes,), self.dtype, scope="local")
        cells = [(r, v, _vector((r * vectors + v) * lanes, lanes)) for r in range(rows) for v in range(vectors)]

        def row(r: int) -> Any:
            return i + r if limit is None else T.min(i + r, limit - 1)

        def column(v: int) -> Any:
            return _vector(j + v * lanes, lanes)

        for r, v, cell in cells:
            before = self.c.load(row(r), column(v)) if accumulate else None
            T.buffer_store(sums, _zero(self.dtype, lanes) if before is None else before, [cell])
        with T.serial(self.depth) as k:
            for r, v, cell in cells:
                a = convert(self.a.load(row(r), k), self.dtype)
                b = convert(self.b.load(k, column(v)), self.dtype)
                T.buffer_store(sums, sums[cell] + (a if lanes == 1 else T.Broadcast(a, lanes)) * b, [cell])
        for r, v, cell in cells:
            if limit is None:
                writer.store(tile, self.c.at(i + r, column(v)), sums[cell], filled=True)
            else:
                with T.If(i + r < limit), T.Then():
                    writer.store(tile, self.c.at(i + r, column(v)), sums[cell], filled=True)


class _Matrix:
    """A region as a matrix of the product: rows along the tile's dimension `dims[0]`, columns along `dims[1]`."""

    def __init__(self, writer: Writer, tile: Tile, start: Sequence[Any], dims: tuple[int, int]) -> None:
        self._writer, self._tile, self._start, self._dims = writer, tile, list(start), dims

    def at(self, row: Any, column: Any) -> list[Any]:
        """The indices of an element or, with a ramp, of a vector."""
        indices = list(self._start)
        for dim, offset in zip(self._dims, (row, column)):
            if isinstance(offset, tirx.Ramp):
                indices[dim] = T.Ramp(indices[dim] + offset.base, 1, offset.lanes)
            else:
                indices[dim] = indices[dim] + offset
        return indices

    def load(self, row: Any, column: Any) -> Any:
        """An element or a vector, in the type that the tile is held in."""
        return self._writer.held(self._tile, self.at(row, column), filled=True)


def _matrix(writer: Writer, region: Region, transposed: bool) -> _Matrix:
    rank = len(region.extents)
    dims = (rank - 1, rank - 2) if transposed else (rank - 2, rank - 1)
    return _Matrix(writer, region.tile, writer.exprs(region.start), dims)


def _vector(start: Any, lanes: int) -> Any:
    return start if lanes == 1 else T.Ramp(start, 1, lanes)


def _zero(dtype: str, lanes: int) -> Any:
    zero = tirx.const(0, dtype)
    return zero if lanes == 1 else T.Broadcast(zero, lanes)
