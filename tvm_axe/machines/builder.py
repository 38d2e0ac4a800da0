"""The builder: modules whose functions are lowered for a target become what can be run, for every target here.

Upstream leaves CUDA source to be compiled at the first launch, and a CPU's code to be generated at the first call; a
build here leaves nothing to do but to link.
"""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple

import tvm
from tvm import ir, relax
from tvm.ir import IRModule
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.machines import cache, nvcc

__all__ = ["PROGRAM_BUILDER", "Built", "build", "build_program"]

PROGRAM_BUILDER = "tvm_axe.machines.builder:build_program"
"""What workers, which know nothing of the compiler, are told to build programs by."""

_VERSIONS = [metadata.version(name) for name in ("apache-tvm", "apache-tvm-ffi")]


class Built(NamedTuple):
    """What can be run, and the CUDA source of its kernels; None for a CPU."""

    module: Module
    source: str | None


def build(mod: IRModule, target: Target, store: cache.Cache | None = None, overlaps: bool = False) -> Built:
    """Build a module of functions.

    Parameters
    ----------
    mod : IRModule
        Functions that are scheduled or lowered for the target.
    target : Target
        As `tvm_axe.machines.target.resolve_target` gives it.
    store : Cache, optional
        Where what was built is kept, to be found again. Without one, a CPU's code is kept nowhere, and a GPU's in the
        user's folder, as CUDA's compiler takes seconds.
    overlaps : bool
        Whether all kernels wait for what was launched before them, and so may be launched while that still runs.

    Raises
    ------
    TileError
        There is no compiler for CUDA source.
    """
    if str(target.kind.name) == "cuda":
        kept = cache.Cache() if store is None else store
        # A tile kernel leaves a function of TIRx, which upstream's other pipeline takes for something else.
        pipeline = "s_tir" if any("s_tir" in (func.attrs or {}) for func in mod.functions.values()) else "tirx"
        return Built(*_tvm.build_cuda(mod, target, lambda source: nvcc.cubin(source, target, kept), overlaps, pipeline))
    if store is None:
        module = tvm.compile(mod, target=target).jit()
        for variable in mod.get_global_vars():
            module.get_function(str(variable.name_hint))  # generates the code
        return Built(module, None)
    # Scripts say all but where the text stood; the hash says what they leave out.
    name = cache.key("llvm", mod.script(show_meta=True), _tvm.workload_hash(mod), str(target), *_VERSIONS)
    return Built(_tvm.load_llvm(store.get_or_make(name, lambda: _tvm.save_llvm(tvm.compile(mod, target).mod))), None)


def build_program(
    mod: IRModule, target: Target, relax_pipeline: ir.transform.Pass | str = "default"
) -> relax.VMExecutable:
    """Build a Relax program, for ``relax.VirtualMachine``; `relax_pipeline` is what its operators go through."""
    return tvm.compile(mod, target=target, relax_pipeline=relax_pipeline)
