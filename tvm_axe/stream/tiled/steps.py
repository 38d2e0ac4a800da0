"""The statements of a tile program as functions of whole tiles: what each takes, what it makes, and how it computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from tvm import ir, sym, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import loads_in
from tvm_axe.stream.kernels import operations
from tvm_axe.stream.tiled.boxes import Box
from tvm_axe.stream.tiled.expressions import Evaluator, converted, kept, unknown
from tvm_axe.stream.tiled.lines import Lines
from tvm_axe.stream.tiled.parallels import PointSteps, apart
from tvm_axe.stream.tiled.points import Points
from tvm_axe.stream.tiled.step import SETTLED, Arrays, Made, Step, Values
from tvm_axe.tile.nodes import Assign, Copy, Fill, Gemm, Node, Parallel, Print, Reduce, Scan, Signal, Sort, Wait
from tvm_axe.tile.regions import Region, constant
from tvm_axe.tile.regions import Tile as TileBuffer
from tvm_axe.tile.walking import variables_in


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
        strange = unknown(node.body if isinstance(node, Parallel) else [*node.scalars, *_function_of(node)])
        if strange is not None:
            raise self.lines.refuse(node, f"{strange} isn't computed in streams; compute it before, and pass a tensor")
        inside = [] if isinstance(node, Parallel | Assign) else list(node.scalars)
        if not all(self.points.settles(each) for each in inside):
            raise self.lines.refuse(node, f"it works where data says; {SETTLED}")
        if isinstance(node, Parallel):
            return [PointSteps(self, node, part).step() for part in apart(node.body)]
        return [_MAKERS[type(node)](self, node if isinstance(node, Assign) else self._pinned(node))]

    def pinned(self, expr: Any) -> Any:
        """Return a variable for an expression of tensors that are given, whose values are known by then."""
        if isinstance(expr, int | float) or not loads_in(expr):
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

        if not any(loads_in(each) for each in node.scalars if not isinstance(each, int)):
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
        reduced, combined = _reduction(node)
        get, old, put = self._source(node.src), self._source(node.dst), self._target(node.dst)

        def call(arrays: Arrays, boxes: Sequence[np.ndarray], values: Values) -> Made:
            found = reduced(get(arrays, boxes, values)).reshape(node.dst.extents)
            return put(combined(old(arrays, boxes, values), found) if node.accumulate else found, arrays, values)

        sources = (node.src, node.dst) if node.accumulate else (node.src,)
        return Step(
            node,
            f"{node.kind}_{node.dst.tile.name}",
            self._taken(sources, (node.dst,)),
            (node.dst.tile,),
            call,
            int(np.prod(node.src.extents)) * max(1, sum(map(operations, _function_of(node)))),
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
                raise self.lines.refuse(node, f"{box.region.tile.name} is read where data says; {SETTLED}")
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


def _function_of(node: Node) -> tuple[Any, ...]:
    """Return the expression by which a statement reduces, if it has one of its own."""
    return tuple(node.reducer.result) if isinstance(node, Reduce) and node.reducer is not None else ()


def _reduction(node: Reduce) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[..., np.ndarray]]:
    """Return what reduces an array, and what combines two."""
    if node.reducer is None:
        function = {"sum": np.add, "max": np.maximum, "min": np.minimum}[node.kind]
        return lambda array: function.reduce(array, axis=node.axis), function
    a, b, value = node.reducer.lhs[0], node.reducer.rhs[0], node.reducer.result[0]
    dtype, identity = str(value.ty), Evaluator({})(node.reducer.identity_element[0])

    def combined(some: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.asarray(Evaluator({a: converted(some, dtype), b: converted(other, dtype)})(value))

    def reduced(array: np.ndarray) -> np.ndarray:
        lines = np.moveaxis(array, node.axis, 0)
        return functools.reduce(combined, lines, np.full(lines.shape[1:], identity))

    return reduced, combined


def _is_all(region: Region) -> bool:
    return region.whole and all(constant(start) == 0 for start in region.start if isinstance(constant(start), int))


def _slices(region: Region, values: Values) -> tuple[slice, ...]:
    starts = [int(Evaluator(values)(start)) for start in region.start]
    return tuple(slice(start, start + extent) for start, extent in zip(starts, region.extents))


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

_REMEDIES: dict[type, str] = {
    Print: "streams print nothing; leave it out, or store the tile to a tensor",
    Signal: "blocks that meet in flags have no stream; let one block do what follows, in a loop",
    Wait: "blocks that meet in flags have no stream; let one block do what comes before, in a loop",
}
"""Of each statement that streams have nothing for, why, and what to write instead."""
