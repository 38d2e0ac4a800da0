"""split_collective: an all-reduce becomes a reduce-scatter and an all-gather, or a reduce and a broadcast."""

from __future__ import annotations

from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.analysis.annotations import ROOT
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.schedule import query
from tvm_axe.schedule.sharding import shard, shard_dims


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
    drives, and `root`, if given, is the coordinate of a device of its axis.

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
        no device of its axis.

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
    peers, scattered = (query.bound_loops(sch, block, kind) for kind in (query.REDUCE, query.SPATIAL))
    axis = next(iter(peers), None)
    if axis is None or not _folds_one_load(sch.get(block)):
        seen = (
            "it has no reduction loop bound to a mesh axis"
            if axis is None
            else "its body is not a plain sum, product, maximum or minimum"
        )
        raise ScheduleError(
            f"split_collective: block {name!r} is not an all-reduce: {seen} (its loops: "
            f"{query.loop_names(sch, block)}); valid is the block that shard leaves of a reduction"
        )
    if axis in scattered or query.root_of(sch.get(block)) is not None:
        already = f"a reduce-scatter over {axis!r}" if axis in scattered else "a reduce to one device"
        raise ScheduleError(f"split_collective: block {name!r} is not an all-reduce: it is {already} already")
    indices = sch.get(block).body.indices
    if not 0 <= dim < len(indices):
        raise ScheduleError(f"split_collective: block {name!r}: dim is {dim}; its result has {len(indices)} dimensions")
    if root is not None and root not in range(mesh.axis_size(axis)):
        last = mesh.axis_size(axis) - 1
        raise ScheduleError(f"split_collective: block {name!r}: root is {root}; {axis!r} has the devices 0 to {last}")
    others = query.sharded_dims(sch, block)
    gather = query.checked("split_collective", name, lambda: sch.cache_write(block, 0, "global"))
    shard_dims(sch, gather, others, mesh)
    if root is not None:
        sch.annotate(block, ROOT, str(root))
        return block, gather
    iterator = query.iterator_at(sch.get(block), indices, dim)
    row = query.loop_of(sch, block, iterator) if iterator is not None else None
    if row is None:
        raise ScheduleError(
            f"split_collective: block {name!r}: dimension {dim} of its result is not driven by one loop; "
            "split the all-reduce before its loops are transformed"
        )
    device, _ = shard(sch, row, axis, mesh, block)
    # Peers outside the innermost loop only: sums run along a row, one peer's slab at a time.
    bound = [sch.get(loop) for loop in (device, peers[axis])]
    own = [loop for loop in sch.get_loops(block) if not any(sch.get(loop).same_as(other) for other in bound)]
    query.checked("split_collective", name, lambda: sch.reorder(device, *own[:-1], peers[axis], own[-1]))
    return block, gather


def _folds_one_load(block: s_tir.SBlock) -> bool:
    """Whether the block is ``C[..] = C[..] op x[..]``, or that with a cast of the load, for an op that may be in turn."""
    store = block.body
    if block.init is None or not isinstance(store.value, tirx.Add | tirx.Mul | tirx.Max | tirx.Min):
        return False
    terms = [term.value if isinstance(term, tirx.Cast) else term for term in (store.value.a, store.value.b)]
    own = [isinstance(term, ir.TensorLoad) and term.source.same_as(store.buffer) for term in terms]
    return all(isinstance(term, ir.TensorLoad) for term in terms) and sum(own) == 1
