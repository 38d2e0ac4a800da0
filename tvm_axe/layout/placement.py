"""Placements: which mesh axes cut each dimension of a tensor, and over which it is a partial sum.

A placement is what a layout says about devices when its data lies in blocks: for each dimension the mesh axes that cut
it, the major one first, and the axes whose devices each hold one term of a sum. All other axes hold replicas. On a 2-D
mesh with axes 0 and 1, the spellings S0S1, S1S0, S0R and partial of a dimension are all there:

>>> from tvm_axe.layout import Layout, Mesh
>>> mesh = Mesh({"dp": 2, "tp": 4})
>>> print(Placement((("dp", "tp"), ())).layout((16, 6), mesh))
S[(2, 4, 2, 6) : (1@dp, 1@tp, 6, 1)]
>>> print(Placement((("tp", "dp"), ())).layout((16, 6), mesh))
S[(4, 2, 2, 6) : (1@tp, 1@dp, 6, 1)]

A partial sum is an explicit leading dimension on its mesh axis, which the shape leaves out:

>>> partial = Placement((("dp",), ()), partial=frozenset({"tp"}))
>>> print(partial.layout((16, 6), mesh))
S[(4, 2, 8, 6) : (1@tp, 1@dp, 6, 1)]
>>> Placement.of(partial.layout((16, 6), mesh), (16, 6), mesh) == partial
True

Source: Axe (arXiv:2601.19092), section 2.2 (figure 2, shards and replicas) and section 3.2 (figure 8, addends).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import is_mesh_axis
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.shapes import check_shape
from tvm_axe.layout.sharding import block_iters, block_numbers, block_region, block_shape, broken_rule
from tvm_axe.layout.symbolic import Number


@dataclass(frozen=True)
class Placement:
    """The mesh axes that cut each dimension, and those that hold the terms of a sum.

    Parameters
    ----------
    cuts : tuple[tuple[str, ...], ...]
        The mesh axes that cut each dimension, the major one first: the device at coordinates (c, d) on the axes (a, b)
        holds block c * size(b) + d.
    partial : frozenset[str]
        The mesh axes over whose devices the tensor is still to be summed.

    Raises
    ------
    LayoutError
        If an axis is named twice.
    """

    cuts: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        named = self.axes
        for axis in named:
            if named.count(axis) > 1:
                raise LayoutError(
                    f"mesh axis {axis!r} can cut one dimension or hold one sum, once; it is twice in {self}"
                )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that hold no replicas: those of the sum by name, then those of the cuts."""
        return (*sorted(self.partial), *(axis for cut in self.cuts for axis in cut))

    def fits(self, shape: Sequence[int], mesh: Mesh) -> bool:
        """Return whether blocks of `shape` nest: a dimension that several axes cut must divide by their product.

        One axis may cut any extent, its last devices holding less. With several, the blocks of the major axis would
        not be unions of the finer ones.
        """
        return all(len(cut) < 2 or extent % _blocks(cut, mesh) == 0 for extent, cut in zip(shape, self.cuts))

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of what a device holds, padding included: ceil(extent / blocks) in each dimension."""
        return block_shape(shape, mesh, self.cuts)

    def blocks(self, mesh: Mesh, device: int) -> tuple[int, ...]:
        """Return the number of the block that `device` holds in each dimension."""
        return block_numbers(mesh, self.cuts, device)

    def region(self, shape: Sequence[int], mesh: Mesh, device: int) -> tuple[tuple[int, int], ...]:
        """Return the elements that `device` holds of each dimension, from the first to before the last, unpadded."""
        return tuple((part.start, part.stop) for part in block_region(shape, mesh, self.cuts, device))

    def layout(self, shape: Sequence[int], mesh: Mesh) -> Layout:
        """Return the layout in which every device holds its block row-major, the terms of sums in leading dimensions.

        Law: ``Placement.of(placement.layout(shape, mesh), shape, mesh) == placement`` for placements that fit, name
        no axis of one device and cut no dimension of extent 1.

        Raises
        ------
        LayoutError
            If the placement is of another number of dimensions, names an axis that the mesh lacks, or doesn't fit.
        """
        shape = check_shape(shape)
        if len(shape) != len(self.cuts):
            raise LayoutError(
                f"shape {shape} has {len(shape)} dimensions, and the placement cuts {len(self.cuts)}: {self}"
            )
        for axis in self.axes:
            mesh.axis_size(axis)
        if not self.fits(shape, mesh):
            raise LayoutError(_uneven(self, shape, mesh))
        return self._layout(shape, mesh, [axis for axis in mesh.names if axis in self.partial])

    def _layout(self, shape: Sequence[int], mesh: Mesh, partial: Sequence[str]) -> Layout:
        """Like `layout`, unchecked, with the terms of sums in the order of `partial`."""
        return Layout(*block_iters(shape, mesh, self.cuts, partial))

    @staticmethod
    def of(layout: Layout, shape: Sequence[int], mesh: Mesh) -> Placement:
        """Return the placement that `layout` gives a tensor of `shape` on `mesh`.

        Law: ``Placement.of(layout, shape, mesh).layout(shape, mesh)`` has the map of ``layout``, up to the order of the
        terms of a sum. Axes of one device are in no placement.

        Parameters
        ----------
        layout : Layout
            Blocks, row-major on each device. Its leading iters may be the terms of sums, one mesh axis each.
        shape : Sequence[int]
            The tensor's shape, without padding and without the terms of sums.
        mesh : Mesh
            The devices.

        Raises
        ------
        LayoutError
            If the layout names a mesh axis that the mesh lacks, is not in blocks, or its size doesn't fit the shape;
            or if it has two meanings, because a dimension of extent 1 may be cut or may be a sum; says which and why.
        """
        shape = check_shape(shape)
        if is_symbolic(layout):
            raise LayoutError(f"layout {layout} must be of ints alone to be read as blocks of shape {shape}")
        canonical = layout.canonicalize()
        for axis in [it.axis for it in (*layout.D, *layout.R)] + list(layout.O):
            if is_mesh_axis(axis) and axis not in mesh:
                raise LayoutError(
                    f"layout {layout} names mesh axis {axis!r}, and mesh {mesh} has {', '.join(mesh.names)}"
                )
        candidates = list(_candidates(canonical, len(shape)))
        matches = [c for c, partial in candidates if c._layout(shape, mesh, partial).canonicalize() == canonical]
        fitting = [match for match in matches if match.fits(shape, mesh)]
        if len({match.partial for match in fitting}) > 1:
            axes = ", ".join(map(repr, sorted(frozenset.union(*(match.partial for match in fitting)))))
            raise LayoutError(
                f"layout {layout} may hold a sum over {axes} of shape {shape}, or cut its dimension of extent 1; "
                "leave out the dimensions of extent 1"
            )
        if fitting:
            return fitting[0]
        start = f"layout {layout} doesn't place shape {shape} in blocks on mesh {mesh}: "
        if matches:
            raise LayoutError(start + _uneven(matches[0], shape, mesh))
        raise LayoutError(start + _why_not(canonical, shape, mesh, [candidate for candidate, _ in candidates]))


def whole(number: Number) -> int:
    """Return a number of a layout if it is an int, and raise LayoutError if it is an expression."""
    if not isinstance(number, int):
        raise LayoutError(f"an int is needed, not the expression {number}")
    return number


def is_symbolic(layout: Layout) -> bool:
    """Return whether an extent, a stride or an offset is an expression."""
    numbers = [number for it in (*layout.D, *layout.R) for number in (it.extent, it.stride)]
    return not all(isinstance(number, int) for number in (*numbers, *layout.O.values()))


def _blocks(cut: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh[axis] for axis in cut)


def _candidates(canonical: Layout, dims: int) -> Iterator[tuple[Placement, tuple[str, ...]]]:
    """Yield the placements whose axes come in the order of D, and the axes of their sums, which lead, in that order."""
    order = tuple(dict.fromkeys(it.axis for it in canonical.D if is_mesh_axis(it.axis)))
    for terms in range(len(order) + 1):
        cutting = order[terms:]
        for where in combinations_with_replacement(range(dims), len(cutting)):
            cuts = tuple(tuple(a for a, d in zip(cutting, where) if d == dim) for dim in range(dims))
            yield Placement(cuts, frozenset(order[:terms])), order[:terms]


def _uneven(placement: Placement, shape: Sequence[int], mesh: Mesh) -> str:
    """Return what is wrong with a placement that doesn't fit."""
    dim = next(d for d, cut in enumerate(placement.cuts) if len(cut) > 1 and shape[d] % _blocks(cut, mesh))
    cut = placement.cuts[dim]
    blocks = _blocks(cut, mesh)
    return (
        f"mesh axes {', '.join(cut)} cut dimension {dim} of extent {shape[dim]} into {blocks} blocks, which must "
        "divide it; only a single axis may leave its last devices less"
    )


def _why_not(canonical: Layout, shape: tuple[int, ...], mesh: Mesh, candidates: list[Placement]) -> str:
    """Return the first rule of placements that `canonical` breaks."""
    broken = broken_rule(canonical, mesh)
    if broken is not None:
        return broken
    total = canonical.size()
    sizes = [candidate._layout(shape, mesh, sorted(candidate.partial)).size() for candidate in candidates]
    if total not in sizes:
        asked = " or ".join(map(str, dict.fromkeys(sizes)))
        return (
            f"its extents multiply to {total}, and the shape to {math.prod(shape)}, which in whole blocks and "
            f"with the terms of a sum makes {asked}"
        )
    such = candidates[0]._layout(shape, mesh, sorted(candidates[0].partial))
    return f"blocks are contiguous in their dimension and row-major on the device, such as {such}"
