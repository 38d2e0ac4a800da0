"""exp of a vector of float32 on a CPU, as vector arithmetic.

LLVM has no vector exp without a vector library: it calls libm's once for every lane, which makes a softmax six times
as slow as it need be. What is compiled with ``tir_pipeline=PIPELINE`` has this one instead; exp of a single float32,
and of any other type, stays libm's.

    exp(x) = 2**n * exp(r),   n = round(x / ln 2),   r = x - n ln 2,   |r| <= ln 2 / 2

The polynomial is the minimax one for the relative error (3e-9), so that float32's rounding is what is left: at most
1 unit in the last place over the whole range, denormal results, infinities and NaN included.
"""

from __future__ import annotations

from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.machines.small_floats import exact_casts

__all__ = ["PIPELINE", "vector_exp"]

PIPELINE = "axe"
"""Upstream's pipeline for scheduled functions, with vector math on a CPU: what all of ours are compiled by."""

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the high part has 9 bits, so that n times it is exact
_LOWEST, _HIGHEST = -105.0, 90.0  # below and above, a float32's exp is 0 and infinite
# (exp(r) - 1 - r) / r**2, the highest power first
_POLYNOMIAL = (0.0013814467238262296, 0.008368780836462975, 0.04166839271783829, 0.1666651964187622, 0.4999999403953552)


def vector_exp(x: tirx.Expr) -> tirx.Expr:
    """exp of a float32 or a vector of them, by additions, multiplications and shifts alone."""
    dtype = str(x.ty)
    integers = dtype.replace("float", "int")
    inside = tirx.max(tirx.min(x, _splat(_HIGHEST, dtype)), _splat(_LOWEST, dtype))
    n = tirx.floor(inside * _splat(_LOG2_E, dtype) + _splat(0.5, dtype))
    r = inside - n * _splat(_LN2_HIGH, dtype) - n * _splat(_LN2_LOW, dtype)
    exp_r = _splat(1.0, dtype) + r + r * r * _horner(r, dtype)
    # 2**n is no float32 where exp overflows or is denormal; its two halves are.
    whole = tirx.Cast(integers, n)
    half = tirx.shift_right(whole, _splat(1, integers))
    result = exp_r * _power_of_two(half, dtype) * _power_of_two(whole - half, dtype)
    return tirx.Select(tirx.isnan(x), x, result)


def _horner(r: tirx.Expr, dtype: str) -> tirx.Expr:
    value = _splat(_POLYNOMIAL[0], dtype)
    for coefficient in _POLYNOMIAL[1:]:
        value = value * r + _splat(coefficient, dtype)
    return value


def _power_of_two(exponent: tirx.Expr, dtype: str) -> tirx.Expr:
    integers = str(exponent.ty)
    return tirx.reinterpret(dtype, tirx.shift_left(exponent + _splat(127, integers), _splat(23, integers)))


def _splat(value: float, dtype: str) -> tirx.Expr:
    element, _, lanes = dtype.partition("x")
    constant = tirx.const(value, element)
    return tirx.Broadcast(constant, int(lanes)) if lanes else constant


@tirx.transform.prim_func_pass(opt_level=0)
def _use_vector_exp(func: tirx.PrimFunc, _mod: ir.IRModule, _context: ir.transform.PassContext) -> tirx.PrimFunc:
    """Write out what calls LLVM's exp on vectors: exp itself, and what upstream makes of tanh, sigmoid and the like."""

    def written_out(call: ir.Call) -> tirx.Expr:
        is_exp = call.op.same_as(_LLVM_EXP.op) and call.args[0].value == _LLVM_EXP.args[0].value
        return vector_exp(call.args[-1]) if is_exp and str(call.ty).startswith("float32x") else call

    return func.with_body(_tvm.structural_map(func.body, (ir.Call, written_out)))


_LLVM_EXP = tirx.call_llvm_pure_intrin("float32", "llvm.exp", tirx.const(0.0, "float32"))
_tvm.register_pipeline(PIPELINE, "s_tir", exact_casts, _use_vector_exp)
