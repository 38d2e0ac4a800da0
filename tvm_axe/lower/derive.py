"""Derive collectives: communication follows from the layout that data is written in and the layout it is read in.

================================================= ======================================================
a stage                                           is
================================================= ======================================================
that touches its own device's data only           local
whose one block sums partials, result replicated  an all-reduce
whose one block sums partials, result sharded     a reduce-scatter
whose one block copies sharded to replicated      an all-gather
that does any of these beside computing           a mesh kernel: it reads and writes the peers' slabs itself
================================================= ======================================================

Anything else that reads what its device doesn't own, or writes a slice of what all devices hold, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from tvm import DataType, tirx

from ..errors import LowerError
from ..schedule.query import is_copy, is_sum
from .infer import Sharding
from .program import Access, Block, Program, Stage

LOCAL, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, MESH_KERNEL = (
    "local",
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "mesh kernel",
)


@dataclass(frozen=True, eq=False)
class Step:
    """One stage with what it is.

    `pulled` and `pushed` are the buffers whose peers' slabs it reads and writes; `bytes` what one device moves to or
    from its peers. `source`, `target` and `dim` (scattered or gathered) are those of a plain collective.
    """

    stage: Stage
    kind: str
    axis: str | None
    bytes: int | float
    pulled: frozenset[tirx.Buffer]
    pushed: frozenset[tirx.Buffer]
    source: tirx.Buffer | None = None
    target: tirx.Buffer | None = None
    dim: int | None = None

    @property
    def name(self) -> str:
        return self.stage.name


def derive_steps(program: Program, shardings: Mapping[tirx.Buffer, Sharding]) -> list[Step]:
    """What each stage of `program` is, given where its buffers live.

    Raises
    ------
    LowerError
        If a block outside a collective reads or writes what its device doesn't own.
    """
    return [_derive(program, stage, shardings) for stage in program.stages]


def remote_axis(access: Access, sharding: Sharding) -> str | None:
    """The mesh axis over which `access` leaves its device's own piece of a sharded dimension."""
    axes = [sharding.axes[dim] for dim in sharding.axes if not sharding.holds(access, dim)]
    if len(axes) > 1:
        raise LowerError(
            f"an access to {access.buffer.name!r} leaves its device's piece of {len(axes)} dimensions "
            f"({', '.join(axes)}); gather one dimension at a time"
        )
    return axes[0] if axes else None


def push_axis(access: Access, sharding: Sharding) -> str | None:
    """The mesh axis over whose devices a store must be repeated: each stores a slice of what all of them hold."""
    axes = [axis for dim, (axis, _) in access.blocked.items() if dim not in sharding.axes]
    return axes[0] if access.is_write and axes else None


def _derive(program: Program, stage: Stage, shardings: Mapping[tirx.Buffer, Sharding]) -> Step:
    pulled: set[tirx.Buffer] = set()
    pushed: set[tirx.Buffer] = set()
    axes: set[str] = set()
    moved = Fraction(0)
    for block in stage.blocks:
        for access, axis in _crossings(block, shardings):
            size = program.mesh.axis_size(axis)
            axes.add(axis)
            (pushed if access.is_write else pulled).add(access.buffer)
            # A pull reads one slab in `size` from itself; a push repeats the store for each of the other devices.
            share = Fraction(size - 1, 1 if access.is_write else size)
            moved += share * _elements(block, program) * _itemsize(access.buffer)
    _check_one_phase(stage, pulled, pushed, shardings)
    if not axes:
        return Step(stage, LOCAL, None, 0, frozenset(), frozenset())
    if len(axes) > 1:
        raise LowerError(f"stage {stage.name!r} communicates over {' and '.join(sorted(axes))}; one axis a stage")
    axis = axes.pop()
    plain = _plain_collective(stage, axis, shardings) if len(stage.blocks) == 1 else None
    if plain is None:
        return Step(stage, MESH_KERNEL, axis, _number(moved), frozenset(pulled), frozenset(pushed))
    kind, source, target, dim = plain
    size = program.mesh.axis_size(axis)
    whole = prod(shardings[target].shape) * _itemsize(target)
    share = Fraction((2 if kind == ALL_REDUCE else 1) * (size - 1), size) * whole
    # The engine's all-reduce and all-gather leave each device's result in all peers' slabs.
    pushes = frozenset() if kind == REDUCE_SCATTER else frozenset({target})
    pulls = frozenset() if kind == ALL_GATHER else frozenset({source})
    return Step(stage, kind, axis, _number(share), pulls, pushes, source, target, dim)


def _check_one_phase(
    stage: Stage, pulled: set[tirx.Buffer], pushed: set[tirx.Buffer], shardings: Mapping[tirx.Buffer, Sharding]
) -> None:
    """No barrier stands within a stage, so nothing that it writes may also be read from or pushed to a peer in it."""
    for block in stage.blocks:
        for access in block.accesses:
            crosses = remote_axis(access, shardings[access.buffer]) or push_axis(access, shardings[access.buffer])
            if (access.is_write and access.buffer in pulled) or (access.buffer in pushed and not crosses):
                raise LowerError(
                    f"stage {stage.name!r}: block {block.name!r} touches {access.buffer.name!r}, which the same kernel "
                    "exchanges with its peers; the two need a barrier between them: leave one out of fuse_collective"
                )


def _crossings(block: Block, shardings: Mapping[tirx.Buffer, Sharding]) -> Iterator[tuple[Access, str]]:
    """The accesses of `block` that reach other devices, with the mesh axis; an error where none is allowed."""
    statement = block.realize.block
    for access in block.accesses:
        sharding = shardings[access.buffer]
        remote, push = remote_axis(access, sharding), push_axis(access, sharding)
        if remote is None and push is None:
            continue
        if sharding.memory is not None:
            raise LowerError(
                f"block {block.name!r} exchanges {access.buffer.name!r} with other devices, and axe.layouts says where "
                f"its elements lie in memory ({sharding.memory}); exchange row-major slabs, and lay out a copy"
            )
        if access.is_write and remote is not None:
            raise LowerError(
                f"block {block.name!r} writes more of {access.buffer.name!r} than its device holds "
                f"({sharding.layout}); shard its loops over {remote!r} too, or declare the buffer replicated"
            )
        if push is not None and not is_copy(statement):
            raise LowerError(
                f"block {block.name!r} computes a slice over {push!r} of {access.buffer.name!r}, which every device "
                "holds whole; put a gather behind it (sch.cache_write, as reorder_collective does) or declare it so"
            )
        if remote is not None and not (is_copy(statement) or block.peer_dims(access, remote)):
            raise LowerError(
                f"block {block.name!r} reads {access.buffer.name!r} across {remote!r}, where each device owns a share "
                f"({sharding.layout}), outside a collective; gather it first, or shard the block's loops alike"
            )
        axis = remote or push
        assert axis is not None
        yield access, axis


def _plain_collective(
    stage: Stage, axis: str, shardings: Mapping[tirx.Buffer, Sharding]
) -> tuple[str, tirx.Buffer, tirx.Buffer, int | None] | None:
    """(kind, source, target, dim) if the stage's one block is a whole collective and nothing else."""
    block = stage.blocks[0]
    statement = block.realize.block
    target, target_sharding = statement.body.buffer, shardings[statement.body.buffer]
    spatial = [iv for iv in statement.iter_vars if iv.iter_type == tirx.IterVar.DataPar]
    whole = [int(iv.dom.extent) for iv in spatial] == list(target_sharding.shape)
    if not whole or not all(iv.var.same_as(index) for iv, index in zip(spatial, statement.body.indices)):
        return None
    source = block.reads[0].buffer
    source_sharding = shardings[source]
    scattered = [dim for dim, other in target_sharding.axes.items() if other == axis]
    if is_sum(statement) and len(source_sharding.partial) == 1 and len(block.reads) == 1:
        indices = [i for d, i in enumerate(_whole_indices(block)) if d not in source_sharding.partial]
        same = len(indices) == len(spatial) and all(iv.var.same_as(i) for iv, i in zip(spatial, indices))
        others = len(source_sharding.axes) > 1 or len(target_sharding.axes) > len(scattered)
        if not same or others:
            return None
        return (REDUCE_SCATTER, source, target, scattered[0]) if scattered else (ALL_REDUCE, source, target, None)
    gathered = [dim for dim, other in source_sharding.axes.items() if other == axis]
    if is_copy(statement) and len(gathered) == 1 and not scattered and source_sharding.shape == target_sharding.shape:
        return (ALL_GATHER, source, target, gathered[0]) if len(source_sharding.axes) == 1 else None
    return None


def _whole_indices(block: Block) -> list[tirx.Expr]:
    """The indices of a sum's one foreign load, in the block's own iterators."""
    store = block.realize.block.body
    load = store.value.b if store.value.a.source.same_as(store.buffer) else store.value.a
    return list(load.indices)


def _elements(block: Block, program: Program) -> Fraction:
    """Iterations of `block` on one device, on the average of the devices that share it."""
    shared = prod(program.mesh.axis_size(axis) for axis in block.device)
    return Fraction(prod(int(iv.dom.extent) for iv in block.realize.block.iter_vars), shared)


def _itemsize(buffer: tirx.Buffer) -> int:
    return DataType(buffer.dtype).itemsize


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
