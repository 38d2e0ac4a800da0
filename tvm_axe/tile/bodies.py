"""The body of a `parallel` as it is read: names stand for values, and small loops are written out.

Upstream makes a tile of one element of ``z = value``, which is a name here. Where the name is given another value, it
is another name from there on, so that a few terms are summed as in Python:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def smoothed(X: T.Buffer((67,), "float32"), w: T.Buffer((4,), "float32"), Y: T.Buffer((64,), "float32")):
...     with tile.kernel(64) as i:
...         with tile.parallel(1) as j:
...             total = T.float32(0)
...             for k in range(4):
...                 total = total + X[i + j + k] * w[k]
...             Y[i + j] = total
>>> print(tile.read(smoothed))
kernel smoothed(X, w, Y) for i < 64
    global X: float32[67]
    global w: float32[4]
    global Y: float32[64]
    parallel 1 into Y

A value under an `if` is a choice between it and the one before. So all that stands under such an `if` is done under a
condition of its own: a name's value is chosen, and of a value that is loaded or divided, only where the condition
holds; a store has an `if` around it.
"""

from __future__ import annotations

from collections.abc import Container

import tvm_ffi
from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import is_choice
from tvm_axe.errors import TileError
from tvm_axe.tile import calls
from tvm_axe.tile.atomics import is_swap, swapped
from tvm_axe.tile.regions import constant
from tvm_axe.tile.walking import substitute_in, variables_in

MOST_STEPS = 256
"""How many times a statement is written out at most, the loops around it together."""


def written_out(stmt: tirx.Stmt, known: Container[tirx.Buffer], words: Container[str | None]) -> tirx.Stmt:
    """A body made of stores to `known` tiles, names and `if` alone; `words` are calls that no point can make.

    Raises
    ------
    TileError
        There is another statement; a name is read before it has a value; `atomic_cas` is a side of a choice; a loop's
        number of iterations isn't known, or with those of the loops around it more than `MOST_STEPS`.
    """
    return _joined(_Body(known, words).sequence([stmt], {}, None, 1))


_Names = dict[tirx.Buffer, tirx.Var | None]
"""What stands for each name now, in all that follows; None before it has a value."""


class _Body:
    def __init__(self, known: Container[tirx.Buffer], words: Container[str | None]) -> None:
        self.known, self.words = known, words

    def sequence(self, rest: list[tirx.Stmt], names: _Names, where: tirx.Var | None, times: int) -> list[tirx.Stmt]:
        """The statements in a body, each done where a condition holds; it is written out so many times."""
        done: list[tirx.Stmt] = []
        while rest:
            first = rest.pop(0)
            if isinstance(first, tirx.SeqStmt):
                rest = [*first.seq, *rest]
            elif _is_loop(first):
                steps = _unrolled(first, times)
                done += self.sequence(list(steps), names, where, times * len(steps))
            elif isinstance(first, tirx.AllocBuffer) and [int(extent) for extent in first.buffer.shape] == [1]:
                names[first.buffer] = None
            elif isinstance(first, tirx.IfThenElse):
                done += self._if(first, names, where, times)
            elif isinstance(first, tirx.Bind):
                value = self._read(first.value, names, where, done)
                done.append(tirx.Bind(first.var, _chosen(where, value)))
            elif isinstance(first, tirx.BufferStore):
                done += self._store(first, names, where)
            elif isinstance(first, tirx.Evaluate) and is_swap(first.value):
                self._read(first.value, names, where, done)
            else:
                self._refuse(first)
        return done

    def _store(self, stmt: tirx.BufferStore, names: _Names, where: tirx.Var | None) -> list[tirx.Stmt]:
        """A store, or the name that is given a value."""
        done: list[tirx.Stmt] = []
        value = self._read(stmt.value, names, where, done)
        if stmt.buffer in names:
            before, name = names[stmt.buffer], tirx.Var(stmt.buffer.name, stmt.buffer.dtype)
            names[stmt.buffer] = name
            return [*done, tirx.Bind(name, _chosen(where, value, before))]
        if stmt.buffer not in self.known:
            raise TileError(f"parallel: {stmt.buffer.name} is a tile of its body; valid are tiles that begin before it")
        indices = [self._read(index, names, where, done) for index in stmt.indices]
        if not (value.same_as(stmt.value) and all(one.same_as(other) for one, other in zip(indices, stmt.indices))):
            stmt = tirx.BufferStore(stmt.buffer, value, indices)
        return [*done, _under(where, stmt)]

    def _if(self, stmt: tirx.IfThenElse, names: _Names, where: tirx.Var | None, times: int) -> list[tirx.Stmt]:
        done: list[tirx.Stmt] = []
        condition = self._read(stmt.condition, names, where, done)
        cases = [(stmt.then_case, True), (stmt.else_case, False)]
        given: list[bool] = []
        tvm_ffi.structural_walk(stmt, (tirx.BufferStore, lambda store: given.append(store.buffer in names)))
        if not any(given):
            then, otherwise = (
                None if case is None else _joined(self.sequence([case], dict(names), None, times)) for case, _ in cases
            )
            return [*done, _under(where, tirx.IfThenElse(condition, then, otherwise))]
        holds = tirx.Var("holds", "bool")
        done.append(tirx.Bind(holds, _both(where, condition)))
        for case, true in cases:
            if case is None:
                continue
            inner = holds
            if not true:
                inner = tirx.Var("fails", "bool")
                done.append(tirx.Bind(inner, _both(where, tirx.Not(holds))))
            done += self.sequence([case], names, inner, times)
        return done

    def _read(self, value: tirx.Expr, names: _Names, where: tirx.Var | None, done: list[tirx.Stmt]) -> tirx.Expr:
        """An expression with what stands for names; elements that it compares and swaps are so before, in `done`."""

        def on_load(load: ir.TensorLoad) -> tirx.Expr:
            if load.source not in names:
                return load
            name = names[load.source]
            if name is None:
                raise TileError(f"parallel: {load.source.name} has no value where it is read")
            return name

        def on_call(call: ir.Call) -> tirx.Expr:
            if not is_swap(call):
                return call
            store, former = swapped(call)
            done.append(_under(where, store))
            return former

        tvm_ffi.structural_walk(value, (ir.Call, _no_chosen_swap))
        return _tvm.structural_map(value, ((ir.TensorLoad, on_load), (ir.Call, on_call)))

    def _refuse(self, stmt: tirx.Stmt) -> None:
        if calls.called(stmt) in self.words:
            word = str(calls.called(stmt)).removeprefix("axe.")
            raise TileError(f"parallel: {word} in its body; valid is a {word} before or behind it, by the whole block")
        if not calls.is_nothing(stmt):
            raise TileError(
                f"parallel: {type(stmt).__name__} in its body; valid are stores, names, `if` and small loops:\n{stmt}"
            )


def _no_chosen_swap(choice: ir.Call) -> None:
    """Refuse a compare-and-swap of which a choice of values says whether it is done."""

    def on_call(call: ir.Call) -> None:
        if is_swap(call):
            raise TileError(
                f"parallel: {call.args[-1]} is compared and swapped by atomic_cas in a side of T.if_then_else; valid "
                "is an `if` around"
            )

    if is_choice(choice):
        tvm_ffi.structural_walk(list(choice.args[1:]), (ir.Call, on_call))


_MOST_CHOICES = 2


def chained(body: tirx.Stmt) -> list[tirx.Var]:
    """The names whose values are made of two or more choices that follow from one another; one, of truth values.

    Upstream simplifies the value of a name with those of others in their places, where a value that is used twice
    stands twice. So of these it is shown an element in memory, which a compiler holds in a register.
    """
    choices: dict[tirx.Var, int] = {}
    found: list[tirx.Var] = []

    def count(bind: tirx.Bind) -> None:
        chosen: list[object] = []
        tvm_ffi.structural_walk(bind.value, ((ir.Call, tirx.Select), chosen.append))
        depth = max((choices.get(var, 0) for var in variables_in(bind.value)), default=0)
        choices[bind.var] = depth + any(isinstance(each, tirx.Select) or is_choice(each) for each in chosen)
        if choices[bind.var] >= (1 if str(bind.var.ty.dtype) == "bool" else _MOST_CHOICES):
            choices[bind.var] = 0
            found.append(bind.var)

    tvm_ffi.structural_walk(body, (tirx.Bind, count))
    return found


def _joined(stmts: list[tirx.Stmt]) -> tirx.Stmt:
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(stmts)


def _under(where: tirx.Var | None, stmt: tirx.Stmt) -> tirx.Stmt:
    return stmt if where is None else tirx.IfThenElse(where, stmt, None)


def _both(where: tirx.Var | None, condition: tirx.Expr) -> tirx.Expr:
    """Whether both hold; the second is computed only where the first does, if it isn't safe elsewhere."""
    if where is None:
        return condition
    false = tirx.const(False, "bool")
    return tirx.And(where, condition) if _is_safe(condition) else tirx.if_then_else(where, condition, false)


def _chosen(where: tirx.Var | None, value: tirx.Expr, otherwise: tirx.Expr | None = None) -> tirx.Expr:
    """A value where a condition holds; elsewhere another one, or, if there is none, whatever is safe."""
    if where is None or (otherwise is None and _is_safe(value)):
        return value
    return tirx.if_then_else(where, value, tirx.const(0, value.ty.dtype) if otherwise is None else otherwise)


def _is_safe(value: tirx.Expr) -> bool:
    """Whether a value can be computed where it isn't wanted, as nothing is loaded, called or divided."""
    found: list[object] = []
    tvm_ffi.structural_walk(value, (_UNSAFE, found.append))
    return not found


_UNSAFE = (ir.TensorLoad, ir.Call, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


def _is_loop(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.For) and stmt.kind in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)


def _unrolled(loop: tirx.For, times: int) -> list[tirx.Stmt]:
    """The body of a loop, which is written out so many times, for each of its iterations."""
    extent = constant(loop.extent)
    if not isinstance(extent, int) or extent * times > MOST_STEPS:
        around = f", and {times} of those around it," if times > 1 else ""
        raise TileError(
            f"parallel: a loop of {extent} iterations over {loop.loop_var.name}{around} in its body, which is written "
            f"out; valid are up to {MOST_STEPS} in all, a constant number, and a loop around the `parallel`"
        )
    return [substitute_in(loop.body, {loop.loop_var: loop.min + step}) for step in range(extent)]
