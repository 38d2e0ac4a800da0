"""axe.redistribute: a mesh tensor in another layout, by the cheapest plan that is known."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import tvm
from tvm import relax

from tvm_axe.collective import ALL, SLAB, Argument, Coord, LoadedProgram, MeshTensor, Workers
from tvm_axe.errors import LowerError
from tvm_axe.layout import Layout, Link, plan_redistribution
from tvm_axe.layout.collectives import Collective
from tvm_axe.layout.holding import Holding
from tvm_axe.lower.exchange import Exchange
from tvm_axe.lower.views import view_shape
from tvm_axe.machines.target import resolve_target

if TYPE_CHECKING:
    from tvm_axe.layout import Plan
    from tvm_axe.layout.redistributing import Step

__all__ = ["redistribute"]

_ROOM = 256  # programs of exchanges that are kept on a set of workers


def redistribute(tensor: MeshTensor, layout: Layout, link: Link | None = None) -> MeshTensor:
    """Return the same tensor in another layout.

    The plan of `tvm_axe.layout.plan_redistribution` is carried out: its collectives by the workers' own, all else by a
    kernel that indexes the peers' slabs (`tvm_axe.lower.exchange`). What lies between is freed.

    Parameters
    ----------
    tensor : MeshTensor
        Made with a layout: ``workers.mesh_tensor(shape, dtype, layout=...)``. It stays as it is.
    layout : Layout
        Any layout that the mesh can hold: blocks, cyclic blocks, another order of devices or of memory, replicas over a
        part of the mesh, one device, terms of a sum (leading iters on mesh axes beyond the shape).
    link : Link, optional
        How fast the mesh is, for the choice of the plan.

    Returns
    -------
    moved : MeshTensor
        A new tensor. Free it with ``workers.free``, as any other.

    Raises
    ------
    InputError
        If the tensor was made of slabs alone.
    LayoutError
        If the layout doesn't fit the tensor's shape or the mesh.
    LowerError
        If the plan needs to index slabs that lie on several machines.
    WorkerError
        If a worker failed, or the workers have gone.

    Examples
    --------
    >>> import numpy as np, tvm_axe as axe
    >>> mesh = axe.Mesh({"tp": 2})
    >>> with axe.launch(mesh, engine="threads") as workers:
    ...     rows = workers.mesh_tensor((4, 6), "float32", layout=axe.Layout.sharded((4, 6), mesh, {0: "tp"}))
    ...     rows.scatter(np.arange(24, dtype="float32").reshape(4, 6))
    ...     columns = axe.redistribute(rows, axe.Layout.sharded((4, 6), mesh, {1: "tp"}))
    ...     columns.slab(1).tolist()
    [[3.0, 4.0, 5.0], [9.0, 10.0, 11.0], [15.0, 16.0, 17.0], [21.0, 22.0, 23.0]]
    """
    workers, plan = tensor.workers, _planned(tensor, layout, link)
    at = tensor
    for step in plan.steps:
        before = at
        at = workers.mesh_tensor(
            tensor.whole, tensor.dtype, layout=layout if step is plan.steps[-1] else _held(step, tensor)
        )
        axis = step.axes[0] if step.axes else ""
        if step.kind == Collective.ALL_GATHER.operation and step.gathered is not None:
            workers.all_gather(before, at, axis, step.gathered)
        elif step.kind == Collective.ALL_REDUCE.operation:
            workers.all_reduce(before, at, axis)
        elif step.kind == Collective.REDUCE_SCATTER.operation and step.cut is not None:
            workers.reduce_scatter(before, at, axis, step.cut)
        elif step.kind == Collective.ALL_TO_ALL.operation and step.gathered is not None and step.cut is not None:
            workers.all_to_all(before, at, axis, step.gathered, step.cut)
        else:
            _exchange(workers, before, at)
        if before is not tensor:
            workers.free(before)
    if at is tensor:
        at = workers.mesh_tensor(tensor.whole, tensor.dtype, layout=layout)
        _exchange(workers, tensor, at)
    return at


def _held(step: Step, tensor: MeshTensor) -> Holding:
    """What a step leaves: its placement says which dimension an axis cuts where the layout leaves that open."""
    assert step.after is not None  # an exchange is the last step
    return Holding.in_blocks(tensor.whole, tensor.workers.mesh, step.after.cuts, partial=step.after.partial)


def _planned(tensor: MeshTensor, layout: Layout, link: Link | None) -> Plan:
    return plan_redistribution(tensor.layout, layout, tensor.workers.mesh, tensor.dtype, tensor.whole, link)


_Key = tuple[Holding, Holding, str]
_programs: weakref.WeakKeyDictionary[Workers, dict[_Key, tuple[str, LoadedProgram]]] = weakref.WeakKeyDictionary()
"""The exchanges that workers have loaded, each with the view of the source that it takes."""


def _exchange(workers: Workers, source: MeshTensor, target: MeshTensor) -> None:
    """Run the kernel that takes what `target` is to hold out of the slabs of `source`."""
    assert source.holding is not None and target.holding is not None  # redistribute has asked for their layouts
    loaded = _programs.setdefault(workers, {})
    key = (source.holding, target.holding, source.dtype)
    if key not in loaded:
        exchange = Exchange(source.holding, target.holding)
        for axis in _axes_of(exchange.view, workers):
            if workers.is_apart(axis):
                raise LowerError(
                    f"redistribute: from {source.layout} to {target.layout} a kernel indexes the slabs of its peers "
                    f"over {axis}, where these devices don't see each other's memory; go over a layout in contiguous "
                    "blocks"
                )
        while len(loaded) >= _ROOM:
            workers.free(loaded.pop(next(iter(loaded)))[1])
        module = _module(source, target, exchange)
        loaded[key] = (exchange.view, workers.load(module, resolve_target(workers.target)))
    view, program = loaded[key]
    coordinates = [Coord(axis) for axis in workers.mesh.names]
    arguments: list[Argument] = [(source, view), (target, SLAB), *coordinates]
    workers.call(program, arguments)


def _axes_of(view: str, workers: Workers) -> tuple[str, ...]:
    """The mesh axes along which a view sees other devices' slabs."""
    return workers.mesh.names if view == ALL else () if view == SLAB else (view,)


def _module(source: MeshTensor, target: MeshTensor, exchange: Exchange) -> tvm.IRModule:
    """A module whose ``main`` takes the source's view, the target's slab and the device's coordinates."""
    mesh = source.workers.mesh
    names = ("source", "target")
    kernel = exchange.kernel(source.dtype, (source.shape, target.shape), names, source.workers.page)
    builder = relax.BlockBuilder()
    shapes = (view_shape(mesh, exchange.view, source.shape), target.shape)
    tensors = [relax.Var(name, relax.TensorType([*shape], source.dtype)) for name, shape in zip(names, shapes)]
    scalars = {axis: relax.Var(axis, tvm.ir.PrimType("int32")) for axis in mesh.names}
    asked = [scalars[str(param.name)] for param in kernel.params[2:]]
    with builder.function("main", [*tensors, *scalars.values()], pure=False):
        callee = builder.add_func(kernel.with_attr("global_symbol", "exchange"), "exchange")
        builder.emit(relax.Call(callee, [*tensors, *asked]))
        builder.emit_func_output(relax.Tuple([]))
    return builder.finalize()
