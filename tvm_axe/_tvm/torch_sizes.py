"""Sizes of ``torch.export`` that aren't known, as TVM's expressions, and slices by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax import op

from tvm_axe._tvm.quotients import reduced
from tvm_axe.errors import InputError

__all__ = [
    "arguments_of",
    "divided",
    "fractional",
    "power",
    "selected",
    "shape_said",
    "size_computed",
    "size_of",
    "size_said",
    "sliced",
]

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


_EXACT = 1 << 12
"""The largest number of a fraction whose products with any extent are exact in float64."""


def arguments_of(node: Any) -> dict[str, Any]:
    """The arguments of a call in the graph by their names, those left out as the operator's schema has them."""
    given = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    return given | dict(zip(given, node.args)) | node.kwargs


def shape_said(node: Any, importer: Any) -> list[Any]:
    """The extents that PyTorch says a result has, as TVM's expressions; None for one that isn't made of inputs'."""
    sizes = _sizes(node.graph, importer)
    return [
        tirx.const(extent, "int64") if type(extent) is int else _expression(extent.node.expr, sizes)
        for extent in node.meta["val"].shape
    ]


def size_of(extent: tirx.Expr | int) -> relax.Expr:
    """An extent as a tensor without dimensions, of int64."""
    if isinstance(extent, int | tirx.IntImm):
        return relax.const(int(extent), "int64")
    return op.squeeze(op.shape_to_tensor(relax.ShapeExpr([extent])), [0])


def fractional(node: Any, importer: Any) -> relax.Expr:
    """A size as a float (``sym_float``): a tensor without dimensions, of float64."""
    return _as_float(node.args[0], importer)


def divided(node: Any, importer: Any) -> relax.Expr:
    """The quotient of two sizes or floats, a tensor like `fractional`'s."""
    return importer.block_builder.emit(op.divide(*(_as_float(each, importer) for each in node.args)))


def power(node: Any, importer: Any) -> relax.Expr:
    """A power of a size or a float, a tensor like `fractional`'s."""
    return importer.block_builder.emit(op.power(*(_as_float(each, importer) for each in node.args[:2])))


def size_computed(node: Any, importer: Any) -> tirx.Expr:
    """The size that is computed of others, and maybe of fractions that are rounded, as an expression.

    Raises
    ------
    InputError
        It isn't made of inputs' extents, or rounded in a way that isn't known.
    """
    value = node.meta.get("val")
    found = size_said(node, node.graph, importer)
    if found is None:
        said = getattr(getattr(value, "node", None), "expr", value)
        names = ", ".join(sorted(map(str, getattr(said, "free_symbols", ())))) or "a tensor's elements"
        raise InputError(
            f"{node.name}: the size {said} isn't imported, which {node.target.__name__} makes of {names}; round a "
            "product of a size with a number down (int), or export the model with that extent known"
        )
    return found


def size_said(given: Any, graph: Any, importer: Any) -> Any:
    """A size, a number or a node that computes it, as TVM's expression; None if it isn't made of inputs' extents."""
    value = given.meta.get("val") if hasattr(given, "meta") else given
    if type(value) is int:
        return tirx.const(value, "int64")
    return _expression(value.node.expr, _sizes(graph, importer)) if hasattr(value, "node") else None


def _as_float(given: Any, importer: Any) -> relax.Expr:
    value = importer.env.get(given, given) if hasattr(given, "meta") else given
    if isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType):
        return value
    if isinstance(value, float):
        return relax.const(value, "float64")
    return importer.block_builder.emit(op.astype(size_of(value), "float64"))


def sliced(otherwise: Callable[[Any, Any], Any], node: Any, importer: Any) -> Any:
    """A slice of as many elements as PyTorch says.

    It knows the bounds of sizes, so that ``mask[:, :T]`` of a buffer has `T` columns; upstream's importer gives the
    lesser of `T` and the buffer's columns, which is equal to nothing that it is computed with. Slices of known sizes
    are made by `otherwise`.
    """
    given = arguments_of(node)
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


def selected(otherwise: Callable[[Any, Any], Any], node: Any, importer: Any) -> Any:
    """What stands at an index along a dimension (``select.int``), which may be made of sizes, as ``x[:, tokens - 1]``.

    That at a known index is made by `otherwise`.

    Raises
    ------
    InputError
        The index isn't made of inputs' extents, or isn't known to be on one side of zero.
    """
    given = arguments_of(node)
    dim, index, value = given["dim"], given["index"], importer.env[given["self"]]
    if type(index) is int:
        return otherwise(node, importer)
    begin = _begin(index, value.ty.shape[dim], _sizes(node.graph, importer))
    if begin is None:
        said = index.meta["val"].node.expr
        raise InputError(
            f"{node.name}: the index {said} isn't made of inputs' extents, or may be below zero and not; use "
            "index_select, whose index is a tensor"
        )
    emit = importer.block_builder.emit
    return emit(op.squeeze(emit(op.strided_slice(value, [dim], [begin], [begin + 1], assume_inbound=True)), [dim]))


def _begin(start: Any, extent: Any, sizes: Mapping[str, tirx.Var]) -> Any:
    """Where a slice begins, which PyTorch may count from the end; None if that isn't known."""
    if start is None or type(start) is int:
        return start or 0 if start is None or start >= 0 else extent + start
    said = start.meta["val"].node.expr
    found, bounds = _expression(said, sizes), start.meta["val"].node.shape_env.bound_sympy(said)
    if found is None or bounds.lower >= 0:
        return found
    return extent + found if bounds.upper < 0 else None


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
    if type(said).__name__ in ("TruncToInt", "FloorToInt", "CeilToInt"):
        return _rounded(said.args[0], sizes, type(said).__name__ == "CeilToInt")
    combined, parts = _COMBINED.get(type(said).__name__), [_expression(part, sizes) for part in said.args]
    if combined is None or any(part is None for part in parts):
        return None
    return reduced(functools.reduce(combined, parts))


def _rounded(said: Any, sizes: Mapping[str, tirx.Var], up: bool) -> Any:
    """A size times a positive number, as ``1.5 * ToFloat(n)``, or by one, down or up to an integer; None otherwise.

    PyTorch computes them in float64. Where that is exact, or so near that no integer lies between, they are quotients
    of integers. Of others, such as ``0.7 * n``, which is 62.99999999999999 of 90, the same product is rounded.
    """
    if type(said).__name__ == "IntTrueDiv" and said.args[1].is_Integer:
        fraction, size = Fraction(1, int(said.args[1])) if said.args[1] != 0 else Fraction(0), said.args[0]
    elif said.is_Mul and len(said.args) == 2:
        factor, size = sorted(said.args, key=lambda part: not part.is_Number)
        if not factor.is_Number or type(size).__name__ != "ToFloat":
            return None
        fraction, size = Fraction(float(factor)), size.args[0]
    else:
        return None
    found = _expression(size, sizes)
    if found is None or fraction <= 0:
        return None
    if max(fraction.numerator, fraction.denominator) <= _EXACT:
        more = fraction.denominator - 1 if up else 0
        return tirx.floordiv(found * fraction.numerator + more, fraction.denominator)
    product = tirx.Cast("float64", found) * tirx.const(float(fraction), "float64")
    return None if up else tirx.Cast("int64", product)
