"""What there is to tune in a program: its functions, or the kernels that a Relax model becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.meta.task import Workload
from tvm_axe.records.database import normalize
from tvm_axe.records.devices import on_first_device
from tvm_axe.relax.fuse import fuse, is_model
from tvm_axe.schedule.tiles import has_choice

__all__ = ["workloads_of"]


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
        func = on_first_device(func) if isinstance(func, tirx.PrimFunc) else func
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
