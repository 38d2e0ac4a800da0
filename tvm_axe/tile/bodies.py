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
"""

from __future__ import annotations

from collections.abc import Container

from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.tile import calls
from tvm_axe.tile.regions import constant
from tvm_axe.tile.walking import substitute_in

MOST_STEPS = 64
"""How many times the body of a loop is written out at most, with those around it."""


def written_out(stmt: tirx.Stmt, known: Container[tirx.Buffer], words: Container[str | None]) -> tirx.Stmt:
    """A body made of stores to `known` tiles, names and `if` alone; `words` are calls that no point can make.

    Raises
    ------
    TileError
        There is another statement; a name is given a value under an `if`; a loop's number
        of iterations isn't known, or more than `MOST_STEPS`.
    """
    return _Body(known, words).of(stmt, 1)


class _Body:
    def __init__(self, known: Container[tirx.Buffer], words: Container[str | None]) -> None:
        self.known, self.words = known, words

    def of(self, stmt: tirx.Stmt, steps: int) -> tirx.Stmt:
        """The statement in a body; `steps` are the iterations of the loops around."""
        if isinstance(stmt, tirx.BufferStore):
            if stmt.buffer not in self.known:
                raise TileError(
                    f"parallel: {stmt.buffer.name} is assigned under an `if`, or not where its name begins; valid is "
                    "T.if_then_else for a choice of values"
                )
            return stmt
        if isinstance(stmt, tirx.Bind):
            return stmt
        if isinstance(stmt, tirx.IfThenElse):
            otherwise = None if stmt.else_case is None else self.of(stmt.else_case, steps)
            return tirx.IfThenElse(stmt.condition, self.of(stmt.then_case, steps), otherwise)
        if calls.called(stmt) in self.words:
            word = str(calls.called(stmt)).removeprefix("axe.")
            raise TileError(f"parallel: {word} in its body; valid is a {word} before or behind it, by the whole block")
        if not (isinstance(stmt, tirx.SeqStmt) or _is_loop(stmt)):
            raise TileError(
                f"parallel: {type(stmt).__name__} in its body; valid are stores, names, `if` and small loops:\n{stmt}"
            )
        done = self._sequence([stmt], steps)
        return done[0] if len(done) == 1 else tirx.SeqStmt(done)

    def _sequence(self, rest: list[tirx.Stmt], steps: int) -> list[tirx.Stmt]:
        done: list[tirx.Stmt] = []
        names: dict[tirx.Buffer, tirx.Var | None] = {}  # what stands for each now, in all that follows
        while rest:
            first = rest.pop(0)
            if isinstance(first, tirx.SeqStmt):
                rest = [*first.seq, *rest]
            elif _is_loop(first):
                rest = [*_unrolled(first, steps), *rest]
            elif isinstance(first, tirx.AllocBuffer) and [int(extent) for extent in first.buffer.shape] == [1] and rest:
                named = rest[0]
                if not (isinstance(named, tirx.BufferStore) and named.buffer.same_as(first.buffer)):
                    raise TileError(f"parallel: {first.buffer.name} has no value where its name begins")
                names.setdefault(first.buffer, None)
            elif isinstance(first, tirx.BufferStore) and first.buffer in names:
                name = tirx.Var(first.buffer.name, first.buffer.dtype)
                done.append(tirx.Bind(name, first.value))
                rest = [_renamed(inner, first.buffer, names[first.buffer], name) for inner in rest]
                names[first.buffer] = name
            else:
                done.append(self.of(first, steps))
        return done


def _is_loop(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.For) and stmt.kind in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)


def _unrolled(loop: tirx.For, steps: int) -> list[tirx.Stmt]:
    """The body of a loop for each of its iterations."""
    extent = constant(loop.extent)
    if not isinstance(extent, int) or extent * steps > MOST_STEPS:
        raise TileError(
            f"parallel: a loop of {extent} iterations over {loop.loop_var.name} in its body, which is written out; "
            f"valid are up to {MOST_STEPS}, a constant number, and a loop around the `parallel`"
        )
    return [substitute_in(loop.body, {loop.loop_var: loop.min + step}) for step in range(extent)]


def _renamed(stmt: tirx.Stmt, buffer: tirx.Buffer, before: tirx.Var | None, name: tirx.Var) -> tirx.Stmt:
    """A statement that reads `name` where it loads from `buffer`, or reads what stood for that before."""
    if before is not None:
        return substitute_in(stmt, {before: name})
    return _tvm.structural_map(stmt, (ir.TensorLoad, lambda load: name if load.source.same_as(buffer) else load))
