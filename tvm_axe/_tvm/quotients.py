"""Extents that are made of sizes, written with as few quotients and remainders as they need.

An extent becomes a polynomial of sizes, whose other atoms are the quotients, minima and maxima that don't come out:

========================================== ======================
``n + (-n) % 4``                           ``(n + 3) // 4 * 4``
``4 * k // k``, of any `k`                 ``4``
``(h * w + 2 * w) // w``                   ``h + 2``
``n // 2 // 2``                            ``n // 4``
========================================== ======================

Where the extent as it is written has a value the two are equal: none divides by zero, so that what is divided by may
be cancelled.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx

__all__ = ["reduced"]

_Monomial = tuple[int, ...]
"""The atoms of a product by their numbers, in order, one as often as it is a factor."""
_Polynomial = Mapping[_Monomial, int]
"""The factor of each product; none is zero."""

_MOST = 64
"""Products of a polynomial, above which an extent stays as it is: those of a sum's power are many."""


class _NoExtentError(Exception):
    """Not made of sizes by the arithmetic of integers, or of too many products."""


def reduced(extent: tirx.Expr) -> tirx.Expr:
    """The extent with fewer operations; itself if none are spared, or if it isn't arithmetic of sizes.

    >>> n = tirx.Var("n", "int64")
    >>> padded = n + tirx.floormod(n * -1, 4)
    >>> print(reduced(padded), reduced(tirx.floordiv(padded, tirx.floordiv(padded, 4))))
    (n + T.int64(3)) // T.int64(4) * T.int64(4) T.int64(4)
    """
    if isinstance(extent, tirx.IntImm | tirx.Var) or not _divides(extent):
        return extent
    terms = _Terms(str(extent.ty))
    try:
        found = terms.written(terms.of(extent))
    except _NoExtentError:
        return extent
    return found if _operations(found) < _operations(extent) else extent


class _Terms:
    """Polynomials of the atoms of one extent.

    Attributes
    ----------
    atoms : list
        What each atom is: a variable, or a function of two polynomials.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.atoms: list[tirx.Var | tuple[type, _Polynomial, _Polynomial]] = []
        self._numbers: dict[Any, int] = {}

    def of(self, expr: tirx.Expr) -> _Polynomial:
        """The polynomial that an extent is."""
        if isinstance(expr, tirx.IntImm):
            return _constant(int(expr))
        if isinstance(expr, tirx.Var) and str(expr.ty) == self._dtype:
            return self._atom(expr, expr)
        if type(expr) not in _COMBINED:
            raise _NoExtentError
        return _COMBINED[type(expr)](self, self.of(expr.a), self.of(expr.b))

    def _atom(self, atom: Any, key: Any) -> _Polynomial:
        if key not in self._numbers:
            self._numbers[key] = len(self.atoms)
            self.atoms.append(atom)
        return {(self._numbers[key],): 1}

    # ---- Arithmetic -------------------------------------------------------------------------------------------------

    def quotient(self, some: _Polynomial, by: _Polynomial) -> _Polynomial:
        """The polynomial of a quotient that is rounded down."""
        if not by:
            raise _NoExtentError
        if _leading(by)[1] < 0:
            some, by = _times(some, -1), _times(by, -1)
        whole, rest = _divided(some, by)
        if not rest:
            return whole
        rest, by = self._without_common(rest, by)
        if set(by) == {()}:
            return _sum(whole, self._quotient_by_number(rest, by[()]))
        return _sum(whole, self._function(tirx.FloorDiv, rest, by))

    def _without_common(self, some: _Polynomial, by: _Polynomial) -> tuple[_Polynomial, _Polynomial]:
        """A dividend and a divisor without what is a factor of both."""
        shared = [*next(iter(by))]
        for monomial in (*some, *by):
            left, kept = list(monomial), []
            for atom in shared:
                if atom in left:
                    left.remove(atom)
                    kept.append(atom)
            shared = kept
        # Of what is added to multiples of the factor, less than the factor makes no difference to a number's quotient.
        free = set(by) == {()} and not shared
        factor = math.gcd(*by.values(), *(each for monomial, each in some.items() if monomial or not free))

        def over(of: _Polynomial) -> _Polynomial:
            made = {_without(monomial, shared): each // factor for monomial, each in of.items()}
            return {monomial: each for monomial, each in made.items() if each}

        return over(some), over(by)

    def _quotient_by_number(self, some: _Polynomial, by: int) -> _Polynomial:
        if by == 1:
            return some
        first = min((monomial for monomial in some if monomial), default=())
        if first and some[first] < 0:  # rounded up
            rest = _sum(_times(some, -1), _constant(by - 1))
            return _times(self._quotient_by_number(rest, by), -1)
        whole = _constant(some.get((), 0) // by)
        rest = _sum(some, _times(whole, -by))
        if not any(rest):
            return whole
        nested = self.atoms[first[0]] if len(rest) == 1 and len(first) == 1 and rest[first] == 1 else None
        if isinstance(nested, tuple) and nested[0] is tirx.FloorDiv and set(nested[2]) == {()}:
            return _sum(whole, self.quotient(nested[1], _times(nested[2], by)))
        return _sum(whole, self._function(tirx.FloorDiv, rest, _constant(by)))

    def remainder(self, some: _Polynomial, by: _Polynomial) -> _Polynomial:
        """The polynomial of a remainder of the divisor's sign."""
        return _sum(some, _times(self.product(by, self.quotient(some, by)), -1))

    def product(self, some: _Polynomial, other: _Polynomial) -> _Polynomial:
        """The polynomial of a product."""
        found: _Polynomial = {}
        for monomial, factor in some.items():
            found = _sum(found, _scaled(other, monomial, factor))
        return found

    def extreme(self, kind: type, some: _Polynomial, other: _Polynomial) -> _Polynomial:
        """The polynomial of a minimum or a maximum."""
        apart = _sum(some, _times(other, -1))
        if not any(apart):
            return some if (apart.get((), 0) > 0) == (kind is tirx.Max) else other
        return self._function(kind, some, other)

    def _function(self, kind: type, some: _Polynomial, other: _Polynomial) -> _Polynomial:
        return self._atom((kind, some, other), (kind, frozenset(some.items()), frozenset(other.items())))

    # ---- Written ----------------------------------------------------------------------------------------------------

    def written(self, found: _Polynomial) -> tirx.Expr:
        """The extent that a polynomial is, what is subtracted behind what is added."""
        made: tirx.Expr | None = None
        for monomial, factor in sorted(found.items(), key=lambda each: (each[1] < 0, not each[0])):
            own = self._written_product(monomial, factor if made is None else abs(factor))
            made = own if made is None else made + own if factor > 0 else made - own
        return self._number(0) if made is None else made

    def _written_product(self, monomial: _Monomial, factor: int) -> tirx.Expr:
        parts = [self._written_atom(self.atoms[number]) for number in monomial]
        return functools.reduce(operator.mul, [*parts, *([] if parts and factor == 1 else [self._number(factor)])])

    def _written_atom(self, atom: tirx.Var | tuple[type, _Polynomial, _Polynomial]) -> tirx.Expr:
        if isinstance(atom, tirx.Var):
            return atom
        kind, some, other = atom
        return kind(self.written(some), self.written(other))

    def _number(self, number: int) -> tirx.Expr:
        return tirx.const(number, self._dtype)


_COMBINED: Mapping[type, Callable[[_Terms, _Polynomial, _Polynomial], _Polynomial]] = {
    tirx.Add: lambda _terms, some, other: _sum(some, other),
    tirx.Sub: lambda _terms, some, other: _sum(some, _times(other, -1)),
    tirx.Mul: _Terms.product,
    tirx.FloorDiv: _Terms.quotient,
    tirx.FloorMod: _Terms.remainder,
    tirx.Min: lambda terms, some, other: terms.extreme(tirx.Min, some, other),
    tirx.Max: lambda terms, some, other: terms.extreme(tirx.Max, some, other),
}


def _constant(number: int) -> _Polynomial:
    return {(): number} if number else {}


def _times(some: _Polynomial, factor: int) -> _Polynomial:
    return {monomial: each * factor for monomial, each in some.items() if factor}


def _scaled(some: _Polynomial, by: _Monomial, factor: int) -> _Polynomial:
    return {tuple(sorted(monomial + by)): each * factor for monomial, each in some.items()}


def _sum(some: _Polynomial, other: _Polynomial) -> _Polynomial:
    found = dict(some)
    for monomial, factor in other.items():
        found[monomial] = found.get(monomial, 0) + factor
    found = {monomial: factor for monomial, factor in found.items() if factor}
    if len(found) > _MOST:
        raise _NoExtentError
    return found


def _leading(some: _Polynomial) -> tuple[_Monomial, int]:
    return max(some.items(), key=lambda each: (len(each[0]), each[0]))


def _divided(some: _Polynomial, by: _Polynomial) -> tuple[_Polynomial, _Polynomial]:
    """The part of a quotient that is exact, and what of the dividend is left.

    A divisor of several products is taken out as a whole or not at all: it would leave more than there was.
    """
    lead, factor = _leading(by)
    whole: _Polynomial = {}
    rest = some
    for _ in range(_MOST):
        at = next((m for m, each in rest.items() if each % factor == 0 and _contains(m, lead)), None)
        if at is None:
            break
        ratio = _without(at, lead)
        taken = _scaled(by, ratio, rest[at] // factor)
        whole = _sum(whole, {ratio: rest[at] // factor})
        rest = _sum(rest, _times(taken, -1))
    return (whole, rest) if not rest or len(by) == 1 else ({}, some)


def _contains(monomial: _Monomial, other: _Monomial) -> bool:
    return all(monomial.count(atom) >= other.count(atom) for atom in other)


def _without(monomial: _Monomial, other: _Monomial | list[int]) -> _Monomial:
    left = list(monomial)
    for atom in other:
        left.remove(atom)
    return tuple(left)


def _divides(expr: tirx.Expr) -> bool:
    """Whether there is a quotient or a remainder, of which alone operations are spared here."""
    if isinstance(expr, tirx.FloorDiv | tirx.FloorMod):
        return True
    return type(expr) in _COMBINED and (_divides(expr.a) or _divides(expr.b))


def _operations(expr: tirx.Expr) -> int:
    """How many operations there are; a remainder is a quotient, a product and a difference."""
    if type(expr) not in _COMBINED:
        return 0
    return (3 if isinstance(expr, tirx.FloorMod) else 1) + _operations(expr.a) + _operations(expr.b)
