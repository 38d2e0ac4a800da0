"""What one access of a warp costs: bank conflicts in shared memory, sectors of global memory.

The rules are those of NVIDIA GPUs. Shared memory has 32 banks, successive 4-byte words in successive banks; lanes that
touch the same word share it, and different words of one bank take a cycle each. Lanes that take 8 or 16 bytes at once
are served in halves or quarters of the warp. Global memory is read and written in sectors of 32 bytes.

32 rows of 32 floats, read down the first column: 32 words of one bank. Rows that are padded by one word put them into
32 banks:

>>> from tvm_axe.layout import Layout
>>> bank_conflicts(Layout.parse("S[(32, 32) : (32, 1)]"), (32, 32), Access("float32", "column")).conflicts
31
>>> bank_conflicts(Layout.parse("S[(32, 32) : (33, 1)]"), (32, 32), Access("float32", "column")).conflicts
0

Source: NVIDIA, CUDA C++ Programming Guide, shared memory of devices of compute capability 5.x and later; CUDA C++ Best
Practices Guide, coalesced access to global memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, check_int
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.placement import whole
from tvm_axe.layout.swizzle import ComposeLayout

LANES, BANKS, WORD, SECTOR = 32, 32, 4, 32  # threads in a warp; banks; bytes in a word and in a sector

MOST_ELEMENTS = 1 << 16  # searched for those that the lanes of a layout touch


@dataclass(frozen=True)
class Access:
    """The elements that the lanes of one warp touch with one instruction.

    Parameters
    ----------
    dtype : str
        The type of the elements.
    lanes : str or Layout
        "row": lane l takes the elements from l * vector on in row-major order. "column": lane l takes row l from its
        first element on; if there are fewer rows than lanes, the next lanes take the next elements of each row. A
        layout over the tensor's shape: a lane takes its registers 0 to vector - 1 of the warp, device and so on at 0.
    vector : int
        Elements a lane takes at once: neighbours in memory, at an address that is a multiple of their size.

    Raises
    ------
    LayoutError
        If a part is of another kind, or a lane's elements together take neither a power of two of whole bytes nor at
        most 16.
    """

    dtype: str = "float32"
    lanes: str | Layout = "row"
    vector: int = 1

    def __post_init__(self) -> None:
        if self.lanes not in ("row", "column") and not isinstance(self.lanes, Layout):
            raise LayoutError(f"lanes must be 'row', 'column' or a layout of threads, not {self.lanes!r}")
        bits = dtype_bits(self.dtype) * check_int("vector", self.vector, least=1)
        if bits not in (8, 16, 32, 64, 128):
            raise LayoutError(
                f"a lane takes 1, 2, 4, 8 or 16 bytes at once, not vector={self.vector} elements of {self.dtype}, "
                f"which are {bits} bits"
            )

    @property
    def bytes(self) -> int:
        """What one lane takes at once."""
        return dtype_bits(self.dtype) * self.vector // 8

    def elements(self, shape: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """Return the row-major positions that each lane touches; lanes that touch nothing are left out."""
        size = math.prod(shape)
        columns = shape[-1] if shape else 1
        if isinstance(self.lanes, Layout):
            return self._by_layout(self.lanes, shape)
        found = {}
        for lane in range(LANES):
            if self.lanes == "row":
                start = lane * self.vector
            else:
                column, row = divmod(lane, size // columns)
                start = row * columns + column * self.vector
                if (column + 1) * self.vector > columns:
                    continue
            if start + self.vector <= size:
                found[lane] = tuple(range(start, start + self.vector))
        return found

    def _by_layout(self, lanes: Layout, shape: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        size = math.prod(shape)
        if not lanes.admits(shape):
            raise LayoutError(f"lanes: layout {lanes} doesn't place the {size} elements of shape {shape}")
        if size > MOST_ELEMENTS:
            raise LayoutError(f"lanes: shape {shape} has more than {MOST_ELEMENTS} elements; take the shape of a tile")
        found: dict[int, dict[int, int]] = {}
        for element in range(size):
            for point in lanes.apply(element):
                lane, register = whole(point["laneid"]), whole(point[LINEAR_MEMORY])
                if set(point) <= {"laneid", LINEAR_MEMORY} and 0 <= register < self.vector:
                    found.setdefault(lane, {})[register] = element
        if not found or not set(found) <= set(range(LANES)):
            raise LayoutError(
                f"lanes: layout {lanes} must place elements on laneid 0 to {LANES - 1}, from register 0 on"
            )
        return {lane: tuple(at[r] for r in sorted(at)) for lane, at in sorted(found.items())}


@dataclass(frozen=True)
class BankAccess:
    """How shared memory serves one access.

    Attributes
    ----------
    words : dict[int, tuple[int, ...]]
        The 4-byte words that each lane touches.
    phases : tuple[tuple[int, ...], ...]
        The lanes that are served together.
    """

    words: dict[int, tuple[int, ...]]
    phases: tuple[tuple[int, ...], ...]

    def crowd(self, phase: tuple[int, ...]) -> dict[int, int]:
        """Return how many different words of each bank the lanes of a phase touch."""
        touched = {word for lane in phase for word in self.words[lane]}
        return {bank: sum(word % BANKS == bank for word in touched) for bank in {word % BANKS for word in touched}}

    @property
    def ways(self) -> int:
        """The most words of one bank that are touched together: 1 if there is no conflict."""
        return max(max(self.crowd(phase).values()) for phase in self.phases)

    @property
    def conflicts(self) -> int:
        """The cycles beyond one for each phase."""
        return sum(max(self.crowd(phase).values()) - 1 for phase in self.phases)


@dataclass(frozen=True)
class SectorAccess:
    """What one access moves from or to global memory.

    Attributes
    ----------
    words : dict[int, tuple[int, ...]]
        The 4-byte words that each lane touches.
    sectors : frozenset[int]
        The sectors of 32 bytes that are moved.
    useful : int
        The bytes that the lanes touch, each counted once.
    """

    words: dict[int, tuple[int, ...]]
    sectors: frozenset[int]
    useful: int

    @property
    def efficiency(self) -> float:
        """The part of what is moved that is touched."""
        return self.useful / (SECTOR * len(self.sectors))


def bank_conflicts(layout: Layout | ComposeLayout, shape: Sequence[int], access: Access) -> BankAccess:
    """Return how shared memory serves `access` to a tensor of `shape` in `layout`, which starts at bank 0.

    Raises
    ------
    LayoutError
        If the layout doesn't admit the shape, or isn't one address in linear memory for each element; or if a lane's
        elements are no aligned neighbours.
    """
    addresses = lane_addresses(layout, tuple(shape), access)
    words = {lane: _words(at, access) for lane, at in addresses.items()}
    together = min(LANES, LANES * WORD // access.bytes)
    phases = [tuple(lane for lane in words if lane // together == part) for part in range(LANES // together)]
    return BankAccess(words, tuple(phase for phase in phases if phase))


def sectors_touched(layout: Layout | ComposeLayout, shape: Sequence[int], access: Access) -> SectorAccess:
    """Return what `access` to a tensor of `shape` in `layout` moves; the tensor starts at a sector.

    Raises
    ------
    LayoutError
        If `bank_conflicts` refuses what is given.
    """
    addresses = lane_addresses(layout, tuple(shape), access)
    touched = {byte for at in addresses.values() for byte in range(at, at + access.bytes)}
    words = {lane: _words(at, access) for lane, at in addresses.items()}
    return SectorAccess(words, frozenset(byte // SECTOR for byte in touched), len(touched))


def lane_addresses(layout: Layout | ComposeLayout, shape: tuple[int, ...], access: Access) -> dict[int, int]:
    """Return the byte at which each lane's elements start."""
    if not layout.admits(shape):
        wanted = math.prod(shape)
        raise LayoutError(f"layout {layout} places {layout.size()} elements, and shape {shape} has {wanted}")
    bits, found = dtype_bits(access.dtype), {}
    for lane, elements in access.elements(shape).items():
        positions = []
        for element in elements:
            points = layout.apply(element)
            if len(points) != 1 or not set(next(iter(points))) <= {LINEAR_MEMORY}:
                raise LayoutError(
                    f"layout {layout} must give each element one address in linear memory, so that words can be counted"
                )
            positions.append(whole(next(iter(points))[LINEAR_MEMORY]))
        start = positions[0] * bits
        if positions != list(range(positions[0], positions[0] + access.vector)) or start % (8 * access.bytes):
            raise LayoutError(
                f"lane {lane} takes {access.vector} elements at once, which must be neighbours from a multiple of "
                f"{access.bytes} bytes on; in layout {layout} they are at {positions}; take a smaller vector"
            )
        found[lane] = start // 8
    return found


def _words(start: int, access: Access) -> tuple[int, ...]:
    """Return the words that hold a lane's bytes from `start` on."""
    return tuple(range(start // WORD, (start + access.bytes - 1) // WORD + 1))
