"""set_layout: a buffer's elements lie in memory as a layout says."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.errors import LayoutError, ScheduleError
from tvm_axe.layout import ComposeLayout, Layout, memory_size
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.symbolic import Symbolic
from tvm_axe.schedule import query


def set_layout(
    sch: s_tir.Schedule, buffer: str, layout: Layout | ComposeLayout | str, tile: Sequence[int] | None = None
) -> None:
    """Have the elements of `buffer` lie in memory as `layout` says, by a recorded ``transform_layout``. ::

        B = T.sblock_alloc_buffer((8, 16))                 B = T.sblock_alloc_buffer((135,))
        for i, j in T.grid(8, 16):                 ->      for i, j in T.grid(8, 16):
            B[i, j] = A[i, j]                                  B[i * 17 + j] = A[i, j]
                                    S[(8, 16) : (17, 1)]

    The buffer becomes one-dimensional, and every access to it takes the address that the layout gives. A parameter
    changes with the rest: the caller packs what it passes with `tvm_axe.pack` and unpacks what it gets with
    `tvm_axe.unpack`. Set layouts last, after the loops over the buffer are in place: other primitives reason about
    its dimensions, which are gone then. On every target, whatever the buffer's scope.

    Valid when one buffer that blocks touch has this name, and `layout` admits its shape (or that of `tile`, which
    divides it) and gives each element an address in linear memory, the lowest 0.

    Leaves no annotation.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    buffer : str
        A parameter or an allocated buffer, by name.
    layout : Layout or ComposeLayout or str
        A layout on linear memory alone (the axis ``m``) that gives each element one address, the lowest 0.
    tile : Sequence[int], optional
        Lay out each tile of this shape so, the tiles in front as dimensions of their own. For a buffer of which each
        thread block (or loop iteration) holds one tile, such as one in shared memory: upstream then still sees that the
        others need no room.

    Raises
    ------
    ScheduleError
        If no block touches such a buffer, several buffers have that name, or `tile` doesn't divide its shape.
    LayoutError
        If the layout doesn't admit the shape or isn't one of linear memory (see `tvm_axe.layout.memory_size`).

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.programs import PROGRAMS
    >>> mlp = PROGRAMS["mlp"](axe.Mesh({"tp": 2}))
    >>> sch = axe.Schedule(mlp.func, mesh=mlp.mesh)
    >>> sch.set_layout("C", "S[(12, 8) : (9, 1)]")
    >>> sch.get(sch.get_sblock("mm")).body.buffer.shape
    (107,)
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    block, index, found = _touching(sch, buffer)
    whole = tuple(int(extent) for extent in found.shape)
    shape = whole if tile is None else tuple(tile)
    if len(shape) != len(whole) or any(extent % part for extent, part in zip(whole, shape)):
        raise ScheduleError(f"set_layout: the tile {shape} does not divide {buffer!r}, whose shape is {whole}")
    layout.apply(*(0 for _ in shape), shape=shape)  # raises if it doesn't admit the shape
    size = memory_size(layout)
    tiles = layout.tile_layout if isinstance(layout, ComposeLayout) else layout
    if tiles.bounds(LINEAR_MEMORY)[0] != 0:
        raise LayoutError(
            f"set_layout: {layout} starts at address {tiles.bounds(LINEAR_MEMORY)[0]}; a buffer starts at 0"
        )

    def address(*indices: tirx.Var) -> list[tirx.Expr]:
        outer = [] if tile is None else [i // part for i, part in zip(indices, shape)]
        inner = indices if tile is None else [i % part for i, part in zip(indices, shape)]
        (point,) = layout.apply(*inner, shape=shape)
        place = point[LINEAR_MEMORY]
        expression = place.expr if isinstance(place, Symbolic) else tirx.IntImm("int32", place)
        # Upstream can't bound an exclusive or; the remainder tells it what memory_size knows.
        return [*outer, expression % size if isinstance(layout, ComposeLayout) else expression]

    query.checked(
        "set_layout",
        query.name_of(sch, block),
        lambda: sch.transform_layout(block, index, address, assume_injective_transform=True),
    )


def _touching(sch: s_tir.Schedule, name: str) -> tuple[SBlockRV, tuple[str, int], tirx.Buffer]:
    """Return a block that reads or writes the buffer of that name, which of its accesses that is, and the buffer."""
    working_on = sch.func_working_on
    func = sch.mod[working_on if working_on is not None else "main"]
    found: dict[tirx.Buffer, tuple[str, tuple[str, int]]] = {}

    def on_block(block: s_tir.SBlock) -> None:
        for kind, regions in (("read", block.reads), ("write", block.writes)):
            for index, region in enumerate(regions):
                if region.source.name == name and region.source not in found:
                    found[region.source] = (str(block.name_hint), (kind, index))

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, on_block))
    if len(found) != 1:
        raise ScheduleError(
            f"set_layout: {len(found)} buffers that blocks touch are called {name!r}; valid is the name of one "
            "parameter or allocated buffer"
        )
    (buffer, (block, index)) = next(iter(found.items()))
    return query.checked("set_layout", block, lambda: sch.get_sblock(block)), index, buffer
