"""Expressions written so that upstream treats them right: the same values, in words that it knows.

Upstream's analyzer has bounds that are wrong, and drops the ``% 2`` of ``(i >> (k - j)) % 2``: of a shift by a number
whose range it doesn't know, of numbers that a cast wraps, and of floats that were divided. Its code generator for CPUs
takes truth values for floats, and sums of uint32 for such that stay in the type; a CPU traps where an integer is
divided by zero. So a program is read with each of
these rewritten, for all checks and all targets:

==============================  ====================================================================
``a >> b``, ``a << b``          the number of places taken modulo the type's bits, on every target
a shift left, a float's cast    ``x | 0``, of which the analyzer says nothing but the type's range
to an integer, unsigned sums
a cast or a sum of uint32 that  the bits that stay, and arithmetic that puts the sign in its place
wraps
``a // b`` and the like, where  the same, with any value where ``b`` is 0
``b`` may be 0
the same, where ``b`` is less   a division by ``-b``, and one less where something is left
than 0
truth values compared, cast,    comparisons of 0 and 1, and ``and``, ``or``, ``not``
chosen, or their bits combined
==============================  ====================================================================

Source: upstream's ``src/arith/const_int_bound.cc``, ``modular_set.cc`` and ``src/target/llvm/codegen_llvm.cc``.

>>> from tvm import tirx
>>> i, k = tirx.Var("i", "int32"), tirx.Var("k", "int32")
>>> plain((i < 3) == (k < 5))
T.Select(i < 3, 1, 0) == T.Select(k < 5, 1, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import is_choice
from tvm_axe.errors import TileError

__all__ = ["chosen", "plain"]

_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
_SHIFTS = (tirx.LShift, tirx.RShift)


def plain(value: Any) -> Any:
    """An expression or a statement with every expression in it as the module says; its values are the same.

    Law: where no integer is divided by zero and no shift is by less than 0 or by more places than there are, each
    expression has the value that it had.

    Raises
    ------
    TileError
        A shift by a constant that the type has no such places for; arithmetic on truth values.
    """
    return _Plain(value).written(value)


def chosen(condition: Any, then: Any, otherwise: Any) -> Any:
    """A choice both sides of which are computed, whatever the condition is.

    Upstream simplifies each side as if it were computed under its condition alone, and leaves out what keeps a divisor
    from 0 or an index inside of its tensor elsewhere; so from sides with such the condition is hidden.
    """
    return tirx.Select(_condition(condition, (then, otherwise), tirx.BitwiseOr), then, otherwise)


def _condition(condition: Any, sides: Sequence[Any], by: type) -> Any:
    """The condition of a choice between sides, hidden if one of them has what upstream mustn't simplify under it."""
    found: list[Any] = []
    for side in sides:
        if not isinstance(side, int | float):
            tvm_ffi.structural_walk(side, ((*_DIVISIONS, ir.TensorLoad), found.append))
    return _hidden(condition, by) if found else condition


class _Plain:
    def __init__(self, value: Any) -> None:
        self.analyzer = sym.Analyzer()
        self.refused: list[TileError] = []
        tvm_ffi.structural_walk(value, (tirx.For, self._range))

    def _range(self, loop: tirx.For) -> None:
        if isinstance(loop.min, tirx.IntImm) and isinstance(loop.extent, tirx.IntImm) and int(loop.extent) > 0:
            self.analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    def written(self, value: Any) -> Any:
        rules = (
            (tirx.Bind, self._name),
            (tirx.Cast, self._cast),
            (_COMPARISONS, _comparison),
            (_SHIFTS, self._shift),
            (_DIVISIONS, self._division),
            ((tirx.Add, tirx.Sub, tirx.Mul), self._sum),
            ((tirx.Min, tirx.Max), lambda node: _logical(node, tirx.And, tirx.Or, tirx.Min)),
            ((tirx.BitwiseAnd, tirx.BitwiseOr), lambda node: _logical(node, tirx.And, tirx.Or, tirx.BitwiseAnd)),
            (tirx.BitwiseXor, lambda node: _number(node.a) != _number(node.b) if _is_bool(node) else node),
            (tirx.BitwiseNot, lambda node: tirx.Not(node.a) if _is_bool(node) else node),
            (tirx.Select, _select),
            (ir.Call, _call),
        )
        done = _tvm.structural_map(value, tuple((kind, self._caught(rule)) for kind, rule in rules))
        if self.refused:
            raise self.refused[0]
        return done

    def _caught(self, rule: Any) -> Any:
        def safe(node: Any) -> Any:
            try:
                return rule(node)
            except TileError as error:  # whose type is lost on the way through upstream
                self.refused.append(error)
                return node

        return safe

    def _name(self, bind: tirx.Bind) -> tirx.Bind:
        """A name, whose bounds are its value's in all that follows."""
        if _is_integer(bind.var):
            self.analyzer.update(bind.var, sym.ConstIntBound(*self._bounds(bind.value)))
        return bind

    def _bounds(self, value: Any) -> tuple[int, int]:
        """The least and the largest value that an integer expression may have."""
        low, high = _limits(str(value.ty.dtype))
        bound = self.analyzer.const_int_bound(value)
        least, most = max(low, int(bound.min_value)), min(high, int(bound.max_value))
        if int(bound.max_value) == sym.ConstIntBound.POS_INF:
            most = high
        return (least, most) if least <= most else (low, high)

    def _cast(self, cast: Any) -> Any:
        if _is_bool(cast.value):
            return cast.value if _is_bool(cast) else _number(cast.value, str(cast.ty.dtype))
        if _is_bool(cast):
            return cast.value != tirx.const(0, cast.value.ty.dtype)
        if not _is_integer(cast):
            return cast
        if not _is_integer(cast.value):
            return _opaque(cast)
        return cast if self._fits(cast.value, str(cast.ty.dtype)) else _wrapped(cast.value, str(cast.ty.dtype))

    def _fits(self, value: Any, dtype: str) -> bool:
        """Whether a type has all values of an integer expression."""
        (low, high), (least, most) = _limits(dtype), self._bounds(value)
        return low <= least and most <= high

    def _shift(self, node: Any) -> Any:
        _refuse_bool(node, "valid is a shift of integers")
        dtype = str(node.ty.dtype)
        bits = tvm_ffi.dtype(dtype).bits
        places = node.b
        if not isinstance(places, tirx.IntImm):
            places = tirx.BitwiseAnd(places, tirx.const(bits - 1, places.ty.dtype))
        elif not 0 <= int(places) < bits:
            raise TileError(f"{node}: a shift by {int(places)} places of {node.ty}; valid is 0 to {bits - 1}")
        shifted = type(node)(node.a, places)
        if not isinstance(node, tirx.LShift):
            return shifted
        (least, most), (_, longest) = self._bounds(node.a), self._bounds(places)
        fits = _limits(dtype)[0] <= least << longest and most << longest <= _limits(dtype)[1]
        return shifted if fits else _opaque(shifted)

    def _sum(self, node: Any) -> Any:
        _refuse_bool(node, "valid are `and`, `or` and `not` of truth values, and T.cast of them to a number")
        dtype = str(node.ty.dtype)
        if not dtype.startswith("uint"):
            return node
        bound, (low, high) = self.analyzer.const_int_bound(node), _limits(dtype)
        if low <= int(bound.min_value) and int(bound.max_value) <= high:
            return node
        if dtype != "uint32":
            return _opaque(node)
        wide = "uint64" if isinstance(node, tirx.Mul) else "int64"  # that has all values
        return _wrapped(type(node)(tirx.Cast(wide, node.a), tirx.Cast(wide, node.b)), dtype)

    def _division(self, node: Any) -> Any:
        _refuse_bool(node, "valid is a division of numbers, to which T.cast brings truth values")
        if not _is_integer(node) or self.analyzer.can_prove(node.b > 0):
            return node
        if isinstance(node.b, tirx.IntImm):
            if int(node.b) == 0:
                raise TileError(f"{node}: a division by zero; valid is any other divisor")
            return _by_positive(node)
        # The least number divided by -1 traps too. Where a condition around says that it is not 0, upstream would
        # leave a choice out, fail at what an unrolled loop makes of the divisor under it, and compute the quotient
        # before the condition if it is there twice. It looks for the signs of a choice for milliseconds each time, and
        # of bits not at all.
        divisor = tirx.BitwiseOr(node.b, _is(0, node.b))
        if str(node.ty.dtype).startswith("u") or self._bounds(node.b)[0] >= 0:
            return type(node)(node.a, divisor)
        least, zero, one = _is(-1, node.b), *(tirx.const(number, node.b.ty.dtype) for number in (0, 1))
        done = type(node)(node.a, tirx.BitwiseXor(divisor, zero - least - least))  # -1 becomes 1
        return done if isinstance(node, (tirx.FloorMod, tirx.Mod)) else done * (one - least - least)


def _is(number: int, value: Any) -> Any:
    """1 where an integer has the value, 0 elsewhere, in bits and sums that stay in the type."""
    dtype = str(value.ty.dtype)
    bits, one, zero = tvm_ffi.dtype(dtype).bits, tirx.const(1, dtype), tirx.const(0, dtype)
    away = value if number == 0 else tirx.BitwiseXor(value, tirx.const(number, dtype))
    half = tirx.BitwiseOr(
        tirx.RShift(away, one), tirx.BitwiseAnd(away, one)
    )  # 0 where `away` is, and far from the ends
    last = tirx.const(bits - 1, dtype)
    if dtype.startswith("u"):
        return one - tirx.RShift(half + tirx.const(2 ** (bits - 1) - 1, dtype), last)
    return one + tirx.RShift(tirx.BitwiseOr(half, zero - half), last)


def _by_positive(node: Any) -> Any:
    """A division by a negative number as one by its amount: the only ones that upstream simplifies right in wraps."""
    by = -int(node.b)
    if by <= 0 or by > _limits(str(node.ty.dtype))[1]:
        return node
    divisor, zero = tirx.const(by, node.ty.dtype), tirx.const(0, node.ty.dtype)
    if isinstance(node, tirx.Mod):
        return tirx.Mod(node.a, divisor)
    if isinstance(node, tirx.Div):
        return zero - tirx.Div(node.a, divisor)
    rest = tirx.FloorMod(node.a, divisor)
    if isinstance(node, tirx.FloorMod):
        return rest - tirx.Select(rest != zero, divisor, zero)
    return zero - tirx.FloorDiv(node.a, divisor) - tirx.Select(rest != zero, tirx.const(1, node.ty.dtype), zero)


def _comparison(node: Any) -> Any:
    return type(node)(_number(node.a), _number(node.b)) if _is_bool(node.a) else node


def _logical(node: Any, both: type, either: type, of_both: type) -> Any:
    return node if not _is_bool(node) else (both if isinstance(node, of_both) else either)(node.a, node.b)


def _select(node: Any) -> Any:
    if not _is_bool(node):
        return chosen(node.condition, node.true_value, node.false_value)
    # A choice between 1 and 0 would do, but upstream takes four times as long for each that another is chosen by.
    condition = _condition(node.condition, (node.true_value, node.false_value), tirx.BitwiseOr)
    return tirx.Or(tirx.And(condition, node.true_value), tirx.And(tirx.Not(condition), node.false_value))


def _call(call: Any) -> Any:
    if not is_choice(call) or not _is_bool(call):
        return call
    condition, then, otherwise = call.args
    return tirx.if_then_else(condition, _number(then), _number(otherwise)) != 0


def _refuse_bool(node: Any, valid: str) -> None:
    if _is_bool(node):
        raise TileError(f"{node}: arithmetic on truth values; {valid}")


def _number(truth: Any, dtype: str = "int32") -> Any:
    return tirx.Select(truth, tirx.const(1, dtype), tirx.const(0, dtype))


def _wrapped(value: Any, dtype: str) -> Any:
    """An integer in a type that doesn't have all of its values, by arithmetic that has no bounds to be wrong about."""
    bits, own = tvm_ffi.dtype(dtype).bits, str(value.ty.dtype)
    if bits == 64:
        return tirx.reinterpret(dtype, value if tvm_ffi.dtype(own).bits == 64 else tirx.Cast("int64", value))
    value = tirx.reinterpret("int64", value) if own == "uint64" else value
    wide = "int64" if bits == 32 or "64" in own or own == "uint32" else "int32"
    low = tirx.BitwiseAnd(value if own == wide else tirx.Cast(wide, value), tirx.const(2**bits - 1, wide))
    if dtype.startswith("u"):
        return tirx.Cast(dtype, low)
    sign = tirx.const(2 ** (bits - 1), wide)
    return tirx.Cast(dtype, tirx.BitwiseXor(low, sign) - sign)


def _hidden(condition: Any, by: type) -> Any:
    """A condition of which the analyzer doesn't see when it holds.

    It would see the same one around, hidden alike: so choices and divisors are hidden by operations of their own.
    """
    return by(_number(condition), tirx.const(0, "int32")) != 0


def _opaque(value: Any) -> Any:
    return tirx.BitwiseOr(value, tirx.const(0, value.ty.dtype))


def _is_bool(value: Any) -> bool:
    return str(value.ty.dtype) == "bool"


def _is_integer(value: Any) -> bool:
    return "int" in str(value.ty.dtype)


def _limits(dtype: str) -> tuple[int, int]:
    bits, unsigned = tvm_ffi.dtype(dtype).bits, dtype.startswith("u")
    return (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
