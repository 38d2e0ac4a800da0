"""How a function that nobody has scheduled is shared over a mesh; what it communicates then is the search's matter."""

from __future__ import annotations

from tvm import tirx

from ..errors import ScheduleError
from ..layout import Mesh
from ..schedule import Schedule, query
from .moves import Candidate


def seed_schedule(func: tirx.PrimFunc, mesh: Mesh) -> Schedule:
    """Share `func` over `mesh`: all-reduces of what the devices hold, or else partial sums of its last matmul.

    Each sum over a dimension that counts the devices of an axis, of an input (gradients, say), becomes an all-reduce
    over the axis. Where there is none, the longest reduction of the last block that reduces is shared over the mesh's
    last axis. Anything else is a decision: make it with the primitives, and search from there.

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
        loops = [
            loop
            for loop in sch.get_loops(sch.get_sblock(name))
            if _drives(sch, name, sch.get(loop).loop_var) == {query.REDUCE}
        ]
        if loops:
            sch.shard(max(loops, key=lambda loop: int(sch.get(loop).extent)), mesh.names[-1])
            return sch
    raise ScheduleError(
        f"search: nothing to share over {mesh}: no block sums over a dimension that counts devices, and none reduces; "
        "share it with sch.shard, and search from that schedule"
    )


def _all_reduced(sch: Schedule, name: str) -> bool:
    """Make the block an all-reduce, if it sums an input over as many terms as an axis has devices."""
    probe = sch.copy()
    stmt = probe.get(probe.get_sblock(name))
    term = query.summed(stmt)
    if term is None or not query.is_parameter(probe, term.source):
        return False
    for position, loop in enumerate(probe.get_loops(probe.get_sblock(name))):
        for axis in sch.mesh.names:
            counts = int(probe.get(loop).extent) == sch.mesh.axis_size(axis) > 1
            if counts and _drives(probe, name, probe.get(loop).loop_var) == {query.REDUCE}:
                sch.all_reduce(sch.get_loops(sch.get_sblock(name))[position], axis)
                return True
    return False


def _drives(sch: Schedule, name: str, loop_var: tirx.Var) -> set[int]:
    """The kinds of the block's iterators that a loop drives."""
    probe = sch.copy()
    pairs = query.bindings(probe, probe.get_sblock(name))
    return {iv.iter_type for iv, value in pairs if query.uses(value, loop_var)}
