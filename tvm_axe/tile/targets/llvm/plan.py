"""What is decided before a tile program becomes CPU code: where each tile lives and how each product is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.layout import ComposeLayout
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.machines import Cpu, machine_of
from tvm_axe.machines.register_tiles import register_tile
from tvm_axe.tile import keys
from tvm_axe.tile.checks import check_atomics
from tvm_axe.tile.meeting import find_stuck
from tvm_axe.tile.nodes import Copy, Fill, Gemm, Loop, Node, Signal, Wait
from tvm_axe.tile.plans import Decisions, Plan
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.strides import has_rows, strides_of
from tvm_axe.tile.targets.llvm.conversions import NARROW, compute_dtype
from tvm_axe.tile.targets.llvm.elision import read_in_place, stored_at_once
from tvm_axe.tile.targets.llvm.storage import Storage, as_annotated, in_panels, in_rows

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"),
    *NARROW,
)
"""The element types that CPU code is made for."""

TILE_BYTES = 32 << 20
"""What the tiles of one block may take, in bytes: they are of use only while the caches hold them."""


@dataclass(frozen=True)
class Micro:
    """The register tile of a product: `rows` times `vectors` of `lanes` are accumulated in registers.

    `filled` says that the columns that fill up a row's last vector may be computed and written with the others; without
    it, columns beyond the last whole vector are computed one by one.
    """

    rows: int
    vectors: int
    lanes: int
    filled: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class CpuPlan(Plan):
    """A plan for one CPU.

    Attributes
    ----------
    machine : Cpu
        The CPU.
    in_place : mapping from Tile to Copy
        The copies left out, by the tile that they fill.
    at_once : mapping from Gemm to (Copy, Fill or None)
        The products that store their sums in a tensor themselves: the copy that they do, and the zeros left out.
    storage : mapping from Tile to Storage
        Where every other tile on chip lives, those of `packed` among them.
    packed : mapping from Gemm to Tile
        A tile more for each product whose b doesn't lie in panels: what it is packed into first.
    micro : mapping from Gemm to Micro
        The register tile of every product.
    serial : bool
        Whether blocks run one after the other, as they wait or signal.
    """

    machine: Cpu
    in_place: Mapping[Tile, Copy]
    at_once: Mapping[Gemm, tuple[Copy, Fill | None]]
    storage: Mapping[Tile, Storage]
    packed: Mapping[Gemm, Tile]
    micro: Mapping[Gemm, Micro]
    serial: bool

    @cached_property
    def left_out(self) -> frozenset[Node]:
        """The copies and fills that there is no code for, as products do what they are for."""
        ends = (node for pair in self.at_once.values() for node in pair if node is not None)
        return frozenset((*self.in_place.values(), *ends))


@dataclass
class _Draft:
    """What is decided so far: tiles get their storage first, then products their register tiles."""

    machine: Cpu
    decisions: Decisions
    storage: dict[Tile, Storage] = field(default_factory=dict)
    packed: dict[Gemm, Tile] = field(default_factory=dict)
    micro: dict[Gemm, Micro] = field(default_factory=dict)

    def decide(self, subject: object, choice: object, reason: str) -> None:
        self.decisions.add(subject, choice, reason)


def decide(program: TileProgram, target: Target) -> CpuPlan:
    """Decide everything about a program for an llvm target.

    Raises
    ------
    TileError
        A type that CPU code isn't made for; a wait that a later block of the same device answers; an annotated layout
        that isn't one of memory; tiles of a block that take more than `TILE_BYTES`.
    """
    machine = machine_of(target)
    assert isinstance(machine, Cpu), machine
    draft = _Draft(machine, Decisions(program))
    registers = f"{machine.vector_registers} vectors of {machine.vector_bits} bits"
    _check_dtypes(program)
    serial = any(isinstance(node, Wait | Signal) for node in program.nodes())
    if serial:
        _check_flags(program)
    how = "one after the other, in the order of the grid" if serial else "in a parallel loop"
    why = (
        "so it is known which blocks have signalled before one waits" if serial else "a thread takes a block at a time"
    )
    draft.decide("kernel", f"its blocks {how}", f"{why}; the CPU has {registers}")
    if program.options:
        draft.decide("kernel", f"{', '.join(program.options)} unused", "they say how a GPU runs blocks")
    for tile in program.params:
        if not has_rows(tile):
            apart = strides_of(tile)[-1]
            why = f"neighbours along its last dimension are {apart} elements apart; where they are 1, rows are vectors"
            draft.decide(tile, "slow, an element at a time", why)
    in_place = {} if serial else read_in_place(program)  # what peers write is theirs again once a copy was made
    for tile, copy in in_place.items():
        draft.decide(tile, f"no buffer, read in {copy.src.tile.name}", "only products read it, as rows of a")
    gemms = [node for node in program.nodes() if isinstance(node, Gemm)]
    found = {} if serial else stored_at_once(program)
    at_once = {node: ends for node, ends in found.items() if _by_vectors(draft, node)}
    for node, (copy, _) in at_once.items():
        draft.decide(node.c.tile, f"no buffer, stored in {copy.dst.tile.name}", "one step of a product makes all of it")
    absent = {*in_place, *(node.c.tile for node in at_once)}
    for tile in program.tiles:
        if tile not in absent:
            draft.storage[tile] = _storage(draft, tile, gemms)
    for node in gemms:
        if not draft.storage[node.b.tile].contiguous(_across(node)):
            tile = _panels_for(draft, node)
            draft.packed[node] = tile
            draft.decide(
                node, f"b packed into {draft.storage[tile].layout} first", "its columns don't lie side by side"
            )
        draft.micro[node] = _micro(draft, node)
        m = draft.micro[node]
        draft.decide(
            node,
            f"{m.rows} x {m.vectors * m.lanes} in {m.rows * m.vectors} registers",
            f"fewest cycles of those that fit {draft.machine.vector_registers} registers",
        )
    keys.decide(program, draft.decisions)
    for loop in program.nodes():
        if isinstance(loop, Loop) and loop.stages is not None:
            draft.decide(loop, "no stages", "a CPU's own prefetching runs ahead")
    _check_bytes(program, draft.storage)
    return CpuPlan(
        program=program,
        target=target,
        decisions=draft.decisions.made(),
        machine=machine,
        in_place=in_place,
        at_once=at_once,
        storage=draft.storage,
        packed=draft.packed,
        micro=draft.micro,
        serial=serial,
    )


def _storage(draft: _Draft, tile: Tile, gemms: list[Gemm]) -> Storage:
    as_a = [node for node in gemms if node.a.tile is tile]
    as_b = [node for node in gemms if node.b.tile is tile]
    as_c = [node for node in gemms if node.c.tile is tile]
    dtype = tile.dtype
    if tile.dtype in NARROW:
        dtype = "float32"
        draft.decide(tile, "held as float32", f"rounded to {tile.dtype}, and computed with as it is")
    elif (as_a or as_b) and tile.dtype in ("int8", "uint8", "int16", "uint16"):
        dtype = "int32"
        draft.decide(tile, "held as int32", f"every {tile.dtype} is one, and products are computed so")
    if tile.layout is not None:
        if _of_memory(tile):
            draft.decide(tile, str(tile.layout), "annotated")
            return as_annotated(tile, dtype)
        draft.decide(tile, "not as annotated", f"{tile.layout} is over threads, of which a CPU's block has one")
    lanes = draft.machine.lanes(dtype)
    across = {_across(node) for node in as_b}
    if len(across) == 1 and all(_spans(node.b, *across) for node in as_b):
        (dimension,) = across
        width = lanes * min(_register_tile(draft, node, lanes)[1] for node in as_b)
        rows = in_rows(tile, dtype, lanes)
        if dimension == len(tile.shape) - 1 and rows.shape[-1] <= width:
            draft.decide(tile, rows.layout, "its rows are as long as a panel of products")
            return rows
        storage = in_panels(tile, dtype, dimension, width)
        draft.decide(tile, storage.layout, f"panels of {width} columns, which products read in order")
        return storage
    rows = in_rows(tile, dtype, lanes if as_b or as_c else 1)
    draft.decide(tile, rows.layout, "row by row, as loops take it")
    return rows


def _by_vectors(draft: _Draft, node: Gemm) -> bool:
    return node.shape[1] % draft.machine.lanes(compute_dtype(node.c.tile.dtype)) == 0


def _panels_for(draft: _Draft, node: Gemm) -> Tile:
    """A tile for the region of b that a product reads, in panels; it joins the storage."""
    held, region = draft.storage[node.b.tile], node.b
    rank = len(region.extents)
    tile = Tile(
        tirx.decl_buffer(region.extents, held.dtype, f"{region.tile.name}_panels"), "shared", region.extents, held.dtype
    )
    lanes = draft.machine.lanes(held.dtype)
    width = lanes * _register_tile(draft, node, lanes)[1]
    draft.storage[tile] = in_panels(tile, held.dtype, rank - 2 if node.transpose_b else rank - 1, width)
    return tile


def _micro(draft: _Draft, node: Gemm) -> Micro:
    n, c = node.shape[1], draft.storage.get(node.c.tile)  # none if it is stored at once
    region = packed_b(draft.packed, node)
    b = draft.storage[region.tile]
    lanes = 1 if c is not None and c.annotated else draft.machine.lanes(compute_dtype(node.c.tile.dtype))
    rows, vectors = _register_tile(draft, node, lanes)
    if b.panel is not None:
        vectors = min(vectors, b.panel[1] // lanes)
    reach = ceil(n / lanes) * lanes
    filled = n % lanes == 0 or (
        c is not None
        and _spans(node.c, len(node.c.tile.shape) - 1)
        and _spans(region, _across(node))
        and b.filled[_across(node)] >= reach
        and c.filled[-1] >= reach
    )
    return Micro(rows, vectors, lanes, filled)


def packed_b(packed: Mapping[Gemm, Tile], node: Gemm) -> Region:
    """The region that a product reads as b: its own, or all of the panels that it is packed into first."""
    tile = packed.get(node)
    return node.b if tile is None else Region(tile, tuple(T.int32(0) for _ in tile.shape), tile.shape)


def _register_tile(draft: _Draft, node: Gemm, lanes: int) -> tuple[int, int]:
    return register_tile(*node.shape[:2], lanes, draft.machine.vector_registers)


def _across(node: Gemm) -> int:
    """The dimension of b's tile that the product's columns lie along."""
    return _last_two(node.b)[0 if node.transpose_b else 1]


def _last_two(region: Region) -> tuple[int, int]:
    rank = len(region.extents)
    return rank - 2, rank - 1


def _spans(region: Region, dimension: int) -> bool:
    """Whether a region is all of its tile in a dimension."""
    return region.extents[dimension] == region.tile.shape[dimension]


def _of_memory(tile: Tile) -> bool:
    layout = tile.layout.tile_layout if isinstance(tile.layout, ComposeLayout) else tile.layout
    assert layout is not None
    return {it.axis for it in (*layout.D, *layout.R)} | set(layout.O) <= {LINEAR_MEMORY}


def _check_dtypes(program: TileProgram) -> None:
    for tile in (*program.params, *program.tiles):
        if tile.dtype not in DTYPES:
            raise TileError(f"{tile}: CPU code is made for {', '.join(DTYPES)}, not {tile.dtype}")
    check_atomics(program)


def _check_flags(program: TileProgram) -> None:
    """Refuse waits that only a later block of the same device would answer: they run one after the other."""
    stuck = find_stuck(program, serial=True)
    if stuck is not None:
        answer = "nobody signals it" if stuck.later is None else f"what signals it, at {stuck.later}, comes later"
        raise TileError(
            f"{stuck.node}: with {stuck.where}, {stuck.flag} stays unset on a CPU, where a device's blocks run one "
            f"after the other, in the order of the grid: {answer}; valid is a grid in which it comes before, a CUDA "
            "target, or a kernel for what comes before and one for what comes behind it"
        )


def _check_bytes(program: TileProgram, held: Mapping[Tile, Storage]) -> None:
    taken = {tile.name: storage.bytes for tile, storage in held.items()}
    if sum(taken.values()) > TILE_BYTES:
        sizes = ", ".join(f"{name} {size}" for name, size in taken.items())
        raise TileError(
            f"{program.name}: the tiles of a block take {sum(taken.values())} bytes ({sizes}); "
            f"on a CPU they may take {TILE_BYTES}"
        )
