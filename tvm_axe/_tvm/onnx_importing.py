"""Upstream's importer of ONNX: what it makes wrongly, leaves out, or takes for something else."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import tvm_ffi
from onnx import inliner, numpy_helper, shape_inference
from tvm import ir, relax, tirx
from tvm.relax import op
from tvm.relax.frontend.onnx.onnx_frontend import (
    ONNXGraphImporter,
    _get_convert_map,
    _tensor_to_shape_expr,
    get_constant,
    onnx_input,
)

from tvm_axe._tvm.onnx_call import Call
from tvm_axe._tvm.onnx_formulas import CONVERTERS
from tvm_axe.errors import AxeError, InputError

__all__ = ["import_onnx"]

_OWN = ("", "ai.onnx")
_WRITTEN_OUT = (
     "BlackmanWindow", "CenterCropPad", "HammingWindow", "HannWindow",
    "MeanVarianceNormalization", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", "Swish",
)  # fmt: skip
"""Operators that ONNX itself writes out in others, where upstream's importer knows none or another one of that name."""
_MICROSOFT = (
    "BiasGelu", "DequantizeLinear", "EmbedLayerNormalization", "FastGelu", "Gelu", "MatMulInteger16",
    "QuantizeLinear",
)  # fmt: skip
"""Operators of ``com.microsoft`` that upstream's importer knows; it doesn't look at domains."""
_MICROSOFT_ALONE = (
    "AllClassNMS",
    "BiasGelu",
    "EmbedLayerNormalization",
    "FastGelu",
    "MatMulInteger16",
    "SkipLayerNormalization",
)
"""Operators that upstream's importer knows by their name alone, and that ONNX has none of or another."""
_SEQUENCES = (
    "ConcatFromSequence", "Optional", "OptionalGetElement", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
    "SequenceInsert", "SplitToSequence",
)  # fmt: skip
"""Operators whose one result is a tuple, or may be."""
_SIZES = (
    "Add", "Cast", "CastLike", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Gather", "Identity", "Mul",
    "Reshape", "Resize", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where",
)  # fmt: skip
"""Operators that are told sizes as sizes; to others they are tensors."""
_Said = dict[str, tuple[str, list[int | None] | None]]
_SMALL = 4096
"""Up to how many bytes of a weight ONNX is given to infer shapes: its constants may be sizes."""


def import_onnx(
    model: Any, shapes: Mapping[str, Sequence[Any]], dtypes: Any, opset: int | None, keep: bool, sanitize: bool
) -> Any:
    """What `tvm_axe.relax.from_onnx` gives."""
    if model.ir_version < 3:
        raise InputError(f"the model's ir_version is {model.ir_version}; convert it to 3 or a later one")
    domains = {each.domain: each.version for each in model.opset_import}
    version = opset or max([domains.get(each, 1) for each in _OWN])
    shapes = {**_empty(model.graph), **shapes}
    graph, said = _prepared(model, shapes)
    return _Importer(said, _used(graph), dict(shapes), dtypes, keep, sanitize).from_onnx(graph, version)


def _empty(graph: Any) -> dict[str, list[int]]:
    """The shapes of inputs without elements, whose zeros upstream takes for extents that aren't known."""
    found = {}
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        if all(dim.HasField("dim_value") for dim in dims) and any(dim.dim_value == 0 for dim in dims):
            found[value.name] = [dim.dim_value for dim in dims]
    return found


def _name(node: Any) -> str:
    return str(node.name or next(filter(None, node.output), "a node without a name"))


def _operator(node: Any) -> str:
    """Its name, with its domain if that isn't ONNX's own."""
    return str(node.op_type) if node.domain in _OWN else f"{node.domain}.{node.op_type}"


def _is_known(node: Any) -> bool:
    if _operator(node) in CONVERTERS:
        return True
    if node.domain in _OWN:
        return node.op_type == "If" or (node.op_type in _get_convert_map() and node.op_type not in _MICROSOFT_ALONE)
    return node.domain == "com.microsoft" and node.op_type in _MICROSOFT


def _words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def _attributes(node: Any) -> dict[str, Any]:
    """Attributes by their names: texts, tensors as arrays, types by their names."""
    found = {}
    for each in node.attribute:
        value = onnx.helper.get_attribute_value(each)
        if isinstance(value, onnx.TensorProto):
            value = numpy_helper.to_array(value)
        found[each.name] = value.decode() if isinstance(value, bytes) else value
    if "dtype" in found:
        found["dtype"] = _dtype(int(found["dtype"]))
    return found


def _told(node: Any) -> dict[str, Any]:
    """What upstream's converters are told beside attributes."""
    return {"name": node.name, "num_outputs": len(node.output)}


def _used(graph: Any) -> set[str]:
    """The names of values that a node reads, or that are results."""
    found = {value.name for value in graph.output}
    for node in graph.node:
        found |= {*node.input}
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found |= _used(attribute.g)
    return found


# ---- What ONNX says


def _prepared(model: Any, shapes: Mapping[str, Sequence[Any]]) -> tuple[Any, _Said]:
    """The graph without functions, and the type and the shape of each value as far as ONNX infers them.

    Large weights are left out for that, since ONNX reads and writes a model as a whole, and two GiB are the most that
    it can. Shapes that the model says of its results are, since others may be given.
    """
    light = onnx.ModelProto()
    light.CopyFrom(model)
    given = {each.name for each in light.graph.input}
    large = [each for each in model.graph.initializer if _bytes(each) > _SMALL]
    names = {each.name for each in large}
    kept = [each for each in light.graph.initializer if each.name not in names]
    for field in ("initializer", "value_info"):
        light.graph.ClearField(field)
    light.graph.initializer.extend(kept)
    for value in light.graph.output:
        if value.type.WhichOneof("value") == "tensor_type":
            value.type.tensor_type.ClearField("shape")
    for value in light.graph.input:
        if value.name in shapes:
            dims = [each if isinstance(each, int) else str(each) for each in shapes[value.name]]
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, dims))
        for at, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.WhichOneof("value") is None:
                dim.dim_param = f"{value.name}_{at}"
    typed = _typed(inliner.inline_local_functions(_typed(light, large)), kept)
    _give_defaults(typed)
    with contextlib.suppress(RuntimeError):  # of what it can't write out, which is told by its name then
        typed = inliner.inline_selected_functions(
            typed, [("", name) for name in _WRITTEN_OUT], inline_schema_functions=True
        )
    found = {*given, *(each.name for each in large)}
    light.graph.ClearField("node")
    light.graph.node.extend(typed.graph.node)
    light.ClearField("functions")
    light.graph.input.extend(each for each in typed.graph.input if each.name in found - given)
    light.ClearField("opset_import")
    light.opset_import.extend(typed.opset_import)
    said = _said(shape_inference.infer_shapes(light, data_prop=True).graph)
    light.graph.initializer.extend(large)
    for at in reversed(range(len(light.graph.input))):
        if light.graph.input[at].name in found - given:
            del light.graph.input[at]
    return light.graph, said


def _give_defaults(model: Any) -> None:
    """Attributes that a node leaves out, which are lost where it is written out."""
    version = max((each.version for each in model.opset_import if each.domain in _OWN), default=1)
    for node in model.graph.node:
        if node.domain in _OWN and node.op_type in _WRITTEN_OUT:
            given = {each.name for each in node.attribute}
            for name, attribute in onnx.defs.get_schema(node.op_type, version, "").attributes.items():
                if name not in given and attribute.default_value.type:
                    node.attribute.append(attribute.default_value)


def _typed(model: Any, weights: Sequence[Any]) -> Any:
    """The model with the type of each value in it, weights among its inputs, as functions are written out by."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    given = {each.name for each in made.graph.input}
    made.graph.input.extend(
        onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims)
        for each in weights
        if each.name not in given
    )
    return shape_inference.infer_shapes(made, data_prop=True)


def _said(graph: Any) -> _Said:
    said: _Said = {}
    for value in [*graph.value_info, *graph.output]:
        tensor = value.type.tensor_type
        if value.type.WhichOneof("value") == "tensor_type" and tensor.elem_type:
            known = [each.dim_value if each.HasField("dim_value") else None for each in tensor.shape.dim]
            said[value.name] = (_dtype(tensor.elem_type), known if tensor.HasField("shape") else None)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                said |= _said(attribute.g)
    return said


def _bytes(weight: Any) -> int:
    return weight.ByteSize() if weight.data_location != onnx.TensorProto.EXTERNAL else _SMALL + 1


def _dtype(number: int) -> str:
    return str(onnx.helper.tensor_dtype_to_np_dtype(number))


# ---- The importer


class _Importer(ONNXGraphImporter):
    """Upstream's importer with the package's converters, which holds each value to what ONNX says it is."""

    def __init__(
        self, said: _Said, used: set[str], shapes: dict[str, Any], dtypes: Any, keep: bool, sanitize: bool
    ) -> None:
        super().__init__(shapes, dtypes, keep_params_in_input=keep, sanitize=sanitize)
        self._said, self._used, self._node = said, used, None
        self._nodes: dict[str, Any] = {}

    def _check_for_unsupported_ops(self, graph: Any) -> None:
        unknown = [node for node in graph.node if not _is_known(node)]
        if unknown:
            named = ", ".join(dict.fromkeys(f"{_operator(node)} (node {_name(node)})" for node in unknown[:8]))
            raise InputError(f"the model has operators that aren't imported: {named}; write them in others")

    def _construct_nodes(self, graph: Any) -> None:
        for node in graph.node:
            try:
                self._construct(node)
            except AxeError:
                raise
            except Exception as error:  # whatever upstream's converters raise
                raise InputError(
                    f"{_name(node)}: {_operator(node)} isn't imported: {_words(error)}; give as initializers what "
                    "sizes follow from, or write it in other operators"
                ) from error
            for name in filter(None, node.output):
                self._nodes[name] = self._checked(self._nodes.get(name), name, node)
        for value in getattr(graph, "output", ()):
            self._nodes[value.name] = self._tensor(self._nodes[value.name], value.name)

    def _construct(self, node: Any) -> None:
        if node.op_type == "If" and node.domain in _OWN:
            self._choose(node)
            return
        values = [self._nodes[name] if name else None for name in node.input]
        if _operator(node) not in _SIZES:
            values = [self._tensor(value, name) for value, name in zip(values, node.input)]
        while values and values[-1] is None:
            values.pop()
        self._node = node
        convert = CONVERTERS.get(_operator(node))
        if convert is None:
            attributes = {**self._parse_attr(node.attribute), "tvm_custom": _told(node)}
            made = self._convert_operator(node.op_type, onnx_input(values), attributes, self.opset)
        else:
            made = convert(self._call(node), *values, **_attributes(node))
            made = self.bb.normalize(made) if isinstance(made, relax.Expr) else made
        results = [made]
        if isinstance(made, relax.Expr) and isinstance(made.ty, relax.TupleType) and node.op_type not in _SEQUENCES:
            one = made if isinstance(made, relax.Tuple) else self.bb.emit(made)
            results = [
                one[at] if isinstance(one, relax.Tuple) else self.bb.emit(one[at]) for at in range(len(made.ty.fields))
            ]
        if len(results) < len(node.output):
            raise InputError(
                f"{_name(node)}: of the results of {_operator(node)} only {len(results)} are imported, not all "
                f"{len(node.output)}; compute the others from its inputs"
            )
        self._nodes.update(zip(node.output, results))

    def _call(self, node: Any) -> Call:
        def upstream(name: str, inputs: Sequence[Any], **attributes: Any) -> Any:
            raw = {key: value.encode() if isinstance(value, str) else value for key, value in attributes.items()}
            given = [self._tensor(each, "") if name not in _SIZES else each for each in inputs]
            made = self._convert_operator(name, onnx_input(given), {**raw, "tvm_custom": _told(node)}, self.opset)
            return self.bb.emit(made) if isinstance(made, ir.Call) else made

        return Call(
            _name(node), _operator(node), len(node.output), self.bb.emit, upstream, self._stored, self._sizes,
            self._branch,
        )  # fmt: skip

    def _stored(self, value: Any) -> Any:
        if value is None:
            return None
        found = get_constant(value, [self._nodes, self._params])
        if isinstance(found, relax.ShapeExpr) and all(isinstance(each, tirx.IntImm) for each in found.values):
            return np.asarray([int(each) for each in found.values], "int64")
        if isinstance(found, tirx.IntImm):
            return np.asarray(int(found), "int64")
        return found.value.numpy() if isinstance(found, ir.GenericConst) else None

    def _sizes(self, value: Any) -> Any:
        known = self._stored(value)
        if known is not None:
            return relax.ShapeExpr(known.tolist())
        if isinstance(value, relax.ShapeExpr):
            return value
        extents = value.ty.shape
        if not isinstance(extents, relax.ShapeExpr) or not isinstance(extents.values[0], tirx.IntImm):
            raise InputError(f"{_name(self._node)}: the rank of a result isn't known; give its shape as an initializer")
        wide = self.bb.emit(op.astype(value, "int64")) if str(value.ty.dtype) != "int64" else value
        return _tensor_to_shape_expr(self.bb, wide, int(extents.values[0]), "size")

    def _choose(self, node: Any) -> None:
        """The results of an If: of one branch if it is known which, and else of both, of which one is taken."""
        branches = {each.name: each.g for each in node.attribute}
        condition = self._nodes[node.input[0]]
        known = self._stored(condition)
        if known is not None:
            chosen = self._branch(branches["then_branch" if known.reshape(()) else "else_branch"])
            self._nodes.update(zip(node.output, chosen))
            return
        pairs = zip(*(self._branch(branches[name]) for name in ("then_branch", "else_branch")))
        truth = self.bb.emit(op.reshape(condition, ()))
        for name, (one, other) in zip(node.output, pairs):
            one, other = self._tensor(one, name), self._tensor(other, name)
            if not tvm_ffi.structural_equal(one.ty, other.ty):
                raise InputError(
                    f"{_name(node)}: If isn't imported: its branches give {one.ty} and {other.ty}; have both give "
                    "one shape and type, or make the condition a constant"
                )
            self._nodes[name] = self.bb.emit(op.where(truth, one, other))

    def _branch(self, graph: Any, values: Sequence[Any] = ()) -> list[Any]:
        outer: dict[str, Any] = dict(self._nodes)
        self._check_for_unsupported_ops(graph)
        for weight in graph.initializer:
            self._nodes[weight.name] = relax.const(self._parse_array(weight))
        self._nodes.update(zip((value.name for value in graph.input), values, strict=True))
        self._construct_nodes(graph)
        made = [self._nodes[value.name] for value in graph.output]
        self._nodes = outer
        return made

    def _tensor(self, value: Any, name: str) -> Any:
        """Sizes as a tensor: constant if they are known."""
        dtype = self._said.get(name, ("int64", None))[0]
        if isinstance(value, relax.ShapeExpr):
            known = self._stored(value)
            if known is not None:
                return relax.const(known, dtype)
            made = self.bb.emit(op.shape_to_tensor(value))
        elif isinstance(value, relax.Expr) and isinstance(value.ty, relax.ShapeType):
            made = self.bb.emit(op.shape_to_tensor(value))
        elif isinstance(value, relax.Expr) and ir.is_prim_expr(value):
            if isinstance(value, tirx.IntImm | tirx.FloatImm):
                return relax.const(value.value, dtype)
            wide = value if str(value.ty) == "int64" else tirx.Cast("int64", value)
            made = self.bb.emit(op.reshape(self.bb.emit(op.shape_to_tensor(relax.ShapeExpr([wide]))), ()))
        else:
            return value
        return made if dtype == "int64" else self.bb.emit(op.astype(made, dtype))

    def _checked(self, made: Any, name: str, node: Any) -> Any:
        """A value of the type and the shape that ONNX says."""
        if name not in self._said or name not in self._used:
            return made
        if not isinstance(made, relax.Expr) or not isinstance(made.ty, relax.TensorType):
            return made
        dtype, extents = self._said[name]
        shape, own = made.ty.shape, str(made.ty.dtype)
        if isinstance(shape, relax.ShapeExpr) and extents is not None:
            sizes = [int(each) if isinstance(each, tirx.IntImm) else None for each in shape.values]
            apart = any(None not in (one, two) and one != two for one, two in zip(sizes, extents))
            if apart or len(sizes) != len(extents):
                raise InputError(
                    f"{_name(node)}: {_operator(node)} is imported with shape {shape}, where ONNX has {extents}; write "
                    "it in other operators"
                )
        if own == dtype:
            return made
        if ("int" in own or own == "bool") and "float" in dtype:
            raise InputError(
                f"{_name(node)}: {_operator(node)} is imported as {own}, where ONNX has {dtype}; cast its inputs"
            )
        return self.bb.emit(op.astype(made, dtype))
