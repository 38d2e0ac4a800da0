"""What upstream computes wrongly, or can't, is said in other words when a program is read.

- Where a shift's amount may be negative, if only at points that a condition leaves out, upstream's bound of a right
  shift is too small, and operations that would matter are dropped: ``(i >> (k - j)) % 2`` loses its ``% 2``. An amount
  is at least 0 here.
- Truth values that are compared or ordered become instructions for floats, which LLVM's verifier refuses; of vectors
  they end the process. They are compared as integers. The complement of one is an integer in C; here it is `not`.
  Arithmetic on them is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import tvm_ffi
from tvm import ir, tirx

from tvm_axe.errors import TileError

_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_ORDERS = (tirx.Min, tirx.Max)
_SHIFTS = (tirx.LShift, tirx.RShift)
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


def reworded(stmt: tirx.Stmt) -> tirx.Stmt:
    """Return a statement that means the same, where that has a meaning, in words that upstream gets right.

    Raises
    ------
    TileError
        If truth values are added, multiplied and so on.
    """
    rules = [
        (_SHIFTS, _shift),
        (_COMPARISONS, _compared),
        (_ORDERS, _ordered),
        (_ARITHMETIC, _computed),
        (tirx.BitwiseNot, _complement),
        (ir.Call, _called),
    ]
    return tvm_ffi.structural_map(stmt, rules)


def _shift(shift: Any) -> Any:
    _computed(shift)
    if isinstance(shift.b, tirx.IntImm):
        return shift
    return type(shift)(shift.a, tirx.Max(shift.b, tirx.IntImm(shift.b.ty, 0)))


def _compared(comparison: Any) -> Any:
    if not _is_truth(comparison.a):
        return comparison
    return type(comparison)(_number(comparison.a), _number(comparison.b))


def _ordered(choice: Any) -> Any:
    if not _is_truth(choice.a):
        return choice
    return (tirx.And if isinstance(choice, tirx.Min) else tirx.Or)(choice.a, choice.b)


def _complement(inverse: Any) -> Any:
    return tirx.Not(inverse.a) if _is_truth(inverse.a) else inverse


def _computed(value: Any) -> Any:
    if _is_truth(value.a):
        _refuse(value)
    return value


def _called(call: ir.Call) -> ir.Call:
    if str(getattr(call.op, "name", "")) == "tirx.abs" and _is_truth(call.args[0]):
        _refuse(call)
    return call


def _refuse(value: Any) -> NoReturn:
    raise TileError(f"{value} computes with truth values; valid are their T.Cast to int32, and `and`, `or`, `not`")


def _is_truth(value: Any) -> bool:
    return str(value.ty).startswith("bool")


def _number(truth: Any) -> Any:
    return tirx.Cast("int32", truth)
