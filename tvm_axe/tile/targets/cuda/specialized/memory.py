"""Shared memory of the specialized model: slots of circular buffers, staging, and tiles of the consumers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm_axe.errors import TileError
from tvm_axe.layout import Access, ComposeLayout, Layout, bank_conflicts
from tvm_axe.tile.nodes import Copy
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.fragments.infer import LayoutChoice
from tvm_axe.tile.targets.cuda.fragments.scratch import scratch_bytes
from tvm_axe.tile.targets.cuda.instructions import tma, wgmma
from tvm_axe.tile.targets.cuda.residency import Residency
from tvm_axe.tile.targets.cuda.specialized import buffers, staging
from tvm_axe.tile.targets.cuda.specialized.buffers import CircularBuffer
from tvm_axe.tile.targets.cuda.specialized.staging import Staging

ALIGNMENT = 1024
"""Bytes that everything in shared memory is aligned to, as a swizzled tile has to be."""

_BARRIER = 8  # bytes
_MOST_SLOTS = 8


@dataclass(frozen=True)
class SpecializedMemory:
    """What is in a block's shared memory.

    Attributes
    ----------
    buffers : mapping from CircularBuffer to int
        The circular buffers, with how many slots each has.
    own_tiles : tuple of Tile
        The shared tiles that consumers write.
    staging : mapping from Copy to Staging
        How output tiles leave, of the copies out that go through shared memory.
    places : mapping from Copy to Copy
        The copy in whose staging buffer each of them waits, itself or another (`staging.places`).
    sent : frozenset of Copy
        The copies of `own_tiles` to global memory that TMA does.
    scratch : int
        Bytes for exchanges between threads.
    filled : mapping from Tile to int
        Rows that loads fill, of tiles of circular buffers that have more: the rest is made zero once. TMA would do that
        with each load, and takes longer for a row outside of a tensor than for one that it loads.
    """

    buffers: Mapping[CircularBuffer, int]
    own_tiles: tuple[Tile, ...]
    staging: Mapping[Copy, Staging]
    places: Mapping[Copy, Copy]
    sent: frozenset[Copy]
    scratch: int
    filled: Mapping[Tile, int]

    def rows(self, tile: Tile) -> int:
        """Rows of a tile of a circular buffer that loads fill."""
        return self.filled.get(tile, tma.matrix(tile)[0])

    def loaded(self, buffer: CircularBuffer) -> int:
        """Bytes that loads bring into a slot."""
        return sum(tile.bytes // tma.matrix(tile)[0] * self.rows(tile) for tile in buffer.tiles)

    @property
    def slots(self) -> dict[Tile, int]:
        """How many there are of each tile."""
        slots = {tile: count for buffer, count in self.buffers.items() for tile in buffer.tiles}
        return slots | dict.fromkeys(self.own_tiles, 1)

    @property
    def waiting(self) -> dict[Copy, Staging]:
        """The staging buffers, each by the first copy that waits in it."""
        return {copy: staging for copy, staging in self.staging.items() if self.places[copy] is copy}

    @property
    def barriers(self) -> int:
        """Bytes in front of the tiles: a full and an empty barrier a slot, and as many for each staging buffer."""
        return _aligned(2 * _BARRIER * (sum(self.buffers.values()) + len({*self.places.values()})))

    def room(self, tile: Tile) -> int:
        """Bytes that all the slots of a tile take, with what pads each slot and what is up to the next tile."""
        return _aligned(tma.slot_bytes(tile) * self.slots[tile])

    @property
    def bytes(self) -> int:
        """How much there is in all, with the barriers."""
        tiles = sum(self.room(tile) for tile in self.slots)
        staged = sum(_aligned(staging.bytes) for staging in self.waiting.values())
        return self.barriers + tiles + staged + self.scratch


def decide_memory(
    program: TileProgram,
    warpgroups: int,
    fragments: Mapping[Tile, LayoutChoice],
    persistent: bool,
    residency: Residency,
    decisions: Decisions,
) -> SpecializedMemory:
    """Decide slots and staging: small pieces and many slots, or whole tiles if some slots are left then.

    Parameters
    ----------
    program : TileProgram
        The program, which can be specialized.
    warpgroups : int
        The consumer warpgroups.
    fragments : mapping from Tile to LayoutChoice
        The layouts of fragments.
    persistent : bool
        Whether a block takes tile after tile, so that loads of the next run ahead.
    residency : Residency
        How much shared memory a block may have.
    decisions : Decisions
        Where the decisions are written.

    Raises
    ------
    TileError
        The tiles don't fit, or the pieces to store don't divide them.
    """
    most = residency.shared_bytes
    found = buffers.find(program)
    assert not isinstance(found, str), found
    loaded = {tile for buffer in found for tile in buffer.tiles}
    own = tuple(tile for tile in program.tiles if tile.scope == "shared" and tile not in loaded)
    scratch = _aligned(scratch_bytes(program, fragments, warpgroups * wgmma.WARPGROUP))
    pieces, whole = (staging.find(program, warpgroups, fragments, whole) for whole in (False, True))
    apart, piece = staging.has_storing_warp(program), staging.epilogue_tile(program)
    stages = whole if apart else pieces
    places, sent = staging.places(program, stages), staging.sent(program, own)
    once = SpecializedMemory(dict.fromkeys(found, 1), own, stages, places, sent, scratch, _filled(program, found))
    if piece is not None:
        staging.check_pieces(once.staging, piece, warpgroups)
    tried = [once]
    if not apart:
        # A store that waits for another, or threads that add by themselves, are less than loads that run ahead of none.
        tried += [replace(once, places=staging.shared_places(stages)), _without_adding(once)]
    fitting = [memory for each in tried if (memory := _with_slots(each, persistent, most)) is not None]
    if not fitting:
        raise TileError(_too_much(tried[-1], residency))
    memory = next((memory for memory in fitting if _runs_ahead(memory)), fitting[0])
    if persistent and whole != pieces and not apart:
        entire = {copy: whole[copy] for copy in memory.staging}
        deep = _with_slots(replace(memory, staging=entire), persistent, most)
        if deep and all(deep.buffers[buffer] >= min(count, 3) for buffer, count in memory.buffers.items()):
            memory = deep
    for buffer, count in memory.buffers.items():
        _explain_buffer(buffer, count, memory.filled, decisions)
    for copy, stage in memory.staging.items():
        decisions.add(
            copy,
            f"through {stage.slots} x {stage.columns} columns of shared memory a warpgroup, "
            + f"those of {memory.places[copy].dst.tile.name}, " * (memory.places[copy] is not copy)
            + ("added in memory by " if copy.atomic else "stored by ")
            + ("the storing warp" + f" in pieces of {piece}" * bool(piece) if apart else "TMA"),
            "a whole tile, so that no store delays the next"
            if stage.pieces == 1
            else "in pieces, for deeper circular buffers",
        )
    for node in program.nodes():
        if isinstance(node, Copy) and node in memory.sent:
            decisions.add(node, "added in memory by TMA" if node.atomic else "by TMA", "a whole tile of shared memory")
    decisions.add("shared memory", f"{memory.bytes} bytes", f"of {most}")
    return memory


def _filled(program: TileProgram, found: tuple[CircularBuffer, ...]) -> dict[Tile, int]:
    """The rows that loads fill, of tiles that have more, and the same in both arms of a branch."""
    analyzer = program.analyzer()
    rows: dict[Tile, int] = {}
    for copy in (copy for buffer in found for copy in buffer.copies + buffer.others):
        tile = copy.dst.tile
        rows[tile] = max(rows.get(tile, 0), tma.filled(copy.src, tile, analyzer))
    return {tile: count for tile, count in rows.items() if count < tma.matrix(tile)[0]}


def _without_adding(memory: SpecializedMemory) -> SpecializedMemory:
    """The same, but for tiles that are added in memory, which threads do by themselves."""
    staged = {copy: stage for copy, stage in memory.staging.items() if copy.atomic is None}
    return replace(memory, staging=staged, places=staging.shared_places(staged))


def _runs_ahead(memory: SpecializedMemory) -> bool:
    """Whether each circular buffer has the slots that its loop wants at least."""
    return all(slots >= _fewest(buffer) for buffer, slots in memory.buffers.items())


def _too_much(memory: SpecializedMemory, residency: Residency) -> str:
    annotated = {buffer: (buffer.loop.stages if buffer.loop else None) or 1 for buffer in memory.buffers}
    sizes = [f"{buffer.name}: {_slot(buffer)} bytes x {slots}" for buffer, slots in annotated.items()]
    sizes += [f"{tile.name}: {tile.bytes} bytes" for tile in memory.own_tiles]
    sizes += [f"{copy.dst.tile.name} on its way out: {stage.bytes} bytes" for copy, stage in memory.waiting.items()]
    return (
        f"shared memory: a block has {residency.share}, {memory.barriers} of them for barriers; the tiles take "
        f"{'; '.join(sizes)}. Take smaller tiles or fewer stages"
    )


def _slot(buffer: CircularBuffer) -> int:
    """The size of a slot, padded."""
    return sum(tma.slot_bytes(tile) for tile in buffer.tiles)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _fewest(buffer: CircularBuffer) -> int:
    if buffer.loop is None or buffer.loop.stages is None:
        return 1
    return buffer.loop.stages or 2


def _with_slots(memory: SpecializedMemory, persistent: bool, most: int) -> SpecializedMemory | None:
    """The same memory with as many slots for pipelined loops as fit, or as annotated; None if the fewest don't fit."""

    def fits(slots: Mapping[CircularBuffer, int]) -> bool:
        return replace(memory, buffers=slots).bytes <= most

    slots = {buffer: _fewest(buffer) for buffer in memory.buffers}
    if not fits(slots):
        slots = {buffer: count if buffer.loop and buffer.loop.stages else 1 for buffer, count in slots.items()}
        if not fits(slots):
            return None
    free = [buffer for buffer in slots if buffer.loop is not None and buffer.loop.stages == 0]
    while free and max(slots[buffer] for buffer in free) < _MOST_SLOTS:
        deeper = {buffer: count + (buffer in free) for buffer, count in slots.items()}
        if not fits(deeper):
            break
        slots = deeper
    if persistent:  # the next tile's first loads run ahead too
        for buffer in slots:
            if buffer.loop is None and fits({**slots, buffer: 2}):
                slots[buffer] = 2
    return replace(memory, buffers=slots)


def _explain_buffer(buffer: CircularBuffer, slots: int, filled: Mapping[Tile, int], decisions: Decisions) -> None:
    annotated = buffer.loop is not None and buffer.loop.stages
    how = "as annotated" if annotated else "as many as fit" if buffer.loop else "loaded once a tile"
    decisions.add(f"circular buffer of {buffer.name}", f"{slots} slots of {_slot(buffer)} bytes", how)
    for tile in buffer.tiles:
        layout, width = tma.axe_layout(tile), tma.panel(tile)
        how = f"panels of {width} columns, one TMA copy each; {_conflicts(tile)}"
        if tile in filled:
            how += f"; {filled[tile]} rows, and zeros from the beginning"
        decisions.add(tile, layout, how)


def _conflicts(tile: Tile) -> str:
    """What the layout algebra says of eight rows of a panel, read 16 bytes a row as the tensor cores do."""
    mode = tma.swizzle(tile)
    width = tma.panel(tile)
    plain = Layout.parse(f"S[(8, {width}) : ({width}, 1)]")
    assert isinstance(plain, Layout)
    fine = (16 // tma.item_bytes(tile.dtype)).bit_length() - 1
    layout = ComposeLayout(fine, mode, 3, plain) if mode else plain
    vector = min(16 // tma.item_bytes(tile.dtype), width)
    found = bank_conflicts(layout, (8, width), Access(tile.dtype, "column", math.gcd(vector, width)))
    return f"{found.conflicts} bank conflicts down a column"
