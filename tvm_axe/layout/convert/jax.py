"""JAX's shardings: PartitionSpec, which says for each dimension over which mesh axes it is cut, and Mesh.

>>> from tvm_axe.layout import Mesh
>>> mesh = Mesh({"dp": 2, "tp": 4})
>>> layout = from_partition_spec((("tp", "dp"), None), (8, 16), mesh)
>>> print(layout)
S[(4, 2, 1, 16) : (1@tp, 1@dp, 16, 1)]
>>> to_partition_spec(layout, (8, 16), mesh)
(('tp', 'dp'), None)

Source: JAX, ``jax.sharding.PartitionSpec`` and ``jax.sharding.NamedSharding``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_axe.errors import LayoutError
from tvm_axe.layout.convert.by_axis import check_even
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.placement import Placement
from tvm_axe.layout.shapes import check_shape

Entry = str | tuple[str, ...] | None
"""What cuts one dimension: a mesh axis, several, the first the major one, or none."""

_WHOSE = "a PartitionSpec"


def to_partition_spec(layout: Layout, shape: Sequence[int], mesh: Mesh) -> tuple[Entry, ...]:
    """Return the entries of the PartitionSpec of a tensor of `shape`, ``jax.sharding.PartitionSpec(*entries)``.

    Law: ``from_partition_spec(to_partition_spec(layout, shape, mesh), shape, mesh)`` has the map of the layout.

    Raises
    ------
    LayoutError
        If the layout is not in blocks, the blocks are unequal, or there is a sum to be taken, for which the entries,
        one for each dimension of the tensor, have no place.
    """
    placement = Placement.of(layout, shape, mesh)
    check_even(layout, shape, mesh, _WHOSE)
    if placement.partial:
        axes = ", ".join(sorted(placement.partial))
        raise LayoutError(f"{_WHOSE} has an entry for each dimension, and layout {layout} holds a sum over {axes}")
    return tuple(cut if len(cut) > 1 else cut[0] if cut else None for cut in placement.cuts)


def from_partition_spec(spec: Sequence[Any], shape: Sequence[int], mesh: Mesh) -> Layout:
    """Return the layout of a tensor of `shape` with a PartitionSpec; a device's block lies row-major.

    Law: a device holds the elements that ``NamedSharding(mesh, spec)`` gives the device at its position in JAX's mesh.

    Parameters
    ----------
    spec : jax.sharding.PartitionSpec or Sequence
        The name of a mesh axis for each dimension, a tuple of names, or None; dimensions at the end may be left out.
    shape : Sequence[int]
        The tensor's shape.
    mesh : Mesh
        The devices.

    Raises
    ------
    LayoutError
        If there are more entries than dimensions, one is something else (such as UNCONSTRAINED, which leaves the choice
        to the compiler), an axis is unknown or named twice, blocks are unequal, or axes are unreduced.
    """
    shape = check_shape(shape)
    if isinstance(spec, str) or not hasattr(spec, "__iter__") or not hasattr(spec, "__len__"):
        raise LayoutError(f'spec must be a PartitionSpec or a tuple such as ("tp", None), not {spec!r}')
    unreduced = getattr(spec, "unreduced", ())
    if unreduced:
        raise LayoutError(f"spec {spec} has unreduced axes {', '.join(sorted(unreduced))}, which no entry states")
    if len(spec) > len(shape):
        raise LayoutError(f"spec {spec} has {len(spec)} entries, and shape {shape} has {len(shape)} dimensions")
    cuts = [_axes(entry, mesh) for entry in spec]
    layout = Placement((*cuts, *[()] * (len(shape) - len(cuts)))).layout(shape, mesh)
    check_even(layout, shape, mesh, _WHOSE)
    return layout


def _axes(entry: Any, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes of an entry, those of one device left out."""
    if isinstance(entry, str):
        entry = (entry,)
    if entry is not None and not (isinstance(entry, tuple) and all(isinstance(axis, str) for axis in entry)):
        raise LayoutError(f"an entry of a PartitionSpec must be an axis, a tuple of them or None, not {entry!r}")
    return tuple(axis for axis in entry or () if mesh[axis] > 1)


def to_jax_mesh(mesh: Mesh) -> Any:
    """Return JAX's mesh with the same axes, of the first of its devices, in the mesh's order.

    Law: ``from_jax_mesh(to_jax_mesh(mesh)) == mesh``.

    Returns
    -------
    jax.sharding.Mesh

    Raises
    ------
    LayoutError
        If JAX has fewer devices than the mesh.
    """
    import jax
    import numpy as np

    devices = jax.devices()
    if len(devices) < mesh.size:
        raise LayoutError(f"mesh {mesh} has {mesh.size} devices, and JAX has {len(devices)}")
    return jax.sharding.Mesh(np.array([devices[number] for number in mesh.order]).reshape(mesh.shape), mesh.names)


def from_jax_mesh(mesh: Any) -> Mesh:
    """Return the mesh with the axes of JAX's, and its order of devices where their ids are 0, 1, 2, ...

    Of other devices, or of an abstract mesh, device d is the one at position d, row-major.

    Parameters
    ----------
    mesh : jax.sharding.Mesh or jax.sharding.AbstractMesh
        A mesh with ``shape``, a mapping from the names of the axes to their sizes.

    Raises
    ------
    LayoutError
        If `Mesh` refuses the axes.
    """
    axes = {name: int(size) for name, size in dict(mesh.shape).items()}
    try:
        ids = [int(device.id) for device in mesh.devices.flat]
    except (AttributeError, ValueError):  # an abstract mesh has no devices, and raises one or the other
        ids = []
    return Mesh(axes, ids if sorted(ids) == list(range(len(ids))) and ids else None)
