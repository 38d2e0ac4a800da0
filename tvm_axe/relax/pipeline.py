"""The Relax pipeline ``"axe"``, known to upstream's ``relax.get_pipeline`` once this module is imported.

For one device it is a pipeline as upstream's are: ``tvm.compile(model, target, relax_pipeline="axe")`` makes what
`tvm_axe.compile` makes. For a mesh it gives the module that each device runs.
"""

from __future__ import annotations

from pathlib import Path
from types import EllipsisType
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import LayoutError, LowerError, TileError, TuneError
from tvm_axe.layout import Mesh
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.nests import Values
from tvm_axe.pipeline import DEVICE_PASSES, Work, run
from tvm_axe.relax.alone import lowered_model
from tvm_axe.relax.sharing import share_for

# A pass is called through C++, which would make a RuntimeError of an error that it doesn't know.
for _error in (LayoutError, LowerError, TileError, TuneError):
    tvm_ffi.register_error(_error.__name__, _error)


@relax.register_pipeline("axe")
def axe_pipeline(
    *,
    mesh: Mesh | None = None,
    axis: str | None = None,
    target: str | dict[str, Any] | Target | None = None,
    work_dir: str | Path | EllipsisType | None = ...,
    pack_weights: bool = False,
    values: Values | None = None,
) -> tvm.transform.Pass:
    """The pass that compiles a model for one device, or turns it into what each device of a mesh runs. ::

        tvm.compile(mod, "llvm", relax_pipeline="axe")
        tvm.relax.get_pipeline("axe", mesh=axe.Mesh({"tp": 2}))(mod)["forward"]

    For one device its kernels are as records, tile kernels and defaults make them, as `tvm_axe.compile` has them; they
    are compiled by the pass, so what pipeline ``tvm.compile`` has for functions of TensorIR makes no difference.

    What its functions take on a mesh is told by `tvm_axe.relax.share_model`, whose module this is; `tvm_axe.compile`
    builds and runs it.

    Parameters
    ----------
    mesh, axis
        As `tvm_axe.relax.share_model` takes them; without a mesh, the model is for one device.
    target, work_dir
        As `tvm_axe.compile` takes them. Left out, the target is the one that ``tvm.compile`` is given, or else
        ``"llvm"``; and the directory is the default one for one device, and none on a mesh. Without one no kernel is as
        it was tuned.
    pack_weights, values
        As `tvm_axe.relax.compile_model` takes them.

    Raises
    ------
    LayoutError
        If the mesh has no such axis.
    TuneError
        If `target` is none. The pass raises what `compile_model` and `share_model` do.
    LowerError
        If ``tvm.compile`` is given the pass for a mesh, whose module needs workers; or if weights are packed for one.
    """
    if mesh is None:
        folder = WORK_DIR if isinstance(work_dir, EllipsisType) else work_dir
        return _for_one_device(target, folder, pack_weights, values)
    if pack_weights:
        raise LowerError("pipeline axe: pack_weights is for one device; leave it out, or the mesh")
    if axis is not None:
        mesh.axis_size(axis)  # an error where the mesh lacks it
    resolved = resolve_target(target or "llvm", threads=cores_per_device(mesh))
    folder = None if isinstance(work_dir, EllipsisType) else work_dir

    @tvm.transform.module_pass(opt_level=0, name="axe")
    def to_device(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        if _tvm.is_building():
            raise LowerError(
                f"pipeline axe: what each device of the mesh {mesh} runs is run by workers, not by tvm.compile's "
                "virtual machine; use exe = axe.compile(model, mesh=mesh) and exe.run(workers, ...), or leave the mesh "
                "out for one device"
            )
        shared = share_for(mod, mesh, resolved, axis).module
        return shared if folder is None else run(Work(shared, resolved, None, folder), DEVICE_PASSES).module

    return to_device


def _for_one_device(
    target: str | dict[str, Any] | Target | None,
    work_dir: str | Path | None,
    pack_weights: bool,
    values: Values | None,
) -> tvm.transform.Pass:
    given = None if target is None else resolve_target(target)

    @tvm.transform.module_pass(opt_level=0, name="axe")
    def to_program(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        own = given or resolve_target(Target.current(allow_none=True) or "llvm")
        return lowered_model(mod, own, work_dir, pack_weights, values)

    return to_program
