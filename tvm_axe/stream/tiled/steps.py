"""The statements of a tile program as functions of whole tiles: what each takes, what it makes, and how it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import tvm_ffi
from tvm import ir, sym, tirx

from tvm_axe import _tvm
from tvm_axe.errors import StreamError
from tvm_axe.stream.kernels import operations
from tvm_axe.stream.tiled.boxes import Box
from tvm_axe.stream.tiled.expressions import Evaluator, converted, unknown
from tvm_axe.stream.tiled.lines import Lines
from tvm_axe.stream.tiled.points import Points
from tvm_axe.tile.nodes import Assign, Copy, Fill, Gemm, Node, Parallel, Reduce, Scan, Signal, Sort, Wait
from tvm_axe.tile.regions import Region, constant
from tvm_axe.tile.regions import Tile as TileBuffer
from tvm_axe.tile.walking import substitute_in, variables_in

Arrays: TypeAlias = "Mapping[TileBuffer, np.ndarray]"
Values: TypeAlias = "Mapping[tirx.Var, Any]"
Made: TypeAlias = "dict[TileBuffer | None, np.ndarray]"
"""What a step makes of each tile that it writes, and under None what it stores in a tensor."""
Call: TypeAlias = "Callable[[Arrays, Sequence[np.ndarray], Values], Made]"


@dataclass(frozen=True, eq=False)
class Step:
    """A statement, or a part of one.

    Attributes
    ----------
    node : Node
        The statement.
    word : str
        What it does, for the names of units.
    reads, writes : tuple[Tile, ...]
        The tiles on chip that it needs the contents of, and those that it makes new contents of.
    call : Callable
        A function from the contents of tiles by tile, those of `boxes`, and the values of `variables` to what it makes.
    flops : int
        FLOPs of one call.
    boxes : tuple[Box, ...]
        What it loads of tensors.
    store : Box, optional
        What it stores to a tensor.
    variables : tuple[Var, ...]
        The variables of loops that it computes with.
    plain : str, optional
        ``"load"`` if the one tile that it writes is its box as it lies there, ``"name"`` if it is the tile that it
        reads, ``"store"`` if all elements of the one are stored in their order: nothing is computed.
    """

    node: Node
    word: str
    reads: tuple[TileBuffer, ...]
    writes: tuple[TileBuffer, ...]
    call: Call
    flops: int = 0
    boxes: tuple[Box, ...] = ()
    store: Box | None = None
    variables: tuple[tirx.Var, ...] = ()
    plain: str | None = None


class Steps:
    """Makes steps of the statements in the iterations of a nest of loops.

    Parameters
    ----------
    points : Points
        The iterations.
    analyzer : sym.Analyzer
        What knows the ranges of the loops' variables.
    lines : Lines
        Where statements stand.
    """

    def __init__(self, points: Points, analyzer: sym.Analyzer, lines: Lines) -> None:
        self.points, self.analyzer, self.lines = points, analyzer, lines

    def of(self, node: Node) -> list[Step]:
        """Return the steps of a statement that is no loop and no branch.

        Raises
        ------
        StreamError
            If streams have nothing for it.
        """
        if not isinstance(node, Parallel) and type(node) not in _MAKERS:
            raise self.lines.refuse(node, _REMEDIES.get(type(node), "streams have nothing for it; compute it before"))
        for joined, _ in node.joins:
            raise self.lines.refuse(
                node, f"{joined.name} is joined with atomically, in no order; sum in a tile, over a loop of the block"
            )
        strange = unknown(node.body if isinstance(node, Parallel) else list(node.scalars))
        if strange is not None:
            raise self.lines.refuse(node, f"{strange} isn't computed in streams; compute it before, and pass a tensor")
        inside = [] if isinstance(node, Parallel | Assign) else list(node.scalars)
        if not all(self.points.settles(each) for each in inside):
            raise self.lines.refuse(node, f"it works where data says; {_SETTLED}")
        if isinstance(node, Parallel):
            return [_PointSteps(self, node, part).step() for part in _apart(node.body)]
        return [_MAKERS[type(node)](self, node if isinstance(node, Assign) else self._pinned(node))]

    def pinned(self, expr: Any) -> Any:
        """Return a variable for an expression of tensors that are given, whose values are known by then."""
        if isinstance(expr, int | float) or not _loads(expr):
            return expr
        var = tirx.Var("given", expr.ty.dtype)
        self.points.named(var, expr)
        return var

    def _pinned(self, node: Node) -> Node:
        """Return a node with variables in the place of what it takes of tensors that are given."""

        def replaced(value: Any) -> Any:
            if isinstance(value, Region):
                return replace(value, start=tuple(map(self.pinned, value.start)))
            return self.pinned(value) if isinstance(value, ir.Expr) else value

        if not any(_loads(each) for each in node.scalars if not isinstance(each, int)):
            return node
        made = replace(node, **{each.name: replaced(getattr(node, each.name)) for each in fields(node)})
        self.lines.same(made, node)
        return made

    def guarded(self, step: Step, condition: Any) -> Step:
        """Return a step, which stores nothing, that does nothing where a condition doesn't hold."""
        condition = self.pinned(condition)

        def call(arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> Made:
            if Evaluator(values)(condition):
                return step.call(arrays, boxes, values)
            return {tile: arrays[tile] for tile in step.writes}

        reads = tuple(dict.fromkeys((*step.reads, *step.writes)))
        variables = tuple(dict.fromkeys((*step.variables, *self.loop_variables(condition))))
        return replace(step, reads=reads, variables=variables, call=call, plain=None)

    def loop_variables(self, *values: Any) -> tuple[tirx.Var, ...]:
        """Return the variables of loops in expressions, by their names."""
        found = [var for var in variables_in(*values) if self.points.knows(var)]
        return tuple(sorted(found, key=lambda var: str(var.name)))

    def box(self, node: Node, region: Region) -> Box:
        """Return the box that a region of a tensor is."""
        return Box(region, self.points, self.lines.place(node))

    # ---- Statements on regions

    def _copy(self, node: Copy) -> Step:
        src, dst = node.src, node.dst
        get, put = self._source(src), self._target(dst)

        def call(arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> Made:
            return put(get(arrays, boxes, values), arrays, values)

        outside, inside = src.tile.scope == "global", dst.tile.scope != "global"
        plain = None
        if inside and dst.whole and dst.tile.dtype == src.tile.dtype and (outside or src.whole):
            plain = "load" if outside else "name"
        elif not inside and (outside or src.whole):
            plain = "store"
        return Step(
            node,
            f"store_{dst.tile.name}" if not inside else f"copy_{dst.tile.name}",
            self._taken((src,), (dst,)),
            (dst.tile,) if inside else (),
            call,
            boxes=(self.box(node, src),) if outside else (),
            store=None if inside else self.box(node, dst),
            variables=self._starts(src, dst),
            plain=plain,
        )

    def _fill(self, node: Fill) -> Step:
        put = self._target(node.dst)

        def call(arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> Made:
            return put(np.broadcast_to(Evaluator(values)(node.value), node.dst.extents), arrays, values)

        inside = node.dst.tile.scope != "global"
        variables = (*self._starts(node.dst), *self.loop_variables(node.value))
        return Step(
            node,
            f"fill_{node.dst.tile.name}",
            self._taken((), (node.dst,)),
            (node.dst.tile,) if inside else (),
            call,
            store=None if inside else self.box(node, node.dst),
            variables=tuple(dict.fromkeys(variables)),
        )

    def _gemm(self, node: Gemm) -> Step:
        a, b, c, put = *map(self._source, (node.a, node.b, node.c)), self._target(node.c)
        m, n, k = node.shape
        wide = node.c.tile.dtype

        def call(arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> Made:
            left = a(arrays, boxes, values).reshape(node.a.extents[-2:]).astype(wide)
            right = b(arrays, boxes, values).reshape(node.b.extents[-2:]).astype(wide)
            found = (left.T if node.transpose_a else left) @ (right.T if node.transpose_b else right)
            if node.accumulate:
                found = c(arrays, boxes, values).reshape(m, n) + found
            return put(found, arrays, values)

        sources = (node.a, node.b, node.c) if node.accumulate else (node.a, node.b)
        return Step(
            node,
            f"gemm_{node.c.tile.name}",
            self._taken(sources, (node.c,)),
            (node.c.tile,),
            call,
            2 * m * n * k,
            variables=self._starts(node.a, node.b, node.c),
        )

    def _reduce(self, node: Reduce) -> Step:
        function = {"sum": np.add, "max": np.maximum, "min": np.minimum}[node.kind]
        get, old, put = self._source(node.src), self._source(node.dst), self._target(node.dst)

        def call(arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> Made:
            found = function.reduce(get(arrays, boxes, values), axis=node.axis).reshape(node.dst.extents)
            return put(function(old(arrays, boxes, values), found) if node.accumulate else found, arrays, values)

        sources = (node.src, node.dst) if node.accumulate else (node.src,)
        return Step(
            node,
            f"{node.kind}_{node.dst.tile.name}",
            self._taken(sources, (node.dst,)),
            (node.dst.tile,),
            call,
            int(np.prod(node.src.extents)),
            variables=self._starts(node.src, node.dst),
        )

    def _scan(self, node: Scan) -> Step:
        get, put = self._source(node.src), self._target(node.dst)

        def call(arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> Made:
            found = get(arrays, boxes, values)
            found = np.flip(found, node.axis) if node.reverse else found
            sums = np.cumsum(found, axis=node.axis, dtype=found.dtype)
            if node.exclusive:
                sums = np.roll(sums, 1, axis=node.axis)
                sums[(slice(None),) * node.axis + (0,)] = 0
            return put(np.flip(sums, node.axis) if node.reverse else sums, arrays, values)

        return Step(
            node,
            f"cumsum_{node.dst.tile.name}",
            self._taken((node.src,), (node.dst,)),
            (node.dst.tile,),
            call,
            int(np.prod(node.src.extents)),
            variables=self._starts(node.src, node.dst),
        )

    def _sort(self, node: Sort) -> Step:
        get, puts = self._source(node.src), [self._target(region) for region in node.results]

        def call(arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> Made:
            lines = np.moveaxis(get(arrays, boxes, values), node.axis, -1)
            bad = np.isnan(lines.astype("float64")) if lines.dtype.kind in "fV" else np.zeros(lines.shape, bool)
            size = np.where(bad, 0, lines).astype("float64" if lines.dtype.kind in "fV" else "int64")
            places = np.broadcast_to(np.arange(lines.shape[-1]), lines.shape)
            first = ~bad if node.nan_first else bad
            order = np.lexsort((places, -size if node.descending else size, first))[..., : node.count]
            results = (np.take_along_axis(lines, order, -1), order)
            chosen = [each for each, region in zip(results, (node.values, node.indices)) if region is not None]
            made: Made = {}
            for put, region, found in zip(puts, node.results, chosen):
                made |= put(found.reshape(region.extents), {**arrays, **made}, values)  # type: ignore[dict-item]
            return made

        length = node.length
        return Step(
            node,
            f"{node.word}_{node.results[0].tile.name}",
            self._taken((node.src,), node.results),
            tuple(dict.fromkeys(region.tile for region in node.results)),
            call,
            int(np.prod(node.src.extents)) * max(1, (length - 1).bit_length()),
            variables=self._starts(node.src, *node.results),
        )

    def _assign(self, node: Assign) -> Step:
        """Return the step of a number that is assigned, one that depends on the contents of tiles or of tensors."""
        tiles = {tile.buffer: tile for tile in (node.tile, *node.reads)}
        boxes: dict[str, tuple[Box, tirx.Var]] = {}

        def loaded(load: Any) -> Any:
            tile, key = tiles[load.source], str(load)
            if tile.scope != "global":
                return load
            if key not in boxes:
                region = Region(tile, tuple(load.indices), (1,) * len(load.indices))
                boxes[key] = (self.box(node, region), tirx.Var(f"{tile.name}_{len(boxes)}", tile.dtype))
            return boxes[key][1]

        value = _tvm.structural_map(node.value, (ir.TensorLoad, loaded))
        for box, _ in boxes.values():
            if not all(self.points.settles(start) for start in box.region.start):
                raise self.lines.refuse(node, f"{box.region.tile.name} is read where data says; {_SETTLED}")
        loads = tuple(var for _, var in boxes.values())

        def call(arrays: Arrays, given: Sequence[np.ndarray], values: Values) -> Made:
            def load(expr: Any, at: Evaluator) -> Any:
                return arrays[tiles[expr.source]][tuple(int(at(index)) for index in expr.indices)]

            at = Evaluator({**values, **{var: array.reshape(()) for var, array in zip(loads, given)}}, load)
            new = arrays[node.tile].copy() if node.tile in arrays else np.zeros(node.tile.shape, node.tile.dtype)
            new[tuple(int(at(index)) for index in node.indices)] = converted(at(value), node.tile.dtype)
            return {node.tile: new}

        whole = all(extent == 1 for extent in node.tile.shape)
        reads = [tile for tile in node.reads if tile.scope != "global"]
        return Step(
            node,
            f"assign_{node.tile.name}",
            tuple(dict.fromkeys((*reads, *(() if whole else (node.tile,))))),
            (node.tile,),
            call,
            operations(node.value),
            tuple(box for box, _ in boxes.values()),
            variables=self.loop_variables(value, *node.indices),
        )

    def _source(self, region: Region) -> Callable[[Arrays, Sequence[np.ndarray], Values], np.ndarray]:
        """Return what takes a region's elements, of its extents."""
        if region.tile.scope == "global":
            return lambda arrays, boxes, values: boxes[0].reshape(region.extents)
        if _is_all(region):
            return lambda arrays, boxes, values: arrays[region.tile]
        return lambda arrays, boxes, values: arrays[region.tile][_slices(region, values)]

    def _target(self, region: Region) -> Callable[[np.ndarray, Arrays, Values], Made]:
        """Return what puts elements into a region: the tile with them, or what is stored to a tensor."""
        tile = region.tile
        if tile.scope == "global":
            return lambda found, arrays, values: {None: converted(found, tile.dtype).astype(tile.dtype)}
        if _is_all(region):
            return lambda found, arrays, values: {tile: kept(found.reshape(tile.shape), tile.dtype)}

        def put(found: np.ndarray, arrays: Arrays, values: Values) -> Made:
            new = arrays[tile].copy()
            new[_slices(region, values)] = kept(found.reshape(region.extents), tile.dtype)
            return {tile: new}

        return put

    def _taken(self, sources: tuple[Region, ...], targets: tuple[Region, ...]) -> tuple[TileBuffer, ...]:
        """Return the tiles whose contents are needed: those read, and those written in part."""
        found = [*sources, *(target for target in targets if not _is_all(target))]
        return tuple(dict.fromkeys(region.tile for region in found if region.tile.scope != "global"))

    def _starts(self, *regions: Region) -> tuple[tirx.Var, ...]:
        """Return the variables of where regions of tiles on chip start."""
        starts = [start for region in regions if region.tile.scope != "global" for start in region.start]
        return self.loop_variables(*starts)


class _PointSteps:
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
            conditions.extend(_conjuncts(stmt.condition))
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
                    f"loops say; {_SETTLED}, or copy a box, and choose among its elements",
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


def kept(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return values as a tile of a type holds them."""
    return converted(value, dtype).astype(dtype)


def _apart(body: Any) -> Iterator[Any]:
    """Return the parts of a `parallel` that may run one after the other, since points touch nothing of each other's."""
    if isinstance(body, tirx.SeqStmt) and all(isinstance(stmt, tirx.BufferStore) for stmt in body.seq):
        yield from body.seq
    elif isinstance(body, tirx.IfThenElse) and body.else_case is None and not _loads(body.condition):
        for part in _apart(body.then_case):
            yield tirx.IfThenElse(body.condition, part, None)
    else:
        yield body


def _loads(expr: Any) -> bool:
    """Return whether an expression loads something."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, (ir.TensorLoad, found.append))
    return bool(found)


def _is_all(region: Region) -> bool:
    return region.whole and all(constant(start) == 0 for start in region.start if isinstance(constant(start), int))


def _slices(region: Region, values: Values) -> tuple[slice, ...]:
    starts = [int(Evaluator(values)(start)) for start in region.start]
    return tuple(slice(start, start + extent) for start, extent in zip(starts, region.extents))


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


def _conjuncts(condition: Any) -> Iterator[Any]:
    if isinstance(condition, tirx.And):
        yield from _conjuncts(condition.a)
        yield from _conjuncts(condition.b)
    else:
        yield condition


_MAKERS: dict[type, Callable[[Steps, Any], Step]] = {
    Assign: Steps._assign,
    Copy: Steps._copy,
    Fill: Steps._fill,
    Gemm: Steps._gemm,
    Reduce: Steps._reduce,
    Scan: Steps._scan,
    Sort: Steps._sort,
}
"""What makes a step of each statement that works on regions."""

_SETTLED = "what streams go where is settled before: pass the tensors that say so in `given`"

_REMEDIES: dict[type, str] = {
    Signal: "blocks that meet in flags have no stream; let one block do what follows, in a loop",
    Wait: "blocks that meet in flags have no stream; let one block do what comes before, in a loop",
}
"""Of each statement that streams have nothing for, why, and what to write instead."""
