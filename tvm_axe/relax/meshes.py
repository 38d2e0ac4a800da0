"""How a function of a model is shared over the axes of a mesh: along one after another, outer axes first.

What a device along an axis does of a function is a function again (`tvm_axe.relax.local`), which is shared along the
next axis: sharing is decided along one axis at a time, by the same search (`tvm_axe.relax.choosing`). Which of the axes
cut the weights, where a limit on them leaves a choice, is tried and decided by the time of a call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tvm_axe.collective.engine import Rates
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.relax.choosing import choose
from tvm_axe.relax.chosen import Chosen
from tvm_axe.relax.counted import with_counted_terms
from tvm_axe.relax.forms import Form, Forms, blocks
from tvm_axe.relax.graph import Graph, Value
from tvm_axe.relax.local import local_graph
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.sizes import Shape
from tvm_axe.relax.staged import in_pieces

__all__ = ["SLACK", "Held", "along_axes", "operators_of", "weights_of"]

SLACK = 0.05
"""The part of the weights that a device may hold beyond its share."""
Held = dict[tuple[str, Shape, str, Forms], Form]
"""How functions hold weights that others have too: by name, shape, type, and the forms along outer axes."""


def operators_of(axes: Mapping[str, int], rates: Rates, meets: bool = True) -> list[Operators]:
    """The operators along each of some axes, of so many devices each.

    Along an axis devices are as much faster as there are of them along the inner ones, which will share what is left.
    Where kernels don't meet, dimensions of symbolic extents are shared only if that is pinned: no collective deals them
    out.
    """
    found, rest = list[Operators](), math.prod(axes.values())
    for name, size in axes.items():
        rest //= size
        link = replace(rates.link, bandwidth=rates.link.bandwidth * rest)
        found.append(Operators(size, Rates(link, rates.memory * rest, rates.operations * rest), name, meets))
    return found


def weights_of(graph: Graph) -> int:
    """Bytes of a function's weights."""
    return sum(dtype_bytes(value.dtype, value.size) for value in graph.values if value.kind == "weight")


def along_axes(graph: Graph, operators: Sequence[Operators], part: float, held: Held) -> list[Chosen]:
    """Choose a form along each axis for every value of a function.

    Parameters
    ----------
    graph : Graph
        The function; values say to what they are pinned.
    operators : Sequence[Operators]
        Its operators along each axis, outer axes first.
    part : float
        The part of the weights that a device may hold.
    held : Held
        How weights are held that other functions have too; those of this one are added.

    Returns
    -------
    list of Chosen
        Along each axis, of what the axes before it leave of the function.
    """
    limit = part * weights_of(graph)
    best: list[Chosen] | None = None
    for cut in _cuts([each.devices for each in operators], part):
        found = _along(graph, operators, cut, limit, held)
        found[-1] = found[-1].without_pins()
        if best is None or _rank(found, limit) < _rank(best, limit):
            best = found
    assert best is not None  # there is a way to cut weights
    for level in best:
        for number, forms in level.held.items():
            key = _key(level.graph.values[number])
            if key is not None and forms:
                held.setdefault(key, forms[0])
    return best


def _cuts(devices: Sequence[int], part: float) -> Iterator[tuple[bool, ...]]:
    """Which of the outer axes cut weights so that a device holds a part of them: where fewer would do, they do."""

    def left(cut: Sequence[bool]) -> float:
        return math.prod(1 / size for size, is_cut in zip(devices, cut) if is_cut)

    none = True
    for cut in itertools.product((False, True), repeat=len(devices) - 1):
        fewer = [(*cut[:at], False, *cut[at + 1 :]) for at, is_cut in enumerate(cut) if is_cut]
        if left((*cut, True)) <= part and all(left(other) > part for other in fewer):
            none = False
            yield cut
    if none:
        yield (True,) * (len(devices) - 1)


def _along(graph: Graph, operators: Sequence[Operators], cut: Sequence[bool], limit: float, held: Held) -> list[Chosen]:
    levels: list[Chosen] = []
    for at, along in enumerate(operators):
        outer = cut[at] if at < len(cut) else None
        most = limit if outer is None else (1 / along.devices + SLACK) * weights_of(graph) if outer else None
        fixed = {}
        for number, value in enumerate(graph.values):
            key = _key(value)
            if along.axis in value.pins and value.kind != "value":
                fixed[number] = blocks(value.shape, value.typical, value.pins[along.axis], along.devices)
            elif key is not None and key in held:
                fixed[number] = held[key]
        levels.append(with_counted_terms(in_pieces(choose(graph, along, most, fixed), along), along))
        if outer is not None:
            graph = local_graph(levels[-1], along)
    return levels


def _rank(levels: Sequence[Chosen], limit: float) -> tuple[bool, float]:
    return levels[-1].weights[0] > max(limit, 1), levels[-1].seconds


def _key(value: Value) -> tuple[str, Shape, str, Forms] | None:
    """What a weight is known by in all functions; None of other values."""
    is_weight = value.kind == "weight" and value.constant is None
    return (value.name, value.whole, value.dtype, value.forms) if is_weight else None
