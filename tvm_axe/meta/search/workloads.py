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
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.analysis.sizes import unknown_extents
from tvm_axe.errors import TuneError
from tvm_axe.machines import backend_of
from tvm_axe.meta.task import Workload
from tvm_axe.nests import Values, check_values, names_of
from tvm_axe.nests.default import is_unscheduled
from tvm_axe.nests.ranges import specialized, values_of
from tvm_axe.records.database import normalize
from tvm_axe.records.devices import on_first_device
from tvm_axe.relax.fuse import fuse, is_model
from tvm_axe.schedule.tiles import has_choice
from tvm_axe.tile.knobs import declared
from tvm_axe.tile.nodes import Wait
from tvm_axe.tile.regions import first_strided
from tvm_axe.tile.sequences import read_function
from tvm_axe.tile.tunable import is_tile_program, tunable

__all__ = ["workloads_of"]


def workloads_of(
    program: tirx.PrimFunc | IRModule, target: Target, pack_weights: bool = False, values: Values | None = None
) -> tuple[list[Workload], dict[str, str]]:
    """The workloads of a program, equal functions once, and why each other function is left out, by name.

    A tile program is a workload if it has knobs (`tvm_axe.tile.tunable`).
    The weight of a model's kernel is the number of its calls; that of another function is how often it stands there.
    One of unknown extents is a workload for each representative of the one that it is dispatched on, on a CPU
    (`tvm_axe.nests.ranges`).

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
    check_values(values or {}, names_of(func for func, _ in functions.values()))
    found: dict[str, Workload] = {}
    left_out = {}
    for name, (func, weight) in _at_values(functions, target, values).items():
        reason = _why_no_program(func) if isinstance(func, tirx.PrimFunc) and is_tile_program(func) else None
        if reason is None:
            func = _as_tuned(func)
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


def _at_values(
    functions: Mapping[str, tuple[Any, int]], target: Target, values: Values | None
) -> dict[str, tuple[Any, int]]:
    """The functions, those of unknown extents at each of their values, by names that say which."""
    found: dict[str, tuple[Any, int]] = {}
    for name, (func, weight) in functions.items():
        is_known = not isinstance(func, tirx.PrimFunc) or not unknown_extents(func)
        if is_known or not backend_of(target).on_host or not is_unscheduled(func):
            found[name] = func, weight
            continue
        driving, own, others = values_of(func, values)
        for value in own:
            found[f"{name}_{driving.name}{value}"] = specialized(func, {driving: value, **others}), weight
    return found


def _as_tuned(func: Any) -> Any:
    if not isinstance(func, tirx.PrimFunc):
        return func
    return tunable(func) if is_tile_program(func) else on_first_device(func)


def _why_no_program(func: tirx.PrimFunc) -> str | None:
    """Why a tile program can't be tuned as it stands; None if it may be."""
    if not declared(func):
        return "it is a tile program without knobs (tile.knob)"
    program = read_function(func)
    if program.scalars:
        names = ", ".join(str(scalar.name) for scalar in program.scalars)
        return f"it takes the scalars {names}, whose values nobody knows here: tune a program that has numbers for them"
    strided = first_strided(program.params)
    if strided is not None:
        return f"its parameter {strided.name} has strides, and dense tensors are measured: tune a program of those"
    if any(isinstance(node, Wait) for node in program.nodes()):
        return "it waits for flags, which nobody would set"
    return None


def _why_not(func: Any) -> str | None:
    if not isinstance(func, tirx.PrimFunc) or not (func.attrs and func.attrs.get("s_tir")):
        return "not a schedulable TensorIR function (@T.prim_func(s_tir=True))"
    if has_choice(func):
        return "its schedule chose a tile kernel"
    if KERNEL in func.attrs:
        return f"the kernel {func.attrs[KERNEL]} computes all of it"
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
