"""Sizes of ``torch.export`` that aren't known, as TVM's expressions, and slices by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax import op

__all__ = ["sliced"]

_COMBINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: tirx.floordiv(a, b),
    "Mod": lambda a, b: tirx.floormod(a, b),
    "PythonMod": lambda a, b: tirx.floormod(a, b),
    "Max": lambda a, b: tirx.max(a, b),
    "Min": lambda a, b: tirx.min(a, b),
}
"""What the classes of sympy and of PyTorch's extensions to it are of two numbers."""


def sliced(otherwise: Callable[[Any, Any], Any], node: Any, importer: Any) -> Any:
    """A slice of as many elements as PyTorch says.

    It knows the bounds of sizes, so that ``mask[:, :T]`` of a buffer has `T` columns; upstream's importer gives the
    lesser of `T` and the buffer's columns, which is equal to nothing that it is computed with. Slices of known sizes
    are made by `otherwise`.
    """
    given = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    given |= dict(zip(given, node.args)) | node.kwargs
    dim, step, value = given["dim"], given["step"], importer.env[given["self"]]
    said = node.meta["val"].shape[dim]
    if type(said) is int or type(step) is not int:
        return otherwise(node, importer)
    sizes, extent = _sizes(node.graph, importer), value.ty.shape[dim]
    begin, count = _begin(given["start"], extent, sizes), _expression(said.node.expr, sizes)
    if begin is None or count is None:
        return otherwise(node, importer)
    if isinstance(begin, int) and begin == 0 and step == 1 and ir.prim.expr_deep_equal(extent, count):
        return value
    made = op.strided_slice(value, [dim], [begin], [begin + count * step], [step], assume_inbound=True)
    return importer.block_builder.emit(made)


def _begin(start: Any, extent: Any, sizes: Mapping[str, tirx.Var]) -> Any:
    """Where a slice begins, which PyTorch may count from the end; None if that isn't known."""
    if start is None or type(start) is int:
        return start or 0 if start is None or start >= 0 else extent + start
    said = start.meta["val"].node.expr
    found = _expression(said, sizes)
    if found is None or said.is_nonnegative:
        return found
    return extent + found if said.is_negative else None


def _sizes(graph: Any, importer: Any) -> dict[str, tirx.Var]:
    """TVM's variables of the sizes that the graph's inputs have; their names are PyTorch's."""
    found: list[tirx.Var] = []
    for node in graph.find_nodes(op="placeholder"):
        value = importer.env.get(node)
        shape = value.ty.shape if isinstance(getattr(value, "ty", None), relax.TensorType) else None
        for extent in shape if isinstance(shape, relax.ShapeExpr) else ():
            tvm_ffi.structural_walk(extent, (tirx.Var, found.append))
    return {str(variable.name): variable for variable in found}


def _expression(said: Any, sizes: Mapping[str, tirx.Var]) -> Any:
    """A size of PyTorch's, a number or made of those of inputs, as TVM's expression; None if it is something else."""
    if said.is_Integer:
        return tirx.const(int(said), "int64")
    if said.is_Symbol:
        return sizes.get(str(said))
    combined, parts = _COMBINED.get(type(said).__name__), [_expression(part, sizes) for part in said.args]
    if combined is None or any(part is None for part in parts):
        return None
    return functools.reduce(combined, parts)
