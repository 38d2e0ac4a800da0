"""How a function that nobody has scheduled is shared over a mesh; what it communicates then is the search's matter."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx
from tvm.s_tir.schedule import SBlockRV

from ..errors import ScheduleError
from ..layout import Mesh
from ..schedule import Schedule, query
from .moves import Candidate


def seed_schedule(func: tirx.PrimFunc, mesh: Mesh) -> Schedule:
    """Share `func` over `mesh` in the way that is meant if nobody says: the first of `sharings`.

    Raises
    ------
    ScheduleError
        If there is none.
    """
    return next(sharings(func, mesh))


def sharings(func: tirx.PrimFunc, mesh: Mesh) -> Iterator[Schedule]:
    """Ways to share `func` over `mesh`: all-reduces of what the devices hold, or else which loop goes on which axis.

    Each sum over a dimension that counts the devices of an axis, of an input (gradients, say), becomes an all-reduce
    over the axis: where there are such, that is the only way. Where there are none, the mesh's last axis shares a loop
    of a matmul: its longest reduction, which leaves partial sums, or rows, columns or a batch, whose pieces are then
    gathered. The last matmul's come first.
    What moves behind a gather is shared in turn, so that other matmuls follow. Anything else is a decision: make it
    with the primitives, and search from there.

    Raises
    ------
    ScheduleError
        If the function has neither.
    """
    sch = Schedule(func, mesh=mesh)
    blocks = Candidate(sch).blocks()
    shared = sum(_all_reduced(sch, name) for name in blocks)
    if shared or mesh.size == 1:
        yield sch
        return
    found = False
    for name in reversed(blocks):
        for way in _of_product(sch, name):
            found = True
            yield way
    if not found:
        raise ScheduleError(
            f"search: nothing to share over {mesh}: no block sums over a dimension that counts devices, and none is a "
            "matmul; share it with sch.shard, and search from that schedule"
        )


def _of_product(sch: Schedule, name: str) -> Iterator[Schedule]:
    """The ways to share a matmul over the mesh's last axis; none if the block isn't one."""
    probe, axis = sch.copy(), sch.mesh.names[-1]
    block = probe.get_sblock(name)
    if not query.is_product(probe.get(block)):
        return
    loops = [probe.get(loop) for loop in probe.get_loops(block)]
    kinds = [_drives(probe, block, loop.loop_var) for loop in loops]
    sums = [n for n, kind in enumerate(kinds) if kind == {query.REDUCE}]
    if sums:
        way = sch.copy()
        longest = max(sums, key=lambda n: int(loops[n].extent))
        way.shard(way.get_loops(way.get_sblock(name))[longest], axis)
        yield way
    for n, kind in enumerate(kinds):
        if kind == {query.SPATIAL} and int(loops[n].extent) >= sch.mesh.axis_size(axis):
            way = sch.copy()
            own = way.get_sblock(name)
            device, _ = way.shard(way.get_loops(own)[n], axis)
            way.cache_write(own, 0, "global")  # the copy out of it reads every device's piece: an all-gather
            query.outermost(way, own, device)
            yield way


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
