"""reorder_collective: an all-gather moves behind its consumers, which then compute on slices."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.analysis.blocks import NestedBlock
from tvm_axe.analysis.patterns import REDUCE, SPATIAL, iterator_at, loads_of
from tvm_axe.analysis.sharing import bound_loops, driving_loop, sharded_dims
from tvm_axe.analysis.tree import BlockTree, is_one_of
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.schedule import query
from tvm_axe.schedule.caching import cached
from tvm_axe.schedule.sharding import shard_dims, shard_loop


@query.all_or_nothing
def reorder_collective(
    sch: s_tir.Schedule, gather: SBlockRV, consumers: Sequence[SBlockRV], mesh: Mesh
) -> list[SBlockRV]:
    """Move the all-gather `gather` behind `consumers`: each computes on slices, and what leaves them is gathered. ::

        for i, j in T.grid(M, N):                  for i_0 in T.serial(n, annotations={"axe.bind": "tp"}):
            C[i, j] = C_global[i, j]                   for i_1, j in T.grid(M // n, N):
        for i, j in T.grid(M, N):           ->             out_global[i, j] = f(C_global[i, j], bias[j])
            out[i, j] = f(C[i, j], bias[j])        for i, j in T.grid(M, N):
                                                       out[i, j] = out_global[i, j]

    A consumer that reduces over the gathered dimension (a norm) becomes each device's partial over its slice and an
    all-reduce of those, as `shard` leaves them. (CoCoNet, section 3.2, "reorder".)

    Valid when `gather` is an all-gather, `consumers` has every block that reads what it gathers, and each of them is
    pointwise in the gathered dimension or reduces over it and writes a buffer of its own, a parameter in a contiguous
    piece of each dimension.

    Leaves ``axe.bind`` on each consumer's loop over the devices.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    gather : SBlockRV
        An all-gather: the copy that `split_collective` or an earlier reorder left.
    consumers : Sequence[SBlockRV]
        Every block that reads the gathered buffer and those that go on with their slices, in program order.
    mesh : Mesh
        The mesh that the blocks are bound to.

    Returns
    -------
    gathers : list[SBlockRV]
        One for each buffer that is live out of `consumers`, in their order.

    Raises
    ------
    ScheduleError
        If `gather` is not an all-gather; a reader of the gathered buffer is left out; or a consumer neither is
        pointwise in the gathered dimension nor reduces over it, or updates a buffer in place; or what is gathered is
        more of a parameter than the consumer stores to. The schedule is then as it was.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.lower import lower
    >>> from tvm_axe.programs import PROGRAMS
    >>> mlp = PROGRAMS["mlp"](axe.Mesh({"tp": 2}))
    >>> sch = axe.Schedule(mlp.func, mesh=mlp.mesh)
    >>> partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "tp")
    >>> scatter, gather = sch.split_collective(reduce)
    >>> (gather,) = sch.reorder_collective(gather, [sch.get_sblock("epi")])
    >>> lower(sch.mod["main"], sch.mesh).notation
    'MM-RS-C-AG'
    """
    for block in (gather, *consumers):
        query.given(sch, block, "reorder_collective")
    name = query.name_of(sch, gather)
    axis, dim = query.gathered(sch, gather, "reorder_collective")
    if not consumers:
        raise ScheduleError(
            f"reorder_collective: gather {name!r}: no consumers named; name the blocks to move it behind"
        )
    tree, nests = query.tree(sch), [query.nest_of(sch, block) for block in consumers]
    names = [str(nest.block.name_hint) for nest in nests]
    for reader in tree.consumers(query.nest_of(sch, gather)):
        if not is_one_of(reader, nests):
            raise ScheduleError(
                f"reorder_collective: gather {name!r}: block {reader.block.name_hint!r} reads what it gathers and "
                f"is not among the consumers ({', '.join(names)}); name it too"
            )
    if tree.is_parameter(query.nest_of(sch, gather).block.body.buffer):
        of = query.nest_of(sch, gather).block.body.buffer.name
        raise ScheduleError(
            f"reorder_collective: gather {name!r} leaves the parameter {of!r}, which the caller gets whole; valid is "
            f"the gather of an intermediate. Declare {of!r} sharded (axe.with_layouts) and shard the consumers' loops, "
            "or have the function copy it from an intermediate that the consumers read"
        )
    # Of each buffer, the dimension that is sharded.
    sliced = {query.nest_of(sch, gather).block.body.buffer: dim}
    iterators = []
    for nest in nests:
        iterator, written = _sliced_iterator(nest, sliced, axis)
        iterators.append(iterator)
        if written is not None:
            sliced[nest.block.body.buffer] = written
    live = [nest.block.body.buffer in sliced and _is_live_out(tree, nest, nests) for nest in nests]
    # Inlining the gather makes no block of these another's reader, and none is one no longer.
    going_on = [[is_one_of(reader, tree.consumers(nest)) for reader in nests] for nest in nests]

    query.checked("reorder_collective", name, lambda: sch.compute_inline(gather))
    gathers = []
    for block, iterator, live_out, reads in zip(consumers, iterators, live, going_on):
        loop = query.loop_of(sch, block, iterator)
        if loop is None:
            raise ScheduleError(
                f"reorder_collective: block {query.name_of(sch, block)!r}: its loop over the gathered dimension goes "
                "with that of another consumer, in whose loops it stands; move the gather before blocks are computed "
                "in each other's loops"
            )
        shared = shard_loop(sch, loop, axis, mesh, block)
        if isinstance(shared[0], SBlockRV):  # a reduction: its sum over the devices is nobody's slice
            partial = shared[0]
            device = bound_loops(query.nest_of(sch, partial), SPATIAL)[axis]
            query.outermost(sch, partial, query.loop_rv(sch, partial, device))
            continue
        query.outermost(sch, block, shared[0])
        if live_out:
            own = [reader for reader, is_reader in zip(consumers, reads) if is_reader]
            others = {other: at for other, at in sharded_dims(query.nest_of(sch, block)).items() if other != axis}
            # The consumers go on with the slices; everyone else reads what is gathered.
            gathers.append(cached(sch, block, "reorder_collective", own))
            shard_dims(sch, gathers[-1], others, mesh)
    return gathers


def _sliced_iterator(nest: NestedBlock, sliced: dict[tirx.Buffer, int], axis: str) -> tuple[tirx.Var, int | None]:
    """Return the iterator of a block along the gathered dimension, and the dimension of its result that it indexes.

    That dimension is None where the block reduces over the gathered one.
    """
    stmt = nest.block
    name = str(stmt.name_hint)
    if stmt.init is None and loads_of(stmt, stmt.body.buffer):
        raise ScheduleError(
            f"reorder_collective: consumer {name!r} updates {stmt.body.buffer.name!r} in place, so that it has no "
            "slices to gather; valid is a consumer that writes a buffer of its own"
        )
    found: tirx.Var | None = None
    for buffer, dim in sliced.items():
        for load in loads_of(stmt, buffer):
            if load.source.same_as(stmt.body.buffer):
                continue  # a sum's own running value
            iterator = iterator_at(stmt, load.indices, dim)
            if iterator is None or (found is not None and not iterator.same_as(found)):
                raise ScheduleError(
                    f"reorder_collective: consumer {name!r} is not pointwise in dimension {dim} of {buffer.name!r}: it "
                    f"reads {load}; valid is a consumer that reads its own slice over {axis!r} only, or that reduces "
                    "over it"
                )
            found = iterator
    if found is None:
        raise ScheduleError(
            f"reorder_collective: consumer {name!r} reads nothing that is gathered "
            f"({', '.join(buffer.name for buffer in sliced)}); leave it out"
        )
    reduces = any(iv.var.same_as(found) and iv.iter_type == REDUCE for iv in stmt.iter_vars)
    written = [dim for dim, index in enumerate(stmt.body.indices) if found.same_as(index)]
    if not (written or reduces) or driving_loop(nest, found) is None:
        raise ScheduleError(
            f"reorder_collective: consumer {name!r} is not pointwise in the gathered dimension: its result is not "
            f"written along {found.name!r} by one loop; valid is a consumer that writes the slice that it reads, or "
            "that reduces over it"
        )
    return found, written[0] if written else None


def _is_live_out(tree: BlockTree, block: NestedBlock, consumers: Sequence[NestedBlock]) -> bool:
    """Return whether `block`'s result is a parameter or read by a block that isn't among `consumers`."""
    elsewhere = not all(is_one_of(reader, consumers) for reader in tree.consumers(block))
    return elsewhere or tree.is_parameter(block.block.body.buffer)
