"""fuse_collective: stages under one mesh-bound nest become one kernel on mesh tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_axe.analysis.annotations import BIND
from tvm_axe.analysis.blocks import NestedBlock, covers, ranges_of, stays_in
from tvm_axe.analysis.order import begins_first, reads_its_iteration, unfinished_loop
from tvm_axe.analysis.patterns import REDUCE, SPATIAL, is_copy, is_pointwise
from tvm_axe.analysis.sharing import bound_loops, driven_by, root_of, sharded_dims
from tvm_axe.analysis.tree import BlockTree, is_one_of
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

    A chain behind an all-reduce that isn't split is computed whole on each device, which adds up the peers' terms
    itself.

    Valid when a data-parallel loop binds the first block to a mesh axis, or it is an all-reduce; each later block reads
    what an earlier one writes on the same device and is bound to the same axes or none, no block outside the chain lies
    between, and no mask cuts a block beyond its iterators' domains.

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
        reads what was computed before the chain. Behind an all-reduce, the outermost loop.

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
    tree, nests = query.tree(sch), [query.nest_of(sch, block) for block in blocks]
    bound = bound_loops(nests[0], SPATIAL)
    if not bound and (not bound_loops(nests[0], REDUCE) or root_of(nests[0].block) is not None):
        raise ScheduleError(
            f"fuse_collective: block {query.name_of(sch, blocks[0])!r} is not bound to a mesh axis by a data-parallel "
            "loop; valid is a first block that is, such as the reduce-scatter of split_collective, or an all-reduce"
        )
    for index, nest in enumerate(nests[1:], 1):
        _check_link(tree, nest, nests[:index], set(bound))
    for nest in nests:
        _check_mask(nest)
    follows = [all(is_one_of(other, nests[:n]) for other in tree.producers(nest)) for n, nest in enumerate(nests)]
    device, row = _nest(sch, blocks[0])
    for index, block in enumerate(blocks[1:], 1):
        own = query.bound_loops(sch, block, SPATIAL)
        if set(own) == set(bound) and not follows[index]:
            # Upstream moves a block behind all of its producers or none. This one has some before the chain (a residual
            # that an earlier stage computed, say), so its nest takes the chain in instead.
            device, row = _nest(sch, block)
            for earlier in reversed(blocks[:index]):
                _move_into(sch, earlier, row)
        else:
            name = query.name_of(sch, block)
            query.checked("fuse_collective", name, functools.partial(sch.reverse_compute_at, block, row))
    _check_finished(sch, blocks)
    return device


def _move_into(sch: s_tir.Schedule, block: SBlockRV, row: LoopRV) -> None:
    """Compute `block` below `row`; its loops over the peers are new ones then, and bound as the old ones were."""
    nest = query.nest_of(sch, block)
    peers = {axis: driven_by(nest, loop)[0].var for axis, loop in bound_loops(nest, REDUCE).items()}
    query.checked("fuse_collective", str(nest.block.name_hint), lambda: sch.compute_at(block, row))
    for axis, iterator in peers.items():
        loop = query.loop_of(sch, block, iterator)
        if loop is not None:  # on an axis of one device there is none
            sch.annotate(loop, BIND, axis)
            innermost = sch.get_loops(block)[-1]
            if not sch.get(innermost).same_as(sch.get(loop)):
                sch.reorder(loop, innermost)


def _check_link(tree: BlockTree, block: NestedBlock, before: Sequence[NestedBlock], axes: set[str]) -> None:
    """Check that `block` follows from the blocks `before` it, and from no other that comes after the first of them."""
    name, chain = str(block.block.name_hint), ", ".join(other.block.name_hint for other in before)
    producers = tree.producers(block)
    if is_one_of(block, before):
        raise ScheduleError(f"fuse_collective: block {name!r} is named twice; name each block once, in program order")
    if not any(is_one_of(producer, before) for producer in producers):
        missing = [each for each in producers if any(is_one_of(other, before) for other in tree.producers(each))]
        through = f"; {str(missing[0].block.name_hint)!r} does, and {name!r} reads it: name it too" if missing else ""
        raise ScheduleError(
            f"fuse_collective: block {name!r} reads nothing that {chain} write; valid is a chain in which each block "
            f"follows from an earlier one{through}"
        )
    for producer in producers:
        if not is_one_of(producer, before):
            continue
        gathers = axes and is_copy(producer.block) and not axes & set(sharded_dims(producer))
        if gathers or bound_loops(block, REDUCE):
            raise ScheduleError(
                f"fuse_collective: block {name!r} reads what {producer.block.name_hint!r} has on all the devices, "
                "which takes a barrier between the two, and a kernel has none; fuse up to there, and from there on"
            )
    for producer in producers:
        if not is_one_of(producer, before) and not tree.precedes(producer, before[0]):
            outside = str(producer.block.name_hint)
            follows = any(is_one_of(other, before) for other in tree.producers(producer))
            raise ScheduleError(
                f"fuse_collective: {'a cycle: ' if follows else ''}block {outside!r} lies between "
                f"{before[0].block.name_hint!r} and {name!r}, which reads it, and is not fused; "
                f"{_remedy_for(producer, follows)}"
            )
    others = set(bound_loops(block, SPATIAL)) - axes
    if others:
        raise ScheduleError(
            f"fuse_collective: block {name!r} is bound to {', '.join(sorted(others))}, the nest to "
            f"{', '.join(sorted(axes)) or 'no axis'}; blocks of one kernel are bound to the same axes"
        )


def _remedy_for(block: NestedBlock, follows: bool) -> str:
    """Return what helps where a block lies between those of a chain."""
    if follows:
        return "fuse it too"
    if is_pointwise(block.block):
        return "inline it (sch.compute_inline)"
    return "have the function compute it in front of the chain, or fuse up to there"


def _check_mask(nest: NestedBlock) -> None:
    """Check that a mask is that of the iterators' domains: upstream drops its own and makes that one."""
    if nest.mask is None:
        return
    realize, ranges = nest.realize, ranges_of(nest.loops)
    pairs = zip(realize.block.iter_vars, realize.iter_values)
    own = [value < iv.dom.extent for iv, value in pairs if not stays_in(value, iv.dom, ranges)]
    always: tirx.Expr = tirx.IntImm("bool", 1)
    domains = s_tir.SBlockRealize(realize.iter_values, functools.reduce(tirx.all, own, always), realize.block)
    if not (covers(realize, nest.loops) and covers(domains, nest.loops)):
        raise ScheduleError(
            f"fuse_collective: block {nest.block.name_hint!r} is masked ({nest.mask}) beyond its iterators' domains, "
            "as a reduction over an uneven slice is, or a loop of one iteration that is shared; "
            "valid are pieces that divide; or leave the block out of the chain"
        )


def _check_finished(sch: s_tir.Schedule, blocks: Sequence[SBlockRV]) -> None:
    """Check what upstream doesn't where it moves a block: sums begin at their first iteration and are read complete."""
    own = [sch.get(block) for block in blocks]
    fused = [other for other in query.tree(sch).blocks if any(other.block.same_as(block) for block in own)]
    for index, reader in enumerate(fused):
        if not begins_first(reader):
            raise ScheduleError(
                f"fuse_collective: block {reader.block.name_hint!r} would reduce backwards, and take its initial value "
                "in the last iteration, as it reads reversed or rolled what is written in the loops of the chain; "
                "leave it out of the chain"
            )
        for writer in fused[:index]:
            loop = unfinished_loop(writer, reader)
            written = writer.block.body.buffer
            reads = any(region.source.same_as(written) for region in reader.block.reads)
            if loop is None and reads and not reads_its_iteration(writer, reader, written):
                raise ScheduleError(
                    f"fuse_collective: block {reader.block.name_hint!r} would read elements of {written.name!r} that "
                    f"block {writer.block.name_hint!r} writes in another iteration of the loops around both, as what "
                    f"is read rolled, reversed or at an offset is; fuse up to {writer.block.name_hint!r}, and from "
                    f"{reader.block.name_hint!r} on"
                )
            if loop is not None and reads:
                raise ScheduleError(
                    f"fuse_collective: block {reader.block.name_hint!r} would read {written.name!r} in the loop "
                    f"{loop.loop_var.name!r} over which block {writer.block.name_hint!r} still reduces; fuse up to "
                    f"{writer.block.name_hint!r}, and from {reader.block.name_hint!r} on"
                )


def _nest(sch: s_tir.Schedule, block: SBlockRV) -> tuple[LoopRV, LoopRV]:
    """Return the outermost of the block's device loops, and the innermost loop with a row to vectorize below it.

    A block that all devices run whole has no device loop, and its outermost loop stands for it.
    """
    loops, nest = sch.get_loops(block), query.nest_of(sch, block)
    bound, peers = bound_loops(nest, SPATIAL).values(), bound_loops(nest, REDUCE).values()
    devices = [rv for rv, loop in zip(loops, nest.loops) if any(loop.same_as(own) for own in bound)]
    if not devices:
        summing = [rv for rv, loop in zip(loops, nest.loops) if any(loop.same_as(peer) for peer in peers)]
        others = [rv for rv, loop in zip(loops, nest.loops) if not any(loop.same_as(peer) for peer in peers)]
        if summing and len(others) > 1:
            sch.reorder(*summing, others[-1])
        return loops[0] if len(others) < 2 else others[0], others[max(0, len(others) - 2)]
    row = devices[-1]
    for rv, loop in list(zip(loops, nest.loops))[:-1]:
        if any(loop.same_as(peer) for peer in peers):
            break  # the peers go with the row
        row = rv
    return devices[0], row
