"""Swizzles: a permutation of addresses under a layout, so that accesses down a column fall into different banks.

Rows of 64 elements of two bytes, whose pieces of eight are exchanged within each eight rows; down a column of pieces,
every row's is in another place:

>>> from tvm_axe.layout import ComposeLayout, Layout
>>> shared = ComposeLayout(3, 3, 3, Layout.parse("S[(8, 64) : (64, 1)]"))
>>> [place["m"] % 64 for row in range(4) for place in shared.apply(row, 0, shape=(8, 64))]
[0, 8, 16, 24]
>>> print(shared.tile_to((16, 64), (8, 64)))
ComposeLayout(3, 3, 3, S[1024 : 1])

Source: Axe (arXiv:2601.19092), section 3.4, where a hardware's swizzle is a layout of its own, innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, Coordinate, check_int, make_coordinate
from tvm_axe.layout.image import positions
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.symbolic import Number
from tvm_axe.layout.text import parse_composed
from tvm_axe.notebook import preformatted

if TYPE_CHECKING:
    from tvm_axe.layout.memory import Access
    from tvm_axe.layout.mesh import Mesh
    from tvm_axe.layout.picture import Picture

_MOST_ELEMENTS = 2**16  # that `equivalent` compares one by one


@dataclass(frozen=True)
class ComposeLayout:
    """A swizzle of the addresses that a layout gives: the innermost part of where an element lives.

    The bits of an address are, from the lowest, `per_element` that stay, and from there on a number in which
    `swizzle_len` bits from bit `atom_len` on are XORed into the lowest ones; or, if not `swizzle_inner`, the other way.
    All of it is about linear memory; other axes stay. It permutes each aligned block of
    2**(per_element + atom_len + swizzle_len) addresses. The names and their order are the compiler's.

    Parameters
    ----------
    per_element, swizzle_len, atom_len : int
        Numbers of bits; atom_len is at least swizzle_len.
    tile_layout : Layout
        What gives the addresses.
    swizzle_inner : bool
        Whether the lower bits change, rather than the higher.

    Raises
    ------
    LayoutError
        If a number is negative, they are over 62 together, or the two groups of bits overlap.
    """

    per_element: int
    swizzle_len: int
    atom_len: int
    tile_layout: Layout
    swizzle_inner: bool = True

    def __post_init__(self) -> None:
        for name in ("per_element", "swizzle_len", "atom_len"):
            check_int(name, getattr(self, name), 0)
        if not isinstance(self.tile_layout, Layout):
            raise LayoutError(f"tile_layout must be a Layout, not {self.tile_layout!r}")
        if not isinstance(self.swizzle_inner, bool):
            raise LayoutError(f"swizzle_inner must be a bool, not {self.swizzle_inner!r}")
        if self.atom_len < self.swizzle_len:
            raise LayoutError(
                f"atom_len must be at least swizzle_len = {self.swizzle_len}, so that the groups of bits are apart, "
                f"not {self.atom_len}"
            )
        if self.per_element + self.swizzle_len + self.atom_len > 62:
            raise LayoutError(f"per_element + swizzle_len + atom_len must be at most 62 bits, in {self}")

    def address(self, linear: Number) -> Number:
        """Return where the swizzle puts an address. Law: a permutation of the addresses, as the class says."""
        fine, atom, count = 2**self.per_element, 2**self.atom_len, 2**self.swizzle_len
        row: Any = linear // fine
        mixed = row ^ (row // atom % count) if self.swizzle_inner else row ^ (row % count * atom)
        return mixed * fine + linear % fine

    def size(self, axis_name: str | None = None) -> Number:
        """Return the number of elements it places, as `Layout.size`."""
        return self.tile_layout.size(axis_name)

    def admits(self, shape: Sequence[Number]) -> bool:
        """Return whether it places tensors of `shape`, as `Layout.admits`."""
        return self.tile_layout.admits(shape)

    def span(self, axis_name: str = LINEAR_MEMORY) -> Number:
        """Return the number of positions from the lowest to the highest reached on an axis, as `Layout.span`.

        Raises
        ------
        LayoutError
            If on linear memory the addresses are symbolic, or too far apart to be listed.
        """
        if axis_name != LINEAR_MEMORY:
            return self.tile_layout.span(axis_name)
        reached = [self.address(linear) for linear in positions(self.tile_layout, LINEAR_MEMORY)]
        return max(reached) - min(reached) + 1

    def apply(self, *index: Number, shape: Sequence[Number] | None = None) -> frozenset[Coordinate]:
        """Return every point where one element lives.

        Law: the points of ``tile_layout.apply(*index, shape=shape)``, with `address` of their addresses.

        Raises
        ------
        LayoutError
            If `Layout.apply` refuses the index.
        """
        points = self.tile_layout.apply(*index, shape=shape)
        return frozenset(make_coordinate({**p, LINEAR_MEMORY: self.address(p[LINEAR_MEMORY])}) for p in points)

    def canonicalize(self) -> ComposeLayout | Layout:
        """Return the simplest form with the same map: of the tile layout's, and no swizzle where no bit changes."""
        tile_layout = self.tile_layout.canonicalize()
        return tile_layout if self.swizzle_len == 0 else replace(self, tile_layout=tile_layout)

    def equivalent(self, other: ComposeLayout | Layout) -> bool:
        """Return whether two layouts have the same map, as `Layout.equivalent`.

        Raises
        ------
        LayoutError
            If the swizzles differ, and there are too many elements to compare.
        """
        swizzles = [
            (it.per_element, it.swizzle_len, it.atom_len, it.swizzle_inner) for it in (self, as_composed(other))
        ]
        if swizzles[0] == swizzles[1]:
            return self.tile_layout.equivalent(as_composed(other).tile_layout)
        size = self.size()
        if size != other.size():
            return False
        if not isinstance(size, int) or size > _MOST_ELEMENTS:
            raise LayoutError(
                f"equivalent: {self} and {other} differ in their swizzles, and have {size} elements to compare"
            )
        return all(self.apply(x) == other.apply(x) for x in range(size))

    def is_injective(self) -> bool:
        """Return whether no two elements share a point: the tile layout's, for the swizzle is a permutation."""
        return self.tile_layout.is_injective()

    def _on_tiles(self, make: Callable[[Layout], Layout]) -> ComposeLayout:
        return replace(self, tile_layout=make(self.tile_layout))

    def group(self, shape: Sequence[Number]) -> tuple[ComposeLayout, list[int]]:
        """Apply `Layout.group` to the tile layout."""
        grouped, seps = self.tile_layout.group(shape)
        return replace(self, tile_layout=grouped), seps

    def permute(self, shape: Sequence[Number], order: Sequence[int]) -> ComposeLayout:
        """Apply `Layout.permute` to the tile layout."""
        return self._on_tiles(lambda tile: tile.permute(shape, order))

    def tile(self, outer: Layout, outer_shape: Sequence[Number], inner_shape: Sequence[Number]) -> ComposeLayout:
        """Apply `Layout.tile` to the tile layout: the swizzle stays innermost, and sees the addresses of all tiles."""
        return self._on_tiles(lambda tile: tile.tile(outer, outer_shape, inner_shape))

    def tile_to(self, to_shape: Sequence[Number], current_shape: Sequence[Number]) -> ComposeLayout:
        """Apply `Layout.tile_to` to the tile layout."""
        return self._on_tiles(lambda tile: tile.tile_to(to_shape, current_shape))

    def direct_sum(self, left: Layout, left_shape: Sequence[Number], right_shape: Sequence[Number]) -> ComposeLayout:
        """Apply `Layout.direct_sum` to the tile layout."""
        return self._on_tiles(lambda tile: tile.direct_sum(left, left_shape, right_shape))

    def slice(self, shape: Sequence[Number], region: Sequence[tuple[Number, Number]]) -> ComposeLayout:
        """Apply `Layout.slice` to the tile layout, whose offset keeps the elements where they were."""
        return self._on_tiles(lambda tile: tile.slice(shape, region))

    def broadcast(self, num: Number, axis: str) -> ComposeLayout:
        """Apply `Layout.broadcast` to the tile layout."""
        return self._on_tiles(lambda tile: tile.broadcast(num, axis))

    def project(self, axes: Collection[str]) -> ComposeLayout | Layout:
        """Apply `Layout.project`; without linear memory there is nothing left to swizzle."""
        projected = self.tile_layout.project(axes)
        return replace(self, tile_layout=projected) if LINEAR_MEMORY in axes else projected

    def unpack(self, num: int) -> ComposeLayout:
        """Apply `Layout.unpack`; the bits that stay are more.

        Raises
        ------
        LayoutError
            If `num` is not a power of two; or as `Layout.unpack`.
        """
        return replace(self, per_element=self.per_element + _log2(num), tile_layout=self.tile_layout.unpack(num))

    def pack(self, num: int) -> ComposeLayout:
        """Apply `Layout.pack`; the bits that stay are fewer.

        Raises
        ------
        LayoutError
            If `num` is not a power of two, or the swizzle tears elements apart that are to be one; or as `Layout.pack`.
        """
        bits = _log2(num)
        if bits > self.per_element:
            raise LayoutError(f"pack: {self} keeps 2**{self.per_element} elements together, and num is {num}")
        return replace(self, per_element=self.per_element - bits, tile_layout=self.tile_layout.pack(num))

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

    @staticmethod
    def parse(text: str) -> ComposeLayout:
        """Read one from its text, or from the compiler's: ``ComposeLayout(3, 3, 3, S[(8, 64) : (64, 1)])``.

        Law: ``ComposeLayout.parse(str(layout)) == layout``.

        Raises
        ------
        LayoutError
            If the text is malformed, with the position where, or states no valid layout.
        """
        bits, parts, swizzle_inner = parse_composed(text)
        per_element, swizzle_len, atom_len = bits
        return ComposeLayout(per_element, swizzle_len, atom_len, Layout(*parts), swizzle_inner)

    def __str__(self) -> str:
        bits = f"{self.per_element}, {self.swizzle_len}, {self.atom_len}"
        return f"ComposeLayout({bits}, {self.tile_layout}{'' if self.swizzle_inner else ', swizzle_inner=False'})"

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def as_composed(layout: ComposeLayout | Layout) -> ComposeLayout:
    """Return a layout with a swizzle: with one that changes nothing, if it has none."""
    return layout if isinstance(layout, ComposeLayout) else ComposeLayout(0, 0, 0, layout)


def _log2(num: int) -> int:
    if check_int("num", num, 1) & (num - 1):
        raise LayoutError(f"num must be a power of two under a swizzle, not {num}")
    return num.bit_length() - 1
