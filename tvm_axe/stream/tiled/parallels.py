"""What a `parallel` of a tile program does at its points, as steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm_ffi
from tvm import ir, sym, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.counting import conjuncts
from tvm_axe.analysis.expressions import loads_in
from tvm_axe.errors import StreamError
from tvm_axe.stream.kernels import operations
from tvm_axe.stream.tiled.boxes import Box
from tvm_axe.stream.tiled.expressions import Evaluator, kept
from tvm_axe.stream.tiled.step import SETTLED, Arrays, Made, Step, Values
from tvm_axe.tile.nodes import Parallel
from tvm_axe.tile.regions import Region, constant
from tvm_axe.tile.regions import Tile as TileBuffer
from tvm_axe.tile.walking import substitute_in

if TYPE_CHECKING:
    from tvm_axe.stream.tiled.steps import Steps


def apart(body: Any) -> Iterator[Any]:
    """Return the parts of a `parallel` that may run one after the other, since points touch nothing of each other's."""
    if isinstance(body, tirx.SeqStmt) and all(isinstance(stmt, tirx.BufferStore) for stmt in body.seq):
        yield from body.seq
    elif isinstance(body, tirx.IfThenElse) and body.else_case is None and not loads_in(body.condition):
        for part in apart(body.then_case):
            yield tirx.IfThenElse(body.condition, part, None)
    else:
        yield body


class PointSteps:
    """Makes the step of what a `parallel` does at its points, or of a part of it."""

    def __init__(self, steps: Steps, node: Parallel, body: tirx.Stmt) -> None:
        self.steps, self.node, self.body = steps, node, body
        self.tiles = {tile.buffer: tile for tile, _, _ in node.accesses}
        self.boxes: dict[str, tuple[Box, tirx.Var, tuple[int, ...]]] = {}
        self.analyzer = sym.Analyzer()
        for var, extent in zip(node.vars, node.extents):
            self.analyzer.bind(var, ir.Range.from_min_extent(0, extent))
            steps.analyzer.bind(var, ir.Range.from_min_extent(0, extent))

    def step(self) -> Step:
        """Return the step.

        Raises
        ------
        StreamError
            If a tensor's elements are chosen by data, or stored at some points only.
        """
        body = self._settled(self.body)
        stores: list[tirx.BufferStore] = []
        tvm_ffi.structural_walk(body, (tirx.BufferStore, stores.append))
        outside = [store for store in stores if self.tiles[store.buffer].scope == "global"]
        rows: np.ndarray | None = None
        if outside:
            if len(stores) > 1:
                raise self.steps.lines.refuse(
                    self.node, "it stores to a tensor beside other stores; write one `parallel` for each"
                )
            body, rows = self._unmasked(body, outside[0])
        region, order = (None, ()) if not outside else self._region(outside[0].buffer, outside[0].indices)
        read = body if not outside else outside[0].value
        body = _tvm.structural_map(body, (ir.TensorLoad, self._loaded))
        inner = [body] if not outside else [_tvm.structural_map(read, (ir.TensorLoad, self._loaded))]
        loads: dict[TileBuffer, None] = {}
        tvm_ffi.structural_walk(inner, (ir.TensorLoad, lambda load: loads.setdefault(self.tiles[load.source])))
        writes = () if outside else tuple(dict.fromkeys(self.tiles[store.buffer] for store in stores))
        partly = [tile for tile in writes if not self._covers(tile, body)]
        run = _Running(self.node, self.tiles, tuple(self.boxes.values()))

        def call(arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> Made:
            if region is None:
                held = run(body, arrays, boxes, values)
                return {tile: held[tile] for tile in writes}
            found = run.value(inner[0], arrays, boxes, values)
            return {None: kept(_as_box(found, order, region.extents), region.tile.dtype)}

        return Step(
            self.node,
            f"store_{region.tile.name}" if region is not None else f"points_{writes[0].name}",
            tuple(dict.fromkeys((*loads, *partly))),
            writes,
            call,
            int(np.prod(self.node.extents)) * sum(operations(store.value) for store in stores),
            tuple(box for box, _, _ in self.boxes.values()),
            None if region is None else replace(self.steps.box(self.node, region), rows=rows),
            self.steps.loop_variables(*inner),
        )

    def _settled(self, stmt: Any) -> Any:
        """Return a statement without the conditions that always hold."""
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([self._settled(inner) for inner in stmt.seq])
        if isinstance(stmt, tirx.IfThenElse):
            if self.steps.analyzer.can_prove(stmt.condition):
                return self._settled(stmt.then_case)
            otherwise = None if stmt.else_case is None else self._settled(stmt.else_case)
            return tirx.IfThenElse(stmt.condition, self._settled(stmt.then_case), otherwise)
        return stmt

    def _unmasked(self, stmt: Any, store: tirx.BufferStore) -> tuple[Any, np.ndarray | None]:
        """Return a store to a tensor without its conditions, and how many rows these leave, if not all.

        Raises
        ------
        StreamError
            If they leave something else than the tensor's elements and the first rows of a box.
        """
        conditions: list[Any] = []
        while isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None:
            conditions.extend(conjuncts(stmt.condition))
            stmt = stmt.then_case
        tile, analyzer = self.tiles[store.buffer], sym.Analyzer()
        bounds = [index < extent for index, extent in zip(store.indices, tile.shape)]
        rows: np.ndarray | None = None
        for part in conditions:
            if any(analyzer.can_prove(tirx.Or(tirx.Not(bound), part)) for bound in bounds):
                continue  # what is beyond the tensor's end isn't kept of it
            found = self._leading(part, store)
            rows = found if rows is None else np.minimum(rows, found)
        if isinstance(stmt, tirx.BufferStore):
            return stmt, rows
        raise self._some(store)

    def _leading(self, condition: Any, store: tirx.BufferStore) -> np.ndarray:
        """Return for how many rows, the first ones, a condition holds in each iteration."""
        points = self.steps.points
        region, order = self._region(store.buffer, store.indices)
        number = next((at for at, extent in zip(order, region.extents) if extent > 1), 0)
        var = self.node.vars[number]  # of the rows: the first coordinate that a box has several elements along
        if not points.settles(substitute_in(condition, {var: tirx.const(0, var.ty.dtype)})):
            raise self._some(store)
        holds = points.along(condition, var, self.node.extents[number]).astype(bool)
        if (holds[:, 1:] > holds[:, :-1]).any():
            raise self._some(store)
        return holds.sum(axis=1)

    def _some(self, store: tirx.BufferStore) -> StreamError:
        return self.steps.lines.refuse(
            self.node,
            f"it stores to {self.tiles[store.buffer].name} at some points only; store all of a box, under no other "
            "condition than that its elements are there or that rows are the first of it",
        )

    def _region(self, buffer: tirx.Buffer, indices: Sequence[Any]) -> tuple[Region, tuple[int, ...]]:
        """Return the box of a tensor that the points touch, and the number of the coordinate along each dimension."""
        tile = self.tiles[buffer]
        starts, extents, order = [], [], []
        for index in indices:
            start = substitute_in(index, {var: tirx.const(0, var.ty.dtype) for var in self.node.vars})
            along = [
                number
                for number, var in enumerate(self.node.vars)
                if self.analyzer.can_prove_equal(index - start - var, 0)
            ]
            if not self.steps.points.settles(start) or not (along or self.analyzer.can_prove_equal(index - start, 0)):
                raise self.steps.lines.refuse(
                    self.node,
                    f"{tile.name}[{', '.join(map(str, indices))}] isn't a box of {tile.name} that starts where the "
                    f"loops say; {SETTLED}, or copy a box, and choose among its elements",
                )
            starts.append(self.analyzer.simplify(start))
            extents.append(self.node.extents[along[0]] if along else 1)
            order.append(along[0] if along else -1)
        return Region(tile, tuple(starts), tuple(extents)), tuple(order)

    def _loaded(self, load: Any) -> Any:
        """Return a variable in the place of what is loaded from a tensor."""
        if self.tiles[load.source].scope != "global":
            return load
        key = str(load)
        if key not in self.boxes:
            region, order = self._region(load.source, load.indices)
            var = tirx.Var(f"{region.tile.name}_{len(self.boxes)}", region.tile.dtype)
            self.boxes[key] = (self.steps.box(self.node, region), var, order)
        return self.boxes[key][1]

    def _covers(self, tile: TileBuffer, body: Any) -> bool:
        """Return whether all of a tile is written, whatever it holds."""
        for stmt in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
            if isinstance(stmt, tirx.BufferStore) and self.tiles[stmt.buffer] is tile:
                order = _identity(stmt.indices, self.node, tile.shape)
                if order is not None and len({*order} - {-1}) == len(self.node.extents):
                    return True
        return False


class _Running:
    """Computes what a `parallel` does."""

    def __init__(
        self,
        node: Parallel,
        tiles: Mapping[tirx.Buffer, TileBuffer],
        boxes: tuple[tuple[Box, tirx.Var, tuple[int, ...]], ...],
    ) -> None:
        self.node, self.tiles, self.boxes = node, tiles, boxes
        rank = len(node.extents)
        self.coordinates = {
            var: np.arange(extent).reshape([-1 if at == dim else 1 for at in range(rank)])
            for dim, (var, extent) in enumerate(zip(node.vars, node.extents))
        }

    def __call__(self, body: Any, arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> dict[Any, np.ndarray]:
        """Return the tiles after the statement."""
        held = dict(arrays)
        self._run(body, self._evaluator(held, boxes, values), held, np.True_)
        return held

    def value(self, expr: Any, arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> np.ndarray:
        """Return an expression's value at all the points."""
        found = self._evaluator(dict(arrays), boxes, values)(expr)
        return np.broadcast_to(found, self.node.extents)

    def _evaluator(self, held: dict[Any, np.ndarray], boxes: Sequence[np.ndarray], values: Values) -> Evaluator:
        known = dict(values) | self.coordinates
        for (_, var, order), array in zip(self.boxes, boxes):
            known[var] = _at_points(array, order, self.node.extents)

        def load(expr: Any, at: Evaluator) -> np.ndarray:
            tile = self.tiles[expr.source]
            array, order = held[tile], _identity(expr.indices, self.node, tile.shape)
            if order is not None:
                return _at_points(array, order, self.node.extents)
            places = np.broadcast_arrays(*(at(index) for index in expr.indices))
            # Both sides of a choice are computed, and the one that isn't taken may be outside.
            return array[tuple(np.clip(place, 0, size - 1) for place, size in zip(places, array.shape))]

        return Evaluator(known, load)

    def _run(self, stmt: Any, at: Evaluator, held: dict[Any, np.ndarray], holds: Any) -> None:
        if isinstance(stmt, tirx.SeqStmt):
            for inner in stmt.seq:
                self._run(inner, at, held, holds)
        elif isinstance(stmt, tirx.Bind):
            at.values[stmt.var] = at(stmt.value)
        elif isinstance(stmt, tirx.IfThenElse):
            condition = at(stmt.condition)
            self._run(stmt.then_case, at, held, np.logical_and(holds, condition))
            if stmt.else_case is not None:
                self._run(stmt.else_case, at, held, np.logical_and(holds, np.logical_not(condition)))
        else:
            self._store(stmt, at, held, holds)

    def _store(self, store: tirx.BufferStore, at: Evaluator, held: dict[Any, np.ndarray], holds: Any) -> None:
        tile, extents = self.tiles[store.buffer], self.node.extents
        value = np.broadcast_to(at(store.value), extents)
        order = _identity(store.indices, self.node, tile.shape)
        if holds is np.True_ and order is not None and len({*order} - {-1}) == len(extents):
            held[tile] = kept(_as_box(value, order, tile.shape), tile.dtype)
            return
        places = [np.broadcast_to(at(index), extents) for index in store.indices]
        mask = np.broadcast_to(holds, extents)
        new = held[tile].copy() if tile in held else np.zeros(tile.shape, tile.dtype)
        new[tuple(place[mask] for place in places)] = kept(value[mask], tile.dtype)
        held[tile] = new


def _identity(indices: Sequence[Any], node: Parallel, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the number of the coordinate that each index is, -1 of 0, if they go through all of their dimensions."""
    order = []
    for index, size in zip(indices, shape):
        number = next((at for at, var in enumerate(node.vars) if var.same_as(index)), None)
        if number is not None and number not in order and node.extents[number] == size:
            order.append(number)
        elif number is None and size == 1 and constant(index) == 0 and isinstance(constant(index), int):
            order.append(-1)
        else:
            return None
    return tuple(order)


def _at_points(array: np.ndarray, order: Sequence[int], extents: Sequence[int]) -> np.ndarray:
    """Return an array whose dimensions are coordinates, or of extent 1, as one that is broadcast over the points."""
    sizes = [extents[number] if number >= 0 else 1 for number in order]
    kept_dims = [at for at, number in enumerate(order) if number >= 0]
    numbers = [order[at] for at in kept_dims]
    array = array.reshape([sizes[at] for at in kept_dims]).transpose(np.argsort(numbers))
    return array.reshape([extents[at] if at in numbers else 1 for at in range(len(extents))])


def _as_box(value: np.ndarray, order: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Return values at points as an array whose dimensions are coordinates."""
    return value.transpose([number for number in order if number >= 0]).reshape(shape)
