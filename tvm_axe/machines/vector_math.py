"""exp, erf and tanh of float32 on a CPU, as vector arithmetic.

LLVM has no vector exp without a vector library: it calls libm's once for every lane, which makes a softmax six times
as slow as it need be. What is compiled with ``tir_pipeline=PIPELINE`` has this one instead; exp of a single float32,
and of any other type, stays libm's.

    exp(x) = 2**n * exp(r),   n = round(x / ln 2),   r = x - n ln 2,   |r| <= ln 2 / 2

The polynomial is the minimax one for the relative error (3e-9), so that float32's rounding is what is left: at most
1 unit in the last place over the whole range, denormal results, infinities and NaN included.

erf is written out before loops are vectorised: upstream takes a loop with it apart into single numbers. Up to 0.93 it
is a polynomial, beyond that one minus exp of another, as N. Juffa has it (https://stackoverflow.com/questions/35148198);
both are the minimax ones for the relative error of the result (1.7e-8 and 7e-10), which is right to 2 units in the last
place. So is tanh, a polynomial of that kind up to 0.625 (4e-9); upstream has quotients of exp there, which lose all
digits near 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.machines.allocation import allocated_as_declared
from tvm_axe.machines.emptiness import nothing_to_store
from tvm_axe.machines.maxima import keep_nan
from tvm_axe.machines.narrowing import narrow_loops
from tvm_axe.machines.partitions import whole_loops
from tvm_axe.machines.small_floats import constant_stores, exact_casts

__all__ = ["PIPELINE", "float_erf", "float_tanh", "vector_exp"]

PIPELINE = "axe"
"""Upstream's pipeline for scheduled functions, with vector math on a CPU: what all of ours are compiled by."""

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the high part has 9 bits, so that n times it is exact
_LOWEST, _HIGHEST = -105.0, 90.0  # below and above, a float32's exp is 0 and infinite
# (exp(r) - 1 - r) / r**2, the highest power first
_POLYNOMIAL = (0.0013814467238262296, 0.008368780836462975, 0.04166839271783829, 0.1666651964187622, 0.4999999403953552)
# erf(x) / x - 1 by x**2 below _ERF_SMALL; log(1 - erf(x)) / x + 1 by x above, where from _ERF_ONE on erf is 1
_ERF_SMALL, _ERF_ONE = 0.927734375, 4.0
_ERF_NEAR = (-5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
_ERF_FAR = (
    -1.72853470e-5,
    3.83197126e-4,
    -3.88396438e-3,
    2.42546219e-2,
    -1.06777877e-1,
    -6.34846687e-1,
    -1.28717512e-1,
)
# (tanh(x) / x - 1) / x**2 by x**2 below _TANH_SMALL; from _TANH_ONE on tanh is 1
_TANH_SMALL, _TANH_ONE = 0.625, 10.0
_TANH_NEAR = (-5.704988e-3, 2.0639088e-2, -5.3739715e-2, 1.3331442e-1, -3.333328e-1)


def vector_exp(x: tirx.Expr) -> tirx.Expr:
    """exp of a float32 or a vector of them, by additions, multiplications and shifts alone."""
    dtype = str(x.ty)
    integers = dtype.replace("float", "int")
    n, exp_r = _reduced(tirx.max(tirx.min(x, _splat(_HIGHEST, dtype)), _splat(_LOWEST, dtype)))
    # 2**n is no float32 where exp overflows or is denormal; its two halves are.
    whole = tirx.Cast(integers, n)
    half = tirx.shift_right(whole, _splat(1, integers))
    result = exp_r * _power_of_two(half, dtype) * _power_of_two(whole - half, dtype)
    return tirx.Select(tirx.isnan(x), x, result)


def _small_exp(x: tirx.Expr) -> tirx.Expr:
    """exp of a number between -80 and 80, whose result is a normal one."""
    n, exp_r = _reduced(x)
    return exp_r * _power_of_two(tirx.Cast(str(x.ty).replace("float", "int"), n), str(x.ty))


def _reduced(x: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """The n and the exp(r) of an exp."""
    dtype = str(x.ty)
    n = tirx.floor(x * _splat(_LOG2_E, dtype) + _splat(0.5, dtype))
    r = x - n * _splat(_LN2_HIGH, dtype) - n * _splat(_LN2_LOW, dtype)
    return n, _splat(1.0, dtype) + r + r * r * _horner(_POLYNOMIAL, r, dtype)


def float_erf(x: tirx.Expr) -> tirx.Expr:
    """erf of a float32 by arithmetic and exp, which vectors may go through."""
    dtype = str(x.ty)
    size = tirx.min(tirx.abs(x), _splat(_ERF_ONE, dtype))
    near = x + x * _horner(_ERF_NEAR, x * x, dtype)
    far = _splat(1.0, dtype) - _small_exp(size * _horner(_ERF_FAR, size, dtype) - size)
    return _joined(x, near, far, _ERF_SMALL, dtype)


def float_tanh(x: tirx.Expr) -> tirx.Expr:
    """tanh of a float32 by arithmetic and exp, which vectors may go through."""
    dtype = str(x.ty)
    size = tirx.min(tirx.abs(x), _splat(_TANH_ONE, dtype))
    near = x + x * (x * x) * _horner(_TANH_NEAR, x * x, dtype)
    far = _splat(1.0, dtype) - _splat(2.0, dtype) / (_small_exp(size + size) + _splat(1.0, dtype))
    return _joined(x, near, far, _TANH_SMALL, dtype)


def _joined(x: tirx.Expr, near: tirx.Expr, far: tirx.Expr, limit: float, dtype: str) -> tirx.Expr:
    """An odd function that is `near` up to the limit, and `far` for positive numbers above it."""
    signed = tirx.Select(x < _splat(0.0, dtype), _splat(0.0, dtype) - far, far)
    # The comparison is false of NaN, which `near` passes on; infinities that it multiplies aren't selected.
    return tirx.Select(tirx.abs(x) > _splat(limit, dtype), signed, near)


def _horner(coefficients: Sequence[float], r: tirx.Expr, dtype: str) -> tirx.Expr:
    value = _splat(coefficients[0], dtype)
    for coefficient in coefficients[1:]:
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


@tirx.transform.prim_func_pass(opt_level=0)
def _use_arithmetic(func: tirx.PrimFunc, _mod: ir.IRModule, _context: ir.transform.PassContext) -> tirx.PrimFunc:
    """Write out erf and tanh, which would keep loops from being vectorised, or lose digits."""

    def written_out(call: ir.Call) -> tirx.Expr:
        made = next((make for op, make in _WRITTEN_OUT if call.op.same_as(op)), None)
        return made(call.args[0]) if made is not None and str(call.ty) == "float32" else call

    return func.with_body(_tvm.structural_map(func.body, (ir.Call, written_out)))


_NUMBER = tirx.Var("x", "float32")
_WRITTEN_OUT = ((tirx.erf(_NUMBER).op, float_erf), (tirx.tanh(_NUMBER).op, float_tanh))
_LLVM_EXP = tirx.call_llvm_pure_intrin("float32", "llvm.exp", tirx.const(0.0, "float32"))
_FIRST = ir.transform.Sequential(
    [allocated_as_declared, nothing_to_store, narrow_loops, whole_loops, constant_stores, exact_casts, _use_arithmetic]
)
# exp has bounds of its own, which no NaN passes: it tests for one.
_LAST = ir.transform.Sequential([keep_nan, _use_vector_exp])
_tvm.register_pipeline(PIPELINE, "s_tir", _FIRST, _LAST)
