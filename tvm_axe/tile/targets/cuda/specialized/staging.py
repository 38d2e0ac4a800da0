"""Output tiles that leave a specialized kernel through shared memory: which, in what pieces, and where they wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tvm_axe.errors import TileError
from tvm_axe.tile.nodes import Branch, Copy, Node, Signal
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.fragments.infer import LayoutChoice
from tvm_axe.tile.targets.cuda.instructions import tma, wgmma
from tvm_axe.tile.walking import leaves

_STAGED = 128  # bytes of a row of a staged piece of an output tile


@dataclass(frozen=True)
class Staging:
    """How an output tile leaves.

    Attributes
    ----------
    columns : int
        Columns of a piece, of all the tile's rows.
    pieces : int
        How many pieces the tile has.
    slots : int
        How many of them there is shared memory for, for each warpgroup.
    bytes : int
        How much shared memory they take, of all warpgroups.
    """

    columns: int
    pieces: int
    slots: int
    bytes: int


def has_storing_warp(program: TileProgram) -> bool:
    """Whether a warp of its own stores what is staged: if it has something to signal, or pieces are asked for."""
    return epilogue_tile(program) is not None or any(isinstance(node, Signal) for node in program.nodes())


def epilogue_tile(program: TileProgram) -> tuple[int, int] | None:
    """Rows and columns of the pieces in which tiles are to be stored; None for whole tiles."""
    given: Any = program.options.get("epilogue_tile")
    return None if given is None else (given[0], given[1])


def find(
    program: TileProgram, warpgroups: int, fragments: Mapping[Tile, LayoutChoice], whole: bool
) -> dict[Copy, Staging]:
    """Find the copies out that TMA does, in pieces or as `whole` tiles.

    They are 16-bit or add to sums in memory, from an accumulator's layout, and of a whole fragment.
    """
    # What TMA loads of a mesh tensor is behind a wait for who stored it (`ordering`).
    loads = {n for n in program.nodes() if isinstance(n, Copy) and n.src.tile.is_mesh and n.dst.tile.scope == "shared"}
    read = {tile for node in leaves(program.body) if node not in loads for tile in node.reads}
    found, analyzer = {}, program.analyzer()
    for copy in _copies_out(program):
        tile, dtype = copy.src.tile, copy.dst.tile.dtype
        if not _leaves(copy) or not copy.src.whole or copy.dst.tile in read:
            continue
        if copy.atomic and has_storing_warp(program):  # which signals what it has stored
            continue
        if len(tile.shape) != 2 or tile.shape[0] % (wgmma.ROWS * warpgroups):
            continue
        if fragments[tile].layout != wgmma.accumulator(*tile.shape, warpgroups):
            continue
        staged = Tile(tile.buffer, "shared", tile.shape, dtype)
        rows, columns = tile.shape
        at_once, _ = epilogue_tile(program) or (rows // warpgroups, columns)
        if tma.obstacle(copy.dst, staged, analyzer, at_once) or not tma.swizzle(staged):
            continue
        piece = _STAGED // tma.item_bytes(dtype) * (2 if copy.atomic else 1)  # in loops, which meet for each piece
        piece = columns if whole or columns % piece else piece
        slots = 1 if piece == columns else 2
        found[copy] = Staging(piece, columns // piece, slots, rows * piece * slots * tma.item_bytes(dtype))
    return found


def sent(program: TileProgram, own: Collection[Tile]) -> frozenset[Copy]:
    """Find the copies of the consumers' own shared tiles that TMA does: as they are, or adding in memory.

    Source: PTX ISA, "cp.async.bulk.tensor" and "cp.reduce.async.bulk.tensor".
    """
    if has_storing_warp(program):  # what it signals is behind what it stores itself
        return frozenset()
    analyzer = program.analyzer()
    read = {tile for node in leaves(program.body) for tile in node.reads}
    return frozenset(
        copy
        for copy in program.nodes()
        if isinstance(copy, Copy)
        and copy.src.tile in own
        and copy.src.whole
        and copy.dst.tile.scope == "global"
        and copy.dst.tile not in read
        and (copy.atomic is None or (copy.atomic == "add" and tma.adds(copy.dst.tile)))
        and tma.obstacle(copy.dst, copy.src.tile, analyzer) is None
    )


def _leaves(copy: Copy) -> bool:
    """Whether a copy out is of a type that leaves through shared memory: of 16 bits, or added without a cast."""
    half = copy.dst.tile.dtype in ("float16", "bfloat16")
    if copy.atomic is None:
        return half
    return copy.atomic == "add" and tma.adds(copy.dst.tile) and (half or copy.src.tile.dtype == copy.dst.tile.dtype)


def _copies_out(program: TileProgram) -> tuple[Copy, ...]:
    """The copies from fragments to global memory, in order."""
    copies = (node for node in program.nodes() if isinstance(node, Copy))
    return tuple(c for c in copies if c.src.tile.scope == "fragment" and c.dst.tile.scope == "global")


def check_boxes(program: TileProgram, staged: Collection[Copy]) -> None:
    """Refuse boxes of a tensor that aren't staged: only TMA knows how a tile's rows are a box.

    Raises
    ------
    TileError
        There is one.
    """
    for copy in _copies_out(program):
        if copy.dst.in_front and copy not in staged:
            raise TileError(f"{copy}: a box that doesn't leave through shared memory; valid is to store each element")


def places(program: TileProgram, staged: Mapping[Copy, Staging]) -> dict[Copy, Copy]:
    """Find the copy in whose staging buffer each waits: its own, or that of one of which it is an alternative.

    A storing warp empties a buffer whoever has filled it, so that copies of one tile in the two arms of a branch, one
    of which runs, take turns at one buffer.
    """
    found = {copy: copy for copy in staged}
    for branch in program.nodes() if has_storing_warp(program) else ():
        if isinstance(branch, Branch):
            for copy in _inside(branch.otherwise, staged):
                for other in _inside(branch.then, staged):
                    alike = copy.src.tile is other.src.tile and copy.dst.tile.dtype == other.dst.tile.dtype
                    if alike and staged[copy] == staged[other] and found[copy] is copy:
                        found[copy] = found[other]
    return found


def shared_places(staged: Mapping[Copy, Staging]) -> dict[Copy, Copy]:
    """Let copies that are staged alike, without a storing warp, wait in the buffer of the first of them.

    Their pieces take its slots in turn, and before each its warpgroup waits for the piece that was there.
    """
    found: dict[Copy, Copy] = {}
    for copy, staging in staged.items():
        alike = (
            other
            for other in found
            if staged[other] == staging
            and other.src.tile.shape == copy.src.tile.shape
            and other.dst.tile.dtype == copy.dst.tile.dtype
            and staging.pieces % staging.slots == 0
        )
        found[copy] = found[other] if (other := next(alike, None)) is not None else copy
    return found


def _inside(body: tuple[Node, ...], staged: Mapping[Copy, Staging]) -> list[Copy]:
    """The staged copies of a body and of what is inside it."""
    own = [node for node in body if isinstance(node, Copy) and node in staged]
    return own + [copy for node in body for inner in node.bodies for copy in _inside(inner, staged)]


def check_pieces(staged: Mapping[Copy, Staging], pieces: tuple[int, int], warpgroups: int) -> None:
    """Refuse pieces to store (rows, columns) that don't divide the staged tiles as TMA and their swizzle want.

    Raises
    ------
    TileError
        They don't, or no tile is staged.
    """
    rows, columns = pieces
    if not staged:
        raise TileError(
            f"kernel: epilogue_tile=({rows}, {columns}), but no tile leaves through shared memory; valid with copies "
            "of whole accumulators to 16-bit tensors"
        )
    for copy, staging in staged.items():
        most = copy.src.tile.shape[0] // warpgroups
        width = tma.panel(Tile(copy.src.tile.buffer, "shared", (most, staging.columns), copy.dst.tile.dtype))
        if columns != width or rows % tma.ATOM_ROWS or most % rows or rows > tma.BOX:
            raise TileError(
                f"kernel: epilogue_tile=({rows}, {columns}) of {copy}; valid are {width} columns, a swizzled row, and "
                f"rows in multiples of {tma.ATOM_ROWS} that divide a warpgroup's {most}, up to {tma.BOX}"
            )
