"""Products of tiles: register tiles of accumulators over panels.

    for each group of vectors of c's columns:        # b's panel of them stays in the first-level cache
        for each group of rows:
            accumulators = c's rows and vectors
            for k: accumulators += broadcast(a[row, k]) * b[k, vector]
            c's rows and vectors = accumulators

The accumulators are an array that is indexed by constants alone, which LLVM keeps in registers. Rows that a tensor
doesn't have, where `a` is read in place, are computed from its last row and not written; nor are rows and columns that
a tensor doesn't have in which sums are stored at once. Vectors that lie beside it are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
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
        self.columns: Any = self.n  # those that `c` has
        self.accumulate = node.accumulate
        copy = writer.plan.in_place.get(node.a.tile)
        if copy is not None:
            self.a, self.rows, self.depth = self._moved(copy.src, node.a, (self.m, self.k))
        height: Any = self.m  # rows that `c` has
        if node in writer.plan.at_once:
            self.c, height, self.columns = self._moved(writer.plan.at_once[node][0].dst, node.c, (self.m, self.n))
            self.accumulate = False
        if self.rows is self.m:
            self.rows = height
        elif not self.accumulate:  # rows that `a` doesn't have are 0
            self.rows = T.Bind(T.min(self.rows, height))
            with nest([(self.rows, height), (0, self.columns)]) as (i, j):
                self.c.store(i, j, tirx.const(0, self.dtype))

    def _moved(self, place: Region, part: Region, extents: tuple[int, int]) -> tuple[_Matrix, Any, Any]:
        """A part of a tile where that was to be copied from or to, and how many rows and columns of it there are."""
        writer, tile = self.writer, place.tile
        start, beyond = writer.exprs(place.start), place.overruns(writer.analyzer)
        for dim, offset in zip(place.dimensions, writer.exprs(part.start)):
            start[dim] = start[dim] + offset
        row, column = place.dimensions
        rows, columns = (
            T.Bind(T.max(T.min(tile.shape[dim] - start[dim], extent), 0)) if dim in beyond else extent
            for dim, extent in zip(place.dimensions, extents)
        )
        return _Matrix(writer, tile, start, (row, column)), rows, columns

    def write(self) -> None:
        """Emit all columns, or those that `c` has."""
        if self.columns is self.n:
            self._all_columns()
            return
        with T.If(self.columns == self.n):
            with T.Then():
                self._all_columns()
            with T.Else():
                self._some_columns()

    def _all_columns(self) -> None:
        lanes, step = self.micro.lanes, self.micro.vectors
        vectors = -(-self.n // lanes) if self.micro.filled else self.n // lanes
        if vectors >= step:
            with T.serial(vectors // step) as panel:
                self._columns(panel * (step * lanes), step, lanes)
        if vectors % step:
            self._columns(vectors // step * step * lanes, vectors % step, lanes)
        for j in range(vectors * lanes, self.n):
            self._columns(j, 1, 1)

    def _some_columns(self) -> None:
        """Fewer columns than the product has: whole panels, and of the next as many vectors as they reach into."""
        lanes, step = self.micro.lanes, self.micro.vectors
        panels = T.Bind(tirx.truncdiv(self.columns, step * lanes))
        begin = panels * (step * lanes)
        with T.serial(panels) as panel:
            self._columns(panel * (step * lanes), step, lanes)
        for vectors in range(1, step + 1):
            last = self.columns - begin - (vectors - 1) * lanes
            with T.If(tirx.all(last > 0, last <= lanes)), T.Then():
                self._columns(begin, vectors, lanes, last)

    def _columns(self, j: Any, vectors: int, lanes: int, last: Any = None) -> None:
        """A group of columns, all rows; with `last`, so many elements of its last vector are `c`'s."""
        step = self.micro.rows
        # Rows aren't negative, so the quotient may be the processor's; of others upstream names remainders twice.
        whole = self.rows // step if isinstance(self.rows, int) else tirx.truncdiv(self.rows, step)
        with T.serial(whole) as tile:
            self._tile(tile * step, step, j, vectors, lanes, limit=None, last=last)
        if not isinstance(self.rows, int):
            with T.If(whole * step < self.rows), T.Then():
                self._tile(whole * step, step, j, vectors, lanes, limit=self.rows, last=last)
        elif self.rows % step:
            self._tile(whole * step, self.rows % step, j, vectors, lanes, limit=None, last=last)

    def _tile(self, i: Any, rows: int, j: Any, vectors: int, lanes: int, limit: Any, last: Any) -> None:
        """One register tile; with `limit`, of its rows only those below it exist, and see `_columns`."""
        sums = T.alloc_buffer((rows * vectors * lanes,), self.dtype, scope="local")
        cells = [(r, v, _vector((r * vectors + v) * lanes, lanes)) for r in range(rows) for v in range(vectors)]

        def row(r: int) -> Any:
            return i + r if limit is None else T.min(i + r, limit - 1)

        def column(v: int) -> Any:
            return _vector(j + v * lanes, lanes)

        for r, v, cell in cells:
            before = self.c.load(row(r), column(v)) if self.accumulate else None
            T.buffer_store(sums, _zero(self.dtype, lanes) if before is None else before, [cell])
        with T.serial(self.depth) as k:
            for r, v, cell in cells:
                a = convert(self.a.load(row(r), k), self.dtype)
                b = convert(self.b.load(k, column(v)), self.dtype)
                T.buffer_store(sums, sums[cell] + (a if lanes == 1 else T.Broadcast(a, lanes)) * b, [cell])
        edge = None if last is None else T.alloc_buffer((lanes,), self.dtype, scope="local")
        for r, v, cell in cells:
            with ExitStack() as scope:
                if limit is not None:
                    scope.enter_context(T.If(i + r < limit))
                    scope.enter_context(T.Then())
                if edge is None or v < vectors - 1:
                    self.c.store(i + r, column(v), sums[cell])
                    continue
                T.buffer_store(edge, sums[cell], [_vector(0, lanes)])
                with T.serial(last) as lane:
                    self.c.store(i + r, j + v * lanes + lane, edge[lane])


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

    def store(self, row: Any, column: Any, value: Any) -> None:
        """Store an element or a vector, given in the type that it is computed with."""
        self._writer.store(self._tile, self.at(row, column), value, filled=True)


def _matrix(writer: Writer, region: Region, transposed: bool) -> _Matrix:
    rank = len(region.extents)
    dims = (rank - 1, rank - 2) if transposed else (rank - 2, rank - 1)
    return _Matrix(writer, region.tile, writer.exprs(region.start), dims)


def _vector(start: Any, lanes: int) -> Any:
    return start if lanes == 1 else T.Ramp(start, 1, lanes)


def _zero(dtype: str, lanes: int) -> Any:
    zero = tirx.const(0, dtype)
    return zero if lanes == 1 else T.Broadcast(zero, lanes)
