"""Triton's linear layouts: what each bit of a place does to the bits of an element's index, as an exclusive or.

A linear layout goes the other way than ours, from a place to the element there, and has a basis for each bit of a
place: the index of the element there, in the tensor's dimensions. Bits of the place whose basis is 0 hold replicas.
Its dimensions of places are axes here:

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
from dataclasses import dataclass

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
"""For each dimension of places the bases of its bits, the lowest first: indices in the tensor's dimensions."""

Bit = tuple[str, int]
"""A bit of a place: its dimension or axis, and its number."""


def to_triton(layout: Layout | ComposeLayout, shape: Sequence[int]) -> Bases:
    """Return the bases of the linear layout that gives the element at each place.

    Law: for every element and every point of ``layout.apply(*index, shape=shape)``, the exclusive or of the bases of the
    point's bits is the index.

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
        raise LayoutError(f"a linear layout has ints and takes place 0 to element 0, unlike {layout}")
    grouped, seps = canonical.group(shape)
    found: dict[Bit, list[int]] = {}
    for dim, (start, end) in enumerate(zip(seps, seps[1:])):
        weight = 1
        for it in reversed(grouped.D[start:end]):
            for bit in _bits(it, layout):
                _put(found, bit, [weight if d == dim else 0 for d in range(len(shape))], layout)
                weight *= 2
    for it in canonical.R:
        for bit in _bits(it, layout):
            _put(found, bit, [0] * len(shape), layout)
    names = ("register", "lane", "warp", "block")
    if composed.swizzle_len:
        _swizzle(found, composed)
        names = ("offset", "block")
    return _collect({("offset" if "offset" in names and n == "register" else n, b): v for (n, b), v in found.items()}, names, layout)
