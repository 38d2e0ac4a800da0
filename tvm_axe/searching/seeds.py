"""How a function that nobody has scheduled is shared over a mesh; what it communicates then is the search's matter."""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir.schedule import SBlockRV

from ..errors import ScheduleError
from ..layout import Mesh
from ..schedule import Schedule, query
from .moves import Candidate


def seed_schedule(func: tirx.PrimFunc, mesh: Mesh) -> Schedule:
    """Share `func` over `mesh`: all-reduces of what the devices hold, or else partial sums of its last matmul.

    Each sum over a dimension that counts the devices of an axis, of an input (gradients, say), becomes an all-reduce
    over the axis. Where there is none, the longest reduction of the last matmul is shared over the mesh's last axis.
    Anything else is a decision: make it with the primitives, and search from there.

    Raises
    ------
    ScheduleError
        If the function has neither.
    """
    sch = Schedule(func, mesh=mesh)
    blocks = Candidate(sch).blocks()
    shared = sum(_all_reduced(sch, name) for name in blocks)
    if shared or mesh.size == 1:
        return sch
    for name in reversed(blocks):
        probe = sch.copy()
        block = probe.get_sblock(name)
        loops = [probe.get(loop) for loop in probe.get_loops(block)]
        sums = [n for n, loop in enumerate(loops) if _drives(probe, block, loop.loop_var) == {query.REDUCE}]
        if query.is_product(probe.get(block)) and sums:
            longest = max(sums, key=lambda n: int(loops[n].extent))
            sch.shard(sch.get_loops(sch.get_sblock(name))[longest], mesh.names[-1])
            return sch
    raise ScheduleError(
        f"search: nothing to share over {mesh}: no block sums over a dimension that counts devices, and none is a "
        "matmul; share it with sch.shard, and search from that schedule"
    )


def _all_reduced(sch: Schedule, name: str) -> bool:
    """Make the block an all-reduce, if it sums an input over as many terms as an axis has devices."""
    probe = sch.copy()
    block = probe.get_sblock(name)
    term = query.summed(probe.get(block))
    if term is None or not query.is_parameter(probe, term.source):
        return False
    for position, loop in enumerate(probe.get_loops(block)):
        stmt = probe.get(loop)
        for axis in sch.mesh.names:
            counts = int(stmt.extent) == sch.mesh.axis_size(axis) > 1
            if counts and _drives(probe, block, stmt.loop_var) == {query.REDUCE}:
                sch.all_reduce(sch.get_loops(sch.get_sblock(name))[position], axis)
                return True
    return False


def _drives(sch: Schedule, block: SBlockRV, loop_var: tirx.Var) -> set[int]:
    """The kinds of the block's iterators that a loop drives."""
    return {iv.iter_type for iv, value in query.bindings(sch, block) if query.uses(value, loop_var)}
