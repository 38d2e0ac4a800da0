"""Elements of other widths, and more copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, MEMORY_AXES, check_axis, check_number
from tvm_axe.layout.image import span
from tvm_axe.layout.iters import Iter, make_iter
from tvm_axe.layout.symbolic import Number

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout


def unpack(layout: Layout, num: Number, axis: str = LINEAR_MEMORY) -> Layout:
    """Return the layout in which every element has become `num` narrower ones, next to each other in memory.

    Law: the points of element ``x * num + j`` are those of x with ``p[axis] * num + j`` on the memory axis, for
    0 <= j < num. Threads and devices stay.

    >>> print(Layout.parse("S[(32, 4) : (1@laneid, 1)] + 2").unpack(2))
    S[(32, 4, 2) : (1@laneid, 2, 1)] + 4

    Parameters
    ----------
    num : int
        The number of narrow elements in a wide one.
    axis : str
        The memory axis along which they lie.

    Raises
    ------
    LayoutError
        If `num` is less than 1, `axis` is no memory axis, or a coordinate of the result may exceed 64 bits.
    """
    num = check_number("num", num, least=1)
    _check_memory(axis)
    offset = {name: amount * num if name == axis else amount for name, amount in layout.O.items()}
    shard = (*(_scaled(it, num, axis) for it in layout.D), make_iter(num, 1, axis))
    return layout._like(shard, tuple(_scaled(it, num, axis) for it in layout.R), offset)


def pack(layout: Layout, num: Number, axis: str = LINEAR_MEMORY) -> Layout:
    """Return the layout in which every `num` elements that are next to each other have become one wider element.

    Law: ``layout.pack(num, axis).unpack(num, axis)`` has the map of the layout.

    >>> print(Layout.parse("S[(32, 8) : (1@laneid, 1)] + 2").pack(2))
    S[(32, 4) : (1@laneid, 1)] + 1

    Parameters
    ----------
    num : int
        The number of narrow elements in a wide one.
    axis : str
        The memory axis along which they lie.

    Raises
    ------
    LayoutError
        If `num` is less than 1, `axis` is no memory axis, D's innermost iter isn't a multiple of `num` elements next
        to each other, or another stride or the offset on the axis isn't a multiple of `num`.
    """
    num = check_number("num", num, least=1)
    _check_memory(axis)
    canonical = layout.canonicalize()
    if num == 1:
        return canonical
    last = canonical.D[-1] if canonical.D else make_iter(1, 1, axis)
    if last.axis != axis or last.stride != 1 or last.extent % num != 0:
        raise LayoutError(
            f"pack needs the innermost iter of D to be a multiple of {num} elements next to each other on axis "
            f"{axis!r}, and that of {canonical} is {last}"
        )
    for it in (*canonical.D[:-1], *canonical.R):
        if it.axis == axis and it.stride % num != 0:
            raise LayoutError(f"pack needs strides on axis {axis!r} that are multiples of {num}, unlike {it}")
    if canonical.O[axis] % num != 0:
        raise LayoutError(f"pack needs an offset on axis {axis!r} that is a multiple of {num}, not {canonical.O[axis]}")
    narrow = [make_iter(it.extent, it.stride // num, axis) if it.axis == axis else it for it in canonical.D[:-1]]
    copies = [make_iter(it.extent, it.stride // num, axis) if it.axis == axis else it for it in canonical.R]
    offset = {name: amount // num if name == axis else amount for name, amount in canonical.O.items()}
    return layout._like((*narrow, make_iter(last.extent // num, 1, axis)), copies, offset).canonicalize()


def broadcast(layout: Layout, num: Number, axis: str) -> Layout:
    """Return the layout with `num` copies of every element, side by side along an axis.

    Law: ``broadcast(num, axis).apply(x)`` are the points of ``apply(x)``, moved by r * w on the axis, for
    0 <= r < num, with w the layout's span on it.

    >>> print(Layout.parse("S[(4, 8) : (1@tp, 1)]").broadcast(2, "dp"))
    S[(4, 8) : (1@tp, 1)] + R[2 : 1@dp]

    Parameters
    ----------
    num : int
        The number of copies.
    axis : str
        The name of the axis.

    Raises
    ------
    LayoutError
        If `num` is less than 1, `axis` is not an identifier, or a coordinate of the result may exceed 64 bits.
    """
    num = check_number("num", num, least=1)
    copies = make_iter(num, span(layout, check_axis("axis", axis)), axis)
    return layout._like(layout.D, (*layout.R, copies), layout.O)


def _scaled(it: Iter, num: Number, axis: str) -> Iter:
    return make_iter(it.extent, it.stride * num, axis) if it.axis == axis else it


def _check_memory(axis: str) -> None:
    if axis not in MEMORY_AXES:
        raise LayoutError(f"axis must be a memory axis, one of {', '.join(MEMORY_AXES)}, not {axis!r}")
