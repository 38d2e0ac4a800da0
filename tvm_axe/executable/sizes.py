"""What calls of a model with symbolic shapes decide: its sizes, and the memory for tensors that are counted in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvm_axe.collective import MeshTensor, Workers
from tvm_axe.errors import LowerError
from tvm_axe.executable.arguments import Input
from tvm_axe.relax.device import Argument, DeviceFunction, Placed
from tvm_axe.relax.sizes import Extent, names_in, shape_at

__all__ = ["counted", "fitted", "input_of", "sizes_of"]

_SPARE = 1.5
"""How much more memory than is needed is taken where a tensor has outgrown its own: it will again."""


def sizes_of(function: DeviceFunction, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the sizes of a call of a function on arrays of some shapes, by parameter; of shapes, what they are.

    Raises
    ------
    LowerError
        If the shapes don't fit each other, or a size is above its bound; all that is wrong is listed.
    """
    found: dict[str, int] = {}
    by: dict[str, str] = {}
    wrong: list[str] = []
    for each in function.inputs:
        for extent, got in zip(each.shape, shapes[each.name]):
            if isinstance(extent, Extent) and extent.names == (extent.text,) and extent.text not in found:
                found[extent.text], by[extent.text] = got, each.name
    for each in function.inputs:
        for dim, (extent, got) in enumerate(zip(each.shape, shapes[each.name])):
            if isinstance(extent, Extent) and all(name in found for name in extent.names) and (
                (wanted := extent.at(found)) != got
            ):  # fmt: skip
                said = ", ".join(f"{name} is {found[name]} as in {by[name]}" for name in extent.names)
                wrong.append(f"{each.name} has {got} in dimension {dim}, which is {extent} = {wanted} ({said})")
    for true, claimed, whose in function.checks:
        here, there = (shape_at(shape, found) for shape in (true, claimed))
        if here != there:
            wrong.append(f"{whose} has the shape {here}, and the model says that it is {there}")
    for name, most in function.most.items():
        if found.get(name, 0) > most:
            wrong.append(f"{name} is {found[name]}, and the model says that it is {most} at most (tir_var_upper_bound)")
    if wrong:
        raise LowerError(f"{function.name}: {'; '.join(wrong)}")
    return found


def input_of(argument: Argument) -> Input:
    """Return what a caller gives for an argument: an array; of a shape or a number, one of whole numbers."""
    if argument.kind == "shape":
        return Input(argument.name, (len(argument.shape),), argument.dtype)
    if argument.kind == "number":
        return Input(argument.name, (), argument.dtype)
    return Input(argument.name, tuple(n if isinstance(n, int) else str(n) for n in argument.shape), argument.dtype)


def counted(value: Any) -> Any:
    """Return whole numbers, alone or in a tuple, as an array; anything else as it is."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    whole = all(isinstance(each, int | np.integer) and not isinstance(each, bool) for each in numbers)
    return np.asarray(value, "int64") if whole else value


def fitted(
    tensor: MeshTensor | None, placed: Placed, slab: tuple[int, ...], most: Mapping[str, int], workers: Workers
) -> MeshTensor:
    """Return a tensor with slabs of a shape: the one that there is, if it has the room, or a new one.

    Parameters
    ----------
    tensor : MeshTensor or None
        The one that there is, which is freed if it is too small.
    placed : Placed
        Which one it is.
    slab : tuple[int, ...]
        The shape.
    most : mapping
        Upper bounds of sizes: where there is one of each that the shape depends on, memory is taken once for all.
    workers : Workers
        Where it lies.
    """
    needed = math.prod(slab)
    if tensor is not None and needed * np.dtype(placed.dtype).itemsize <= tensor.room:
        tensor.resize(slab)
        return tensor
    bounded = all(name in most for name in names_in(placed.shape))
    room = math.prod(shape_at(placed.slab, most)) if bounded else needed if tensor is None else round(needed * _SPARE)
    if tensor is not None:
        workers.free(tensor)
    made = workers.mesh_tensor((max(1, needed, room),), placed.dtype)
    made.resize(slab)
    return made
