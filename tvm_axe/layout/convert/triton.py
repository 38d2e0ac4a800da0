"""Triton's linear layouts: what each bit of a place does to the bits of an element's index, as an exclusive or.

A linear layout goes the other way than ours, from a place to the element there, and has a basis for each bit of a
place: the index of the element there, in the tensor's dimensions. Bits of the place whose basis is 0 hold replicas.
Its dimensions of places are axes here::

    register, offset        m            of a thread's registers, or of shared memory
    lane                    laneid
    warp                    warpid       (or wid_in_wg; tx and tid_in_wg are lanes in their low 5 bits, warps above)
    block                   cbx          of a cluster

Two rows a register, 32 columns a lane:

>>> from tvm_axe.layout import Layout
>>> bases = to_triton(Layout.parse("S[(2, 32) : (1, 1@laneid)]"), (2, 32))
>>> bases["register"], bases["lane"]
([[1, 0]], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]])
>>> print(from_triton(bases, (2, 32)))
S[(2, 32) : (1, 1@laneid)]

Source: Zhou et al., Linear Layouts (arXiv:2505.23819); Triton, ``include/triton/Tools/LinearLayout.h``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, check_int
from tvm_axe.layout.iters import Iter
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.placement import is_symbolic, whole
from tvm_axe.layout.shapes import check_shape
from tvm_axe.layout.swizzle import ComposeLayout, as_composed

AXES = {"register": LINEAR_MEMORY, "offset": LINEAR_MEMORY, "lane": "laneid", "warp": "warpid", "block": "cbx"}
_PLACES = {LINEAR_MEMORY: "register", "laneid": "lane", "warpid": "warp", "wid_in_wg": "warp", "cbx": "block"}
_THREADS = ("tx", "tid_in_wg")  # numbers of threads: lanes in their low bits, warps above
_LANE_BITS = 5

Bases = dict[str, list[list[int]]]
"""The bases of each dimension of places, one a bit, the lowest first: indices in the tensor's dimensions."""

Bit = tuple[Any, int]
"""A bit and what it is of: a dimension or an axis of places, or a dimension of the tensor."""


def to_triton(layout: Layout | ComposeLayout, shape: Sequence[int]) -> Bases:
    """Return the bases of the linear layout that gives the element at each place.

    Law: for every element and every point of ``layout.apply(*index, shape=shape)``, the exclusive or of the bases of
    the point's bits is the index.

    Parameters
    ----------
    layout : Layout or ComposeLayout
        A swizzled layout is one of shared memory: its places are called offset, not register, and it has no lanes.
    shape : Sequence[int]
        The tensor's shape, powers of two.

    Returns
    -------
    dict[str, list[list[int]]]
        ``LinearLayout.from_bases(list(bases.items()), ...)`` of Triton.

    Raises
    ------
    LayoutError
        If an extent or a stride is not a power of two, the layout has an offset or another axis, two bits of the index
        go to one bit of a place, or a place below the highest holds no element.
    """
    shape = check_shape(shape)
    composed = as_composed(layout)
    canonical = composed.tile_layout.canonicalize()
    if is_symbolic(canonical) or canonical.O:
        raise LayoutError(f"a linear layout is of ints and has element 0 at place 0, unlike {layout}")
    swizzled = composed.swizzle_len > 0
    memory = "offset" if swizzled else "register"
    grouped, seps = canonical.group(shape)
    found: dict[Bit, list[int]] = {}

    def put(bit: Bit, basis: list[int]) -> None:
        if bit in found:
            raise LayoutError(f"layout {layout} has two iters on bit {bit[1]} of the {bit[0]}, which takes one basis")
        found[bit] = basis

    for dim, (start, end) in enumerate(pairwise(seps)):
        weight = 1
        for it in reversed(grouped.D[start:end]):
            for bit in _bits(it, memory, layout):
                put(bit, [weight if d == dim else 0 for d in range(len(shape))])
                weight *= 2
    for it in canonical.R:
        for bit in _bits(it, memory, layout):
            put(bit, [0] * len(shape))
    for flipped, flipping in _exchanges(composed):
        if (memory, flipping) in found:
            if (memory, flipped) not in found:
                raise LayoutError(f"the swizzle of {layout} goes beyond its addresses, to some that hold no element")
            found[memory, flipping] = [a ^ b for a, b in zip(found[memory, flipping], found[memory, flipped])]
    return _collect(found, ("offset", "block") if swizzled else ("register", "lane", "warp", "block"), layout)


def _bits(it: Iter, memory: str, layout: Layout | ComposeLayout) -> list[Bit]:
    """Return the bits of a place along which an iter moves, the lowest first."""
    extent, stride = whole(it.extent), whole(it.stride)
    if it.axis not in (*_PLACES, *_THREADS):
        known = ", ".join((*_PLACES, *_THREADS))
        raise LayoutError(f"a linear layout has places on {known}, and layout {layout} is on axis {it.axis!r}")
    if stride < 1 or stride & (stride - 1) or extent & (extent - 1):
        raise LayoutError(f"a linear layout has powers of two as extents and strides, and layout {layout} has {it}")
    low = stride.bit_length() - 1
    numbers = range(low, low + extent.bit_length() - 1)
    if it.axis in _THREADS:
        return [("lane", n) if n < _LANE_BITS else ("warp", n - _LANE_BITS) for n in numbers]
    return [(memory if it.axis == LINEAR_MEMORY else _PLACES[it.axis], n) for n in numbers]


def _exchanges(composed: ComposeLayout) -> list[tuple[int, int]]:
    """Return which bits of an address a swizzle flips by which others."""
    low = range(composed.per_element, composed.per_element + composed.swizzle_len)
    pairs = [(bit, bit + composed.atom_len) for bit in low]
    return pairs if composed.swizzle_inner else [(high, bit) for bit, high in pairs]


def _collect(found: Mapping[Bit, list[int]], names: tuple[str, ...], layout: Layout | ComposeLayout) -> Bases:
    """Return bases by dimension, or raise LayoutError if a bit below the highest has none."""
    bases: Bases = {name: [] for name in names}
    for name, bit in sorted(found):
        if name not in bases:
            raise LayoutError(f"a swizzled linear layout is of shared memory, and layout {layout} is on the {name} too")
        if bit != len(bases[name]):
            raise LayoutError(
                f"a linear layout has an element at each place, and layout {layout} has none on bit {len(bases[name])} "
                f"of the {name}"
            )
        bases[name].append(found[name, bit])
    return bases


def from_triton(bases: Mapping[str, Sequence[Sequence[int]]], shape: Sequence[int]) -> Layout | ComposeLayout:
    """Return the layout of a tensor of `shape` that a linear layout gives the elements of.

    Law: that of `to_triton`.

    Parameters
    ----------
    bases : Mapping[str, Sequence[Sequence[int]]]
        The bases of each dimension of places, one a bit, the lowest first; what Triton's ``LinearLayout.bases`` has, as
        a dict.
    shape : Sequence[int]
        The sizes of its outputs, powers of two.

    Raises
    ------
    LayoutError
        If a part is malformed or a dimension unknown; if an element is at no place; or if bits of an index are combined
        in another way than a swizzle of memory does, which exchanges pieces by as many bits further up.
    """
    shape = _check_powers(check_shape(shape))
    places = _places(bases, shape)
    at = {next(iter(bits)): place for place, bits in places.items() if len(bits) == 1}
    if sum(len(bits) == 1 for bits in places.values()) > len(at):
        raise LayoutError("two places have one basis: their exclusive or would be the element, which no layout says")
    flips = {}  # which bit of an address is flipped by which other
    for (axis, number), bits in places.items():
        if len(bits) < 2:
            continue
        new = [bit for bit in bits if bit not in at]
        by = [at[bit] for bit in bits if bit in at]
        if len(bits) != 2 or axis != LINEAR_MEMORY or [place for place, _ in by] != [LINEAR_MEMORY]:
            raise LayoutError(
                f"bit {number} of {axis} flips {len(bits)} bits of the index: only a swizzle does, of memory, which "
                "flips one of its own and one that another bit of the address has to itself"
            )
        flips[number] = (by[0][1], new[0])
    at.update({bit: (LINEAR_MEMORY, number) for number, (_, bit) in flips.items()})
    shard = []
    for dim, extent in enumerate(shape):
        for bit in reversed(range(extent.bit_length() - 1)):
            if (dim, bit) not in at:
                raise LayoutError(f"bit {bit} of dimension {dim} is in no basis: elements are at no place")
            axis, number = at[dim, bit]
            shard.append(Iter(2, 2**number, axis))
    replica = [Iter(2, 2**number, axis) for (axis, number), bits in places.items() if not bits]
    tile = Layout(shard, replica).canonicalize()
    return _swizzled(tile, {number: flipped for number, (flipped, _) in flips.items()}) if flips else tile


def _check_powers(shape: tuple[int, ...]) -> tuple[int, ...]:
    for dim, extent in enumerate(shape):
        if extent & (extent - 1):
            raise LayoutError(f"shape[{dim}] must be a power of two in a linear layout, not {extent}")
    return shape


def _places(bases: Mapping[str, Sequence[Sequence[int]]], shape: tuple[int, ...]) -> dict[Bit, frozenset[Bit]]:
    """Return for each bit of a place, by its axis, the bits of the index, by its dimension, that its basis has."""
    if not isinstance(bases, Mapping):
        raise LayoutError(f'bases must be a mapping such as {{"lane": [[0, 1]]}}, not {bases!r}')
    places: dict[Bit, frozenset[Bit]] = {}
    for name, vectors in bases.items():
        if name not in AXES:
            raise LayoutError(f"bases: the dimensions of places are {', '.join(AXES)}, not {name!r}")
        if isinstance(vectors, str) or not isinstance(vectors, Sequence):
            raise LayoutError(f"bases[{name!r}] must be a sequence with a basis for each bit, not {vectors!r}")
        for number, basis in enumerate(vectors):
            if not isinstance(basis, Sequence) or len(basis) != len(shape):
                raise LayoutError(f"bases[{name!r}][{number}] must have an int for each of {shape}, not {basis}")
            bits = []
            for dim, (part, extent) in enumerate(zip(basis, shape)):
                if check_int(f"bases[{name!r}][{number}][{dim}]", part, 0) >= extent:
                    raise LayoutError(f"bases[{name!r}][{number}] = {basis} is not inside shape {shape}")
                bits += [(dim, bit) for bit in range(part.bit_length()) if part >> bit & 1]
            if (AXES[name], number) in places:
                raise LayoutError("bases has register and offset, and a place is in one memory")
            places[AXES[name], number] = frozenset(bits)
    return places


def _swizzled(tile: Layout, flips: Mapping[int, int]) -> ComposeLayout:
    """Return the layout with the swizzle in which bit n of an address flips bit ``flips[n]``."""
    first, count = min(flips), len(flips)
    distance = first - flips[first]
    if flips != {first + k: flips[first] + k for k in range(count)} or abs(distance) < count:
        raise LayoutError(
            f"a swizzle has neighbouring bits of an address flip as many neighbours apart from them, not {dict(flips)}"
        )
    return ComposeLayout(min(first, flips[first]), count, abs(distance), tile, distance > 0)
