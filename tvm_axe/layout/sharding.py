"""Block shardings: layouts that cut dimensions into equal blocks over mesh axes, and how to recognise them.

A block sharding of a shape gives a dimension of extent e over a mesh axis of n devices to them in order, ceil(e / n)
elements each; every device keeps its blocks row-major in linear memory, and mesh axes that cut no dimension hold
replicas. Where n doesn't divide e, the layout's domain is the shape padded to n * ceil(e / n), and the last devices
hold less, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, check_int, is_mesh_axis
from tvm_axe.layout.iters import Iter, merge_replica, merge_shard
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.shapes import check_shape as check_shape
from tvm_axe.layout.text import format_layout

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout


def block_shape(shape: Sequence[int], mesh: Mesh, dims: Mapping[int, str]) -> tuple[int, ...]:
    """Return the shape of one device's block, in elements: ceil(extent / devices) on the dimensions in `dims`."""
    return tuple(-(-extent // (mesh[dims[dim]] if dim in dims else 1)) for dim, extent in enumerate(shape))


def block_iters(shape: Sequence[int], mesh: Mesh, dims: Mapping[int, str]) -> tuple[tuple[Iter, ...], tuple[Iter, ...]]:
    """Return D and R of the block sharding of `shape` that cuts dimension d over mesh axis ``dims[d]``.

    Raises
    ------
    LayoutError
        If a dimension is out of range, a mesh axis unknown, or a mesh axis cuts two dimensions.
    """
    shape = check_shape(shape)
    if not isinstance(dims, Mapping):
        raise LayoutError(f'dims must be a mapping from dimension to mesh axis, such as {{0: "tp"}}, not {dims!r}')
    for dim, axis in dims.items():
        if check_int("a dimension in dims", dim) not in range(len(shape)):
            raise LayoutError(f"dims: dimension {dim} is not one of shape {shape}, which has {len(shape)}")
        mesh.axis_size(axis)
        if list(dims.values()).count(axis) > 1:
            raise LayoutError(f"dims: mesh axis {axis!r} can cut one dimension only, not each of {dict(dims)}")
    local = block_shape(shape, mesh, dims)
    shard: list[Iter] = []
    for dim, extent in enumerate(local):
        if dim in dims and mesh[dims[dim]] > 1:
            shard.append(Iter(mesh[dims[dim]], 1, dims[dim]))
        shard.append(Iter(extent, math.prod(local[dim + 1 :]), LINEAR_MEMORY))
    replica = tuple(Iter(size, 1, name) for name, size in mesh.axes.items() if size > 1 and name not in dims.values())
    return tuple(shard), replica


def find_blocks(layout: Layout, shape: Sequence[int], mesh: Mesh) -> dict[int, str]:
    """Return the `dims` for which the block sharding of `shape` has the map of `layout`; see Layout.sharding."""
    shape = check_shape(shape)
    check_mesh(layout, mesh)
    canonical = layout.canonicalize()
    cutting = list(dict.fromkeys(it.axis for it in canonical.D if is_mesh_axis(it.axis)))
    candidates = [dict(zip(dims, cutting)) for dims in permutations(range(len(shape)), len(cutting))]
    for dims in candidates:
        shard, replica = block_iters(shape, mesh, dims)
        if (merge_shard(shard), merge_replica(replica)[0]) == (canonical.D, canonical.R) and not canonical.O:
            return dict(sorted(dims.items()))
    start = f"layout {layout} is not a block sharding of shape {shape} on mesh {mesh}: "
    raise LayoutError(start + _why_not_blocks(canonical, shape, mesh, candidates))


def check_mesh(layout: Layout, mesh: Mesh) -> None:
    """Raise LayoutError if `layout` names a mesh axis that `mesh` lacks."""
    names = [it.axis for it in (*layout.D, *layout.R)] + list(layout.O)
    for name in names:
        if is_mesh_axis(name) and name not in mesh:
            raise LayoutError(f"layout {layout} names mesh axis {name!r}, and mesh {mesh} has {', '.join(mesh.names)}")


def broken_rule(layout: Layout, mesh: Mesh) -> str | None:
    """Return the first rule that all layouts in blocks keep and `layout`, in canonical form, breaks; None if none."""
    iters = (*layout.D, *layout.R)
    for it in iters:
        if it.axis != LINEAR_MEMORY and not is_mesh_axis(it.axis):
            return f"{it} is on axis {it.axis!r}, and only mesh axes and linear memory hold blocks"
    if layout.O:
        return f"it has the offset {dict(layout.O)}, and blocks start at 0 on every axis"
    for name, size in mesh.axes.items():
        spread = [it for it in iters if it.axis == name]
        if spread != ([Iter(size, 1, name)] if size > 1 else []):
            seen = ", ".join(map(str, spread)) or "nothing"
            return f"mesh axis {name!r} holds {seen}, and needs the one iter {size} : 1@{name} in D or in R"
    if any(it.axis == LINEAR_MEMORY for it in layout.R):
        return "it has replicas in linear memory, and a device holds a block once"
    return None


def _why_not_blocks(layout: Layout, shape: tuple[int, ...], mesh: Mesh, candidates: list[dict[int, str]]) -> str:
    """Return the first rule of block shardings that `layout`, in canonical form, breaks."""
    broken = broken_rule(layout, mesh)
    if broken is not None:
        return broken
    if not candidates:
        return "D has more mesh axes than the shape has dimensions, and each cuts one of its own"
    sizes = {math.prod(it.extent for it in block_iters(shape, mesh, dims)[0]) for dims in candidates}
    if layout.size() not in sizes:
        padded = " or ".join(map(str, sorted(sizes)))
        return f"its extents multiply to {layout.size()}, and the shape padded to whole blocks has {padded} elements"
    valid = " or ".join(format_layout(*block_iters(shape, mesh, dims), {}) for dims in candidates[:4])
    return f"blocks are contiguous in their dimension and row-major on the device, such as {valid}"
