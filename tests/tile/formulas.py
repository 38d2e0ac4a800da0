"""Random formulas of integers and truth values, as text: shifts, bits, quotients, what wraps, bools compared.

Every value is defined: nothing is divided by zero, shifted by more places than there are, or larger than an int32 on
the way. So numpy's int64 and any compiler agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LIMIT = 2**28
NARROW = {"int8": 2**7, "uint8": 2**8, "int16": 2**15, "uint16": 2**16}


@dataclass
class Formulas:
    """Draws formulas; `terms` are the texts to begin with, int32 each, and the largest magnitude of each."""

    choose: Callable[[Sequence], object]
    terms: Sequence[tuple[str, int]]

    def integer(self, depth: int) -> tuple[str, int]:
        """An int32, and a bound of its magnitude."""
        if not depth:
            if not self.choose(range(3)):
                number = self.choose([-7, -3, -2, -1, 0, 1, 2, 3, 5, 8])
                return f"T.int32({number})", abs(number)
            return self.choose(self.terms)
        kinds = (self._sum, self._quotient, self._shift, self._bits, self._choice, self._wrapped, self._of_truth)
        text, size = self.choose(kinds)(depth - 1)
        return (text, size) if size < LIMIT else (f"({text}) % 1001", 1001)

    def truth(self, depth: int) -> str:
        """A bool."""
        if not depth or not self.choose(range(3)):
            a, b = (self.integer(max(depth - 1, 0))[0] for _ in range(2))
            return self._compared(a, b)
        a, b, c = (self.truth(depth - 1) for _ in range(3))
        return self.choose(
            [
                self._compared(a, b),
                f"T.And({a}, {b})",
                f"T.Or({a}, {b})",
                f"T.Not({a})",
                f"T.{self.choose(['min', 'max'])}({a}, {b})",
                f"T.Select({a}, {b}, {c})",
                f"T.if_then_else({a}, {b}, {c})",
                f'T.cast({self._varying(depth - 1)[0]}, "bool")',
                f"T.{self.choose(['bitwise_and', 'bitwise_or', 'bitwise_xor'])}({a}, {b})",
            ]
        )

    def _compared(self, a: str, b: str) -> str:
        return f"T.{self.choose(['EQ', 'NE', 'LT', 'LE', 'GT', 'GE'])}({a}, {b})"

    def _varying(self, depth: int) -> tuple[str, int]:
        """No constant: upstream's parser refuses to cast one to a type that doesn't have it."""
        (a, m), (b, n) = self.integer(depth), self.choose(self.terms)
        return f"({a}) + {b}", m + n

    def _pair(self, depth: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return self.integer(depth), self.integer(self.choose([0, depth]))

    def _sum(self, depth: int) -> tuple[str, int]:
        (a, m), (b, n) = self._pair(depth)
        operator = self.choose(["+", "-", "*", "min", "max"])
        if operator in ("min", "max"):
            return f"T.{operator}({a}, {b})", max(m, n)
        if operator == "*" and m * n < LIMIT:
            return f"({a}) * ({b})", m * n
        return f"({a}) {'-' if operator == '-' else '+'} ({b})", m + n

    def _quotient(self, depth: int) -> tuple[str, int]:
        (a, m), (b, n) = self._pair(depth)
        constant = self.choose([-5, -3, -2, 2, 3, 7, None])
        word = self.choose(["T.floordiv", "T.floormod", "T.truncdiv", "T.truncmod"])
        if constant is not None:
            return f"{word}({a}, T.int32({constant}))", max(m, abs(constant))
        if self.choose([False, True]):
            divisor = self.choose([f"T.max({b}, 1)", f"T.shift_left(1, {self._places()})"])
            return f"{word}({a}, {divisor})", max(m, n)
        b, n = self.choose(self.terms)
        return f"T.if_then_else(T.NE({b}, 0), {word}({a}, {b}), 7)", max(m, n, 7)

    def _shift(self, depth: int) -> tuple[str, int]:
        (a, m), (b, _) = self._pair(depth)
        places = self.choose([f"T.bitwise_and({b}, 7)", f"T.max(T.min({b}, 9), 0)", "1", "3"])
        if self.choose([False, True]):
            return f"T.shift_right({a}, {places})", m + 1
        if not self.choose(range(4)):  # out of the type's upper end, and what is left of it
            return f"T.shift_right(T.shift_left({a}, {self._places()}), 8)", 2**23
        return f"T.shift_left(T.floormod({a}, 64), {places})", 64 << 9

    def _places(self) -> str:
        """How far the bits of an int32 may go; no constant: upstream's parser refuses a product that wraps."""
        return f"T.bitwise_and({self.choose(self.terms)[0]}, 31)"

    def _bits(self, depth: int) -> tuple[str, int]:
        (a, m), (b, n) = self._pair(depth)
        word = self.choose(["bitwise_and", "bitwise_or", "bitwise_xor"])
        return f"T.{word}({a}, {b})", 2 * max(m, n) + 1

    def _choice(self, depth: int) -> tuple[str, int]:
        (a, m), (b, n) = self._pair(depth)
        return f"T.{self.choose(['Select', 'if_then_else'])}({self.truth(depth)}, {a}, {b})", max(m, n)

    def _wrapped(self, depth: int) -> tuple[str, int]:
        a, m = self._varying(depth)
        narrow = self.choose([*NARROW, "uint32", "shifted", "summed"])
        if narrow == "uint32":
            return f'T.cast(T.cast({a}, "uint32"), "int32")', m
        if narrow == "shifted":
            return f'T.cast(T.shift_right(T.cast({a}, "uint32"), T.uint32(7)), "int32")', 2**25
        if narrow == "summed":
            b, operator = self._varying(depth)[0], self.choose("+-*")
            total = f'T.cast({a}, "uint32") {operator} T.cast({b}, "uint32")'
            return f'T.cast(T.shift_right({total}, T.uint32(7)), "int32")', 2**25
        return f'T.cast(T.cast({a}, "{narrow}"), "int32")', NARROW[narrow]

    def _of_truth(self, depth: int) -> tuple[str, int]:
        return f'T.cast({self.truth(depth)}, "int32")', 1
