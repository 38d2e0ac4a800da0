"""exp, exp2, tanh, erf, sigmoid and rsqrt of float32 as arithmetic that vectors do.

LLVM has no vector form of them that every CPU's library provides, and would call libm once an element. Each is a
polynomial, fitted to the least relative error over the interval that the argument is reduced to: 2e-9 for 2**x, tanh
and erf, so that what remains is float32's rounding, a few units in the last place. Results below 2**-126 are 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import ir
from tvm.script.ir_builder import tirx as T

# The lowest power first.
_EXP2 = (1.0, 0.693146984, 0.240229836, 0.055483342, 0.00967884094, 0.00124396881, 0.000217022555)  # f in [0, 1)
_TANH = (1.0, -0.333332833, 0.13331689, -0.0537687049, 0.0207536292, -0.00585216861)  # tanh(x) / x of x*x in [0, 0.36]
_ERF = (  # erf(x) / x of x*x in [0, 1]
    1.12837917, -0.376126384, 0.11283782, -0.0268654002, 0.00522094578, -0.000848283323, 0.000112569765, -9.64159082e-6,
)  # fmt: skip
_ERFC = (  # erfc(x) * exp(x*x) of 1 / (1 + x/2), x in [1, 4.2], beyond which exp(-x*x) leaves nothing of it
    -0.000144640949, 0.284769522, 0.260599224, 0.344599146, -0.0969081863, 0.554918835, -0.465468196, 0.117676259,
)  # fmt: skip

_LN2_HIGH = 0.693145751953125  # 15 bits, so that its products with exponents are exact
_LN2_LOW = math.log(2) - _LN2_HIGH


def exp2(x: Any) -> Any:
    """2**x."""
    whole = _exponent(x)
    return _scaled(_polynomial(_EXP2, x - whole), whole, x, -126.0, 128.0)


def exp(x: Any) -> Any:
    """e**x: the exponent of 2 is taken off in two steps, or its rounding would cost digits where x is large."""
    log2e = 1 / math.log(2)
    whole = _exponent(x * _f32(log2e))
    fraction = (x - whole * _f32(_LN2_HIGH) - whole * _f32(_LN2_LOW)) * _f32(log2e)
    return _scaled(_polynomial(_EXP2, fraction), whole, x, -126 * math.log(2), 128 * math.log(2))


def sigmoid(x: Any) -> Any:
    """1 / (1 + e**-x)."""
    return _f32(1) / (_f32(1) + exp(-x))


def tanh(x: Any) -> Any:
    """A polynomial near 0, where 1 - 2 / (e**2x + 1) would cancel."""
    size = T.abs(x)
    near = x * _polynomial(_TANH, x * x)
    far = _f32(1) - _f32(2) / (exp(size + size) + _f32(1))
    return T.Select(size < _f32(0.6), near, T.Select(x < _f32(0), -far, far))


def erf(x: Any) -> Any:
    """A polynomial below 1, from there 1 - erfc."""
    size = T.abs(x)
    near = x * _polynomial(_ERF, x * x)
    far = _f32(1) - exp(-x * x) * _polynomial(_ERFC, _f32(1) / (_f32(1) + size * _f32(0.5)))
    return T.Select(size < _f32(1), near, T.Select(x < _f32(0), -far, far))


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x)."""
    return _f32(1) / T.sqrt(x)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    f"tirx.{function.__name__}": function for function in (exp, exp2, sigmoid, tanh, erf, rsqrt)
}
"""By upstream's name of the call."""


def has_vectors(call: ir.Call) -> bool:
    """Whether what a call computes has a vector form: one of these, one of upstream's, or the bits of its argument."""
    name = str(getattr(call.op, "name", ""))
    return name in FUNCTIONS or name == "tirx.reinterpret" or bool(call.op.get_attr("TVectorizable"))


def _exponent(x: Any) -> Any:
    """The exponent of the result, kept within float32's."""
    return T.floor(T.max(T.min(x, _f32(127.5)), _f32(-126)))


def _scaled(fraction: Any, exponent: Any, x: Any, least: float, most: float) -> Any:
    """``fraction * 2**exponent``, and what is right for an x out of range. NaN comes through in `fraction`."""
    power = T.reinterpret("float32", T.shift_left(T.Cast("int32", exponent) + 127, T.int32(23)))
    inside = T.Select(x < _f32(least), _f32(0), fraction * power)
    return T.Select(x >= _f32(most), _f32(math.inf), inside)


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    *rest, last = coefficients
    return functools.reduce(lambda value, coefficient: value * x + _f32(coefficient), reversed(rest), _f32(last))


def _f32(value: float) -> Any:
    return T.float32(value)
