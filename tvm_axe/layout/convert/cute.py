"""CuTe's ``shape:stride``, and swizzled, ``Sw<B,M,S> o offset o shape:stride``.

C++ writes a swizzle so, CuTe's Python language ``S<B,M,S>``, and pycute ``SW_B_M_S``; all three are read.

CuTe counts colexicographically: of a mode's nested parts the leftmost is the fastest. A mode of a CuTe layout is a
dimension here, and the parts of a mode are its iters from the last to the first.

>>> from tvm_axe.layout import Layout
>>> to_cute(Layout.parse("S[(2, 4, 8) : (1, 2, 8)]"), (8, 8))
'((4,2),8):((2,1),8)'
>>> layout, shape = from_cute("((_4,_2),_8):((_2,_1),_8)")
>>> print(layout, "of", shape)
S[(2, 4, 8) : (1, 2, 8)] of (8, 8)
>>> print(from_cute("Sw<3,4,3> o 0 o (8,128):(128,1)")[0])
ComposeLayout(4, 3, 3, S[(8, 128) : (128, 1)])

Source: CUTLASS, CuTe layouts and ``cute::Swizzle``, as ``cute::print``, the types of ``cutlass.cute`` and
``pycute.Swizzle`` write them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import INT64_MAX, LINEAR_MEMORY
from tvm_axe.layout.image import axes_of
from tvm_axe.layout.iters import Iter
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.placement import is_symbolic
from tvm_axe.layout.swizzle import ComposeLayout

Tree = int | list["Tree"]

_BITS = r"(\d{1,2})%s(\d{1,2})%s(-?\d{1,2})"
_SWIZZLED = re.compile(
    rf"\s*(?:Sw?<{_BITS % (',', ',')}>|SW_{_BITS % ('_', '_')})\s*o\s*_?(-?\d{{1,19}})\s*o\s*(.*)", re.DOTALL
)
_TOKEN = re.compile(r"_?(?P<int>-?[0-9]+)|(?P<mark>[(),:])|(?P<other>\S)")
_DEEPEST = 32  # nesting that is read


def to_cute(layout: Layout | ComposeLayout, shape: Sequence[int], python: bool = False) -> str:
    """Return the text of the CuTe layout with one mode for each dimension of `shape`.

    Law: it takes a coordinate to the address of ``layout.apply(*coordinate, shape=shape)``; and ``from_cute`` gives a
    layout with the same map, and the shape.

    An offset is written as CuTe writes it under a swizzle; without one, under ``Sw<0,0,0>``, which changes nothing.

    Parameters
    ----------
    layout : Layout or ComposeLayout
        A layout on linear memory alone.
    shape : Sequence[int]
        The tensor's shape.
    python : bool
        Whether a swizzle is written as CuTe's Python language does, ``S<B,M,S>``, and not as C++ does.

    Raises
    ------
    LayoutError
        If the layout has another axis or replicas, or is symbolic, or can't be grouped by the shape.
    """
    tile = layout.tile_layout if isinstance(layout, ComposeLayout) else layout
    canonical = tile.canonicalize()
    if is_symbolic(canonical):
        raise LayoutError(f"the text of a CuTe layout has ints, and {layout} has expressions")
    others = [axis for axis in axes_of(canonical) if axis != LINEAR_MEMORY]
    if others or canonical.R:
        what = f"is on axis {others[0]!r}" if others else "has replicas"
        raise LayoutError(f"a CuTe layout gives each element one address in linear memory, and {layout} {what}")
    grouped, seps = canonical.group(shape)
    modes = [
        [(it.extent, it.stride if it.extent != 1 else 0) for it in reversed(grouped.D[start:end])]
        for start, end in pairwise(seps)
    ]
    swizzle = "S" if python else "Sw"
    text = ":".join(_tuple([_tuple([str(leaf[part]) for leaf in mode]) for mode in modes], modes) for part in (0, 1))
    if isinstance(layout, Layout):
        return f"{swizzle}<0,0,0> o {canonical.O[LINEAR_MEMORY]} o {text}" if canonical.O else text
    bits, base, shift = layout.swizzle_len, layout.per_element, layout.atom_len
    signed = shift if layout.swizzle_inner else -shift
    return f"{swizzle}<{bits},{base},{signed}> o {canonical.O[LINEAR_MEMORY]} o {text}"


def _tuple(parts: list[str], modes: Sequence[Sequence[object]] | None = None) -> str:
    """Join parts: one alone needs no parentheses, unless it is a mode of several leaves, which needs both pairs."""
    nested = modes is not None and len(modes) == 1 and len(modes[0]) > 1
    return parts[0] if len(parts) == 1 and not nested else f"({','.join(parts)})"


def from_cute(text: str) -> tuple[Layout | ComposeLayout, tuple[int, ...]]:
    """Return the layout that a CuTe layout is, and its shape: the size of each of its modes.

    Law: ``layout.apply(*coordinate, shape=shape)`` is the address to which CuTe takes the coordinate.

    Parameters
    ----------
    text : str
        ``shape:stride``, integers with or without the underscore of static ones, with a swizzle or without.

    Raises
    ------
    LayoutError
        If the text is malformed, shape and stride are of different trees, or a stride is 0 in a mode of more than one
        element: elements would share an address.
    """
    if not isinstance(text, str):
        raise LayoutError(f"from_cute: text must be a str such as '(4,8):(8,1)', not {text!r}")
    swizzled = _SWIZZLED.fullmatch(text)
    reader = _Reader(swizzled[8] if swizzled else text)
    extents, strides = reader.pair()
    modes = list(zip(extents, strides)) if isinstance(extents, list) and isinstance(strides, list) else None
    leaves = [_leaves(e, s, text) for e, s in (modes if modes is not None else [(extents, strides)])]
    shard = [_iter(extent, stride, text) for mode in leaves for extent, stride in reversed(mode)]
    shape = tuple(math.prod(extent for extent, _ in mode) for mode in leaves)
    if swizzled is None:
        return Layout([it for it in shard if it.extent != 1]), shape
    bits, base, shift, offset = (int(found) for found in swizzled.groups()[:-1] if found is not None)
    tile = Layout([it for it in shard if it.extent != 1], (), {LINEAR_MEMORY: offset})
    return (ComposeLayout(base, bits, abs(shift), tile, shift >= 0) if bits else tile), shape


def _leaves(extents: Tree, strides: Tree, text: str) -> list[tuple[int, int]]:
    """Return the leaves of two congruent trees side by side."""
    if isinstance(extents, int) and isinstance(strides, int):
        return [(extents, strides)]
    if isinstance(extents, int) or isinstance(strides, int) or len(extents) != len(strides):
        raise LayoutError(f"from_cute: shape and stride of {text!r} must be trees of one form")
    return [leaf for pair in zip(extents, strides) for leaf in _leaves(*pair, text)]


def _iter(extent: int, stride: int, text: str) -> Iter:
    if stride == 0 and extent != 1:
        raise LayoutError(
            f"from_cute: {extent} elements of {text!r} have one address, by a stride of 0; in a layout each has its own"
        )
    return Iter(extent, stride or 1, LINEAR_MEMORY)


class _Reader:
    """Recursive descent over the tokens of ``shape:stride``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [*_TOKEN.finditer(text)]
        self.seen = 0

    def error(self, expected: str) -> LayoutError:
        token = self.tokens[self.seen] if self.seen < len(self.tokens) else None
        where = f"at position {token.start()} of {self.text!r}" if token else f"at the end of {self.text!r}"
        return LayoutError(f"from_cute: {where}: expected {expected}")

    def mark(self) -> str:
        return self.tokens[self.seen][0] if self.seen < len(self.tokens) else ""

    def take(self, mark: str) -> None:
        if self.mark() != mark:
            raise self.error(repr(mark))
        self.seen += 1

    def pair(self) -> tuple[Tree, Tree]:
        extents = self.tree(0)
        self.take(":")
        strides = self.tree(0)
        if self.seen < len(self.tokens):
            raise self.error("the end")
        if isinstance(extents, int) != isinstance(strides, int) or (
            isinstance(extents, list) and isinstance(strides, list) and len(extents) != len(strides)
        ):
            raise LayoutError(f"from_cute: shape and stride of {self.text!r} must be trees of one form")
        return extents, strides

    def tree(self, depth: int) -> Tree:
        if self.mark() == "(" and depth < _DEEPEST:
            self.seen += 1
            parts: list[Tree] = []
            while self.mark() != ")":
                parts.append(self.tree(depth + 1))
                if self.mark() != ")":
                    self.take(",")
            self.seen += 1
            return parts
        digits = self.tokens[self.seen]["int"] if self.seen < len(self.tokens) else None
        if digits is None or len(digits) > len(str(INT64_MAX)):
            raise self.error("an int of 64 bits or a tuple")
        self.seen += 1
        return int(digits)
