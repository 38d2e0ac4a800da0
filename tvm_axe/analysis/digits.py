"""Integer indices as sums of digits of iterators, ``coef * (v // low % extent)``: what reshapes and flattenings are.

>>> from tvm import tirx
>>> i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
>>> print(index_of(i * 8 + j // 4 + 2, {i: (0, 4), j: (1, 32)}))
8*i0 + (i1//4%8) + 2

`tvm_axe.layout.grouping` cuts one layout of one whole tensor at the boundaries of shapes. Here the boundaries of many
buffers and blocks meet, an index may cover a part of a dimension, at an offset, and several iterations may share an
element; so factors are found on these digits (`tvm_axe.analysis.axes`), by the same rule: of two boundaries one divides
the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm import tirx

__all__ = ["Digit", "Index", "index_of"]


@dataclass(frozen=True, order=True)
class Digit:
    """The term ``coef * (v // low % extent)`` of an index, where v is the iterator at position `iterator`."""

    coef: int
    iterator: int
    low: int
    extent: int

    @property
    def most(self) -> int:
        """The largest value of the term."""
        return self.coef * (self.extent - 1)

    def __str__(self) -> str:
        scale = "" if self.coef == 1 else f"{self.coef}*"
        return f"{scale}i{self.iterator}" if self.low == 1 else f"{scale}(i{self.iterator}//{self.low}%{self.extent})"


@dataclass(frozen=True)
class Index:
    """A sum of digits, from the smallest coefficient on, and a constant."""

    digits: tuple[Digit, ...]
    constant: int

    @property
    def most(self) -> int:
        """The largest value of the digits."""
        return sum(digit.most for digit in self.digits)

    @property
    def is_positional(self) -> bool:
        """Whether each number is the sum of one choice of digits at most, as in a positional numeral system.

        It isn't where digits overlap, as in the windows of a convolution, or one digit of an iterator is used twice.
        """
        if any(b.coef % (a.coef * a.extent) for a, b in zip(self.digits, self.digits[1:])):
            return False
        return not any(
            a.iterator == b.iterator and a.low < b.low * b.extent and b.low < a.low * a.extent
            for a, b in itertools.combinations(self.digits, 2)
        )

    def __str__(self) -> str:
        terms = [str(digit) for digit in reversed(self.digits)]
        return " + ".join([*terms, str(self.constant)] if self.constant or not terms else terms)


def index_of(expr: tirx.Expr, iterators: Mapping[tirx.Var, tuple[int, int]]) -> Index | None:
    """Return `expr` as a sum of digits, or None where it isn't one.

    Parameters
    ----------
    expr : Expr
        An integer expression.
    iterators : Mapping[Var, tuple[int, int]]
        The position and the extent of each variable, which runs from 0.
    """
    found = _digits(expr, iterators)
    return None if found is None else Index(tuple(sorted(found.digits)), found.constant)


def _digits(expr: tirx.Expr, iterators: Mapping[tirx.Var, tuple[int, int]]) -> Index | None:
    if isinstance(expr, tirx.IntImm):
        return Index((), int(expr))
    if isinstance(expr, tirx.Cast):
        return _digits(expr.value, iterators)
    if isinstance(expr, tirx.Var):
        if expr not in iterators:
            return None
        position, extent = iterators[expr]
        return Index((Digit(1, position, 1, extent),) if extent > 1 else (), 0)
    if not isinstance(expr, (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod)):
        return None
    a, b = _digits(expr.a, iterators), _digits(expr.b, iterators)
    if a is None or b is None:
        return None
    if isinstance(expr, tirx.Add):
        return Index(a.digits + b.digits, a.constant + b.constant)
    if isinstance(expr, tirx.Mul) and not a.digits:
        a, b = b, a
    number = b.constant
    if b.digits:
        return None
    if isinstance(expr, tirx.Sub):
        return Index(a.digits, a.constant - number)
    if isinstance(expr, tirx.Mul) and not a.digits:
        return Index((), a.constant * number)
    if number <= 0:
        return None
    if isinstance(expr, tirx.Mul):
        return Index(tuple(replace(digit, coef=digit.coef * number) for digit in a.digits), a.constant * number)
    cut = _cut(a, number)
    return None if cut is None else cut[not isinstance(expr, tirx.FloorDiv)]


def _cut(index: Index, number: int) -> tuple[Index, Index] | None:
    """Return the quotient and the remainder of a division by `number`, or None where a digit lies across it."""
    high, low = [], []
    for digit in index.digits:
        if digit.coef % number == 0:
            high.append(replace(digit, coef=digit.coef // number))
        elif digit.coef * digit.extent <= number:
            low.append(digit)
        elif number % digit.coef == 0 and digit.extent % (number // digit.coef) == 0:
            inner = number // digit.coef
            high.append(Digit(1, digit.iterator, digit.low * inner, digit.extent // inner))
            low.append(replace(digit, extent=inner))
        else:
            return None
    remainder = Index(tuple(low), index.constant % number)
    if remainder.most + remainder.constant >= number:
        return None
    return Index(tuple(high), index.constant // number), remainder
