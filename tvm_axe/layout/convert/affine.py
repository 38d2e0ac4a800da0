"""Index expressions as sums of digits: how a map that splits, merges and permutes indices is read.

A digit of an index x is ``x // weight % extent``; an expression is read as a constant and digits times coefficients.
Sums and multiples of such are such again. A quotient by n is one if the digits fall into those that n divides and
others that stay below n together, for which a digit may be cut in two; a remainder likewise.

It reads any tree of nodes that are called as the compiler's are: Var, IntImm, Cast, Add, Sub, Mul, FloorDiv, FloorMod,
and, of what is not negative, Div and Mod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tvm_axe.errors import LayoutError


@dataclass(frozen=True)
class Digit:
    """``x // weight % extent`` of the index of dimension `dim`."""

    dim: int
    weight: int
    extent: int

    def cut(self, low: int) -> tuple[Digit, Digit]:
        """Return its digits of extent ``extent / low`` and `low`, the higher first."""
        return Digit(self.dim, self.weight * low, self.extent // low), Digit(self.dim, self.weight, low)


@dataclass(frozen=True)
class DigitSum:
    """``constant + sum of coefficients[d] * d``."""

    constant: int
    coefficients: Mapping[Digit, int]

    def __add__(self, other: DigitSum) -> DigitSum:
        total = dict(self.coefficients)
        for digit, coefficient in other.coefficients.items():
            total[digit] = total.get(digit, 0) + coefficient
        return DigitSum(self.constant + other.constant, {d: c for d, c in total.items() if c})

    def __mul__(self, factor: int) -> DigitSum:
        return DigitSum(self.constant * factor, {d: c * factor for d, c in self.coefficients.items() if factor})

    def apart(self, text: str) -> DigitSum:
        """Return the same sum of digits that share no part of an index, or raise LayoutError about `text`.

        So ``x - x % 4`` becomes ``x // 4 * 4``. Digits that are apart vary freely, and have exact bounds.
        """
        cuts: dict[int, set[int]] = {}
        for digit in self.coefficients:
            cuts.setdefault(digit.dim, set()).update((digit.weight, digit.weight * digit.extent))
        total = DigitSum(self.constant, {})
        for digit, coefficient in self.coefficients.items():
            end = digit.weight * digit.extent
            for low, high in pairwise(sorted(cut for cut in cuts[digit.dim] if digit.weight <= cut <= end)):
                if low % digit.weight or high % low:
                    raise LayoutError(f"in {text}: parts of an index overlap, at multiples of {high} and of {low}")
                total += DigitSum(0, {Digit(digit.dim, low, high // low): coefficient * (low // digit.weight)})
        return total

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest value, if all digits vary freely."""
        ends = [c * (d.extent - 1) for d, c in self.coefficients.items()]
        return self.constant + sum(min(end, 0) for end in ends), self.constant + sum(max(end, 0) for end in ends)

    def divmod(self, n: int, text: str) -> tuple[DigitSum, DigitSum]:
        """Return quotient and remainder by `n`, or raise LayoutError about the expression `text`."""
        quotient, remainder = DigitSum(self.constant // n, {}), DigitSum(self.constant % n, {})
        for digit, coefficient in self.coefficients.items():
            low = n // coefficient if coefficient > 0 and n % coefficient == 0 else 1
            if coefficient % n == 0:
                quotient += DigitSum(0, {digit: coefficient // n})
            elif 1 < low < digit.extent and digit.extent % low == 0:
                high, rest = digit.cut(low)
                quotient, remainder = quotient + DigitSum(0, {high: 1}), remainder + DigitSum(0, {rest: coefficient})
            else:
                remainder += DigitSum(0, {digit: coefficient})
        least, most = remainder.bounds
        if least < 0 or most >= n:
            raise LayoutError(
                f"in {text}: division by {n} doesn't fall between digits of the indices: what it leaves runs from "
                f"{least} to {most}"
            )
        return quotient, remainder


def read(expr: Any, indices: Sequence[Any], shape: Sequence[int]) -> DigitSum:
    """Return an expression over the variables `indices`, which run through `shape`, as a sum of digits.

    Raises
    ------
    LayoutError
        If it has another variable or operation, a product of two variables, or a division that is not between digits.
    """
    if isinstance(expr, int):
        return DigitSum(expr, {})
    kind = type(expr).__name__
    if kind == "IntImm":
        return DigitSum(int(expr.value), {})
    if kind == "Var":
        for dim, var in enumerate(indices):
            if expr.same_as(var):
                return DigitSum(0, {Digit(dim, 1, shape[dim]): 1} if shape[dim] > 1 else {})
        raise LayoutError(f"variable {expr} is none of the initial indices {', '.join(map(str, indices))}")
    if kind == "Cast":
        return read(expr.value, indices, shape)
    if kind not in ("Add", "Sub", "Mul", "FloorDiv", "FloorMod", "Div", "Mod"):
        raise LayoutError(f"{kind} in {expr}: a layout sums, splits and merges indices, and nothing else")
    a, b = read(expr.a, indices, shape), read(expr.b, indices, shape)
    if kind == "Add":
        return (a + b).apart(str(expr))
    if kind == "Sub":
        return (a + b * -1).apart(str(expr))
    if kind == "Mul":
        if not a.coefficients:
            a, b = b, a
        if b.coefficients:
            raise LayoutError(f"{expr} multiplies indices, and a layout multiplies by constants")
        return a * b.constant
    if b.coefficients or b.constant < 1:
        raise LayoutError(f"{expr} divides by {expr.b}, and a layout divides by positive constants")
    if kind in ("Div", "Mod") and a.bounds[0] < 0:
        raise LayoutError(f"{expr} divides towards zero what may be as low as {a.bounds[0]}, and a layout rounds down")
    quotient, remainder = a.divmod(b.constant, str(expr))
    return quotient if kind in ("FloorDiv", "Div") else remainder
