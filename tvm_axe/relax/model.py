"""schedule_model: a Relax model as one program, scheduled for a mesh without anyone writing a schedule.

Each pair of matmuls (`pairs`) is sharded, the first by columns and the second by rows, which leaves an all-reduce; with
the pointwise epilogue after it (bias, activation, residual) that becomes the best of these forms whose rules hold:

1. the fused kernel: reduce-scatter, the epilogue on slices, all-gather in one kernel on mesh tensors;
2. the same as stages, where it can't be one kernel;
3. the all-reduce, where something follows that isn't pointwise, as a norm or the next matmul.

What is in no pair (a matmul alone, attention) every device computes whole; ``Executable.show()`` says what was done.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_axe.analysis.patterns import is_pointwise
from tvm_axe.errors import LayoutError, ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.relax.merging import merge
from tvm_axe.relax.pairs import Pair, find_pairs
from tvm_axe.schedule import Schedule, query
from tvm_axe.schedule.inline import inline_pointwise


def schedule_model(mod: tvm.IRModule, mesh: Mesh, axis: str | None = None) -> tirx.PrimFunc:
    """One function over whole tensors out of a Relax model, scheduled for `mesh`.

    Parameters
    ----------
    mod : IRModule
        A module with one Relax function, such as ``relax.frontend.nn`` exports: straight-line code over tensors of
        constant shapes.
    mesh : Mesh
        The devices.
    axis : str, optional
        The mesh axis that shares the weights; it may be left out of a mesh with one.

    Returns
    -------
    func : PrimFunc
        Takes the model's parameters in their order, then its results. Compiled with its annotations ignored it is the
        model on one device; `tvm_axe.lower.lower` or `tvm_axe.compile` make it the model on the mesh.

    Raises
    ------
    LowerError
        If the model cannot be one function: see `tvm_axe.relax.merge`.
    LayoutError
        If the mesh has no such axis, or has several and none is named.
    """
    axis = mesh_axis(mesh, axis)
    sch = Schedule(tvm.IRModule({"main": merge(mod)}), mesh=mesh)
    inline_pointwise(sch)
    for pair in find_pairs(sch):
        sch = _scheduled(sch, pair, axis)
    return sch.mod["main"]


def mesh_axis(mesh: Mesh, axis: str | None) -> str:
    """`axis`, or the only axis of `mesh`; a LayoutError where there is no such one."""
    if axis is None and len(mesh.names) > 1:
        raise LayoutError(
            f"axis: mesh {mesh} has {len(mesh.names)} axes; name the one that shares the weights: "
            f'axis="{mesh.names[-1]}"'
        )
    name = mesh.names[0] if axis is None else axis
    mesh.axis_size(name)  # an error where the mesh lacks it
    return name


def _scheduled(sch: Schedule, pair: Pair, axis: str) -> Schedule:
    """`sch` with `pair` in the first form whose rules hold; as it is where none does (more devices than columns)."""
    for form in (_fused, _sliced, _reduced):
        attempt = sch.copy()
        try:
            form(attempt, pair, axis)
        except ScheduleError:
            continue
        return attempt
    return sch


def _reduced(sch: Schedule, pair: Pair, axis: str) -> SBlockRV:
    """Shard the pair; returns the all-reduce."""
    for name, position in pair.columns.items():
        block = sch.get_sblock(name)
        device, _ = sch.shard(_loop(sch, block, position), axis, block)
        sch.reorder(device, *(loop for loop in sch.get_loops(block) if not sch.get(loop).same_as(sch.get(device))))
    rows = sch.get_sblock(pair.rows)
    _, reduce = sch.shard(_loop(sch, rows, pair.reduction), axis, rows)
    return reduce


def _sliced(sch: Schedule, pair: Pair, axis: str) -> list[SBlockRV]:
    """Reduce-scatter, the epilogue on slices, all-gather; returns these stages."""
    reduce = _reduced(sch, pair, axis)
    epilogue = sch.get_consumers(reduce)
    # A norm or a matmul of rows would be valid on slices, but is no part of a kernel that waits for the network.
    if not all(is_pointwise(sch.get(block)) for block in epilogue):
        names = ", ".join(query.name_of(sch, block) for block in epilogue)
        raise ScheduleError(f"block {pair.rows!r}: what reads it ({names}) is not pointwise")
    # Slices of an outer dimension are contiguous; every device should have one.
    extents = [int(extent) for extent in sch.get(reduce).body.buffer.shape]
    dim = next((dim for dim, extent in enumerate(extents) if extent >= sch.mesh.axis_size(axis)), len(extents) - 1)
    scatter, gather = sch.split_collective(reduce, dim)
    return [scatter, *epilogue, *sch.reorder_collective(gather, epilogue)]


def _fused(sch: Schedule, pair: Pair, axis: str) -> None:
    sch.fuse_collective(_sliced(sch, pair, axis))


def _loop(sch: Schedule, block: SBlockRV, position: int) -> LoopRV:
    loop = query.loop_of(sch, block, sch.get(block).iter_vars[position].var)
    assert loop is not None  # `find_pairs` takes iterators with a loop of their own only
    return loop
