"""What a tile program may take for granted of its sizes: `assume`, and the facts that it becomes.

Extents and strides that a function leaves open, and its scalar parameters, may be any number, so that nothing is known
of where a row begins: no vector is loaded from it, and TMA, which wants rows 16 bytes apart, not at all. A program says
what it is called with, and is called with nothing else:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def halves(a: T.handle, b: T.handle):
...     n = T.int32()
...     A = T.match_buffer(a, (8, n), "float32")
...     B = T.match_buffer(b, (8, n), "float32")
...     tile.assume(n % 64 == 0)
...     with tile.kernel(8, n // 64) as (i, j):
...         x = tile.fragment((64,), "float32")
...         tile.copy(A[i, j * 64], x)
...         with tile.parallel(64) as k:
...             x[k] = x[k] / 2.0
...         tile.copy(x, B[i, j * 64])
>>> print(*tile.read(halves).assumptions)
n % 64 == 0

The checks and all targets prove with it what they prove of numbers; a compiled program refuses other sizes, with the
assumption (`tvm_axe.tile.arguments`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import ir, sym, tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.tile.calls import called
from tvm_axe.tile.strides import own_strides

__all__ = ["Assumption", "assume", "assumptions_of", "bind_assumed", "find_broken", "multiples", "separated"]

ASSUME = "axe.assume"
"""Name of the call that `assume` becomes, of the condition."""

_VALID = (
    "valid are x % number == 0 and comparisons of x with a number, and `and` of these, of an extent, stride or scalar"
)


@dataclass(frozen=True)
class Assumption:
    """One thing assumed of a number that callers give.

    Attributes
    ----------
    var : Var
        The extent, the stride or the scalar parameter.
    divisor : int
        What it is a multiple of; 1 if nothing is said of that.
    least, most : int or None
        Its range, both included; None where there is no end.
    """

    var: tirx.Var
    divisor: int = 1
    least: int | None = None
    most: int | None = None

    @property
    def name(self) -> str:
        """The number's name."""
        return str(self.var.name)

    def holds(self, value: int) -> bool:
        """Whether it holds of a number."""
        above = self.least is None or value >= self.least
        return value % self.divisor == 0 and above and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        if self.divisor != 1:
            return f"{self.name} % {self.divisor} == 0"
        return f"{self.name} >= {self.least}" if self.most is None else f"{self.name} <= {self.most}"


def assume(condition: Any) -> Any:
    """Take for granted what callers' sizes are like; a call with others is refused.

    It stands before the kernel, as in ``tile.assume(k % 64 == 0)``.

    Parameters
    ----------
    condition : Expr
        ``x % number == 0``, a comparison of x with a number (``<``, ``<=``, ``>``, ``>=``), or several joined by
        ``tirx.all``; x is an extent or a stride that the function leaves open, or a scalar parameter. A number may be a
        knob.

    Raises
    ------
    TileError
        The condition is none.
    """
    if isinstance(condition, bool):
        condition = tirx.const(condition, "bool")
    if not (isinstance(condition, ir.Expr) and str(condition.ty) == "bool"):
        raise TileError(f"assume: takes a condition, such as k % 64 == 0; got {condition!r}")
    return T.evaluate(T.call_extern("int32", ASSUME, condition))


def assumptions_of(func: tirx.PrimFunc) -> tuple[tuple[Assumption, ...], tirx.Stmt]:
    """What a function assumes, in order, and its body without the words that say so.

    Raises
    ------
    TileError
        A condition of another form, or on what is no extent, stride or scalar parameter; no number is left that all
        assumptions allow.
    """
    conditions: list[tirx.Expr] = []

    def unsaid(stmt: tirx.Evaluate) -> tirx.Stmt:
        if called(stmt) != ASSUME:
            return stmt
        conditions.append(stmt.value.args[1])
        return tirx.Evaluate(0)

    def joined(seq: tirx.SeqStmt) -> tirx.Stmt:
        kept = [stmt for stmt in seq.seq if not _says_nothing(stmt)]
        return seq if len(kept) == len(seq.seq) or not kept else kept[0] if len(kept) == 1 else tirx.SeqStmt(kept)

    body = _tvm.structural_map(func.body, [(tirx.Evaluate, unsaid), (tirx.SeqStmt, joined)])
    if not conditions:
        return (), func.body
    open_ = [param for param in func.params if not tirx.is_buffer_var(param)]
    for param in func.params:
        if tirx.is_buffer_var(param):
            sizes = (*param.shape, *(own_strides(param) or ()))
            open_ += [each for each in sizes if isinstance(each, tirx.Var)]
    found = tuple(fact for condition in conditions for fact in _facts(condition, condition, frozenset(open_)))
    for var in {fact.var for fact in found}:
        _check_possible(var, [fact for fact in found if fact.var.same_as(var)])
    return found, body


def _says_nothing(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tirx.IntImm)


def separated(condition: Any) -> list[Any]:
    """The conditions that one says all together, each by itself."""
    if isinstance(condition, tirx.And):
        return [each for side in (condition.a, condition.b) for each in separated(side)]
    return [condition]


def bind_assumed(analyzer: sym.Analyzer, assumptions: Iterable[Assumption]) -> None:
    """Tell an analyzer what is assumed."""
    for var, divisor in multiples(assumptions).items():
        analyzer.update(var, sym.ModularSet(divisor, 0), True)
    for var, (least, most) in _ranges(assumptions).items():
        low = sym.ConstIntBound.NEG_INF if least is None else least
        analyzer.update(var, sym.ConstIntBound(low, sym.ConstIntBound.POS_INF if most is None else most), True)


def multiples(assumptions: Iterable[Assumption]) -> dict[tirx.Var, int]:
    """What each number is a multiple of, of those that are multiples of more than 1."""
    found: dict[tirx.Var, int] = {}
    for fact in assumptions:
        if fact.divisor != 1:
            found[fact.var] = math.lcm(found.get(fact.var, 1), fact.divisor)
    return found


def find_broken(assumptions: Iterable[Assumption], values: Mapping[str, Any]) -> Assumption | None:
    """The first assumption that doesn't hold of the numbers by name; None if all do."""
    return next((fact for fact in assumptions if not fact.holds(values[fact.name])), None)


def _ranges(assumptions: Iterable[Assumption]) -> dict[tirx.Var, tuple[int | None, int | None]]:
    found: dict[tirx.Var, tuple[int | None, int | None]] = {}
    for fact in assumptions:
        least, most = found.get(fact.var, (None, None))
        lows = [bound for bound in (least, fact.least) if bound is not None]
        highs = [bound for bound in (most, fact.most) if bound is not None]
        found[fact.var] = (max(lows, default=None), min(highs, default=None))
    return {var: ends for var, ends in found.items() if ends != (None, None)}


def _check_possible(var: tirx.Var, facts: list[Assumption]) -> None:
    divisor = multiples(facts).get(var, 1)
    least, most = _ranges(facts).get(var, (None, None))
    if least is not None and most is not None and -(-least // divisor) * divisor > most:
        raise TileError(f"assume: no number {var.name} is as {' and '.join(map(str, facts))}")


def _facts(condition: Any, whole: Any, open_: frozenset[tirx.Var]) -> list[Assumption]:
    known = sym.Analyzer().simplify(condition)
    if isinstance(known, tirx.IntImm):  # as where a knob is 1
        if int(known):
            return []
        raise TileError(f"assume: {whole}, which no number is")
    if isinstance(condition, tirx.And):
        return [fact for side in separated(condition) for fact in _facts(side, whole, open_)]
    found = _multiple(condition) or _bound(condition)
    if found is None:
        raise TileError(f"assume: {whole}; {_VALID}")
    if found.var not in open_:
        names = ", ".join(sorted({str(var.name) for var in open_})) or "none"
        raise TileError(f"assume: {whole}: {found.name} is no extent, stride or scalar parameter; there are: {names}")
    return [found]


def _multiple(condition: Any) -> Assumption | None:
    """``x % number == 0``."""
    if not (isinstance(condition, tirx.EQ) and isinstance(condition.a, (tirx.FloorMod, tirx.Mod))):
        return None
    var, divisor, rest = condition.a.a, condition.a.b, condition.b
    numbers = isinstance(divisor, tirx.IntImm) and isinstance(rest, tirx.IntImm)
    if not numbers or not isinstance(var, tirx.Var) or int(divisor) < 1 or int(rest):
        return None
    return Assumption(var, int(divisor))


def _bound(condition: Any) -> Assumption | None:
    """A comparison of x with a number, on either side."""
    flipped = {tirx.LT: tirx.GT, tirx.LE: tirx.GE, tirx.GT: tirx.LT, tirx.GE: tirx.LE}
    if type(condition) not in flipped:
        return None
    kind, var, bound = type(condition), condition.a, condition.b
    if isinstance(bound, tirx.Var):
        kind, var, bound = flipped[kind], bound, var
    if not (isinstance(var, tirx.Var) and isinstance(bound, tirx.IntImm) and "int" in str(var.ty)):
        return None
    number = int(bound)
    ends = {
        tirx.LT: {"most": number - 1},
        tirx.LE: {"most": number},
        tirx.GT: {"least": number + 1},
        tirx.GE: {"least": number},
    }
    return Assumption(var, **ends[kind])
