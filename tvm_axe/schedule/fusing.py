"""fuse_collective: stages under one mesh-bound nest become one kernel on mesh tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import BIND
from tvm_axe.analysis.blocks import covers
from tvm_axe.analysis.order import unfinished_loop
from tvm_axe.errors import ScheduleError
from tvm_axe.schedule import query


@query.all_or_nothing
def fuse_collective(sch: s_tir.Schedule, blocks: Sequence[SBlockRV]) -> LoopRV:
    """Put the chain `blocks` under the mesh-bound nest of the first: one kernel that reads and writes the peers. ::

        for i_0 (bind "tp"), i_1: reduce C_global       for i_0 in T.serial(n, annotations={"axe.bind": "tp"}):
        for i_0 (bind "tp"), i_1: out_global = f(..)        for i_1 in range(M // n):
        for i, j: out = out_global                  ->          C_global[i, :] = sum of the peers' C_rf[:, i, :]
                                                                out_global[i, :] = f(C_global[i, :], bias[:])
                                                                out[i, :] = out_global[i, :]

    (CoCoNet, section 3.3, "fuse".)

    Valid when a data-parallel loop binds the first block to a mesh axis, each later block reads what an earlier one
    writes on the same device and is bound to the same axes or none, no block outside the chain lies between, and no
    mask cuts a block beyond its iterators' domains.

    Leaves no annotation of its own; those of the blocks' loops stay.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    blocks : Sequence[SBlockRV]
        The chain in program order; each block after the first reads what an earlier one writes.

    Returns
    -------
    device : LoopRV
        The (outermost) mesh-bound loop that now encloses them all: the first block's, or that of a block which also
        reads what was computed before the chain.

    Raises
    ------
    ScheduleError
        If there are fewer than two blocks; the first is not bound to a mesh axis, or a later one is to others; a
        block doesn't follow from an earlier one; a block outside the chain lies between (a cycle); or one is masked
        beyond its iterators' domains, as a sum over an uneven slice is.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.lower import lower
    >>> from tvm_axe.programs import PROGRAMS
    >>> mlp = PROGRAMS["mlp"](axe.Mesh({"tp": 2}))
    >>> sch = axe.Schedule(mlp.func, mesh=mlp.mesh)
    >>> partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "tp")
    >>> scatter, gather = sch.split_collective(reduce)
    >>> epi = sch.get_sblock("epi")
    >>> (gather,) = sch.reorder_collective(gather, [epi])
    >>> device = sch.fuse_collective([scatter, epi, gather])
    >>> lower(sch.mod["main"], sch.mesh).notation
    'MM-fuse(RS-C-AG)'
    """
    for block in blocks:
        query.given(sch, block, "fuse_collective")
    if len(blocks) < 2:
        raise ScheduleError(f"fuse_collective: a chain of at least two blocks is fused; got {len(blocks)}")
    bound = query.bound_loops(sch, blocks[0], query.SPATIAL)
    if not bound:
        raise ScheduleError(
            f"fuse_collective: block {query.name_of(sch, blocks[0])!r} is not bound to a mesh axis by a data-parallel "
            "loop; valid is a first block that is, such as the reduce-scatter of split_collective"
        )
    for index, block in enumerate(blocks[1:], 1):
        _check_link(sch, block, blocks[:index], set(bound))
    for block in blocks:
        _check_mask(sch, block)
    device, nest = _nest(sch, blocks[0], bound)
    for index, block in enumerate(blocks[1:], 1):
        own = query.bound_loops(sch, block, query.SPATIAL)
        before = all(query.among(sch, other, blocks[:index]) for other in sch.get_producers(block))
        if set(own) == set(bound) and not before:
            # Upstream moves a block behind all of its producers or none. This one has some before the chain (a residual
            # that an earlier stage computed, say), so its nest takes the chain in instead.
            device, nest = _nest(sch, block, own)
            for earlier in reversed(blocks[:index]):
                _move_into(sch, earlier, nest)
        else:
            name = query.name_of(sch, block)
            query.checked("fuse_collective", name, functools.partial(sch.reverse_compute_at, block, nest))
    _check_finished(sch, blocks)
    return device


def _move_into(sch: s_tir.Schedule, block: SBlockRV, nest: LoopRV) -> None:
    """Compute `block` below `nest`; its loops over the peers are new ones then, and bound as the old ones were."""
    name = query.name_of(sch, block)
    peers = {
        axis: next(iv.var for iv, value in query.bindings(sch, block) if query.uses(value, sch.get(loop).loop_var))
        for axis, loop in query.bound_loops(sch, block, query.REDUCE).items()
    }
    query.checked("fuse_collective", name, lambda: sch.compute_at(block, nest))
    for axis, iterator in peers.items():
        loop = query.loop_of(sch, block, iterator)
        if loop is not None:  # on an axis of one device there is none
            sch.annotate(loop, BIND, axis)
            row = sch.get_loops(block)[-1]
            if not sch.get(row).same_as(sch.get(loop)):
                sch.reorder(loop, row)


def _check_link(sch: s_tir.Schedule, block: SBlockRV, before: Sequence[SBlockRV], axes: set[str]) -> None:
    """Check that `block` follows from the blocks `before` it, and from no other that comes after the first of them."""
    name, chain = query.name_of(sch, block), ", ".join(query.name_of(sch, other) for other in before)
    producers = sch.get_producers(block)
    if query.among(sch, block, before):
        raise ScheduleError(f"fuse_collective: block {name!r} is named twice; name each block once, in program order")
    if not any(query.among(sch, producer, before) for producer in producers):
        raise ScheduleError(
            f"fuse_collective: block {name!r} reads nothing that {chain} write; valid is a chain in which each block "
            "follows from an earlier one"
        )
    for producer in producers:
        if not query.among(sch, producer, before):
            continue
        gathers = query.is_copy(sch.get(producer)) and not axes & set(query.sharded_dims(sch, producer))
        if gathers or query.bound_loops(sch, block, query.REDUCE):
            raise ScheduleError(
                f"fuse_collective: block {name!r} reads what {query.name_of(sch, producer)!r} has on all the devices, "
                "which takes a barrier between the two, and a kernel has none; fuse up to there, and from there on"
            )
    for producer in producers:
        if not query.among(sch, producer, before) and not query.precedes(sch, producer, before[0]):
            outside = query.name_of(sch, producer)
            follows = any(query.among(sch, other, before) for other in sch.get_producers(producer))
            raise ScheduleError(
                f"fuse_collective: {'a cycle: ' if follows else ''}block {outside!r} lies between "
                f"{query.name_of(sch, before[0])!r} and {name!r}, which reads it, and is not fused; "
                f"{'fuse it too' if follows else 'inline it (sch.compute_inline)'}"
            )
    others = set(query.bound_loops(sch, block, query.SPATIAL)) - axes
    if others:
        raise ScheduleError(
            f"fuse_collective: block {name!r} is bound to {', '.join(sorted(others))}, the nest to "
            f"{', '.join(sorted(axes))}; blocks of one kernel are bound to the same axes"
        )


def _check_mask(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Check that a mask is that of the iterators' domains: upstream drops its own and makes that one."""
    mask, loops = query.predicate(sch, block), [sch.get(loop) for loop in sch.get_loops(block)]
    if mask is not None and not covers(_tvm.block_realize(sch, block), loops):
        raise ScheduleError(
            f"fuse_collective: block {query.name_of(sch, block)!r} is masked ({mask}) beyond its iterators' domains, "
            "as a reduction over an uneven slice is; valid are pieces that divide; or leave the block out of the chain"
        )


def _check_finished(sch: s_tir.Schedule, blocks: Sequence[SBlockRV]) -> None:
    """Check that no block reads a sum over which a loop around both still runs; upstream moves it there."""
    own = [sch.get(block) for block in blocks]
    fused = [other for other in query.nested(sch) if any(other.block.same_as(block) for block in own)]
    for index, reader in enumerate(fused):
        for writer in fused[:index]:
            loop = unfinished_loop(writer, reader)
            written = writer.block.body.buffer
            if loop is not None and any(region.source.same_as(written) for region in reader.block.reads):
                raise ScheduleError(
                    f"fuse_collective: block {reader.block.name_hint!r} would read {written.name!r} in the loop "
                    f"{loop.loop_var.name!r} over which block {writer.block.name_hint!r} still reduces; fuse up to "
                    f"{writer.block.name_hint!r}, and from {reader.block.name_hint!r} on"
                )


def _nest(sch: s_tir.Schedule, block: SBlockRV, bound: Mapping[str, LoopRV]) -> tuple[LoopRV, LoopRV]:
    """Return the outermost of the block's device loops, and the innermost loop with a row to vectorize below it."""
    loops = sch.get_loops(block)
    devices = [loop for loop in loops if any(sch.get(loop).same_as(sch.get(own)) for own in bound.values())]
    peers = [sch.get(loop) for loop in query.bound_loops(sch, block, query.REDUCE).values()]
    nest = devices[-1]
    for loop in loops[:-1]:
        if any(sch.get(loop).same_as(peer) for peer in peers):
            break  # the peers go with the row
        nest = loop
    return devices[0], nest
