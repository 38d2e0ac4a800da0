"""split_collective: an all-reduce becomes a reduce-scatter and an all-gather, or a reduce and a broadcast."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.analysis.annotations import ROOT
from tvm_axe.analysis.patterns import REDUCE, SPATIAL, folded, iterator_at
from tvm_axe.analysis.sharing import bound_loops, driving_loop, root_of, sharded_dims
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.schedule import query
from tvm_axe.schedule.caching import cached
from tvm_axe.schedule.sharding import shard_dims, shard_loop


@query.all_or_nothing
def split_collective(
    sch: s_tir.Schedule, block: SBlockRV, mesh: Mesh, dim: int = 0, root: int | None = None
) -> tuple[SBlockRV, SBlockRV]:
    """Split the all-reduce `block`, of a sum, product, maximum or minimum, into a scatter along `dim` and a gather. ::

        for i, j in T.grid(M, N):                  for i_0 in T.serial(n, annotations={"axe.bind": "tp"}):
            for k_0 in T.serial(n, bind "tp"):         for i_1 in range(M // n):
                C[i, j] += C_rf[k_0, i, j]                 for k_0 in T.serial(n, annotations={"axe.bind": "tp"}):
                                            ->                 for j in range(N):
                                                                   C_global[i_0 * .. + i_1, j] += C_rf[k_0, .., j]
                                                   for i, j in T.grid(M, N):
                                                       C[i, j] = C_global[i, j]

    With `root`, into a reduce to that device (the sum is annotated ``axe.root``) and the broadcast from it: the same
    copy, of a buffer that one device holds. (CoCoNet, section 3.1, "split".)

    Valid when `block` is an all-reduce that was not split before, `dim` is a dimension of its result that one loop
    drives, and `root`, if given, is the coordinate of a device of its axis. A parameter must be written in a contiguous
    piece of each dimension.

    Leaves ``axe.bind`` on the loop over the slices, or ``axe.root`` on the block that reduces.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    block : SBlockRV
        The all-reduce that `shard` or `all_reduce` left.
    mesh : Mesh
        The mesh that the block is bound to.
    dim : int
        The dimension of the result that is scattered.
    root : int, optional
        The coordinate of the device that reduces, for a reduce and a broadcast.

    Returns
    -------
    (scatter, gather) or (reduce, broadcast) : tuple[SBlockRV, SBlockRV]
        The block that sums, now on slices or on one device, and the copy that gives every device the result.

    Raises
    ------
    ScheduleError
        If `block` is not an all-reduce, `dim` is not a dimension of its result or not driven by one loop, or `root` is
        no device of its axis; or the gather would take more of a parameter than the block stores to.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.lower import lower
    >>> from tvm_axe.programs import PROGRAMS
    >>> mlp = PROGRAMS["mlp"](axe.Mesh({"tp": 2}))
    >>> sch = axe.Schedule(mlp.func, mesh=mlp.mesh)
    >>> partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "tp")
    >>> scatter, gather = sch.split_collective(reduce)
    >>> lower(sch.mod["main"], sch.mesh).notation
    'MM-RS-AG-C'
    """
    query.given(sch, block, "split_collective")
    name = query.name_of(sch, block)
    nest = query.nest_of(sch, block)
    peers, scattered = bound_loops(nest, REDUCE), bound_loops(nest, SPATIAL)
    axis = next(iter(peers), None)
    if axis is None or folded(nest.block) is None:
        seen = (
            "it has no reduction loop bound to a mesh axis"
            if axis is None
            else "its body is not a plain sum, product, maximum or minimum"
        )
        raise ScheduleError(
            f"split_collective: block {name!r} is not an all-reduce: {seen} (its loops: "
            f"{query.loop_names(nest)}); valid is the block that shard leaves of a reduction"
        )
    if axis in scattered or root_of(nest.block) is not None:
        already = f"a reduce-scatter over {axis!r}" if axis in scattered else "a reduce to one device"
        raise ScheduleError(f"split_collective: block {name!r} is not an all-reduce: it is {already} already")
    indices = nest.block.body.indices
    if not 0 <= dim < len(indices):
        raise ScheduleError(f"split_collective: block {name!r}: dim is {dim}; its result has {len(indices)} dimensions")
    if root is not None and root not in range(mesh.axis_size(axis)):
        last = mesh.axis_size(axis) - 1
        raise ScheduleError(f"split_collective: block {name!r}: root is {root}; {axis!r} has the devices 0 to {last}")
    iterator = iterator_at(nest.block, indices, dim)
    row = None if iterator is None else driving_loop(nest, iterator)
    if root is None and row is None:
        raise ScheduleError(
            f"split_collective: block {name!r}: dimension {dim} of its result is not driven by one loop; "
            "split the all-reduce before its loops are transformed"
        )
    others = sharded_dims(nest)
    gather = cached(sch, block, "split_collective")
    shard_dims(sch, gather, others, mesh)
    if row is None or root is not None:
        sch.annotate(block, ROOT, str(root))
        return block, gather
    device, _ = shard_loop(sch, query.loop_rv(sch, block, row), axis, mesh, block)
    # Peers outside the innermost loop only: sums run along a row, one peer's slab at a time.
    nest = query.nest_of(sch, block)
    ends = (bound_loops(nest, SPATIAL)[axis], bound_loops(nest, REDUCE)[axis])
    loops = list(zip(sch.get_loops(block), nest.loops))
    peer = next(loop for loop, stmt in loops if stmt.same_as(ends[1]))
    own = [loop for loop, stmt in loops if not any(stmt.same_as(end) for end in ends)]
    query.checked("split_collective", name, lambda: sch.reorder(device, *own[:-1], peer, own[-1]))
    return block, gather
