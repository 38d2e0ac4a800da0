"""Maxima and minima of floats along dimensions, which begin from an infinity, and their places.

Upstream's begin from the least or largest finite number, which is what they give of infinities alone, where numpy,
PyTorch and ONNX give that infinity. Upstream's `rfactor`, and its reductions over a GPU's threads, take apart those
that begin as a reducer that is registered does; ours are registered when this module is imported.

Softmax isn't changed, which upstream makes a function with a maximum of its own: its records stay what they are.

The place of a largest element is the first that the largest is at, a minimum of places. Upstream's reduces pairs of an
element and its place, which a NaN leaves in no order, and which takes longer along rows, as pairs are joined in no
vectors. Of a NaN the place is the first that has one, as of numpy and PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import relax, te, tirx

__all__ = ["extreme", "place_of_extreme"]

_INFINITE = ("float16", "float32", "float64")  # a bfloat16's beginning upstream rounds to an infinity
_BEGINNINGS = {tirx.Max: -float("inf"), tirx.Min: float("inf")}

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def extreme(operator: type[tirx.Max] | type[tirx.Min], otherwise: Legalize) -> Legalize:
    """What makes ``relax.max`` or ``relax.min`` a function.

    Parameters
    ----------
    operator
        ``tirx.Max`` or ``tirx.Min``.
    otherwise
        What makes those functions that are of another type.
    """
    hint = operator.__name__.lower()

    def legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        (given,) = call.args
        if str(given.ty.dtype) not in _INFINITE or not isinstance(given.ty.shape, relax.ShapeExpr):
            return otherwise(builder, call)
        axes = _axes(given, call.attrs.axis)
        return builder.call_te(reduced, given, axes, bool(call.attrs.keepdims), primfunc_name_hint=hint)

    def reduced(given: te.Tensor, axes: Sequence[int], keepdims: bool) -> te.Tensor:
        if not axes:
            return given
        return _reduced(
            _reducer(operator), given.shape, axes, keepdims, lambda at, _: given(*at), f"{given.op.name}_red"
        )

    return legalized


def place_of_extreme(operator: type[tirx.Max] | type[tirx.Min], otherwise: Legalize) -> Legalize:
    """What makes ``relax.argmax`` or ``relax.argmin`` a function; the parameters are those of `extreme`."""

    is_short = tirx.LT if operator is tirx.Max else tirx.GT

    def legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        (given,) = call.args
        dtype, shape = str(given.ty.dtype), given.ty.shape
        if not (dtype in _INFINITE or "int" in dtype) or not isinstance(shape, relax.ShapeExpr) or not shape.values:
            return otherwise(builder, call)
        axes = _axes(given, None if call.attrs.axis is None else [call.attrs.axis])
        hint = str(call.op.name).removeprefix("relax.")
        return builder.call_te(placed, given, axes, bool(call.attrs.keepdims), primfunc_name_hint=hint)

    def placed(given: te.Tensor, axes: Sequence[int], keepdims: bool) -> te.Tensor:
        shape = given.shape
        count = math.prod(shape[axis] for axis in axes)
        kind = "int32" if isinstance(count, int | tirx.IntImm) and int(count) < 1 << 31 else "int64"
        none = tirx.max_value(kind)
        found = _reduced(_reducer(operator), shape, axes, keepdims, lambda at, _: given(*at), "extreme")
        elsewhere = short_of(given, found)

        def place(at: Sequence[tirx.Expr], out: Sequence[tirx.Expr]) -> tirx.Expr:
            flat = tirx.const(0, kind)
            for axis in axes:
                flat = flat * tirx.Cast(kind, shape[axis]) + tirx.Cast(kind, at[axis])
            return elsewhere(given(*at), out, none, flat)

        first = te.comm_reducer(lambda some, other: tirx.Min(some, other), tirx.max_value, "min")
        places = _reduced(first, shape, axes, keepdims, place, "place")
        return te.compute(places.shape, lambda *at: tirx.Cast("int64", places(*at)), name="first")

    def short_of(given: te.Tensor, found: te.Tensor) -> Callable[..., tirx.Expr]:
        """A choice between what is for elements that aren't what was found, and for those that are."""
        dtype = str(given.dtype)
        if dtype not in _INFINITE:
            return lambda value, out, others, here: tirx.Select(is_short(value, found(*out)), others, here)
        # Of a row with a NaN, `bound` is what all numbers but one infinity are short of, and `other` that infinity.
        beyond, none = tirx.const(-_BEGINNINGS[operator], dtype), tirx.const(math.nan, dtype)
        bound = te.compute(
            found.shape, lambda *at: tirx.Select(tirx.isnan(found(*at)), beyond, found(*at)), name="bound"
        )
        other = te.compute(found.shape, lambda *at: tirx.Select(tirx.isnan(found(*at)), beyond, none), name="other")
        return lambda value, out, others, here: tirx.Select(
            is_short(value, bound(*out)), others, tirx.Select(tirx.EQ(value, other(*out)), others, here)
        )

    return legalized


def _axes(given: relax.Expr, axes: Sequence[int] | None) -> list[int]:
    """The axes that are reduced, counted from the first; all if none is named."""
    rank = len(given.ty.shape.values)
    return [*range(rank)] if axes is None else sorted({int(axis) % rank for axis in axes})


def _reducer(operator: type[tirx.Max] | type[tirx.Min]) -> Callable[..., tirx.Expr]:
    return te.comm_reducer(
        lambda some, other: operator(some, other),
        lambda dtype: _begun(operator, dtype),
        operator.__name__.lower(),
    )


def _reduced(
    reducer: Callable[..., tirx.Expr],
    shape: Sequence[tirx.Expr],
    axes: Sequence[int],
    keepdims: bool,
    value: Callable[[Sequence[tirx.Expr], Sequence[tirx.Expr]], tirx.Expr],
    name: str,
) -> te.Tensor:
    """A value of each place, reduced along axes; it is asked for by the place, and by that of the result."""
    along = {axis: te.reduce_axis((0, shape[axis]), f"k{axis}") for axis in axes}
    extents = [1 if dim in along else extent for dim, extent in enumerate(shape) if keepdims or dim not in along]

    def at(*out: tirx.Expr) -> tirx.Expr:
        left = iter(out)
        read = []
        for dim in range(len(shape)):
            if dim not in along or keepdims:
                index = next(left)
            read.append(along[dim].var if dim in along else index)
        return reducer(value(read, out), axis=[*along.values()])

    return te.compute(extents, at, name=name)


def _begun(operator: type[tirx.Max] | type[tirx.Min], dtype: str) -> tirx.Expr:
    if dtype in _INFINITE:
        return tirx.const(_BEGINNINGS[operator], dtype)
    return tirx.min_value(dtype) if operator is tirx.Max else tirx.max_value(dtype)


def _register(operator: type[tirx.Max] | type[tirx.Min]) -> None:
    def joined(some: Sequence[tirx.Var], other: Sequence[tirx.Var]) -> list[tirx.Expr]:
        return [operator(some[0], other[0])]

    def begun(values: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        return [_begun(operator, str(values[0].ty.dtype))]  # of any reduction that has none of upstream's reducers

    # The reducers are freed when the process ends, where a function of Python's no longer can be: the table of global
    # functions, which isn't freed, keeps these.
    kept = []
    for function in (joined, begun):
        name = f"tvm_axe.{operator.__name__}.{function.__name__}"
        tvm_ffi.register_global_func(name, function, override=True)
        kept.append(tvm_ffi.get_global_func(name))
    tvm_ffi.get_global_func("s_tir.schedule.RegisterReducer")(1, *kept)


for _operator in _BEGINNINGS:
    _register(_operator)
