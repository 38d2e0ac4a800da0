"""`parallel`: elements computed point by point, by vectors where nothing forbids it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.script.ir_builder import tirx as T

from tvm_axe import _tvm
from tvm_axe.analysis.counting import conjuncts
from tvm_axe.analysis.expressions import is_choice
from tvm_axe.tile.arithmetic import chosen
from tvm_axe.tile.atomics import formers, joined
from tvm_axe.tile.bodies import chained
from tvm_axe.tile.nodes import Parallel
from tvm_axe.tile.targets.llvm.atomics import join, swap
from tvm_axe.tile.targets.llvm.conversions import compute_dtype, convert
from tvm_axe.tile.targets.llvm.functions import has_vectors
from tvm_axe.tile.targets.llvm.writer import Writer, points


def write_parallel(writer: Writer, node: Parallel) -> None:
    """Emit the body for every point.

    Both sides of a condition that differs from lane to lane are computed for all lanes, and one is chosen. That is
    possible where all that they load and store is inside of its tile whatever the condition. Otherwise, and where a
    function has no vector form, the points are taken one by one.

    A condition on all of the body that says how far an index goes, as of a tile that ends outside of its tensor, is no
    condition on points but an end of the loop.
    """
    stops, stmt = _trimmed(writer, node)
    spans = [(0, stop) for stop in stops]
    sizes = [i for i, extent in enumerate(node.extents) if extent > 1] or [len(spans) - 1]
    inner = sizes[-1]
    order = [dim for dim in range(len(spans)) if dim != inner] + [inner]
    body = _Body(writer, node, stmt, node.vars[inner])
    lanes = writer.plan.machine.lanes("float32") if body.by_vectors else 1
    body.allocate(lanes)

    def element(point: list[Any]) -> None:
        for dim, index in zip(order, point):
            writer.scalars[node.vars[dim]] = index
        body.write(stmt, None)

    points(writer, [spans[dim] for dim in order], lanes, element)


def _trimmed(writer: Writer, node: Parallel) -> tuple[list[Any], tirx.Stmt]:
    """Where each dimension's loop ends, and what is done for its points."""
    stops: list[Any] = list(node.extents)
    stmt = node.body
    while isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None:
        conditions = conjuncts(stmt.condition)
        bounds = [b for b in (_bound(writer.analyzer, node, condition) for condition in conditions) if b is not None]
        if len(bounds) < len(conditions):
            break
        for dimension, bound in bounds:
            least = T.max(T.min(writer.expr(bound), stops[dimension]), 0)
            stops[dimension] = T.Bind(T.Cast("int32", least))
        stmt = stmt.then_case
    return stops, stmt


def _bound(analyzer: sym.Analyzer, node: Parallel, condition: tirx.Expr) -> tuple[int, tirx.Expr] | None:
    """(dimension, bound) of a condition that says no more than that the dimension's index is less than the bound."""
    if not isinstance(condition, tirx.LT | tirx.LE) or str(condition.a.ty.dtype) not in ("int32", "int64"):
        return None
    if _finds(condition, ir.TensorLoad, lambda load: True):
        return None
    for dimension, var in enumerate(node.vars):
        bound = analyzer.simplify(condition.b - condition.a + var + int(isinstance(condition, tirx.LE)))
        if not _finds(bound, tirx.Var, lambda used: any(used.same_as(v) for v in node.vars)):
            return dimension, bound
    return None


def _finds(value: Any, kind: type, what: Callable[[Any], bool]) -> bool:
    """Whether an expression has a part of a kind of which `what` holds."""
    found: list[bool] = []
    if not isinstance(value, int):
        tvm_ffi.structural_walk(value, (kind, lambda part: found.append(what(part))))
    return any(found)


class _Body:
    """A body, and whether vectors along `lane` can do it."""

    def __init__(self, writer: Writer, node: Parallel, stmt: tirx.Stmt, lane: tirx.Var) -> None:
        self.writer, self.stmt, self.lane = writer, stmt, lane
        self.tiles = {tile.buffer: tile for tile, _, _ in node.accesses}
        self.analyzer: sym.Analyzer = writer.plan.program.analyzer()
        for var, extent in zip(node.vars, node.extents):
            self.analyzer.bind(var, ir.Range.from_min_extent(0, extent))
        self.varies = {lane}
        self.rooms: dict[tirx.Var, Any] = dict.fromkeys(chained(stmt))  # of names that are held in memory: where
        self.by_vectors = self._statement(stmt, False)

    # ---- Whether vectors can do it ---------------------------------------------------------------------------

    def _statement(self, stmt: tirx.Stmt, chosen: bool) -> bool:
        """Whether it can be done by vectors; `chosen`: some lanes don't do it."""
        if isinstance(stmt, tirx.SeqStmt):
            return all(self._statement(inner, chosen) for inner in stmt.seq)
        if isinstance(stmt, tirx.Bind):
            if self._differs(stmt.value):
                self.varies.add(stmt.var)
            return self._expression(stmt.value, chosen)
        if isinstance(stmt, tirx.IfThenElse):
            inner = chosen or self._differs(stmt.condition)
            branches = [branch for branch in (stmt.then_case, stmt.else_case) if branch is not None]
            return self._expression(stmt.condition, chosen) and all(self._statement(b, inner) for b in branches)
        indices = list(stmt.indices)
        if chosen and not (self.tiles[stmt.buffer].scope != "global" and self._inside(stmt.buffer, indices)):
            return False
        return all(self._expression(value, chosen) for value in (*indices, stmt.value))

    def _expression(self, value: Any, chosen: bool) -> bool:
        fine = []

        def on_load(load: ir.TensorLoad) -> None:
            fine.append(not chosen or self._inside(load.source, list(load.indices)))

        def on_call(call: ir.Call) -> None:
            if is_choice(call):
                inner = chosen or self._differs(call.args[0])
                fine.extend(self._expression(side, inner) for side in call.args[1:])
            else:
                fine.append(has_vectors(call))

        if not isinstance(value, int):
            tvm_ffi.structural_walk(value, ((ir.TensorLoad, on_load), (ir.Call, on_call)))
        return all(fine)

    def allocate(self, lanes: int) -> None:
        """Make room for the names that are held in memory."""
        for name in self.rooms:
            dtype = compute_dtype(str(name.ty.dtype))
            dtype = "int32" if dtype == "bool" else dtype  # of which vectors are stored
            self.rooms[name] = T.alloc_buffer((lanes,), dtype, scope="local")
        for former in formers(self.stmt):  # points come one by one then; it is read behind the conditions around it
            self.rooms[former] = T.alloc_buffer((1,), former.ty.dtype, scope="local")
            T.buffer_store(self.rooms[former], tirx.const(0, former.ty.dtype), [0])
            self.writer.scalars[former] = self.rooms[former][0]

    def _differs(self, value: Any) -> bool:
        """Whether lanes have different values of an expression."""
        return _finds(value, tirx.Var, lambda var: var in self.varies)

    def _inside(self, buffer: tirx.Buffer, indices: Sequence[Any]) -> bool:
        shape = self.tiles[buffer].shape
        return all(self.analyzer.can_prove(i >= 0) and self.analyzer.can_prove(i < e) for i, e in zip(indices, shape))

    # ---- Writing ---------------------------------------------------------------------------------------------

    def write(self, stmt: tirx.Stmt, chosen: Any) -> None:
        """Emit a statement for one point; `chosen` is the condition of the lanes that do it, or None."""
        if isinstance(stmt, tirx.SeqStmt):
            for inner in stmt.seq:
                self.write(inner, chosen)
        elif isinstance(stmt, tirx.Bind):
            self.writer.scalars[stmt.var] = self._held(stmt.var, self._value(stmt.value))
        elif isinstance(stmt, tirx.IfThenElse):
            self._if(stmt, chosen)
        else:
            self._store(stmt, chosen)

    def _store(self, stmt: tirx.BufferStore, chosen: Any) -> None:
        tile, indices = self.tiles[stmt.buffer], [self._value(index) for index in stmt.indices]
        how = joined(stmt.value)
        if how is not None and how.former is not None:
            values = self._value(how.compare), self._value(how.value)
            T.buffer_store(self.rooms[how.former], swap(self.writer, tile, indices, *values), [0])
            return
        given = stmt.value if how is None else how.value
        rounds = isinstance(given, tirx.Cast) and str(given.ty.dtype) == tile.dtype  # as storing does
        value = convert(self._value(given.value if rounds else given), compute_dtype(tile.dtype))
        if how is not None:
            join(self.writer, how.kind, tile, indices, value)
            return
        if chosen is not None:
            value = T.Select(chosen, value, self.writer.load(tile, indices))
        self.writer.store(tile, indices, value)

    def _if(self, stmt: tirx.IfThenElse, chosen: Any) -> None:
        condition = self._value(stmt.condition)
        if self.by_vectors and self._differs(stmt.condition):
            condition = self._named(condition)
            self.write(stmt.then_case, _both(chosen, condition))
            if stmt.else_case is not None:
                self.write(stmt.else_case, _both(chosen, T.Not(condition)))
            return
        with T.If(condition):
            with T.Then():
                self.write(stmt.then_case, chosen)
            if stmt.else_case is not None:
                with T.Else():
                    self.write(stmt.else_case, chosen)

    def _held(self, name: tirx.Var, value: Any) -> Any:
        """What stands for a name, whose value is computed once."""
        if name not in self.rooms:
            return self._named(value)
        room = self.rooms[name]
        if str(name.ty.dtype) == "bool":
            T.buffer_store(room, T.Select(value, T.int32(1), T.int32(0)), [self.writer.lane])
            return room[self.writer.lane] != 0
        T.buffer_store(room, value, [self.writer.lane])
        return room[self.writer.lane]

    def _named(self, value: Any) -> Any:
        """The value, computed once; upstream can't name a vector of bools."""
        if self.by_vectors and str(value.ty.dtype) == "bool":
            return T.Bind(T.Select(value, T.float32(1), T.float32(0))) != T.float32(0)
        return T.Bind(value)

    def _value(self, value: Any) -> Any:
        if self.by_vectors and not isinstance(value, int):
            value = _tvm.structural_map(value, (ir.Call, self._choose))
        return self.writer.expr(value)

    def _choose(self, call: ir.Call) -> Any:
        if is_choice(call) and self._differs(call.args[0]):
            return chosen(*call.args)
        return call


def _both(a: Any, b: Any) -> Any:
    return b if a is None else T.And(a, b)
