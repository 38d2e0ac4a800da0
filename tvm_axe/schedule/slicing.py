"""as_slice: a state tensor stays sharded for good, and its gather goes."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.analysis.annotations import LAYOUTS
from tvm_axe.analysis.sharing import sharded_dims
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import query
from tvm_axe.schedule.sharding import shard_dims


@query.all_or_nothing
def as_slice(sch: s_tir.Schedule, gather: SBlockRV, mesh: Mesh) -> SBlockRV:
    """Leave the parameter that `gather` writes sharded, each device with the slice that it computed. ::

        for i_0 in T.serial(n, bind "dp"):             for i_0 in T.serial(n, bind "dp"):
            for i_1 in range(N // n):                      for i_1 in range(N // n):
                m_out_global[..] = b * m[..] + ..  ->          m_out[..] = b * m[..] + ..
        for i in range(N):
            m_out[i] = m_out_global[i]                 on the block: "axe.layouts.m_out" = "S[(n, N // n) : (1@dp, 1)]"

    For the state of an optimizer: an input that is read on slices only is sharded by itself, so that what one step
    leaves is what the next one takes. (CoCoNet, section 3.2, "asSlice".)

    Valid when `gather` is an all-gather into a parameter that no block reads whole.

    Leaves ``axe.layouts.NAME`` on the block that writes the parameter NAME.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    gather : SBlockRV
        An all-gather into a parameter, as `reorder_collective` leaves it behind a consumer.
    mesh : Mesh
        The mesh that the blocks are bound to.

    Returns
    -------
    block : SBlockRV
        The block that writes the parameter now: the one that computes it, or, where others read the slices too, a copy
        of each device's own slice.

    Raises
    ------
    ScheduleError
        If `gather` is not an all-gather, doesn't write a parameter, or a block reads what it gathers.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.lower import lower
    >>> from tvm_axe.programs import PROGRAMS
    >>> sgd = PROGRAMS["sgd"](axe.Mesh({"dp": 2}))
    >>> sch = axe.Schedule(sgd.func, mesh=sgd.mesh)
    >>> reduce = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[-1], "dp")
    >>> scatter, gather = sch.split_collective(reduce)
    >>> gathers = sch.reorder_collective(gather, [sch.get_sblock(name) for name in ("mean", "m", "p")])
    >>> [sch.get(block).name_hint for block in gathers]
    ['m_out_global', 'p_out_global']
    >>> block = sch.as_slice(gathers[0])
    >>> print(sch.get(block).annotations)
    {"axe.layouts.m_out": "S[(2, 18, 8) : (1@dp, 8, 1)]"}
    """
    query.given(sch, gather, "as_slice")
    name = query.name_of(sch, gather)
    axis, dim = query.gathered(sch, gather, "as_slice")
    tree, nest = query.tree(sch), query.nest_of(sch, gather)
    written = nest.block.body.buffer
    if not tree.is_parameter(written):
        raise ScheduleError(
            f"as_slice: block {name!r} gathers {written.name!r}, which is no parameter; valid is the gather of a state "
            "tensor that the function leaves to its caller (reorder_collective moves any other)"
        )
    readers = [str(reader.block.name_hint) for reader in tree.consumers(nest)]
    if readers:
        raise ScheduleError(
            f"as_slice: {written.name!r} is read whole by {', '.join(readers)} after its gather {name!r}; valid is a "
            "state that is used on slices only: name the reader to reorder_collective"
        )
    (producer,) = tree.producers(nest)
    dims = sharded_dims(producer)
    shape = [int(extent) for extent in written.shape]
    layout = Layout.sharded(shape, mesh, {at: other for other, at in dims.items()})
    writer = gather
    if len(tree.consumers(producer)) == 1:
        (writer,) = sch.get_producers(gather)
        query.checked("as_slice", name, lambda: sch.reverse_compute_inline(gather))
    else:
        shard_dims(sch, gather, {axis: dim}, mesh)
    sch.annotate(writer, f"{LAYOUTS}.{written.name}", str(layout))
    return writer
