"""Inverses: from a place back to the element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, check_number
from tvm_axe.layout.image import axes_of
from tvm_axe.layout.iters import Iter, make_iter
from tvm_axe.layout.symbolic import Number

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout

_Run = tuple[Number, Number | None]
"""A digit of the places' numbers: its extent, and the stride in elements it stands for; None if it has no element."""


def inverse(layout: Layout, box: Mapping[str, Number] | None = None) -> Layout:
    """Return the layout that gives for every place the element that lives there, as a position in linear memory.

    Places are counted from the lowest on each axis. They are numbered row-major in a box, whose axes and sizes are
    `box`; without one, the axes in the order of D, each as long as is needed.

    Law, if the layout is injective: for every x and the point p of ``layout.apply(x)``,
    ``inverse.apply(*(p[a] - layout.bounds(a)[0] for a in box), shape=box.values())`` is x. Places that hold no element
    are given a number of at least ``layout.size()``. If the layout is not injective, but some of its iters cover the
    box by themselves, the inverse is a section: it gives one of the elements that live at the place.

    >>> print(Layout.parse("S[(4, 8) : (1, 4)]").inverse())
    S[(8, 4) : (1, 8)]
    >>> print(Layout.parse("S[(8, 4) : (1@laneid, 1)]").inverse({"m": 4, "laneid": 8}))
    S[(4, 8) : (1, 4)]
    >>> print(Layout.parse("S[4 : 2]").inverse())
    S[(4, 2) : (1, 4)]
    >>> print(Layout.parse("S[(3, 4, 2) : (1, 2, 1)]").inverse({"m": 8}))
    S[8 : 1]

    Parameters
    ----------
    box : Mapping[str, int], optional
        The places, outermost axis first: every axis that the layout has an iter on, with its size. A section needs one.

    Raises
    ------
    LayoutError
        If there are replicas, for which an element would have to be given at several places, and D knows no stride of
        0; if an axis is missing from the box, or too short; or if D's iters on an axis don't nest: sorted by stride,
        each must step over whole runs of those before it (for a section: some of them must, and cover the box).

    Notes
    -----
    Source: the left and right inverses of CuTe's layout algebra, carried over to named axes.
    """
    canonical = layout.canonicalize()
    if canonical.R:
        raise LayoutError(f"layout {layout} has replicas, and the element at several places would need a stride of 0")
    elements: dict[str, list[tuple[Iter, Number]]] = {axis: [] for axis in axes_of(canonical)}
    weight: Number = 1
    first: Number = 0  # the element at the lowest place
    for it in reversed(canonical.D):
        elements[it.axis].append((it, weight))
        if not it.stride > 0:
            first += (it.extent - 1) * weight
        weight *= it.extent
    injective = layout.is_injective()
    if box is None and not injective:
        raise LayoutError(f"layout {layout} is not injective: its inverse is a section, which needs a box to cover")
    runs: list[_Run] = []
    for axis, size in reversed(_check_box(layout, elements, box).items()):
        iters = elements.get(axis, [])
        runs += _section(layout, axis, iters, size) if size and not injective else _nest(layout, axis, iters, size)
    return layout._like(_number_gaps(runs, weight), (), {LINEAR_MEMORY: first}).canonicalize()


def _check_box(
    layout: Layout, elements: Mapping[str, object], box: Mapping[str, Number] | None
) -> dict[str, Number | None]:
    if box is None:
        return dict.fromkeys([axis for axis, iters in elements.items() if iters], None)
    if not isinstance(box, Mapping):
        raise LayoutError(f'box must be a mapping from axis to size, such as {{"m": 64}}, not {box!r}')
    missing = [axis for axis, iters in elements.items() if iters and axis not in box]
    if missing:
        raise LayoutError(f"box must have every axis that {layout} moves along, and {', '.join(missing)} is missing")
    return {axis: check_number(f"box[{axis!r}]", size, 1) for axis, size in box.items()}


def _nest(layout: Layout, axis: str, iters: list[tuple[Iter, Number]], size: Number | None) -> list[_Run]:
    """Return the digits of the positions on one axis, innermost first, with the strides in elements they stand for."""
    runs: list[_Run] = []
    filled: Number = 1
    left = list(iters)
    while left:
        found = next((one for one in left if _lowest(one, left)), None)
        if found is None:
            shown = ", ".join(str(it) for it, _ in left)
            raise LayoutError(
                f"the inverse of {layout} is no layout: on axis {axis!r}, among {shown} there is none over whose run "
                f"all others step a whole number of times"
            )
        left.remove(found)
        it, weight = found
        step = abs(it.stride)
        if step != filled:
            runs.append((step // filled, None))
        runs.append((it.extent, weight if it.stride > 0 else -weight))
        filled = step * it.extent
    if size is not None and size % filled != 0:
        raise LayoutError(f"box[{axis!r}] must be a multiple of {filled}, the positions {layout} takes up, not {size}")
    if size is not None and size != filled:
        runs.append((size // filled, None))
    return runs


def _lowest(one: tuple[Iter, Number], iters: list[tuple[Iter, Number]]) -> bool:
    run = abs(one[0].stride) * one[0].extent
    return all(abs(other[0].stride) % run == 0 for other in iters if other is not one)


def _section(layout: Layout, axis: str, iters: list[tuple[Iter, Number]], size: Number) -> list[_Run]:
    """Return the digits of the positions on one axis as `_nest` does, from such iters as cover it by themselves."""
    found = _cover(iters, 1, size)
    if found is None:
        raise LayoutError(
            f"the inverse of {layout} is no layout: it is not injective, and on axis {axis!r} no iters of D by "
            f"themselves cover {size} positions"
        )
    return found


def _cover(iters: list[tuple[Iter, Number]], filled: Number, size: Number) -> list[_Run] | None:
    """Return runs that take `filled` positions to `size`, each stepping over those before it, or None."""
    if filled == size:
        return []
    for k, (it, weight) in enumerate(iters):
        if abs(it.stride) != filled:
            continue
        extent = it.extent if filled * it.extent <= size else size // filled
        rest = _cover(iters[:k] + iters[k + 1 :], filled * extent, size)
        if rest is not None:
            return [(extent, weight if it.stride > 0 else -weight), *rest]
    return None


def _number_gaps(runs: list[_Run], size: Number) -> tuple[Iter, ...]:
    """Return D of the runs, innermost first, in which the digits without an element count on from `size`."""
    shard = []
    for extent, weight in runs:
        if weight is None:
            shard.append(make_iter(extent, size, LINEAR_MEMORY))
            size *= extent
        else:
            shard.append(make_iter(extent, weight, LINEAR_MEMORY))
    return tuple(reversed(shard))
