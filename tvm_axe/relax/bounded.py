"""Bounds of sizes that memory is planned by: none whose tensors no call will have.

Upstream takes memory for the bounds that a model says of its sizes (``tir_var_upper_bound``, of ``torch.export`` the
``max`` of a ``Dim``) when a function is called the first time, whatever it is called with. Of a batch or a sequence
that is what calls come near. Of two sides of a picture of at most 4096 each, a tensor at the bounds has 16 million
pixels for each channel, and scores of attention between them are more than any machine has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tvm import relax, tirx
from tvm.ir import IRModule

from tvm_axe.analysis.expressions import variables_of
from tvm_axe.analysis.sizes import number
from tvm_axe.layout.dtypes import dtype_bits

__all__ = ["MOST_PLANNED", "without_large_bounds"]

MOST_PLANNED = 1 << 32
"""Bytes of a tensor at the bounds of its sizes, above which memory is taken by what a call has."""

_BOUND = "tir_var_upper_bound"


def without_large_bounds(model: IRModule) -> IRModule:
    """The model, its functions without bounds at which a tensor would have more than `MOST_PLANNED` bytes."""
    found = {
        variable: func.without_attr(_BOUND)
        for variable, func in model.functions_items()
        if isinstance(func, relax.Function) and _BOUND in (func.attrs or {}) and _is_large(func)
    }
    if not found:
        return model
    model = model.clone()
    for variable, func in found.items():
        model.update_func(variable, func)
    return model


def _is_large(func: relax.Function) -> bool:
    most = {str(name): int(bound) for name, bound in func.attrs[_BOUND].items()}
    kinds = [binding.var.ty for block in func.body.blocks for binding in block.bindings]
    while kinds:
        kind = kinds.pop()
        if isinstance(kind, relax.TupleType):
            kinds.extend(kind.fields)
        elif isinstance(kind, relax.TensorType) and isinstance(kind.shape, relax.ShapeExpr):
            elements = _elements(kind.shape.values, most)
            if elements is not None and elements * dtype_bits(str(kind.dtype)) > 8 * MOST_PLANNED:
                return True
    return False


def _elements(extents: Sequence[tirx.Expr], most: Mapping[str, int]) -> int | None:
    """How many elements there are at the bounds; None without one of each size, as memory isn't planned then."""
    sizes = {var: most.get(str(var.name)) for extent in extents for var in variables_of(extent)}
    if not sizes or None in sizes.values():
        return None
    found = [number(extent, {var: int(size) for var, size in sizes.items() if size is not None}) for extent in extents]
    return None if None in found else math.prod(extent for extent in found if extent is not None)
