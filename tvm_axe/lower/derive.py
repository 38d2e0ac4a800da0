"""Derive collectives: communication follows from the layout that data is written in and the layout it is read in.

==================================================== ======================================================
a stage                                              is
==================================================== ======================================================
that touches its own device's data only              local
whose one block sums partials, result replicated     an all-reduce
whose one block sums partials, result sharded        a reduce-scatter
whose one block sums partials on one device          a reduce
whose one block copies what one device has to all    a broadcast
whose one block copies sharded to replicated         an all-gather
whose one block copies sharded to sharded otherwise  an all-to-all
whose one block copies, shifted along a mesh axis    a send
that does any of these beside computing              a mesh kernel: it reads and writes the peers' slabs itself
whose one block copies a whole parameter that lies   an exchange
in another way than contiguous pieces, or to one
==================================================== ======================================================

Anything else that reads what its device doesn't own, or writes a slice of what all devices hold, is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tvm import tirx

from tvm_axe.analysis.blocks import covers
from tvm_axe.analysis.patterns import is_copy, is_sum, summed
from tvm_axe.collective import ALL, SLAB
from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.exchange import Exchange
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.plain import gathered_sum, plain_collective
from tvm_axe.lower.program import Access, Block, ScheduledProgram, ScheduledStage
from tvm_axe.lower.reaching import APART, GATHER, RELAY, WIDEN, Entangled, Unowned, crossings, push_axis, remote_axis
from tvm_axe.lower.traffic import received_in_collective, received_in_kernel

LOCAL, MESH_KERNEL, EXCHANGE = "local", "mesh kernel", "exchange"


@dataclass(frozen=True, eq=False)
class Step:
    """One stage with what it is.

    `pulled` and `pushed` are the buffers whose peers' slabs it reads and writes; `received` the bytes that each device
    receives of its peers (`tvm_axe.lower.traffic`). `source`, `target` and `arguments` (what the engine is told beside:
    dimensions, a shift, a root) are those of a plain collective; `source` and `target`
    also of an `exchange`.
    """

    stage: ScheduledStage
    kind: str
    axis: str | None
    received: tuple[int, ...]
    pulled: frozenset[tirx.Buffer]
    pushed: frozenset[tirx.Buffer]
    source: tirx.Buffer | None = None
    target: tirx.Buffer | None = None
    arguments: tuple[int, ...] = ()
    exchange: Exchange | None = None

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def bytes(self) -> int:
        """What the busiest device receives of its peers."""
        return max(self.received)


def derive_steps(
    program: ScheduledProgram,
    shardings: Mapping[tirx.Buffer, Sharding],
    apart: Collection[str] = (),
) -> list[Step]:
    """What each stage of `program` is, given where its buffers live.

    Parameters
    ----------
    program : ScheduledProgram
        The program.
    shardings : mapping
        Where its buffers live.
    apart : collection of str
        The mesh axes whose devices don't see each other's memory, so that no kernel indexes its peers' slabs there.

    Raises
    ------
    LowerError
        If a block outside a collective reads or writes what its device doesn't own.
    """
    steps = [_derive(program, stage, shardings) for stage in program.stages]
    for step in steps:
        _check_seen(step, program.mesh, apart)
    return steps


def _derive(program: ScheduledProgram, stage: ScheduledStage, shardings: Mapping[tirx.Buffer, Sharding]) -> Step:
    touched = [shardings[access.buffer] for block in stage.blocks for access in block.accesses]
    if any(not each.in_pieces or (stage.inserted and each.memory is not None) for each in touched):
        return _exchange(stage, shardings)
    pulled: set[tirx.Buffer] = set()
    pushed: set[tirx.Buffer] = set()
    axes: set[str] = set()
    crossing: list[tuple[Block, Access, str]] = []
    for block in stage.blocks:
        for access, axis in crossings(block, shardings):
            axes.add(axis)
            (pushed if access.is_write else pulled).add(access.buffer)
            crossing.append((block, access, axis))
    _check_one_phase(stage, pulled, pushed, shardings)
    if not axes:
        return Step(stage, LOCAL, None, (0,) * program.mesh.size, frozenset(), frozenset())
    if len(axes) > 1:
        raise _apart_from(
            stage,
            f"stage {stage.name!r} communicates over {' and '.join(sorted(axes))}; one axis a stage",
            pulled,
            GATHER,
        )
    axis = axes.pop()
    plain = None
    if stage.overlap is None and len(stage.blocks) == 1:  # chunks are exchanged by kernels
        plain = plain_collective(stage.blocks[0], axis, shardings)
    elif stage.sequential:
        plain = gathered_sum(stage.blocks, axis, shardings)
    if plain is None:
        _check_held_by_all(stage, pulled, shardings)
        moved = received_in_kernel(program, crossing, shardings)
        return Step(stage, MESH_KERNEL, axis, moved, frozenset(pulled), frozenset(pushed))
    kind, source, target, arguments = plain
    dtype = str(target.dtype)
    moved = received_in_collective(kind, shardings[source], shardings[target], arguments, axis, dtype)
    # The engine's all-reduce and all-gather leave each device's result in all peers' slabs.
    pushes = frozenset({target}) if kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER) else frozenset()
    pulls = frozenset() if kind == Collective.ALL_GATHER else frozenset({source})
    return Step(stage, kind, axis, moved, pulls, pushes, source, target, arguments)


def _check_seen(step: Step, mesh: Mesh, apart: Collection[str]) -> None:
    """Check that no kernel indexes slabs of peers whose memory its device doesn't see."""
    axes = mesh.names if step.axis == ALL else () if step.axis is None else (step.axis,)
    unseen = [axis for axis in axes if axis in apart]
    if not unseen or step.kind not in (MESH_KERNEL, EXCHANGE):
        return
    message = (
        f"stage {step.name!r} is a kernel that indexes the slabs of its peers over {', '.join(unseen)}, where devices "
        "don't see each other's memory; leave that axis to devices that do, or its collectives unfused"
    )
    if step.kind == EXCHANGE:
        raise LowerError(message)
    (block, *others), pulled = step.stage.blocks, set(step.pulled)
    load = None if others or is_sum(block.realize.block) else summed(block.realize.block)
    casts = load is not None and load.source in pulled
    remedy = WIDEN if casts else GATHER if pulled else APART
    raise _apart_from(step.stage, message, pulled or set(step.pushed), remedy)


def _exchange(stage: ScheduledStage, shardings: Mapping[tirx.Buffer, Sharding]) -> Step:
    """The exchange that a stage is which touches a parameter that isn't in contiguous pieces; an error if it's none."""
    block = stage.blocks[0]
    whole = len(stage.blocks) == 1 and not block.device and not block.peers and stage.overlap is None
    if not (whole and is_copy(block.realize.block) and covers(block.realize, block.loops)):
        access = next(a for b in stage.blocks for a in b.accesses if not shardings[a.buffer].in_pieces)
        block = next(b for b in stage.blocks if access in b.accesses)
        raise Unowned(
            f"block {block.name!r} touches {access.buffer.name!r}, which axe.layouts declares as "
            f"{shardings[access.buffer].layout}: no contiguous pieces of its dimensions, row-major on each device; "
            'declare it so, or compile with redistribute="insert", which copies it',
            block,
            access,
            RELAY,
        )
    source, target = block.reads[0].buffer, block.writes[0].buffer
    exchange = Exchange(shardings[source].holding, shardings[target].holding)
    axis, pulled = (None, frozenset[tirx.Buffer]()) if exchange.view == SLAB else (exchange.view, frozenset({source}))
    moved = exchange.received(str(source.dtype))
    return Step(stage, EXCHANGE, axis, moved, pulled, frozenset(), source, target, exchange=exchange)


def _check_one_phase(
    stage: ScheduledStage, pulled: set[tirx.Buffer], pushed: set[tirx.Buffer], shardings: Mapping[tirx.Buffer, Sharding]
) -> None:
    """No barrier stands within a stage, so nothing that it writes may also be read from or pushed to a peer in it."""
    for block in stage.blocks:
        for access in block.accesses:
            crosses = remote_axis(access, shardings[access.buffer]) or push_axis(access, shardings[access.buffer])
            if (access.is_write and access.buffer in pulled) or (access.buffer in pushed and not crosses):
                raise _apart_from(
                    stage,
                    f"stage {stage.name!r}: block {block.name!r} touches {access.buffer.name!r}, which the same kernel "
                    "exchanges with its peers; the two need a barrier between them: leave one out of fuse_collective",
                    pushed,
                    APART,
                )


def _check_held_by_all(
    stage: ScheduledStage, pulled: set[tirx.Buffer], shardings: Mapping[tirx.Buffer, Sharding]
) -> None:
    """A kernel finds its peers' data by where it belongs, and what one device holds belongs to nobody."""
    for buffer in pulled:
        root = shardings[buffer].root
        if root is not None:
            raise _apart_from(
                stage,
                f"stage {stage.name!r} reads {buffer.name!r}, which device {root[1]} of {root[0]!r} alone holds, and "
                "does more than broadcast it; leave the broadcast out of fuse_collective",
                {buffer},
                GATHER,
            )


def _apart_from(stage: ScheduledStage, message: str, buffers: set[tirx.Buffer], remedy: str) -> LowerError:
    """What is wrong with a stage: that its blocks are together, or what its one block does with one of `buffers`."""
    (block, *others) = stage.blocks
    if others:
        return Entangled(message, block)
    writes = remedy == APART
    found = [access for access in block.accesses if access.buffer in buffers and access.is_write == writes]
    return Unowned(message, block, found[0], remedy) if found else LowerError(message)
