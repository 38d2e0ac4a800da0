"""fuse_collective: stages under one mesh-bound nest become one kernel on mesh tensors."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from ..errors import ScheduleError
from . import query


def fuse_collective(sch: s_tir.Schedule, blocks: Sequence[SBlockRV]) -> LoopRV:
    """Put the chain `blocks` under the mesh-bound nest of the first: one kernel that reads and writes the peers. ::

        for i_0 (bind "tp"), i_1: reduce C_global       for i_0 in T.serial(n, annotations={"axe.bind": "tp"}):
        for i_0 (bind "tp"), i_1: out_global = f(..)        for i_1 in range(M // n):
        for i, j: out = out_global                  ->          C_global[i, :] = sum of the peers' C_rf[:, i, :]
                                                                out_global[i, :] = f(C_global[i, :], bias[:])
                                                                out[i, :] = out_global[i, :]

    (CoCoNet, section 3.3, "fuse".)

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    blocks : Sequence[SBlockRV]
        In program order; each after the first reads what an earlier one writes.

    Returns
    -------
    device : LoopRV
        The mesh-bound loop that now encloses them all.

    Raises
    ------
    ScheduleError
        If there are fewer than two blocks; the first is not bound to a mesh axis, or a later one is bound to another; a
        block doesn't follow from an earlier one; or a block outside the chain lies between (a cycle).
    """
    names = [query.name_of(sch, block) for block in blocks]
    if len(blocks) < 2:
        raise ScheduleError(f"fuse_collective: a chain of at least two blocks is fused; got {len(blocks)}")
    bound = query.bound_loops(sch, blocks[0], query.SPATIAL)
    if len(bound) != 1:
        raise ScheduleError(
            f"fuse_collective: block {names[0]!r} is bound to {len(bound)} mesh axes by its data-parallel loops; valid is "
            "a first block bound to one, such as the reduce-scatter of split_collective"
        )
    axis, device = next(iter(bound.items()))
    for index in range(1, len(blocks)):
        _check_link(sch, blocks, names, index, axis)
    nest = _rows(sch, blocks[0], device)
    for name, block in zip(names[1:], blocks[1:]):
        query.checked("fuse_collective", name, lambda block=block: sch.reverse_compute_at(block, nest))  # type: ignore[misc]
    return device


def _check_link(sch: s_tir.Schedule, blocks: Sequence[SBlockRV], names: Sequence[str], index: int, axis: str) -> None:
    """Block `index` follows from the blocks before it, and from nothing else that follows from them."""
    name, block = names[index], blocks[index]
    producers = [query.name_of(sch, producer) for producer in sch.get_producers(block)]
    if not set(producers) & set(names[:index]):
        raise ScheduleError(
            f"fuse_collective: block {name!r} reads nothing that {', '.join(names[:index])} write; valid is a chain in "
            "which each block follows from an earlier one"
        )
    for producer in sch.get_producers(block):
        outside = query.name_of(sch, producer)
        after = [query.name_of(sch, p) for p in sch.get_producers(producer)]
        if outside not in names and set(after) & set(names[:index]):
            raise ScheduleError(
                f"fuse_collective: a cycle: block {outside!r} lies between {names[0]!r} and {name!r} and is not fused; "
                "fuse it too"
            )
    others = set(query.bound_loops(sch, block, query.SPATIAL)) - {axis}
    if others:
        raise ScheduleError(
            f"fuse_collective: block {name!r} is bound to {', '.join(sorted(others))}, the nest to {axis!r}; "
            "blocks of one kernel are bound to one axis"
        )


def _rows(sch: s_tir.Schedule, block: SBlockRV, device: LoopRV) -> LoopRV:
    """The innermost loop that leaves a vectorisable row of `block` below it, and its peers with the row."""
    loops = sch.get_loops(block)
    peers = {sch.get(loop).loop_var.name for loop in query.bound_loops(sch, block, query.REDUCE).values()}
    nest = device
    for loop in loops[:-1]:
        if sch.get(loop).loop_var.name in peers:
            break
        nest = loop
    return nest
