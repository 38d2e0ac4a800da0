"""What upstream's simplification gets wrong of values, written so that it doesn't see it."""

from __future__ import annotations

import math

import numpy as np
import tvm_ffi
from tvm import ir, tirx

from tvm_axe._tvm.structural import body_pass, is_float, structural_map

__all__ = ["in_bits", "kept_values", "masked", "truncated", "unequal"]


def kept_values() -> ir.transform.Pass:
    """A pass that writes expressions so that upstream's simplification leaves their values what they are.

    It takes all floats for finite numbers: one for equal to itself, its difference from itself for zero, and what isn't
    less than another for what is greater or equal. So what is compared with itself is asked whether it is NaN, what is
    negated is compared with zero, as a number, and such a difference is chosen. What is computed with a zero it takes
    for that zero or for the other operand; so the zero is written by its bits. And it takes remainders of negative
    divisors for positive. So divisors that are known are positive.
    """

    def itself(comparison: tirx.EQ | tirx.NE) -> tirx.Expr:
        if not _are_one(comparison):
            return comparison
        own = str(comparison.a.ty) in ("float16", "float32", "float64")  # of others upstream has no `isnan`
        is_nan = tirx.isnan(comparison.a if own else tirx.Cast("float32", comparison.a))
        return is_nan if isinstance(comparison, tirx.NE) else tirx.Not(is_nan)

    def negated(negation: tirx.Not) -> tirx.Expr:
        compared: list[bool] = []
        tvm_ffi.structural_walk(negation.a, (_COMPARISONS, lambda each: compared.append(is_float(each.a))))
        if not any(compared):
            return negation
        return tirx.EQ(tirx.Cast("int8", negation.a), tirx.const(0, "int8"))

    def nothing(difference: tirx.Sub) -> tirx.Expr:
        if not _are_one(difference):
            return _with_hidden_zero(difference)
        a, dtype = difference.a, str(difference.ty)
        low, high = (tirx.const(bound, dtype) for bound in (-math.inf, math.inf))
        finite = tirx.And(tirx.LT(low, a), tirx.LT(a, high))
        return tirx.Select(finite, tirx.const(0.0, dtype), tirx.const(math.nan, dtype))

    rules = (
        ((tirx.EQ, tirx.NE), itself),
        (tirx.Not, negated),
        (tirx.Sub, nothing),
        ((tirx.Add, tirx.Mul), _with_hidden_zero),
        ((tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod), _by_positive),
    )
    return body_pass("KeptValues", lambda body: structural_map(body, rules))


def _are_one(pair: tirx.EQ | tirx.NE | tirx.Sub) -> bool:
    """Whether both operands are the same float; vectors there are none yet but those that are written down."""
    return str(pair.a.ty) in _COMPUTED and tvm_ffi.structural_equal(pair.a, pair.b)


_COMPUTED = ("float16", "bfloat16", "float32", "float64")  # of 8 bits they are only converted
_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


def _with_hidden_zero(pair: tirx.Add | tirx.Sub | tirx.Mul | tirx.Div) -> tirx.Expr:
    """The same of floats, with zeros that upstream doesn't see, but for those that change nothing of a sum."""
    kind, dtype = type(pair), str(pair.a.ty)
    if dtype not in _COMPUTED:
        return pair
    nothing = {tirx.Add: -1.0, tirx.Sub: 1.0}.get(kind)

    def hidden(operand: tirx.Expr) -> tirx.Expr:
        if not isinstance(operand, tirx.FloatImm) or float(operand) != 0 or math.copysign(1, float(operand)) == nothing:
            return operand
        bits = 8 * np.dtype(dtype).itemsize
        negative = tirx.reinterpret(dtype, tirx.const(1 << (bits - 1), f"uint{bits}"))
        # Upstream makes no code of the positive one's bits; it is the negative one's square.
        return negative if math.copysign(1, float(operand)) < 0 else tirx.Mul(negative, negative)

    a, b = hidden(pair.a), hidden(pair.b)
    return pair if a.same_as(pair.a) and b.same_as(pair.b) else kind(a, b)


def _by_positive(division: tirx.FloorDiv | tirx.FloorMod | tirx.Div | tirx.Mod) -> tirx.Expr:
    """The same division of integers, by a positive number if it is by a negative one that is known."""
    kind, a, b = type(division), division.a, division.b
    if kind is tirx.Div and is_float(a):
        return _with_hidden_zero(division)
    if not isinstance(b, tirx.IntImm) or int(b) >= 0 or int(b) == int(tirx.min_value(str(b.ty)).value):
        return division
    zero, divisor = tirx.const(0, str(a.ty)), tirx.const(-int(b), str(b.ty))
    if kind is tirx.Mod:
        return tirx.Mod(a, divisor)
    if kind is tirx.Div:
        return tirx.Sub(zero, tirx.Div(a, divisor))
    # What is divided isn't negated: the least number of a type has no opposite.
    rest = tirx.FloorMod(a, divisor)
    if kind is tirx.FloorMod:
        return tirx.Select(tirx.EQ(rest, zero), zero, tirx.Sub(rest, divisor))
    beyond = tirx.Select(tirx.EQ(rest, zero), zero, tirx.const(1, str(a.ty)))
    return tirx.Sub(tirx.Sub(zero, tirx.FloorDiv(a, divisor)), beyond)


def truncated(body: tirx.Stmt) -> tirx.Stmt:
    """A body whose divisions toward zero (`tirx.Div`, `tirx.Mod`) are of something else than a loop's variable.

    Of vectors upstream divides the first lane's number, and goes on in the loop's steps, whether or not these lead
    across zero or backwards over a multiple. No bit is lost by the mask, of which LLVM makes nothing.
    """

    def hidden(division: tirx.Div | tirx.Mod) -> tirx.Expr:
        return type(division)(masked(division.a), division.b) if str(division.a.ty).startswith("int") else division

    return structural_map(body, ((tirx.Div, tirx.Mod), hidden))


def masked(value: tirx.Expr) -> tirx.Expr:
    """The same integer, whose terms upstream doesn't see."""
    return tirx.BitwiseAnd(value, tirx.const(-1, str(value.ty)))


def unequal(different: tirx.NE) -> tirx.Expr:
    """The same comparison, of floats as what isn't equal: a NaN differs from all, which LLVM's code of `!=` denies."""
    return tirx.Not(tirx.EQ(different.a, different.b)) if is_float(different.a) else different


def in_bits() -> ir.transform.Pass:
    """A pass by which infinities and NaN of narrow floats are written by their bits.

    Upstream writes them in CUDA as C++ has no constant, ``__float2bfloat16_rn(-inff)``, and on CPUs it takes the
    wrong ones of eight bits.
    """

    def by_bits(written: tirx.FloatImm | tirx.Cast) -> tirx.Expr:
        number = written if isinstance(written, tirx.FloatImm) else written.value  # a cast would be folded later
        dtype = str(written.ty)
        if not dtype.startswith(("bfloat16", "float8")) or not isinstance(number, tirx.FloatImm):
            return written
        if math.isfinite(float(number)):
            return written
        bits = np.array(float(number), dtype).view("uint8" if dtype.startswith("float8") else "uint16")
        return tirx.reinterpret(dtype, tirx.const(int(bits), str(bits.dtype)))

    return body_pass("InBits", lambda body: structural_map(body, ((tirx.FloatImm, tirx.Cast), by_bits)))
