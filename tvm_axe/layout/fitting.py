"""Fitting: which digits of an index the iters of a layout are, for a tensor of a shape on a mesh.

The extents of a layout's iters multiply to those of the dimensions, each padded to whole blocks. So the iters fall to
the dimensions in order, the leading ones perhaps to the terms of a sum; in one way, or the layout is refused:

>>> from tvm_axe.layout import Layout, Mesh
>>> dims, terms = fit(Layout.parse("S[(3, 2, 2) : (2, 1@x, 1)]"), (11,), Mesh({"x": 2}))
>>> [[f"{digit.it}, of {digit.radix}" for digit in digits] for digits in dims], terms
([['3 : 2, of 4', '2 : 1@x, of 2', '2 : 1, of 1']], ())

Source: Axe (arXiv:2601.19092), appendix B, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, is_mesh_axis
from tvm_axe.layout.iters import Iter
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.placement import is_symbolic
from tvm_axe.layout.sharding import check_mesh

__all__ = ["Digit", "Digits", "digits_of", "fit"]


class Digit(NamedTuple):
    """One iter of a dimension: its index is ``sum(digit * radix)`` over the dimension's iters."""

    it: Iter
    radix: int


Digits = tuple[Digit, ...]
"""Those of one dimension, the major one first."""


def digits_of(iters: Sequence[Iter]) -> Digits:
    """Return the iters of one dimension, the major one first, as its digits."""
    radix, digits = 1, list[Digit]()
    for it in reversed(iters):
        digits.append(Digit(it, radix))
        radix *= int(it.extent)
    return tuple(digits[::-1])


def fit(
    layout: Layout, shape: tuple[int, ...], mesh: Mesh, sums: bool = True
) -> tuple[tuple[Digits, ...], tuple[Iter, ...]]:
    """Return the digits of each dimension, and the leading iters that number the terms of a sum.

    Parameters
    ----------
    layout : Layout
        The layout, of iters on mesh axes and on linear memory.
    shape : tuple[int, ...]
        The tensor's shape, without padding and without terms of sums.
    mesh : Mesh
        The devices.
    sums : bool
        Whether there may be terms of a sum.

    Raises
    ------
    LayoutError
        If the mesh can't hold the layout, or it doesn't fit the shape in exactly one way.
    """
    if is_symbolic(layout):
        raise LayoutError(f"layout {layout} must be of ints alone to be read on a mesh")
    check_mesh(layout, mesh)
    _check_axes(layout, mesh)
    found: list[tuple[tuple[Digits, ...], tuple[Iter, ...]]] = []
    for terms in _leading(layout) if sums else [0]:
        rest = layout.D[terms:]
        groups = [_grouped(rest, extents) for extents in _paddings(rest, shape, mesh)]
        fitting = [dims for dims in groups if dims is not None and all(map(_is_least, dims, shape))]
        fitting.sort(key=lambda dims: not all(map(_nests, dims, shape)))  # which is stable
        found += [(dims, layout.D[:terms]) for dims in fitting[:1]]
    found = [each for each in found if all(map(_nests, each[0], shape))] or found
    if not found:
        raise LayoutError(
            f"layout {layout} doesn't fit shape {shape} on mesh {mesh}: its extents multiply to {layout.size()}, "
            "and must give each dimension its extent, or that rounded up to whole blocks"
        )
    if len(found) > 1:
        raise LayoutError(
            f"layout {layout} may hold a sum of shape {shape}, or cut its dimension of extent 1; leave out the "
            "dimensions of extent 1"
        )
    return found[0]


def _check_axes(layout: Layout, mesh: Mesh) -> None:
    """Check that devices and addresses are there, and that a device holds an element once and by itself."""
    for it in (*layout.D, *layout.R):
        if it.axis != LINEAR_MEMORY and not is_mesh_axis(it.axis):
            raise LayoutError(f"layout {layout}: {it} is on axis {it.axis!r}; on a mesh only its axes and memory hold")
    if any(it.axis == LINEAR_MEMORY for it in layout.R):
        raise LayoutError(f"layout {layout} has replicas in linear memory, and a device holds an element once")
    for axis, size in (*mesh.axes.items(), (LINEAR_MEMORY, None)):
        lowest, highest = layout.bounds(axis)
        if int(lowest) < 0 or (size is not None and int(highest) >= size):
            raise LayoutError(
                f"layout {layout} reaches from {lowest} to {highest} on {axis!r}, which starts at 0"
                + ("" if size is None else f" and has {size} devices")
            )
    in_memory = [it for it in layout.D if it.axis == LINEAR_MEMORY]
    if in_memory and not Layout(in_memory).is_injective():
        raise LayoutError(f"layout {layout} puts two elements at one address")
    for axis in mesh.names:
        below = 1
        iters = [it for it in (*layout.D, *layout.R) if it.axis == axis and int(it.extent) > 1]
        for it in sorted(iters, key=lambda it: abs(int(it.stride))):
            if abs(int(it.stride)) % below:
                raise LayoutError(
                    f"layout {layout}: on {axis!r}, {it} steps into the {below} devices of those below it"
                )
            below = abs(int(it.stride)) * int(it.extent)


def _leading(layout: Layout) -> Iterator[int]:
    """Yield the numbers of leading iters that may be terms of a sum."""
    yield 0
    for count, it in enumerate(layout.D, 1):
        if not is_mesh_axis(it.axis):
            return
        yield count


def _paddings(iters: Sequence[Iter], shape: Sequence[int], mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """Yield the padded shapes that the iters may be of: first the shape; then as they stand; then in whole blocks."""
    total = math.prod(int(it.extent) for it in iters)
    if total == math.prod(shape):
        yield tuple(shape)
    standing, left = [], iter(iters)
    for extent in shape:
        have = 1
        while have < extent and (it := next(left, None)) is not None:
            have *= int(it.extent)
        standing.append(have)
    if math.prod(standing) == total:
        yield tuple(standing)
    sizes = {1}
    for size in mesh.shape:
        sizes |= {size * other for other in sizes}
    options = [sorted({size * -(-extent // size) for size in sizes}) for extent in shape]
    yield from (extents for extents in product(*options) if math.prod(extents) == total)


def _grouped(iters: Sequence[Iter], extents: Sequence[int]) -> tuple[Digits, ...] | None:
    """Return the digits of each dimension, or None where a boundary falls inside an iter."""
    try:
        layout, seps = Layout(iters).group(extents)
    except LayoutError:
        return None
    return tuple(digits_of(layout.D[start:stop]) for start, stop in pairwise(seps))


def _is_least(digits: Digits, extent: int) -> bool:
    """Return whether a dimension is padded no more than whole blocks ask for."""
    padded = math.prod(int(digit.it.extent) for digit in digits)
    if padded == extent:
        return True
    in_memory = [int(digit.it.extent) for digit in digits if digit.it.axis == LINEAR_MEMORY] or [1]
    return padded > extent and any(padded // n * (n - 1) < extent for n in in_memory)


def _nests(digits: Digits, extent: int) -> bool:
    """Return whether blocks of a dimension's axes nest: two may cut it only where it isn't padded."""
    padded = math.prod(int(digit.it.extent) for digit in digits)
    return padded == extent or sum(digit.it.axis != LINEAR_MEMORY for digit in digits) < 2
