"""The uniform model: every warp of a block loads and computes.

`plan` decides threads, instructions, layouts and how far loads run ahead; `uniform.emit` makes the code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import tvm_ffi
from tvm import tirx
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.layout import Access, ComposeLayout, Iter, Layout
from tvm_axe.machines.registry import described
from tvm_axe.tile.program import Copy, Gemm, Let, Loop, Node, Parallel, Program, Signal, Tile, Wait, walk
from tvm_axe.tile.targets.cuda import swizzles
from tvm_axe.tile.targets.cuda.fragments.infer import Held, infer
from tvm_axe.tile.targets.cuda.fragments.layout import REGISTER, THREAD, Holding
from tvm_axe.tile.targets.cuda.fragments.scratch import scratch_bytes
from tvm_axe.tile.targets.cuda.instructions import cp_async, fma, mma
from tvm_axe.tile.targets.cuda.plan import CudaPlan, decide_grid, gpu_of, variables_in

ALIGNMENT = 128
"""Bytes, of tiles in shared memory."""

_LARGE = 128 * 128  # elements of a gemm's accumulator from which a block has 256 threads
_ROWS = 4096  # elements of a tile from which a block without gemm has 256 threads
_REGISTERS = 255  # of 32 bits, that a thread can have
_STAGES = (4, 3, 2)
_LANES = 32
_MOST_SHOWN = 1 << 14  # elements of a tile whose accesses by `parallel` are counted one by one


@dataclass(frozen=True)
class Ahead:
    """A loop's loads that run ahead: the copies with the bytes that a thread takes at once, and the slots."""

    copies: dict[Copy, int]
    stages: int


@dataclass
class UniformPlan(CudaPlan):
    """A plan in which all warps do the same.

    Attributes
    ----------
    threads : of a block
    fragments : layouts over ``tx`` and ``m``, of local tiles too, with what decided them
    shared : layouts of tiles in shared memory
    products : the warps of gemms by ``mma``; the others are multiply-adds
    ahead : loops whose loads run ahead
    scratch : bytes of shared memory for exchanges between warps
    """

    threads: int = 128
    fragments: dict[Tile, Held] = field(default_factory=dict)
    shared: dict[Tile, Layout | ComposeLayout] = field(default_factory=dict)
    products: dict[Gemm, mma.Warps] = field(default_factory=dict)
    ahead: dict[Loop, Ahead] = field(default_factory=dict)
    scratch: int = 0

    def slots(self, tile: Tile) -> int:
        """How many of a shared tile there are."""
        return max([a.stages for a in self.ahead.values() if any(c.dst.tile is tile for c in a.copies)], default=1)

    def slot_bytes(self, tile: Tile) -> int:
        """From one slot of a shared tile to the next."""
        return -(-int(self.shared[tile].span()) * _item_bytes(tile) // ALIGNMENT) * ALIGNMENT

    def slot_elements(self, tile: Tile) -> int:
        """The same in elements."""
        return self.slot_bytes(tile) // _item_bytes(tile)

    @property
    def shared_bytes(self) -> int:
        """Of all shared memory."""
        return sum(self.slots(tile) * self.slot_bytes(tile) for tile in self.shared) + self.scratch


def plan(program: Program, target: Target, reason: str) -> UniformPlan:
    """Decide everything about a program; `reason` is why its roles are uniform.

    Raises
    ------
    TileError
        Threads that are no warps; a type that the target doesn't compute with; a gemm that no instruction does; more
        shared memory than a block may have.
    """
    decided = UniformPlan(program, target)
    decided.decide("roles", "uniform: every warp loads and computes", reason)
    _check_types(program, target)
    if "cluster" in program.options:
        decided.decide("cluster", "none", "only a specialized kernel loads for several blocks at once")
    if "sends" in program.options:
        decided.decide("sends", "no pieces", "only a specialized kernel has a storing warp")
    _threads(decided)
    _products(decided)
    _shared(decided)
    _loads(decided)
    decide_grid(decided, fills_processor=False)
    for node in program.nodes():
        if isinstance(node, Wait | Signal):
            decided.decide(node, "a thread a flag", "the block meets behind a wait and before an ordered signal")
    return decided


def lower(plan: UniformPlan) -> tirx.PrimFunc:
    """The function that upstream's ``tirx`` pipeline compiles."""
    from tvm_axe.tile.targets.cuda.uniform.emit import lower as emit

    return emit(plan)


def _item_bytes(tile: Tile) -> int:
    return int(tvm_ffi.dtype(tile.dtype).bits) // 8


def _check_types(program: Program, target: Target) -> None:
    float8 = gpu_of(target).float8
    for tile in (*program.params, *program.tiles):
        kind = tvm_ffi.dtype(tile.dtype)
        if kind.bits < 8 or kind.lanes != 1 or (tile.dtype.startswith("float8") and not float8):
            raise TileError(
                f"{tile}: {described(target)} computes with booleans, integers, float16, bfloat16, float32 and float64"
                + (", and with float8" if float8 else "")
            )


def _threads(plan: UniformPlan) -> None:
    given = plan.program.options.get("threads")
    if given is not None:
        assert isinstance(given, int)
        most = gpu_of(plan.target).block_threads
        if given % _LANES or not 0 < given <= most:
            raise TileError(f"kernel: threads={given}; valid are multiples of {_LANES} up to {most}")
        plan.threads = given
        plan.decide("kernel", f"{given} threads", "as annotated")
        return
    gemms = [node for node in plan.program.nodes() if isinstance(node, Gemm)]
    if gemms:
        most = max(math.prod(gemm.shape[:2]) for gemm in gemms)
        plan.threads = 256 if most >= _LARGE else 128
        plan.decide("kernel", f"{plan.threads} threads", f"products of up to {most} elements a block")
        return
    most = max((math.prod(tile.shape) for tile in plan.program.tiles), default=1)
    plan.threads = 128 if most < _ROWS else 256  # 512 read memory at half the rate (rows of 8192 on an H200)
    plan.decide("kernel", f"{plan.threads} threads", f"tiles of up to {most} elements a block")


def _products(plan: UniformPlan) -> None:
    """Instructions of gemms, and all fragment layouts."""
    gemms = [node for node in plan.program.nodes() if isinstance(node, Gemm)]
    fixed: dict[Tile, Held] = {}
    chained = any(gemm.a.tile.scope != "shared" for gemm in gemms)
    for gemm in gemms:
        _check_gemm(gemm)
    by_fma = [gemm for gemm in gemms if _instruction(plan, gemm) == "fma"]
    across = fma.threads_along_rows([gemm.shape[1] for gemm in by_fma], plan.threads)
    for gemm in gemms:
        m, n, k = gemm.shape
        if gemm in by_fma:
            layout = fma.accumulator(m, n, across, plan.threads)
            fixed.setdefault(gemm.c.tile, Held(layout, f"{gemm}, by multiply-adds"))
            continue
        warps = plan.products[gemm] = mma.arrange(m, n, plan.threads, rows_only=chained)
        plan.decide(gemm, f"{warps.rows} x {warps.columns} warps", "along rows alone" if chained else "nearly square")
        demands = {gemm.c.tile: mma.accumulator(m, n, warps)}
        if gemm.a.tile.scope != "shared":
            demands[gemm.a.tile] = mma.left_operand(m, k, warps)
        for tile, layout in demands.items():
            held = fixed.setdefault(tile, Held(layout, f"{gemm}, by mma"))
            if held.layout != layout:
                raise TileError(
                    f"{gemm}: of {tile.name} it demands layout {layout}, but it has {held.layout}, from {held.origin}; "
                    "copy it to another fragment"
                )
    plan.fragments = infer(plan.program, fixed, plan.threads)
    for tile, held in plan.fragments.items():
        if tile.scope == "fragment":
            plan.decide(tile, held.layout, held.origin)
            _check_fragment(tile, held, plan.threads)
    for gemm in plan.products:
        _check_annotated(plan, gemm, fixed)


def _check_fragment(tile: Tile, held: Held, threads: int) -> None:
    count = -(-int(held.layout.span(REGISTER)) * int(tvm_ffi.dtype(tile.dtype).bits) // 32)
    try:
        Holding(held.layout, tile.shape, threads)
    except TileError as error:
        raise TileError(f"{tile}: {error} (its layout is from {held.origin})") from error
    if count > _REGISTERS:
        raise TileError(
            f"{tile}: takes {count} registers of each of {threads} threads, which have {_REGISTERS}; its layout is "
            f"{held.layout}, from {held.origin}; valid are smaller tiles, and extents with more factors of two"
        )


def _check_gemm(gemm: Gemm) -> None:
    if gemm.b.tile.scope != "shared" or gemm.c.tile.scope != "fragment":
        raise TileError(f"{gemm}: valid are a in shared memory or a fragment, b in shared memory and c in a fragment")
    for region in (gemm.c, gemm.a):
        if region.tile.scope != "shared" and not region.whole:
            raise TileError(f"{gemm}: {region} is a part of a fragment; valid is all of it")


def _check_annotated(plan: UniformPlan, gemm: Gemm, fixed: dict[Tile, Held]) -> None:
    """An annotation may give a fragment of a product no other layout than the instruction's."""
    for region in (gemm.c, gemm.a):
        tile = region.tile
        if tile in fixed and not plan.fragments[tile].layout.equivalent(fixed[tile].layout):
            raise TileError(
                f"{tile.name}: its layout is {plan.fragments[tile].layout}, from {plan.fragments[tile].origin}, and "
                f"{fixed[tile].layout}, from {fixed[tile].origin}; they must be one"
            )


def _instruction(plan: UniformPlan, gemm: Gemm) -> str:
    """``"mma"`` or ``"fma"``."""
    by_mma, by_fma = mma.obstacle(gemm), fma.obstacle(gemm)
    if gemm.instruction is not None:
        why = {"mma": by_mma, "fma": by_fma}.get(gemm.instruction, "it runs only where roles are specialized")
        if why is not None:
            raise TileError(f"{gemm}: instruction {gemm.instruction!r}: {why}")
        plan.decide(gemm, gemm.instruction, "as annotated")
        return gemm.instruction
    if by_mma is None and gemm.a.tile.dtype != "float32":
        plan.decide(gemm, f"mma.sync {mma.INSTRUCTIONS[gemm.a.tile.dtype].name}", "tensor cores take its types")
        return "mma"
    if by_fma is None:
        plan.decide(gemm, "multiply-adds", by_mma or "float32 products stay exact unless instruction='mma' is given")
        return "fma"
    raise TileError(f"{gemm}: mma: {by_mma}; fma: {by_fma}")


def _shared(plan: UniformPlan) -> None:
    """Layouts of tiles in shared memory, and room for exchanges."""
    for tile in plan.program.tiles:
        if tile.scope != "shared":
            continue
        if tile.layout is not None:
            if not (tile.layout.admits(tile.shape) and tile.layout.is_injective()):
                raise TileError(f"{tile}: layout {tile.layout} must place its elements at as many different addresses")
            plan.shared[tile] = tile.layout
            plan.decide(tile, tile.layout, "its annotation")
            continue
        plan.shared[tile], why = swizzles.choose(tile.shape, tile.dtype, _accesses(plan, tile))
        plan.decide(tile, plan.shared[tile], why)
    plan.scratch = scratch_bytes(plan.program, plan.fragments, plan.threads)
    for node in plan.program.nodes():
        if isinstance(node, Gemm) and node not in plan.products and node.a.tile.scope != "shared":
            plan.scratch = max(plan.scratch, node.a.tile.bytes)
    plan.scratch = -(-plan.scratch // ALIGNMENT) * ALIGNMENT


def _accesses(plan: UniformPlan, tile: Tile) -> list[Access]:
    """The ways in which warps access a shared tile."""
    found: list[Access] = []
    piece = math.gcd(tile.shape[-1], swizzles.PIECE // _item_bytes(tile))
    for node in plan.program.nodes():
        if tile not in node.reads + node.writes or isinstance(node, Loop):
            continue
        if isinstance(node, Gemm) and node in plan.products:
            found.append(Access(tile.dtype, "column", piece))
        elif isinstance(node, Copy):
            found.append(Access(tile.dtype, "row", piece))
        elif isinstance(node, Parallel):
            found += _by_parallel(plan, tile, node)
    return list(dict.fromkeys(found))


def _by_parallel(plan: UniformPlan, tile: Tile, node: Parallel) -> list[Access]:
    """Accesses to a shared tile by the coordinates of a fragment that the threads go along."""
    if math.prod(tile.shape) > _MOST_SHOWN:
        return []
    along = next((access for access in node.accesses if access[0] in plan.fragments and access[2]), None)
    if along is None:
        return []
    fragment, outer, _ = along
    found = []
    for other, indices, _ in node.accesses:
        if other is not tile or len(indices) != len(outer):
            continue
        order = [next((d for d, own in enumerate(outer) if own.same_as(index)), None) for index in indices]
        extents = [fragment.shape[d] for d in order if d is not None]
        if sorted(d for d in order if d is not None) == list(range(len(outer))) and tuple(extents) == tile.shape:
            held = plan.fragments[fragment].layout.permute(fragment.shape, [d for d in order if d is not None])
            found.append(Access(tile.dtype, _lanes(held), 1))
    return found


def _lanes(layout: Layout) -> Layout:
    """A fragment's layout with its threads as lanes of warps."""
    shard: list[Iter] = []
    for it in layout.D:
        inner = min(it.extent, max(1, _LANES // it.stride)) if it.axis == THREAD else 1
        if it.axis != THREAD:
            shard.append(it)
        elif it.stride >= _LANES:
            shard.append(Iter(it.extent, it.stride // _LANES, "warpid"))
        else:
            shard += [
                Iter(it.extent // inner, max(1, it.stride * inner // _LANES), "warpid"),
                Iter(inner, it.stride, "laneid"),
            ]
    return Layout(shard)


def _loads(plan: UniformPlan) -> None:
    """Loops whose loads run ahead, and how far."""
    analyzer, most = plan.program.analyzer(), gpu_of(plan.target).shared_bytes
    for loop in plan.program.nodes():
        if not isinstance(loop, Loop) or loop.stages is None:
            continue
        copies = {}
        waits = any(isinstance(node, Wait) for node in walk(loop.body))
        for node in () if waits else loop.body:
            if isinstance(node, Copy) and _runs_ahead(plan.program, loop, node):
                size = cp_async.piece_bytes(analyzer, node, plan.shared[node.dst.tile])
                if size is not None:
                    copies[node] = size
        if not copies or loop.stages == 1:
            why = "they may depend on a wait in it" if waits else "as annotated" if copies else "none can"
            plan.decide(f"loop {loop.var.name}", "loads don't run ahead", why)
            continue
        _stages(plan, loop, copies, most)
    if plan.shared_bytes > most:
        tiles = ", ".join(f"{tile.name} {plan.slots(tile)} x {plan.slot_bytes(tile)}" for tile in plan.shared)
        raise TileError(
            f"shared memory: {plan.shared_bytes} bytes ({tiles}, exchanges {plan.scratch}); a block has {most}"
        )


def _stages(plan: UniformPlan, loop: Loop, copies: dict[Copy, int], most: int) -> None:
    name = f"loop {loop.var.name}"
    if loop.stages:
        plan.ahead[loop] = Ahead(copies, loop.stages)
        plan.decide(name, f"{loop.stages} stages of cp.async", "as annotated")
        return
    longest = loop.extent if isinstance(loop.extent, int) else _STAGES[0]
    for stages in [s for s in _STAGES if s <= max(2, longest)]:
        plan.ahead[loop] = Ahead(copies, stages)
        if plan.shared_bytes <= most // 2 or (stages == 2 and plan.shared_bytes <= most):
            plan.decide(name, f"{stages} stages of cp.async", f"{plan.shared_bytes} bytes of shared memory")
            return
    del plan.ahead[loop]
    plan.decide(name, "loads don't run ahead", "two stages don't fit shared memory")


def _runs_ahead(program: Program, loop: Loop, copy: Copy) -> bool:
    """Whether a load may be made before the iteration it belongs to."""
    tile = copy.dst.tile
    elsewhere = [node for node in program.nodes() if not isinstance(node, Loop) and tile in node.reads + node.writes]
    inside = set(walk(loop.body))
    writers = [node for node in elsewhere if tile in node.writes]
    if not all(node in inside for node in elsewhere) or writers != [copy] or copy.src.tile in loop.writes:
        return False
    changing = {node.var for node in inside if isinstance(node, Let | Loop)}
    used = variables_in(copy.src.start)
    return not used & changing and not used & {written.buffer for written in loop.writes} and _first(loop.body, copy)


def _first(body: Sequence[Node], copy: Copy) -> bool:
    """Whether no node before the load reads what it loads."""
    before = body[: body.index(copy)]
    return all(copy.dst.tile not in node.reads for node in before)
