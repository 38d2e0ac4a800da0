"""PyTorch's distributed tensors: placements of DTensor, and its DeviceMesh. Nothing of it is imported to read them.

>>> from collections import namedtuple
>>> from tvm_axe.layout import Mesh
>>> Shard, Replicate = namedtuple("Shard", "dim"), namedtuple("Replicate", "")  # as torch.distributed.tensor has them
>>> mesh = Mesh({"dp": 2, "tp": 4})
>>> print(from_torch_placements((Replicate(), Shard(0)), (10, 16), mesh))
S[(4, 3, 16) : (1@tp, 16, 1)] + R[2 : 1@dp]

Source: PyTorch, ``torch.distributed.tensor.placement_types`` and ``torch.distributed.device_mesh``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_axe.errors import LayoutError
from tvm_axe.layout.convert.by_axis import Action, actions_of, layout_of
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh

_WHOSE = "a DTensor"


def to_torch_placements(layout: Layout, shape: Sequence[int], mesh: Mesh) -> tuple[Any, ...]:
    """Return the DTensor placements of a tensor of `shape` with this layout, one for each axis of the mesh.

    Law: ``from_torch_placements(to_torch_placements(layout, shape, mesh), shape, mesh)`` has the map of the layout, up
    to the order of the terms of a sum.

    Returns
    -------
    tuple[torch.distributed.tensor.placement_types.Placement, ...]
        ``Shard(dim)``, ``Replicate()`` or ``Partial("sum")``.

    Raises
    ------
    LayoutError
        If the layout is not in blocks, or cuts a dimension over mesh axes in another order than that of the mesh.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    def placement(action: Action) -> Any:
        if isinstance(action, int):
            return Shard(action)
        return Partial("sum") if action == "partial" else Replicate()

    return tuple(placement(action) for action in actions_of(layout, shape, mesh, _WHOSE))


def from_torch_placements(placements: Sequence[Any], shape: Sequence[int], mesh: Mesh) -> Layout:
    """Return the layout of a tensor of `shape` with DTensor placements; a device's block lies row-major.

    Law: a device holds the elements that the rank of its number holds. The terms of a sum are leading dimensions of the
    layout, as `Layout.partial` has them.

    Parameters
    ----------
    placements : Sequence
        An object for each axis of the mesh, of a class called Shard, with ``dim``, Replicate, or Partial, with
        ``reduce_op``.
    shape : Sequence[int]
        The tensor's shape.
    mesh : Mesh
        The devices.

    Raises
    ------
    LayoutError
        If there are more or fewer placements than axes, one is of another class (``_StridedShard`` has blocks in
        another order) or reduces other than by a sum, a dimension is not there, or several axes cut a dimension that
        they don't divide (PyTorch cuts again what is left by the first; the blocks are not equal).
    """
    if not isinstance(placements, Sequence):
        raise LayoutError(f"placements must be a sequence of one for each mesh axis, not {placements!r}")
    return layout_of([_action(placement) for placement in placements], shape, mesh, _WHOSE)


def _action(placement: Any) -> Action:
    kind = type(placement).__name__
    if kind == "Shard":
        return int(placement.dim)
    if kind == "Replicate":
        return "replica"
    if kind == "Partial":
        if placement.reduce_op != "sum":
            raise LayoutError(f"the devices of a layout hold terms of a sum, and {placement!r} is no sum")
        return "partial"
    raise LayoutError(f"a placement must be Shard(dim), Replicate() or Partial(), not {placement!r}")


def to_torch_mesh(mesh: Mesh, device_type: str = "cpu") -> Any:
    """Return PyTorch's device mesh with the same axes: rank d is device d. Its process groups must have been set up.

    Law: ``from_torch_mesh(to_torch_mesh(mesh)) == mesh``.

    Returns
    -------
    torch.distributed.device_mesh.DeviceMesh
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if mesh.is_row_major:
        return init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.names)
    return DeviceMesh(device_type, torch.tensor(mesh.order).reshape(mesh.shape), mesh_dim_names=mesh.names)


def from_torch_mesh(device_mesh: Any) -> Mesh:
    """Return the mesh with the axes of PyTorch's.

    Parameters
    ----------
    device_mesh : torch.distributed.device_mesh.DeviceMesh
        A mesh with ``mesh``, the ranks by their place, all of 0, 1, 2, ..., and ``mesh_dim_names``.

    Raises
    ------
    LayoutError
        If its axes have no names; or as `Mesh`.
    """
    names = device_mesh.mesh_dim_names
    if names is None:
        raise LayoutError(f"the axes of a Mesh have names, and {device_mesh} has none: give mesh_dim_names")
    ranks = device_mesh.mesh
    return Mesh(dict(zip(names, (int(size) for size in ranks.shape))), ranks.flatten().tolist())
