"""A Relax model on one device, its kernels as they were tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.target import Target

from .. import _tvm
from ..lower.tiles import with_tile_kernels
from ..meta import apply_best
from ..meta.workloads import fuse
from ..target import resolve_target

__all__ = ["compile_model"]


def compile_model(
    model: tvm.IRModule, target: str | dict[str, Any] | Target = "llvm", work_dir: str | Path | None = "tuning_logs"
) -> relax.VMExecutable:
    """Compile a Relax model for one device. ::

        tvm_axe.tune(model, target=target)
        vm = tvm.relax.VirtualMachine(tvm_axe.compile(model, target=target), tvm.cpu())
        vm["main"](x, *weights)

    Its operators become the kernels that `tvm_axe.tune` made of them: a matmul with the pointwise operators behind it
    is one, and reads weights that a layer transposes as they lie.

    Parameters
    ----------
    model
        The model; it isn't changed.
    target
        As `tvm_axe.tune` was given it.
    work_dir
        Where tuning results lie; a kernel with a record there is compiled as it was tuned. None leaves all untuned.

    Raises
    ------
    TuneError
        If `target` is none.
    LowerError
        If a tile kernel that a record chose can't be compiled.
    """
    resolved = resolve_target(target)
    kernels = fuse(model, resolved)
    if work_dir is not None:
        kernels, _ = apply_best(kernels, resolved, work_dir)
    kernels = with_tile_kernels(kernels, resolved)
    # Upstream's whole pipeline would take the scheduled kernels for operators that it may fuse again.
    rest = tvm.transform.Sequential(_tvm.relax_lowering(resolved))
    return tvm.compile(kernels, target=resolved, relax_pipeline=rest)
