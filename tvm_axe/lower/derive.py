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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from tvm_axe.analysis.annotations import INSERTED
from tvm_axe.analysis.blocks import covers
from tvm_axe.analysis.expressions import uses
from tvm_axe.analysis.patterns import is_copy, is_sum, shift_of, summed
from tvm_axe.collective import ALL, SLAB
from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.exchange import Exchange
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.pieces import pieces_of
from tvm_axe.lower.program import Access, Block, ScheduledProgram, ScheduledStage
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


GATHER, HOLD, APART, RELAY, WIDEN = "gather", "hold", "compute apart", "relay", "widen"


class Unowned(LowerError):
    """A block that touches, outside a collective, what its device doesn't own.

    Attributes
    ----------
    block : SBlock
        The block, as it stands in the function.
    buffer : Buffer
        What it touches.
    remedy : str
        What would have it touch its own: to gather the buffer first; to hold a copy of it; or to compute apart, into a
        buffer that its iterators index; to relay a parameter that isn't in contiguous pieces, by a copy that is; to
        widen terms to the type of their sum, ahead of it (`tvm_axe.lower.inserting`).
    """

    def __init__(self, message: str, block: Block, access: Access, remedy: str) -> None:
        super().__init__(message)
        self.block, self.buffer, self.remedy = block.realize.block, access.buffer, remedy


class Entangled(LowerError):
    """Blocks of one nest that can't be one kernel.

    Attributes
    ----------
    block : SBlock
        One of them, as it stands in the function.
    """

    def __init__(self, message: str, block: Block) -> None:
        super().__init__(message)
        self.block = block.realize.block


def remote_axes(access: Access, sharding: Sharding) -> list[str]:
    """The mesh axes over which `access` leaves its device's own piece of a sharded dimension."""
    axes = [axis for dim, cut in enumerate(sharding.cuts) for axis in cut[sharding.held(access, dim) :]]
    return axes + ([sharding.root[0]] if sharding.root is not None and not access.is_write else [])


def remote_axis(access: Access, sharding: Sharding) -> str | None:
    """The one of `remote_axes`, or None: `derive_steps` refuses an access with several."""
    return next(iter(remote_axes(access, sharding)), None)


def push_axes(access: Access, sharding: Sharding) -> list[str]:
    """The mesh axes over whose devices a store must be repeated: each stores a slice of what all of them hold."""
    return sorted(access.shared.difference(sharding.axes)) if access.is_write else []


def push_axis(access: Access, sharding: Sharding) -> str | None:
    """The one of `push_axes`, or None: `derive_steps` refuses an access with several."""
    return next(iter(push_axes(access, sharding)), None)


def _derive(program: ScheduledProgram, stage: ScheduledStage, shardings: Mapping[tirx.Buffer, Sharding]) -> Step:
    touched = [shardings[access.buffer] for block in stage.blocks for access in block.accesses]
    if any(not each.in_pieces or (stage.inserted and each.memory is not None) for each in touched):
        return _exchange(stage, shardings)
    pulled: set[tirx.Buffer] = set()
    pushed: set[tirx.Buffer] = set()
    axes: set[str] = set()
    crossings: list[tuple[Block, Access, str]] = []
    for block in stage.blocks:
        for access, axis in _crossings(block, shardings):
            axes.add(axis)
            (pushed if access.is_write else pulled).add(access.buffer)
            crossings.append((block, access, axis))
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
    whole = len(stage.blocks) == 1 and stage.overlap is None  # chunks are exchanged by kernels
    plain = _plain_collective(stage.blocks[0], axis, shardings) if whole else None
    if plain is None:
        _check_held_by_all(stage, pulled, shardings)
        moved = received_in_kernel(program, crossings, shardings)
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


def _crossings(block: Block, shardings: Mapping[tirx.Buffer, Sharding]) -> Iterator[tuple[Access, str]]:
    """The accesses of `block` that reach other devices, with the mesh axis; an error where none is allowed."""
    statement = block.realize.block
    for access in block.accesses:
        sharding = shardings[access.buffer]
        left, repeated = remote_axes(access, sharding), push_axes(access, sharding)
        if len(left) > 1:
            raise Unowned(
                f"block {block.name!r}: an access to {access.buffer.name!r} leaves its device's piece of {len(left)} "
                f"dimensions ({', '.join(left)}); gather one dimension at a time",
                block,
                access,
                HOLD if access.is_write else GATHER,
            )
        if len(repeated) > 1:
            raise Unowned(
                f"block {block.name!r}: a store to {access.buffer.name!r} is of its device's piece of {len(repeated)} "
                f"dimensions ({', '.join(repeated)}) of what all devices hold; gather one dimension at a time",
                block,
                access,
                APART,
            )
        remote, push = remote_axis(access, sharding), push_axis(access, sharding)
        if remote is None and push is None:
            continue
        if sharding.memory is not None:
            raise Unowned(
                f"block {block.name!r} exchanges {access.buffer.name!r} with other devices, and axe.layouts says where "
                f"its elements lie in memory ({sharding.memory}); exchange row-major slabs, and lay out a copy",
                block,
                access,
                RELAY,
            )
        if access.is_write and remote is not None:
            raise Unowned(
                f"block {block.name!r} writes more of {access.buffer.name!r} than its device holds "
                f"({sharding.layout}); shard its loops over {remote!r} too, or declare the buffer replicated",
                block,
                access,
                HOLD,
            )
        if push is not None and push not in (axis for pieces in access.pieces.values() for axis, _ in pieces):
            raise Unowned(
                f"block {block.name!r} is shared over {push!r}, and where it stores into {access.buffer.name!r} "
                f"({', '.join(map(str, statement.body.indices))}) is not seen to be a contiguous piece of a dimension "
                "for each device, which every device holds whole; shard another loop, or compute into a buffer that is "
                "indexed by the block's iterators and copy that (sch.reindex)",
                block,
                access,
                APART,
            )
        if push is not None and not is_copy(statement):
            raise Unowned(
                f"block {block.name!r} computes a slice over {push!r} of {access.buffer.name!r}, which every device "
                "holds whole; put a gather behind it (sch.cache_write, as reorder_collective does) or declare it so",
                block,
                access,
                APART,
            )
        reads_peers = sharding.root is None and (
            bool(block.peer_dims(access, remote or "")) or _peer_index(block, access, sharding) is not None
        )
        halo = INSERTED in statement.annotations and remote in access.shared
        if remote is not None and not (is_copy(statement) or reads_peers or halo):
            raise Unowned(
                f"block {block.name!r} reads {access.buffer.name!r} across {remote!r}, where each device owns a share "
                f"({sharding.layout}), outside a collective; gather it first, or shard the block's loops alike",
                block,
                access,
                GATHER,
            )
        axis = remote or push
        assert axis is not None
        yield access, axis


def _peer_index(block: Block, access: Access, sharding: Sharding) -> tirx.Expr | None:
    """The coordinate of the one peer that `access` reads, in terms of the device's own; None if there are several."""
    for dim, cut in enumerate(sharding.cuts):
        if len(cut) == 1 and not sharding.holds(access, dim) and sharding.piece(dim) == 1:
            index = access.indices[dim]
            local = [iterator.local.var for iterator in block.iterators if iterator.local is not None]
            if not any(uses(index, var) for var in local):
                return index
    return None


Plain = tuple[Collective, tirx.Buffer, tirx.Buffer, tuple[int, ...]]


def _plain_collective(block: Block, axis: str, shardings: Mapping[tirx.Buffer, Sharding]) -> Plain | None:
    """(kind, source, target, arguments) if `block` is a whole collective over `axis` and nothing else."""
    statement = block.realize.block
    target, written = statement.body.buffer, shardings[statement.body.buffer]
    spatial = [iv for iv in statement.iter_vars if iv.iter_type == tirx.IterVar.DataPar]
    whole = [int(iv.dom.extent) for iv in spatial] == list(written.shape)
    if not whole or not all(iv.var.same_as(index) for iv, index in zip(spatial, statement.body.indices)):
        return None
    if not covers(block.realize, block.loops):  # the engine moves all of it
        return None
    source = block.reads[0].buffer
    read = shardings[source]
    if read.memory is not None or written.memory is not None:  # engines move row-major slabs
        return None
    # A sum over more than the devices adds each term more than once.
    if len(block.reads) != 1 or len(read.partial) > 1 or len(statement.iter_vars) != len(spatial) + len(read.partial):
        return None
    # Dimensions of the slabs, in which a source has none that counts terms.
    sharded = [cut for dim, cut in enumerate(read.cuts) if dim not in read.partial]
    extents = [extent for dim, extent in enumerate(read.shape) if dim not in read.partial]
    gathered = _shared_last(sharded, extents, axis, read.mesh)
    scattered = _shared_last(written.cuts, written.shape, axis, read.mesh)
    if gathered is None or scattered is None or _without(sharded, axis) != _without(written.cuts, axis):
        return None
    if written.partial and (gathered or scattered):  # the slabs then have not the same dimensions
        return None
    if is_sum(statement) and read.partial and not gathered and extents == list(written.shape):
        indices = [i for d, i in enumerate(_whole_indices(block)) if d not in read.partial]
        if len(indices) != len(spatial) or not all(iv.var.same_as(i) for iv, i in zip(spatial, indices)):
            return None
        if written.root is not None and not scattered:
            return Collective.REDUCE, source, target, (written.root[1],)
        return Collective.REDUCE_SCATTER if scattered else Collective.ALL_REDUCE, source, target, scattered
    if read.partial or read.shape != written.shape:
        return None
    if is_copy(statement) and read.root is not None and written.root is None and not (gathered or scattered):
        return Collective.BROADCAST, source, target, (read.root[1],)
    if is_copy(statement) and gathered:
        return (Collective.ALL_TO_ALL if scattered else Collective.ALL_GATHER), source, target, gathered + scattered
    shift = shift_of(statement)
    if shift is not None and gathered == scattered == (0,) and read.shape[0] == read.mesh.axis_size(axis):
        return Collective.SEND, source, target, (shift,)
    return None


def _without(cuts: Sequence[tuple[str, ...]], axis: str) -> list[tuple[str, ...]]:
    return [tuple(other for other in cut if other != axis) for cut in cuts]


def _shared_last(
    cuts: Sequence[tuple[str, ...]], shape: Sequence[int], axis: str, mesh: Mesh
) -> tuple[int, ...] | None:
    """The dimension that `axis` shares, none or one, where its devices' pieces make up one piece of the axes before it.

    None where they don't: they are not the minor ones, or the pieces of the others end within one of theirs.
    """
    found = tuple(dim for dim, cut in enumerate(cuts) if axis in cut)
    for dim in found:
        *before, last = pieces_of(shape[dim], cuts[dim], mesh)
        if last[0] != axis or tuple(before) != pieces_of(shape[dim], cuts[dim][:-1], mesh):
            return None
    return found


def _whole_indices(block: Block) -> list[tirx.Expr]:
    """The indices of a sum's one foreign load, in the block's own iterators."""
    load = summed(block.realize.block)
    assert load is not None
    return list(load.indices)
