"""From one form of a value to another, as a program of its own: of what a call of a shared model is handed."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from tvm_axe.collective import ALL, SLAB
from tvm_axe.layout import Mesh
from tvm_axe.lower.taking import taking
from tvm_axe.lower.views import view_shape
from tvm_axe.relax.forms import WHOLE, Form

__all__ = ["conversion"]


def conversion(
    shape: tuple[int, ...], dtype: str, source: Form, target: Form, mesh: Mesh, axis: str, page: int
) -> tuple[str, tvm.IRModule]:
    """The view of the source that each device reads, and the module whose ``main`` makes the target of it.

    Parameters
    ----------
    shape, dtype
        Of the whole value.
    source, target : Form
        How devices hold it, and are to.
    mesh, axis
        The devices, and the axis along which they share, ``"*"`` for all of them.
    page : int
        Bytes of a page of the devices' memory.

    Returns
    -------
    view : str
        ``"slab"`` if a device finds all that it needs in its own slab; else `axis`.
    module : IRModule
        Its ``main`` takes the view, the target's slab, and the device's coordinate on each axis that shares.
    """
    view = SLAB if source == WHOLE else axis
    cuts = [None if form.share is None or form.dim is None else (form.dim, form.share) for form in (source, target)]
    kernel = taking(shape, dtype, cuts[0], cuts[1], source.partial, mesh, axis, view, page)
    builder = relax.BlockBuilder()
    shapes = view_shape(mesh, view, source.local(shape)), target.local(shape)
    read, written = (relax.Var(n, relax.TensorType([*s], dtype)) for n, s in zip(("source", "target"), shapes))
    coordinates = {name: relax.Var(name, tvm.ir.PrimType("int64")) for name in (mesh.names if axis == ALL else (axis,))}
    with builder.function("main", [read, written, *coordinates.values()], pure=False):
        callee = builder.add_func(kernel.with_attr("global_symbol", "taken"), "taken")
        asks = any(not tirx.is_buffer_var(param) for param in kernel.params)
        builder.emit(relax.Call(callee, [read, *([_rank(coordinates, mesh)] if asks else []), written]))
        builder.emit_func_output(relax.Tuple([]))
    return view, builder.finalize()


def _rank(coordinates: dict[str, relax.Var], mesh: Mesh) -> tirx.Expr:
    """The device's number among those that share."""
    rank: tirx.Expr = tirx.IntImm("int64", 0)
    for name, var in coordinates.items():
        rank = var if len(coordinates) == 1 else rank * mesh[name] + var
    return rank
