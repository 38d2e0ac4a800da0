"""Drawing layouts: who owns what, from the mesh down to the lane, and what an access to memory costs.

>>> from tvm_axe.layout import Layout, Mesh
>>> mesh = Mesh({"tp": 2, "dp": 2})
>>> print(show(Layout.sharded((4, 6), mesh, {1: "tp"}), (4, 6), mesh).text())
S[(4, 2, 3) : (3, 1@tp, 1)] + R[2 : 1@dp]
4x6 on tp=2,dp=2: the devices that hold each block
<BLANKLINE>
    0:3 3:6
0:4 0-1 2-3
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, MEMORY_AXES, THREAD_AXES, Coordinate, is_mesh_axis
from tvm_axe.layout.draw_memory import draw_banks, draw_sectors
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.memory import Access
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.picture import Cell, Entry, Picture, fills, ranges
from tvm_axe.layout.placement import Placement
from tvm_axe.layout.sharding import check_shape

KINDS = ("mesh", "threads", "banks", "coalescing")
"""What can be drawn; see `show`."""

MOST_CELLS = 8192
MOST_ENTRIES = 32

_SHORT = {"laneid": "t", "warpid": "w", "wgid": "g", "tid_in_wg": "t", "wid_in_wg": "w", "tx": "t"}


def show(
    layout: Layout,
    shape: Sequence[int],
    mesh: Mesh | None = None,
    kind: str | None = None,
    access: Access | None = None,
) -> Picture:
    """Return a picture of where a tensor's elements live.

    Parameters
    ----------
    layout : Layout
        The layout.
    shape : Sequence[int]
        The tensor's shape: the layout admits it, or, on a mesh, it admits the shape padded to whole blocks, with the
        terms of sums as leading dimensions. Dimensions before the last share the rows of the picture.
    mesh : Mesh, optional
        The devices. Left out, the mesh axes are as large as the layout reaches.
    kind : str, optional
        "mesh": each block with the numbers of the devices that hold it. "threads": each element with its whole place,
        device, thread and register (or other memory coordinate). "banks": the words of shared memory that one warp
        touches at once, by bank, with the conflicts. "coalescing": the 32-byte sectors of global memory that one
        access of a warp touches, with the efficiency. Left out, it follows from the layout's axes: "threads" if there
        are thread axes or memory axes beside the linear one, else "mesh" if there are mesh axes, else "banks".
    access : Access, optional
        For "banks" and "coalescing": the type of the elements, and which of them each lane touches. Left out,
        `Access()`.

    Raises
    ------
    LayoutError
        If the shape doesn't fit, the mesh lacks an axis, the kind is unknown or needs other axes, or the picture would
        have too many cells.
    """
    shape = check_shape(shape)
    kind = _default_kind(layout) if kind is None else kind
    if kind not in KINDS:
        raise LayoutError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if kind == "banks":
        return draw_banks(layout, shape, access or Access())
    if kind == "coalescing":
        return draw_sectors(layout, shape, access or Access())
    mesh = _mesh_of(layout) if mesh is None else mesh
    grid = _Grid(layout, shape, mesh)
    return _draw_mesh(grid) if kind == "mesh" else _draw_threads(grid)


def _axes(layout: Layout) -> set[str]:
    return {it.axis for it in (*layout.D, *layout.R)} | set(layout.O)


def _default_kind(layout: Layout) -> str:
    axes = _axes(layout)
    if any(axis in THREAD_AXES or (axis in MEMORY_AXES and axis != LINEAR_MEMORY) for axis in axes):
        return "threads"
    return "mesh" if any(map(is_mesh_axis, axes)) else "banks"


def _mesh_of(layout: Layout) -> Mesh:
    """The smallest mesh on which the layout stays, its axes as they come; one device if it names none."""
    sizes: dict[str, int] = {}
    for it in (*layout.D, *layout.R):
        if is_mesh_axis(it.axis):
            sizes[it.axis] = sizes.get(it.axis, 1 + layout.O[it.axis]) + (it.extent - 1) * max(it.stride, 0)
    for axis in layout.O:
        if is_mesh_axis(axis):
            sizes.setdefault(axis, 1 + layout.O[axis])
    return Mesh(sizes or {"device": 1})


class _Grid:
    """A layout's domain as rows and columns, and where elements are."""

    def __init__(self, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> None:
        for axis in _axes(layout):
            if is_mesh_axis(axis):
                mesh.axis_size(axis)
        self.layout, self.mesh, self.shape = layout, mesh, shape
        self.domain, self.real = shape, shape
        if not layout.admits(shape):
            placement = Placement.of(layout, shape, mesh)
            blocks = (math.prod(mesh[axis] for axis in cut) for cut in placement.cuts)
            terms = tuple(mesh[axis] for axis in mesh.names if axis in placement.partial)
            self.domain = (*terms, *(b * n for b, n in zip(placement.local_shape(shape, mesh), blocks)))
            self.real = (*terms, *shape)
        self.folded = len(self.domain) == 1
        width = self.domain[-1] if self.domain else 1
        if self.folded and width > MOST_ENTRIES:
            width = next(w for w in range(MOST_ENTRIES, 0, -1) if width % w == 0)
        self.columns, self.rows = width, math.prod(self.domain) // width

    def places(self, row: int, column: int) -> frozenset[Coordinate]:
        """Every point where an element lives; none for padding."""
        position = row * self.columns + column
        index = []
        for extent in reversed(self.domain):
            position, digit = divmod(position, extent)
            index.append(digit)
        if any(digit >= extent for digit, extent in zip(reversed(index), self.real)):
            return frozenset()
        return self.layout.apply(row * self.columns + column)

    def devices(self, points: frozenset[Coordinate]) -> tuple[int, ...]:
        """The devices that hold one of the points."""
        return tuple(sorted({self.mesh.device({axis: p[axis] for axis in self.mesh.names}) for p in points}))

    def head(self, row: int, rows: int) -> str:
        """The heading of rows that are drawn as one."""
        if self.folded:
            return f"+{row * self.columns}"
        names = []
        for at in (row, row + rows):
            digits = []
            for extent in reversed(self.domain[1:-1]):
                at, digit = divmod(at, extent)
                digits.insert(0, digit)
            names.append(",".join(map(str, (at, *digits))))
        return names[0] if rows == 1 else ":".join(names)

    @property
    def name(self) -> str:
        shape = "x".join(map(str, self.shape)) or "a scalar"
        padded = f" as {'x'.join(map(str, self.domain))}" if self.domain != self.shape else ""
        return f"{shape}{padded}"


def _check_cells(rows: int, columns: int) -> None:
    if rows * columns > MOST_CELLS:
        raise LayoutError(f"the picture would have {rows} x {columns} cells, and at most {MOST_CELLS} are drawn; "
                          "take the shape and the layout of a tile")


def _draw_mesh(grid: _Grid) -> Picture:
    """Each block with the devices that hold it; rows and columns in which nothing changes are drawn as one."""
    high, wide = _steps(grid)
    _check_cells(grid.rows // high, grid.columns // wide)
    entries: dict[tuple[int, ...], int] = {}
    rows = []
    for row in range(0, grid.rows, high):
        cells = []
        for column in range(0, grid.columns, wide):
            devices = grid.devices(grid.places(row, column))
            known = devices and (devices in entries or len(entries) < MOST_ENTRIES)
            cells.append(Cell((ranges(devices) or "-",), entries.setdefault(devices, len(entries)) if known else None))
        rows.append((grid.head(row, high), tuple(cells)))
    columns = tuple(str(c) if wide == 1 else f"{c}:{c + wide}" for c in range(0, grid.columns, wide))
    legend = tuple(Entry(_device_names(devices, grid.mesh), fill) for devices, fill in zip(entries, fills(len(entries))))
    notes = [f"{grid.name} on {grid.mesh}: the devices that hold each block"]
    if grid.domain != grid.real:
        notes.append("-: padding")
    return Picture(str(grid.layout), tuple(notes), columns, tuple(rows), legend)


def _device_names(devices: tuple[int, ...], mesh: Mesh) -> str:
    """A device with its coordinates, or the numbers of several."""
    if len(devices) > 1:
        return f"devices {ranges(devices)}"
    return f"device {devices[0]}: " + " ".join(f"{axis}={at}" for axis, at in mesh.coords(devices[0]).items())


def _steps(grid: _Grid) -> tuple[int, int]:
    """How many rows, and how many columns, always have the same devices.

    A digit of D that counts steps of b elements is the same for b elements from a multiple of b on.
    """
    high, wide = grid.rows, grid.columns
    below = math.prod(it.extent for it in grid.layout.D)
    for it in grid.layout.D:
        below //= it.extent
        if is_mesh_axis(it.axis):
            wide = math.gcd(wide, below)
            # A digit that comes around within a row is the same in all of them.
            if grid.columns % (below * it.extent):
                high = math.gcd(high, below // grid.columns) if below % grid.columns == 0 else 1
    if grid.domain != grid.real:
        wide = math.gcd(wide, grid.real[-1])
        high = math.gcd(high, grid.real[0]) if len(grid.domain) == 2 else 1
    if grid.folded and grid.domain != grid.real:
        high = 1
    return high, wide


def _draw_threads(grid: _Grid) -> Picture:
    """Each element with its whole place: device, thread, register."""
    _check_cells(grid.rows, grid.columns)
    axes = [axis for axis in (*THREAD_AXES, *MEMORY_AXES) if axis in _axes(grid.layout) | {LINEAR_MEMORY}]
    spread = any(map(is_mesh_axis, _axes(grid.layout)))
    coloured = _outermost(grid, axes, spread)
    entries: dict[str, int] = {}
    rows = []
    for row in range(grid.rows):
        cells = []
        for column in range(grid.columns):
            points = grid.places(row, column)
            at = {axis: ranges(sorted({point[axis] for point in points})) for axis in axes}
            if spread:
                at["device"] = ranges(grid.devices(points))
            if not points:
                cells.append(Cell(("-",)))
                continue
            threads = ["d" + at["device"]] if spread else []
            threads += (_SHORT.get(axis, axis) + at[axis] for axis in axes if axis in THREAD_AXES)
            # Beside threads, linear memory is registers.
            register = "r" if any(axis in THREAD_AXES for axis in axes) else LINEAR_MEMORY
            memory = [(register if axis == LINEAR_MEMORY else axis) + at[axis] for axis in axes if axis in MEMORY_AXES]
            lines = tuple(" ".join(line) for line in (threads, memory) if line)
            known = at[coloured] in entries or len(entries) < MOST_ENTRIES
            cells.append(Cell(lines, entries.setdefault(at[coloured], len(entries)) if known else None))
        rows.append((grid.head(row, 1), tuple(cells)))
    columns = tuple(map(str, range(grid.columns)))
    named = [f"d: device of {grid.mesh}"] if spread else []
    named += (f"{_SHORT[axis]}: {axis}" for axis in axes if axis in _SHORT)
    if any(axis in THREAD_AXES for axis in axes):
        named.append("r: register")
    what = "-: padding; " if grid.domain != grid.real else ""
    notes = (f"{grid.name}: the place of each element, coloured by {coloured}", what + ", ".join(named))
    legend = tuple(Entry(f"{coloured} {at}", fill) for at, fill in zip(entries, fills(len(entries))))
    return Picture(str(grid.layout), tuple(note for note in notes if note), columns, tuple(rows), legend)


def _outermost(grid: _Grid, axes: list[str], spread: bool) -> str:
    """The outermost level that tells elements apart: the devices, else the first axis with several positions."""
    moving = {it.axis for it in grid.layout.D if it.extent > 1}
    if spread and any(map(is_mesh_axis, moving)):
        return "device"
    return next((axis for axis in axes if axis in moving), axes[0])
