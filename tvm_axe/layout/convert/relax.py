"""Relax's distributed tensors: `tvm.relax.distributed` placements, "S[0], R", and device meshes.

>>> from tvm_axe.layout import Layout, Mesh
>>> mesh = Mesh({"dp": 2, "tp": 4})
>>> str(to_relax_placement(Layout.sharded((8, 16), mesh, {1: "tp"}), (8, 16), mesh))
'"R, S[1]"'
>>> print(from_relax_placement("S[0], S[0]", (8, 16), mesh))
S[(2, 4, 1, 16) : (1@dp, 1@tp, 16, 1)]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tvm_axe.errors import LayoutError
from tvm_axe.layout.convert.by_axis import Action, actions_of, check_even, layout_of
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh

_TERM = re.compile(r"\s*(?:R|S\[(?P<dim>[0-9]{1,9})\])\s*")
_WHOSE = "a Relax placement"


def to_relax_placement(layout: Layout, shape: Sequence[int], mesh: Mesh) -> Any:
    """Return the Relax placement of a tensor of `shape` with this layout; its text is its `str`.

    Law: ``from_relax_placement(to_relax_placement(layout, shape, mesh), shape, mesh)`` has the map of the layout.

    Returns
    -------
    tvm.relax.distributed.Placement

    Raises
    ------
    LayoutError
        If the layout is not in blocks, the blocks are unequal, a dimension is cut in another order than that of the
        mesh, or there is a sum to be taken, which Relax doesn't write.
    """
    from tvm.relax.distributed import Placement as RelaxPlacement

    actions = actions_of(layout, shape, mesh, _WHOSE)
    check_even(layout, shape, mesh, _WHOSE)
    for axis, action in zip(mesh.names, actions):
        if action == "partial":
            raise LayoutError(f"{_WHOSE} shards or replicates, and layout {layout} holds the terms of a sum on {axis}")
    return RelaxPlacement.from_text(", ".join("R" if action == "replica" else f"S[{action}]" for action in actions))


def from_relax_placement(placement: Any, shape: Sequence[int], mesh: Mesh) -> Layout:
    """Return the layout of a tensor of `shape` with a Relax placement.

    Law: a device holds the block that its coordinates on the axes that shard a dimension number, the first axis the
    major one, row-major; over the others there are replicas.

    Parameters
    ----------
    placement : tvm.relax.distributed.Placement or str
        One term for each mesh axis: ``S[dim]`` or ``R``.
    shape : Sequence[int]
        The tensor's shape.
    mesh : Mesh
        The devices.

    Raises
    ------
    LayoutError
        If the placement is malformed, is of another number of mesh axes, shards a dimension that the shape lacks, or
        into unequal blocks.
    """
    text = str(placement).strip('"')
    terms = [_TERM.fullmatch(term) for term in text.split(",")]
    actions: list[Action] = []
    for term, source in zip(terms, text.split(",")):
        if term is None:
            raise LayoutError(f'{_WHOSE} has terms such as "S[0], R", not {source!r} in {text!r}')
        actions.append(int(term["dim"]) if term["dim"] else "replica")
    layout = layout_of(actions, shape, mesh, _WHOSE)
    check_even(layout, shape, mesh, _WHOSE)
    return layout


def to_relax_mesh(mesh: Mesh) -> Any:
    """Return the device mesh of Relax with the same devices; the axes have no names there.

    Law: ``from_relax_mesh(to_relax_mesh(mesh), mesh.names) == mesh``.

    Returns
    -------
    tvm.relax.distributed.DeviceMesh
    """
    from tvm.ir import Range
    from tvm.relax.distributed import DeviceMesh

    return DeviceMesh(mesh.shape, Range(0, mesh.size) if mesh.is_row_major else list(mesh.order))


def from_relax_mesh(device_mesh: Any, names: Sequence[str]) -> Mesh:
    """Return the mesh with the devices of Relax's, and these names of axes.

    Parameters
    ----------
    device_mesh : tvm.relax.distributed.DeviceMesh
        Whose devices are all of 0, 1, 2, ..., in any order.
    names : Sequence[str]
        The name of each axis.

    Raises
    ------
    LayoutError
        If the mesh has another number of axes; or as `Mesh`.
    """
    shape = [int(size) for size in device_mesh.shape]
    if isinstance(names, str) or len(names) != len(shape) or len(set(names)) != len(names):
        raise LayoutError(f"names must be {len(shape)} different names of the axes of {device_mesh}, not {names!r}")
    return Mesh(dict(zip(names, shape)), [int(device) for device in device_mesh.device_ids])
