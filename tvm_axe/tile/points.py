"""What a `parallel` touches at each of its points, as far as that is known without running it.

Indices and conditions are integers made of variables and constants, so numpy evaluates them at all points at once, for
given coordinates of the block and of the loops around. What depends on a tensor's values is unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import is_choice
from tvm_axe.tile.atomics import joined
from tvm_axe.tile.nodes import Branch, Let, Loop, Node, Parallel
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.walking import variables_in

Values = Mapping[tirx.Var, Any]

_SOME = 104729
"""What stands for a number that isn't known and is the same at all points: a prime, no stride or bound of anything."""

_SOME_OF_FEW_BITS = {8: 113, 16: 32749}
"""The same, of types that don't have it, by their bits."""

_BINARY: dict[type, Callable] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
    tirx.BitwiseAnd: np.bitwise_and,
    tirx.BitwiseOr: np.bitwise_or,
    tirx.BitwiseXor: np.bitwise_xor,
    tirx.LShift: np.left_shift,
    tirx.RShift: np.right_shift,
}


def evaluate(expr: Any, values: Values) -> Any:
    """The integers or truth values of an expression, or None where they aren't known."""
    if isinstance(expr, int):
        return np.asarray(expr)
    if isinstance(expr, tirx.IntImm):
        return np.asarray(bool(expr.value) if str(expr.ty) == "bool" else int(expr.value))
    if isinstance(expr, tirx.Var):
        return values.get(expr)
    if isinstance(expr, tirx.Cast):
        inner = evaluate(expr.value, values)
        return inner.astype("int64") if inner is not None and str(expr.ty) in ("int32", "int64", "uint32") else None
    if isinstance(expr, tirx.Not):
        inner = evaluate(expr.a, values)
        return None if inner is None else np.logical_not(inner)
    operands = [evaluate(operand, values) for operand in _operands(expr)]
    if not operands or any(operand is None for operand in operands):
        return None
    if isinstance(expr, tirx.Select) or is_choice(expr):
        return np.where(*operands)
    function = _BINARY.get(type(expr))
    if function is None or (function in (np.floor_divide, np.mod) and not np.all(operands[1])):
        return None
    found = function(*operands)
    # What is shifted out of a type is lost.
    return found.astype(str(expr.ty)).astype("int64") if function is np.left_shift else found


def _operands(expr: Any) -> tuple:
    """The expressions that an expression is made of."""
    if isinstance(expr, ir.Call):
        return tuple(arg for arg in expr.args if isinstance(arg, ir.Expr))
    if isinstance(expr, ir.TensorLoad):
        return tuple(expr.indices)
    if isinstance(expr, tirx.Select):
        return (expr.condition, expr.true_value, expr.false_value)
    if isinstance(expr, tirx.Let):
        return (expr.value, expr.body)
    return tuple(getattr(expr, name) for name in ("value", "a", "b") if isinstance(getattr(expr, name, None), ir.Expr))


# ---- Where in the program: the iterations that there are surely ------------------------------------------------------


_FIRST, _SECOND, _LAST = _PLACES = ("first", "second", "last")


@dataclass(frozen=True)
class Scope:
    """What is around a node: loops' (variable, start, extent), conditions that hold or don't, and names."""

    loops: tuple[tuple[tirx.Var, Any, Any], ...]
    conditions: tuple[tuple[tirx.Expr, bool], ...] = ()
    names: tuple[tuple[tirx.Var, tirx.Expr], ...] = ()

    def corners(self) -> Iterator[dict[tirx.Var, Any]]:
        """The variables' values in first and last iterations, every combination; only iterations that there are."""
        return self._iterations(itertools.product((_FIRST, _LAST), repeat=len(self.loops)))

    def ends(self, maybe: bool = False) -> list[dict[tirx.Var, Any]]:
        """Of `corners`, where all variables are at their first value, and where all are at their last.

        If the conditions allow neither, one iteration that they allow, if one is found. With `maybe`, conditions that
        depend on a tensor's values are taken to hold.
        """
        count = len(self.loops)
        found = list(self._iterations([(_FIRST,) * count, (_LAST,) * count], maybe))
        if len(found) == 2 and len(found[1]) < len(found[0]):
            return found[:1]  # a last iteration of which not all is known says less than the first
        return found or list(itertools.islice(self._iterations(itertools.product(_PLACES, repeat=count), maybe), 1))

    def _iterations(self, places: Iterable[tuple[str, ...]], maybe: bool = False) -> Iterator[dict[tirx.Var, Any]]:
        for place in places:
            values = self._values(place)
            if values is not None and self._allowed(values, maybe):
                yield values

    def _values(self, places: tuple[str, ...]) -> dict[tirx.Var, Any] | None:
        """The variables' values, or None if a loop has no such iteration; an unknown number counts as at least one."""
        values: dict[tirx.Var, Any] = {}
        for (var, start, extent), place in zip(self.loops, places):
            first, count = evaluate(start, values), evaluate(extent, values)
            offset: Any = {_FIRST: 0, _SECOND: 1, _LAST: None if count is None else count - 1}[place]
            if count is not None and not 0 <= offset < count:
                return None
            if first is not None and (count is not None or offset == 0):
                values[var] = first + offset
        for name, value in self.names:
            values[name] = evaluate(value, values)
        return values

    def _allowed(self, values: dict[tirx.Var, Any], maybe: bool) -> bool:
        for condition, holds in self.conditions:
            truth = evaluate(condition, values)
            if truth is None and not maybe:
                return False
            if truth is not None and bool(truth) != holds:
                return False
        return True


def scoped(program: TileProgram) -> Iterator[tuple[Node, Scope]]:
    """Every node with what is around it, in order."""
    device = () if program.device is None else ((program.device, program.devices),)
    yield from _scoped(program.body, Scope(tuple((var, 0, extent) for var, extent in (*device, *program.grid))))


def _scoped(body: tuple[Node, ...], scope: Scope) -> Iterator[tuple[Node, Scope]]:
    for node in body:
        yield node, scope
        if isinstance(node, Let):
            scope = replace(scope, names=(*scope.names, (node.var, node.value)))
        elif isinstance(node, Loop):
            inner = replace(scope, loops=(*scope.loops, (node.var, node.start, node.extent)))
            yield from _scoped(node.body, inner)
        elif isinstance(node, Branch):
            for nodes, holds in ((node.then, True), (node.otherwise, False)):
                yield from _scoped(nodes, replace(scope, conditions=(*scope.conditions, (node.condition, holds))))


# ---- What is touched -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guard:
    """At which points something happens: nowhere else than where `mask`; everywhere there, if `exact`.

    `vars` are the variables, of points too, that the conditions depend on.
    """

    mask: np.ndarray
    exact: bool = True
    vars: frozenset[tirx.Var] = frozenset()

    def where(self, condition: Any, values: Values, vars: frozenset[tirx.Var], holds: bool = True) -> Guard:
        """The same under one more condition, which is to hold or not to hold."""
        if holds and isinstance(condition, tirx.And):
            return self.where(condition.a, values, vars).where(condition.b, values, vars)
        truth = evaluate(condition, values)
        if truth is None:
            return Guard(self.mask, False, self.vars | vars)
        return Guard(self.mask & (truth == holds), self.exact, self.vars | vars)


@dataclass(frozen=True)
class Access:
    """One load or store in a `parallel`.

    Attributes
    ----------
    buffer : Buffer
        The tile or tensor, as in the program.
    indices : tuple of Expr
        The indices, as in the program.
    where : tuple of array or None
        The value of each index at every point, or None if it isn't known.
    guard : Guard
        At which points it happens.
    vars : frozenset of Var
        The variables, of points too, that the indices depend on, directly or by names.
    stores : bool
        Whether it is a store.
    atomic : bool
        Whether the store joins its value with what the element holds.
    apart : tuple of array or None
        The value of each index, with some number for what is unknown but the same at all points, such as a scalar
        parameter; None if it is data: loaded from where the point says.
    """

    buffer: tirx.Buffer
    indices: tuple
    where: tuple[Any, ...]
    guard: Guard
    vars: frozenset[tirx.Var]
    stores: bool
    atomic: bool = False
    apart: tuple[Any, ...] = ()

    @property
    def known(self) -> bool:
        """Whether all of its indices are."""
        return all(index is not None for index in self.where)

    def __str__(self) -> str:
        return f"{self.buffer.name}[{', '.join(map(str, self.indices))}]"


def accesses(parallel: Parallel, values: Values | None = None) -> list[Access]:
    """What a `parallel` loads and stores, in order.

    With what is around it at `values`, at all points; without, at the first point only, for what depends on none.
    """
    extents = (1,) * len(parallel.extents) if values is None else parallel.extents
    values = {} if values is None else values
    points = np.indices(extents).reshape(len(extents), -1)
    walk = _Walk({**values, **dict(zip(parallel.vars, points))}, points.shape[1], frozenset(parallel.vars))
    walk.statement(parallel.body, Guard(np.ones(points.shape[1], bool)))
    return walk.found


@dataclass
class _Walk:
    values: dict[tirx.Var, Any]
    count: int
    points: frozenset[tirx.Var]
    found: list[Access] = field(default_factory=list)
    behind: dict[tirx.Var, frozenset[tirx.Var]] = field(default_factory=dict)
    named: dict[tirx.Var, Any] = field(default_factory=dict)  # `apart` of the body's names, None of what atomics found

    def statement(self, stmt: tirx.Stmt, guard: Guard) -> None:
        if isinstance(stmt, tirx.SeqStmt):
            for inner in stmt.seq:
                self.statement(inner, guard)
        elif isinstance(stmt, tirx.Bind):
            self.loads(stmt.value, guard)
            self.values[stmt.var] = evaluate(stmt.value, self.values)
            self.behind[stmt.var] = self.vars(stmt.value)
            self.named[stmt.var] = self.apart(stmt.value)
        elif isinstance(stmt, tirx.IfThenElse):
            self.loads(stmt.condition, guard)
            for case, holds in ((stmt.then_case, True), (stmt.else_case, False)):
                if case is not None:
                    self.statement(case, guard.where(stmt.condition, self.values, self.vars(stmt.condition), holds))
        else:
            self.loads(stmt.value, guard)
            for index in stmt.indices:
                self.loads(index, guard)
            how = joined(stmt.value)
            self.touch(stmt.buffer, stmt.indices, guard, stores=True, atomic=how is not None)
            if how is not None and how.former is not None:
                self.behind[how.former] = self.points | self.vars(stmt.value) | {stmt.buffer}
                self.named[how.former] = None  # any number, at every point another

    def loads(self, expr: Any, guard: Guard) -> None:
        if is_choice(expr):
            condition, then, otherwise = expr.args
            self.loads(condition, guard)
            vars = self.vars(condition)
            self.loads(then, guard.where(condition, self.values, vars))
            self.loads(otherwise, guard.where(condition, self.values, vars, holds=False))
            return
        for operand in _operands(expr):
            self.loads(operand, guard)
        if isinstance(expr, ir.TensorLoad):
            self.touch(expr.source, expr.indices, guard, stores=False)

    def _broadcast(self, value: Any) -> Any:
        return None if value is None else np.broadcast_to(value, self.count)

    def touch(self, buffer: tirx.Buffer, indices: Any, guard: Guard, stores: bool, atomic: bool = False) -> None:
        where = tuple(self._broadcast(evaluate(index, self.values)) for index in indices)
        vars = frozenset().union(*(self.vars(index) for index in indices))
        apart = tuple(self._broadcast(self.apart(index)) for index in indices) if stores else ()
        self.found.append(Access(buffer, tuple(indices), where, guard, vars, stores, atomic, apart))

    def apart(self, value: Any) -> Any:
        """A value at every point but for a number that all points have; None if it is data, or no integer.

        Names that the body gives have theirs already: in a chain of them each may stand several times in the next.
        """
        if isinstance(value, int):
            return evaluate(value, {})
        if "float" in str(value.ty.dtype):
            return None
        data: list[bool] = []

        def uniform(load: ir.TensorLoad) -> Any:
            data.append(any(self.vars(index) & self.points for index in load.indices))
            return _some(load.ty.dtype)

        value = _tvm.structural_map(value, (ir.TensorLoad, uniform))
        if any(data):
            return None
        known = {var: self.named[var] if var in self.named else self.values.get(var) for var in variables_in(value)}
        for var in known.keys() - self.named.keys():
            known[var] = evaluate(_some(var.ty.dtype), {}) if known[var] is None else known[var]
        return evaluate(value, known)

    def vars(self, expr: Any) -> frozenset[tirx.Var]:
        return frozenset().union(*(self.behind.get(var, frozenset([var])) for var in variables_in(expr)))


def _some(dtype: Any) -> tirx.Expr:
    if str(dtype) == "bool":
        return tirx.const(True, dtype)
    return tirx.const(_SOME_OF_FEW_BITS.get(tvm_ffi.dtype(dtype).bits, _SOME), dtype)
