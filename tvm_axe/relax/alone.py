"""A Relax model on one device, its kernels as they were tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines.target import resolve_target
from tvm_axe.machines.vector_math import PIPELINE
from tvm_axe.meta.search.workloads import fuse
from tvm_axe.records import apply_best

__all__ = ["compile_model"]


def compile_model(
    model: tvm.IRModule,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path | None = "tuning_logs",
    pack_weights: bool = False,
) -> relax.VMExecutable:
    """Compile a Relax model for one device. ::

        tvm_axe.tune(model, target=target)
        vm = tvm.relax.VirtualMachine(tvm_axe.compile(model, target=target), tvm.cpu())
        vm["main"](x, *weights)

    Its operators become the kernels that `tvm_axe.tune` made of them: a matmul with the pointwise operators behind it
    is one, and reads weights that a layer transposes as they lie. Weights that are constants of the model
    (`relax.transform.BindParams`) are packed for the kernels while it is compiled. ::

        vm = tvm.relax.VirtualMachine(tvm_axe.compile(model, target=target, pack_weights=True), tvm.cpu())
        packed = vm["main_transform_params"](weights)     # once
        vm["main"](x, *packed)

    Parameters
    ----------
    model
        The model; it isn't changed.
    target
        As `tvm_axe.tune` was given it.
    work_dir
        Where tuning results lie; a kernel with a record there is compiled as it was tuned. None leaves all untuned.
    pack_weights
        Whether weights that are parameters, those behind the first ``num_input``, are packed too, on a CPU: each
        function of the model then takes what a function beside it, with ``_transform_params`` behind its name, makes of
        their list. Kernels that pack are found if `tvm_axe.tune` was told the same.

    Raises
    ------
    TuneError
        If `target` is none, or weights cannot be packed (`tvm_axe.meta.search.workloads.fuse`).
    LowerError
        If a tile kernel that a record chose can't be compiled.
    """
    resolved = resolve_target(target)
    kernels = fuse(model, resolved, pack_weights)
    if work_dir is not None:
        kernels, _ = apply_best(kernels, resolved, work_dir)
    lift = [relax.transform.LiftTransformParams()] if pack_weights else []
    packing = [relax.transform.SplitLayoutRewritePreproc(), *lift, relax.transform.FoldConstant()]
    kernels = tvm.transform.Sequential(packing)(kernels)
    kernels = with_tile_kernels(kernels, resolved)
    # Upstream's whole pipeline would take the scheduled kernels for operators that it may fuse again.
    rest = tvm.transform.Sequential(_tvm.relax_lowering(resolved))
    return tvm.compile(kernels, target=resolved, relax_pipeline=rest, tir_pipeline=PIPELINE)
