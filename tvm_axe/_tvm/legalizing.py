"""Relax: operators that aren't made functions as upstream makes them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import tvm_ffi
from tvm import ir, relax, te, tirx, topi
from tvm.relax.transform.legalize_ops.common import _try_convert_to_scalar_const

from tvm_axe._tvm.extremes import extreme, place_of_extreme
from tvm_axe._tvm.structural import structural_map

_WIDE = "float32"
_TRUTH_VALUES = {
    "add": topi.logical_or, "maximum": topi.logical_or, "multiply": topi.logical_and, "minimum": topi.logical_and,
}  # fmt: skip
_WITH_ZERO = {
    "add": topi.add, "divide": topi.divide, "multiply": topi.multiply, "subtract": topi.subtract,
}  # fmt: skip
_COMPARED = {
    "equal": topi.equal, "not_equal": topi.not_equal, "less": topi.less, "less_equal": topi.less_equal,
    "greater": topi.greater, "greater_equal": topi.greater_equal,
}  # fmt: skip


def legalize_ops() -> ir.transform.Pass:
    """Upstream's `LegalizeOps`, with functions of ours for operators of which upstream's fail or overflow.

    Its `topi.full` asks a type whether it has "float" in it, as if it were text, and fails where an array is filled
    with an infinity, as causal masks are. Of `log_add_exp` it adds the exponentials, which are infinite above 88. For
    the sinh and cosh of vectors it has no code on a CPU, and none for truth values that are added, multiplied or
    compared, as masks are. A product by zero it takes for zero, of infinities too, and so a quotient of zero; the
    remainders of its divisions of floats have the other sign where the quotient is rounded, and none where the divisor
    is infinite.
    Its `take` reads what is in front of a tensor at negative places, as importers have ``x[:, -1]``; of constants ours
    doesn't. Powers it has of floats alone. Its maxima and minima begin from a finite number, and their places are of
    no order where there is a NaN (`extremes`).

    Equal calls, as a recurrence that is unrolled has them at each step, are made a function once.
    """
    pointwise: dict[str, Callable[..., tirx.Expr]] = {
        "relax.log_add_exp": _log_add_exp,
        "relax.sinh": _sinh,
        "relax.cosh": _cosh,
    }
    divided = {"relax.floor_divide": _floor_divide, "relax.floor_mod": _floor_mod}
    written = {name: _legalizing(name.removeprefix("relax."), formula) for name, formula in pointwise.items()}
    masks = {f"relax.{name}": _of_truth_values(function) for name, function in _TRUTH_VALUES.items()}
    masks |= {f"relax.{name}": _of_truth_values(_as_numbers(function)) for name, function in _COMPARED.items()}
    ours = {
        "relax.take": _take,
        "relax.full": _full,
        "relax.full_like": _full,
        "relax.power": _power,
        "relax.max": extreme(tirx.Max, _by_upstream),
        "relax.min": extreme(tirx.Min, _by_upstream),
        **{f"relax.nn.max_pool{dims}d": _max_pool for dims in (1, 2, 3)},
        "relax.argmax": place_of_extreme(tirx.Max, _by_upstream),
        "relax.argmin": place_of_extreme(tirx.Min, _by_upstream),
        **written,
        **masks,
    }
    for name, formula in divided.items():
        ours[name] = _of_floats(_legalizing(name.removeprefix("relax."), formula))
    for name, function in _WITH_ZERO.items():
        ours[f"relax.{name}"] = _with_zero(function, ours.get(f"relax.{name}", _by_upstream))
    once = _Once()
    return relax.transform.LegalizeOps(
        {name: once.of(ours.get(name, _by_upstream)) for name in {**_legalized(), **ours}}
    )


_Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


@functools.cache
def _legalized() -> dict[str, None]:
    """The operators that upstream makes functions."""
    names = [str(name) for name in ir.Op.list_op_names() if str(name).startswith("relax.")]
    return {name: None for name in names if ir.Op.get(name).get_attr("FLegalize") is not None}


def _by_upstream(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return call.op.get_attr("FLegalize")(builder, call)


def _max_pool(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Upstream's maximum of windows, begun from infinity, which is also what is around an image."""
    made = _by_upstream(builder, call)
    least = float(tirx.min_value(str(call.ty.dtype)).value)

    def begun(number: tirx.FloatImm) -> tirx.FloatImm:
        return tirx.const(-math.inf, str(number.ty)) if number.value == least else number

    variable = made.args[0]
    builder.update_func(variable, structural_map(builder.get()[variable], (tirx.FloatImm, begun)))
    return made


class _Once:
    """What makes operators functions, of equal calls on variables one: making it again is what takes most of the time.

    Upstream's builder would find it equal. Constants may become part of a function, so their calls are each made one.
    """

    def __init__(self) -> None:
        self._builder: relax.BlockBuilder | None = None
        self._known: dict[int, list[tuple[ir.Array, relax.Call]]] = {}

    def of(self, function: _Legalize) -> _Legalize:
        def legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
            if self._builder is None or not self._builder.same_as(builder):
                self._builder, self._known = builder, {}  # functions are of another module
            flat = [each for arg in call.args for each in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
            if not all(isinstance(each, relax.Var) and isinstance(each.ty, relax.TensorType) for each in flat):
                return function(builder, call)
            of = ir.Array([call.op, call.attrs, call.ty, *(arg.ty for arg in call.args)])
            same = self._known.setdefault(tvm_ffi.structural_hash(of), [])
            for other, made in same:
                if tvm_ffi.structural_equal(other, of):
                    return relax.Call(made.op, [made.args[0], relax.Tuple(flat)], made.attrs, made.ty_args)
            made = function(builder, call)
            if _is_of(made, flat):
                same.append((of, made))
            return made

        return legalized


def _is_of(made: relax.Expr, tensors: list[relax.Expr]) -> bool:
    """Whether an expression calls a function of TensorIR on these tensors and nothing else."""
    if not isinstance(made, relax.Call) or not made.op.same_as(ir.Op.get("relax.call_tir")) or len(made.args) != 2:
        return False
    given = list(made.args[1].fields)
    return len(given) == len(tensors) and all(one.same_as(other) for one, other in zip(given, tensors))


def _full(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    value, shape = _try_convert_to_scalar_const(call.args[1], python_native=True), call.ty.shape
    if not isinstance(value, float) or math.isfinite(value) or not isinstance(shape, relax.ShapeExpr):
        return _by_upstream(builder, call)
    return builder.call_te(topi.full, shape.values, str(call.ty.dtype), value, primfunc_name_hint="full")


def _take(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, indices = call.args
    axis, places = call.attrs.axis, indices.value.numpy() if isinstance(indices, ir.GenericConst) else None
    if places is None or not (places < 0).any() or not isinstance(data.ty.shape, relax.ShapeExpr):
        return _by_upstream(builder, call)

    def taken(source: te.Tensor, given: te.Tensor) -> te.Tensor:
        extent = math.prod(source.shape) if axis is None else source.shape[int(axis)]

        def behind(*at: tirx.Expr) -> tirx.Expr:
            place = given(*at)
            return tirx.Select(place < 0, place + tirx.Cast(place.ty.dtype, extent), place)

        return topi.take(source, te.compute(given.shape, behind, "place"), axis, mode=str(call.attrs.mode))

    return builder.call_te(taken, data, indices, primfunc_name_hint="take")


def _of_truth_values(function: Callable[..., te.Tensor]) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """What makes an operator a function: of truth values this one, as PyTorch has it, and else upstream's."""

    def legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        of_truth_values = all(str(operand.ty.dtype) == "bool" for operand in call.args)
        if not of_truth_values or not isinstance(call.ty.shape, relax.ShapeExpr):
            return _by_upstream(builder, call)
        return builder.call_te(function, *call.args)

    return legalized


def _with_zero(function: Callable[..., te.Tensor], otherwise: _Legalize) -> _Legalize:
    """What makes an operator of floats a function: with a zero that is known as a tensor.

    Of a number upstream writes down what it takes for the result, whatever the other operand: zero for a product, and
    for a quotient of zero, that operand for a sum, whose sign is lost. By zero it refuses to divide.
    """

    def is_zero(operand: relax.Expr) -> bool:
        if not isinstance(operand, ir.GenericConst):
            return False
        value = operand.value.numpy()
        return value.size == 1 and not value.any()

    def legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        is_float = "float" in str(call.ty.dtype) and isinstance(call.ty.shape, relax.ShapeExpr)
        if not is_float or sum(map(is_zero, call.args)) != 1:
            return otherwise(builder, call)
        return builder.call_te(function, *call.args, primfunc_name_hint=str(call.op.name).removeprefix("relax."))

    return legalized


def _of_floats(legalize: _Legalize) -> _Legalize:
    """What makes an operator a function: of floats this, and else upstream's."""

    def legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return (legalize if "float" in str(call.ty.dtype) else _by_upstream)(builder, call)

    return legalized


def _power(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Powers, of integers by squares: what is more than the type holds wraps around, and 1 / 2 is 0, as in PyTorch."""
    dtype, shape = str(call.ty.dtype), call.ty.shape
    if "int" not in dtype or not isinstance(shape, relax.ShapeExpr):
        return _by_upstream(builder, call)
    one, zero = tirx.const(1, dtype), tirx.const(0, dtype)

    def computed(base: te.Tensor, exponent: te.Tensor) -> te.Tensor:
        def at(*indices: tirx.Expr) -> tirx.Expr:
            square, times = base(*_broadcast(base, indices)), exponent(*_broadcast(exponent, indices))
            odd = times & one
            # Beyond 127 what is even is zero, and 1 and -1 go by the last bit.
            some = tirx.Min(times, tirx.const(126, dtype) + odd)
            value, of_negative = one, square
            for bit in range(7):
                value = value * tirx.Select(((some >> tirx.const(bit, dtype)) & one) > zero, square, one)
                square = square * square
            if dtype.startswith("u"):
                return value
            inverse = tirx.Select(of_negative == one, one, tirx.Select(odd > zero, of_negative, one))
            is_unit = tirx.Or(of_negative == one, of_negative == tirx.const(-1, dtype))
            return tirx.Select(times < zero, tirx.Select(is_unit, inverse, zero), value)

        return te.compute(shape.values, at, name="power")

    return builder.call_te(computed, *call.args, primfunc_name_hint="power")


def _as_numbers(function: Callable[..., te.Tensor]) -> Callable[..., te.Tensor]:
    """A function of truth values as numbers, which upstream compares as if they were floats."""
    return lambda *operands: function(*(topi.cast(operand, "int8") for operand in operands))


def _legalizing(name: str, formula: Callable[..., tirx.Expr]) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """What makes a pointwise operator a function by a formula of its elements, which are at least of 32 bits."""

    def legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        dtype, shape = str(call.ty.dtype), call.ty.shape
        if not isinstance(shape, relax.ShapeExpr):
            return call
        wide = dtype if dtype == "float64" else _WIDE

        def computed(*tensors: te.Tensor) -> te.Tensor:
            def at(*indices: tirx.Expr) -> tirx.Expr:
                elements = [tensor(*_broadcast(tensor, indices)).astype(wide) for tensor in tensors]
                return formula(*elements).astype(dtype)

            return te.compute(shape.values, at, name=name)

        return builder.call_te(computed, *call.args, primfunc_name_hint=name)

    return legalized


def _broadcast(tensor: te.Tensor, indices: tuple[tirx.Expr, ...]) -> list[tirx.Expr]:
    """Where an element of the result is in a tensor that is broadcast to it."""
    behind = indices[len(indices) - len(tensor.shape) :]
    ones = [isinstance(extent, tirx.IntImm) and int(extent) == 1 for extent in tensor.shape]
    return [tirx.const(0, "int64") if one else index for one, index in zip(ones, behind, strict=True)]


def _log_add_exp(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """The larger one, and log(1 + z) of the exponential z of minus their distance.

    For small z, log(1 + z) is kept from rounding to zero by what 1 + z was rounded to (Goldberg, "What Every Computer
    Scientist Should Know About Floating-Point Arithmetic", Theorem 4).
    """
    one = tirx.const(1, a.ty.dtype)
    # Of equal infinities the distance is NaN; of a NaN it is, too, and so is the result.
    z = tirx.Select(tirx.EQ(a, b), one, tirx.exp(-tirx.abs(a - b)))
    total = one + z
    return tirx.Max(a, b) + tirx.Select(tirx.EQ(total, one), z, tirx.log(total) * z / (total - one))


def _floor_mod(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """The remainder, of the divisor's sign, as Python, numpy and PyTorch have it."""
    rest = tirx.Mod(a, b)
    return tirx.Select(_differ(rest, b), rest + b, rest)


def _floor_divide(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """The quotient without the remainder, rounded to a whole number, as Python, numpy and PyTorch have it.

    The quotient itself may be rounded up to a whole number, and of an infinite divisor it is zero.
    """
    zero, half, one = (tirx.const(value, a.ty.dtype) for value in (0, 0.5, 1))
    rest = tirx.Mod(a, b)
    whole = (a - rest) / b
    whole = tirx.Select(_differ(rest, b), whole - one, whole)
    low = tirx.floor(whole)
    found = tirx.Select(whole - low > half, low + one, low)
    found = tirx.Select(tirx.EQ(whole, zero), zero, found)
    return tirx.Select(tirx.Or(tirx.EQ(a, zero), tirx.EQ(b, zero)), a / b, found)


def _differ(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """Whether one number is negative and the other positive."""
    zero = tirx.const(0, a.ty.dtype)
    return tirx.Or(tirx.And(a < zero, b > zero), tirx.And(a > zero, b < zero))


def _sinh(x: tirx.Expr) -> tirx.Expr:
    """By its series near zero, where exponentials would cancel each other."""
    size, one = tirx.abs(x), tirx.const(1, x.ty.dtype)
    root = tirx.exp(size * tirx.const(0.5, x.ty.dtype))
    far = _half_squared(root) - tirx.const(0.5, x.ty.dtype) / (root * root)
    series = one
    for n in range(16, 0, -2):  # down from x ** 17 / 17!, which is less than half of float64's rounding at 1
        series = one + x * x * series * tirx.const(1 / (n * (n + 1)), x.ty.dtype)
    return tirx.Select(size < one, x * series, tirx.Select(x < 0, -far, far))


def _cosh(x: tirx.Expr) -> tirx.Expr:
    root = tirx.exp(tirx.abs(x) * tirx.const(0.5, x.ty.dtype))
    return _half_squared(root) + tirx.const(0.5, x.ty.dtype) / (root * root)


def _half_squared(root: tirx.Expr) -> tirx.Expr:
    """Half of a square, which may be finite where the square isn't."""
    return root * tirx.const(0.5, root.ty.dtype) * root
