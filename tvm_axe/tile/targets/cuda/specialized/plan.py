"""What the specialized model decides: roles and registers, rings and their slots, staging, layouts, the schedule.

`obstacle` says whether a program can be specialized at all, `decide` decides everything about one that can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.layout import Access, ComposeLayout, Layout, bank_conflicts
from tvm_axe.layout.swizzle import as_composed
from tvm_axe.machines import Gpu
from tvm_axe.machines.registry import described
from tvm_axe.tile.program import Assign, Branch, Copy, Gemm, Let, Loop, Program, Signal, Tile, Wait
from tvm_axe.tile.targets.cuda.fragments.infer import Held, infer
from tvm_axe.tile.targets.cuda.fragments.scratch import scratch_bytes
from tvm_axe.tile.targets.cuda.instructions import tma, wgmma
from tvm_axe.tile.targets.cuda.plan import CudaPlan, decide_grid, gpu_of, variables_in
from tvm_axe.tile.targets.cuda.specialized import ordering, rings, staging
from tvm_axe.tile.targets.cuda.specialized import schedule as waiting
from tvm_axe.tile.targets.cuda.specialized.rings import Ring
from tvm_axe.tile.targets.cuda.specialized.staging import Staging

REGISTERS = {1: None, 2: (40, 232), 3: (32, 160)}
"""Of a thread of the producer and of the consumers, by the number of consumer warpgroups; one needs no reallocation."""

BARRIERS = 1024
"""Bytes in front of the tiles, for barriers; also what a swizzled tile is aligned to."""

_MOST_REGISTERS = 255
_OTHER_REGISTERS = 24  # that addresses, loops and barriers take at least
_INSTRUCTION_REGISTERS = 26  # that ptxas wants beside the accumulator of one instruction

_MOST_SLOTS = 8


@dataclass
class SpecializedPlan(CudaPlan):
    """A plan with a producer warp and consumer warpgroups.

    Attributes
    ----------
    warpgroups : that consume
    rings : with their slots
    staging : of the copies out that go through shared memory
    fragments : the layouts of fragments and locals, with what decided them
    scratch : bytes of shared memory for exchanges between threads
    schedule : a consumer's steps
    """

    warpgroups: int = 1
    rings: dict[Ring, int] = field(default_factory=dict)
    staging: dict[Copy, Staging] = field(default_factory=dict)
    fragments: dict[Tile, Held] = field(default_factory=dict)
    scratch: int = 0
    schedule: waiting.Schedule | None = None

    @cached_property
    def stores_apart(self) -> bool:
        """Whether a warp of its own stores what is staged."""
        return _stores_apart(self.program)

    @property
    def sends(self) -> tuple[int, int] | None:
        """Rows and columns of the pieces that the storing warp stores; None for whole tiles."""
        given: Any = self.program.options.get("sends")
        return None if given is None else (given[0], given[1])

    @property
    def threads(self) -> int:
        """That consume."""
        return self.warpgroups * wgmma.WARPGROUP

    @cached_property
    def own_tiles(self) -> tuple[Tile, ...]:
        """Shared tiles that consumers write."""
        loaded = {tile for ring in self.rings for tile in ring.tiles}
        return tuple(tile for tile in self.program.tiles if tile.scope == "shared" and tile not in loaded)

    @property
    def shared_bytes(self) -> int:
        """Of all shared memory."""
        return self.bytes_with(self.rings)

    def bytes_with(self, slots: Mapping[Ring, int]) -> int:
        """The same if the rings had `slots`."""
        tiles = sum(ring.bytes * count for ring, count in slots.items()) + sum(tile.bytes for tile in self.own_tiles)
        return BARRIERS + tiles + sum(piece.bytes for piece in self.staging.values()) + self.scratch


def obstacle(program: Program, target: Target) -> str | None:
    """Why a program isn't specialized, as a sentence; None if it can be."""
    if gpu_of(target).tensor_cores != "wgmma":
        return f"{described(target)} has no asynchronous products and copies of tiles"
    gemms = [node for node in program.nodes() if isinstance(node, Gemm)]
    if not gemms:
        return "there is no gemm"
    for gemm in gemms:
        why = _unfit(gemm)
        if why:
            return f"{gemm}: {why}"
    found = rings.find(program)
    if isinstance(found, str):
        return found
    if not found:
        return "nothing is loaded from global memory into shared memory"
    written = {tile for node in program.nodes() if not isinstance(node, Loop | Branch) for tile in node.writes}
    for ring in found:
        for copy in ring.copies + ring.others:
            why = tma.obstacle(copy.src, copy.dst.tile)
            why = why or ("it is written in the same kernel" if copy.src.tile in written else None)
            if why:
                return f"{copy}: {why}"
    return _scalars(program)


def _stores_apart(program: Program) -> bool:
    return "sends" in program.options or any(isinstance(node, Signal) for node in program.nodes())


def _unfit(gemm: Gemm) -> str | None:
    why = wgmma.obstacle(gemm)
    if why:
        return f"wgmma: {why}"
    if gemm.instruction not in (None, "wgmma"):
        return f"instruction {gemm.instruction} is annotated"
    if gemm.a.tile.dtype == "float32" and gemm.instruction is None:
        return "wgmma rounds float32 to tf32, which instruction='wgmma' allows"
    for tile in (gemm.a.tile, gemm.b.tile):
        if tile.scope == "shared" and (len(tile.shape) != 2 or not tma.swizzle(tile)):
            return f"wgmma: operands in shared memory are matrices with 8i rows of 32j bytes, not {tile}"
        if tile.scope == "shared" and tile.layout is not None and not _same(tile.layout, tma.axe_layout(tile)):
            return f"wgmma: {tile} is annotated with {tile.layout}; the instruction takes {tma.axe_layout(tile)}"
    return None


def _scalars(program: Program) -> str | None:
    """Why a role that waits for no consumer's results can't follow the control flow; None if all can."""
    steering: list[object] = []
    apart = _stores_apart(program)
    followed: set[Tile] = set()  # scalars that the producer computes too
    written: set[Tile] = set()  # by consumers alone
    for node in program.nodes():
        if isinstance(node, Loop):
            steering += [node.start, node.extent]
        elif isinstance(node, Branch):
            steering.append(node.condition)
        elif isinstance(node, Let | Assign):
            steering.append(node.value)
            followed |= set(node.writes)
        elif isinstance(node, Wait | Signal):
            steering += [node.value, *node.flags.start]
        else:
            if isinstance(node, Copy) and node.src.tile.scope == "global" and node.dst.tile.scope == "shared":
                steering += node.src.start
            elif isinstance(node, Copy) and node.dst.tile.scope == "global" and apart:
                steering += node.dst.start
            written |= set(node.writes)
    on_chip = {tile for tile in program.tiles if tile not in followed}
    read = variables_in(steering)
    blocking = [tile for tile in (*program.tiles, *program.params) if tile in written | on_chip and tile.buffer in read]
    steered = "loops, loads, stores or flags" if apart else "loops or loads"
    return f"{blocking[0]}, which only consumers know, steers {steered}" if blocking else None


def decide(program: Program, target: Target) -> SpecializedPlan:
    """Decide everything about a program that `obstacle` has nothing against.

    Raises
    ------
    TileError
        The threads asked for can't share the products' rows; the tiles don't fit shared memory; a fragment's uses
        want different layouts; what a wait or a signal wouldn't order (`ordering.check`); pieces to send that the
        tiles don't divide into.
    """
    plan = SpecializedPlan(program, target)
    plan.warpgroups = _warpgroups(program)
    registers = REGISTERS[plan.warpgroups]
    plan.decide(
        "roles",
        f"a producer warp{', a storing warp' * plan.stores_apart} and {plan.warpgroups} warpgroups that consume",
        "products are wgmma on tiles that TMA loads"
        + ("" if registers is None else f"; {registers[0]} and {registers[1]} registers a thread"),
    )
    decide_grid(plan, fills_processor=True)
    if "cluster" in program.options:
        plan.decide("cluster", "none", "blocks load for themselves; multicast was slower where it was tried")
    _decide_fragments(plan)
    _decide_shared(plan)
    ordering.check(program, plan.rings, plan.staging)
    for node, who, why in ordering.roles(program):
        plan.decide(node, who, why)
    plan.schedule = waiting.schedule(program, plan.rings, turns=plan.warpgroups > 1)
    for fill, gemm in plan.schedule.folded:
        plan.decide(fill, "left out", f"{gemm} sets its accumulator the first time")
    for gemm, loop in plan.schedule.deferred:
        how = "deferred by an iteration" + (", warpgroups issue in turns" if plan.warpgroups > 1 else "")
        plan.decide(gemm, how, f"what threads compute in loop {loop.var.name} runs beside products")
    return plan


def _warpgroups(program: Program) -> int:
    gemms = [node for node in program.nodes() if isinstance(node, Gemm)]
    fits = [n for n in REGISTERS if all(gemm.shape[0] % (n * wgmma.ROWS) == 0 for gemm in gemms)]
    threads: Any = program.options.get("threads")
    if threads is None:
        return max(fits)
    if threads not in [n * wgmma.WARPGROUP for n in fits]:
        rows = ", ".join(str(gemm.shape[0]) for gemm in gemms)
        valid = ", ".join(str(n * wgmma.WARPGROUP) for n in fits)
        raise TileError(
            f"kernel: threads={threads} can't share products of {rows} rows, 64 a warpgroup; valid: {valid}"
        )
    return int(threads) // wgmma.WARPGROUP


def _decide_fragments(plan: SpecializedPlan) -> None:
    fixed: dict[Tile, Held] = {}
    for node in plan.program.nodes():
        if isinstance(node, Gemm):
            for tile, role in ((node.c.tile, "accumulator"), (node.a.tile, "left operand")):
                if tile.scope == "fragment":
                    layout = wgmma.accumulator(*tma.matrix(tile), plan.warpgroups)
                    if tile.layout is not None and not _same(tile.layout, layout):
                        raise TileError(
                            f"{tile} is annotated with {tile.layout}; {role} of {node}, by wgmma, it lies as {layout}"
                        )
                    fixed.setdefault(tile, Held(layout, f"{role} of {node}, wgmma"))
    _check_registers(plan)
    plan.fragments = infer(plan.program, fixed, plan.threads)
    for tile, held in plan.fragments.items():
        plan.decide(tile, held.layout, held.origin)


def _same(a: Layout | ComposeLayout, b: Layout | ComposeLayout) -> bool:
    return a == b or (a.size() == b.size() and as_composed(a).equivalent(b))


def operand_registers(warpgroups: int) -> int:
    """The registers of a consumer's thread that a product's operands and accumulator may take."""
    registers = REGISTERS[warpgroups]
    return (_MOST_REGISTERS if registers is None else registers[1]) - _OTHER_REGISTERS


def widest_product(warpgroups: int) -> int:
    """The most columns that a product may have, of 64 rows of which an instruction has the sums in registers.

    The assembler knows how many threads there are, not what setmaxnreg will give each, and wants the operands of one
    instruction to fit an equal share of the registers.
    """
    share = Gpu.registers // ((warpgroups + 1) * wgmma.WARPGROUP) - _INSTRUCTION_REGISTERS
    return share * wgmma.WARPGROUP // wgmma.ROWS


def _check_registers(plan: SpecializedPlan) -> None:
    """That the operands and the accumulator of each product fit a thread's registers."""
    most = operand_registers(plan.warpgroups)
    for gemm in plan.program.nodes():
        if isinstance(gemm, Gemm):
            held = [tile for tile in (gemm.c.tile, gemm.a.tile) if tile.scope == "fragment"]
            needed = sum(tile.bytes for tile in held) // 4 // plan.threads
            if needed > most:
                names = " and ".join(str(tile) for tile in held)
                raise TileError(
                    f"{gemm}: {names} take {needed} registers of each of {plan.threads} threads, which have {most} "
                    f"for it; take smaller tiles, or more rows for up to {max(REGISTERS)} warpgroups"
                )
            if min(gemm.shape[1], wgmma.COLUMNS) > widest_product(plan.warpgroups):
                raise TileError(
                    f"{gemm}: {gemm.shape[1]} columns take more registers an instruction than there are for each of "
                    f"{plan.threads} threads and a producer; take up to {widest_product(plan.warpgroups)}, or rows for "
                    "fewer warpgroups"
                )


# ---- Shared memory -----------------------------------------------------------------------------------------------


def _decide_shared(plan: SpecializedPlan) -> None:
    """Slots of the rings and staging: small pieces and many slots, or whole tiles if some slots are left then."""
    found = rings.find(plan.program)
    assert not isinstance(found, str), found
    plan.rings = dict.fromkeys(found, 1)
    plan.scratch = -(-scratch_bytes(plan.program, plan.fragments, plan.threads) // BARRIERS) * BARRIERS
    pieces, whole = (staging.find(plan.program, plan.warpgroups, plan.fragments, whole) for whole in (False, True))
    plan.staging = whole if plan.stores_apart else pieces
    if plan.sends is not None:
        staging.check_pieces(plan.staging, plan.sends, plan.warpgroups)
    slots = _slots(plan)
    if plan.persistent and whole != pieces and not plan.stores_apart:
        plan.staging = whole
        deep = _try_slots(plan)
        if deep and all(deep[ring] >= min(count, 3) for ring, count in slots.items()):
            slots = deep
        else:
            plan.staging = pieces
    plan.rings = slots
    for ring, count in slots.items():
        _explain_ring(plan, ring, count)
    for copy, stage in plan.staging.items():
        plan.decide(
            copy,
            f"through {stage.slots} x {stage.columns} columns of shared memory a warpgroup, stored by "
            + ("the storing warp" + f" in pieces of {plan.sends}" * bool(plan.sends) if plan.stores_apart else "TMA"),
            "a whole tile, so that no store delays the next" if stage.pieces == 1 else "in pieces, for deeper rings",
        )
    plan.decide("shared memory", f"{plan.shared_bytes} bytes", f"of {gpu_of(plan.target).shared_bytes}")


def _slots(plan: SpecializedPlan) -> dict[Ring, int]:
    found = _try_slots(plan)
    if found is None:
        annotated = {ring: (ring.loop.stages if ring.loop else None) or 1 for ring in plan.rings}
        sizes = [f"{ring.name}: {ring.bytes} bytes x {slots}" for ring, slots in annotated.items()]
        sizes += [f"{tile.name}: {tile.bytes} bytes" for tile in plan.own_tiles]
        sizes += [f"{copy.dst.tile.name} on its way out: {stage.bytes} bytes" for copy, stage in plan.staging.items()]
        most = gpu_of(plan.target).shared_bytes
        raise TileError(
            f"shared memory: a block has {most} bytes, {BARRIERS} of them for barriers; the tiles "
            f"take {'; '.join(sizes)}. Take smaller tiles or fewer stages"
        )
    return found


def _fewest(ring: Ring) -> int:
    if ring.loop is None or ring.loop.stages is None:
        return 1
    return ring.loop.stages or 2


def _try_slots(plan: SpecializedPlan) -> dict[Ring, int] | None:
    """As many slots for pipelined loops as fit, or as annotated; None if the fewest don't fit."""
    most = gpu_of(plan.target).shared_bytes

    def fits(slots: dict[Ring, int]) -> bool:
        return plan.bytes_with(slots) <= most

    slots = {ring: _fewest(ring) for ring in plan.rings}
    if not fits(slots):
        slots = {ring: count if ring.loop and ring.loop.stages else 1 for ring, count in slots.items()}
        if not fits(slots):
            return None
    free = [ring for ring in slots if ring.loop is not None and ring.loop.stages == 0]
    while free and max(slots[ring] for ring in free) < _MOST_SLOTS:
        deeper = {ring: count + (ring in free) for ring, count in slots.items()}
        if not fits(deeper):
            break
        slots = deeper
    if plan.persistent:  # the next tile's first loads run ahead too
        for ring in slots:
            if ring.loop is None and fits({**slots, ring: 2}):
                slots[ring] = 2
    return slots


def _explain_ring(plan: SpecializedPlan, ring: Ring, slots: int) -> None:
    how = "as annotated" if ring.loop and ring.loop.stages else "as many as fit" if ring.loop else "loaded once a tile"
    plan.decide(f"ring of {ring.name}", f"{slots} slots of {ring.bytes} bytes", how)
    for tile in ring.tiles:
        layout, width = tma.axe_layout(tile), tma.panel(tile)
        plan.decide(tile, layout, f"panels of {width} columns, one TMA copy each; {_conflicts(tile)}")


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
