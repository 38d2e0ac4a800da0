"""Tensors of a mesh in tile programs: one tensor, a slab on each device, that all devices address.

Dimension 0 of a `mesh_tensor` is the device, along one axis of the mesh; where the next device's slab begins is the
memory's affair. `tvm_axe.tile.kernel` is told which scalar parameter is the coordinate of the device that runs. A
program that gives its row to all devices and sums what it got:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def summed(x: T.Buffer((8, 64), "float32"), me: T.int32,
...            inbox: tile.mesh_tensor((2, 2, 8, 64), "float32"),
...            flags: tile.mesh_tensor((2, 2, 8), "int32"), y: T.Buffer((8, 64), "float32")):
...     with tile.kernel(8, device=me) as i:
...         part = tile.fragment((1, 64), "float32")
...         total = tile.fragment((1, 64), "float32")
...         tile.copy(x[i, 0], part)
...         for d in range(2):
...             tile.copy(part, inbox[d, me, i, 0])
...         tile.signal(flags[0:2, me, i])
...         tile.wait(flags[me, 0:2, i], reset=True)
...         tile.fill(total, 0)
...         for d in range(2):
...             tile.copy(inbox[me, d, i, 0], part)
...             with tile.parallel(1, 64) as (r, c):
...                 total[r, c] = total[r, c] + part[r, c]
...         tile.copy(total, y[i, 0])
>>> tile.read(summed).devices
2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.tile.regions import Tile, constant, first_strided


def mesh_tensor(shape: Sequence[int], dtype: str) -> Any:
    """The type of a parameter that is a tensor of the mesh: dimension 0 is the device, the others are its slab's.

    Slabs are dense, and lie a distance apart that is a variable here: what the caller's tensor has, or, on a GPU, whole
    pages of its memory.

    Parameters
    ----------
    shape : sequence of int
        How many devices there are, and the shape of a slab; all are positive constants.
    dtype : str
        The type of an element.

    Raises
    ------
    TileError
        The shape isn't positive constants, or is of one dimension.
    """
    extents = [constant(extent) for extent in shape]
    if len(extents) < 2 or not all(isinstance(extent, int) and extent > 0 for extent in extents):
        raise TileError(
            f"mesh_tensor: shape {[str(extent) for extent in extents]}; valid are the number of devices and a slab's "
            "extents, two or more positive constants"
        )
    return T.Buffer(
        [T.int64(e) for e in extents],
        dtype,
        strides=[T.int64(), *(T.int64(step) for step in dense_strides(extents)[1:])],
    )


def is_mesh_tensor(buffer: tirx.Buffer) -> bool:
    """Whether a parameter is what `mesh_tensor` makes: dense slabs a variable distance apart, all counted in int64."""
    if len(buffer.strides) < 2 or not isinstance(buffer.strides[0], tirx.Var):
        return False
    shape, steps = list(map(constant, buffer.shape)), list(map(constant, buffer.strides[1:]))
    if {str(each.ty) for each in (*buffer.shape, *buffer.strides)} != {"int64"} or _is_laid_out(buffer):
        return False
    return all(isinstance(extent, int) for extent in shape) and steps == list(dense_strides(shape)[1:])


def _is_laid_out(buffer: tirx.Buffer) -> bool:
    """Whether the layout has the distance, too, as of a tensor with strides (`tvm_axe.tile.strides.laid_out`)."""
    found: list[tirx.Var] = []
    if buffer.layout is not None:
        tvm_ffi.structural_walk(buffer.layout, (tirx.Var, found.append))
    return bool(found)


def in_pages(func: tirx.PrimFunc, page: int, apart: int = 1) -> tirx.PrimFunc:
    """Return a lowered function whose mesh tensors' slabs are whole pages of `page` bytes, as a constant.

    A device's slab is `apart` slabs behind the one before. So a GPU's index arithmetic and tensor maps have the
    distance; a tensor with another one is refused when given.
    """
    known: dict[tirx.Var, tirx.Var] = {}
    for param in func.params:
        if tirx.is_buffer_var(param) and is_mesh_tensor(param):
            shape, item = [int(extent) for extent in param.shape], tvm_ffi.dtype(str(param.dtype)).bits // 8
            steps = dense_strides(shape)
            distance = apart * (-(-steps[0] * item // page) * page // item)
            known[param] = _tvm.strided_buffer(shape, str(param.dtype), str(param.name), (distance, *steps[1:]))
    if not known:
        return func
    body = _tvm.structural_map(func.body, (tirx.Var, lambda var: known.get(var, var)))
    params = [known.get(param, param) for param in func.params]
    return tirx.PrimFunc(params, body, func.ret_type).with_attrs(dict(func.attrs.items()))


def check_device(device: tirx.Var | None, params: Sequence[Tile], scalars: Sequence[tirx.Var]) -> None:
    """Refuse a coordinate without mesh tensors, mesh tensors without one, and those of different numbers of devices."""
    tensors = [tile for tile in params if tile.is_mesh]
    if device is None:
        if tensors:
            raise TileError(
                f"{tensors[0]}: a mesh tensor, and the kernel isn't told which device runs; valid is "
                "tile.kernel(..., device=me) with an int32 parameter `me`; a tensor with strides has extents of int32"
            )
        return
    if not any(device.same_as(scalar) for scalar in scalars) or str(device.ty) != "int32":
        raise TileError(f"kernel: device is {device}; valid is a scalar parameter of the function, me: T.int32")
    if not tensors:
        raise TileError(
            f"kernel: device={device.name}, and no parameter is a mesh tensor, which says how many devices there are; "
            "valid is tile.mesh_tensor((devices, ...), dtype), or a kernel without `device`"
        )
    strided = first_strided(params)
    if strided is not None:
        raise TileError(
            f"{strided}: a tensor with strides in a program of a mesh, whose workers hold dense ones; valid is a dense "
            "tensor, in row-major order, of which the program indexes a part"
        )
    other = next((tile for tile in tensors if tile.shape[0] != tensors[0].shape[0]), None)
    if other is not None:
        raise TileError(
            f"{other}: a mesh tensor of {other.shape[0]} devices, and {tensors[0]} of {tensors[0].shape[0]}; valid are "
            "mesh tensors along one axis of the mesh"
        )
