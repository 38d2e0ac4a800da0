"""Types and shapes of what upstream's importer makes of PyTorch's operators: those that PyTorch says.

``torch.export`` notes the type and the shape of each value. Operands are promoted to the result's type, as PyTorch
does, and what comes out otherwise than it says is cast, or refused (docs/decisions/0108).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tvm import ir, relax, tirx
from tvm.relax import op

from tvm_axe._tvm.quotients import reduced
from tvm_axe._tvm.torch_broadcasting import in_one_shape
from tvm_axe._tvm.torch_sizes import size_of
from tvm_axe.errors import InputError

__all__ = ["as_pytorch_says", "standing_for"]

_OF_TWO = frozenset((
    "add", "div", "eq", "floor_divide", "fmod", "ge", "gt", "le", "lt", "maximum", "minimum", "mul", "ne", "remainder",
    "rsub", "sub",
))  # fmt: skip
"""Operators of a tensor and another, or a number, which may be a size."""
_KEPT = ("condition", "mask")
"""Arguments that stay truth values."""
_ORDERED = frozenset((
    "amax", "amin", "argmax", "argmin", "argsort", "cummax", "cummin", "fmax", "fmin", "isfinite", "isinf", "isnan",
    "kthvalue", "max", "median", "min", "sgn", "sign", "sort", "topk",
))  # fmt: skip
"""Operators that of truth values and small integers are what they are of int32, of which alone there is code."""
_SMALL = ("bool", "int8", "uint8", "int16")
_FAILS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What upstream raises of what it can't convert; its `InternalError` is a `RuntimeError`."""


@contextlib.contextmanager
def standing_for(importer: Any, values: Mapping[Any, relax.Expr]) -> Iterator[None]:
    """Has the importer take these values for nodes of the graph, for as long as one of them is converted."""
    kept = {node: importer.env[node] for node in values}
    importer.env.update(values)
    try:
        yield
    finally:
        importer.env.update(kept)


def as_pytorch_says(convert: Callable[[Any, Any], Any], node: Any, importer: Any) -> Any:
    """What an operator makes, in the type that PyTorch says it has; so are the operands of what is pointwise.

    Raises `InputError`, with the node and the operator, whatever upstream raises.
    """
    said, emit = node.meta.get("val"), importer.block_builder.emit
    if _is_empty(node):
        return _of_nothing(node, importer)
    dtype, other = _dtype(said), {}
    promoted, ordered = _promoted(node), _name(node).partition(".")[0] in _ORDERED
    for each in node.all_input_nodes:
        value = importer.env.get(each)
        if each in promoted and _is_size(value) and _name(node).partition(".")[0] in _OF_TWO:
            other[each] = emit(op.astype(size_of(value), _beside(node, importer) if dtype == "bool" else dtype))
        if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
            continue
        own = str(value.ty.dtype)
        wanted = dtype if dtype not in (None, "bool") and each in promoted else own
        wanted = "int32" if wanted in _SMALL and ordered else wanted
        if wanted != own:
            other[each] = value = emit(op.astype(value, wanted))
        if _is_of_one(each.meta.get("val")) and _goes_along_one(node):
            other[each] = emit(op.reshape(value, (1,)))
    try:
        other |= in_one_shape(node, {each: other.get(each, importer.env.get(each)) for each in promoted}, importer)
        with standing_for(importer, other):
            made = _with_reduced_extents(convert(node, importer), importer)
        is_one = isinstance(made, relax.Expr) and isinstance(made.ty, relax.TensorType)
        return _checked(made, said, dtype, node, importer) if is_one and dtype is not None else made
    except InputError:
        raise
    except _FAILS as error:
        raise InputError(f"{node.name}: {_name(node)} isn't imported of these arguments: {error}") from error


def _with_reduced_extents(made: Any, importer: Any) -> Any:
    """A size, or a tensor whose extents are made of sizes, with as few operations as these need.

    What is made of it is made of its extents, and these are compared: rows of windows that are ``x // (x // 4)`` have
    no sum with what has four.
    """
    if _is_size(made):
        return reduced(made)
    shape = made.ty.shape if isinstance(made, relax.Expr) and isinstance(made.ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        return made
    extents = [reduced(extent) for extent in shape.values]
    if all(extent.same_as(own) for extent, own in zip(extents, shape.values)):
        return made
    return importer.block_builder.emit(op.reshape(made, extents))


def _is_size(value: Any) -> bool:
    """Whether it is a size of an input's, or made of such."""
    return isinstance(value, ir.Expr) and isinstance(value.ty, ir.PrimType)


def _beside(node: Any, importer: Any) -> str:
    """The type that PyTorch compares a tensor with a size in: the tensor's."""
    values = [importer.env.get(each) for each in node.all_input_nodes]
    return next(str(each.ty.dtype) for each in values if isinstance(getattr(each, "ty", None), relax.TensorType))


def _results(node: Any) -> list[Any]:
    """What PyTorch says of an operator's results."""
    said = node.meta.get("val")
    return [*said] if isinstance(said, list | tuple) else [said]


def _is_empty(node: Any) -> bool:
    """Whether an operator makes tensors, and those or all that they are made of have no elements."""
    given, made = [each.meta.get("val") for each in node.all_input_nodes], _results(node)
    if any(_dtype(each) is None or any(type(extent) is not int for extent in each.shape) for each in (*made, *given)):
        return False
    return any(bool(of) and all(math.prod(each.shape) == 0 for each in of) for of in (made, given))


def _of_nothing(node: Any, importer: Any) -> Any:
    """What PyTorch makes of tensors without elements, such as no number for their mean."""
    import torch
    from torch.fx.node import map_arg

    def stored(each: Any) -> Any:
        said = each.meta["val"]
        return torch.zeros(tuple(said.shape), dtype=said.dtype)  # some of integers may be places

    emit, said = importer.block_builder.emit, _results(node)
    if all(math.prod(each.shape) == 0 for each in said):
        made = [emit(op.zeros(tuple(each.shape), _dtype(each))) for each in said]
    else:
        found = node.target(*map_arg(node.args, stored), **map_arg(node.kwargs, stored))
        values = found if isinstance(node.meta["val"], list | tuple) else [found]
        wide = [value.float() if value.dtype is torch.bfloat16 else value for value in values]
        made = [emit(op.astype(relax.const(value.numpy()), _dtype(each))) for value, each in zip(wide, said)]
    return made if isinstance(node.meta["val"], list | tuple) else made[0]


def _name(node: Any) -> str:
    """The operator's name, as the importer knows it."""
    return str(getattr(node.target, "__name__", node.target))


def _is_of_one(said: Any) -> bool:
    """Whether it is a tensor without dimensions."""
    return _dtype(said) is not None and not len(said.shape)


def _goes_along_one(node: Any) -> bool:
    """Whether it goes along a dimension of tensors without any, which PyTorch takes for one of a single element."""
    schema = getattr(node.target, "_schema", None)
    along = schema is not None and any(argument.name in ("dim", "dims") for argument in schema.arguments)
    return along and all(map(_is_of_one, _results(node)))


def _dtype(said: Any) -> str | None:
    """The type of a tensor that PyTorch has seen; None if it was no tensor."""
    dtype = getattr(said, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _promoted(node: Any) -> list[Any]:
    """The operands that PyTorch has in the type of the result: of what is pointwise, joined, or summed up."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    tags = {str(tag) for tag in node.target.tags}
    if "Tag.pointwise" not in tags and node.target.__name__ not in ("cat.default", "cumsum.default", "cumprod.default"):
        return []
    found = []
    for argument, given in zip(schema.arguments, node.args):
        if argument.name not in _KEPT:
            found += [each for each in (given if isinstance(given, list | tuple) else [given]) if hasattr(each, "meta")]
    return list(dict.fromkeys(found))


def _checked(made: relax.Expr, said: Any, dtype: str, node: Any, importer: Any) -> relax.Expr:
    own = str(made.ty.dtype)
    if own != dtype and ("float" in own) != ("float" in dtype):
        raise InputError(
            f"{node.name}: {node.target.__name__} is imported as {own}, where PyTorch has {dtype}; cast its operands "
            "in the model"
        )
    shape = made.ty.shape
    if _is_of_one(said) and isinstance(shape, relax.ShapeExpr) and [*shape] == [1]:
        made = importer.block_builder.emit(op.reshape(made, ()))
    elif isinstance(shape, relax.ShapeExpr):
        pairs = list(zip(shape, said.shape)) if len(shape) == len(said.shape) else [(-1, 0)]
        known = [(int(one), other) for one, other in pairs if isinstance(one, int | tirx.IntImm) and type(other) is int]
        if any(one != other for one, other in known):
            raise InputError(
                f"{node.name}: {node.target.__name__} is imported with shape {shape}, where PyTorch has "
                f"{tuple(said.shape)}; write it in other operators"
            )
    return made if own == dtype else importer.block_builder.emit(op.astype(made, dtype))
