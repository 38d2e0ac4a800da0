"""Layouts: where each element of a tensor lives, from the device mesh down to the lane.

A layout is L = (D, R, O) over named axes. The row-major index x of an element is split over the extents of D, the
first the most significant, into digits c_i; R says along which axes copies are held, and O where everything starts:

    f_L(x) = { sum of c_i * s_i @ a_i + sum of r_j * t_j @ b_j + O : 0 <= r_j < e_j }

Four rows of eight over two devices, two rows each, each row a warp, two copies of everything:

>>> from tvm_axe.layout import Layout, Mesh
>>> layout = Layout.parse("S[(2, 2, 8) : (1@tp, 1@warpid, 1)] + R[2 : 1@dp]")
>>> for place in sorted(layout.apply(3, 5, shape=(4, 8)), key=str):
...     print(place)
Coordinate({'dp': 1, 'm': 5, 'tp': 1, 'warpid': 1})
Coordinate({'m': 5, 'tp': 1, 'warpid': 1})

On a mesh, the layouts that cut dimensions into blocks have constructors, and say what each device holds. Here ten rows
over four devices, three a device and one on the last:

>>> mesh = Mesh({"tp": 4, "dp": 2})
>>> rows = Layout.sharded((10, 8), mesh, {0: "tp"})
>>> print(rows)
S[(4, 3, 8) : (1@tp, 8, 1)] + R[2 : 1@dp]
>>> rows.sharding((10, 8), mesh), rows.local_shape((10, 8), mesh)
({0: 'tp'}, (3, 8))
>>> rows.local_region((10, 8), mesh, device=mesh.device({"tp": 3, "dp": 0}))
(slice(9, 10, None), slice(0, 8, None))

Source: Axe (arXiv:2601.19092), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import INT64_MAX, Coordinate, check_int
from tvm_axe.layout.iters import Iter, merge_replica, merge_shard
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.sharding import block_iters, block_shape, check_shape, find_blocks
from tvm_axe.layout.text import format_layout, parse_layout


@dataclass(frozen=True)
class Layout:
    """The set-valued map from a tensor's elements to points on named axes; see the module for the definition.

    Equality is structural: the same D in order, the same R as a multiset, the same non-zero offsets. Layouts with the
    same map but other iters compare equal after `canonicalize`.

    Parameters
    ----------
    D : Iterable[Iter]
        The shard: how the row-major index is split, most significant first.
    R : Iterable[Iter]
        The replicas: a multiset, kept sorted by axis and stride.
    O : Mapping[str, int]
        The offset on each axis.

    Raises
    ------
    LayoutError
        If a part is of another kind, or an index or a coordinate may exceed 64 bits.
    """

    D: tuple[Iter, ...]
    R: tuple[Iter, ...]
    O: Coordinate

    def __init__(self, D: Iterable[Iter], R: Iterable[Iter] = (), O: Mapping[str, int] = Coordinate({})) -> None:
        shard, replica, offset = _check_iters("D", D), _check_iters("R", R), Coordinate(O)
        object.__setattr__(self, "D", shard)
        object.__setattr__(self, "R", tuple(sorted(replica, key=lambda it: (it.axis, it.stride, it.extent))))
        object.__setattr__(self, "O", offset)
        for part, iters in (("D", shard), ("R", replica)):
            if math.prod(it.extent for it in iters) > INT64_MAX:
                raise LayoutError(f"{part}: the product of its extents must fit in 64 bits, in {self}")
        for axis in {it.axis for it in (*shard, *replica)}:
            reach = [(it.extent - 1) * it.stride for it in (*shard, *replica) if it.axis == axis]
            low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
            if offset[axis] + low < -INT64_MAX or offset[axis] + high > INT64_MAX:
                raise LayoutError(f"the coordinates on axis {axis!r} must fit in 64 bits, in {self}")

    @property
    def size(self) -> int:
        """The number of elements it places: the product of D's extents."""
        return math.prod(it.extent for it in self.D)

    def admits(self, shape: Sequence[int]) -> bool:
        """Whether it places tensors of `shape`. Law: iff the product of `shape` is `size`."""
        return math.prod(check_shape(shape)) == self.size

    def apply(self, *index: int, shape: Sequence[int] | None = None) -> frozenset[Coordinate]:
        """Return every point where one element lives.

        Law: f_L of the module's definition; with a `shape`, ``apply(*index, shape=shape)`` is ``apply`` of the
        row-major position of `index` in `shape`.

        Parameters
        ----------
        *index : int
            The element's row-major position; or, with `shape`, its position in each dimension.
        shape : Sequence[int], optional
            The tensor's shape, which the layout must admit.

        Raises
        ------
        LayoutError
            If the layout doesn't admit the shape, or the index is not inside it.
        """
        if shape is not None and not self.admits(shape):
            raise LayoutError(f"layout {self} places {self.size} elements, and shape {tuple(shape)} has another number")
        extents = (self.size,) if shape is None else tuple(shape)
        if len(index) != len(extents):
            raise LayoutError(f"index needs one int for each dimension of {extents}, not {index}")
        flat = 0
        for position, extent in zip(index, extents):
            if check_int("index", position) not in range(extent):
                raise LayoutError(f"index {index} is not inside {extents}")
            flat = flat * extent + position
        base = dict(self.O)
        for it in reversed(self.D):
            flat, digit = divmod(flat, it.extent)
            base[it.axis] = base.get(it.axis, 0) + digit * it.stride
        points = set()
        for copy in product(*(range(it.extent) for it in self.R)):
            point = dict(base)
            for step, it in zip(copy, self.R):
                point[it.axis] = point.get(it.axis, 0) + step * it.stride
            points.add(Coordinate(point))
        return frozenset(points)

    def canonicalize(self) -> Layout:
        """Return the simplest layout with the same map.

        D loses its unit iters, and neighbours that are one run are merged. R, a multiset, loses its unit iters; a
        negative stride becomes a positive one with an offset; and a run that fills the steps of a coarser one absorbs
        it: (e1, t) with (e2, q * t), q <= e1, becomes (e1 + q * (e2 - 1), t).

        Law: ``f_L`` is unchanged, and ``canonicalize`` is idempotent. Layouts with equal maps get equal forms if their
        canonical replicas meet the gap condition: on each axis, strides ascending, every stride is greater than the
        sum of (e - 1) * t over the replicas before it, so that no two copies can meet. (Every D meets its own: its
        form is unique.)

        Source: Axe (arXiv:2601.19092), canonical form.
        """
        replica, moved = merge_replica(self.R)
        offset = {axis: self.O[axis] + moved.get(axis, 0) for axis in {*self.O, *moved}}
        return Layout(merge_shard(self.D), replica, offset)

    @staticmethod
    def replicated(shape: Sequence[int], mesh: Mesh) -> Layout:
        """Return the layout in which every device of `mesh` holds the whole tensor, row-major.

        Law: ``Layout.sharded(shape, mesh, {})``.
        """
        return Layout.sharded(shape, mesh, {})

    @staticmethod
    def sharded(shape: Sequence[int], mesh: Mesh, dims: Mapping[int, str]) -> Layout:
        """Return the block sharding of a tensor over mesh axes.

        Law: the device at coordinate c on axis ``dims[d]``, which has n devices, holds positions
        [c * b, (c + 1) * b) of dimension d, with b = ceil(extent / n), whatever its coordinates on the other axes;
        it holds its block row-major from address 0. A mesh axis of one device leaves no iter.

        Parameters
        ----------
        shape : Sequence[int]
            The tensor's shape, in elements. Where n doesn't divide the extent, the layout places the tensor padded to
            n * b.
        mesh : Mesh
            The devices.
        dims : Mapping[int, str]
            Which mesh axis cuts which dimension; the others hold replicas.

        Raises
        ------
        LayoutError
            If a dimension or a mesh axis is unknown, or an axis cuts two dimensions.
        """
        return Layout(*block_iters(shape, mesh, dims))

    def sharding(self, shape: Sequence[int], mesh: Mesh) -> dict[int, str]:
        """Return which mesh axis cuts which dimension of `shape`: the inverse of `sharded`.

        Law: ``Layout.sharded(shape, mesh, layout.sharding(shape, mesh))`` has the map of ``layout``. Mesh axes of one
        device cut nothing, so they are never part of the result.

        Parameters
        ----------
        shape : Sequence[int]
            The tensor's shape, before padding.
        mesh : Mesh
            The devices.

        Raises
        ------
        LayoutError
            If the layout names a mesh axis that the mesh lacks, or is not a block sharding of the shape; says why.
        """
        return find_blocks(self, shape, mesh)

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of what a device holds, padding included, so that it is the same on every device.

        Law: dimension d has ceil(extent / n) elements if an axis of n devices cuts it, all of them otherwise.

        Raises
        ------
        LayoutError
            As `sharding`.
        """
        return block_shape(shape, mesh, self.sharding(shape, mesh))

    def local_region(self, shape: Sequence[int], mesh: Mesh, device: int) -> tuple[slice, ...]:
        """Return the part of a tensor of `shape` that `device` holds: one slice a dimension, empty for padding alone.

        Law: an element is in the region iff one of its points, `apply` on the padded shape, has the device's
        coordinates.

        Raises
        ------
        LayoutError
            As `sharding`; and if the mesh has no such device.
        """
        dims = self.sharding(shape, mesh)
        coords = mesh.coords(device)
        region = []
        for dim, (extent, block) in enumerate(zip(shape, block_shape(shape, mesh, dims))):
            start = min(extent, coords[dims[dim]] * block) if dim in dims else 0
            region.append(slice(start, min(extent, start + block)))
        return tuple(region)

    @staticmethod
    def parse(text: str) -> Layout:
        """Read a layout from its text, such as ``S[(4, 32, 128) : (1@tp, 128, 1)] + R[2 : 1@dp] + 3@warpid``.

        Law: ``Layout.parse(str(layout)) == layout``.

        Raises
        ------
        LayoutError
            If the text is malformed, with the position where, or states no valid layout.
        """
        return Layout(*parse_layout(text))

    def __str__(self) -> str:
        return format_layout(self.D, self.R, self.O)


def _check_iters(part: str, iters: Iterable[Iter]) -> tuple[Iter, ...]:
    """Return `iters` as a tuple, or raise LayoutError naming the part of the layout."""
    if isinstance(iters, str) or not isinstance(iters, Iterable):
        raise LayoutError(f"{part} must be a sequence of Iter, not {iters!r}")
    checked = tuple(iters)
    for it in checked:
        if not isinstance(it, Iter):
            raise LayoutError(f"{part} must hold Iter(extent, stride, axis), not {it!r}")
    return checked
