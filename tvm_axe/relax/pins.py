"""What a user pins of a model: which dimension of a value is shared along which mesh axis.

>>> mesh = Mesh({"dp": 2, "tp": 2})
>>> read("up", {"tp": 1}, (8, 16), mesh, ("dp", "tp"), "pin 'up'")
{'tp': 1}
>>> read("up", "S[(8, 2, 8) : (8, 1@tp, 1)] + R[2 : 1@dp]", (8, 16), mesh, ("dp", "tp"), "pin 'up'")
{'dp': None, 'tp': 1}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from tvm_axe.errors import InputError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.relax.graph import Graph

__all__ = ["Pin", "pin_parameters", "read"]

Pin = int | Layout | str | Mapping[str, int | None] | None
"""A dimension, by axes (``{"dp": 0, "tp": 2}``) or for all; a layout in blocks; or None for whole on every device."""


def read(name: str, pin: Pin, shape: Sequence[int], mesh: Mesh, over: Sequence[str], of: str) -> dict[str, int | None]:
    """The dimension that a pin shares along each axis, None where that is none; axes that it doesn't name are free.

    Parameters
    ----------
    name, shape
        Of the value.
    pin : Pin
        What is asked for.
    mesh : Mesh
        The devices.
    over : Sequence[str]
        The axes along which the model is shared, outer ones first.
    of : str
        What the pin is called in messages.

    Raises
    ------
    InputError
        If it names an axis or a dimension that there isn't; names the pin, the value, and what is valid.
    """
    if isinstance(pin, Layout | str):
        return _of_layout(name, Layout.parse(pin) if isinstance(pin, str) else pin, shape, mesh, over, of)
    found = dict(pin) if isinstance(pin, Mapping) else dict.fromkeys(over, pin)
    for axis, dim in found.items():
        if axis not in over:
            raise InputError(
                f"{of}: {name} is to be shared over {axis}; the model is shared over {' and '.join(over)} alone"
            )
        if dim is not None and not 0 <= dim < len(shape):
            raise InputError(f"{of}: {name} has {len(shape)} dimensions, there is no dimension {dim}")
    return {axis: found[axis] for axis in over if axis in found}


def _of_layout(
    name: str, layout: Layout, shape: Sequence[int], mesh: Mesh, over: Sequence[str], of: str
) -> dict[str, int | None]:
    cuts = layout.cuts(shape, mesh)
    found: dict[str, int | None] = dict.fromkeys(over)
    for dim, axes in enumerate(cuts):
        if set(axes) - set(over):
            raise InputError(
                f"{of}: {layout} shares {name} over {', '.join(sorted(axes))}; the model is shared over "
                f"{' and '.join(over)} alone"
            )
        if list(axes) != [axis for axis in over if axis in axes]:
            raise InputError(
                f"{of}: {layout} deals out dimension {dim} of {name} over {', '.join(axes)}; a model's values are "
                f"dealt out over outer axes first: {', '.join(axis for axis in over if axis in axes)}"
            )
        found.update(dict.fromkeys(axes, dim))
    return found


def pin_parameters(graphs: Sequence[Graph], pins: Mapping[str, Pin], mesh: Mesh, over: Sequence[str]) -> None:
    """Have the parameters of some functions say to what they are pinned.

    Raises
    ------
    InputError
        If a pattern is of no parameter, or two pins differ about one; names both.
    """
    by: dict[tuple[str, int, str], str] = {}
    for pattern, pin in pins.items():
        of, hits = f"pin {pattern!r}", 0
        for graph in graphs:
            for number in graph.params:
                value = graph.values[number]
                if not fnmatchcase(value.name, pattern):
                    continue
                hits += 1
                asked = read(value.name, pin, value.shape, mesh, over, of)
                for axis, dim in asked.items():
                    if value.pins.get(axis, dim) != dim:
                        other = by[graph.name, number, axis]
                        raise InputError(
                            f"pins {other!r} and {pattern!r} differ about {value.name}: along {axis} one shares "
                            f"{_said(value.pins[axis])}, the other {_said(dim)}; leave one out"
                        )
                    by.setdefault((graph.name, number, axis), pattern)
                graph.values[number] = replace(value, pins={**value.pins, **asked})
        if not hits:
            names = ", ".join(dict.fromkeys(graph.values[n].name for graph in graphs for n in graph.params))
            raise InputError(f"{of} is of no parameter; there are {names}")


def _said(dim: int | None) -> str:
    return "nothing" if dim is None else f"dimension {dim}"
