"""Operands that PyTorch has proved to be of one shape, where Relax can't follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import ir, relax, tirx
from tvm.sym import Analyzer

from tvm_axe._tvm.torch_sizes import shape_said

__all__ = ["in_one_shape"]


def in_one_shape(node: Any, operands: Mapping[Any, Any], importer: Any) -> dict[Any, relax.Expr]:
    """The operands of what is pointwise whose extents aren't equal as far as Relax knows, said to be what PyTorch says.

    Of windows of a picture that was padded, rows are ``x // (x // 4)``, and what is added has 4 of them. Without a
    shape of the result upstream makes no kernel. That the extents are these is compared when the model is called.
    """
    shapes: dict[Any, list[Any]] = {}
    for each, value in operands.items():
        ty = getattr(value, "ty", None)
        if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
            shapes[each] = [*ty.shape.values]
    if len(shapes) < 2 or all(isinstance(extent, tirx.IntImm) for shape in shapes.values() for extent in shape):
        return {}
    analyzer, rank = Analyzer(), max(len(shape) for shape in shapes.values())
    apart = set()
    for at in range(-rank, 0):
        extents = [shape[at] for shape in shapes.values() if -at <= len(shape) and not _is_one(shape[at])]
        if any(not _are_equal(analyzer, extents[0], each) for each in extents[1:]):
            apart.add(at)
    said = shape_said(node, importer) if apart else []
    if len(said) != rank or any(said[at] is None for at in apart):
        return {}
    claimed = {}
    for each, shape in shapes.items():
        places = range(-len(shape), 0)
        own = [said[at] if at in apart and not _is_one(shape[at]) else shape[at] for at in places]
        if any(at in apart for at in places):
            kind = relax.TensorType(own, operands[each].ty.dtype)
            claimed[each] = importer.block_builder.match_cast(operands[each], kind)
    return claimed


def _is_one(extent: tirx.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _are_equal(analyzer: Analyzer, some: tirx.Expr, other: tirx.Expr) -> bool:
    if isinstance(some, tirx.IntImm) and isinstance(other, tirx.IntImm):
        return int(some) == int(other)
    return ir.prim.expr_deep_equal(some, other) or bool(analyzer.can_prove_equal(some, other))
