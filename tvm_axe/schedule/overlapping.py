"""overlap: stages that depend on each other run chunk by chunk, so that computing hides communicating."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tvm import s_tir, tirx
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from tvm_axe.analysis.annotations import OVERLAP, RING
from tvm_axe.analysis.blocks import NestedBlock, statements
from tvm_axe.analysis.expressions import uses
from tvm_axe.analysis.patterns import REDUCE, SPATIAL, is_copy, iterator_at, loads_of
from tvm_axe.analysis.sharing import bound_axis, bound_loops, driven_by, root_of, sharded_dims, sharded_over
from tvm_axe.analysis.tree import BlockTree, is_one_of
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.schedule import query
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
    own. An all-reduce that isn't split has the slices of its leading dimension, and each device adds up all of them. No
    device then waits for a chunk that a peer hasn't had a chunk's time to finish. (CoCoNet, section 3.4,
    "overlap".)

    Where the devices have copy engines, a product and a collective that overlap are one kernel beside copies instead,
    in as many groups of columns as there are chunks, or one behind the other where the product is too small to hide
    anything (`tvm_axe.lower.pairs` says which).

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
    axis_size(mesh, axis, "overlap")
    for block in blocks:
        query.given(sch, block, "overlap")
    if len(blocks) < 2:
        raise ScheduleError(f"overlap: two stages or more overlap each other; got {len(blocks)}")
    cuts = cuts_of(query.tree(sch), [query.nest_of(sch, block) for block in blocks], axis, mesh)
    count = chunks if isinstance(chunks, int) else int(sch.get(chunks))
    for cut in cuts:
        if not cut.takes(count):
            raise ScheduleError(
                f"overlap: block {cut.block!r}: {count} chunks do not divide the {cut.piece} elements of a device's "
                "slice; valid is a divisor"
            )
    region = query.name_of(sch, blocks[0])
    loops = [_cut(sch, block, cut, axis, mesh, chunks) for block, cut in zip(blocks, cuts)]
    for loop in loops:
        sch.annotate(loop, OVERLAP, region)
    return loops


class Cut(NamedTuple):
    """The loop of a stage to cut: over the `piece` elements of a device's slice if `sliced`, else over all slices."""

    block: str
    loop: tirx.For
    sliced: bool
    piece: int

    def takes(self, count: int) -> bool:
        """Return whether it can be cut into so many chunks."""
        return count >= 1 and self.piece % count == 0


def cuts_of(tree: BlockTree, blocks: Sequence[NestedBlock], axis: str, mesh: Mesh) -> list[Cut]:
    """Return what `overlap` cuts of each stage.

    Raises
    ------
    ScheduleError
        If the stages can't overlap, whatever the number of chunks.
    """
    nests = [tree.blocks_below(block.loops[0]) if block.loops else [block] for block in blocks]
    _check_chain(tree, nests)
    along = _chunked_dims(tree, nests, axis, mesh)
    cuts = [_cut_of(block, along, axis, mesh.axis_size(axis)) for block in blocks]
    for nest, cut in zip(nests, cuts):
        _check_carried(tree, nest, cut.loop, along)
    return cuts


def _check_chain(tree: BlockTree, nests: Sequence[Sequence[NestedBlock]]) -> None:
    """Check that each stage reads what an earlier one writes, and that nothing else stands between them."""
    stages = [part for func in tree.functions for part in statements(func.body.block.body)]
    places = []
    for nest in nests:
        names = _names(nest)
        first = nest[0].loops
        at = next((i for i, stmt in enumerate(stages) if first and stmt.same_as(first[0])), None)
        if at is None:
            raise ScheduleError(f"overlap: {names}: not a nest of its own; valid is one block of each stage")
        places.append(at)
    for index, nest in enumerate(nests[1:], 1):
        names = _names(nest)
        before = [block for earlier in nests[:index] for block in earlier]
        if not any(is_one_of(producer, before) for block in nest for producer in tree.producers(block)):
            written = _names(before)
            raise ScheduleError(
                f"overlap: {names} reads nothing that {written} write; valid are stages of which each follows from an "
                "earlier one"
            )
        if places[index] != places[index - 1] + 1:
            raise ScheduleError(
                f"overlap: {places[index] - places[index - 1] - 1} nests lie between {names} and the stage before; "
                "valid are neighbours: overlap what lies between too, or fuse it"
            )


def _names(blocks: Sequence[NestedBlock]) -> str:
    return ", ".join(nest.block.name_hint for nest in blocks)


def _chunked_dims(
    tree: BlockTree, nests: Sequence[Sequence[NestedBlock]], axis: str, mesh: Mesh
) -> dict[tirx.Buffer, int]:
    """Return the dimension to cut of every buffer that the stages touch, found from what the axis exchanges."""
    along: dict[tirx.Buffer, int] = {}
    blocks = [block for nest in nests for block in nest]

    def follow() -> None:
        known = -1
        while known != len(along):  # each round follows one more link
            known = len(along)
            for block in blocks:
                iterator = _iterator_along(block.block, along)
                for buffer, indices in _touched(block.block) if iterator is not None else ():
                    found = [dim for dim, index in enumerate(indices) if index.same_as(iterator)]
                    if found:
                        along.setdefault(buffer, found[0])

    for block in blocks:
        dims = sharded_dims(block)
        if axis in bound_loops(block, REDUCE) and axis in dims:  # a reduce-scatter
            along[block.block.body.buffer] = dims[axis]
        elif axis in bound_loops(block, REDUCE) and root_of(block.block) is None and block.block.body.buffer.shape:
            # An all-reduce: all have the slices, unless it is of a scalar.
            along[block.block.body.buffer] = _leading(block.block.body.buffer)
    follow()
    for block in blocks:
        if is_copy(block.block) and axis not in sharded_dims(block):  # an all-gather
            source = block.block.body.value.source
            # Over an axis of one device nothing is shared, and any dimension will do.
            dim = sharded_over(tree, block, source, mesh).get(axis, 0 if mesh.axis_size(axis) == 1 else None)
            if dim is not None:
                along.setdefault(source, dim)
    follow()
    return along


def _leading(buffer: tirx.Buffer) -> int:
    """Return the first dimension that isn't of extent 1, or the last."""
    extents = [int(extent) for extent in buffer.shape]
    return next((dim for dim, extent in enumerate(extents) if extent > 1), len(extents) - 1)


@functools.lru_cache(maxsize=4096)
def _touched(block: s_tir.SBlock) -> Sequence[tuple[tirx.Buffer, Sequence[tirx.Expr]]]:
    found = [(block.body.buffer, tuple(block.body.indices))]
    for region in block.reads:
        found += [(load.source, tuple(load.indices)) for load in loads_of(block, region.source)]
    return found


def _iterator_along(block: s_tir.SBlock, along: Mapping[tirx.Buffer, int]) -> tirx.Var | None:
    """Return the iterator of `block` that indexes what it touches along the chunked dimension."""
    for buffer, indices in _touched(block):
        if buffer in along:
            iterator = iterator_at(block, indices, along[buffer])
            if iterator is not None:
                return iterator
    return None


def _cut_of(nest: NestedBlock, along: Mapping[tirx.Buffer, int], axis: str, devices: int) -> Cut:
    """Return what to cut of a stage; an error where that can't be."""
    name, stmt = str(nest.block.name_hint), nest.block
    iterator = _iterator_along(stmt, along)
    if iterator is None or not any(iv.var.same_as(iterator) and iv.iter_type == SPATIAL for iv in stmt.iter_vars):
        raise ScheduleError(
            f"overlap: the dimension that {axis!r} shares is not carried through to block {name!r}; valid are stages "
            "that are pointwise in it, at least one of them shared over the axis"
        )
    driving = [loop for loop in nest.loops if uses(nest.bound[iterator], loop.loop_var)]
    own = [loop for loop in driving if bound_axis(loop) is None]
    if len(own) != 1:
        raise ScheduleError(
            f"overlap: block {name!r}: its dimension shared over {axis!r} is driven by {len(own)} loops beside the "
            "device loop; overlap before its loops are transformed"
        )
    if not isinstance(own[0].extent, tirx.IntImm):
        raise ScheduleError(
            f"overlap: block {name!r}: its loop {own[0].loop_var.name!r} runs over {own[0].extent}; chunks are of a "
            "number of iterations"
        )
    extent = int(own[0].extent)
    sliced = len(driving) > len(own)
    return Cut(name, own[0], sliced, extent if sliced else -(-extent // devices))


def _cut(sch: s_tir.Schedule, block: SBlockRV, cut: Cut, axis: str, mesh: Mesh, chunks: int | ExprRV) -> LoopRV:
    """Cut a loop of `block`'s stage into chunks; return the loop over them."""
    name, loop = query.name_of(sch, block), query.loop_rv(sch, block, cut.loop)
    factors = [chunks, None] if cut.sliced else [mesh.axis_size(axis), chunks, None]
    parts = query.checked("overlap", name, lambda: sch.split(loop, factors))
    if not cut.sliced:
        sch.annotate(parts[0], RING, axis)
    outer = parts[:1] if cut.sliced else parts[:2]
    nest, loops = query.nest_of(sch, block), sch.get_loops(block)
    bound = [own.loop_var for own in bound_loops(nest, SPATIAL).values()]
    cuts = [sch.get(part).loop_var for part in outer]
    places = {at for at, own in enumerate(nest.loops) if any(own.loop_var.same_as(var) for var in (*bound, *cuts))}
    order = [rv for rv, own in zip(loops, nest.loops) if any(own.loop_var.same_as(var) for var in bound)]
    between = [rv for at, rv in enumerate(loops[: 1 + max(places)]) if at not in places]
    if between:
        query.checked("overlap", name, lambda: sch.reorder(*order, *outer, *between))
    return outer[-1]


def _check_carried(
    tree: BlockTree, nest: Sequence[NestedBlock], loop: tirx.For, along: Mapping[tirx.Buffer, int]
) -> None:
    """Check that whatever a block of the stage touches of the chunked buffers lies in the chunk that `loop` is in."""
    for block in nest:
        inside = [iv.var for iv in driven_by(block, loop)]
        for buffer, indices in _touched(block.block):
            if buffer not in along or _is_input(tree, buffer):
                continue
            if not any(indices[along[buffer]].same_as(var) for var in inside):
                raise ScheduleError(
                    f"overlap: block {block.block.name_hint!r} reads {buffer.name!r} beyond its chunk of dimension "
                    f"{along[buffer]}; valid are stages that are pointwise in the chunked dimension"
                )


def _is_input(tree: BlockTree, buffer: tirx.Buffer) -> bool:
    """Return whether nothing writes `buffer`, so that any of it may be read at any time."""
    return not any(buffer.same_as(region.source) for nest in tree.blocks for region in nest.block.writes)
