"""Maxima and minima of floats along dimensions, which begin from an infinity.

Upstream's begin from the least or largest finite number, which is what they give of infinities alone, where numpy,
PyTorch and ONNX give that infinity. Upstream's `rfactor`, and its reductions over a GPU's threads, take apart those
that begin as a reducer that is registered does; ours are registered when this module is imported.

Softmax isn't changed, which upstream makes a function with a maximum of its own: its records stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import relax, te, tirx

__all__ = ["extreme"]

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
    name = operator.__name__.lower()
    reducer = te.comm_reducer(
        lambda some, other: operator(some, other), lambda dtype: tirx.const(_BEGINNINGS[operator], dtype), name
    )

    def legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        (given,) = call.args
        if str(given.ty.dtype) not in _INFINITE or not isinstance(given.ty.shape, relax.ShapeExpr):
            return otherwise(builder, call)
        rank = len(given.ty.shape.values)
        axes = range(rank) if call.attrs.axis is None else sorted({int(axis) % rank for axis in call.attrs.axis})
        return builder.call_te(reduced, given, [*axes], bool(call.attrs.keepdims), primfunc_name_hint=name)

    def reduced(given: te.Tensor, axes: Sequence[int], keepdims: bool) -> te.Tensor:
        along = {axis: te.reduce_axis((0, given.shape[axis]), f"k{axis}") for axis in axes}
        extents = [
            1 if dim in along else extent for dim, extent in enumerate(given.shape) if keepdims or dim not in along
        ]

        def at(*indices: tirx.Expr) -> tirx.Expr:
            left = iter(indices)
            read = []
            for dim in range(len(given.shape)):
                if dim not in along or keepdims:
                    index = next(left)
                read.append(along[dim].var if dim in along else index)
            return reducer(given(*read), axis=[*along.values()])

        return te.compute(extents, at, name=f"{given.op.name}_red") if along else given

    return legalized


def _register(operator: type[tirx.Max] | type[tirx.Min]) -> None:
    def joined(some: Sequence[tirx.Var], other: Sequence[tirx.Var]) -> list[tirx.Expr]:
        return [operator(some[0], other[0])]

    def begun(values: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        dtype = str(values[0].ty.dtype)  # of any reduction that has none of upstream's reducers
        finite = tirx.min_value if operator is tirx.Max else tirx.max_value
        return [tirx.const(_BEGINNINGS[operator], dtype) if dtype in _INFINITE else finite(dtype)]

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
