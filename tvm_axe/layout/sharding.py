"""Block shardings: layouts that cut dimensions into equal blocks over mesh axes, and how to recognise them.

A block sharding of a shape gives a dimension of extent e over mesh axes of n devices together to them in order, the
first axis the major one, ceil(e / n) elements each; every device keeps its blocks row-major in linear memory, and mesh
axes that cut no dimension hold replicas. Where n doesn't divide e, the layout's domain is the shape padded to
n * ceil(e / n), and the last devices hold less, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, check_int, is_mesh_axis
from tvm_axe.layout.iters import Iter, merge_replica, merge_shard
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.shapes import check_shape as check_shape
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.layout.text import format_layout

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout


_TOO_MANY = "D has more mesh axes than the shape has dimensions, and each cuts one of its own"

Cuts = tuple[tuple[str, ...], ...]
"""For each dimension of a shape the mesh axes that cut it, the major one first."""


def block_shape(shape: Sequence[int], mesh: Mesh, cuts: Cuts) -> tuple[int, ...]:
    """Return the shape of one device's block, in elements: ceil(extent / devices) in each dimension."""
    return tuple(-(-extent // math.prod(mesh[axis] for axis in cut)) for extent, cut in zip(shape, cuts))


def block_numbers(mesh: Mesh, cuts: Cuts, device: int) -> tuple[int, ...]:
    """Return the number of the block that `device` holds in each dimension."""
    coords = mesh.coords(device)
    numbers = []
    for cut in cuts:
        number = 0
        for axis in cut:
            number = number * mesh[axis] + coords[axis]
        numbers.append(number)
    return tuple(numbers)


def block_region(shape: Sequence[int], mesh: Mesh, cuts: Cuts, device: int) -> tuple[slice, ...]:
    """Return the part of a tensor of `shape` that `device` holds: one slice a dimension, empty for padding alone."""
    starts = zip(shape, block_shape(shape, mesh, cuts), block_numbers(mesh, cuts, device))
    return tuple(slice(min(extent, number * size), min(extent, (number + 1) * size)) for extent, size, number in starts)


def checked_cuts(shape: Sequence[int], mesh: Mesh, dims: Mapping[int, str | tuple[str, ...]]) -> Cuts:
    """Return the cuts that `dims` says, an axis or several for some dimensions; see `Layout.sharded`.

    Raises
    ------
    LayoutError
        If a dimension is out of range, a mesh axis unknown, or a mesh axis cuts twice.
    """
    if not isinstance(dims, Mapping):
        raise LayoutError(f'dims must be a mapping from dimension to mesh axis, such as {{0: "tp"}}, not {dims!r}')
    cuts: list[tuple[str, ...]] = [()] * len(shape)
    named: list[str] = []
    for dim, axes in dims.items():
        if check_int("a dimension in dims", dim) not in range(len(shape)):
            raise LayoutError(f"dims: dimension {dim} is not one of shape {shape}, which has {len(shape)}")
        cuts[dim] = axes if isinstance(axes, tuple) else (axes,)
        for axis in cuts[dim]:
            mesh.axis_size(axis)
        named += cuts[dim]
    for axis in named:
        if named.count(axis) > 1:
            raise LayoutError(f"dims: mesh axis {axis!r} can cut one dimension only, not each of {dict(dims)}")
    return tuple(cuts)


def block_iters(
    shape: Sequence[int], mesh: Mesh, cuts: Cuts, partial: Sequence[str] = ()
) -> tuple[tuple[Iter, ...], tuple[Iter, ...]]:
    """Return D and R of the block sharding of `shape` over `cuts`, with terms of a sum over `partial` in the lead."""
    local = block_shape(shape, mesh, cuts)
    shard = [Iter(mesh[axis], 1, axis) for axis in partial if mesh[axis] > 1]
    for cut, extent, stride in zip(cuts, local, dense_strides(local)):
        shard += (Iter(mesh[axis], 1, axis) for axis in cut if mesh[axis] > 1)
        shard.append(Iter(extent, stride, LINEAR_MEMORY))
    used = {*partial, *(axis for cut in cuts for axis in cut)}
    replica = tuple(Iter(size, 1, name) for name, size in mesh.axes.items() if size > 1 and name not in used)
    return tuple(shard), replica


def find_cuts(layout: Layout, shape: Sequence[int], mesh: Mesh) -> Cuts:
    """Return the cuts for which the block sharding of `shape` has the map of `layout`; see Layout.cuts."""
    shape = check_shape(shape)
    check_mesh(layout, mesh)
    canonical = layout.canonicalize()
    cutting = list(dict.fromkeys(it.axis for it in canonical.D if is_mesh_axis(it.axis)))
    # Axes come in the order of the dimensions; those that cut one each are the plainer reading.
    where = sorted(combinations_with_replacement(range(len(shape)), len(cutting)), key=lambda dims: -len(set(dims)))
    candidates = [
        tuple(tuple(axis for axis, at in zip(cutting, dims) if at == dim) for dim in range(len(shape)))
        for dims in where
    ]
    for cuts in candidates:
        shard, replica = block_iters(shape, mesh, cuts)
        if (merge_shard(shard), merge_replica(replica)[0]) == (canonical.D, canonical.R) and not canonical.O:
            return cuts
    start = f"layout {layout} is not a block sharding of shape {shape} on mesh {mesh}: "
    raise LayoutError(start + _why_not_blocks(canonical, shape, mesh, candidates))


def find_blocks(layout: Layout, shape: Sequence[int], mesh: Mesh) -> dict[int, str]:
    """Return the one mesh axis that cuts each cut dimension; see Layout.sharding."""
    cuts = find_cuts(layout, shape, mesh)
    for dim, cut in enumerate(cuts):
        if len(cut) > 1:
            start = f"layout {layout} is not a block sharding of shape {tuple(shape)} on mesh {mesh}: "
            if sum(map(len, cuts)) > len(shape):
                raise LayoutError(f"{start}{_TOO_MANY}; see `cuts` for several")
            raise LayoutError(f"{start}mesh axes {', '.join(cut)} cut dimension {dim} together; see `cuts` for several")
    return {dim: cut[0] for dim, cut in enumerate(cuts) if cut}


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


def _why_not_blocks(layout: Layout, shape: tuple[int, ...], mesh: Mesh, candidates: list[Cuts]) -> str:
    """Return the first rule of block shardings that `layout`, in canonical form, breaks."""
    broken = broken_rule(layout, mesh)
    if broken is not None:
        return broken
    if not candidates:
        return _TOO_MANY
    sizes = {math.prod(it.extent for it in block_iters(shape, mesh, cuts)[0]) for cuts in candidates}
    if layout.size() not in sizes:
        padded = " or ".join(map(str, sorted(sizes)))
        return f"its extents multiply to {layout.size()}, and the shape padded to whole blocks has {padded} elements"
    valid = " or ".join(format_layout(*block_iters(shape, mesh, cuts), {}) for cuts in candidates[:4])
    return f"blocks are contiguous in their dimension and row-major on the device, such as {valid}"
