"""Loops that end when something holds: ``while``, ``break`` and ``continue``, written with plain loops and branches.

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def collatz(N: T.Buffer((64,), "int32"), steps: T.Buffer((64,), "int32")):
...     with tile.kernel(64) as i:
...         n = N[i]
...         count = 0
...         while n > 1:
...             n = T.if_then_else(n % 2 == 0, n // 2, 3 * n + 1)
...             count = count + 1
...             if count == 1000:
...                 break
...         with tile.parallel(1) as x:
...             steps[i + x] = count
>>> print(tile.read(collatz))
kernel collatz(N, steps) for i < 64
    global N: int32[64]
    global steps: int32[64]
    local n: int32[1]
    local count: int32[1]
    local ended: int32[1]
    n[0] = N[i]
    count[0] = 0
    ended[0] = 0
    while ended == 0:
        if n > 1:
            n[0] = T.if_then_else(n % 2 == 0, n // 2, 3 * n + 1)
            count[0] = count + 1
            if count == 1000:
                ended[0] = 1
        else:
            ended[0] = 1
    parallel 1 into steps

Such a loop is a loop, a flag and branches, so all that knows these knows it. The flag is a number that every thread
holds, and is asked behind each iteration. So threads of a block go on or end together, as they do in a branch:
conditions are of scalars, of tensors in global memory, and of shared and local tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import ir, tirx

from tvm_axe.errors import TileError
from tvm_axe.tile.language import GRID

__all__ = ["ENDLESS", "UNTIL", "structured"]

UNTIL = "axe.until"
"""Annotation of a loop that ends early: the condition, asked behind each iteration."""

ENDLESS = 2**31 - 1
"""The iterations of a ``while``, of which nobody knows how many there are."""

_BREAK, _CONTINUE = "tirx.break_loop", "tirx.continue_loop"


def structured(stmt: tirx.Stmt) -> tirx.Stmt:
    """A statement without ``while``, ``break`` and ``continue``, which does the same.

    Raises
    ------
    TileError
        A `break` or `continue` outside of a loop that it could be of, or a `continue` of which it isn't plain what it
        skips.
    """
    return _joined(_sequence([stmt], None))


class _Flag:
    """Whether a loop has ended: a tile of one number, which is there once something may end the loop."""

    def __init__(self, name: str) -> None:
        self.buffer = tirx.decl_buffer((1,), "int32", name, scope="local")
        self.used = False

    def set(self, value: int) -> tirx.Stmt:
        self.used = True
        return tirx.BufferStore(self.buffer, tirx.const(value, "int32"), [0])

    def around(self, loop: tirx.For) -> list[tirx.Stmt]:
        """The loop, which ends when the flag is set, and what comes before it."""
        annotations = {**dict(loop.annotations.items()), UNTIL: self.buffer[0] != 0}
        ending = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, None, annotations, loop.step)
        return [tirx.AllocBuffer(self.buffer), self.set(0), ending]


def _sequence(stmts: Iterable[tirx.Stmt], flag: _Flag | None) -> list[tirx.Stmt]:
    """Statements in order, in a loop with this flag if in any; what comes behind a branch that jumps goes into it."""
    done: list[tirx.Stmt] = []
    rest = _flat(stmts)
    while rest:
        stmt = rest.pop(0)
        jump = _jump(stmt)
        if jump is not None:
            if flag is None:
                word = "break" if jump == _BREAK else "continue"
                raise TileError(f"{word} outside of a loop; valid is one in a `for` or a `while` of the kernel")
            return [*done, flag.set(1)] if jump == _BREAK else done
        if not isinstance(stmt, tirx.IfThenElse):
            done += _loop(stmt, flag)
            continue
        then, otherwise = _flat([stmt.then_case]), _flat([] if stmt.else_case is None else [stmt.else_case])
        behind: list[tirx.Stmt] = []
        if rest and (_jumps(then) or _jumps(otherwise)):
            if _ends(then):
                otherwise, rest = [*otherwise, *rest], []
            elif _ends(otherwise):
                then, rest = [*then, *rest], []
            elif _CONTINUE in _jumps([*then, *otherwise]):
                raise TileError(
                    f"continue in `if {stmt.condition}`, with more behind it on one of the ways through it; valid is a "
                    "`continue` at the end of a branch, or an `if` around what is skipped"
                )
            else:
                behind, rest = rest, []
        done.append(_branch(stmt.condition, _sequence(then, flag), _sequence(otherwise, flag)))
        if behind:
            assert flag is not None  # or it would have been refused
            done.append(_branch(flag.buffer[0] == 0, _sequence(behind, flag), []))
    return done


def _loop(stmt: tirx.Stmt, flag: _Flag | None) -> list[tirx.Stmt]:
    """A statement that is no branch and no jump; loops within have flags of their own."""
    if isinstance(stmt, tirx.While):
        own = _Flag("ended")
        body = _sequence([stmt.body], own)
        always = isinstance(stmt.condition, tirx.IntImm) and int(stmt.condition)
        inner = _joined(body) if always else _branch(stmt.condition, body, [own.set(1)])
        if always and not own.used:
            raise TileError("while True: nothing ends it; valid is a `break` in it, or a condition")
        var = tirx.Var("_", "int32")
        zero, extent = (tirx.const(value, "int32") for value in (0, ENDLESS))
        return own.around(tirx.For(var, zero, extent, tirx.ForKind.SERIAL, inner))
    if not isinstance(stmt, tirx.For):
        return [stmt]
    if stmt.kind == tirx.ForKind.PARALLEL:
        found = _jumps([stmt.body])
        if found:
            word = "break" if _BREAK in found else "continue"
            raise TileError(f"parallel: {word} in its body, whose points run in no order; valid is an `if`")
        return [stmt]
    own_flag = None if GRID in stmt.annotations else _Flag(f"{stmt.loop_var.name}_ended")
    body = _sequence([stmt.body], own_flag)
    loop = tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, _joined(body), None, stmt.annotations, stmt.step)
    return own_flag.around(loop) if own_flag is not None and own_flag.used else [loop]


def _flat(stmts: Iterable[tirx.Stmt]) -> list[tirx.Stmt]:
    return [inner for stmt in stmts for inner in (_flat(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [stmt])]


def _joined(stmts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(list(stmts)) if stmts else tirx.Evaluate(0)


def _branch(condition: tirx.Expr, then: Sequence[tirx.Stmt], otherwise: Sequence[tirx.Stmt]) -> tirx.Stmt:
    if not then and otherwise:
        return tirx.IfThenElse(tirx.Not(condition), _joined(otherwise), None)
    return tirx.IfThenElse(condition, _joined(then), _joined(otherwise) if otherwise else None)


def _jump(stmt: tirx.Stmt) -> str | None:
    """The name of the jump that a statement is."""
    call = stmt.value if isinstance(stmt, tirx.Evaluate) else None
    name = str(call.op.name) if isinstance(call, ir.Call) and isinstance(call.op, ir.Op) else None
    return name if name in (_BREAK, _CONTINUE) else None


def _jumps(stmts: Sequence[tirx.Stmt]) -> set[str]:
    """The jumps in statements that are of the loop around them."""
    found: set[str] = set()
    for stmt in _flat(stmts):
        jump = _jump(stmt)
        if jump is not None:
            found.add(jump)
        elif isinstance(stmt, tirx.IfThenElse):
            found |= _jumps([stmt.then_case, *([] if stmt.else_case is None else [stmt.else_case])])
    return found


def _ends(stmts: Sequence[tirx.Stmt]) -> bool:
    """Whether every way through statements ends with a jump."""
    for stmt in _flat(stmts):
        if _jump(stmt) is not None:
            return True
        if isinstance(stmt, tirx.IfThenElse) and stmt.else_case is not None:
            both = [stmt.then_case], [stmt.else_case]
            if all(_ends(case) for case in both):
                return True
    return False
