"""What the uniform model decides: threads, instructions, layouts and how far loads run ahead."""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

import tvm_ffi
from tvm.target import Target

from tvm_axe.errors import TileError, TileWarning
from tvm_axe.machines.registry import described
from tvm_axe.tile import keys
from tvm_axe.tile.nodes import Gemm, Signal, Wait
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.fragments import exchanges, pressure, scans
from tvm_axe.tile.targets.cuda.fragments.infer import LayoutChoice, infer
from tvm_axe.tile.targets.cuda.fragments.layout import FragmentLayout
from tvm_axe.tile.targets.cuda.grid import decide_grid
from tvm_axe.tile.targets.cuda.instructions import fma, mma
from tvm_axe.tile.targets.cuda.plan import CudaPlan, gpu_of
from tvm_axe.tile.targets.cuda.residency import MOST_REGISTERS, Residency, decide_residency
from tvm_axe.tile.targets.cuda.uniform.memory import UniformMemory, decide_memory
from tvm_axe.tile.targets.cuda.uniform.schedule import decide_pipelines
from tvm_axe.tile.targets.cuda.uniform.warpgroups import Warpgroups, arrange, is_gathered, obstacle

_LARGE = 128 * 128  # elements of a gemm's accumulator from which a block has 256 threads
_ROWS = 4096  # elements of a tile from which a block without gemm has 256 threads
_OTHER_REGISTERS = 24  # that addresses, operands and loops take: with two accumulators of 104, none spill; of 112, some
_BESIDE_WARPGROUPS = 32  # the same beside wgmma's accumulator: of 100 of 128 two are spilled, 104 can't be assembled
_LANES = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class UniformPlan(CudaPlan):
    """A plan in which all warps do the same.

    Attributes
    ----------
    threads : int
        The threads of a block.
    fragments : mapping from Tile to LayoutChoice
        Layouts over ``tx`` and ``m`` of fragments and local tiles, with what decided them.
    products : mapping from Gemm
        How warps stand over the products that ``mma`` does, and warpgroups over those of ``wgmma``; the others are
        multiply-adds.
    memory : UniformMemory
        The layouts of shared tiles and the loads that run ahead.
    residency : Residency
        How many blocks a multiprocessor is to run at once.
    """

    threads: int
    fragments: Mapping[Tile, LayoutChoice]
    products: Mapping[Gemm, mma.Warps | Warpgroups]
    memory: UniformMemory
    residency: Residency

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(f"warp {warp}" for warp in range(self.threads // _LANES))

    @property
    def block_threads(self) -> int:
        return self.threads

    @property
    def shared_bytes(self) -> int:
        return self.memory.bytes


def decide(program: TileProgram, target: Target, reason: str) -> UniformPlan:
    """Decide everything about a program; `reason` is why its roles are uniform.

    Raises
    ------
    TileError
        Threads that are no warps; a type that the target doesn't compute with; a gemm that no instruction does; more
        shared memory than a block may have; more registers than a thread may have.
    """
    ways = _threads(program, gpu_of(target).block_threads)
    return pressure.first_with_room(ways, lambda way: _decide(program, target, reason, *way))


def _decide(program: TileProgram, target: Target, reason: str, threads: int, why: str) -> UniformPlan:
    """The plan with so many threads."""
    decisions, gpu = Decisions(program), gpu_of(target)
    decisions.add("roles", "uniform: every warp loads and computes", reason)
    _check_types(program, target)
    if "cluster" in program.options:
        decisions.add("cluster", "none", "only a specialized kernel loads for several blocks at once")
    if "epilogue_tile" in program.options:
        decisions.add("epilogue_tile", "no pieces", "only a specialized kernel has a storing warp")
    decisions.add("kernel", f"{threads} threads", why)
    products, fragments = _products(program, target, threads, decisions)
    residency = decide_residency(program, gpu, threads, decisions)
    most = residency.registers - _OTHER_REGISTERS
    if any(isinstance(stand, Warpgroups) for stand in products.values()):
        most = residency.registers - _BESIDE_WARPGROUPS
    _check_pressure(program, fragments, threads, residency, most, decisions)
    memory = decide_memory(program, fragments, products, threads, decisions)
    memory = decide_pipelines(program, memory, residency, decisions, gpu.asynchronous_copies)
    grid = decide_grid(program, gpu, decisions, fills_processor=False, resident=residency.blocks)
    keys.decide(program, decisions)
    scans.decide(program, decisions)
    exchanges.decide(program, fragments, threads, decisions)
    for node in program.nodes():
        if isinstance(node, Wait | Signal):
            decisions.add(node, "a thread a flag", "the block meets behind a wait and before an ordered signal")
    return UniformPlan(
        program=program,
        samples=None,
        target=target,
        decisions=decisions.made(),
        grid=grid,
        threads=threads,
        fragments=fragments,
        products=products,
        memory=memory,
        residency=residency,
    )


def _check_types(program: TileProgram, target: Target) -> None:
    float8 = gpu_of(target).float8
    for tile in (*program.params, *program.tiles):
        kind = tvm_ffi.dtype(tile.dtype)
        if kind.bits < 8 or kind.lanes != 1 or (tile.dtype.startswith("float8") and not float8):
            raise TileError(
                f"{tile}: {described(target)} computes with booleans, integers, float16, bfloat16, float32 and float64"
                + (", and with float8" if float8 else "")
            )


def _threads(program: TileProgram, most_threads: int) -> list[tuple[int, str]]:
    """How many threads a block may have, and why: the fastest number first, then what has more registers."""
    given = program.options.get("threads")
    if given is not None:
        assert isinstance(given, int)
        if given % _LANES or not 0 < given <= most_threads:
            raise TileError(f"kernel: threads={given}; valid are multiples of {_LANES} up to {most_threads}")
        return [(given, "as annotated")]
    gemms = [node for node in program.nodes() if isinstance(node, Gemm)]
    if gemms:
        most = max(math.prod(gemm.shape[:2]) for gemm in gemms)
        size = f"products of up to {most} elements a block"
        more = (256, f"{size}; the registers of 128 don't hold the fragments")
        return [(256, size)] if most >= _LARGE else [(128, size), more]
    most = max((math.prod(tile.shape) for tile in program.tiles), default=1)
    threads = 128 if most < _ROWS else 256  # 512 read memory at half the rate (rows of 8192 on an H200)
    return [(threads, f"tiles of up to {most} elements a block")]


def _products(
    program: TileProgram, target: Target, threads: int, decisions: Decisions
) -> tuple[dict[Gemm, mma.Warps | Warpgroups], dict[Tile, LayoutChoice]]:
    """Instructions of gemms, and all fragment layouts."""
    gpu, gemms = gpu_of(target), [node for node in program.nodes() if isinstance(node, Gemm)]
    fixed: dict[Tile, LayoutChoice] = {}
    products: dict[Gemm, mma.Warps | Warpgroups] = {}
    chained = any(gemm.a.tile.scope != "shared" for gemm in gemms)
    for gemm in gemms:
        _check_gemm(gemm)
    whys = {gemm: _obstacles(gemm, target, threads) for gemm in gemms}
    gathered = {gemm for gemm in gemms if whys[gemm]["wgmma"] is None and is_gathered(program, gemm)}
    chosen = {}
    for gemm in gemms:
        beside = {each: whys[each] for each in gemms if each.c.tile is gemm.c.tile}
        chosen[gemm] = _instruction(gemm, beside, gathered, decisions)
    by_fma = [gemm for gemm in gemms if chosen[gemm] == "fma"]
    for gemm in by_fma if gpu.tensor_cores != "none" else ():
        _warn_of_operands(program, gemm)
    across = fma.threads_along_rows([gemm.shape[1] for gemm in by_fma], threads)
    for gemm in gemms:
        m, n, k = gemm.shape
        if gemm in by_fma:
            layout = fma.accumulator(m, n, across, threads)
            fixed.setdefault(gemm.c.tile, LayoutChoice(layout, gemm.c.tile.shape, f"{gemm}, by multiply-adds"))
            continue
        if chosen[gemm] == "wgmma":
            stand = products[gemm] = arrange(gemm, threads)
            decisions.add(gemm, f"{stand.down} x {stand.across} warpgroups", "along rows if these fall into shares")
            demands = {gemm.c.tile: stand.accumulator(gemm)}
        else:
            warps = products[gemm] = mma.arrange(m, n, threads, rows_only=chained)
            why = "along rows alone" if chained else "nearly square"
            decisions.add(gemm, f"{warps.rows} x {warps.columns} warps", why)
            demands = {gemm.c.tile: mma.accumulator(m, n, warps)}
            if gemm.a.tile.scope != "shared":
                demands[gemm.a.tile] = mma.left_operand(m, k, warps, gemm.a.tile.dtype)
        for tile, layout in demands.items():
            held = fixed.setdefault(tile, LayoutChoice(layout, tile.shape, f"{gemm}, by {chosen[gemm]}"))
            if held.layout != layout:
                raise TileError(
                    f"{gemm}: of {tile.name} it demands layout {layout}, but it has {held.layout}, from {held.origin}; "
                    "copy it to another fragment"
                )
    fragments = infer(program, fixed, threads)
    for tile, held in fragments.items():
        if tile.scope == "fragment":
            decisions.add(tile, held.layout, held.origin)
            _check_fragment(tile, held, threads)
    for gemm in products:
        _check_annotated(gemm, fragments, fixed)
    return products, fragments


def _check_fragment(tile: Tile, held: LayoutChoice, threads: int) -> None:
    count = pressure.registers_of(tile, held)
    try:
        FragmentLayout(held.layout, held.shape, threads)
    except TileError as error:
        raise TileError(f"{tile}: {error} (its layout is from {held.origin})") from error
    if count > MOST_REGISTERS:
        raise pressure.RegisterError(
            f"{tile}: takes {count} registers of each of {threads} threads, which have {MOST_REGISTERS}; its layout is "
            f"{held.layout}, from {held.origin}; valid are smaller tiles"
        )


def _check_pressure(
    program: TileProgram,
    fragments: Mapping[Tile, LayoutChoice],
    threads: int,
    residency: Residency,
    most: int,
    decisions: Decisions,
) -> None:
    """Refuse fragments that take more than `most` of a thread's registers together."""
    peak = pressure.find_peak(pressure.uses_of(program.body), pressure.registers_of_all(fragments))
    pressure.check(peak, most, threads, "more threads" if residency.blocks == 1 else "fewer blocks_per_sm")
    if peak.registers:
        decisions.add("registers", f"{peak.registers} for fragments", f"of {most} of a thread, where most are needed")


def _check_gemm(gemm: Gemm) -> None:
    if gemm.b.tile.scope != "shared" or gemm.c.tile.scope != "fragment":
        raise TileError(f"{gemm}: valid are a in shared memory or a fragment, b in shared memory and c in a fragment")
    for region in (gemm.c, gemm.a):
        if region.tile.scope != "shared" and not region.whole:
            raise TileError(f"{gemm}: {region} is a part of a fragment; valid is all of it")


def _check_annotated(gemm: Gemm, fragments: Mapping[Tile, LayoutChoice], fixed: Mapping[Tile, LayoutChoice]) -> None:
    """An annotation may give a fragment of a product no other layout than the instruction's."""
    for region in (gemm.c, gemm.a):
        tile = region.tile
        if tile in fixed and not fragments[tile].layout.equivalent(fixed[tile].layout):
            raise TileError(
                f"{tile.name}: its layout is {fragments[tile].layout}, from {fragments[tile].origin}, and "
                f"{fixed[tile].layout}, from {fixed[tile].origin}; they must be one"
            )


def _warn_of_operands(program: TileProgram, gemm: Gemm) -> None:
    """Warn of a product that is far slower than it need be, for where its operands are."""
    tile, why = gemm.a.tile, mma.obstacle(gemm)
    from_shared = replace(gemm, a=replace(gemm.a, tile=replace(tile, scope="shared")))
    if gemm.instruction is not None or tile.dtype == "float32" or why is None:
        return
    if mma.obstacle(from_shared) is None:
        instead = f"with {tile.name} a tile.shared, mma does it"
    elif why == mma.misplaced(gemm):
        instead = "mma does it of parts whose columns begin, and of tiles whose rows end, at such multiples"
    else:
        return
    warnings.warn(
        f"{program.name}: {gemm} is done by multiply-adds, tens of times slower than tensor cores: {why}; {instead}",
        TileWarning,
        stacklevel=2,
    )


def _obstacles(gemm: Gemm, target: Target, threads: int) -> dict[str, str | None]:
    """Why each instruction can't do a product of so many threads; None if it can."""
    has_mma = gpu_of(target).tensor_cores != "none"
    return {
        "wgmma": obstacle(gemm, target, threads),
        "mma": mma.obstacle(gemm) if has_mma else "no tensor cores that mma is an instruction of",
        "fma": fma.obstacle(gemm),
    }


def _instruction(
    gemm: Gemm, beside: Mapping[Gemm, Mapping[str, str | None]], gathered: Container[Gemm], decisions: Decisions
) -> str:
    """``"wgmma"``, ``"mma"`` or ``"fma"``: what all products `beside` can do, those into its accumulator.

    Each has its obstacles (`_obstacles`). Where an instruction is annotated for one, it is for all that can do it.
    """
    own = beside[gemm]
    if gemm.instruction is not None:
        why = own[gemm.instruction]
        if why is not None:
            raise TileError(f"{gemm}: instruction={gemm.instruction!r}, but {why}; without it the fastest is chosen")
        decisions.add(gemm, gemm.instruction, "as annotated")
        return gemm.instruction
    whys = {name: next(filter(None, (each[name] for each in beside.values())), None) for name in own}
    annotated = next((each for each in beside if each.instruction is not None), gemm)
    if annotated.instruction is not None and whys[annotated.instruction] is None:
        decisions.add(gemm, annotated.instruction, f"as annotated for {annotated}")
        return annotated.instruction
    rounded = all(each.a.tile.dtype != "float32" for each in beside)
    if whys["wgmma"] is None and rounded and any(each in gathered for each in beside):
        decisions.add(gemm, "wgmma", "it multiplies while threads gather operands on")
        return "wgmma"
    if whys["mma"] is None and rounded:
        decisions.add(gemm, f"mma.sync {mma.INSTRUCTIONS[gemm.a.tile.dtype].name}", "tensor cores take its types")
        return "mma"
    if whys["fma"] is None:
        exact = None if rounded else "float32 products stay exact unless instruction='mma' is given"
        decisions.add(gemm, "multiply-adds", next(filter(None, (own["mma"], exact, whys["mma"]))))
        return "fma"
    raise TileError(f"{gemm}: mma: {whys['mma']}; fma: {whys['fma']}")
