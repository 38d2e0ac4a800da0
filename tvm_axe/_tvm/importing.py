"""Upstream's importers: what they make wrongly, leave out, or make of types of 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tvm import IRModule, relax, tirx
from tvm.relax import op

from tvm_axe._tvm.formulas import number
from tvm_axe._tvm.torch_formulas import FORMULAS, PRODUCTS, group_norm
from tvm_axe._tvm.torch_padding import padded
from tvm_axe._tvm.torch_promotion import as_pytorch_says, standing_for
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
    return {name: partial(as_pytorch_says, mended.get(name) or partial(_upstream, name)) for name in known}


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


def _in_own_type(name: str, wide: tuple[int, ...], node: Any, importer: Any) -> relax.Var:
    emit = importer.block_builder.emit
    first = node.args[1 if name in ("addmm.default", "baddbmm.default") else 0]
    dtype = str(importer.env[first].ty.dtype)
    if "int" in dtype and name in PRODUCTS:  # the importer's are in float32, which loses what is above 2 ** 24
        return _by_formula(PRODUCTS[name], node, importer)
    if dtype not in _HALF:
        return _upstream(name, node, importer)
    given = [node.args[at] for at in wide if len(node.args) > at and node.args[at] is not None]
    with standing_for(importer, {each: emit(op.astype(importer.env[each], "float32")) for each in given}):
        made = _upstream(name, node, importer)
    return emit(op.astype(made, dtype))


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
    with standing_for(importer, {grid: turned}):
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
