"""Pairs: a product and the collective that it overlaps, as one kernel beside copies, where devices have copy engines.

Chunks of the two in turns (`tvm_axe.lower.order`) are how cores hide communication. A GPU has engines that copy beside
its processors, so a region of a product's stage and a collective's becomes, on each device:

| | product, then reduce-scatter | gather, then product |
|---|---|---|
| prepare | clears its words, writes the unit matrix | clears its words |
| barrier | all devices' words are clear | likewise |
| fork | the side stream begins | likewise |
| copies | | its own rows to each peer, a flag behind each |
| product | `matmul_scatter`: peers' rows, counted; its own | `gather_matmul`: its own rows; peers', behind flags |
| copies | counted groups of columns to their owners, a flag each | |
| join | the side stream is done | likewise |

If what a device makes of its rows is gathered, its rows are counted too, and copied to all in the same groups. So a
sum that all devices take whole, an all-reduce, is done like one that is scattered and gathered.

A schedule says it as on cores: `overlap` of the stages, with as many chunks as there shall be groups of columns.
The product has the parameters of the tile kernel that was chosen for it, or the defaults. Whatever is no such pair
stays in chunks, and `pair_of` says why.

Copies hide behind tiles that are still to come. Where all tiles of a product run at once there are none, so its copies
are behind it in any case, some microseconds each, and the engine's collective is done sooner: `pair_of` gives a
`Sequential` then. Behind a gather so few tiles all wait for the copies, which is no loss from `LONG` bytes on.

The kernel waits for flags alone, which copy engines and streams set, so it may fill the processors. Of each run all
flags are waited for and all copies joined, so that a device which clears its words for the next run, and then meets the
others, clears no flag of that run, and nobody writes what a peer may still read: nothing is there twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tvm import tirx
from tvm.target import Target

from tvm_axe.analysis.expressions import alike
from tvm_axe.analysis.patterns import is_pointwise, is_sum, summed
from tvm_axe.errors import ScheduleError, TileError
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.lower.derive import LOCAL, MESH_KERNEL, Step
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.localize import OWN
from tvm_axe.lower.pairing import (
    DTYPES,
    Launch,
    Region,
    SideStep,
    Unfit,
    launch,
    product_of_step,
    said,
    tiles_of,
    with_block,
)
from tvm_axe.lower.program import ScheduledProgram
from tvm_axe.machines import backend_of
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.kernels.pairs import gather_matmul, groups_of_blocks, matmul_scatter

__all__ = ["LONG", "WAVES", "Pair", "Sequential", "makes_pairs", "pair_of"]

WAVES = 1
"""How many times a product must fill the device before copies of its tiles hide behind others; 0: always a pair."""

LONG = 16 << 20
"""Bytes that a device is sent, from which copy engines beside own rows' tiles gather sooner than a kernel does."""

SHORT = 6 << 20
"""Bytes of a copy of some columns of rows, below which what it takes to begin is a large part of its time."""


@dataclass(frozen=True, eq=False)
class Pair:
    """What each device does for a region.

    Attributes
    ----------
    product : Step
        The step of the region that is the product; the others are the collective's.
    steps : tuple of Step
        All of them, in order, with what the pair moves between devices and where to.
    axis : str
        The mesh axis over which the two communicate.
    prepare, kernel : Launch
        What clears the words, and the product.
    before, after : tuple of SideStep
        The steps of the side stream that are told before the product, and behind it.
    shardings : Mapping[Buffer, Sharding]
        Of the buffers that it has beside the program's; they are named.
    exchanged : frozenset of Buffer
        The program's intermediates that copies read or write.
    inside : frozenset of Buffer
        Those that are nowhere but in the kernel's registers.
    about : str
        What it is, in words.
    """

    product: Step
    steps: tuple[Step, ...]
    axis: str
    prepare: Launch
    kernel: Launch
    before: tuple[SideStep, ...]
    after: tuple[SideStep, ...]
    shardings: Mapping[tirx.Buffer, Sharding]
    exchanged: frozenset[tirx.Buffer]
    inside: frozenset[tirx.Buffer]
    about: str


@dataclass(frozen=True)
class Sequential:
    """That the stages of a region are better done one behind the other, and why, in words."""

    about: str


def makes_pairs(target: Target | None) -> bool:
    """Whether regions become pairs on a target."""
    backend = None if target is None else backend_of(target)
    return isinstance(backend, TileBackend) and backend.pairs


def pair_of(
    program: ScheduledProgram,
    steps: Sequence[Step],
    shardings: Mapping[tirx.Buffer, Sharding],
    private: frozenset[tirx.Buffer],
    users: Mapping[tirx.Buffer, Sequence[Step]],
    target: Target,
) -> Pair | Sequential | str:
    """Return the pair that a region is, that it would be a slow one, or why it is none.

    Parameters
    ----------
    program : ScheduledProgram
        The program.
    steps : sequence of Step
        The region's.
    shardings : Mapping[Buffer, Sharding]
        Where the program's buffers live.
    private : frozenset of Buffer
        The intermediates that live inside one step.
    users : Mapping[Buffer, sequence of Step]
        The steps that touch each intermediate.
    target : Target
        Resolved; one that `makes_pairs`.
    """
    region = Region(program, tuple(steps), shardings, private, users, target)
    try:
        if steps[0].kind == LOCAL and steps[1].kind == MESH_KERNEL:
            return _summed(region)
        if len(steps) == 2 and steps[0].kind == MESH_KERNEL and steps[1].kind == LOCAL:
            return _gathered(region)
    except (Unfit, ScheduleError, TileError) as error:
        return str(error)
    return "they are not a product before a sum over devices, or behind an all-gather"


def _summed(region: Region) -> Pair | Sequential:
    """A product before its sum over devices, whole or in slices, with what is computed of that and a gather of it."""
    first, second, *rest = region.steps
    axis = second.axis
    assert axis is not None  # it is a mesh kernel
    devices = region.mesh.axis_size(axis)
    own = {block: step for step in (second, *rest) for block in step.stage.blocks}
    scatter, *others = own
    partial, total = scatter.reads[0].buffer, scatter.writes[0].buffer
    load = summed(scatter.realize.block) if is_sum(scatter.realize.block) else None
    if load is None or not alike(list(load.indices)[1:], list(scatter.realize.block.body.indices)):
        raise Unfit(f"block {scatter.name!r} is no sum over the devices of {axis}")
    region.check_inside(partial)
    if region.shardings[partial].partial != {0}:
        raise Unfit(f"{partial.name} isn't a term of the sum on each device")
    region.check_pieces(partial, {0: axis})
    check = region.check_whole if region.is_whole(total) else region.check_shares
    check(total, axis)
    gather = others.pop() if others and region.gathers(others[-1]) else None
    if len(others) > 1 or any(not is_pointwise(block.realize.block) for block in others):
        raise Unfit(f"{', '.join(block.name for block in others)}: valid is one pointwise block behind the sum")
    result = others[0].writes[0].buffer if others else total
    if others:
        check(result, axis)
        region.check_inside(total)
    if gather is not None:
        region.check_gathers(gather, result, axis)
        region.check_inside(result)
    out = result if gather is None else gather.writes[0].buffer
    whole, found = region.is_whole(out), product_of_step(region, first, partial, total)
    product, (m, n, k) = found.product, found.product.shape[1:]
    for buffer in (partial, out):
        region.check_columns(buffer, n)
    rows, dtype, out_dtype = m // devices, str(product.a.dtype), str(out.dtype)
    pieces = _pieces(str(partial.dtype), dtype, out_dtype)
    if whole and out_dtype not in DTYPES:
        raise Unfit(f"{out.name} is {out_dtype}; of what is copied to all, tiles are counted once stored, in 16 bits")
    tiles = tiles_of(region.target, found, unit=True, pieces=pieces)
    chunks, transposes = _chunks(region, rows, n, tiles), product.transpose_b
    recipe = matmul_scatter(
        devices, m, n, k, dtype, out_dtype, transposes, whole, pieces=pieces, groups=chunks, **tiles
    )
    tensors = {"A": found.a, "B": found.b, "mine": partial, "out": out}
    if others:
        recipe = with_block(recipe, region.local(own[others[0]]), others[0], total, axis, tensors)
    groups, wide = groups_of_blocks(n, tiles["block_n"], chunks)
    side, name = tiles["block_n" if product.transpose_b else "block_m"], region.program.names[partial]
    sums = (devices, rows, n) if pieces == 1 else (devices, pieces, rows, n)
    made = {
        "arrived": region.buffer(f"{name}_arrived", sums, dtype),
        "words": region.buffer(f"{name}_words", (2, devices, groups), "int32"),
        "unit": region.buffer(f"{name}_unit", (side, side), dtype),
    }
    if pieces > 1:
        made["mine"] = region.buffer(f"{name}_pieces", sums, dtype)
    tensors |= {name: buffer for name, (buffer, _) in made.items()}
    shardings = dict(made.values())
    giver = second if gather is None else own[gather]
    moving = (second, giver if whole else None)
    after = _sent(tensors, axis, devices, (rows, n), pieces, tiles, groups, wide, moving)
    prepare, kernel = (launch(region, each, tensors, shardings, axis) for each in recipe.programs)
    alone = pieces == 1 and not others and {str(total.dtype), out_dtype} == {str(partial.dtype)}
    slow = _at_once(_tiles(devices * rows, n, tiles), kernel) if alone else None
    if slow is not None:
        return Sequential(f"one behind the other: {slow}, so that no copy would hide behind others")
    kept = ", each device's rows are copied to all" if whole else ""
    sent = f", partial sums as {pieces} numbers of {dtype}" if pieces > 1 else ""
    about = f"one kernel, matmul_scatter({said(tiles)}), beside copies in {groups} groups of columns{sent}{kept}"
    return Pair(
        first,
        _as_moved(region, partial, dtype_bytes(dtype, pieces), out if whole else None, moving),
        axis,
        prepare,
        kernel,
        (),
        after,
        MappingProxyType(shardings),
        frozenset({*([partial] if pieces == 1 else []), *([out] if whole else [])}),
        frozenset({total, result, *([partial] if pieces > 1 else [])}) - {out},
        about,
    )


def _tiles(m: int, n: int, tiles: Mapping[str, int]) -> int:
    """Of how many tiles a product is, alone."""
    return -(-m // tiles["block_m"]) * -(-n // tiles["block_n"])


def _at_once(number: int, kernel: Launch) -> str | None:
    """That all tiles of a product run at once, in words, if they do."""
    assert kernel.resident is not None  # it is persistent
    return f"the product's {number} tiles run at once" if number <= WAVES * kernel.resident else None


def _chunks(region: Region, rows: int, n: int, tiles: Mapping[str, int]) -> int:
    """At most how many groups of columns of its rows a device is sent: those that are done at different times.

    A copy of less than what is done at a time hides behind nothing, and takes as long to begin.
    """
    waves = -(-_tiles(rows, n, tiles) // backend_of(region.target).machine(region.target).processors)
    return min(region.chunks, waves) if WAVES else region.chunks


def _pieces(partial: str, dtype: str, out: str) -> int:
    """As how many numbers of the operands' type a partial sum is sent, which tensor cores add.

    Of a result of 16 bits two are enough for float32 sums; three have all of a float32's bits.
    """
    if partial == dtype:
        return 1
    if partial == "float32" and dtype == "bfloat16":
        return 3 if out == "float32" else 2
    beyond = ", which doesn't hold as large ones" if partial == "float32" else ""
    raise Unfit(f"partial sums are {partial}, and tensor cores add those of the operands' type, {dtype}{beyond}")


def _as_moved(
    region: Region, partial: tirx.Buffer, nbytes: int, out: tirx.Buffer | None, moving: tuple[Step, Step | None]
) -> tuple[Step, ...]:
    """The region's steps as copies do them: one scatters the partial sums, and one stores what it makes to all peers.

    A partial sum takes `nbytes`; `out` is what all devices have in the end, if so. Where one step does both, it moves
    both.
    """
    scatters, gives = moving
    sharding = region.shardings[partial]
    devices = region.mesh.axis_size(str(scatters.axis))
    share = math.prod(sharding.slab) // devices * (devices - 1)
    found = []
    for step in region.steps:
        pulled = frozenset({partial}) if step is scatters else frozenset()
        pushed = frozenset({out}) if out is not None and step is gives else frozenset()
        moved = nbytes * share * len(pulled) + sum(dtype_bytes(str(buffer.dtype), share) for buffer in pushed)
        found.append(replace(step, pulled=pulled, pushed=pushed, received=(moved,) * region.mesh.size))
    return tuple(found)


def _sent(
    tensors: Mapping[str, tirx.Buffer],
    axis: str,
    devices: int,
    slot: tuple[int, int],
    pieces: int,
    tiles: Mapping[str, int],
    groups: int,
    wide: int,
    moving: tuple[Step, Step | None],
) -> tuple[SideStep, ...]:
    """The copies of groups of columns to their owners, nearest behind first, then of the own rows to all.

    A device has a `slot` of rows and columns, whose partial sums are so many `pieces` one below the other. `moving` are
    the steps that these copies are of; the second is None if nobody but the owner has its rows.
    """
    (scatters, gives), (rows, n), found = moving, slot, []
    mine, arrived, words, out = (tensors[name] for name in ("mine", "arrived", "words", "out"))
    down, across = -(-rows // tiles["block_m"]), -(-n // tiles["block_n"])
    for shift in [*range(1, devices), *([] if gives is None else [0])]:
        for group in range(groups):
            first, stop = group * wide, min(across, (group + 1) * wide)
            columns = (first * tiles["block_n"], min(n, stop * tiles["block_n"]))
            found.append(SideStep("axe.wait_count", ((words, OWN),), (shift, group, down * (stop - first))))
            if shift:
                numbers = (pieces * rows, shift, shift, *columns)
                found.append(SideStep("axe.copy", ((mine, OWN), (arrived, axis)), numbers, scatters))
                found.append(SideStep("axe.flag", ((words, axis),), (shift, group)))
                continue
            for peer in range(1, devices):
                found.append(SideStep("axe.copy", ((out, OWN), (out, axis)), (rows, 0, peer, *columns), gives))
    return tuple(found)


def _parts(region: Region, nbytes: int) -> int:
    """At most how many parts a device's rows of so many bytes are sent in: those whose copies aren't short."""
    return min(region.chunks, max(1, nbytes // SHORT)) if WAVES else region.chunks


def _as_needed(devices: int, parts: int, tiles: int, kernel: Launch) -> list[tuple[int, int]]:
    """In which order parts of the terms of other devices' rows are needed: how far behind the device is, and the part.

    Of devices whose `tiles` run at once, one part after the other; of those whose run later, after those before.
    """
    assert kernel.resident is not None  # it is persistent
    waves = [(tiles * behind + tiles // 2) // kernel.resident for behind in range(devices)]
    turns = [(behind, part) for behind in range(1, devices) for part in range(parts)]
    return sorted(turns, key=lambda turn: (waves[turn[0]], turn[1]))


def _gathered(region: Region) -> Pair | Sequential:
    """An all-gather before a product, with what is computed of that in the same nest."""
    first, second = region.steps
    axis, devices = first.axis, 0 if first.axis is None else region.mesh.axis_size(first.axis)
    assert axis is not None  # it is a mesh kernel
    (gather, *others), source = first.stage.blocks, first.stage.blocks[0].reads[0].buffer
    if others:
        raise Unfit(f"{first.name} does more than gather")
    region.check_gathers(gather, source, axis)
    gathered = gather.writes[0].buffer
    region.check_inside(gathered)
    main, *epilogues = second.stage.blocks
    if len(epilogues) > 1 or any(not is_pointwise(block.realize.block) for block in epilogues):
        raise Unfit(f"{', '.join(block.name for block in epilogues)}: valid is one pointwise block behind the product")
    out = epilogues[0].writes[0].buffer if epilogues else main.writes[0].buffer
    found = product_of_step(region, second, main.writes[0].buffer, gathered)
    if not found.a.same_as(gathered) or found.b.same_as(gathered):
        raise Unfit(f"{gathered.name} isn't the left operand of the product alone")
    if epilogues:
        region.check_inside(main.writes[0].buffer)
    if any(access.buffer.same_as(gathered) for block in epilogues for access in block.reads):
        raise Unfit(f"block {epilogues[0].name!r} reads {gathered.name} too")
    product, (m, n, k) = found.product, found.product.shape[1:]
    dtype, out_dtype = str(product.a.dtype), str(out.dtype)
    tiles = tiles_of(region.target, found, unit=False)
    *lines, columns = region.shardings[source].slab
    rows = math.prod(lines)
    most = _parts(region, dtype_bytes(dtype, rows * columns)) if columns == k else 1
    parts, each = groups_of_blocks(k, tiles["block_k"], most)
    recipe = gather_matmul(devices, m, n, k, dtype, out_dtype, product.transpose_b, parts=parts, **tiles)
    tensors = {"own": source, "B": found.b, "gathered": gathered, "C": out}
    if epilogues:
        recipe = with_block(recipe, region.local(second), epilogues[0], main.writes[0].buffer, axis, tensors)
    words, sharding = region.buffer(f"{region.program.names[gathered]}_words", (2, devices, parts), "int32")
    tensors["words"], shardings = words, {words: sharding}
    prepare, kernel = (launch(region, each, tensors, shardings, axis) for each in recipe.programs)
    before = []
    for behind, part in _as_needed(devices, parts, _tiles(rows, n, tiles), kernel):
        shift = devices - behind  # who takes these rows so many turns behind its own
        span = (part * each * tiles["block_k"], min(k, (part + 1) * each * tiles["block_k"]))
        taken = (0, columns) if parts == 1 else span
        before.append(SideStep("axe.copy", ((source, OWN), (gathered, axis)), (rows, 0, shift, *taken), first))
        before.append(SideStep("axe.flag", ((words, axis),), (shift, part)))
    slow = _at_once(_tiles(m, n, tiles), kernel)
    if slow is not None and dtype_bytes(dtype, (devices - 1) * rows * columns) < LONG:
        return Sequential(f"one behind the other: {slow}, and would wait for the copies")
    cut = "" if parts == 1 else f", in {parts} parts"
    about = f"one kernel, gather_matmul({said(tiles)}), beside copies of each device's rows to all{cut}"
    return Pair(
        second,
        region.steps,
        axis,
        prepare,
        kernel,
        tuple(before),
        (),
        MappingProxyType(shardings),
        frozenset({gathered}),
        frozenset(),
        about,
    )
