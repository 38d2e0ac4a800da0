"""Composition: one layout's linear memory is what another places."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.iters import Iter, make_iter
from tvm_axe.layout.symbolic import Number, proved_less

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout


def compose(layout: Layout, inner: Layout) -> Layout:
    """Return this layout after `inner`, whose addresses in linear memory are the elements that this one places.

    Law: ``composed.apply(x)`` is the union of ``layout.apply(y["m"])`` over the points y of ``inner.apply(x)``, each of
    its points moved by the rest of y, on the axes other than m. So what `inner` says about devices and threads stays,
    and this layout says what becomes of an address.

    >>> columns = Layout.parse("S[(4, 8) : (1, 4)]")
    >>> print(columns.compose(Layout.parse("S[(2, 8) : (1@tp, 4)]")))
    S[(2, 4, 2) : (1@tp, 1, 16)]

    Each iter of `inner` on m is cut into digits of this layout's canonical D. The composition is a layout iff the iter
    can be cut so, and no two iters together carry from one digit into the next.

    Parameters
    ----------
    inner : Layout
        What is applied first; its addresses must lie in [0, size) of this layout.

    Raises
    ------
    LayoutError
        If an address is outside, an iter can't be cut into digits, or a digit carries; says which.

    Notes
    -----
    Source: the composition of CuTe's layout algebra, carried over to named axes, replicas and offsets.
    """
    outer, first = layout.canonicalize(), inner.canonicalize()
    low, high = first.bounds(LINEAR_MEMORY)
    if not (low >= 0 and high < outer.size()):
        raise LayoutError(
            f"inner must have its addresses in [0, {outer.size()}), the elements of {layout}, and {inner} has them in "
            f"[{low}, {high + 1})"
        )
    weights: list[Number] = []
    weight: Number = 1
    for it in reversed(outer.D):
        weights.insert(0, weight)
        weight *= it.extent
    digits = [low // w % it.extent for it, w in zip(outer.D, weights)]
    offset: dict[str, Number] = defaultdict(int, outer.O.items())
    for axis, amount in first.O.items():
        if axis != LINEAR_MEMORY:
            offset[axis] += amount
    for it, digit in zip(outer.D, digits):
        offset[it.axis] += digit * it.stride
    parts: tuple[list[Iter], list[Iter]] = ([], [])
    for iters, part in zip((first.D, first.R), parts):
        for it in iters:
            if it.axis != LINEAR_MEMORY:
                part.append(it)
                continue
            for level, extent, steps in _cut(it, outer.D, weights, layout):
                place = outer.D[level]
                digits[level] += (extent - 1) * steps
                stride = place.stride * steps
                if it.stride < 0:
                    offset[place.axis] += (extent - 1) * stride
                    stride = -stride
                part.append(make_iter(extent, stride, place.axis))
    for it, digit in zip(outer.D, digits):
        if not digit < it.extent:
            start = f"the composition of {layout} after {inner} is no layout"
            raise LayoutError(f"{start}: digit {it} of the first carries")
    return layout._like(tuple(parts[0]), (*outer.R, *parts[1]), offset).canonicalize()


def _cut(it: Iter, digits: tuple[Iter, ...], weights: list[Number], layout: Layout) -> list[tuple[int, Number, Number]]:
    """Cut one iter over the elements of a layout into runs inside its digits.

    The runs are (which digit, extent, steps), the outermost first. Digit k counts from 0 to its extent, in steps of
    weights[k] elements.
    """
    extent, stride = it.extent, abs(it.stride)
    runs: list[tuple[int, Number, Number]] = []
    for level in range(len(digits) - 1, -1, -1):
        room = digits[level].extent
        if extent == 1 or proved_less(weights[level] * room - 1, stride):
            continue
        steps = stride // weights[level]
        if stride % weights[level] != 0:
            break
        if proved_less(steps * (extent - 1), room):
            runs.insert(0, (level, extent, steps))
            return runs
        fits = room // steps
        if room % steps != 0 or extent % fits != 0:
            break
        runs.insert(0, (level, fits, steps))
        extent //= fits
        stride = weights[level] * room
    if extent == 1:
        return runs
    raise LayoutError(f"the composition with {layout} is no layout: iter {it} of inner can't be cut into its digits")
