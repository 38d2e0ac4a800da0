"""What there is to tune in a program: its functions, or the kernels that a Relax model becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax, s_tir, tirx
from tvm.ir import IRModule, Op
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from .. import _tvm
from ..schedule.tiles import has_choice
from .database import normalize
from .task import Workload

__all__ = ["fuse", "is_model", "workloads_of"]


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


def fuse(model: IRModule, target: Target) -> IRModule:
    """A Relax model with a kernel for each operator and the pointwise ones behind it, as it is tuned and compiled.

    These are the passes that upstream's pipeline starts with, except that a matmul reads a transposed operand, such as
    a linear layer's weights, as it lies. A model that has been through it stays as it is.
    """
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
        return tvm.transform.Sequential(passes)(model)


def workloads_of(program: tirx.PrimFunc | IRModule, target: Target) -> tuple[list[Workload], dict[str, str]]:
    """The workloads of a program, equal functions once, and why each other function is left out, by name.

    The weight of a model's kernel is the number of its calls; that of another function is how often it stands there.
    """
    functions: Mapping[str, tuple[Any, int]]
    if isinstance(program, tirx.PrimFunc):
        name = str(program.attrs["global_symbol"]) if "global_symbol" in (program.attrs or {}) else "main"
        functions = {name: (program, 1)}
    elif is_model(program):
        tasks = ms.relax_integration.extract_tasks(fuse(program, target), target)
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
