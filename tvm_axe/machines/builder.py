"""The builder of Relax programs: what workers, and the compiler for one device, make of a module with a ``main``.

Functions alone are built by the target's back end (`tvm_axe.machines.Backend.build`).
"""

from __future__ import annotations

import tvm
from tvm import ir, relax
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.machines.vector_math import PIPELINE

__all__ = ["PROGRAM_BUILDER", "build_program"]

PROGRAM_BUILDER = "tvm_axe.machines.builder:build_program"
"""What workers, which know nothing of the compiler, are told to build programs by."""


def build_program(
    mod: IRModule, target: Target, relax_pipeline: ir.transform.Pass | str = "default"
) -> relax.VMExecutable:
    """Build a Relax program, for ``relax.VirtualMachine``; `relax_pipeline` is what its operators go through."""
    return tvm.compile(mod, target=target, relax_pipeline=relax_pipeline, tir_pipeline=PIPELINE)
