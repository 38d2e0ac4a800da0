"""Kernels that ask which device they run on: what is measured and recorded of them is what the first device does.

A device's number decides which places of its peers' slabs a kernel touches, and not how many; a view of slabs that lie
pages apart is measured as one array. A schedule that was found so is put on the kernel as it is.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import all_blocks
from tvm_axe.analysis.expressions import substitute
from tvm_axe.lower.told import COORDINATES

__all__ = ["named_as", "on_first_device"]


def on_first_device(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function for the device of number 0, of dense arrays; the function itself, if it is that.

    What takes any other number, of which shapes or loops may be made, stays as it is.
    """
    numbers = [param for param in func.params if not tirx.is_buffer_var(param)]
    buffers = [param for param in func.params if tirx.is_buffer_var(param)]
    if not all(isinstance(extent, tirx.IntImm) for buffer in buffers for extent in buffer.shape):
        return func
    coordinates = [str(name) for name in (func.attrs or {}).get(COORDINATES, ())]
    if any(str(number.name) not in coordinates for number in numbers):
        return func
    changed: dict[tirx.Var, tirx.Expr] = {number: tirx.IntImm(str(number.ty), 0) for number in numbers}
    for buffer in buffers:
        if len(buffer.strides):
            changed[buffer] = tirx.decl_buffer(list(buffer.shape), buffer.dtype, buffer.name, layout=None)
    if not changed:
        return func
    params = [changed.get(param, param) for param in buffers]
    return tirx.PrimFunc(params, substitute(func.body, changed), func.ret_type, func.attrs)


def named_as(func: tirx.PrimFunc, other: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The function with the names of the blocks and buffers of another that does the same; None if they don't match."""
    own, wanted = all_blocks(func.body), all_blocks(other.body)
    names = {str(a.name_hint): str(b.name_hint) for a, b in zip(own, wanted)}
    if len(own) != len(wanted) or len(names) != len(own):
        return None
    mine, others = _buffers(func), _buffers(other)
    if len(mine) != len(others):
        return None
    renamed: dict[tirx.Var, tirx.Expr] = {
        a: tirx.decl_buffer(list(a.shape), a.dtype, b.name, strides=list(a.strides) or None, layout=None)
        for a, b in zip(mine, others)
    }

    def on_block(block: s_tir.SBlock) -> s_tir.SBlock:
        return _tvm.with_name(block, names[str(block.name_hint)])

    callbacks = [(s_tir.SBlock, on_block), (tirx.Var, lambda var: renamed.get(var, var))]
    body = _tvm.structural_map(func.body, callbacks)
    return tirx.PrimFunc([renamed.get(param, param) for param in func.params], body, func.ret_type, func.attrs)


def _buffers(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    inside = [buffer for block in all_blocks(func.body) for buffer in block.alloc_buffers]
    return [*filter(tirx.is_buffer_var, func.params), *inside]
