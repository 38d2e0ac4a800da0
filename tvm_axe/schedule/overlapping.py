"""overlap: stages that depend on each other run chunk by chunk, so that computing hides communicating."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tvm import s_tir, tirx
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from tvm_axe.analysis.annotations import OVERLAP, RING
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.schedule import query
from tvm_axe.schedule.redistributing import sharded_over
from tvm_axe.schedule.sharding import axis_size


@query.all_or_nothing
def overlap(
    sch: s_tir.Schedule, blocks: Sequence[SBlockRV], axis: str, chunks: int | ExprRV, mesh: Mesh
) -> list[LoopRV]:
    """Cut neighbouring stages into chunks along the dimension that `axis` shares, and run them chunk by chunk. ::

        for k_0 in T.serial(n, bind "tp"):             for k_0 in T.serial(n, bind "tp"):
            for i, j, k_1 in ..:                           for i_0 in T.serial(n, annotations={"axe.ring": "tp"}):
                C_rf[k_0, i, j] += ..                          for i_1 in T.serial(chunks, {"axe.overlap": "mm_rf"}):
        for i_0 in T.serial(n, bind "tp"):     ->                  for i_2, j, k_1 in ..: C_rf[k_0, i, j] += ..
            for i_1 in range(M // n): ..               for i_0 in T.serial(n, bind "tp"):
                C[i, j] += C_rf[:, i, j]                   for i_1 in T.serial(chunks, {"axe.overlap": "mm_rf"}):
                                                               for i_2 in ..: C[i, j] += C_rf[:, i, j]

    The slice of each device is cut into `chunks` pieces. A stage that works on slices (a reduce-scatter, a fused
    kernel) takes its own slice's chunks in order. One that works on the whole dimension (a matmul before a
    reduce-scatter, an all-gather, a matmul behind it) takes every device's slice, in ring order: the producer of a
    reduce-scatter begins with its neighbour's slice and ends with its own, a reader of an all-gather begins with its
    own. No device then waits for a chunk that a peer hasn't had a chunk's time to finish. (CoCoNet, section 3.4,
    "overlap".)

    Valid when each stage after the first reads what an earlier one writes, the stages are neighbours in the program,
    all of them are pointwise in the dimension that `axis` shares, and `chunks` divides a device's slice of it.

    Leaves ``axe.overlap`` on the loops over the chunks and ``axe.ring`` on a stage's loop over all the devices' slices.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    blocks : Sequence[SBlockRV]
        One block of each stage, in program order; fuse first, overlap last.
    axis : str
        The mesh axis whose devices' slices are cut.
    chunks : int or ExprRV
        Pieces of a slice; one that the schedule sampled stays open to a search.
    mesh : Mesh
        Says how many devices `axis` has.

    Returns
    -------
    loops : list[LoopRV]
        The loop over the chunks of each stage.

    Raises
    ------
    ScheduleError
        If there are fewer than two stages; one reads nothing that an earlier one writes; none of them is shared over
        the axis; the chunked dimension isn't carried through from one to the next; `chunks` doesn't divide a device's
        slice; or another nest lies between.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.lower import lower
    >>> from tvm_axe.programs import PROGRAMS
    >>> mlp = PROGRAMS["mlp"](axe.Mesh({"tp": 2}))
    >>> sch = axe.Schedule(mlp.func, mesh=mlp.mesh)
    >>> partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "tp")
    >>> scatter, gather = sch.split_collective(reduce)
    >>> epi = sch.get_sblock("epi")
    >>> (gather,) = sch.reorder_collective(gather, [epi])
    >>> device = sch.fuse_collective([scatter, epi, gather])
    >>> loops = sch.overlap([partial, scatter], "tp", 2)
    >>> lower(sch.mod["main"], sch.mesh).notation
    'ol(MM, fuse(RS-C-AG))'
    """
    devices = axis_size(mesh, axis, "overlap")
    for block in blocks:
        query.given(sch, block, "overlap")
    if len(blocks) < 2:
        raise ScheduleError(f"overlap: two stages or more overlap each other; got {len(blocks)}")
    nests = [_blocks_of_nest(sch, block) for block in blocks]
    _check_chain(sch, nests)
    along = _chunked_dims(sch, nests, axis, mesh)
    region = query.name_of(sch, blocks[0])
    loops = [_cut(sch, block, along, axis, devices, chunks) for block in blocks]
    for loop in loops:
        sch.annotate(loop, OVERLAP, region)
    for block, loop in zip(blocks, loops):
        _check_carried(sch, _blocks_of_nest(sch, block), loop, along)
    return loops


def _blocks_of_nest(sch: s_tir.Schedule, block: SBlockRV) -> list[SBlockRV]:
    """Return all the blocks below the outermost loop of `block`, in order."""
    loops = sch.get_loops(block)
    return list(sch.get_child_blocks(loops[0])) if loops else [block]


def _check_chain(sch: s_tir.Schedule, nests: Sequence[Sequence[SBlockRV]]) -> None:
    """Check that each stage reads what an earlier one writes, and that nothing else stands between them."""
    root = sch.get(sch.get_sblock("root"))
    statements = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    places = []
    for nest in nests:
        names = ", ".join(query.name_of(sch, block) for block in nest)
        first = sch.get_loops(nest[0])
        at = next((i for i, stmt in enumerate(statements) if first and stmt.same_as(sch.get(first[0]))), None)
        if at is None:
            raise ScheduleError(f"overlap: {names}: not a nest of its own; valid is one block of each stage")
        places.append(at)
    for index, nest in enumerate(nests[1:], 1):
        names = ", ".join(query.name_of(sch, block) for block in nest)
        before = [block for earlier in nests[:index] for block in earlier]
        if not any(query.among(sch, producer, before) for block in nest for producer in sch.get_producers(block)):
            written = ", ".join(query.name_of(sch, block) for block in before)
            raise ScheduleError(
                f"overlap: {names} reads nothing that {written} write; valid are stages of which each follows from an "
                "earlier one"
            )
        if places[index] != places[index - 1] + 1:
            raise ScheduleError(
                f"overlap: {places[index] - places[index - 1] - 1} nests lie between {names} and the stage before; "
                "valid are neighbours: overlap what lies between too, or fuse it"
            )


def _chunked_dims(
    sch: s_tir.Schedule, nests: Sequence[Sequence[SBlockRV]], axis: str, mesh: Mesh
) -> dict[tirx.Buffer, int]:
    """Return the dimension to cut of every buffer that the stages touch, found from what the axis exchanges."""
    along: dict[tirx.Buffer, int] = {}
    blocks = [block for nest in nests for block in nest]

    def follow() -> None:
        for _ in blocks:  # each round follows one more link
            for block in blocks:
                iterator = _iterator_along(sch.get(block), along)
                for buffer, indices in _touched(sch.get(block)) if iterator is not None else ():
                    found = [dim for dim, index in enumerate(indices) if index.same_as(iterator)]
                    if found:
                        along.setdefault(buffer, found[0])

    for block in blocks:
        dims = query.sharded_dims(sch, block)
        if axis in query.bound_loops(sch, block, query.REDUCE) and axis in dims:  # a reduce-scatter
            along[sch.get(block).body.buffer] = dims[axis]
    follow()
    for block in blocks:
        if query.is_copy(sch.get(block)) and axis not in query.sharded_dims(sch, block):  # an all-gather
            source = sch.get(block).body.value.source
            # Over an axis of one device nothing is shared, and any dimension will do.
            dim = sharded_over(sch, block, source, mesh).get(axis, 0 if mesh.axis_size(axis) == 1 else None)
            if dim is not None:
                along.setdefault(source, dim)
    follow()
    return along


def _touched(block: s_tir.SBlock) -> list[tuple[tirx.Buffer, Sequence[tirx.Expr]]]:
    found = [(block.body.buffer, block.body.indices)]
    for region in block.reads:
        found += [(load.source, load.indices) for load in query.loads_of(block, region.source)]
    return found


def _iterator_along(block: s_tir.SBlock, along: Mapping[tirx.Buffer, int]) -> tirx.Var | None:
    """Return the iterator of `block` that indexes what it touches along the chunked dimension."""
    for buffer, indices in _touched(block):
        if buffer in along:
            iterator = query.iterator_at(block, indices, along[buffer])
            if iterator is not None:
                return iterator
    return None


def _cut(
    sch: s_tir.Schedule,
    block: SBlockRV,
    along: Mapping[tirx.Buffer, int],
    axis: str,
    devices: int,
    chunks: int | ExprRV,
) -> LoopRV:
    """Cut the loops of `block`'s stage along the chunked dimension; return the loop over the chunks."""
    name, stmt = query.name_of(sch, block), sch.get(block)
    iterator = _iterator_along(stmt, along)
    if iterator is None or not any(iv.var.same_as(iterator) and iv.iter_type == query.SPATIAL for iv in stmt.iter_vars):
        raise ScheduleError(
            f"overlap: the dimension that {axis!r} shares is not carried through to block {name!r}; valid are stages "
            "that are pointwise in it, at least one of them shared over the axis"
        )
    value = next(value for iv, value in query.bindings(sch, block) if iv.var.same_as(iterator))
    driving = [loop for loop in sch.get_loops(block) if query.uses(value, sch.get(loop).loop_var)]
    own = [loop for loop in driving if query.bound_axis(sch.get(loop)) is None]
    if len(own) != 1:
        raise ScheduleError(
            f"overlap: block {name!r}: its dimension shared over {axis!r} is driven by {len(own)} loops beside the "
            "device loop; overlap before its loops are transformed"
        )
    extent = int(sch.get(own[0]).extent)
    sliced = len(driving) > len(own)
    piece = extent if sliced else -(-extent // devices)
    count = chunks if isinstance(chunks, int) else int(sch.get(chunks))
    if count < 1 or piece % count:
        raise ScheduleError(
            f"overlap: block {name!r}: {count} chunks do not divide the {piece} elements of a device's slice; valid "
            "is a divisor"
        )
    factors = [chunks, None] if sliced else [devices, chunks, None]
    cut = query.checked("overlap", name, lambda: sch.split(own[0], factors))
    if not sliced:
        sch.annotate(cut[0], RING, axis)
    outer = cut[:1] if sliced else cut[:2]
    devices_of = query.bound_loops(sch, block, query.SPATIAL).values()
    bound = [loop for loop in sch.get_loops(block) if _is_one_of(sch, loop, devices_of)]
    order = [*bound, *outer]
    loops = sch.get_loops(block)
    chain = loops[: 1 + max(at for at, loop in enumerate(loops) if _is_one_of(sch, loop, order))]
    between = [loop for loop in chain if not _is_one_of(sch, loop, order)]
    if between:
        query.checked("overlap", name, lambda: sch.reorder(*order, *between))
    return outer[-1]


def _is_one_of(sch: s_tir.Schedule, loop: LoopRV, loops: Iterable[LoopRV]) -> bool:
    return any(sch.get(loop).same_as(sch.get(other)) for other in loops)


def _check_carried(
    sch: s_tir.Schedule, nest: Sequence[SBlockRV], loop: LoopRV, along: Mapping[tirx.Buffer, int]
) -> None:
    """Check that whatever a block of the stage touches of the chunked buffers lies in the chunk."""
    chunk = sch.get(loop).loop_var
    for block in nest:
        stmt = sch.get(block)
        inside = [iv.var for iv, value in query.bindings(sch, block) if query.uses(value, chunk)]
        for buffer, indices in _touched(stmt):
            if buffer not in along or _is_input(sch, buffer):
                continue
            if not any(indices[along[buffer]].same_as(var) for var in inside):
                raise ScheduleError(
                    f"overlap: block {query.name_of(sch, block)!r} reads {buffer.name!r} beyond its chunk of dimension "
                    f"{along[buffer]}; valid are stages that are pointwise in the chunked dimension"
                )


def _is_input(sch: s_tir.Schedule, buffer: tirx.Buffer) -> bool:
    """Return whether nothing writes `buffer`, so that any of it may be read at any time."""
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    return not any(buffer.same_as(sch.get(block).body.buffer) for block in blocks)
