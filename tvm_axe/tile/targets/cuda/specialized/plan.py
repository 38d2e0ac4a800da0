"""What the specialized model decides: roles and registers, layouts, shared memory and the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu
from tvm_axe.tile import keys
from tvm_axe.tile.nodes import Copy, Gemm
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.fragments import exchanges, pressure, scans
from tvm_axe.tile.targets.cuda.fragments.infer import LayoutChoice, infer
from tvm_axe.tile.targets.cuda.grid import decide_grid
from tvm_axe.tile.targets.cuda.instructions import tma, wgmma
from tvm_axe.tile.targets.cuda.plan import CudaPlan, gpu_of
from tvm_axe.tile.targets.cuda.residency import MOST_REGISTERS, STEP, Residency, blocks_per_processor, decide_residency
from tvm_axe.tile.targets.cuda.specialized import ordering, staging
from tvm_axe.tile.targets.cuda.specialized.events import PRODUCER, STORER
from tvm_axe.tile.targets.cuda.specialized.memory import SpecializedMemory, decide_memory
from tvm_axe.tile.targets.cuda.specialized.pressure import uses_of_steps
from tvm_axe.tile.targets.cuda.specialized.progress import find_stall
from tvm_axe.tile.targets.cuda.specialized.schedule import Schedule, schedule
from tvm_axe.tile.targets.cuda.specialized.steps import Issue
from tvm_axe.tile.targets.cuda.specialized.steps import walk as walk_steps
from tvm_axe.tile.targets.cuda.swizzles import same_layout

REGISTERS = {1: None, 2: (40, 232), 3: (32, 160)}
"""Registers of a thread of the producer and of the consumers, by the number of consumer warpgroups.

With one warpgroup a thread has enough, so none are reallocated (PTX ISA, "Miscellaneous Instructions: setmaxnreg").
Where several blocks share a multiprocessor, `role_registers` says.
"""

_ACROSS = 2
"""How many warpgroups share the columns of 64 rows, if they do."""

_SCHEDULES = (
    (True, True, True, ""),
    (False, True, True, "warpgroups don't take turns"),
    (False, False, True, "no product is deferred"),
    (False, False, False, "products end with their iteration, and none is deferred"),
)
"""Whether warpgroups take turns and loops defer a product and carry some on, the fastest first; how it differs."""

_OTHER_REGISTERS = 24  # that addresses, loops and barriers take at least
_INSTRUCTION_REGISTERS = 26  # that ptxas wants beside the accumulator of one instruction
_LEFT_REGISTERS = 4  # of its left operand, if that isn't in shared memory


@dataclass(frozen=True, eq=False, kw_only=True)
class SpecializedPlan(CudaPlan):
    """A plan with a producer warp and consumer warpgroups.

    Attributes
    ----------
    warpgroups : int
        How many warpgroups consume.
    across : int
        How many of them share the columns of the same rows.
    fragments : mapping from Tile to LayoutChoice
        The layouts of fragments and locals, with what decided them.
    memory : SpecializedMemory
        The circular buffers with their slots, and what else is in shared memory.
    schedule : Schedule
        What a consumer does, step by step.
    residency : Residency
        How many blocks a multiprocessor is to run at once.
    """

    warpgroups: int
    across: int
    fragments: Mapping[Tile, LayoutChoice]
    memory: SpecializedMemory
    schedule: Schedule
    residency: Residency

    @property
    def roles(self) -> tuple[str, ...]:
        storer = (STORER,) if self.has_storing_warp else ()
        return (*(f"consumer {group}" for group in range(self.warpgroups)), PRODUCER, *storer)

    @property
    def block_threads(self) -> int:
        return _block_threads(self.warpgroups)

    @property
    def shared_bytes(self) -> int:
        return self.memory.bytes

    @property
    def has_storing_warp(self) -> bool:
        """Whether a warp of its own stores what is staged."""
        return staging.has_storing_warp(self.program)

    @property
    def epilogue_tile(self) -> tuple[int, int] | None:
        """Rows and columns of the pieces that the storing warp stores; None for whole tiles."""
        return staging.epilogue_tile(self.program)

    @property
    def down(self) -> int:
        """How many parts the rows of products are shared in."""
        return self.warpgroups // self.across

    @property
    def threads(self) -> int:
        """Threads of the consumer warpgroups."""
        return self.warpgroups * wgmma.WARPGROUP

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers of a thread of the producer and of the consumers; None if they are not reallocated."""
        return role_registers(self.warpgroups, self.residency.blocks)


def _block_threads(warpgroups: int) -> int:
    """The threads of a block in which so many warpgroups consume: one more has the producer."""
    return (warpgroups + 1) * wgmma.WARPGROUP


def decide(program: TileProgram, target: Target) -> SpecializedPlan:
    """Decide everything about a program that `obstacles.obstacle` has nothing against.

    Raises
    ------
    TileError
        The threads asked for can't share the products' rows; the tiles don't fit shared memory; a fragment's uses
        want different layouts; what a wait or a signal wouldn't order (`ordering.check`); pieces to store that the
        tiles don't divide into; roles that may wait for each other for ever (`progress.find_stall`); fragments that
        take more registers at once than a thread has.
    """
    return pressure.first_with_room(_warpgroups(program), lambda way: _decide(program, target, *way))


def _decide(program: TileProgram, target: Target, warpgroups: int, across: int) -> SpecializedPlan:
    """The plan with so many warpgroups that consume, some of which share columns."""
    decisions, gpu = Decisions(program), gpu_of(target)
    residency = decide_residency(program, gpu, _block_threads(warpgroups), decisions)
    registers = role_registers(warpgroups, residency.blocks)
    decisions.add(
        "roles",
        f"a producer warp{', a storing warp' * staging.has_storing_warp(program)} and {warpgroups} warpgroups that "
        "consume" + ", which share columns" * (across > 1),
        "products are wgmma on tiles that TMA loads"
        + (f"; {_why_shared(program)}" if across > 1 else "")
        + ("" if registers is None else f"; {registers[0]} and {registers[1]} registers a thread"),
    )
    grid = decide_grid(program, gpu, decisions, fills_processor=residency.blocks == 1, resident=residency.blocks)
    if "cluster" in program.options:
        decisions.add("cluster", "none", "blocks load for themselves; multicast was slower where it was tried")
    fragments = _fragments(program, warpgroups, across, decisions)
    memory = decide_memory(program, warpgroups, fragments, grid.persistent, residency, decisions)
    staging.check_boxes(program, memory.staging)
    ordering.check(program, memory.buffers, memory.staging)
    for copy in (node for node in program.nodes() if isinstance(node, Copy) and node.src.in_front):
        decisions.add(copy, "by TMA", "a parallel that loads a box, with zeros outside of the tensor")
    for node, who, why in ordering.roles(program):
        decisions.add(node, who, why)
    keys.decide(program, decisions)
    scans.decide(program, decisions)
    exchanges.decide(program, fragments, warpgroups * wgmma.WARPGROUP, decisions)
    made = _schedule(program, memory, warpgroups, across, grid.persistent, fragments, decisions)
    for fill, gemm in made.folded:
        decisions.add(fill, "left out", f"{gemm} sets its accumulator the first time")
    for gemm, loop in made.deferred:
        how = "deferred by an iteration" + (", warpgroups issue in turns" if made.takes_turns else "")
        decisions.add(gemm, how, f"what threads compute in loop {loop.var.name} runs beside products")
    return SpecializedPlan(
        program=program,
        samples=None,
        target=target,
        decisions=decisions.made(),
        grid=grid,
        warpgroups=warpgroups,
        across=across,
        fragments=fragments,
        memory=memory,
        schedule=made,
        residency=residency,
    )


def _schedule(
    program: TileProgram,
    memory: SpecializedMemory,
    warpgroups: int,
    across: int,
    persistent: bool,
    fragments: Mapping[Tile, LayoutChoice],
    decisions: Decisions,
) -> Schedule:
    """The fastest schedule that is proved to get on, with fragments that fit the registers.

    Warpgroups take turns only if each has rows of its own, and so gets on by itself.
    """
    failures: list[TileError] = []
    blocks = blocks_per_processor(program)
    stalled, given = False, memory.staging if staging.has_storing_warp(program) else ()
    for takes_turns, defers, carries, less in _SCHEDULES:
        if stalled and not carries:  # which takes registers, and no slots
            continue
        ping_pong = takes_turns and warpgroups > across
        made = schedule(program, memory.buffers, ping_pong, defers, carries, memory.sent, given)
        stall = find_stall(program, memory, made.steps, warpgroups, persistent)
        if stall is not None:
            stalled = True
            names = ", ".join(stall.names) or "the tiles of a loop"
            failures.append(
                TileError(
                    f"circular buffers of {names}: the kernel would wait for ever: {stall}; valid is to load tiles in "
                    "the order in which they are read, more stages, or roles='uniform'"
                )
            )
            continue
        most = _registers(warpgroups, blocks)
        try:
            peak = _check_pressure(made, fragments, warpgroups, blocks)
        except pressure.RegisterError as error:
            failures.append(error)
            continue
        if failures:
            decisions.add("schedule", less, f"with it, {failures[0]}")
        if peak.registers > most - _INSTRUCTION_REGISTERS:
            settled = schedule(program, memory.buffers, ping_pong, defers, False, memory.sent, given)
            fewer = _check_pressure(settled, fragments, warpgroups, blocks)
            safe = find_stall(program, memory, settled.steps, warpgroups, persistent) is None
            if safe and fewer.registers < peak.registers:
                why = f"operands of products in flight would take {peak.registers - fewer.registers} registers more"
                decisions.add("schedule", "products end with their iteration", why)
                made, peak = settled, fewer
        decisions.add("registers", f"{peak.registers} for fragments", f"of {most} of a thread, where most are needed")
        return made
    raise failures[-1]


def _check_pressure(
    made: Schedule, fragments: Mapping[Tile, LayoutChoice], warpgroups: int, blocks: int
) -> pressure.Peak:
    """Refuse accumulators, and fragments in all, that don't fit a consumer's registers; give where most are needed.

    What threads compute makes do with less than the assembler would like, next to accumulators of instructions: of
    attention's fragments of 230 registers none spill where a thread has 232, of accumulators of 208 all do.
    """
    registers, uses = pressure.registers_of_all(fragments), uses_of_steps(made.steps)
    sums = {step.gemm.c.tile for step in walk_steps(made.steps) if isinstance(step, Issue)}
    most, threads = _registers(warpgroups, blocks), warpgroups * wgmma.WARPGROUP
    remedy = f"rows for more warpgroups, of 64 each and up to {max(REGISTERS)}"
    remedy += ", and fewer blocks_per_sm" * (blocks > 1)
    accumulators = pressure.find_peak(uses, {tile: count for tile, count in registers.items() if tile in sums})
    pressure.check(accumulators, most - _INSTRUCTION_REGISTERS, threads, remedy)
    peak = pressure.find_peak(uses, registers)
    pressure.check(peak, most, threads, remedy)
    return peak


def _warpgroups(program: TileProgram) -> list[tuple[int, int]]:
    """How many warpgroups may consume, and how many of them share columns, the fastest first.

    They share columns where one alone has no room for what belongs to its rows.
    """
    gemms = [node for node in program.nodes() if isinstance(node, Gemm)]
    fits = [(n, 1) for n in REGISTERS if all(gemm.shape[0] % (n * wgmma.ROWS) == 0 for gemm in gemms)]
    can = len(fits) == 1 and all(wgmma.shares_columns(gemm, _ACROSS) for gemm in gemms)
    shared = [(_ACROSS, _ACROSS)] if can else []
    threads: Any = program.options.get("threads")
    if threads is None:
        return [max(fits), *shared]
    found = [each for each in fits + shared if each[0] * wgmma.WARPGROUP == threads]
    if not found:
        rows = ", ".join(str(gemm.shape[0]) for gemm in gemms)
        valid = ", ".join(str(n * wgmma.WARPGROUP) for n, _ in fits + shared)
        raise TileError(
            f"kernel: threads={threads} can't share products of {rows} rows, 64 a warpgroup; valid: {valid}"
        )
    return found


def _why_shared(program: TileProgram) -> str:
    asked = program.options.get("threads")
    return f"threads={asked}" if asked is not None else "the registers of one don't hold what belongs to 64 rows"


def _operand_needs(gemm: Gemm, warpgroups: int) -> int:
    """The registers of a thread that a product's accumulator, and its left operand if it is a fragment, take."""
    held = [tile for tile in (gemm.c.tile, gemm.a.tile) if tile.scope == "fragment"]
    return sum(tile.bytes for tile in held) // 4 // (warpgroups * wgmma.WARPGROUP)


def _fragments(program: TileProgram, warpgroups: int, across: int, decisions: Decisions) -> dict[Tile, LayoutChoice]:
    fixed: dict[Tile, LayoutChoice] = {}
    for node in program.nodes():
        if isinstance(node, Gemm):
            for tile, role in ((node.c.tile, "accumulator"), (node.a.tile, "left operand")):
                if tile.scope == "fragment":
                    pack = wgmma.OPERANDS[tile.dtype].pack if tile is node.a.tile else 2
                    layout = wgmma.accumulator(*tma.matrix(tile), warpgroups, across, pack)
                    if tile.layout is not None and not same_layout(tile.layout, layout):
                        raise TileError(
                            f"{tile} is annotated with {tile.layout}; {role} of {node}, by wgmma, it lies as {layout}"
                        )
                    fixed.setdefault(tile, LayoutChoice(layout, tile.shape, f"{role} of {node}, wgmma"))
    _check_registers(program, warpgroups, across)
    fragments = infer(program, fixed, warpgroups * wgmma.WARPGROUP)
    for tile, held in fragments.items():
        decisions.add(tile, held.layout, held.origin)
    return fragments


def role_registers(warpgroups: int, blocks: int) -> tuple[int, int] | None:
    """Registers of a thread of the producer and of the consumers, with so many blocks on a multiprocessor.

    None if they aren't reallocated. The producer has what it has alone, or its share if that is less; the consumers
    have the rest.
    """
    if blocks == 1:
        return REGISTERS[warpgroups]
    each = Gpu.registers // (blocks * _block_threads(warpgroups)) // STEP * STEP
    alone = REGISTERS[warpgroups] or REGISTERS[min(REGISTERS) + 1]
    assert alone is not None
    producer = min(each, alone[0])
    return producer, min(alone[1], ((warpgroups + 1) * each - producer) // warpgroups // STEP * STEP)


def operand_registers(warpgroups: int, blocks: int = 1) -> int:
    """The registers of a consumer's thread that a product's operands and accumulator may take."""
    return _registers(warpgroups, blocks) - _OTHER_REGISTERS


def _registers(warpgroups: int, blocks: int) -> int:
    """The registers of a consumer's thread."""
    registers = role_registers(warpgroups, blocks)
    return MOST_REGISTERS if registers is None else registers[1]


def widest_product(warpgroups: int, blocks: int = 1, held: bool = False) -> int:
    """The most columns that a product may have, of 64 rows of which an instruction has the sums in registers.

    The assembler knows how many threads there are, not what setmaxnreg will give each, and wants the operands of one
    instruction to fit an equal share of the registers: its left one, too, where it is `held` in registers.
    """
    others = _INSTRUCTION_REGISTERS + _LEFT_REGISTERS * held
    share = Gpu.registers // (blocks * _block_threads(warpgroups)) - others
    return share * wgmma.WARPGROUP // wgmma.ROWS


def _check_registers(program: TileProgram, warpgroups: int, across: int) -> None:
    """Refuse products whose operands and accumulator don't fit a thread's registers."""
    blocks = blocks_per_processor(program)
    most = operand_registers(warpgroups, blocks)
    threads, fewer = warpgroups * wgmma.WARPGROUP, ", or fewer blocks_per_sm" * (blocks > 1)
    for gemm in program.nodes():
        if isinstance(gemm, Gemm):
            needed = _operand_needs(gemm, warpgroups)
            if needed > most:
                names = " and ".join(str(tile) for tile in (gemm.c.tile, gemm.a.tile) if tile.scope == "fragment")
                raise pressure.RegisterError(
                    f"{gemm}: {names} take {needed} registers of each of {threads} threads, which have {most} for it; "
                    f"take smaller tiles, or more rows for up to {max(REGISTERS)} warpgroups{fewer}"
                )
            widest = widest_product(warpgroups, blocks, gemm.a.tile.scope == "fragment")
            if min(gemm.shape[1] // across, wgmma.COLUMNS) > widest:
                raise pressure.RegisterError(
                    f"{gemm}: {gemm.shape[1]} columns take more registers an instruction than there are for each of "
                    f"{threads} threads and a producer; take up to {across * widest}, or rows for fewer "
                    f"warpgroups{fewer}"
                )
