"""How a user says which dimension of a value is shared along which mesh axis: by number, as a layout, or as upstream.

>>> mesh = Mesh({"dp": 2, "tp": 2})
>>> over = Over(mesh, ("dp", "tp"))
>>> over.read("up", {"tp": 1}, (8, 16), "pin 'up'")
{'tp': 1}
>>> over.read("up", "S[(8, 2, 8) : (8, 1@tp, 1)] + R[2 : 1@dp]", (8, 16), "pin 'up'")
{'dp': None, 'tp': 1}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tvm.relax.distributed import DeviceMesh, Placement

from tvm_axe.errors import InputError
from tvm_axe.layout import Layout, Mesh

__all__ = ["UNKNOWN", "Dims", "Over", "Pin"]

UNKNOWN = 0
"""The extent of a dimension that calls decide, in the shapes here."""

Pin = int | Layout | str | Mapping[str, int | None] | None
"""A dimension, by axes (``{"dp": 0, "tp": 2}``) or for all; a layout in blocks; or None for whole on every device."""
Dims = dict[str, int | None]
"""The dimension that is shared along each axis, None where that is none; along axes that aren't there it is free."""
_SHARDING = 0  # of the kinds of upstream's placements; the other is a replica


class Over(NamedTuple):
    """The axes along which a model is shared, outer ones first."""

    mesh: Mesh
    axes: Sequence[str]

    @property
    def shown(self) -> str:
        """The axes in words."""
        return " and ".join(self.axes)

    def read(self, name: str, pin: Pin, shape: Sequence[int], of: str) -> Dims:
        """What a pin of the value `name` asks for.

        Raises
        ------
        InputError
            If it names an axis or a dimension that there isn't, or one that can't be shared; names the pin, which `of`
            calls, the value, and what is valid.
        """
        if isinstance(pin, Layout | str):
            if UNKNOWN in shape:
                raise InputError(
                    f"{of}: {name} has a symbolic shape, and a layout is of constant extents; pin the number of a "
                    "dimension"
                )
            found = self._of_layout(name, Layout.parse(pin) if isinstance(pin, str) else pin, shape, of)
        else:
            found = dict(pin) if isinstance(pin, Mapping) else dict.fromkeys(self.axes, pin)
        for axis, dim in found.items():
            if axis not in self.axes:
                raise InputError(
                    f"{of}: {name} is to be shared over {axis}; the model is shared over {self.shown} alone"
                )
            if dim is not None and not 0 <= dim < len(shape):
                raise InputError(f"{of}: {name} has {len(shape)} dimensions, there is no dimension {dim}")
            if dim is not None and shape[dim] == 1 and self.mesh[axis] > 1:
                raise InputError(
                    f"{of}: dimension {dim} of {name} has one index, which the devices along {axis} can't share; pin "
                    "another dimension, or None for whole on every device"
                )
        return {axis: found[axis] for axis in self.axes if axis in found}

    def _of_layout(self, name: str, layout: Layout, shape: Sequence[int], of: str) -> Dims:
        found: Dims = dict.fromkeys(self.axes)
        for dim, axes in enumerate(layout.cuts(shape, self.mesh)):
            ordered = [axis for axis in self.axes if axis in axes]
            if set(axes) - set(ordered):
                raise InputError(
                    f"{of}: {layout} shares {name} over {', '.join(sorted(axes))}; the model is shared over "
                    f"{self.shown} alone"
                )
            if list(axes) != ordered:
                raise InputError(
                    f"{of}: {layout} deals out dimension {dim} of {name} over {', '.join(axes)}; a model's values are "
                    f"dealt out over outer axes first: {', '.join(ordered)}"
                )
            found.update(dict.fromkeys(axes, dim))
        return found

    def placed(self, name: str, devices: DeviceMesh, placement: Placement, shape: Sequence[int], of: str) -> Dims:
        """What upstream's placement of the value `name` asks for.

        Raises
        ------
        InputError
            If the placement is on other devices than those that share, or shares a dimension that can't be.
        """
        sizes, specs = [int(size) for size in devices.shape], list(placement.dim_specs)
        there = [size for size in sizes if size > 1]
        axes = [axis for axis in self.axes if self.mesh[axis] > 1]
        if there != [self.mesh[axis] for axis in axes] or len(specs) != len(sizes):
            raise InputError(
                f"{of}: {name} is placed on a device mesh of shape {tuple(sizes)}, and the model is shared over "
                f"{self.shown} of mesh {self.mesh}; give both the same axes in the same order"
            )
        ids = [int(each) for each in devices.device_ids]
        if ids and ids != list(range(len(ids))):
            raise InputError(
                f"{of}: {name} is placed on the devices {ids}; all devices of mesh {self.mesh} run a whole function: "
                "make each stage of a pipeline a model of its own"
            )
        dims = [int(spec.axis) if int(spec.kind) == _SHARDING else None for spec in specs]
        by_axis = dict(zip(axes, (dim for dim, size in zip(dims, sizes) if size > 1), strict=True))
        return self.read(name, by_axis, shape, of)
