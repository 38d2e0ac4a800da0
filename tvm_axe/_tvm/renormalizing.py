"""Quotients of remainders, kept from what upstream makes of those by negative numbers.

It writes ``x % (a * b) // b`` as ``x // b % a``, which is right where both divisors have the same sign: of x = 1,
``x % -4 // 4`` is -1, and ``x // 4 % -1`` is 0. Nobody need have divided by a negative number: upstream's own
simplification makes ``x % -4`` of ``-(-x % 4)``, before the pass that does this.

Source: upstream's ``src/s_tir/transform/renormalize_split_pattern.cc``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, s_tir, tirx

from tvm_axe._tvm.simplifying import masked
from tvm_axe._tvm.structural import body_pass, put_around, structural_map

__all__ = ["keep_remainders"]


def keep_remainders() -> None:
    """Have upstream leave quotients of remainders as they are if one is by a negative number, in every pipeline."""

    def passes(renormalizes: Callable[[], ir.transform.Pass]) -> list[ir.transform.Pass]:
        return [body_pass("HideNegative", _hidden), renormalizes()]

    put_around(s_tir.transform, "RenormalizeSplitPattern", passes)


def _hidden(body: tirx.Stmt) -> tirx.Stmt:
    """A body whose remainders by negative numbers, and what such numbers divide, are seen as no part of each other."""

    def remainder(division: tirx.FloorMod) -> tirx.Expr:
        return masked(division) if _is_negative(division.b) else division

    def quotient(division: tirx.FloorDiv) -> tirx.Expr:
        return tirx.FloorDiv(masked(division.a), division.b) if _is_negative(division.b) else division

    return structural_map(body, ((tirx.FloorMod, remainder), (tirx.FloorDiv, quotient)))


def _is_negative(divisor: Any) -> bool:
    number = divisor.value if isinstance(divisor, tirx.Broadcast) else divisor
    return isinstance(number, tirx.IntImm) and int(number) < 0
