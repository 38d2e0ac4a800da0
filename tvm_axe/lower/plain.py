"""Which whole collective of an engine a block is, if it is one and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx

from tvm_axe.analysis.blocks import covers
from tvm_axe.analysis.patterns import is_copy, is_sum, shift_of, summed
from tvm_axe.layout import Mesh
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.pieces import pieces_of
from tvm_axe.lower.program import Block

Plain = tuple[Collective, tirx.Buffer, tirx.Buffer, tuple[int, ...]]


def plain_collective(block: Block, axis: str, shardings: Mapping[tirx.Buffer, Sharding]) -> Plain | None:
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


def gathered_sum(blocks: Sequence[Block], axis: str, shardings: Mapping[tirx.Buffer, Sharding]) -> Plain | None:
    """The all-reduce that two blocks are, of which one scatters a sum over `axis` and the other gathers that."""
    if len(blocks) != 2:
        return None
    first, second = (plain_collective(block, axis, shardings) for block in blocks)
    if first is None or second is None:
        return None
    (scatters, source, total, dims), (gathers, again, target, over) = first, second
    reduces = (scatters, gathers) == (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    return (Collective.ALL_REDUCE, source, target, ()) if reduces and again.same_as(total) and dims == over else None


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
