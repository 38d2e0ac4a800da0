"""redistribute: a block reads a buffer in another layout, through a copy that all-gathers or all-to-alls it."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.analysis.sharing import sharded_over
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.schedule import query
from tvm_axe.schedule.sharding import axis_size, shard_dims


@query.all_or_nothing
def redistribute(
    sch: s_tir.Schedule, block: SBlockRV, buffer: str, axis: str, mesh: Mesh, dim: int | None = None
) -> SBlockRV:
    """Have `block` read `buffer` whole, or sharded on another dimension, through a copy in front of it. ::

        for e_0 in T.serial(n, bind "ep"):             for e_0 in T.serial(n, bind "ep"):
            for s, e_1, k in ..:                           for s, e_1 in ..:
                H[s, e, :] += D[s, e, k] * ..   ->             D_global[s, e, :] = D[s, e, :]      (an all-to-all)
                                                       for e_0 in T.serial(n, bind "ep"):
                                                           for s, e_1, k in ..:
                                                               H[s, e, :] += D_global[s, e, k] * ..

    The copy is an all-gather where `dim` is None, else an all-to-all from the dimension that is sharded now to `dim`.

    Valid when `block` reads `buffer`, the buffer is sharded over `axis`, and `dim`, if given, is a dimension of it that
    no axis shares.

    Leaves ``axe.bind`` on the copy's loop over the devices, where the copy is sharded.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    block : SBlockRV
        The block that is to read the buffer so.
    buffer : str
        A buffer that it reads, by name: one whose producer is bound to `axis`, or an input declared sharded over it.
    axis : str
        A mesh axis.
    mesh : Mesh
        Says how many devices `axis` has.
    dim : int, optional
        The dimension that the copy is sharded on.

    Returns
    -------
    copy : SBlockRV
        The block that copies `buffer`: the all-gather or all-to-all.

    Raises
    ------
    ScheduleError
        If the mesh has no such axis, the block doesn't read the buffer, the buffer isn't sharded over the axis, or
        `dim` is not another dimension of it.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.lower import lower
    >>> from tvm_axe.programs import PROGRAMS
    >>> ag_mm = PROGRAMS["ag_mm"](axe.Mesh({"tp": 2}))
    >>> sch = axe.Schedule(ag_mm.func, mesh=ag_mm.mesh)
    >>> mm = sch.get_sblock("mm")
    >>> columns = sch.shard(sch.get_loops(mm)[2], "tp")
    >>> copy = sch.redistribute(mm, "X", "tp")
    >>> lower(sch.mod["main"], sch.mesh).notation
    'AG-MM'
    """
    size = axis_size(mesh, axis, "redistribute")
    query.given(sch, block, "redistribute")
    tree, nest = query.tree(sch), query.nest_of(sch, block)
    name, stmt = query.name_of(sch, block), nest.block
    index = next((i for i, region in enumerate(stmt.reads) if region.source.name == buffer), None)
    if index is None:
        reads = ", ".join(region.source.name for region in stmt.reads)
        raise ScheduleError(f"redistribute: block {name!r} doesn't read {buffer!r}; it reads {reads}")
    source = stmt.reads[index].source
    dims = sharded_over(tree, nest, source, mesh)
    if axis not in dims and size > 1:
        raise ScheduleError(
            f"redistribute: {buffer!r} is not sharded over {axis!r}; valid is a buffer whose producer is bound to it, "
            "or an input that with_layouts declares so"
        )
    if dim is not None and (dim not in range(len(source.shape)) or dim in dims.values()):
        raise ScheduleError(
            f"redistribute: dim is {dim}; valid is a dimension of {buffer!r} (it has {len(source.shape)}) that no axis "
            f"shares yet (shared: {', '.join(map(str, dims.values()))})"
        )
    order = tree.blocks
    reader = next(at for at, other in enumerate(order) if other.block.same_as(stmt))
    for later in order[reader:]:
        if any(region.source.same_as(source) for region in later.block.writes):
            raise ScheduleError(
                f"redistribute: {buffer!r} is written by block {later.block.name_hint!r}, not before {name!r}, and "
                "upstream's cache_read would copy it only then; valid is a buffer that isn't updated later"
            )
    copy = query.checked("redistribute", name, lambda: sch.cache_read(block, index, "global", [block]))
    others = {other: at for other, at in dims.items() if other != axis}
    shard_dims(sch, copy, others if dim is None else others | {axis: dim}, mesh)
    return copy
