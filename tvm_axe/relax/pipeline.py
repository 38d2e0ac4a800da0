"""The Relax pipeline ``"axe"``, known to upstream's ``relax.get_pipeline`` once this module is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.target import Target

from tvm_axe.errors import LayoutError, LowerError
from tvm_axe.layout import Mesh
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.pipeline import APPLY_RECORDS, LOWER, SCHEDULES, TILE_KERNELS, Work, run
from tvm_axe.relax.model import mesh_axis, schedule_model

# A pass is called through C++, which would make a RuntimeError of an error that it doesn't know.
for _error in (LayoutError, LowerError):
    tvm_ffi.register_error(_error.__name__, _error)


@relax.register_pipeline("axe")
def axe_pipeline(
    *,
    mesh: Mesh,
    axis: str | None = None,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path | None = None,
) -> tvm.transform.Pass:
    """The pass that turns a model into what each device of `mesh` runs. ::

        tvm.relax.get_pipeline("axe", mesh=axe.Mesh({"tp": 2}))(mod)["main"]

    What ``main`` takes is told by `tvm_axe.lower.lower`, whose module this is; `tvm_axe.compile` builds and runs it.

    Parameters
    ----------
    mesh, axis
        As `tvm_axe.relax.schedule_model` takes them.
    target, work_dir
        As `tvm_axe.compile` takes them. With a `work_dir`, kernels with a record there are as they were tuned, tile
        kernels among them; without, none is.

    Raises
    ------
    LayoutError
        If the mesh has no such axis, or has several and none is named.
    TuneError
        If `target` is none. The pass raises what `schedule_model` and
        `tvm_axe.lower.lower` do.
    """
    name, resolved = mesh_axis(mesh, axis), resolve_target(target, threads=cores_per_device(mesh))
    passes = [LOWER] if work_dir is None else [LOWER, APPLY_RECORDS, SCHEDULES, TILE_KERNELS]

    @tvm.transform.module_pass(opt_level=0, name="axe")
    def to_device(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return run(Work.of(schedule_model(mod, mesh, name), resolved, mesh, work_dir), passes).module

    return to_device
