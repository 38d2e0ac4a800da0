"""A Relax model's operators as kernels, each with the pointwise operators behind it: what is tuned and compiled."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.ir import BaseFunc, GenericConst, IRModule, Op
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.machines import backend_of
from tvm_axe.records.packing import LAYOUT_FREE
from tvm_axe.relax.attended import with_attention
from tvm_axe.relax.convolutions import with_convolutions
from tvm_axe.relax.extents import with_reduced_extents
from tvm_axe.relax.flattened import with_rows_as_one_number
from tvm_axe.relax.kernels import with_kernels
from tvm_axe.relax.operators_of_attention import saying_what_is_left, with_repeated_heads
from tvm_axe.relax.quantized import with_decoding_products
from tvm_axe.relax.shapes import with_shapes_for_operators
from tvm_axe.relax.simplify import simplified
from tvm_axe.relax.statistics import with_batch_statistics
from tvm_axe.relax.widening import widened, with_wide_attention

__all__ = ["check_packing", "fuse", "is_model"]

_NUM_INPUT = "num_input"  # attribute of a Relax function


def is_model(mod: IRModule) -> bool:
    """Whether it holds a Relax function that calls operators, or nothing; one that only starts kernels is lowered."""
    found = calls = False

    def visit(node: relax.Expr) -> None:
        nonlocal found, calls
        if isinstance(node, relax.Call):
            calls = True
            found = found or (isinstance(node.op, Op) and not str(node.op.name).startswith("relax.builtin."))

    functions = [func for _, func in mod.functions_items() if isinstance(func, relax.Function)]
    for func in functions:
        relax.analysis.post_order_visit(func, visit)
    return found or (bool(functions) and not calls)


def fuse(model: IRModule, target: Target, pack_weights: bool = False) -> IRModule:
    """A Relax model with a kernel for each operator and the pointwise ones behind it, as it is tuned and compiled.

    These are the passes that upstream's pipeline starts with, except that a matmul reads a transposed operand, such as
    a linear layer's weights, as it lies. A model that has been through it stays as it is.

    On a CPU a kernel's parameters that are constants of the model are free to be stored in another layout
    (`tvm_axe.records.packing`): what packs them is folded when the model is compiled.

    Parameters
    ----------
    pack_weights
        Whether the parameters of the model's functions behind the first ``num_input`` are too.

    Raises
    ------
    TuneError
        If weights are to be packed, and no function of the model says which of its parameters they are.
    """
    backend = backend_of(target)
    if pack_weights:
        check_packing(model)
    model = with_shapes_for_operators(with_reduced_extents(model))
    # Kernels that compute operators whole take these as they come; attention that is written out is found without
    # what is there for training alone.
    model = with_batch_statistics(with_repeated_heads(with_decoding_products(model, target, with_biases=True)))
    model = with_kernels(model, target, alone=True)
    model = widened(model, matmuls=backend.on_host)
    if backend.on_host:
        model = with_convolutions(model)
    first = [relax.transform.DecomposeOpsForInference(), relax.transform.CanonicalizeBindings()]
    model = tvm.transform.Sequential(first)(model)
    model = simplified(with_attention(model, target) if backend.on_host else model)
    model = saying_what_is_left(with_wide_attention(model))
    passes = [
        *_tvm.relax_dispatching(target, backend.device),
        _tvm.fuse_transposed_products(),
        _tvm.legalize_ops(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]
    with target:
        fused = with_rows_as_one_number(tvm.transform.Sequential(passes)(model))
    return _with_free_weights(fused, pack_weights) if backend.on_host else fused


def check_packing(model: IRModule) -> None:
    """Check that it is said which parameters of a model are weights, so that they can be packed.

    Raises
    ------
    TuneError
        If no function of the model says it.
    """
    if not any(_inputs(func) is not None for func in model.functions.values()):
        raise TuneError(
            "pack_weights: no function of the model has the attribute num_input, which says how many of its first "
            "parameters are inputs; the others are weights"
        )


def _with_free_weights(model: IRModule, pack_weights: bool) -> IRModule:
    """The model, its kernels with the attribute for those of their parameters that are weights in a call, and only so.

    A kernel that had it already, and whose weights aren't packed here, would pack them in every call.
    """
    found = pack_weights or _has_constants(model)
    # Upstream's pass takes all parameters behind the inputs for weights.
    hidden = {} if pack_weights else {v: n for v, func in model.functions_items() if (n := _inputs(func)) is not None}
    model = model.clone()
    for variable in hidden:
        model[variable] = model[variable].without_attr(_NUM_INPUT)
    if found:
        model = _tvm.without_layouts_of_unknown_extents(model)
        model = relax.transform.AttachAttrLayoutFreeBuffers()(model).clone()
    for variable, func in model.functions_items():
        marked = isinstance(func, tirx.PrimFunc) and LAYOUT_FREE in (func.attrs or {})
        if marked and not (found and func.attrs[LAYOUT_FREE]):
            model[variable] = func.without_attr(LAYOUT_FREE)
    for variable, count in hidden.items():
        name = str(variable.name_hint)
        model[name] = model[name].with_attr(_NUM_INPUT, count)
    return model


def _inputs(func: BaseFunc) -> int | None:
    """How many of a Relax function's parameters are inputs, if it says so."""
    if not isinstance(func, relax.Function) or not func.attrs or _NUM_INPUT not in func.attrs:
        return None
    return int(func.attrs[_NUM_INPUT])


def _has_constants(model: IRModule) -> bool:
    found: list[GenericConst] = []

    def visit(node: relax.Expr) -> None:
        if isinstance(node, GenericConst):
            found.append(node)

    for _, func in model.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return bool(found)
