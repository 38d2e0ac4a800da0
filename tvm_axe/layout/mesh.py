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

Where the wires between devices say so, they are numbered in another order:

>>> ring = Mesh({"dp": 2, "tp": 2}, order=(0, 1, 3, 2))
>>> ring.coords(3), ring.group(0, "dp"), str(ring)
({'dp': 1, 'tp': 0}, (0, 3), 'dp=2,tp=2@0.1.3.2')
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import MEMORY_AXES, THREAD_AXES, check_axis, check_int, is_mesh_axis
from tvm_axe.notebook import preformatted

_ORDER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})*")
_ENTRY = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*([0-9]{1,18})\s*")


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """Named axes of devices; devices are numbered row-major, the last axis fastest, or in an order of their own.

    Parameters
    ----------
    axes : Mapping[str, int]
        The number of devices along each axis, outermost axis first; at least one axis. The order matters:
        ``Mesh({"dp": 2, "tp": 3}) != Mesh({"tp": 3, "dp": 2})``.
    order : Sequence[int], optional
        The number of the device at each row-major position, each number below `size` once; row-major if left out.

    Attributes
    ----------
    order : tuple[int, ...]
        The order that was given, or 0, 1, 2, ...

    Raises
    ------
    LayoutError
        If there is no axis, a size is not an int of at least 1, a name is not an identifier or is taken by a thread
        or memory axis, or `order` is no order of the devices.
    """

    _items: tuple[tuple[str, int], ...]
    order: tuple[int, ...]

    def __init__(self, axes: Mapping[str, int], order: Sequence[int] | None = None) -> None:
        if not isinstance(axes, Mapping) or not axes:
            raise LayoutError(f'a mesh needs a mapping from axis to size, such as {{"tp": 2}}, not {axes!r}')
        for name, size in axes.items():
            if not is_mesh_axis(check_axis("a mesh axis", name)):
                kind = "thread" if name in THREAD_AXES else "memory"
                taken = ", ".join(THREAD_AXES + MEMORY_AXES)
                raise LayoutError(f"mesh axis {name!r} has the name of a {kind} axis; names taken: {taken}")
            check_int(f"the size of mesh axis {name!r}", size, least=1)
        object.__setattr__(self, "_items", tuple(axes.items()))
        numbers = tuple(range(self.size)) if order is None else tuple(check_int("a device", it) for it in order)
        if sorted(numbers) != list(range(self.size)):
            raise LayoutError(f"order must have each of the devices 0 to {self.size - 1} once, not {numbers}")
        object.__setattr__(self, "order", numbers)

    @property
    def is_row_major(self) -> bool:
        """Whether devices are numbered row-major."""
        return self.order == tuple(range(self.size))

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

        Law: ``mesh.device(mesh.coords(d)) == d``, and along `order` the coordinates run in lexicographic order.

        Raises
        ------
        LayoutError
            If `device` is not an int in [0, size).
        """
        if check_int("device", device) not in range(self.size):
            raise LayoutError(f"device must be in [0, {self.size}) on mesh {self}, not {device}")
        position: dict[str, int] = {}
        rest = self.order.index(device)
        for name, size in reversed(self._items):
            rest, position[name] = divmod(rest, size)
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
        return self.order[device]

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

    @classmethod
    def of(cls, mesh: Mesh | Mapping[str, int]) -> Mesh:
        """Return a mesh as it is, or one of these axes.

        >>> Mesh.of({"tp": 2}) == Mesh({"tp": 2}) == Mesh.of(Mesh({"tp": 2}))
        True
        """
        return mesh if isinstance(mesh, Mesh) else cls(mesh)

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read a mesh from its text, such as ``tp=2,dp=2`` or ``tp=2,dp=2@0.2.1.3``: the inverse of ``str``.

        Spaces between entries are ignored.

        Raises
        ------
        LayoutError
            If the text is malformed, with the position where; or if it states no valid mesh.
        """
        if not isinstance(text, str):
            raise LayoutError(f"Mesh.parse: text must be a str such as 'tp=2,dp=2', not {text!r}")
        axes: dict[str, int] = {}
        position = 0
        entries, ordered, numbers = text.partition("@")
        if ordered and not _ORDER.fullmatch(numbers):
            raise LayoutError(
                f"Mesh.parse: at position {len(entries) + 1} of {text!r}: expected an order such as 0.2.1.3, found "
                f"{numbers!r}"
            )
        for part in entries.split(","):
            entry = _ENTRY.fullmatch(part)
            if entry is None:
                raise LayoutError(f"Mesh.parse: at position {position} of {text!r}: expected axis=size, found {part!r}")
            if entry[1] in axes:
                raise LayoutError(f"Mesh.parse: at position {position} of {text!r}: axis {entry[1]!r} is named twice")
            axes[entry[1]] = int(entry[2])
            position += len(part) + 1
        return Mesh(axes, [int(number) for number in numbers.split(".")] if ordered else None)

    def __str__(self) -> str:
        order = "" if self.is_row_major else "@" + ".".join(map(str, self.order))
        return ",".join(f"{name}={size}" for name, size in self._items) + order

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def __repr__(self) -> str:
        return f"Mesh({dict(self._items)!r})" if self.is_row_major else f"Mesh({dict(self._items)!r}, {self.order})"
