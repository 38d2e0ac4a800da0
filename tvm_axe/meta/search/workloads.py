"""What there is to tune in a program: its functions, or the kernels that a Relax model becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax, s_tir, tirx
from tvm.ir import BaseFunc, GenericConst, IRModule, Op
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.meta.task import Workload
from tvm_axe.records.database import normalize
from tvm_axe.records.packing import LAYOUT_FREE
from tvm_axe.schedule.tiles import has_choice

__all__ = ["fuse", "is_model", "workloads_of"]

_NUM_INPUT = "num_input"  # attribute of a Relax function


def is_model(mod: IRModule) -> bool:
    """Whether it holds a Relax function that calls operators; one that only starts kernels is lowered already."""
    found = False

    def visit(node: relax.Expr) -> None:
        nonlocal found
        if isinstance(node, relax.Call) and isinstance(node.op, Op):
            found = found or not str(node.op.name).startswith("relax.builtin.")

    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return found


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
        If weights are to be packed for a GPU, or no function of the model says which of its parameters they are.
    """
    on_cpu = str(target.kind.name) == "llvm"
    if pack_weights and not on_cpu:
        raise TuneError(f"pack_weights: weights are packed for a CPU, not for {target.kind.name}")
    if pack_weights and not any(_inputs(func) is not None for func in model.functions.values()):
        raise TuneError(
            "pack_weights: no function of the model has the attribute num_input, which says how many of its first "
            "parameters are inputs; the others are weights"
        )
    passes = [
        relax.transform.FuseTransposeMatmul(),
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]
    with target:
        fused = tvm.transform.Sequential(passes)(model)
    return _with_free_weights(fused, pack_weights) if on_cpu else fused


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


def workloads_of(
    program: tirx.PrimFunc | IRModule, target: Target, pack_weights: bool = False
) -> tuple[list[Workload], dict[str, str]]:
    """The workloads of a program, equal functions once, and why each other function is left out, by name.

    The weight of a model's kernel is the number of its calls; that of another function is how often it stands there.

    Raises
    ------
    TuneError
        If weights are to be packed and the program is no Relax model, or as `fuse` does; or if a function lets a
        parameter be stored in another layout that is none, or that it writes.
    """
    if pack_weights and not (isinstance(program, IRModule) and is_model(program)):
        raise TuneError(
            "pack_weights: it is for Relax models; a function says by its attribute layout_free_buffers which of its "
            "parameters are weights"
        )
    functions: Mapping[str, tuple[Any, int]]
    if isinstance(program, tirx.PrimFunc):
        name = str(program.attrs["global_symbol"]) if "global_symbol" in (program.attrs or {}) else "main"
        functions = {name: (program, 1)}
    elif is_model(program):
        tasks = ms.relax_integration.extract_tasks(fuse(program, target, pack_weights), target)
        functions = {str(task.task_name): (task.dispatched[0]["main"], int(task.weight)) for task in tasks}
    else:
        functions = {str(variable.name_hint): (func, 1) for variable, func in program.functions_items()}
    found: dict[str, Workload] = {}
    left_out = {}
    for name, (func, weight) in functions.items():
        reason = _why_not(func)
        if reason is not None:
            left_out[name] = reason
            continue
        mod = normalize(func)
        digest = _tvm.workload_hash(mod)
        same = found.get(digest)
        found[digest] = (
            Workload(name, mod, weight) if same is None else Workload(same.name, same.mod, same.weight + weight)
        )
    return list(found.values()), left_out


def _why_not(func: Any) -> str | None:
    if not isinstance(func, tirx.PrimFunc) or not (func.attrs and func.attrs.get("s_tir")):
        return "not a schedulable TensorIR function (@T.prim_func(s_tir=True))"
    if has_choice(func):
        return "its schedule chose a tile kernel"
    try:
        infos = ms.arg_info.ArgInfo.from_prim_func(func)
        for info in infos:
            np.dtype(str(info.dtype))
    except (TypeError, ValueError):
        return "a parameter is not a buffer of constant shape and of a type that numpy has"
    # The parser gives a body with blocks a root block, and leaves any other as it is.
    if not isinstance(func.body, s_tir.SBlockRealize):
        return "it has no block to schedule"
    return None
