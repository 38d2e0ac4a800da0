"""Names of axes, and points on them.

An axis is a named direction in which data can be spread: over the devices of a mesh, over the threads of a kernel, or
through a memory. Thread and memory axes are fixed here; every other identifier names a mesh axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tvm_axe.errors import LayoutError
from tvm_axe.layout.symbolic import Number, Symbolic, fold, is_expression

THREAD_AXES = ("bx", "by", "bz", "cbx", "cby", "cbz", "tx", "warpid", "laneid", "wgid", "tid_in_wg", "wid_in_wg")
"""The axes of threads, from the grid through the cluster and the block down to the lane; the compiler's own names."""

MEMORY_AXES = ("m", "P", "F", "Bank", "TLane", "TCol")
"""Linear memory, scratchpad partitions and their free dimension, banks, and tensor memory; the compiler's names."""

LINEAR_MEMORY = "m"
"""The default axis: the one left out of a layout's text."""

INT64_MAX = 2**63 - 1
"""Indices are computed in 64 bits, so nothing a layout holds or produces may be larger."""

_AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_int(what: str, value: object, least: int = -INT64_MAX) -> int:
    """Return `value` if it is an int in [`least`, 2**63 - 1], and raise LayoutError naming `what` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise LayoutError(f"{what} must be an int, not {value!r} of type {type(value).__name__}")
    if abs(value) > INT64_MAX:
        raise LayoutError(f"{what} must fit in 64 bits, and an int of {value.bit_length()} bits doesn't")
    if value < least:
        raise LayoutError(f"{what} must be at least {least}, not {value}")
    return value


def check_number(what: str, value: object, least: int = -INT64_MAX) -> Number:
    """Return `value` as `check_int` does, or as a Symbolic value if it is an integer expression of the compiler."""
    if not isinstance(value, int) and is_expression(value):
        value = fold(value)
    if not isinstance(value, Symbolic):
        return check_int(what, value, least)
    if least > -INT64_MAX and not value >= least:
        raise LayoutError(f"{what} must be at least {least}, and {value} is less")
    return value


def check_axis(what: str, name: object) -> str:
    """Return `name` if it can name an axis, and raise LayoutError naming `what` otherwise."""
    if not isinstance(name, str) or not _AXIS_NAME.fullmatch(name):
        raise LayoutError(f"{what} must be an ASCII identifier such as 'tp' or 'laneid', not {name!r}")
    return name


def is_mesh_axis(name: str) -> bool:
    """Return whether `name` is a mesh axis, that is, neither a thread axis nor a memory axis."""
    return name not in THREAD_AXES and name not in MEMORY_AXES


@dataclass(frozen=True, init=False, repr=False, eq=False, slots=True)
class Coordinate(Mapping[str, Number]):
    """A point in the space of all axes: a hashable mapping from axis name to int.

    Zero entries are dropped, and an axis that is absent reads as zero, so that a point has one form only:
    ``Coordinate({"tp": 1, "m": 0}) == Coordinate({"tp": 1})``, and ``Coordinate({"tp": 1})["m"] == 0``. Iteration goes
    over the non-zero entries by name.

    Parameters
    ----------
    entries : Mapping[str, int]
        The position on each axis.

    Raises
    ------
    LayoutError
        If a name is not an identifier, or a position not an int of 64 bits.
    """

    _items: tuple[tuple[str, Number], ...]

    def __init__(self, entries: Mapping[str, Number]) -> None:
        if not isinstance(entries, Mapping):
            raise LayoutError(f"a coordinate must be a mapping from axis to int, not {entries!r}")
        checked = {
            axis: check_number(f"the position on axis {check_axis('an axis of a coordinate', axis)!r}", position)
            for axis, position in entries.items()
        }
        _set_items(self, tuple((axis, checked[axis]) for axis in sorted(checked) if checked[axis] != 0))

    def __getitem__(self, axis: str) -> Number:
        return next((position for name, position in self._items if name == axis), 0)

    def __contains__(self, axis: object) -> bool:
        return any(name == axis for name, _ in self._items)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return self._items == other._items if isinstance(other, Coordinate) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return f"Coordinate({dict(self._items)!r})"

    def __reduce__(self) -> tuple[type[Coordinate], tuple[dict[str, Number]]]:
        return (Coordinate, (dict(self._items),))


_set_items = vars(Coordinate)["_items"].__set__


def make_coordinate(entries: Mapping[str, Number]) -> Coordinate:
    """Return the Coordinate of entries that are known to be valid, without checking them."""
    point = object.__new__(Coordinate)
    items = entries.items()
    _set_items(point, tuple(sorted([item for item in items if item[1] != 0])) if items else ())
    return point
