"""What calls of a model with symbolic shapes decide: its sizes, and the memory for tensors that are counted in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tvm_axe.errors import InputError
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.relax.bounded import MOST_PLANNED
from tvm_axe.relax.device import DeviceFunction, Placed
from tvm_axe.relax.sizes import Extent, names_in, shape_at

__all__ = ["room_of", "sizes_of"]


def sizes_of(function: DeviceFunction, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the sizes of a call of a function on arrays of some shapes, by parameter; of shapes, what they are.

    Weights may be left out. That the shapes fit each other was looked at (`tvm_axe.executable.arguments.Sizes`).

    Raises
    ------
    InputError
        If the model says of what it computes that it has another shape than follows, or a size is above its bound; all
        that is wrong is listed.
    """
    found: dict[str, int] = {}
    wrong: list[str] = []
    for each in function.inputs:
        for extent, got in zip(each.shape, shapes.get(each.name, ())):
            if isinstance(extent, Extent) and extent.names == (extent.text,) and extent.text not in found:
                found[extent.text] = got
    for true, claimed, whose in function.checks:
        here, there = (shape_at(shape, found) for shape in (true, claimed))
        if here != there:
            wrong.append(f"{whose} has the shape {here}, and the model says that it is {there}")
    for name, most in function.most.items():
        if found.get(name, 0) > most:
            wrong.append(f"{name} is {found[name]}, and the model says that it is {most} at most (tir_var_upper_bound)")
    if wrong:
        raise InputError(f"{function.name}: {'; '.join(wrong)}")
    return found


def room_of(placed: Placed, slab: Sequence[int], most: Mapping[str, int]) -> int | None:
    """Return how many elements a tensor with slabs of a shape should have room for, None for just these.

    Parameters
    ----------
    placed : Placed
        Which one it is.
    slab : sequence of int
        The shape.
    most : mapping
        Upper bounds of sizes: where there is one of each that the shape depends on, memory for all sizes is taken, if
        that isn't more than a plan takes. Elsewhere it is a power of two, so that slabs of other sizes mostly find
        room where others were.
    """
    names = names_in(placed.shape)
    if not names:
        return None
    if all(name in most for name in names):
        largest = math.prod(shape_at(placed.slab, most))
        if largest * dtype_bits(placed.dtype) <= 8 * MOST_PLANNED:
            return max(1, math.prod(slab), largest)  # what is above its bound is said later
    return 1 << (math.prod(slab) - 1).bit_length() if math.prod(slab) > 1 else 1
