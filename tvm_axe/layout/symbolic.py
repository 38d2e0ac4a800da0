"""Extents and strides that are only known at run time, and what can be proved about them.

An iter may hold the compiler's integer expressions, such as the variable of a batch size. They are kept as `Symbolic`
values, which count like ints: sums, products and quotients are simplified, and become ints where they can. To ask
whether one is equal to, or less than, another is to ask for a proof, from one assumption only: **every variable is at
least 1** (an index that `apply` is asked for is instead at least 0 and less than its extent). A comparison for which
neither it nor its contrary can be proved raises, and names what was not proved; it never guesses.

>>> from tvm import tirx
>>> from tvm_axe.layout import Iter, Layout
>>> n = tirx.Var("n", "int32")
>>> rows = Layout([Iter(n, 4, "m"), Iter(4, 1, "m")])
>>> print(rows.canonicalize(), "with", rows.size(), "elements")
S[n * 4 : 1] with n * 4 elements
>>> print(rows.group((2, 2 * n))[0])
Traceback (most recent call last):
    ...
tvm_axe.errors.LayoutError: layout S[(n, 4) : (4, 1)] can not be grouped by (2, n * 2): the boundary before dimension \
1 falls inside 4 : 1, and it was not proved that it cuts it evenly

The compiler is imported when the first such value is met, and never before: layouts of ints work without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tvm_axe.errors import LayoutError

Fact = tuple[Any, Any]
"""An index expression and its extent: 0 <= expression < extent."""


class Symbolic:
    """An integer expression of the compiler, simplified, that counts and compares like an int.

    Comparisons are proofs. ``a == b`` is whether they were proved equal; ``a < b`` and its kin raise LayoutError where
    neither they nor their contrary can be proved.

    Attributes
    ----------
    expr : tvm.ir.Expr
        The compiler's expression.
    """

    __slots__ = ("expr", "facts")

    def __init__(self, expr: Any, facts: tuple[Fact, ...] = ()) -> None:
        self.expr = expr
        self.facts = facts

    def _binary(self, other: Any, combine: Any) -> Number:
        if isinstance(other, Symbolic):
            return fold(combine(self.expr, other.expr), tuple(dict.fromkeys(self.facts + other.facts)))
        return fold(combine(self.expr, other), self.facts) if type(other) is int else NotImplemented

    def __add__(self, other: Any) -> Number:
        return self._binary(other, lambda a, b: a + b)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Number:
        return self._binary(other, lambda a, b: a - b)

    def __rsub__(self, other: Any) -> Number:
        return self._binary(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Number:
        return self._binary(other, lambda a, b: a * b)

    __rmul__ = __mul__

    def __neg__(self) -> Number:
        return self * -1

    def __floordiv__(self, other: Any) -> Number:
        return self._binary(other, _floordiv)

    def __rfloordiv__(self, other: Any) -> Number:
        return self._binary(other, lambda a, b: _floordiv(b, a))

    def __mod__(self, other: Any) -> Number:
        return self._binary(other, _floormod)

    def __rmod__(self, other: Any) -> Number:
        return self._binary(other, lambda a, b: _floormod(b, a))

    def __xor__(self, other: Any) -> Number:
        return self._binary(other, lambda a, b: a ^ b)

    def __abs__(self) -> Number:
        return self if self >= 0 else -self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, Symbolic)) or isinstance(other, bool):
            return NotImplemented
        return self - other == 0 if isinstance(other, Symbolic) else self._proved(lambda e: _equal(e, other))

    def __hash__(self) -> int:
        # Expressions that are proved equal may be written differently, but they simplify to the same variables.
        return hash(tuple(sorted(var.name for var in _variables(self.expr))))

    def __lt__(self, other: Any) -> bool:
        return self._decide(other, "<", lambda e: e < 0, lambda e: e >= 0)

    def __le__(self, other: Any) -> bool:
        return self._decide(other, "<=", lambda e: e <= 0, lambda e: e > 0)

    def __gt__(self, other: Any) -> bool:
        return self._decide(other, ">", lambda e: e > 0, lambda e: e <= 0)

    def __ge__(self, other: Any) -> bool:
        return self._decide(other, ">=", lambda e: e >= 0, lambda e: e < 0)

    def _decide(self, other: Any, sign: str, claim: Any, contrary: Any) -> bool:
        difference = self - other
        if isinstance(difference, int):
            return bool(claim(difference))
        if difference._proved(claim):
            return True
        if difference._proved(contrary):
            return False
        raise LayoutError(f"neither {self} {sign} {other} nor its contrary was proved, for variables of at least 1")

    def _proved(self, claim: Any) -> bool:
        with _analyzer(self.expr, self.facts) as analyzer:
            return bool(analyzer.can_prove(claim(self.expr)))

    def __index__(self) -> int:
        raise LayoutError(f"an int is needed, and {self} is known at run time only")

    def __str__(self) -> str:
        return str(self.expr)

    def __repr__(self) -> str:
        return f"Symbolic({self.expr})"


Number = int | Symbolic
"""What an extent, a stride or an offset is: an int, or an expression that counts like one."""


def proved_less(a: Number, b: Number) -> bool:
    """Return whether ``a < b`` is known: where ``<`` would raise, it isn't."""
    try:
        return a < b
    except LayoutError:
        return False


def is_expression(value: object) -> bool:
    """Return whether `value` is an integer expression of the compiler; found without importing it."""
    return type(value).__module__.split(".")[0] == "tvm" and str(getattr(value, "ty", "")).startswith("int")


def fold(expr: Any, facts: tuple[Fact, ...] = ()) -> Number:
    """Return `expr` simplified: an int if it is a constant."""
    from tvm.tirx import IntImm

    with _analyzer(expr, facts) as analyzer:
        simple = analyzer.simplify(expr)
    return int(simple.value) if isinstance(simple, IntImm) else Symbolic(simple, facts)


def index_value(expr: Any, extent: Number) -> Number:
    """Return the index `expr` as a value that is at least 0 and less than `extent`."""
    return fold(expr, ((expr, extent.expr if isinstance(extent, Symbolic) else extent),))


def _variables(expr: Any) -> list[Any]:
    from tvm.tirx.analysis import undefined_vars

    return list(undefined_vars(expr))


def _floordiv(a: Any, b: Any) -> Any:
    from tvm.tirx import floordiv

    return floordiv(a, b)


def _floormod(a: Any, b: Any) -> Any:
    from tvm.tirx import floormod

    return floormod(a, b)


def _equal(a: Any, b: Any) -> Any:
    from tvm.tirx import EQ, IntImm

    return EQ(a, IntImm(str(a.ty), b) if isinstance(b, int) else b)


@contextmanager
def _analyzer(expr: Any, facts: tuple[Fact, ...]) -> Iterator[Any]:
    """Give an analyzer that knows the facts, and that every other variable of `expr` is at least 1."""
    from tvm.ir import Range
    from tvm.sym import Analyzer
    from tvm.tirx import IntImm, Var, all

    analyzer = Analyzer()
    free = [] if isinstance(expr, (bool, int)) else _variables(expr)
    inside = [var for index, extent in facts for var in _variables(index)]
    free += [var for _, extent in facts if not isinstance(extent, int) for var in _variables(extent)]
    for var in free:
        if not any(var.same_as(other) for other in inside):
            dtype = str(var.ty)
            top = 2**62 if dtype == "int64" else 2**31 - 2
            analyzer.bind(var, Range.from_min_extent(IntImm(dtype, 1), IntImm(dtype, top)), allow_override=True)
    with ExitStack() as scopes:
        for index, extent in facts:
            if isinstance(index, Var):
                analyzer.bind(index, Range(IntImm(str(index.ty), 0), extent), allow_override=True)
            else:
                scopes.enter_context(analyzer.constraint_scope(all(index >= 0, index < extent)))
        yield analyzer
