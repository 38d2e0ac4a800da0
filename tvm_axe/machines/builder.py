"""Builders by name, and that of Relax programs: what workers make of a module with a ``main``.

Functions alone are built by the target's back end (`tvm_axe.machines.Backend.build`).

>>> builder_named(PROGRAM_BUILDER) is build_program
True
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.ir import IRModule
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import WAITS
from tvm_axe.machines.registry import backend_of
from tvm_axe.machines.vector_math import PIPELINE

__all__ = ["PROGRAM_BUILDER", "build_kernels", "build_program", "builder_named", "with_a_kernel"]

PROGRAM_BUILDER = "tvm_axe.machines.builder:build_program"
"""What workers, which know nothing of the compiler, are told to build programs by."""


def builder_named(name: str) -> Callable[..., Any]:
    """The builder of a name, ``"package.module:function"``; a process that is told one imports nothing else."""
    home, _, function = name.partition(":")
    builder: Callable[..., Any] = getattr(import_module(home), function)
    return builder


def build_program(
    mod: IRModule, target: Target, relax_pipeline: ir.transform.Pass | str = "default"
) -> relax.VMExecutable:
    """Build a Relax program, for ``relax.VirtualMachine``; `relax_pipeline` is what its operators go through.

    On a GPU its functions of TensorIR may be tile programs', too.
    """
    mod = with_a_kernel(mod)
    if not backend_of(target).on_host:
        return _tvm.build_relax(mod, target, relax_pipeline, lambda functions: build_kernels(functions, target))
    return tvm.compile(mod, target=target, relax_pipeline=relax_pipeline, tir_pipeline=PIPELINE)


def build_kernels(functions: IRModule, target: Target) -> Module:
    """Build functions of blocks and functions of tile programs, which upstream compiles by different pipelines.

    What calls one of them is compiled with it. Those that wait by themselves for what was launched before them are
    launched early.
    """
    named = {str(variable.name_hint): function for variable, function in functions.functions_items()}
    groups: dict[tuple[bool, bool], dict[ir.GlobalVar, ir.BaseFunc]] = {}
    for variable, function in functions.functions_items():
        callees = [named[name] for name in called_by(function) if name in named]
        attributes = (callees[0] if callees else function).attrs or {}
        groups.setdefault(("s_tir" in attributes, WAITS in attributes), {})[variable] = function
    first, *others = [
        backend_of(target).build(IRModule(group), target, overlap=waits).module for (_, waits), group in groups.items()
    ]
    for other in others:
        first.import_module(other)
    return first


def called_by(function: tirx.PrimFunc) -> list[str]:
    """The names of the functions that a function calls."""
    found: list[str] = []

    def on_call(call: ir.Call) -> None:
        if isinstance(call.op, ir.Op) and call.op.name == "tirx.tvm_call_cpacked":
            found.append(str(call.args[0].value))

    tvm_ffi.structural_walk(function.body, (ir.Call, on_call))
    return found


def with_a_kernel(mod: IRModule) -> IRModule:
    """Add a function that does nothing to a program without kernels.

    Of a program without kernels upstream makes C, which gcc compiles when it is run; what is loaded then stays mapped
    for as long as the process lives.
    """
    if any(isinstance(function, tirx.PrimFunc) for _, function in mod.functions_items()):
        return mod
    nothing = tirx.PrimFunc([], tirx.Evaluate(0)).with_attrs({"global_symbol": "axe_nothing", "tirx.noalias": True})
    mod = ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    mod["axe_nothing"] = nothing
    return mod
