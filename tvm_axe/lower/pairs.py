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

If what a device makes of its rows is gathered, its rows are counted too, and copied to all in the same groups.

A schedule says it as on cores: `overlap` of the two stages, with as many chunks as there shall be groups of columns.
The product has the parameters of the tile kernel that was chosen for it, or the defaults. Whatever is no such pair
stays in chunks, and `pair_of` says why.

The kernel waits for flags alone, which copy engines and streams set, so it may fill the processors. Of each run all
flags are waited for and all copies joined, so that a device which clears its words for the next run, and then meets the
others, clears no flag of that run, and nobody writes what a peer may still read: nothing is there twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tvm import tirx
from tvm.target import Target

from tvm_axe.analysis.expressions import alike
from tvm_axe.analysis.patterns import is_pointwise, is_sum, summed
from tvm_axe.errors import ScheduleError, TileError
from tvm_axe.lower.derive import LOCAL, MESH_KERNEL, Step
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.localize import OWN
from tvm_axe.lower.pairing import (
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
from tvm_axe.tile.kernels.pairs import column_groups, gather_matmul, matmul_scatter

__all__ = ["Pair", "makes_pairs", "pair_of"]


@dataclass(frozen=True, eq=False)
class Pair:
    """What each device does for a region.

    Attributes
    ----------
    product : Step
        The step of the region that is the product; the other is the collective's.
    axis : str
        The mesh axis over which the two communicate.
    prepare, kernel : Launch
        What clears the words, and the product.
    before, after : tuple of SideStep
        The steps of the side stream that are told before the product, and behind it.
    shardings : Mapping[Buffer, Sharding]
        Of the buffers that it has beside the program's; they are named.
    exchanged : frozenset of Buffer
        The program's intermediates of which peers write slabs.
    about : str
        What it is, in words.
    """

    product: Step
    axis: str
    prepare: Launch
    kernel: Launch
    before: tuple[SideStep, ...]
    after: tuple[SideStep, ...]
    shardings: Mapping[tirx.Buffer, Sharding]
    exchanged: frozenset[tirx.Buffer]
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
) -> Pair | str:
    """Return the pair that a region is, or why it is none.

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
        if len(steps) == 2 and steps[0].kind == LOCAL and steps[1].kind == MESH_KERNEL:
            return _scattered(region)
        if len(steps) == 2 and steps[0].kind == MESH_KERNEL and steps[1].kind == LOCAL:
            return _gathered(region)
    except (Unfit, ScheduleError, TileError) as error:
        return str(error)
    return "they are not a product before a reduce-scatter, or behind an all-gather"


def _scattered(region: Region) -> Pair:
    """A product before a reduce-scatter, with what is computed of its slices, and before an all-gather of that."""
    first, second = region.steps
    axis, devices = second.axis, 0 if second.axis is None else region.mesh.axis_size(second.axis)
    assert axis is not None  # it is a mesh kernel
    scatter, *others = second.stage.blocks
    partial, total = scatter.reads[0].buffer, scatter.writes[0].buffer
    load = summed(scatter.realize.block) if is_sum(scatter.realize.block) else None
    if load is None or not alike(list(load.indices)[1:], list(scatter.realize.block.body.indices)):
        raise Unfit(f"block {scatter.name!r} is no sum over the devices of {axis}")
    region.check_inside(partial)
    if region.shardings[partial].partial != {0}:
        raise Unfit(f"{partial.name} isn't a term of the sum on each device")
    region.check_pieces(partial, {0: axis})
    region.check_shares(total, axis)
    gather = others.pop() if others and second.pushed else None
    if len(others) > 1 or any(not is_pointwise(block.realize.block) for block in others):
        raise Unfit(f"{', '.join(block.name for block in others)}: valid is one pointwise block behind the sum")
    result = others[0].writes[0].buffer if others else total
    if others:
        region.check_shares(result, axis)
        region.check_private(total)
    if gather is not None:
        region.check_gathers(gather, result, axis)
        region.check_private(result)
    out = result if gather is None else gather.writes[0].buffer
    found = product_of_step(region, first, partial, total)
    product, (m, n, k) = found.product, found.product.shape[1:]
    for buffer in (partial, out):
        region.check_columns(buffer, n)
    rows, dtype, out_dtype = m // devices, str(product.a.dtype), str(out.dtype)
    if str(partial.dtype) != dtype:
        raise Unfit(f"partial sums are {partial.dtype}, and tensor cores add those of the operands' type, {dtype}")
    tiles = tiles_of(region.target, found, unit=True)
    recipe = matmul_scatter(
        devices, m, n, k, dtype, out_dtype, product.transpose_b, gather is not None, groups=region.chunks, **tiles
    )
    tensors = {"A": found.a, "B": found.b, "mine": partial, "out": out}
    if others:
        recipe = with_block(recipe, region.local(second), others[0], axis, tensors)
    groups, wide = column_groups(n, tiles["block_n"], region.chunks)
    side = tiles["block_n" if product.transpose_b else "block_m"]
    made = {
        "arrived": region.buffer(f"{region.program.names[partial]}_arrived", (devices, rows, n), dtype),
        "words": region.buffer(f"{region.program.names[partial]}_words", (2, devices, groups), "int32"),
        "unit": region.buffer(f"{region.program.names[partial]}_unit", (side, side), dtype),
    }
    tensors |= {name: buffer for name, (buffer, _) in made.items()}
    shardings = dict(made.values())
    after = _sent(tensors, axis, devices, rows, n, tiles, groups, wide, gather is not None)
    prepare, kernel = (launch(region, each, tensors, shardings, axis) for each in recipe.programs)
    kept = "" if gather is None else ", each device's rows are copied to all"
    about = f"one kernel, matmul_scatter({said(tiles)}), beside copies in {groups} groups of columns{kept}"
    exchanged = frozenset({partial})
    return Pair(first, axis, prepare, kernel, (), after, MappingProxyType(shardings), exchanged, about)


def _sent(
    tensors: Mapping[str, tirx.Buffer],
    axis: str,
    devices: int,
    rows: int,
    n: int,
    tiles: Mapping[str, int],
    groups: int,
    wide: int,
    gathers: bool,
) -> tuple[SideStep, ...]:
    """The copies of groups of columns to their owners, nearest behind first, then of the own rows to all."""
    mine, arrived, words, out = (tensors[name] for name in ("mine", "arrived", "words", "out"))
    found = []
    down, across = -(-rows // tiles["block_m"]), -(-n // tiles["block_n"])
    for shift in [*range(1, devices), *([0] if gathers else [])]:
        for group in range(groups):
            first, stop = group * wide, min(across, (group + 1) * wide)
            columns = (first * tiles["block_n"], min(n, stop * tiles["block_n"]))
            found.append(SideStep("axe.wait_count", ((words, OWN),), (shift, group, down * (stop - first))))
            if shift:
                found.append(SideStep("axe.copy", ((mine, OWN), (arrived, axis)), (rows, shift, shift, *columns)))
                found.append(SideStep("axe.flag", ((words, axis),), (shift, group)))
                continue
            for peer in range(1, devices):
                found.append(SideStep("axe.copy", ((out, OWN), (out, axis)), (rows, 0, peer, *columns)))
    return tuple(found)


def _gathered(region: Region) -> Pair:
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
        region.check_private(main.writes[0].buffer)
    if any(access.buffer.same_as(gathered) for block in epilogues for access in block.reads):
        raise Unfit(f"block {epilogues[0].name!r} reads {gathered.name} too")
    product, (m, n, k) = found.product, found.product.shape[1:]
    dtype, out_dtype = str(product.a.dtype), str(out.dtype)
    tiles = tiles_of(region.target, found, unit=False)
    recipe = gather_matmul(devices, m, n, k, dtype, out_dtype, product.transpose_b, **tiles)
    tensors = {"own": source, "B": found.b, "gathered": gathered, "C": out}
    if epilogues:
        recipe = with_block(recipe, region.local(second), epilogues[0], axis, tensors)
    words, sharding = region.buffer(f"{region.program.names[gathered]}_words", (2, devices, 1), "int32")
    tensors["words"], shardings = words, {words: sharding}
    *lines, columns = region.shardings[source].slab
    rows = math.prod(lines)
    before = []
    for shift in range(devices - 1, 0, -1):  # the device in front of this one takes these rows first
        before.append(SideStep("axe.copy", ((source, OWN), (gathered, axis)), (rows, 0, shift, 0, columns)))
        before.append(SideStep("axe.flag", ((words, axis),), (shift, 0)))
    prepare, kernel = (launch(region, each, tensors, shardings, axis) for each in recipe.programs)
    about = f"one kernel, gather_matmul({said(tiles)}), beside copies of each device's rows to all"
    exchanged = frozenset({gathered})
    return Pair(second, axis, prepare, kernel, tuple(before), (), MappingProxyType(shardings), exchanged, about)
