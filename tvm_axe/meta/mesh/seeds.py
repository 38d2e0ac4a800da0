"""How a function is shared over the axes of a mesh; what it communicates then is the search's matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_axe.analysis.blocks import NestedBlock
from tvm_axe.analysis.expressions import uses
from tvm_axe.analysis.patterns import REDUCE, SPATIAL, is_product, summed
from tvm_axe.analysis.sharing import bound_axis, driven_by, sharded_dims
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.meta.mesh.moves import Candidate, structure
from tvm_axe.schedule import Schedule, query
from tvm_axe.schedule.caching import cached
from tvm_axe.schedule.sharding import shard_dims

_SUM = -1  # in place of a loop's position: the longest reduction


def seed_schedule(func: tirx.PrimFunc, mesh: Mesh) -> Schedule:
    """Share `func` over `mesh` in the way that is meant if nobody says: the first of `sharings`.

    Raises
    ------
    ScheduleError
        If there is none.
    """
    return next(sharings(func, mesh))


def sharings(func: tirx.PrimFunc, mesh: Mesh) -> Iterator[Schedule]:
    """Ways to share `func` over `mesh`: all-reduces of what the devices hold, and which loop goes on which axis.

    A loop that is bound already stays so, and its axis shares nothing else. Each sum over a dimension that counts the
    devices of a free axis, of an input (gradients, say), becomes an all-reduce over it. Of the axes that are free then,
    each shares a loop of a matmul, or nothing, so that its devices all do the same. Such a loop is the longest
    reduction, which leaves partial sums, or rows, columns or a batch, whose pieces are then gathered. The axes share
    loops of one matmul, and only its reduction may be shared twice. What moves behind a gather is shared in turn, so
    that other matmuls follow. Anything else is a decision: make it with the primitives, and search from there.

    Where fewer axes share something that comes first, then the last axis, then the last matmul.

    Raises
    ------
    ScheduleError
        If there is nothing to share.
    """
    found = False
    for sch, free, shared in _with_all_reduces(Schedule(func, mesh=mesh)):
        if shared or mesh.size == 1:
            found = True
            yield sch
        for count in range(1, len(free) + 1):
            for axes in reversed(list(combinations(free, count))):
                for name in reversed(Candidate(sch).blocks()):
                    for way in _of_product(sch, name, axes):
                        found = True
                        yield way
    if not found:
        raise ScheduleError(
            f"search: nothing to share over {mesh}: no block sums over a dimension that counts devices, and none is a "
            "matmul; share it with sch.shard, and search from that schedule"
        )


def _with_all_reduces(sch: Schedule) -> Iterator[tuple[Schedule, tuple[str, ...], bool]]:
    """The schedule with its sums over devices as all-reduces, any free axis preferred.

    Beside it the axes that are free then, and whether anything is shared.
    """
    bound = bound_axes(sch.mod["main"])
    free = tuple(axis for axis in sch.mesh.names if axis not in bound and sch.mesh.axis_size(axis) > 1)
    seen: set[int] = set()
    for preferred in free or ("",):
        way = sch.copy()
        order = sorted(free, key=lambda axis: axis != preferred)
        used = {axis for name in Candidate(sch).blocks() if (axis := _all_reduced(way, name, order)) is not None}
        if structure(way) not in seen:
            seen.add(structure(way))
            yield way, tuple(axis for axis in free if axis not in used), bool(bound or used)


def bound_axes(func: tirx.PrimFunc) -> set[str]:
    """The axes that some loop is bound to."""
    found: set[str] = set()

    def on_loop(loop: tirx.For) -> None:
        axis = bound_axis(loop)
        found.update([] if axis is None else [axis])

    tvm_ffi.structural_walk(func.body, (tirx.For, on_loop))
    return found


def _of_product(sch: Schedule, name: str, axes: Sequence[str]) -> Iterator[Schedule]:
    """The ways to share a matmul over these axes, a loop on each; none if the block isn't one."""
    nest = query.tree(sch).named(name)
    if not is_product(nest.block):
        return
    loops = nest.loops
    pieces = [n for n, loop in enumerate(loops) if _drives(nest, loop) == {SPATIAL}]
    sums = [_SUM] if _longest_sum(nest) is not None else []
    for chosen in product([*sums, *pieces], repeat=len(axes)):
        shared = [(axis, n) for axis, n in zip(axes, chosen) if n != _SUM]
        way = None
        if len({n for _, n in shared}) == len(shared) and all(
            int(loops[n].extent) >= sch.mesh.axis_size(axis) for axis, n in shared
        ):
            way = _shared(sch, name, dict(zip(axes, chosen)))
        if way is not None:
            yield way


def _shared(sch: Schedule, name: str, ways: Mapping[str, int]) -> Schedule | None:
    """The matmul with the loop at a position, or the longest reduction, on each axis; None where `shard` refuses."""
    way = sch.copy()
    own = way.get_sblock(name)
    loops = way.get_loops(own)
    try:
        for axis, position in ways.items():
            if position != _SUM:
                _gathered(way, own, loops[position], axis)
        # Partial sums are of a device's own piece, and those of the first axis of those of the next.
        for axis, position in ways.items():
            if position == _SUM:
                own, _ = way.shard(query.loop_rv(way, own, _longest_sum(query.nest_of(way, own))), axis)
    except (ScheduleError, s_tir.ScheduleError):
        return None
    return way


def _gathered(sch: Schedule, block: SBlockRV, loop: LoopRV, axis: str) -> None:
    """Share a loop of the block over the axis, and gather the pieces of its result."""
    others = sharded_dims(query.nest_of(sch, block))
    device, _ = sch.shard(loop, axis, block)
    copy = cached(sch, block, "search")  # it reads every device's piece: an all-gather
    shard_dims(sch, copy, others, sch.mesh)
    query.outermost(sch, block, device)


def _longest_sum(nest: NestedBlock) -> tirx.For | None:
    """The longest loop of the block that drives reductions only and isn't bound."""
    sums = [loop for loop in nest.loops if _drives(nest, loop) == {REDUCE}]
    return max(sums, key=lambda loop: int(loop.extent), default=None)


def _all_reduced(sch: Schedule, name: str, axes: Sequence[str]) -> str | None:
    """Make the block an all-reduce, if it sums an input over as many terms as an axis has devices; gives the axis."""
    nest = query.tree(sch).named(name)
    term = summed(nest.block)
    if term is None or not query.is_parameter(sch, term.source):
        return None
    for position, loop in enumerate(nest.loops):
        for axis in axes:
            counts = int(loop.extent) == sch.mesh.axis_size(axis)
            if counts and _drives(nest, loop) == {REDUCE}:
                sch.all_reduce(sch.get_loops(sch.get_sblock(name))[position], axis)
                return axis
    return None


def _drives(nest: NestedBlock, loop: tirx.For) -> set[int]:
    """The kinds of the block's iterators that a loop drives; none if an axis shares one of them already."""
    driven = driven_by(nest, loop)
    for other in nest.loops:
        if bound_axis(other) is not None and any(uses(nest.bound[iv.var], other.loop_var) for iv in driven):
            return set()
    return {iv.iter_type for iv in driven}
