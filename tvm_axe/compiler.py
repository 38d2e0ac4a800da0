"""axe.compile: from a scheduled function or a Relax model to something that runs on a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any, overload

import tvm
from tvm import relax, s_tir, tirx
from tvm.target import Target

from tvm_axe.errors import LowerError
from tvm_axe.executable import Executable
from tvm_axe.layout import Mesh
from tvm_axe.lower import lower
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.meta.search.workloads import is_model
from tvm_axe.records import apply_best
from tvm_axe.records.folders import TUNING_LOGS
from tvm_axe.relax import compile_model, schedule_model
from tvm_axe.schedule import Schedule


@overload
def compile(
    program: Schedule,
    mesh: Mesh | None = None,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path | None = TUNING_LOGS,
) -> Executable: ...


@overload
def compile(
    program: tirx.PrimFunc | tvm.IRModule,
    mesh: Mesh,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path | None = TUNING_LOGS,
) -> Executable: ...


@overload
def compile(
    program: tvm.IRModule,
    mesh: None = None,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path | None = TUNING_LOGS,
    *,
    pack_weights: bool = False,
) -> relax.VMExecutable: ...


def compile(
    program: Schedule | tirx.PrimFunc | tvm.IRModule,
    mesh: Mesh | None = None,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path | None = TUNING_LOGS,
    *,
    pack_weights: bool = False,
) -> Executable | relax.VMExecutable:
    """Compile a program for a mesh, or a Relax model for one device.

    Parameters
    ----------
    program : Schedule | PrimFunc | IRModule
        A schedule; a function over whole tensors, scheduled or not; a module that holds one such function; or a Relax
        model, which `tvm_axe.relax.schedule_model` then schedules (call it yourself for a mesh of several axes).
    mesh : Mesh, optional
        The devices; taken from the schedule where one is given. A Relax model without a mesh is compiled for one
        device, as `tvm_axe.relax.compile_model` says, and run by ``tvm.relax.VirtualMachine``.
    target : str | dict | Target
        What to compile each device's kernels for; a plain ``"llvm"`` means this machine's CPU, its cores shared by the
        devices.
    work_dir : path, optional
        Where tuning results lie; a kernel with a record there is compiled as it was tuned. None leaves all untuned.
    pack_weights : bool
        Of a Relax model for one device: see `tvm_axe.relax.compile_model`.

    Raises
    ------
    LowerError
        If `program` cannot be lowered: see `tvm_axe.lower.lower` and, for a Relax model, `tvm_axe.relax.merge`.
    LayoutError
        If a declared layout doesn't fit.
    """
    if isinstance(program, Schedule):
        if mesh is not None and mesh != program.mesh:
            raise LowerError(f"compile: the schedule is for the mesh {program.mesh}, not {mesh}; leave mesh out")
        mesh = program.mesh
    if mesh is None and isinstance(program, tvm.IRModule) and is_model(program):
        return compile_model(program, target, work_dir, pack_weights)
    if pack_weights:
        raise LowerError("compile: pack_weights is for a Relax model on one device; leave it out")
    if mesh is None:
        raise LowerError('compile: name the mesh, for example mesh=axe.Mesh({"tp": 2})')
    lowered = lower(_function(program, mesh), mesh)
    resolved = resolve_target(target, threads=cores_per_device(mesh))
    module, tuned = (lowered.module, {}) if work_dir is None else apply_best(lowered.module, resolved, work_dir)
    return Executable(lowered, module, resolved, tuned)


def _function(program: Schedule | tirx.PrimFunc | tvm.IRModule, mesh: Mesh) -> tirx.PrimFunc:
    if isinstance(program, tirx.PrimFunc):
        return program
    module = program.mod if isinstance(program, s_tir.Schedule) else program
    if not isinstance(module, tvm.IRModule):
        raise LowerError(f"compile: a schedule, a function or a module is compiled, not a {type(module).__name__}")
    if is_model(module):
        return schedule_model(module, mesh)
    functions = [func for _, func in module.functions_items() if isinstance(func, tirx.PrimFunc)]
    if len(functions) != 1:
        raise LowerError(f"compile: the module has {len(functions)} functions; compile one function over whole tensors")
    return functions[0]
