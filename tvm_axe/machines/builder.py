"""Builders by name, and those of Relax programs: what workers make of a module with a ``main``.

Functions alone are built by the target's back end (`tvm_axe.machines.Backend.build`).

>>> builder_named(PROGRAM_BUILDER) is build_program
True
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.ir import IRModule
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import LINKED, WAITS
from tvm_axe.analysis.sizes import unknown_extents
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.registry import backend_of

__all__ = [
    "KEPT_BUILDER",
    "PROGRAM_BUILDER",
    "build_kept",
    "build_kernels",
    "build_program",
    "builder_named",
    "program_builder",
    "with_a_kernel",
]

PROGRAM_BUILDER = "tvm_axe.machines.builder:build_program"
"""What workers, which know nothing of the compiler, are told to build programs by."""

KEPT_BUILDER = "tvm_axe.machines.builder:build_kept"
"""The same, with compiled kernels kept on disk: equal ones are compiled by one worker, at the first start."""


def program_builder(kept: bool) -> str:
    """The name of what builds programs, whose kernels are `kept` on disk or not."""
    return KEPT_BUILDER if kept else PROGRAM_BUILDER


def builder_named(name: str) -> Callable[..., Any]:
    """The builder of a name, ``"package.module:function"``; a process that is told one imports nothing else."""
    home, _, function = name.partition(":")
    builder: Callable[..., Any] = getattr(import_module(home), function)
    return builder


def build_program(
    mod: IRModule,
    target: Target,
    relax_pipeline: ir.transform.Pass | str = "default",
    store: Cache | None = None,
) -> relax.VMExecutable:
    """Build a Relax program, for ``relax.VirtualMachine``; `relax_pipeline` is what its operators go through.

    On a GPU its functions of TensorIR may be tile programs', too. Kernels are kept in `store`, if there is one.
    """
    mod = with_a_kernel(mod)
    return _tvm.build_relax(mod, target, relax_pipeline, lambda functions: build_kernels(functions, target, store))


def build_kept(mod: IRModule, target: Target) -> relax.VMExecutable:
    """Build a Relax program whose compiled kernels are kept in the user's cache."""
    return build_program(mod, target, store=Cache())


def build_kernels(functions: IRModule, target: Target, store: Cache | None = None) -> Module:
    """Build functions of blocks and functions of tile programs, which upstream compiles by different pipelines.

    What calls one of them is compiled with it. Those that wait by themselves for what was launched before them are
    launched early. What is one worker's is apart from what all have alike, and what has addresses of this process in it
    is never kept.
    """
    on_host = backend_of(target).on_host
    named = {str(variable.name_hint): function for variable, function in functions.functions_items()}
    groups: dict[tuple[bool, bool, int | None], dict[ir.GlobalVar, ir.BaseFunc]] = {}
    for variable, function in functions.functions_items():
        callees = [] if on_host else [named[name] for name in called_by(function) if name in named]
        attributes = (callees[0] if callees else function).attrs or {}
        linked = int(attributes[LINKED]) if LINKED in attributes else None
        kind = (False, False) if on_host else ("s_tir" in attributes, WAITS in attributes)
        if on_host and "s_tir" not in attributes and unknown_extents(function):
            kind = (True, False)  # beside others LLVM leaves half of such a program's multiply-adds out of vectors
        groups.setdefault((*kind, linked), {})[variable] = function
    first, *others = [
        backend_of(target).build(IRModule(group), target, None if linked else store, overlap=waits).module
        for (_, waits, linked), group in groups.items()
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
