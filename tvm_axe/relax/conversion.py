"""From one form of a value to another, as a program of its own: of what a call of a shared model is handed."""

from __future__ import annotations

from typing import NamedTuple

import tvm
from tvm import relax, tirx

from tvm_axe.collective import SLAB
from tvm_axe.layout import Mesh
from tvm_axe.lower.taking import taking
from tvm_axe.lower.views import view_shape
from tvm_axe.relax.forms import WHOLE, Forms

__all__ = ["Conversion", "conversion"]


class Conversion(NamedTuple):
    """A program that makes a value in one form of it in another.

    Attributes
    ----------
    axis : str
        The axis along which it moves.
    view : str
        ``"slab"`` if a device finds all that it needs in its own slab; else `axis`.
    module : IRModule
        Its ``main`` takes the source in the view, the target's slab, and the device's coordinate on the axis.
    """

    axis: str
    view: str
    module: tvm.IRModule


def conversion(
    shape: tuple[int | None, ...], dtype: str, source: Forms, target: Forms, mesh: Mesh, page: int
) -> Conversion | None:
    """How devices bring a value from some forms to others; None where that takes moves along several axes.

    Parameters
    ----------
    shape, dtype
        Of the whole value; an extent that is None may be any, and is another one in each call.
    source, target : Forms
        How devices hold it, and are to; they differ.
    mesh : Mesh
        The devices.
    page : int
        Bytes of a page of the devices' memory.
    """
    moved = [at for at, (held, wanted) in enumerate(zip(source, target, strict=True)) if held != wanted]
    if len(moved) != 1:
        return None
    (axis, held), (_, wanted) = source[moved[0]], target[moved[0]]
    extents: tuple[int | tirx.Expr, ...] = tuple(
        tirx.Var(f"n{at}", "int64") if extent is None else extent for at, extent in enumerate(shape)
    )
    for at, (_, form) in enumerate(source):
        if at > moved[0] and form.dim is not None and form.dim in (held.dim, wanted.dim):
            return None  # what is dealt out along that axis is another part of it before and after
        if at != moved[0]:
            extents = form.local(extents)
    # What other axes have cut is counted by itself: a function knows a size that is an extent of what it takes.
    extents = tuple(
        extent if isinstance(extent, int) else tirx.Var(f"n{at}", "int64") for at, extent in enumerate(extents)
    )
    view = SLAB if held == WHOLE else axis
    kernel = taking(extents, dtype, held.cut, wanted.cut, held.partial, mesh, axis, view, page)
    builder = relax.BlockBuilder()
    shapes = view_shape(mesh, view, held.local(extents)), wanted.local(extents)
    read, written = (relax.Var(n, relax.TensorType([*s], dtype)) for n, s in zip(("source", "target"), shapes))
    rank = relax.Var(axis, tvm.ir.PrimType("int64"))
    with builder.function("main", [read, written, rank], pure=False):
        callee = builder.add_func(kernel.with_attr("global_symbol", "taken"), "taken")
        asks = any(not tirx.is_buffer_var(param) for param in kernel.params)
        builder.emit(relax.Call(callee, [read, *([rank] if asks else []), written]))
        builder.emit_func_output(relax.Tuple([]))
    return Conversion(axis, view, builder.finalize())
