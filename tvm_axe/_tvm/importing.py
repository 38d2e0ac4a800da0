"""Upstream's importers: what they make wrongly, leave out, or make of types of 16 bits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tvm import IRModule, ir, relax, tirx
from tvm.relax import op

from tvm_axe._tvm.formulas import number
from tvm_axe._tvm.quotients import reduced
from tvm_axe._tvm.torch_broadcasting import in_one_shape
from tvm_axe._tvm.torch_formulas import FORMULAS, PRODUCTS, group_norm
from tvm_axe._tvm.torch_padding import padded
from tvm_axe._tvm.torch_quantizing import QUANTIZING
from tvm_axe._tvm.torch_resizing import linear, nearest
from tvm_axe._tvm.torch_selections import SELECTIONS
from tvm_axe._tvm.torch_sizes import divided, fractional, power, selected, size_computed, size_of, sliced
from tvm_axe._tvm.torch_special import SPECIAL
from tvm_axe._tvm.torch_types import know_small_floats
from tvm_axe.errors import InputError

_WIDE: dict[str, tuple[int, ...]] = {
    "addmm.default": (0,), "baddbmm.default": (0,), "linear.default": (2,),
    "conv1d.default": (2,), "conv2d.default": (2,), "conv3d.default": (2,), "convolution.default": (2,),
    "mm.default": (), "bmm.default": (), "matmul.default": (),
    "group_norm.default": (0, 2, 3), "native_group_norm.default": (0, 1, 2),
}  # fmt: skip
"""The operators that the importer computes in float32 whatever they are of, and which arguments are added to that; and
norms of groups, which Relax refuses of bfloat16, with their tensors."""
_HALF = ("float16", "bfloat16")


def torch_converters() -> dict[str, Callable[[Any, Any], Any]]:
    """What upstream's importer of ``torch.export`` is told, so that a model is imported right, or refused. ::

        program = torch.export.export(model, inputs)
        module = from_exported_program(program, custom_convert_map=torch_converters())

    By itself the importer

    - computes ``i * 0.5``, ``i / 4`` and ``mask * 1.5`` of integers and truth values in their own type, so that
      fractions are lost;
    - takes ``x[:, i, j]`` for every pair of elements of `i` and `j`, where PyTorch takes them together, and reads what
      is beyond a tensor at negative indices;
    - ignores the scale of `elu`, so that `selu` is wrong, the divisor of `avg_pool`, and that a picture is made smaller
      with antialiasing; and takes other pixels where sizes of `interpolate` by the nearest don't divide each other;
    - gives zeros for the places of `max_pool`, and the first result of other operators of several for all of them;
    - computes products of integers in float32, and `expm1`, `log1p` and `elu` without digits near zero;
    - doesn't know, or only in some forms, `adaptive_max_pool`, `addmv`, `amax`, `amin`, `cdist`, `clamp` of integers,
      `copysign`, `cummax`, `cummin`, `exp2`, `fmax`, `fmin`, `hypot`, `index_put`, `kthvalue`, `logcumsumexp`,
      `logsumexp`, `masked_scatter`, `min` along a dimension, `scatter_add`, `std_mean` and `var_mean`; nor volumes that
      are resized or sampled, `erfinv`, `lgamma`, `isin`, `searchsorted`, and shifts of bits;
    - knows no floats of eight bits, and none of the operators of `quantized_decomposed`;
    - takes no sizes that aren't known as numbers, in sums, quotients, comparisons and powers, and pads by none;
    - adds biases of 16 bits to products of float32, which Relax refuses, and leaves products without a bias in float32.

    With these what is known is computed as PyTorch does, and what isn't is refused. A product of 16 bits is summed and
    its bias added in float32, and the result has the model's type. So are norms of groups, which Relax refuses of
    bfloat16.

    They raise `InputError` for a divisor, antialiasing, elements that a mask selects, results that aren't imported,
    what has another shape than PyTorch says, or integers where it has fractions or the other way, and what upstream
    fails at.
    """
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    know_small_floats()
    mended: dict[str, Callable[[Any, Any], Any]] = {
        **{name: partial(_in_own_type, name, wide) for name, wide in _WIDE.items()},
        **{
            name: partial(_by_formula, formula)
            for name, formula in {**FORMULAS, **QUANTIZING, **SELECTIONS, **SPECIAL}.items()
        },
        **{name: partial(_refusing, name, argument) for name, argument in _REFUSED.items()},
        "clamp.default": _clamp,
        "getitem": _result,
        "grid_sampler_2d.default": _sampled,
        "index.Tensor": _index,
        "native_group_norm.default": _group_norm,
        "index_put.default": _index_put,
        "sym_float": fractional,
        "truediv": divided,
        "pow": power,
        **dict.fromkeys(("ceil", "floor", "round", "sym_max", "sym_min", "trunc"), size_computed),
        "constant_pad_nd.default": partial(padded, partial(_upstream, "constant_pad_nd.default")),
        "select.int": partial(selected, partial(_upstream, "select.int")),
        "slice.Tensor": partial(sliced, partial(_upstream, "slice.Tensor")),
        **dict.fromkeys(("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec"), nearest),
        **dict.fromkeys(("upsample_linear1d.vec", "upsample_trilinear3d.vec"), linear),
        "upsample_bilinear2d.vec": _bilinear,
    }
    known = dict.fromkeys([*ExportedProgramImporter().create_convert_map(), *mended])
    return {name: partial(_as_pytorch_says, mended.get(name) or partial(_upstream, name)) for name in known}


def from_onnx(
    model: Any,
    shape_dict: Mapping[str, Sequence[Any]] | None = None,
    dtype_dict: Any = "float32",
    opset: int | None = None,
    keep_params_in_input: bool = False,
    sanitize_input_names: bool = True,
) -> IRModule:
    """Import an ONNX model as upstream's ``tvm.relax.frontend.onnx.from_onnx`` does, right or not at all. ::

        module = tvm_axe.relax.from_onnx(onnx.load("model.onnx"))

    By itself upstream's importer

    - looks at operators' names and at no domain, so that ``Attention`` of ONNX is the one of ``com.microsoft``;
    - ignores that only one infinity is asked for in `IsInf`, thresholds of `NonMaxSuppression` that aren't constants,
      `output_shape` of `ConvTranspose`, `antialias` and `exclude_outside` of `Resize`, and takes other pixels where its
      scales don't divide sizes;
    - gives zeros for the mean and the deviation of `LayerNormalization`, and another type for `OneHot` and for the mask
      of `Dropout`;
    - refuses computations with sizes, and doesn't know integer convolutions and products, `Celu`, `LpNormalization`,
      ONNX's own `Attention` and others that ONNX itself writes out in operators that it knows.

    Here these are computed as ONNX says. ONNX infers the type and the shape of each value, and what is made is held to
    that: it is cast, or refused. Functions of the model are written out.

    Parameters
    ----------
    model
        An ``onnx.ModelProto``.
    shape_dict, dtype_dict, opset, keep_params_in_input, sanitize_input_names
        As upstream's importer takes them.

    Raises
    ------
    InputError
        If a node can't be imported; the message names it, its operator, and what can be done.
    """
    from tvm_axe._tvm.onnx_importing import import_onnx

    return import_onnx(model, shape_dict or {}, dtype_dict, opset, keep_params_in_input, sanitize_input_names)


def _upstream(name: str, node: Any, importer: Any) -> Any:
    """What the importer itself makes of an operator."""
    return importer.create_convert_map()[name](node)


@contextlib.contextmanager
def _standing_for(importer: Any, values: Mapping[Any, relax.Expr]) -> Iterator[None]:
    """Has the importer take these values for nodes of the graph, for as long as one of them is converted."""
    kept = {node: importer.env[node] for node in values}
    importer.env.update(values)
    try:
        yield
    finally:
        importer.env.update(kept)


def _in_own_type(name: str, wide: tuple[int, ...], node: Any, importer: Any) -> relax.Var:
    emit = importer.block_builder.emit
    first = node.args[1 if name in ("addmm.default", "baddbmm.default") else 0]
    dtype = str(importer.env[first].ty.dtype)
    if "int" in dtype and name in PRODUCTS:  # the importer's are in float32, which loses what is above 2 ** 24
        return _by_formula(PRODUCTS[name], node, importer)
    if dtype not in _HALF:
        return _upstream(name, node, importer)
    given = [node.args[at] for at in wide if len(node.args) > at and node.args[at] is not None]
    with _standing_for(importer, {each: emit(op.astype(importer.env[each], "float32")) for each in given}):
        made = _upstream(name, node, importer)
    return emit(op.astype(made, dtype))


# ---- Types and shapes


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


def _as_pytorch_says(convert: Callable[[Any, Any], Any], node: Any, importer: Any) -> Any:
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
        with _standing_for(importer, other):
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


# ---- Refused


def _refusing(name: str, argument: str | None, node: Any, importer: Any) -> Any:
    """What the importer makes of an operator without an argument that it ignores."""
    if argument is None:
        raise InputError(f"{node.name}: {name.partition('.')[0]} isn't imported; compute it in front of the model")
    value = _arguments(node, importer)[argument]
    if value is not None:
        raise InputError(
            f"{node.name}: {argument}={value!r} of {name.partition('.')[0]} isn't imported; leave it out and scale the "
            "result"
        )
    return _upstream(name, node, importer)


_REFUSED: Mapping[str, str | None] = {
    "avg_pool2d.default": "divisor_override",
    "avg_pool3d.default": "divisor_override",
    "_upsample_bilinear2d_aa.default": None,
    "_upsample_bicubic2d_aa.default": None,
}
"""Operators of which an argument, or which as a whole, the importer makes something else."""


def _result(node: Any, importer: Any) -> Any:
    """One of an operator's results; the importer gives the only one that it makes, or zeros, for others."""
    of, number = node.args
    is_one = isinstance(importer.env[of], relax.Var) and isinstance(importer.env[of].ty, relax.TensorType)
    several = len(getattr(getattr(of.target, "_schema", None), "returns", ())) > 1
    if number and several and (is_one or "_with_indices" in of.target.__name__):
        raise InputError(
            f"{node.name}: of the results of {of.target.__name__} only the first is imported, not the one of number "
            f"{number}; compute it from the operator's input"
        )
    return _upstream("getitem", node, importer)


# ---- Computed


def _by_formula(formula: Callable[..., Any], node: Any, importer: Any) -> Any:
    """What a formula makes of the operator's arguments; of several results a list."""
    emit = importer.block_builder.emit
    made = formula(emit, **_arguments(node, importer))
    return [emit(each) for each in made] if isinstance(made, tuple) else emit(made)


def _arguments(node: Any, importer: Any) -> dict[str, Any]:
    """The arguments of a call by their names, those left out as the operator's schema has them."""
    given, found = importer.retrieve_args(node), {}
    for at, argument in enumerate(node.target._schema.arguments):
        named = node.kwargs.get(argument.name, argument.default_value)
        found[argument.name] = given[at] if at < len(given) else importer._retrieve_args(named)
    return found


class _Indexed:
    """A tensor at indices that belong together, of some of its dimensions.

    Attributes
    ----------
    first
        The tensor as rows: the dimensions that are indexed are one, in front of the others.
    place
        The row of each index.
    extents, others : list
        The tensor's extents, and those of the dimensions that aren't indexed.
    turned : list of int
        The tensor's dimensions as `first` has them.
    order : list of int
        The dimensions of what is taken as PyTorch has them: those of the indices stand where the first of them is, if
        these are beside each other, and else in front.
    """

    def __init__(self, node: Any, importer: Any) -> None:
        data, indices = importer.retrieve_args(node)[:2]
        given = {axis: index for axis, index in enumerate(indices) if index is not None}
        if any(str(index.ty.dtype) in ("bool", "uint8") for index in given.values()):
            raise InputError(
                f"{node.name}: a mask selects elements, and how many isn't known; use torch.where, or multiply by the "
                "mask"
            )
        emit, extents = importer.block_builder.emit, list(data.ty.shape)
        others = [axis for axis in range(len(extents)) if axis not in given]
        self.extents, self.others = extents, [extents[axis] for axis in others]
        self.turned = [*given, *others]
        self.place: Any = None
        for axis, index in given.items():
            extent = size_of(extents[axis])
            index = emit(op.astype(index, "int64"))
            index = emit(op.where(op.less(index, relax.const(0, "int64")), op.add(index, extent), index))
            self.place = index if self.place is None else emit(op.add(op.multiply(self.place, extent), index))
        rows = math.prod(extents[axis] for axis in given)
        self.first = emit(op.reshape(emit(op.permute_dims(data, self.turned)), (rows, *self.others)))
        rank, axes = len(self.place.ty.shape), [*given]
        ahead = axes[0] if axes == [*range(axes[0], axes[-1] + 1)] else 0
        self.order = [*range(rank, rank + ahead), *range(rank), *range(rank + ahead, rank + len(others))]


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(at) for at in range(len(order))]


def _index(node: Any, importer: Any) -> relax.Var:
    """Elements at indices; a row, then a column and so on where each index is along a dimension of its own."""
    emit, alone = importer.block_builder.emit, _along_own(node, importer)
    if alone:
        found = importer.env[node.args[0]]
        for axis, places in alone.items():
            extent, rows = found.ty.shape[axis], emit(op.astype(emit(op.reshape(places, (-1,))), "int64"))
            behind = emit(op.add(rows, size_of(extent)))
            rows = emit(op.where(emit(op.less(rows, relax.const(0, "int64"))), behind, rows))
            found = emit(op.take(found, rows, axis, mode="clip"))
        return found
    at = _Indexed(node, importer)
    return emit(op.permute_dims(emit(op.take(at.first, at.place, axis=0, mode="clip")), at.order))


def _along_own(node: Any, importer: Any) -> dict[int, relax.Expr]:
    """The indices by their dimensions, if they are several of neighbours, and an open mesh; nothing otherwise."""
    given = {axis: importer.env[each] for axis, each in enumerate(node.args[1]) if each is not None}
    axes = [*given]
    if len(axes) < 2 or axes != [*range(axes[0], axes[0] + len(axes))]:
        return {}
    for n, each in enumerate(given.values()):
        extents = [*each.ty.shape][::-1]
        own = len(axes) - 1 - n
        if str(each.ty.dtype) == "bool" or len(extents) != own + 1:
            return {}
        if any(not isinstance(extent, tirx.IntImm) or int(extent) != 1 for extent in extents[:own]):
            return {}
    return given


def _index_put(node: Any, importer: Any) -> relax.Var:
    """A tensor with other elements at indices, or more at them."""
    at, emit = _Indexed(node, importer), importer.block_builder.emit
    values, add = importer.retrieve_args(node)[2], len(node.args) > 3 and node.args[3]
    if add and str(values.ty.dtype) == "bool":
        at.first, values = (emit(op.astype(each, "int32")) for each in (at.first, values))
    shape = [*at.place.ty.shape, *at.others]
    wide = emit(op.broadcast_to(values, [shape[dim] for dim in at.order]))
    count = math.prod(at.place.ty.shape)
    rows = emit(op.reshape(emit(op.permute_dims(wide, _inverse(at.order))), (count, *at.others)))
    places = emit(op.reshape(at.place, (count, 1)))
    put = emit(op.scatter_nd(at.first, places, rows, "add" if add else "update"))
    whole = emit(op.reshape(put, [at.extents[axis] for axis in at.turned]))
    return emit(op.permute_dims(whole, _inverse(at.turned)))


def _bilinear(node: Any, importer: Any) -> Any:
    """A picture of another size; upstream knows those of known extents."""
    extents = [*importer.env[node.args[0]].ty.shape, *node.meta["val"].shape]
    known = all(isinstance(extent, int | tirx.IntImm) for extent in extents)
    return _upstream("upsample_bilinear2d.vec", node, importer) if known else linear(node, importer)


def _group_norm(node: Any, importer: Any) -> Any:
    """Norms of groups, which Relax has only with weights and a bias."""
    if None in node.args[1:3]:
        return _by_formula(group_norm, node, importer)
    return _in_own_type("native_group_norm.default", _WIDE["native_group_norm.default"], node, importer)


def _sampled(node: Any, importer: Any) -> relax.Var:
    """A picture at places, whose two numbers PyTorch has last and Relax behind the batch."""
    grid = node.args[1]
    turned = importer.block_builder.emit(op.permute_dims(importer.env[grid], [0, 3, 1, 2]))
    with _standing_for(importer, {grid: turned}):
        return _upstream("grid_sampler_2d.default", node, importer)


def _clamp(node: Any, importer: Any) -> Any:
    """Integers between whole bounds; the importer's own of them has infinities where there is no bound."""
    given, emit = _arguments(node, importer), importer.block_builder.emit
    found, bounds = given["self"], (given["min"], given["max"])
    numbers = [bound for bound in bounds if not isinstance(bound, tirx.Expr)]
    whole = all(bound is None or math.isinf(bound) or bound == int(bound) for bound in numbers)
    if len(numbers) == len(bounds) and ("int" not in str(found.ty.dtype) or not whole):
        return _upstream("clamp.default", node, importer)
    for bound, function in zip(bounds, (op.maximum, op.minimum)):
        if isinstance(bound, tirx.Expr):
            found = emit(function(found, emit(op.astype(size_of(bound), str(found.ty.dtype)))))
        elif bound is not None and not math.isinf(bound):
            found = emit(function(found, number(int(bound), found)))
    return found
