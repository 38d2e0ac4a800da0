"""Layouts: where each element of a tensor lives, from the device mesh down to the lane.

A layout is L = (D, R, O) over named axes. The row-major index x of an element is split over the extents of D, the
first the most significant, into digits c_i; R says along which axes copies are held, and O where everything starts::

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

Layouts make layouts. A warp's fragment, tiled over four warps; the third tile; and the fragment taken out again:

>>> fragment = Layout.parse("S[(8, 4, 2) : (4@laneid, 1@laneid, 1)]")
>>> tiles = fragment.tile(Layout.parse("S[4 : 1@warpid]"), (4, 1), (8, 8))
>>> print(tiles)
S[(4, 32, 2) : (1@warpid, 1@laneid, 1)]
>>> print(tiles.slice((32, 8), [(16, 24), (0, 8)]))
S[(32, 2) : (1@laneid, 1)] + 2@warpid
>>> print(fragment.is_tile_inner(tiles, (32, 8), (8, 8)))
S[4 : 1@warpid]

Source: Axe (arXiv:2601.19092), section 2.3, Definitions 2.1 to 2.3; docs/decisions/0021-the-paper.md has what differs.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from tvm_axe.errors import LayoutError
from tvm_axe.layout import composing, grouping, image, inverting, mesh_side, packing, slicing, summing, threads, tiling
from tvm_axe.layout.axes import INT64_MAX, Coordinate, check_int, make_coordinate
from tvm_axe.layout.iters import Iter, merge_replica, merge_shard, sort_replica
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.shapes import check_extents, check_shape, show
from tvm_axe.layout.sharding import Cuts, block_iters, block_region, block_shape, checked_cuts, find_blocks, find_cuts
from tvm_axe.layout.symbolic import Number, Symbolic, index_value, is_expression
from tvm_axe.layout.text import format_layout, parse_layout
from tvm_axe.notebook import preformatted

if TYPE_CHECKING:
    from tvm_axe.layout.memory import Access
    from tvm_axe.layout.picture import Picture

_Plan = tuple[Number, tuple[tuple[Number, Number, str], ...]]
"""What `apply` needs at every call: the size, and (extent, stride, axis) of D's iters, the innermost first."""


@dataclass(frozen=True, init=False, slots=True)
class Layout:
    """The set-valued map from a tensor's elements to points on named axes; see the module for the definition.

    Equality and hash are structural: the same D in order, the same R as a multiset, the same non-zero offsets. So a
    layout equals what its text reads as, and a grouped layout is not the ungrouped one, although they have one map. Of
    the map, `canonicalize` gives the form to compare, hash or print, and `equivalent` decides.

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
    _canonical: Layout | None = field(repr=False, compare=False)
    _plan: _Plan | None = field(repr=False, compare=False)

    def __init__(self, D: Iterable[Iter], R: Iterable[Iter] = (), O: Mapping[str, Number] = Coordinate({})) -> None:
        shard, replica, offset = _check_iters("D", D), _check_iters("R", R), Coordinate(O)
        _fill(self, shard, sort_replica(replica), offset)
        self._check_fits()

    def _like(self, D: tuple[Iter, ...], R: Iterable[Iter], O: Mapping[str, Number]) -> Layout:
        """Return the layout of parts made from valid ones, of which only the range is checked: 64 bits."""
        layout = object.__new__(Layout)
        _fill(layout, D, sort_replica(R), O if type(O) is Coordinate else make_coordinate(O))
        layout._check_fits()
        return layout

    def _regrouped(self, D: tuple[Iter, ...]) -> Layout:
        """Return the layout with its iters of D cut or reordered, which reach what they did before."""
        layout = object.__new__(Layout)
        _fill(layout, D, self.R, self.O)
        return layout

    def _check_fits(self) -> None:
        """Raise LayoutError if an index or a coordinate may exceed 64 bits; what is symbolic is not counted."""
        total = 0
        for part, iters in (("D", self.D), ("R", self.R)):
            size = 1
            for it in iters:
                if type(it.extent) is int:
                    size *= it.extent
                    if type(it.stride) is int:
                        total += (it.extent - 1) * abs(it.stride)
            if size > INT64_MAX:
                raise LayoutError(f"{part}: the product of its extents must fit in 64 bits, in {self}")
        if total + sum(abs(o) for _, o in self.O.items() if type(o) is int) <= INT64_MAX:
            return
        for axis in image.axes_of(self):
            low, high = image.bounds(self, axis)
            if low < -INT64_MAX or high > INT64_MAX:
                raise LayoutError(f"the coordinates on axis {axis!r} must fit in 64 bits, in {self}")

    def size(self, axis_name: str | None = None) -> Number:
        """Return the number of elements it places: the product of D's extents, or of those on one axis.

        >>> Layout.parse("S[(4, 8, 2) : (1@tp, 2, 1)]").size(), Layout.parse("S[(4, 8, 2) : (1@tp, 2, 1)]").size("m")
        (64, 16)
        """
        return math.prod(it.extent for it in self.D if axis_name is None or it.axis == axis_name)

    def admits(self, shape: Sequence[Number]) -> bool:
        """Return whether it places tensors of `shape`. Law: iff the product of `shape` is `size`."""
        return math.prod(check_extents(shape)) == self.size()

    def apply(self, *index: Number, shape: Sequence[Number] | None = None) -> frozenset[Coordinate]:
        """Return every point where one element lives.

        Law: f_L of the module's definition; with a `shape`, ``apply(*index, shape=shape)`` is ``apply`` of the
        row-major position of `index` in `shape`.

        Parameters
        ----------
        *index : int
            The element's row-major position; or, with `shape`, its position in each dimension. Where one is an
            expression of the compiler, it is taken to be inside, and the points have expressions for positions.
        shape : Sequence[int], optional
            The tensor's shape, which the layout must admit.

        Raises
        ------
        LayoutError
            If the layout doesn't admit the shape, or the index is not inside it; or if R has a symbolic extent, for
            then there is no telling how many points there are.
        """
        if self._plan is None:
            _set_plan(self, (self.size(), tuple((it.extent, it.stride, it.axis) for it in reversed(self.D))))
        size, digits = cast(_Plan, self._plan)
        extents = (size,) if shape is None else check_extents(shape)
        if shape is not None and math.prod(extents) != size:
            raise LayoutError(
                f"layout {self} places {size} elements, and shape {show(extents)} has {math.prod(extents)}"
            )
        if len(index) != len(extents):
            raise LayoutError(f"index needs one int for each dimension of {show(extents)}, not {index}")
        flat: Number = 0
        for position, extent in zip(index, extents):
            if type(position) is not int or type(extent) is not int:
                position = _symbolic_position(position, extent)
            elif not 0 <= position < extent:
                raise LayoutError(f"index {index} is not inside {show(extents)}")
            flat = flat * extent + position
        base: dict[str, Number] = dict(self.O.items())
        for extent, stride, axis in digits:
            base[axis] = base.get(axis, 0) + flat % extent * stride
            flat //= extent
        if not self.R:
            return frozenset((make_coordinate(base),))
        points = set()
        for copy in product(*(range(_copies(it)) for it in self.R)):
            point = dict(base)
            for step, it in zip(copy, self.R):
                point[it.axis] = point.get(it.axis, 0) + step * it.stride
            points.add(make_coordinate(point))
        return frozenset(points)

    def canonicalize(self) -> Layout:
        """Return the simplest layout with the same map.

        D loses its unit iters, and neighbours that are one run are merged. R, a multiset, loses its unit iters; a
        negative stride becomes a positive one with an offset; and a run that fills the steps of a coarser one absorbs
        it: (e1, t) with (e2, q * t), q <= e1, becomes (e1 + q * (e2 - 1), t).

        Law: ``f_L`` is unchanged, and ``canonicalize`` is idempotent. Layouts with equal maps get equal forms if their
        canonical replicas meet the gap condition: on each axis, strides ascending, every stride is greater than the
        sum of (e - 1) * t over the replicas before it, so that no two copies can meet. (Every D meets its own: its
        form is unique.) What is symbolic is merged where that was proved valid.

        Source: Axe (arXiv:2601.19092), appendix A: rules D0 to C2, with q <= e as the proof of C2 has it, and Theorems
        A.2, A.8 and A.14. Without the gap condition the rules for R can end in several forms, so that `equivalent`
        compares the sets.
        """
        canonical = self._canonical
        if canonical is None:
            shard = merge_shard(self.D)
            replica, offset = self.R, self.O
            if replica:
                replica, moved = merge_replica(replica)
                if moved:
                    offset = make_coordinate({a: offset[a] + moved.get(a, 0) for a in {*offset, *moved}})
            canonical = self
            if shard is not self.D or replica != self.R:
                canonical = object.__new__(Layout)
                _fill(canonical, shard, replica, offset)
                _set_canonical(canonical, canonical)
            _set_canonical(self, canonical)
        return canonical

    # The algebra: each operation stands in a module of its own kind, with the law that defines it.
    bounds = image.bounds
    span = image.span
    is_injective = image.is_injective
    covers = image.covers
    equivalent = image.equivalent
    group = grouping.group
    group_many = grouping.group_many
    permute = grouping.permute
    permute_dims = grouping.permute_dims
    permute_by_groups = grouping.permute_by_groups
    tile = tiling.tile
    tile_to = tiling.tile_to
    is_tile_inner = tiling.is_tile_inner
    is_tile_outer = tiling.is_tile_outer
    direct_sum = summing.direct_sum
    is_direct_sum_left = summing.is_direct_sum_left
    is_direct_sum_right = summing.is_direct_sum_right
    slice = slicing.slice_region
    compose = composing.compose
    inverse = inverting.inverse
    pack = packing.pack
    unpack = packing.unpack
    broadcast = packing.broadcast
    on_threads = threads.on_threads
    project = mesh_side.project
    owner = mesh_side.owner
    mask = mesh_side.mask

    @staticmethod
    def replicated(shape: Sequence[int], mesh: Mesh) -> Layout:
        """Return the layout in which every device of `mesh` holds the whole tensor, row-major.

        Law: ``Layout.sharded(shape, mesh, {})``.
        """
        return Layout.sharded(shape, mesh, {})

    @staticmethod
    def sharded(shape: Sequence[int], mesh: Mesh, dims: Mapping[int, str | tuple[str, ...]]) -> Layout:
        """Return the block sharding of a tensor over mesh axes.

        Law: the device at coordinate c on axis ``dims[d]``, which has n devices, holds positions
        [c * b, (c + 1) * b) of dimension d, with b = ceil(extent / n), whatever its coordinates on the other axes;
        it holds its block row-major from address 0. Of several axes, the first is the major one: (c, d) on axes of n
        and m devices counts as c * m + d on one of n * m. A mesh axis of one device leaves no iter.

        Parameters
        ----------
        shape : Sequence[int]
            The tensor's shape, in elements. Where n doesn't divide the extent, the layout places the tensor padded to
            n * b.
        mesh : Mesh
            The devices.
        dims : Mapping[int, str or tuple of str]
            The mesh axis, or axes, that cut each of these dimensions; the others hold replicas.

        Raises
        ------
        LayoutError
            If a dimension or a mesh axis is unknown, or an axis cuts two dimensions.
        """
        shape = check_shape(shape)
        return Layout(*block_iters(shape, mesh, checked_cuts(shape, mesh, dims)))

    @staticmethod
    def partial(shape: Sequence[int], mesh: Mesh, axis: str, dims: Mapping[int, str] | None = None) -> Layout:
        """Return the layout of a tensor of which every device along `axis` holds an addend.

        The addends are a leading dimension of the tensor, cut over `axis`: it is summed by summing over dimension 0.

        Law: ``Layout.sharded((mesh[axis], *shape), mesh, {0: axis, d + 1: dims[d], ...})``.

        >>> print(Layout.partial((8, 6), Mesh({"tp": 4, "dp": 2}), "tp", {0: "dp"}))
        S[(4, 1, 2, 4, 6) : (1@tp, 24, 1@dp, 6, 1)]

        Parameters
        ----------
        shape : Sequence[int]
            The shape of the sum.
        mesh : Mesh
            The devices.
        axis : str
            The mesh axis over which the addends lie.
        dims : Mapping[int, str], optional
            The other mesh axes that cut dimensions of `shape`, by dimension, as in `sharded`.

        Raises
        ------
        LayoutError
            If `sharded` refuses what is given.
        """
        if dims is not None and not isinstance(dims, Mapping):
            raise LayoutError(f'dims must be a mapping from dimension to mesh axis, such as {{0: "tp"}}, not {dims!r}')
        cuts = {check_int("a dimension in dims", dim, 0) + 1: name for dim, name in (dims or {}).items()}
        return Layout.sharded((mesh.axis_size(axis), *check_shape(shape)), mesh, {0: axis, **cuts})

    def sharding(self, shape: Sequence[int], mesh: Mesh) -> dict[int, str]:
        """Return which mesh axis cuts which dimension of `shape`, where one axis cuts it: see `cuts` for several.

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
            If the layout names a mesh axis that the mesh lacks, is not a block sharding of the shape, or cuts a
            dimension over several axes; says why.
        """
        return find_blocks(self, shape, mesh)

    def cuts(self, shape: Sequence[int], mesh: Mesh) -> Cuts:
        """Return the mesh axes that cut each dimension of `shape`, the major one first: the inverse of `sharded`.

        Law: ``Layout.sharded(shape, mesh, dict(enumerate(layout.cuts(shape, mesh))))`` has the map of ``layout``.

        >>> mesh = Mesh({"dp": 2, "tp": 2})
        >>> layout = Layout.sharded((10, 8), mesh, {0: ("tp", "dp")})
        >>> layout.cuts((10, 8), mesh), layout.local_shape((10, 8), mesh)
        ((('tp', 'dp'), ()), (3, 8))

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
        return find_cuts(self, shape, mesh)

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of what a device holds, padding included, so that it is the same on every device.

        Law: dimension d has ceil(extent / n) elements if axes of n devices together cut it, all of them otherwise.

        Raises
        ------
        LayoutError
            If `cuts` refuses what is given.
        """
        return block_shape(shape, mesh, self.cuts(shape, mesh))

    def local_region(self, shape: Sequence[int], mesh: Mesh, device: int) -> tuple[builtins.slice, ...]:
        """Return the part of a tensor of `shape` that `device` holds: one slice a dimension, empty for padding alone.

        Law: an element is in the region iff one of its points, `apply` on the padded shape, has the device's
        coordinates.

        Raises
        ------
        LayoutError
            If `cuts` refuses what is given, or the mesh has no such device.
        """
        return block_region(shape, mesh, self.cuts(shape, mesh), device)

    @staticmethod
    def parse(text: str) -> Layout:
        """Read a layout from its text, such as ``S[(4, 32, 128) : (1@tp, 128, 1)] + R[2 : 1@dp] + 3@warpid``.

        Law: ``Layout.parse(str(layout)) == layout``. The compiler's notation, as TVMScript prints it, is read as well:

        >>> print(Layout.parse("T.TileLayout(T.S[(8, 4, 2):(4 @ Axis.laneid, 1 @ Axis.laneid, 1)])"))
        S[(8, 4, 2) : (4@laneid, 1@laneid, 1)]

        Raises
        ------
        LayoutError
            If the text is malformed, with the position where, or states no valid layout. The names of variables in the
            text of a symbolic layout don't say which variables they are, so that it is refused as well.
        """
        return Layout(*parse_layout(text))

    def __str__(self) -> str:
        return format_layout(self.D, self.R, self.O)

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def explain(self, op: str, *args: Any, **kwargs: Any) -> str:
        """Return how ``self.op(*args, **kwargs)`` comes about, step by step: see `tvm_axe.layout.explain`."""
        from tvm_axe.layout.explaining import explain  # which imports this module

        return explain(self, op, *args, **kwargs)

    def show(
        self, shape: Sequence[int], mesh: Mesh | None = None, kind: str | None = None, access: Access | None = None
    ) -> Picture:
        """Return a picture of where a tensor's elements live, as text, SVG or HTML: see `tvm_axe.layout.show`."""
        from tvm_axe.layout.draw import show  # which imports this module

        return show(self, shape, mesh, kind, access)

    def __reduce__(self) -> tuple[type[Layout], tuple[tuple[Iter, ...], tuple[Iter, ...], Coordinate]]:
        return (Layout, (self.D, self.R, self.O))


# Writing the slots themselves is what a frozen class leaves open, and costs a fraction of the constructor's checks.
_set_shard = vars(Layout)["D"].__set__
_set_replica = vars(Layout)["R"].__set__
_set_offset = vars(Layout)["O"].__set__
_set_canonical = vars(Layout)["_canonical"].__set__
_set_plan = vars(Layout)["_plan"].__set__


def _fill(layout: Layout, shard: tuple[Iter, ...], replica: tuple[Iter, ...], offset: Coordinate) -> None:
    _set_shard(layout, shard)
    _set_replica(layout, replica)
    _set_offset(layout, offset)
    _set_canonical(layout, None)
    _set_plan(layout, None)


def _symbolic_position(position: Number, extent: Number) -> Number:
    """Return one position of an index where it or its extent is not an int, or raise LayoutError."""
    if isinstance(position, Symbolic):
        return position
    if is_expression(position):
        return index_value(position, extent)
    if not 0 <= check_int("index", position) < extent:
        raise LayoutError(f"index {position} is not inside {extent}")
    return position


def _copies(it: Iter) -> int:
    if not isinstance(it.extent, int):
        raise LayoutError(f"R holds {it}: the number of points is the extents' product, and {it.extent} is not known")
    return it.extent


def _check_iters(part: str, iters: Iterable[Iter]) -> tuple[Iter, ...]:
    """Return `iters` as a tuple, or raise LayoutError naming the part of the layout."""
    if isinstance(iters, str) or not isinstance(iters, Iterable):
        raise LayoutError(f"{part} must be a sequence of Iter, not {iters!r}")
    checked = tuple(iters)
    for it in checked:
        if not isinstance(it, Iter):
            raise LayoutError(f"{part} must hold Iter(extent, stride, axis), not {it!r}")
    return checked
