"""beside: a collective runs beside stages that don't depend on it, which hide it."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.analysis.annotations import BESIDE, OVERLAP
from tvm_axe.analysis.patterns import folded, is_copy, shift_of
from tvm_axe.errors import ScheduleError
from tvm_axe.schedule import query


@query.all_or_nothing
def beside(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Run the collective `block` beside the stages that don't depend on it. ::

        for i, j, d in T.grid(M, N, n):                for i, j, d in T.grid(M, N, n):
            with T.sblock("sum"):              ->          with T.sblock("sum"):
                G[i, j] += D[d, i, j]                          T.sblock_attr({"axe.beside": "1"})
                                                               G[i, j] += D[d, i, j]

    It begins as soon as what it moves is there. Stages that touch nothing of that go on meanwhile, also those that the
    program has behind others which need its result: these wait until nothing else is left. Where the devices have
    streams of their own it is told to a second one; cores do it where it begins, in the same order of stages. This is
    for sizes at which a collective in one kernel with what it is between (`fuse_collective`), or in chunks with it
    (`overlap`), loses, and for gradients of one layer beside the products of the next.

    Valid when `block` is alone in its nest, and copies, shifts a leading dimension as `send` does, or reduces with a
    sum, product, maximum or minimum; and its nest isn't in chunks. It has to be a collective when the function is
    lowered, and not a part of a kernel.

    Leaves ``axe.beside`` on the block.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    block : SBlockRV
        The block of an all-reduce, a reduce-scatter, an all-gather, an all-to-all or another collective.

    Raises
    ------
    ScheduleError
        If it can't be a collective, or its nest overlaps others in chunks.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.lower import lower
    >>> from tvm_axe.programs import PROGRAMS
    >>> layers = PROGRAMS["layers"](axe.Mesh({"dp": 2}))
    >>> sch = layers.schedule("MM-AR-C")
    >>> for line in lower(sch.mod["main"], sch.mesh).forms:
    ...     print(line)
    >>> sch.beside("sum2")
    >>> for line in lower(sch.mod["main"], sch.mesh).forms:
    ...     print(line)
    sum2: an all-reduce beside back, part1, sum1, step1
    """
    query.given(sch, block, "beside")
    name, nest = query.name_of(sch, block), query.nest_of(sch, block)
    inside = query.tree(sch).blocks_below(nest.loops[0]) if nest.loops else [nest]
    if len(inside) > 1:
        others = ", ".join(repr(str(each.block.name_hint)) for each in inside if not each.block.same_as(nest.block))
        raise ScheduleError(
            f"beside: block {name!r} shares its nest with {others}, so they are one kernel; valid is a collective, "
            "alone in its nest"
        )
    if not is_copy(nest.block) and shift_of(nest.block) is None and folded(nest.block) is None:
        raise ScheduleError(
            f"beside: block {name!r} computes, and neither copies nor reduces, so it is no collective; valid is the "
            "block of a collective, as shard, all_reduce, split_collective, redistribute or send leave one"
        )
    if any(OVERLAP in loop.annotations for loop in nest.loops):
        raise ScheduleError(
            f"beside: block {name!r} is in chunks, which overlap hides already; valid is a collective in one piece"
        )
    sch.annotate(block, BESIDE, "1")
