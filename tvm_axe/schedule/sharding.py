"""shard and all_reduce: the devices of a mesh axis share the iterations of a loop, or the terms of a sum."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import BIND
from tvm_axe.analysis.blocks import NestedBlock, reads_of
from tvm_axe.analysis.patterns import REDUCE, SPATIAL, iterator_at, summed
from tvm_axe.analysis.sharing import bound_axis, bound_loops, driven_by, root_of
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.schedule import query


@query.all_or_nothing
def shard(
    sch: s_tir.Schedule, loop: LoopRV, axis: str, mesh: Mesh, block: SBlockRV | None = None
) -> tuple[LoopRV, LoopRV] | tuple[SBlockRV, SBlockRV]:
    """Share `loop`'s iterations between the devices of the mesh axis `axis`, in contiguous pieces.

    A data-parallel loop is split and its outer half bound: each device computes its own piece of the result. A
    reduction loop is split and ``rfactor``-ed: each device computes a *partial* of the whole result, and the block
    is left to sum the partials over the devices, an all-reduce. ::

        for i, j, k in T.grid(M, N, K):            for i, j in T.grid(M, N):
            C[i, j] += A[i, k] * W[k, j]               for k_0 in T.serial(n, annotations={"axe.bind": "tp"}):
                                                           for k_1 in range(K // n):
                                           ->                  C_rf[k_0, i, j] += A[i, k_0 * .. + k_1] * W[..]
                                                   for i, j in T.grid(M, N):
                                                       for k_0 in T.serial(n, annotations={"axe.bind": "tp"}):
                                                           C[i, j] += C_rf[k_0, i, j]

    An extent that the axis doesn't divide is shared in pieces of ``ceil(extent / n)``; the last one is masked
    (``T.where``).

    Valid when `loop` is a loop of the block that is not bound yet and drives data-parallel iterators or a reduction,
    not both; the block is not shared over `axis` in that role; and, for a reduction, no iteration is masked and every
    device has some.

    Leaves ``axe.bind`` on the loop over the devices.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule; only stock instructions are recorded in its trace.
    loop : LoopRV
        A loop of one block, not bound yet. `Schedule`'s method also takes a block, one of its loops and the axis:
        ``sch.shard("mm", "k", "tp")``.
    axis : str
        A mesh axis.
    mesh : Mesh
        Says how many devices `axis` has.
    block : SBlockRV, optional
        The block to act on; needed only where `loop` encloses several.

    Returns
    -------
    (device, local) : tuple[LoopRV, LoopRV]
        The bound loop and the device's own, for a data-parallel loop.
    (partial, reduce) : tuple[SBlockRV, SBlockRV]
        The block that computes the partials and the all-reduce, for a reduction loop.

    Raises
    ------
    ScheduleError
        If the mesh has no such axis; `loop` is no loop of the block; the block is already bound to the axis or the
        loop to another, or reduced over it to one device; or a device would have no iteration of a reduction, and so no
        partial.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.lower import lower
    >>> from tvm_axe.programs import PROGRAMS
    >>> mlp = PROGRAMS["mlp"](axe.Mesh({"tp": 2}))
    >>> sch = axe.Schedule(mlp.func, mesh=mlp.mesh)
    >>> partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "tp")
    >>> [sch.get(loop).loop_var.name for loop in sch.get_loops(reduce)]
    ['i', 'k_0', 'j']
    >>> print(sch.get(sch.get_loops(reduce)[1]).annotations)
    {"axe.bind": "tp"}
    >>> lower(sch.mod["main"], sch.mesh).notation
    'MM-AR-C'
    """
    if block is None:
        query.given(sch, loop, "shard")
        block = query.sole_block(sch, loop, "shard")
    query.given(sch, block, "shard")
    return shard_loop(sch, loop, axis, mesh, block)


def shard_loop(
    sch: s_tir.Schedule, loop: LoopRV, axis: str, mesh: Mesh, block: SBlockRV
) -> tuple[LoopRV, LoopRV] | tuple[SBlockRV, SBlockRV]:
    """Share a loop of `block` as `shard` does, as a part of another primitive."""
    size = axis_size(mesh, axis, "shard")
    name = query.name_of(sch, block)
    stmt = query.loop_of_block(sch, block, loop, "shard")
    if isinstance(stmt.extent, tirx.IntImm) and int(stmt.extent) < 1:
        raise ScheduleError(
            f"shard: block {name!r}: loop {stmt.loop_var.name!r} has no iterations, as an extent of a buffer is 0; "
            "valid is a loop that has some"
        )
    if bound_axis(stmt) is not None:
        raise ScheduleError(
            f"shard: block {name!r}: loop {stmt.loop_var.name!r} is already bound to {bound_axis(stmt)!r}; "
            "shard a loop that isn't"
        )
    nest = query.nest_of(sch, block)
    kinds = {iv.iter_type for iv in driven_by(nest, stmt)}
    reduction = kinds == {REDUCE}
    if not reduction and REDUCE in kinds:
        raise ScheduleError(
            f"shard: block {name!r}: loop {stmt.loop_var.name!r} drives a reduction and a data-parallel iterator; "
            "split it so that it drives one of them"
        )
    if root_of(nest.block) is not None and axis in bound_loops(nest, REDUCE):
        raise ScheduleError(
            f"shard: block {name!r} is reduced over {axis!r} to one device, which holds all of it (split_collective's "
            "root); valid is another axis, or to split the collective without a root"
        )
    # The partials of a reduction are data-parallel over the devices, so the axis must be free in both roles.
    for role, kind in (("data-parallel", SPATIAL), ("reduction", REDUCE)):
        if (reduction or kind == SPATIAL) and axis in bound_loops(nest, kind):
            raise ScheduleError(
                f"shard: block {name!r} already has a {role} loop bound to {axis!r}; a block is shared over an "
                "axis once"
            )
    if reduction:
        _check_one_fold(nest, name)
    if reduction and not _tvm.has_partials(nest.block.body.buffer.dtype):
        raise ScheduleError(
            f"shard: block {name!r} reduces to bool, which upstream's rfactor can't take apart; valid is another loop "
            "of it, or the maximum of an int8 buffer"
        )
    if reduction:
        _check_every_device_works(nest, stmt, axis, size)
    device, local = query.checked("shard", name, lambda: sch.split(loop, [size, None]))
    sch.annotate(device, BIND, axis)
    if not reduction:
        return device, local
    return query.checked("shard", name, lambda: sch.rfactor(device, 0)), block


def _check_one_fold(nest: NestedBlock, name: str) -> None:
    """Check that a reduction is of one buffer, and reads of that what it sums into alone."""
    if not isinstance(nest.block.body, tirx.BufferStore):
        raise ScheduleError(
            f"shard: block {name!r} reduces into several buffers at once, whose partials nothing combines; valid is a "
            "block for each: the maximum, say, and behind it the least index at which it is"
        )
    buffer = nest.block.body.buffer
    if any(region.source.same_as(buffer) for region in reads_of(nest.block)):
        raise ScheduleError(
            f"shard: block {name!r} also reads elements of {buffer.name!r} that it doesn't sum into, as of a step "
            "before, and upstream's rfactor takes no such reduction apart; valid is a block that reduces into a buffer "
            "of its own, from which another copies"
        )


@query.all_or_nothing
def all_reduce(sch: s_tir.Schedule, loop: LoopRV, axis: str, mesh: Mesh, block: SBlockRV | None = None) -> SBlockRV:
    """Have a sum over a dimension that counts the devices be an all-reduce: each device holds one of its terms. ::

        for i, k in T.grid(N, n):                  for i in range(N):
            s[i] += g[k, i]                 ->         for k in T.serial(n, annotations={"axe.bind": "dp"}):
                                                           s[i] += g[k, i]

    An input that is read so lies sharded on that dimension (the gradients of data-parallel training, say); nothing
    has to be declared.

    Valid when the loop's block sums one load, or a cast of it, of which the loop alone is an index, the loop has as
    many iterations as `axis` has devices, and neither loop nor block is bound to the axis.

    Leaves ``axe.bind`` on the loop.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    loop : LoopRV
        A reduction loop with as many iterations as the axis has devices, not bound yet. `Schedule`'s method also takes
        a block, one of its loops and the axis: ``sch.all_reduce("sum", "k", "dp")``.
    axis : str
        A mesh axis.
    mesh : Mesh
        Says how many devices `axis` has.
    block : SBlockRV, optional
        The block to act on; needed only where `loop` encloses several.

    Returns
    -------
    block : SBlockRV
        The block that is the all-reduce: the one that was given, annotated.

    Raises
    ------
    ScheduleError
        If the mesh has no such axis; the loop's block doesn't sum one load, whose index the loop alone is, over it (a
        cast of the load is fine); the number of iterations isn't that of the devices; or loop or block are bound.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.lower import lower
    >>> from tvm_axe.programs import PROGRAMS
    >>> sgd = PROGRAMS["sgd"](axe.Mesh({"dp": 2}))
    >>> sch = axe.Schedule(sgd.func, mesh=sgd.mesh)
    >>> block = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[-1], "dp")
    >>> lower(sch.mod["main"], sch.mesh).notation
    'AR-C'
    """
    size = axis_size(mesh, axis, "all_reduce")
    query.given(sch, loop, "all_reduce")
    block = query.sole_block(sch, loop, "all_reduce") if block is None else block
    name, nest = query.name_of(sch, block), query.nest_of(sch, block)
    stmt = query.loop_of_block(sch, block, loop, "all_reduce")
    if bound_axis(stmt) is not None:
        raise ScheduleError(
            f"all_reduce: block {name!r}: loop {stmt.loop_var.name!r} is already bound to {bound_axis(stmt)!r}; "
            "a loop is shared over one axis"
        )
    if not isinstance(stmt.extent, tirx.IntImm) or int(stmt.extent) != size:
        raise ScheduleError(
            f"all_reduce: block {name!r}: loop {stmt.loop_var.name!r} has {stmt.extent} iterations and {axis!r} has "
            f"{size} devices; valid is a loop over the devices, one term on each"
        )
    driven = [iv for iv in nest.block.iter_vars if nest.bound[iv.var].same_as(stmt.loop_var)]
    term = summed(nest.block)
    if size > 1 and (
        len(driven) != 1
        or driven[0].iter_type != REDUCE
        or term is None
        or sum(driven[0].var.same_as(index) for index in term.indices) != 1
    ):
        raise ScheduleError(
            f"all_reduce: block {name!r} does not sum one term a device over loop {stmt.loop_var.name!r}; valid is "
            "s[..] += x[.., k, ..] with k the loop's iterator; share any other reduction with shard"
        )
    for kind in (SPATIAL, REDUCE):
        if axis in bound_loops(nest, kind):
            raise ScheduleError(f"all_reduce: block {name!r} has a loop bound to {axis!r} already")
    sch.annotate(loop, BIND, axis)
    return block


def shard_dims(sch: s_tir.Schedule, copy: SBlockRV, dims: Mapping[str, int], mesh: Mesh) -> None:
    """Share dimensions of a copy, each driven by one loop still, over mesh axes: `dims` has that of each axis."""
    for axis, dim in dims.items():
        stmt = query.nest_of(sch, copy).block
        iterator = iterator_at(stmt, stmt.body.indices, dim)
        loop = None if iterator is None else query.loop_of(sch, copy, iterator)
        if loop is None:
            raise ScheduleError(
                f"shard: block {query.name_of(sch, copy)!r}: dimension {dim} of the copy is not driven by one loop; "
                "schedule what is communicated before the copy's loops are transformed"
            )
        device, _ = shard_loop(sch, loop, axis, mesh, copy)
        assert isinstance(device, LoopRV)
        query.outermost(sch, copy, device)


def axis_size(mesh: Mesh, axis: str, primitive: str) -> int:
    """Return how many devices `axis` has; an error of `primitive` if the mesh has no such axis."""
    if axis not in mesh.names:
        raise ScheduleError(f"{primitive}: the mesh has no axis {axis!r}; its axes are {', '.join(mesh.names)}")
    return mesh.axis_size(axis)


def _check_every_device_works(nest: NestedBlock, stmt: tirx.For, axis: str, size: int) -> None:
    name = str(nest.block.name_hint)
    # rfactor leaves the mask out of the block that sums, and a device may have no unmasked iteration.
    if nest.mask is not None:
        raise ScheduleError(
            f"shard: block {name!r}: its iterations are masked ({nest.mask}), and a reduction is shared before that: "
            "shard it before its other loops, or split them in pieces that divide"
        )
    if not isinstance(stmt.extent, tirx.IntImm):
        raise ScheduleError(
            f"shard: block {name!r}: its loop {stmt.loop_var.name!r} runs over {stmt.extent}; a reduction is shared "
            "over a number of iterations"
        )
    extent = int(stmt.extent)
    piece = -(-extent // size)
    if piece * (size - 1) >= extent:
        raise ScheduleError(
            f"shard: block {name!r}: a reduction of {extent} in pieces of {piece} leaves a device of {axis!r} "
            f"({size}) without a partial to sum; use an axis of at most {-(-extent // piece)}"
        )
