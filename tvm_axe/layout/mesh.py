"""The device mesh: how many devices there are, and how they are arranged.

>>> mesh = Mesh({"dp": 2, "tp": 3})
>>> mesh.size, mesh["tp"]
(6, 3)
>>> mesh.coords(4)
{'dp': 1, 'tp': 1}
>>> mesh.group(4, "tp"), mesh.group(4, "dp")
((3, 4, 5), (1, 4))
>>> Mesh.parse(str(mesh)) == mesh
True
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import MEMORY_AXES, THREAD_AXES, check_axis, check_int, is_mesh_axis

_ENTRY = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*([0-9]{1,18})\s*")


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """Named axes of devices, in order; devices are numbered row-major, the last axis fastest.

    Parameters
    ----------
    axes : Mapping[str, int]
        The number of devices along each axis, outermost axis first; at least one axis. The order matters:
        ``Mesh({"dp": 2, "tp": 3}) != Mesh({"tp": 3, "dp": 2})``.

    Raises
    ------
    LayoutError
        If there is no axis, a size is not an int of at least 1, or a name is not an identifier or is taken by a thread
        or memory axis.
    """

    _items: tuple[tuple[str, int], ...]

    def __init__(self, axes: Mapping[str, int]) -> None:
        if not isinstance(axes, Mapping) or not axes:
            raise LayoutError(f'a mesh needs a mapping from axis to size, such as {{"tp": 2}}, not {axes!r}')
        for name, size in axes.items():
            if not is_mesh_axis(check_axis("a mesh axis", name)):
                kind = "thread" if name in THREAD_AXES else "memory"
                taken = ", ".join(THREAD_AXES + MEMORY_AXES)
                raise LayoutError(f"mesh axis {name!r} has the name of a {kind} axis; names taken: {taken}")
            check_int(f"the size of mesh axis {name!r}", size, least=1)
        object.__setattr__(self, "_items", tuple(axes.items()))

    @property
    def axes(self) -> Mapping[str, int]:
        """Size by axis name, outermost first; read-only."""
        return MappingProxyType(dict(self._items))

    @property
    def names(self) -> tuple[str, ...]:
        """The axis names, outermost first."""
        return tuple(name for name, _ in self._items)

    @property
    def shape(self) -> tuple[int, ...]:
        """The axis sizes, outermost first."""
        return tuple(size for _, size in self._items)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    def axis_size(self, name: str) -> int:
        """Return the number of devices along the axis `name`; also written ``mesh[name]``.

        Raises
        ------
        LayoutError
            If the mesh has no such axis; names those it has.
        """
        for axis, size in self._items:
            if axis == name:
                return size
        raise LayoutError(f"unknown mesh axis {name!r}; mesh {self} has {', '.join(self.names)}")

    def __getitem__(self, name: str) -> int:
        return self.axis_size(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def coords(self, device: int) -> dict[str, int]:
        """Return the position of `device` on each axis.

        Law: ``mesh.device(mesh.coords(d)) == d``, and counting devices up runs through the coordinates in
        lexicographic order.

        Raises
        ------
        LayoutError
            If `device` is not an int in [0, size).
        """
        if check_int("device", device) not in range(self.size):
            raise LayoutError(f"device must be in [0, {self.size}) on mesh {self}, not {device}")
        position: dict[str, int] = {}
        for name, size in reversed(self._items):
            device, position[name] = divmod(device, size)
        return {name: position[name] for name in self.names}

    def device(self, coords: Mapping[str, int]) -> int:
        """Return the number of the device at `coords`, which gives its position on every axis.

        Law: the inverse of `coords`.

        Raises
        ------
        LayoutError
            If an axis is missing, unknown, or its position is outside [0, size of the axis).
        """
        if set(coords) != set(self.names):
            raise LayoutError(
                f"coords must give a position on each of the axes {', '.join(self.names)}, not {coords!r}"
            )
        device = 0
        for name, size in self._items:
            position = check_int(f"coords[{name!r}]", coords[name])
            if position not in range(size):
                raise LayoutError(f"coords[{name!r}] must be in [0, {size}) on mesh {self}, not {position}")
            device = device * size + position
        return device

    def group(self, device: int, axis: str) -> tuple[int, ...]:
        """Return the devices that differ from `device` only along `axis`, in the order of their position on it.

        Law: ``mesh.group(d, a)[mesh.coords(d)[a]] == d``, and every member has the same group.

        Raises
        ------
        LayoutError
            If the mesh has no such axis or no such device.
        """
        size = self.axis_size(axis)
        coords = self.coords(device)
        return tuple(self.device({**coords, axis: position}) for position in range(size))

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read a mesh from its text, such as ``tp=2,dp=2``: the inverse of ``str``; spaces are ignored.

        Raises
        ------
        LayoutError
            If the text is malformed, with the position where; or if it states no valid mesh.
        """
        if not isinstance(text, str):
            raise LayoutError(f"Mesh.parse: text must be a str such as 'tp=2,dp=2', not {text!r}")
        axes: dict[str, int] = {}
        position = 0
        for part in text.split(","):
            entry = _ENTRY.fullmatch(part)
            if entry is None:
                raise LayoutError(f"Mesh.parse: at position {position} of {text!r}: expected axis=size, found {part!r}")
            if entry[1] in axes:
                raise LayoutError(f"Mesh.parse: at position {position} of {text!r}: axis {entry[1]!r} is named twice")
            axes[entry[1]] = int(entry[2])
            position += len(part) + 1
        return Mesh(axes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self._items)

    def __repr__(self) -> str:
        return f"Mesh({dict(self._items)!r})"
