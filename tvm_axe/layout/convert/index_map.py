"""Index maps, `tvm.tirx.IndexMap`: the compiler's functions from a tensor's indices to a buffer's.

>>> from tvm_axe.layout import Layout
>>> columns = to_index_map(Layout.parse("S[(4, 8) : (1, 4)]"), (4, 8))
>>> print(columns)
T.index_map(lambda i0, i1: (i0 + i1 * T.int64(4),))
>>> print(from_index_map(columns, (4, 8)))
S[(4, 8) : (1, 4)]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, check_axis
from tvm_axe.layout.convert.affine import DigitSum, read
from tvm_axe.layout.convert.expressions import to_expression
from tvm_axe.layout.image import axes_of
from tvm_axe.layout.iters import Iter
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.shapes import check_extents, check_shape, show
from tvm_axe.layout.swizzle import ComposeLayout


def to_index_map(
    layout: Layout | ComposeLayout,
    shape: Sequence[int],
    axes: Sequence[str] = (LINEAR_MEMORY,),
    index_dtype: str = "int64",
) -> Any:
    """Return the index map from a tensor of `shape` to a buffer with one dimension for each of `axes`.

    Law: it maps an index to the positions on `axes` of the one point of ``layout.apply(*index, shape=shape)``.

    Parameters
    ----------
    layout : Layout or ComposeLayout
        A swizzle becomes an exclusive or.
    shape : Sequence[int]
        The tensor's shape, of ints or of expressions of the compiler.
    axes : Sequence[str]
        The axes of the buffer's dimensions, in order.
    index_dtype : str
        The type of the indices, "int32" or "int64", as of the function in which the map is used.

    Returns
    -------
    tvm.tirx.IndexMap

    Raises
    ------
    LayoutError
        If the layout doesn't admit the shape, is on an axis that is not in `axes`, or has replicas (an index map gives
        an element one place) or positions below 0 (a buffer's indices start there);
        or if expressions in it are of another type than `index_dtype`.
    """
    from tvm.ir import Range
    from tvm.sym import Analyzer
    from tvm.tirx import IndexMap, IntImm, Var

    tile = layout.tile_layout if isinstance(layout, ComposeLayout) else layout
    names, extents = _check_axes(axes), check_extents(shape)
    if not tile.admits(extents):
        raise LayoutError(f"layout {layout} places {tile.size()} elements, unlike shape {show(extents)}")
    if any(it.extent != 1 for it in tile.R):
        raise LayoutError(f"an index map gives each element one place, and layout {layout} has replicas")
    for axis in axes_of(tile):
        if axis not in names:
            raise LayoutError(f"axes must have every axis of layout {layout}, and {axis!r} is not in {names}")
        if not tile.bounds(axis)[0] >= 0:
            raise LayoutError(f"a buffer's indices start at 0, and layout {layout} goes below on axis {axis!r}")
    if index_dtype not in ("int32", "int64"):
        raise LayoutError(f"index_dtype must be 'int32' or 'int64', not {index_dtype!r}")
    indices = [Var(f"i{dim}", index_dtype) for dim in range(len(extents))]
    analyzer = Analyzer()
    zero = IntImm(index_dtype, 0)
    flat: Any = zero
    for index, size in zip(indices, extents):
        extent = to_expression(size, index_dtype)
        analyzer.bind(index, Range(zero, extent))
        flat = flat * extent + index
    places: dict[str, Any] = {axis: zero + to_expression(tile.O[axis], index_dtype) for axis in names}
    for position, it in reversed(list(enumerate(tile.D))):
        extent, stride = to_expression(it.extent, index_dtype), to_expression(it.stride, index_dtype)
        # Digit by digit: of sums, the analyzer makes other divisions, such as (x + 1) // 2 of x // 2 + x % 2.
        places[it.axis] = analyzer.simplify(flat % extent if position else flat) * stride + places[it.axis]
        flat = analyzer.simplify(flat // extent)
    finals = [places[axis] for axis in names]
    if isinstance(layout, ComposeLayout) and LINEAR_MEMORY in names:
        memory = names.index(LINEAR_MEMORY)
        finals[memory] = layout.address(finals[memory])
    return IndexMap(indices, finals, None)


def from_index_map(index_map: Any, shape: Sequence[int], axes: Sequence[str] | None = None) -> Layout:
    """Return the layout of a tensor of `shape` in a buffer to which an index map takes it.

    Law: the one point of ``layout.apply(*index, shape=shape)`` is ``index_map.map_indices(index)``: position k on axis
    ``axes[k]``; without axes, the row-major position in the buffer is that in linear memory.

    Parameters
    ----------
    index_map : tvm.tirx.IndexMap
        A map that permutes, splits and merges indices, multiplies by constants and adds constants.
    shape : Sequence[int]
        The tensor's shape, of ints.
    axes : Sequence[str], optional
        The axes of the buffer's dimensions.

    Raises
    ------
    LayoutError
        If the map is of another number of dimensions, is not of digits (as an exclusive or, or a division within a
        digit), leaves a part of an index out, so that elements would share a place, or takes it to two axes.
    """
    shape, initial, finals = check_shape(shape), list(index_map.initial_indices), list(index_map.final_indices)
    if len(initial) != len(shape):
        raise LayoutError(f"{index_map} maps {len(initial)} indices, and shape {shape} has {len(shape)} dimensions")
    sums = [read(final, initial, shape) for final in finals]
    if axes is None:
        placed = {LINEAR_MEMORY: _row_major(sums)}
    else:
        names = _check_axes(axes)
        if len(names) != len(sums):
            raise LayoutError(f"{index_map} has {len(sums)} final indices, and axes are {len(names)}: {names}")
        placed = dict(zip(names, sums))
    shard = [it for dim, extent in enumerate(shape) for it in _dimension(placed, dim, extent, str(index_map))]
    return Layout(shard, (), {axis: total.constant for axis, total in placed.items()}).canonicalize()


def _check_axes(axes: Sequence[str]) -> tuple[str, ...]:
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise LayoutError(f'axes must be a sequence of names such as ("laneid", "m"), not {axes!r}')
    names = tuple(check_axis(f"axes[{k}]", axis) for k, axis in enumerate(axes))
    if len(set(names)) < len(names):
        raise LayoutError(f"axes must be different, not {names}")
    return names


def _row_major(sums: Sequence[DigitSum]) -> DigitSum:
    """Return the row-major position in a buffer that is as large as the final indices need."""
    position = DigitSum(0, {})
    for k, total in enumerate(sums):
        low, high = total.bounds
        if low < 0:
            raise LayoutError(f"final index {k} goes below 0, to {low}, and a buffer's indices start there")
        position = position * (high + 1) + total
    return position


def _dimension(placed: Mapping[str, DigitSum], dim: int, extent: int, text: str) -> list[Iter]:
    """Return the iters of one dimension, from its digits on all axes."""
    digits = [(d, axis, c) for axis, total in placed.items() for d, c in total.coefficients.items() if d.dim == dim]
    cuts = sorted({1, extent, *(d.weight for d, _, _ in digits), *(d.weight * d.extent for d, _, _ in digits)})
    iters: list[Iter] = []
    for low, high in pairwise(cuts):
        steps: dict[str, int] = defaultdict(int)
        for digit, axis, coefficient in digits:
            if digit.weight <= low and high <= digit.weight * digit.extent:
                if low % digit.weight or high % low:
                    raise LayoutError(f"{text} cuts dimension {dim} of {extent} at {cuts}, which don't nest")
                steps[axis] += coefficient * (low // digit.weight)
        moved = {axis: step for axis, step in steps.items() if step}
        if len(moved) != 1:
            what = (
                f"to {' and '.join(moved)}, and an iter is on one axis" if moved else "nowhere: elements share places"
            )
            raise LayoutError(f"{text} takes index {dim} // {low} % {high // low} {what}")
        ((axis, step),) = moved.items()
        iters.insert(0, Iter(high // low, step, axis))
    return iters
