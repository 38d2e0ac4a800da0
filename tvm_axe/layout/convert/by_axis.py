"""Placements as Relax and PyTorch write them: for each mesh axis, in the mesh's order, what it does to the tensor.

Where several axes cut one dimension, the earlier one is the major one. A mesh axis of one device does nothing, and is
written as a replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from tvm_axe.errors import LayoutError
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.placement import Placement
from tvm_axe.layout.shapes import check_shape

Action = int | Literal["replica", "partial"]
"""What a mesh axis does: cut this dimension, hold replicas, or hold the terms of a sum."""


def actions_of(layout: Layout, shape: Sequence[int], mesh: Mesh, whose: str) -> list[Action]:
    """Return what each axis of the mesh does, or raise LayoutError that calls the notation `whose`."""
    placement = Placement.of(layout, shape, mesh)
    actions: dict[str, Action] = dict.fromkeys(mesh.names, "replica")
    actions.update(dict.fromkeys(placement.partial, "partial"))
    for dim, cut in enumerate(placement.cuts):
        in_order = tuple(axis for axis in mesh.names if axis in cut)
        if cut != in_order:
            raise LayoutError(
                f"{whose} cuts a dimension over mesh axes in the mesh's order, and layout {layout} cuts "
                f"dimension {dim} over {', '.join(cut)}; on a mesh with axes in that order it could be written"
            )
        actions.update(dict.fromkeys(cut, dim))
    return [actions[axis] for axis in mesh.names]


def layout_of(actions: Sequence[Action], shape: Sequence[int], mesh: Mesh, whose: str) -> Layout:
    """Return the layout in which each axis of the mesh does what `actions` says."""
    shape = check_shape(shape)
    if len(actions) != len(mesh.names):
        raise LayoutError(f"{whose} needs one placement for each axis of mesh {mesh}, not {len(actions)}")
    cuts: list[tuple[str, ...]] = [()] * len(shape)
    partial = []
    for axis, action in zip(mesh.names, actions):
        if isinstance(action, int):
            dim = action + len(shape) if action < 0 else action
            if dim not in range(len(shape)):
                raise LayoutError(f"{whose} shards dimension {action}, and shape {shape} has {len(shape)}")
            cuts[dim] += (axis,) if mesh[axis] > 1 else ()
        elif action == "partial" and mesh[axis] > 1:
            partial.append(axis)
    return Placement(tuple(cuts), frozenset(partial)).layout(shape, mesh)


def check_even(layout: Layout, shape: Sequence[int], mesh: Mesh, whose: str) -> None:
    """Raise LayoutError unless the blocks of a layout divide the shape."""
    placement = Placement.of(layout, shape, mesh)
    for dim, (extent, cut) in enumerate(zip(shape, placement.cuts)):
        blocks = math.prod(mesh[axis] for axis in cut)
        if extent % blocks:
            raise LayoutError(f"{whose} has equal shards, and {blocks} don't divide dimension {dim} of extent {extent}")
