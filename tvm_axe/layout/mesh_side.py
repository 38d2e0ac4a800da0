"""A layout as the devices of a mesh see it: who holds an element, what one device holds, what of it is padding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import check_axis
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.sharding import check_mesh

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout


def project(layout: Layout, axes: Collection[str]) -> Layout:
    """Return what a layout says about some axes alone.

    Law: write x in the digits of D, and y in those of its iters on `axes`, in the same order. Then
    ``layout.project(axes).apply(y)`` are the points of ``layout.apply(x)``, with all other axes left out.

    So the mesh axes give the devices of an element, and the others where it lies on its device:

    >>> layout = Layout.parse("S[(4, 2, 8) : (1@tp, 1@laneid, 1)] + R[2 : 1@dp]")
    >>> print(layout.project(["tp", "dp"]), "and", layout.project(["laneid", "m"]))
    S[4 : 1@tp] + R[2 : 1@dp] and S[(2, 8) : (1@laneid, 1)]

    Parameters
    ----------
    axes : Collection[str]
        The axes to keep; the layout need not name them.

    Raises
    ------
    LayoutError
        If `axes` is not a collection of identifiers.
    """
    if isinstance(axes, str) or not isinstance(axes, Collection):
        raise LayoutError(f'axes must be a collection of names, such as ["tp", "dp"], not {axes!r}')
    kept = {check_axis("an axis in axes", axis) for axis in axes}
    return layout._like(
        tuple(it for it in layout.D if it.axis in kept),
        tuple(it for it in layout.R if it.axis in kept),
        {axis: amount for axis, amount in layout.O.items() if axis in kept},
    )


def owner(layout: Layout, *index: int, mesh: Mesh, shape: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the numbers of the devices that hold an element, in ascending order.

    Law: the devices at the mesh coordinates of the points of ``layout.apply(*index, shape=shape)``.

    >>> Layout.parse("S[(2, 8) : (1@tp, 1)] + R[2 : 1@dp]").owner(1, 5, shape=(2, 8), mesh=Mesh({"tp": 2, "dp": 2}))
    (2, 3)

    Parameters
    ----------
    *index : int
        The element, as in `apply`.
    mesh : Mesh
        The devices.
    shape : Sequence[int], optional
        The tensor's shape, as in `apply`.

    Raises
    ------
    LayoutError
        If `apply` refuses the index, the layout names a mesh axis that the mesh lacks, or a point is outside the mesh.
    """
    check_mesh(layout, mesh)
    points = layout.apply(*index, shape=shape)
    return tuple(sorted({mesh.device({name: int(point[name]) for name in mesh.names}) for point in points}))


def mask(layout: Layout, shape: Sequence[int], mesh: Mesh, device: int) -> NDArray[np.bool_]:
    """Return which of the elements that a device stores belong to the tensor; the others are padding.

    Law: an array of ``local_shape``, True in its first rows and columns: as many as ``local_region`` has.

    >>> mesh = Mesh({"tp": 4})
    >>> Layout.sharded((10, 2), mesh, {0: "tp"}).mask((10, 2), mesh, 3).tolist()
    [[True, True], [False, False], [False, False]]

    Parameters
    ----------
    shape : Sequence[int]
        The tensor's shape, before padding.
    mesh : Mesh
        The devices.
    device : int
        The device's number.

    Raises
    ------
    LayoutError
        If the layout isn't a block sharding of the shape, or the mesh has no such device.
    """
    region = layout.local_region(shape, mesh, device)
    inside = np.zeros(layout.local_shape(shape, mesh), dtype=np.bool_)
    inside[tuple(slice(part.stop - part.start) for part in region)] = True
    return inside
