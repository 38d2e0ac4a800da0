"""Views of a buffer in kernels: a device's own slab, or the slabs of several devices, dimension 0 the device."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from tvm_axe.collective import SLAB, slab_stride
from tvm_axe.collective.tensor import peers_of
from tvm_axe.layout import Mesh
from tvm_axe.layout.shapes import dense_strides

__all__ = ["view_buffer", "view_shape"]


def view_shape(mesh: Mesh, view: str, slab: Sequence[int]) -> tuple[int, ...]:
    """The shape of a view: the slab's own, or with the devices before it."""
    return tuple(slab) if view == SLAB else (peers_of(mesh, view)[0], *slab)


def view_buffer(
    mesh: Mesh, view: str, slab: Sequence[int], dtype: str, name: str, page: int, rows: int | None = None
) -> tirx.Buffer:
    """A new buffer for a view of slabs that lie whole pages apart, of so many rows of them if not of all."""
    shape = tuple(slab) if rows is None else (rows, *slab[1:])
    strides = None
    if view != SLAB:
        strides = [peers_of(mesh, view)[1] * slab_stride(slab, dtype, page), *dense_strides(shape)]
    return tirx.decl_buffer(view_shape(mesh, view, shape), dtype, name, strides=strides, layout=None)
