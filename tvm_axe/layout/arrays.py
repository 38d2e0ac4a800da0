"""Whole arrays into a layout's memory and out of it: into one memory, or into the slabs of the devices of a mesh.

>>> import numpy as np
>>> from tvm_axe.layout import Layout
>>> columns = Layout.parse("S[(2, 3) : (1, 2)]")
>>> pack(np.arange(6).reshape(2, 3), columns)
array([0, 3, 1, 4, 2, 5])
>>> unpack(pack(np.arange(6).reshape(2, 3), columns), columns, (2, 3)).tolist()
[[0, 1, 2], [3, 4, 5]]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.holding import Holding
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.swizzle import ComposeLayout

MemoryLayout: TypeAlias = Layout | ComposeLayout


def pack(array: NDArray[Any], layout: MemoryLayout) -> NDArray[Any]:
    """Put an array's elements where `layout` says.

    Law: ``pack(a, L)[p["m"]] == a[x]`` for the one p in ``L.apply(*x, shape=a.shape)``; the rest is zero.

    Parameters
    ----------
    array : numpy.ndarray
        Any array whose size is the layout's.
    layout : Layout or ComposeLayout
        A layout on linear memory alone that gives each element one address.

    Returns
    -------
    memory : numpy.ndarray
        One-dimensional, `memory_size(layout)` elements, of the array's dtype.

    Raises
    ------
    LayoutError
        If `layout` isn't such a layout, or the array's size is not its own.
    """
    addresses = _addresses(layout, array.shape)
    memory = np.zeros(memory_size(layout), array.dtype)
    memory[addresses] = array
    return memory


def unpack(memory: NDArray[Any], layout: MemoryLayout, shape: Sequence[int]) -> NDArray[Any]:
    """Return the array of `shape` whose elements lie in `memory` as `layout` says. Law: it undoes `pack`.

    Parameters
    ----------
    memory : numpy.ndarray
        One dimension of ``memory_size(layout)`` elements, as `pack` gives it.
    layout : Layout or ComposeLayout
        The address of each element, along linear memory alone.
    shape : sequence of int
        The extents of the array.

    Raises
    ------
    LayoutError
        If `layout` isn't such a layout or doesn't admit `shape`, or `memory` hasn't its `memory_size(layout)` elements.
    """
    addresses = _addresses(layout, tuple(shape))
    if memory.shape != (memory_size(layout),):
        raise LayoutError(
            f"unpack: {layout} takes a one-dimensional memory of {memory_size(layout)} elements, not {memory.shape}"
        )
    return memory[addresses]


def memory_size(layout: MemoryLayout) -> int:
    """Return the number of elements from address 0 to the last one that `layout` reaches.

    >>> memory_size(Layout.parse("S[(8, 16) : (17, 1)]"))
    135

    Raises
    ------
    LayoutError
        If `layout` names an axis beside linear memory, copies elements, puts two at one address, or reaches below 0.
    """
    tiles = layout.tile_layout if isinstance(layout, ComposeLayout) else layout
    others = {it.axis for it in (*tiles.D, *tiles.R)} | set(tiles.O)
    others.discard(LINEAR_MEMORY)
    if others:
        raise LayoutError(f"{layout} names {', '.join(sorted(others))}; memory has the axis {LINEAR_MEMORY!r} alone")
    if tiles.R:
        raise LayoutError(f"{layout} stores elements more than once (R); in memory each has one address")
    if not layout.is_injective():
        raise LayoutError(f"{layout} puts two elements at one address")
    lowest, highest = tiles.bounds(LINEAR_MEMORY)
    if lowest < 0:
        raise LayoutError(f"{layout} reaches address {lowest}; memory starts at 0")
    if isinstance(layout, ComposeLayout):
        # A swizzle permutes within whole rows of its pattern, so it may reach to the end of the last one.
        pattern = 2 ** (layout.per_element + layout.swizzle_len + layout.atom_len)
        return -(-(int(highest) + 1) // pattern) * pattern
    return int(highest) + 1


def _addresses(layout: MemoryLayout, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the address of each element of an array of `shape`."""
    memory_size(layout)  # raises if there is none
    if not layout.admits(shape):
        raise LayoutError(f"{layout} has {layout.size()} elements; the shape {shape} has {math.prod(shape)}")
    tiles = layout.tile_layout if isinstance(layout, ComposeLayout) else layout
    addresses: NDArray[Any] = np.array(tiles.O[LINEAR_MEMORY], np.int64)
    for it in tiles.D:
        addresses = addresses[..., None] + np.arange(int(it.extent), dtype=np.int64) * it.stride
    if isinstance(layout, ComposeLayout):
        addresses = np.asarray(layout.address(addresses))  # type: ignore[arg-type]
    return addresses.reshape(shape)


def scatter(array: NDArray[Any], holding: Holding, device: int, slab: NDArray[Any]) -> None:
    """Put what a device holds of a whole array into its slab; of a sum, the first term is the array, the others zero.

    What of the slab holds nothing, the padding of an uneven dimension or of a memory order, stays as it is.

    Parameters
    ----------
    array : numpy.ndarray
        The whole array, of ``holding.shape``.
    holding : Holding
        What the devices hold.
    device : int
        The device's number.
    slab : numpy.ndarray
        The device's memory, a contiguous array of ``holding.size`` elements in any shape.
    """
    indices = holding.indices(device)
    if indices is not None and all(map(len, indices)):
        elements, places = _share(holding, indices)
        slab.reshape(holding.slab)[places] = 0 if any(holding.term(device)) else array[elements]


def gather(holding: Holding, slab: Callable[[int], NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the whole array: each element from the first device that holds it, of a sum the terms added up.

    Parameters
    ----------
    holding : Holding
        What the devices hold.
    slab : Callable[[int], numpy.ndarray]
        The memory of a device, as in `scatter`; asked for where it is needed only.
    dtype : numpy.dtype
        The type of its elements.
    """
    whole = np.zeros(holding.shape, dtype)
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for device in range(holding.mesh.size):
        indices, term = holding.indices(device), holding.term(device)
        if indices is None or not all(map(len, indices)):
            continue
        first = tuple(int(at[0]) for at in indices)
        if (term, first) in seen:  # a copy of what another has shown
            continue
        seen.add((term, first))
        elements, places = _share(holding, indices)
        values = slab(device).reshape(holding.slab)[places]
        whole[elements] = whole[elements] + values if holding.terms else values
    return whole


def disagreeing(
    holding: Holding, slab: Callable[[int], NDArray[Any]], whole: NDArray[Any]
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield each device whose elements aren't those of a whole array, and the array with the device's in their places.

    What `gather` returns is of the first device that holds each element; this is of the copies that others hold. Terms
    of a sum aren't copies.

    Parameters
    ----------
    holding : Holding
        What the devices hold.
    slab : Callable[[int], numpy.ndarray]
        The memory of a device, as in `gather`.
    whole : numpy.ndarray
        What `gather` returned.
    """
    for device in range(0 if holding.terms else holding.mesh.size):
        indices = holding.indices(device)
        if indices is None or not all(map(len, indices)):
            continue
        elements, places = _share(holding, indices)
        values = slab(device).reshape(holding.slab)[places]
        if values.tobytes() != whole[elements].tobytes():
            other = whole.copy()
            other[elements] = values
            yield device, other


_Index = tuple[slice, ...] | tuple[NDArray[np.int64], ...]


def _share(holding: Holding, indices: Sequence[NDArray[np.int64]]) -> tuple[_Index, _Index]:
    """Return where in a whole array the elements at all combinations of indices are, and where in the device's slab.

    Both as slices where they can be, which is many times as fast.
    """
    grid = np.ix_(*indices)
    spans = tuple(slice(int(at[0]), int(at[-1]) + 1) for at in indices)  # indices ascend
    is_block = all(span.stop - span.start == len(at) for span, at in zip(spans, indices))
    elements: _Index = spans if is_block else grid
    if holding.is_row_major:  # padding comes last
        return elements, tuple(slice(len(at)) for at in indices)
    counts = tuple(map(len, indices))
    return elements, (np.broadcast_to(np.asarray(holding.address(grid), np.int64), counts),)
