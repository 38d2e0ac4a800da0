"""Views of a buffer in kernels: a device's own slab, or the slabs of several devices, dimension 0 the device."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from tvm_axe.analysis.sizes import Extent
from tvm_axe.collective import SLAB, slab_stride
from tvm_axe.collective.tensor import peers_of
from tvm_axe.layout import Mesh
from tvm_axe.layout.shapes import dense_strides

__all__ = ["view_buffer", "view_shape"]


def view_shape(mesh: Mesh, view: str, slab: Sequence[Extent]) -> tuple[Extent, ...]:
    """The shape of a view: the slab's own, or with the devices before it."""
    return tuple(slab) if view == SLAB else (peers_of(mesh, view)[0], *slab)


def view_buffer(
    mesh: Mesh, view: str, slab: Sequence[Extent], dtype: str, name: str, page: int, rows: int | None = None
) -> tirx.Buffer:
    """A new buffer for a view of slabs that lie whole pages apart, of so many rows of them if not of all.

    Slabs of a symbolic shape lie as far apart as the view says when it is called.
    """
    shape = tuple(slab) if rows is None else (rows, *slab[1:])
    strides: list[Extent] | None = None
    known = [extent for extent in slab if isinstance(extent, int)]
    if view != SLAB and len(known) == len(slab):
        apart = peers_of(mesh, view)[1] * slab_stride(known, dtype, page)
        strides = [apart, *dense_strides([extent for extent in shape if isinstance(extent, int)])]
    elif view != SLAB:
        inner: list[tirx.Expr] = [tirx.IntImm("int64", 1)]
        for extent in reversed(shape[1:]):
            inner.insert(0, inner[0] * extent)
        strides = [tirx.Var("apart", "int64"), *inner]
    whole = [_wide(extent) for extent in view_shape(mesh, view, shape)] if len(known) < len(slab) else (
        view_shape(mesh, view, shape)
    )  # fmt: skip
    return tirx.decl_buffer(whole, dtype, name, strides=strides, layout=None)


def _wide(extent: Extent) -> tirx.Expr:
    return tirx.IntImm("int64", extent) if isinstance(extent, int) else extent
