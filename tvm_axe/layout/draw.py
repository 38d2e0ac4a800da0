"""Drawing layouts: who owns what, from the mesh down to the lane, and what an access to memory costs.

>>> from tvm_axe.layout import Layout, Mesh
>>> mesh = Mesh({"tp": 2, "dp": 2})
>>> print(show(Layout.sharded((4, 6), mesh, {1: "tp"}), (4, 6), mesh).text())
S[(4, 2, 3) : (3, 1@tp, 1)] + R[2 : 1@dp]
4x6 on tp=2,dp=2: the devices that hold each block, numbered row-major
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
from tvm_axe.layout.placement import Placement, is_symbolic, whole
from tvm_axe.layout.shapes import check_shape
from tvm_axe.layout.swizzle import ComposeLayout, as_composed

KINDS = ("mesh", "threads", "banks", "coalescing")
"""What can be drawn; see `show`."""

MOST_CELLS = 8192
FOLD = 32  # elements of a single long dimension in a row

DEVICE = "device"
_SHORT = {DEVICE: "d", "laneid": "t", "warpid": "w", "wgid": "g", "tid_in_wg": "t", "wid_in_wg": "w", "tx": "t"}


def show(
    layout: Layout | ComposeLayout,
    shape: Sequence[int],
    mesh: Mesh | None = None,
    kind: str | None = None,
    access: Access | None = None,
) -> Picture:
    """Return a picture of where a tensor's elements live.

    Parameters
    ----------
    layout : Layout or ComposeLayout
        The layout, of ints.
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
        The type of the elements, and which of them each lane touches, for "banks" and "coalescing"; `Access()` by
        default.

    Raises
    ------
    LayoutError
        If the layout is symbolic, the shape doesn't fit, the mesh lacks an axis, the kind is unknown or needs other
        axes, or the picture would have too many cells.
    """
    shape = check_shape(shape)
    if is_symbolic(_unswizzled(layout)):
        raise LayoutError(f"layout {layout} must be of ints alone to be drawn")
    kind = _default_kind(layout) if kind is None else kind
    if kind not in KINDS:
        raise LayoutError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if kind == "banks":
        return draw_banks(layout, shape, access or Access())
    if kind == "coalescing":
        return draw_sectors(layout, shape, access or Access())
    mesh = _mesh_of(_unswizzled(layout)) if mesh is None else mesh
    grid = _Grid(layout, shape, mesh)
    return _draw_mesh(grid) if kind == "mesh" else _draw_threads(grid)


def _unswizzled(layout: Layout | ComposeLayout) -> Layout:
    """Return the part of a layout that says anything about axes and digits."""
    return as_composed(layout).tile_layout


def _axes(layout: Layout | ComposeLayout) -> set[str]:
    layout = _unswizzled(layout)
    return {it.axis for it in (*layout.D, *layout.R)} | set(layout.O)


def _default_kind(layout: Layout | ComposeLayout) -> str:
    axes = _axes(layout)
    if any(axis in THREAD_AXES or (axis in MEMORY_AXES and axis != LINEAR_MEMORY) for axis in axes):
        return "threads"
    return "mesh" if any(map(is_mesh_axis, axes)) else "banks"


def _mesh_of(layout: Layout) -> Mesh:
    """Return the smallest mesh on which the layout stays, its axes as they come; one device if it names none."""
    sizes: dict[str, int] = {}
    for it in (*layout.D, *layout.R):
        if is_mesh_axis(it.axis):
            reach = (whole(it.extent) - 1) * max(whole(it.stride), 0)
            sizes[it.axis] = sizes.get(it.axis, 1 + whole(layout.O[it.axis])) + reach
    for axis in layout.O:
        if is_mesh_axis(axis):
            sizes.setdefault(axis, 1 + whole(layout.O[axis]))
    return Mesh(sizes or {"device": 1})


class _Grid:
    """A layout's domain as rows and columns, and where elements are."""

    def __init__(self, layout: Layout | ComposeLayout, shape: tuple[int, ...], mesh: Mesh) -> None:
        for axis in _axes(layout):
            if is_mesh_axis(axis):
                mesh.axis_size(axis)
        self.layout, self.mesh, self.shape = layout, mesh, shape
        self.domain, self.real = shape, shape
        if not layout.admits(shape):
            placement = Placement.of(_unswizzled(layout), shape, mesh)
            blocks = (math.prod(mesh[axis] for axis in cut) for cut in placement.cuts)
            terms = tuple(mesh[axis] for axis in mesh.names if axis in placement.partial)
            self.domain = (*terms, *(b * n for b, n in zip(placement.local_shape(shape, mesh), blocks)))
            self.real = (*terms, *shape)
        self.folded = len(self.domain) == 1
        width = self.domain[-1] if self.domain else 1
        if self.folded and width > FOLD:
            width = next(w for w in range(FOLD, 0, -1) if width % w == 0)
        self.columns, self.rows = width, math.prod(self.domain) // width

    def places(self, row: int, column: int) -> frozenset[Coordinate]:
        """Return every point where an element lives; none for padding."""
        position = row * self.columns + column
        index: list[int] = []
        for extent in reversed(self.domain):
            position, digit = divmod(position, extent)
            index.append(digit)
        if any(digit >= extent for digit, extent in zip(reversed(index), self.real)):
            return frozenset()
        return self.layout.apply(row * self.columns + column)

    def devices(self, points: frozenset[Coordinate]) -> tuple[int, ...]:
        """Return the devices that hold one of the points."""
        return tuple(sorted({self.mesh.device({axis: whole(p[axis]) for axis in self.mesh.names}) for p in points}))

    def head(self, row: int, rows: int) -> str:
        """Return the heading of rows that are drawn as one."""
        if self.folded:
            return f"+{row * self.columns}"
        names = []
        for at in (row, row + rows):
            digits: list[int] = []
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
        raise LayoutError(
            f"the picture would have {rows} x {columns} cells, and at most {MOST_CELLS} are drawn; take a tile's layout"
        )


def _draw_mesh(grid: _Grid) -> Picture:
    """Return each block with the devices that hold it; neighbouring rows or columns that are alike are drawn as one."""
    high, wide = _steps(grid)
    _check_cells(grid.rows // high, grid.columns // wide)
    owners = [
        [grid.devices(grid.places(row, column)) for column in range(0, grid.columns, wide)]
        for row in range(0, grid.rows, high)
    ]
    down, across = _runs(owners), _runs(list(zip(*owners)))
    held = [[owners[row][column] for column, _ in across] for row, _ in down]
    several = sorted({devices for row in held for devices in row if devices})
    fill = fills(len(several))
    rows = []
    for (start, stop), row in zip(down, held):
        cells = (Cell((ranges(d),), several.index(d)) if d else Cell(("-",)) for d in row)
        rows.append((grid.head(start * high, (stop - start) * high), tuple(cells)))
    columns = (range(start * wide, stop * wide) for start, stop in across)
    heads = tuple(f"{at.start}" if len(at) == 1 else f"{at.start}:{at.stop}" for at in columns)
    notes = [f"{grid.name} on {grid.mesh}: the devices that hold each block, numbered row-major"]
    if grid.domain != grid.real:
        notes.append("-: padding")
    legend = tuple(Entry(_device_names(devices, grid.mesh), colour) for devices, colour in zip(several, fill))
    return Picture(str(grid.layout), tuple(notes), heads, tuple(rows), legend)


def _runs(lines: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[int, int]]:
    """Return the runs of equal neighbours, as (start, stop)."""
    starts = [at for at in range(len(lines)) if at == 0 or lines[at] != lines[at - 1]]
    return list(zip(starts, [*starts[1:], len(lines)]))


def _device_names(devices: tuple[int, ...], mesh: Mesh) -> str:
    """Return a device with its coordinates, or the numbers of several."""
    if len(devices) > 1:
        return f"devices {ranges(devices)}"
    return f"device {devices[0]}: " + " ".join(f"{axis}={at}" for axis, at in mesh.coords(devices[0]).items())


def _steps(grid: _Grid) -> tuple[int, int]:
    """Return how many rows, and how many columns, always have the same devices.

    A digit of D that counts steps of b elements is the same for b elements from a multiple of b on.
    """
    high, wide = grid.rows, grid.columns
    shard = _unswizzled(grid.layout).D
    below = math.prod(whole(it.extent) for it in shard)
    for it in shard:
        below //= whole(it.extent)
        if is_mesh_axis(it.axis):
            wide = math.gcd(wide, below)
            # A digit that comes around within a row is the same in all of them.
            if grid.columns % (below * whole(it.extent)):
                high = math.gcd(high, below // grid.columns) if below % grid.columns == 0 else 1
    if grid.domain != grid.real:
        high, wide = 1, math.gcd(wide, grid.real[-1])
    return high, wide


def _draw_threads(grid: _Grid) -> Picture:
    """Return each element with its whole place: device, thread, register."""
    _check_cells(grid.rows, grid.columns)
    used = _axes(grid.layout)
    threads = [axis for axis in THREAD_AXES if axis in used]
    memory = [axis for axis in MEMORY_AXES if axis in used] or [LINEAR_MEMORY]
    # Beside threads, linear memory is registers.
    short = {**_SHORT, LINEAR_MEMORY: "r"} if threads else _SHORT
    levels = [DEVICE, *threads] if any(map(is_mesh_axis, used)) else threads
    coloured = _outermost(_unswizzled(grid.layout), [*levels, *memory])
    owners: dict[str, int] = {}
    rows = []
    for row in range(grid.rows):
        cells = []
        for column in range(grid.columns):
            points = grid.places(row, column)
            at = {axis: ranges(sorted({whole(point[axis]) for point in points})) for axis in (*threads, *memory)}
            at[DEVICE] = ranges(grid.devices(points))
            lines = (" ".join(short.get(axis, axis) + at[axis] for axis in part) for part in (levels, memory) if part)
            cells.append(Cell(tuple(lines), owners.setdefault(at[coloured], len(owners))) if points else Cell(("-",)))
        rows.append((grid.head(row, 1), tuple(cells)))
    names = [f"{short[axis]}: {axis}" for axis in levels if axis in short]
    names += ["r: register"] if threads else []
    names += ["-: padding"] if grid.domain != grid.real else []
    notes = [f"{grid.name}: the place of each element, coloured by {coloured}"]
    if DEVICE in levels:
        notes[0] += f" of {grid.mesh}, numbered row-major" if coloured == DEVICE else ""
    notes += [", ".join(names)] if names else []
    legend = tuple(Entry(f"{coloured} {at}", fill) for at, fill in zip(owners, fills(len(owners))))
    return Picture(str(grid.layout), tuple(notes), tuple(map(str, range(grid.columns))), tuple(rows), legend)


def _outermost(layout: Layout, levels: Sequence[str]) -> str:
    """Return the outermost level that tells elements apart; the outermost of all if none does."""
    moving = {DEVICE if is_mesh_axis(it.axis) else it.axis for it in layout.D if it.extent > 1}
    return next((level for level in levels if level in moving), levels[0])
