"""send: point to point along a pipeline axis."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_axe.analysis.patterns import shift_of
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.schedule import query
from tvm_axe.schedule.sharding import axis_size, shard_loop


@query.all_or_nothing
def send(sch: s_tir.Schedule, block: SBlockRV, axis: str, mesh: Mesh) -> LoopRV:
    """Share a copy that shifts its leading dimension over the pipeline axis `axis`: each device gets a peer's. ::

        for s, i in T.grid(P, M):                      for s in T.serial(P, annotations={"axe.bind": "pp"}):
            Z[s, i] = C[(s + P - 1) % P, i]     ->         for i in range(M):
                                                               Z[s, i] = C[(s + P - 1) % P, i]

    The leading dimension counts the pipeline's stages, one a device of the axis; each stage works on a micro-batch of
    its own. The copy may stand among the consumers of `reorder_collective` (then slices are sent) and in the chain of
    `fuse_collective` (then the receiver computes with what it reads). (CoCoNet, section 2.1, "Send".)

    Valid when `block` is ``Z[s, ...] = C[(s + k) % P, ...]`` with the other indices alike, P is the number of devices
    of `axis`, and one loop drives s.

    Leaves ``axe.bind`` on the loop over the stages.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    block : SBlockRV
        The copy that shifts its leading dimension.
    axis : str
        A mesh axis with one device a stage.
    mesh : Mesh
        Says how many devices `axis` has.

    Returns
    -------
    device : LoopRV
        The bound loop.

    Raises
    ------
    ScheduleError
        If the mesh has no such axis, the block is not a copy that shifts its leading dimension alone, or that has
        another extent than the axis.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.lower import lower
    >>> from tvm_axe.programs import PROGRAMS
    >>> pipeline = PROGRAMS["pipeline"](axe.Mesh({"pp": 2, "tp": 1}))
    >>> sch = axe.Schedule(pipeline.func, mesh=pipeline.mesh)
    >>> for name in ("mm", "epi"):
    ...     stages = sch.shard(sch.get_loops(sch.get_sblock(name))[0], "pp")
    >>> device = sch.send(sch.get_sblock("send"), "pp")
    >>> lower(sch.mod["main"], sch.mesh).notation
    'MM-P2P-C'
    """
    size = axis_size(mesh, axis, "send")
    query.given(sch, block, "send")
    name, stmt = query.name_of(sch, block), query.nest_of(sch, block).block
    shift = shift_of(stmt)
    if shift is None:
        raise ScheduleError(
            f"send: block {name!r} is not a copy that shifts its leading dimension; valid is "
            "Z[s, ...] = C[(s + k) % P, ...] with the other indices alike"
        )
    extent = int(stmt.iter_vars[0].dom.extent)
    if extent != size:
        raise ScheduleError(
            f"send: block {name!r}: its leading dimension has {extent} stages and {axis!r} has {size} devices; valid "
            "is a pipeline axis, with one device a stage"
        )
    loop = query.loop_of(sch, block, stmt.iter_vars[0].var)
    if loop is None:
        raise ScheduleError(f"send: block {name!r}: its leading dimension is not driven by one loop; send it first")
    device, _ = shard_loop(sch, loop, axis, mesh, block)
    assert isinstance(device, LoopRV)
    query.outermost(sch, block, device)
    return device
