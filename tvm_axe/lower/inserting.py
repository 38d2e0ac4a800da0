"""Insert redistributions: what a stage touches and its device doesn't own is moved, by copies between the stages.

A program that `derive` refuses because a block reaches across the mesh becomes another ordinary program that it takes,
and that computes the same. Seven rewrites do it:

======== ================================ ======================================================================
rewrite  of a block that                  leaves
======== ================================ ======================================================================
halo     reads little of what others own  a copy of each device's piece and what it reads around it, in front of its
                                          nest (`tvm_axe.lower.halo`)
recut    reads its piece of another       a copy in front of its nest of which the axis cuts that dimension
         dimension than the axis cuts
gather   reads what others own            a copy of the buffer in front of its nest, which all devices hold
hold     writes what others own           a nest that works on a copy which all devices hold; behind it each
                                          device takes over its own share
apart    writes its device's part of what  a block that writes a buffer indexed by its iterators, each device its
         all devices hold, not as a copy   own part; behind its nest all devices copy it to where it belongs
relay    touches a parameter that is       all blocks on a copy that lies as they touch it, taken over before the
         declared in no contiguous pieces, first of them and back behind the last
         or carries state in its part of
         one that all devices hold
widen    sums what it casts, over devices  a copy of each device's terms in the type of the sum, which an engine adds;
         that see no peer's memory         without it a kernel would read its peers'
======== ================================ ======================================================================

Where none of them can stand, as a loop carries what devices exchange from step to step, its steps become nests of their
own (`tvm_axe.lower.stepping`), and they are tried again.

What is copied but for a halo is whole: an all-gather where a shift would do. Who wants less schedules it
(`tvm_axe.schedule.redistribute`, `reorder_collective`, `send`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tvm import s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import OVERLAP, RING, layouts_of
from tvm_axe.analysis.blocks import NestedBlock, covers, element, nested_blocks, reads_of, statements
from tvm_axe.analysis.directions import directions, reached
from tvm_axe.analysis.elements import cover, one_to_one
from tvm_axe.analysis.expressions import alike, loads_in, substitute
from tvm_axe.analysis.patterns import summed
from tvm_axe.analysis.sharing import bound_axis
from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.layout.sharding import Cuts
from tvm_axe.lower.copies import copy_nest, gathered, nest_of_copy, shares_of
from tvm_axe.lower.derive import derive_steps
from tvm_axe.lower.halo import Halo, halo_of
from tvm_axe.lower.infer import Sharding, agreed, infer_shardings
from tvm_axe.lower.loads import reading, reads_beside, running
from tvm_axe.lower.parsing import parse_program
from tvm_axe.lower.pieces import pieces_of, renumbered, shared_pieces, with_block
from tvm_axe.lower.program import ScheduledProgram, ScheduledStage
from tvm_axe.lower.reaching import APART, GATHER, HOLD, RELAY, WIDEN, Entangled, Unowned
from tvm_axe.lower.separating import separated
from tvm_axe.lower.stepping import in_steps

__all__ = ["redistributed"]


def redistributed(func: tirx.PrimFunc, mesh: Mesh, apart: Collection[str] = ()) -> tirx.PrimFunc:
    """Insert the copies that `func` needs on `mesh`; each says of itself what it is for (``axe.inserted``).

    Along the axes in `apart` no kernel sees its peers' slabs: there blocks that were fused are nests of their own
    again, stages don't overlap, and what a kernel would take from its peers is gathered.

    Raises
    ------
    LowerError
        If the program is refused for another reason; or a copy can't stand where it is needed: beside stages that
        overlap, or where a nest goes on with what it writes.
    LayoutError
        If a declared layout doesn't fit its parameter or the mesh.
    """
    func = _in_pieces(_in_turn(func, apart), mesh)
    rounds = 4 * len(nested_blocks(func.body.block.body)) + 4  # each block reads and writes, over two axes at most
    for _ in range(rounds):
        program = parse_program(func, mesh)
        shardings = infer_shardings(program, layouts_of(func))
        try:
            derive_steps(program, shardings, apart)
        except (Unowned, Entangled) as found:
            last = found
            try:
                func = _mended(func, found, program, shardings, apart)
            except LowerError:
                steps = _in_steps(func, found)
                if steps is None:
                    raise
                return redistributed(steps, mesh, apart)
        else:
            return func
    raise LowerError(f"{last}; {rounds} copies were inserted, and it still does: share its loops in equal pieces")


def _mended(
    func: tirx.PrimFunc,
    found: Unowned | Entangled,
    program: ScheduledProgram,
    shardings: Mapping[tirx.Buffer, Sharding],
    apart: Collection[str],
) -> tirx.PrimFunc:
    """The function with what was `found` first no longer in it; `LowerError` where none of the rewrites does that."""
    if isinstance(found, Entangled):
        return _separated(func, found)
    sharding = shardings[found.buffer]
    remedy = found.remedy if sharding.memory is None else RELAY
    of = f"{found.buffer.name} for {found.block.name_hint}"
    less = _less_than_all(func, found, program, sharding, of, apart) if remedy == GATHER else None
    try:
        return less or _REMEDIES[remedy](func, found, sharding, f"{remedy} {of}")
    except LowerError:
        cuts = _own_cuts(func, found, program) if remedy == APART else None
        if cuts is None:
            raise
        return _on_copy(func, found.buffer, mesh=program.mesh, cuts=cuts, why=f"{RELAY} {of}")


def _in_pieces(func: tirx.PrimFunc, mesh: Mesh) -> tirx.PrimFunc:
    """Have devices share what they share in other than contiguous pieces in such: other devices do the iterations."""
    nests = statements(func.body.block.body)
    changed = [renumbered(nest, mesh, cyclic=True) for nest in nests]
    if all(new.same_as(nest) for nest, new in zip(nests, changed)):
        return func
    return _rebuilt(func, changed, [])


def _in_turn(func: tirx.PrimFunc, apart: Collection[str]) -> tirx.PrimFunc:
    """Have stages that overlap over an axis in `apart` run one after the other: what their loops say of chunks goes."""
    nests = statements(func.body.block.body)
    bound = {bound_axis(loop) for nest in nests for block in nested_blocks(nest) for loop in block.loops}
    if bound.isdisjoint(apart):
        return func
    changed = [_tvm.structural_map(nest, (tirx.For, _without_chunks)) for nest in nests]
    if all(new.same_as(nest) for nest, new in zip(nests, changed)):
        return func
    return _rebuilt(func, changed, [])


def _without_chunks(loop: tirx.For) -> tirx.For:
    kept = {key: value for key, value in loop.annotations.items() if key not in (OVERLAP, RING)}
    if len(kept) == len(loop.annotations):
        return loop
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, kept)


def _separated(func: tirx.PrimFunc, error: LowerError, nest: tirx.Stmt | None = None) -> tirx.PrimFunc:
    """Have each block of a nest be one of its own; `error` where that isn't seen to be the same."""
    if isinstance(error, Entangled):
        nest, _ = _nest_of(func, error)
    parts = None if nest is None else separated(nest)
    if nest is None or parts is None:
        raise error
    return _replaced(func, nest, parts, [])


def _in_steps(func: tirx.PrimFunc, found: Unowned | Entangled) -> tirx.PrimFunc | None:
    """Have each step of the loop around the block be nests of its own; None where there is no such loop."""
    nest, _ = _nest_of(func, found)
    steps = in_steps(nest)
    return None if steps is None else _replaced(func, nest, steps, [])


def _less_than_all(
    func: tirx.PrimFunc,
    found: Unowned,
    program: ScheduledProgram,
    sharding: Sharding,
    of: str,
    apart: Collection[str],
) -> tirx.PrimFunc | None:
    """Have the nest read a copy of what each device reads; None where that is all, or the nest may write it, too."""
    nest, blocks = _nest_of(func, found)
    if any(_writes(block, found.buffer) for block in blocks) and not reads_beside(blocks, found.buffer):
        return None
    stage = next(s for s in program.stages if any(b.realize.block.same_as(found.block) for b in s.blocks))
    halo = halo_of(program, stage.blocks, found.buffer, sharding)
    if halo is not None and halo.axis not in apart:
        return _with_halo(func, nest, program, halo, sharding, f"halo {of}")
    cuts = _recut(stage, found.buffer, sharding)
    if cuts is None:
        return None
    copy = tirx.decl_buffer(sharding.shape, found.buffer.dtype, f"{found.buffer.name}_recut", layout=None)
    before = copy_nest(found.buffer, copy, program.mesh, cuts, f"recut {of}")
    return _replaced(func, nest, [before, substitute(nest, {found.buffer: copy})], [copy])


def _recut(stage: ScheduledStage, buffer: tirx.Buffer, sharding: Sharding) -> Cuts | None:
    """Cuts in which an axis shares another dimension, of which all that a stage reads is on its device; None if none.

    Only of an axis that shares a dimension alone: engines do it in one step then, an all-to-all.
    """
    accesses = [access for block in stage.blocks for access in block.accesses if access.buffer.same_as(buffer)]
    if any(access.is_write for access in accesses) or sharding.partial or sharding.root is not None:
        return None
    for dim, cut in enumerate(sharding.cuts):
        if len(cut) != 1 or all(sharding.holds(access, dim) for access in accesses):
            continue
        for other, extent in enumerate(sharding.shape):
            pieces = pieces_of(extent, cut, sharding.mesh)
            own = all(shared_pieces(access.pieces.get(other, ()), pieces) for access in accesses)
            if own and not sharding.cuts[other]:
                cuts = list(sharding.cuts)
                cuts[dim], cuts[other] = (), cut
                return tuple(cuts)
    return None


def _with_halo(
    func: tirx.PrimFunc, nest: tirx.Stmt, program: ScheduledProgram, halo: Halo, sharding: Sharding, why: str
) -> tirx.PrimFunc:
    copy, cuts = halo.copy(program.mesh), list(sharding.cuts)
    cuts[halo.dim : halo.dim + 1] = [(halo.axis,), ()]
    before = nest_of_copy(
        str(copy.name),
        [int(extent) for extent in copy.shape],
        lambda v: (copy, list(v)),
        lambda v: (halo.buffer, halo.source(v)),
        why,
        shares_of(copy, program.mesh, cuts),
        halo.exists,
    )
    return _replaced(func, nest, [before, halo.read_by(nest, program, copy)], [copy])


def _gather(func: tirx.PrimFunc, found: Unowned, sharding: Sharding, why: str) -> tirx.PrimFunc:
    """Have the nest read a copy that all devices hold."""
    nest, blocks = _nest_of(func, found)
    before, whole = gathered(found.buffer, sharding, why)
    if any(_writes(block, found.buffer) for block in blocks):
        if not reads_beside(blocks, found.buffer):
            own = any(block.block.same_as(found.block) and _writes(block, found.buffer) for block in blocks)
            why_not = _CARRIED if own else "its nest writes the buffer, too"
            return _separated(func, _refused(found, why_not), nest)
        return _replaced(func, nest, [*before, reading(nest, blocks, found.buffer, whole[-1])], whole)
    return _replaced(func, nest, [*before, substitute(nest, {found.buffer: whole[-1]})], whole)


def _hold(func: tirx.PrimFunc, found: Unowned, sharding: Sharding, why: str) -> tirx.PrimFunc:
    """Have the nest work on a copy that all devices hold, of which each then takes over its own share."""
    nest, blocks = _nest_of(func, found)
    before, whole = gathered(found.buffer, sharding, why)
    if _is_written_whole(blocks, found.buffer):
        before, whole = [], whole[-1:]
    behind = copy_nest(whole[-1], found.buffer, sharding.mesh, sharding.cuts, why)
    return _replaced(func, nest, [*before, substitute(nest, {found.buffer: whole[-1]}), behind], whole)


def _apart(func: tirx.PrimFunc, found: Unowned, sharding: Sharding, why: str) -> tirx.PrimFunc:
    """Have the block write a buffer that its iterators index, and all devices copy that to where it belongs."""
    nest, blocks = _nest_of(func, found)
    block = next(other for other in blocks if other.block.same_as(found.block))
    statement, buffer = block.block, found.buffer
    others = [other for other in blocks if other is not block]
    if any(_writes(other, buffer) or _reads(other, buffer) for other in others):
        return _separated(func, _refused(found, "other blocks of its nest use the buffer, too"), nest)
    kinds = {iv.iter_type for iv in statement.iter_vars}
    spatial = [iv for iv in statement.iter_vars if iv.iter_type == tirx.IterVar.DataPar]
    reduces = tirx.IterVar.CommReduce in kinds
    if kinds.difference((tirx.IterVar.DataPar, tirx.IterVar.CommReduce)) or (reduces and statement.init is None):
        raise _refused(found, "its iterations have an order")
    if not covers(block.realize, block.loops):
        raise _refused(found, "it doesn't run over all of its iterators")
    store: tirx.BufferStore = statement.body
    extents = {iv.var: int(iv.dom.extent) for iv in spatial}
    if not one_to_one(store, extents):
        raise _refused(found, "two iterations may store into one element")
    others_read = [] if _in_place(store) else reads_beside([block], buffer)
    if others_read is None:
        raise _refused(found, _CARRIED)
    apart = tirx.decl_buffer(list(extents.values()), buffer.dtype, f"{buffer.name}_apart", layout=None)
    at = list(extents)
    body = tirx.BufferStore(apart, running(store, apart, at) if reduces else store.value, at)
    init = None if statement.init is None else tirx.BufferStore(apart, statement.init.value, at)
    changed = s_tir.SBlock(
        statement.iter_vars,
        [
            *(region for region in statement.reads if not (reduces and region.source.same_as(buffer))),
            *(element(buffer, load.indices) for load in others_read if reduces),
        ],
        [element(apart, at)],
        statement.name_hint,
        body,
        init,
        annotations=dict(statement.annotations),
    )
    realize = s_tir.SBlockRealize(block.realize.iter_values, block.realize.predicate, changed)
    new_nest = with_block(nest, block.realize, realize)
    behind = nest_of_copy(
        f"{buffer.name}_{statement.name_hint}",
        list(extents.values()),
        lambda v: (buffer, [substitute(index, dict(zip(at, v))) for index in store.indices]),
        lambda v: (apart, list(v)),
        why,
    )
    return _replaced(func, nest, [new_nest, behind], [apart])


def _relay(func: tirx.PrimFunc, found: Unowned, sharding: Sharding, why: str) -> tirx.PrimFunc:
    """Have all blocks work on a copy of a parameter, which lies as they touch it."""
    return _on_copy(func, found.buffer, mesh=sharding.mesh, cuts=((),) * len(sharding.shape), why=why)


def _on_copy(func: tirx.PrimFunc, buffer: tirx.Buffer, *, mesh: Mesh, cuts: Cuts, why: str) -> tirx.PrimFunc:
    """Have all blocks work on a copy of a parameter; what was given is taken over in pieces of `cuts`."""
    direction = dict(zip(func.params, directions(func)))[buffer]
    own = tirx.decl_buffer([int(n) for n in buffer.shape], buffer.dtype, f"{buffer.name}_own", layout=None)
    before = [copy_nest(buffer, own, mesh, cuts, why)] if direction.is_input else []
    behind = [copy_nest(own, buffer, mesh, ((),) * len(cuts), why)] if direction.is_output else []
    nests = [substitute(nest, {buffer: own}) for nest in statements(func.body.block.body)]
    return _rebuilt(func, [*before, *nests, *behind], [own])


def _own_cuts(func: tirx.PrimFunc, found: Unowned, program: ScheduledProgram) -> Cuts | None:
    """How devices share a parameter of which each touches the part alone that it writes; None if one touches more."""
    buffer = found.buffer
    if not any(buffer.same_as(param) for param in func.params):
        return None
    shape = tuple(int(extent) for extent in buffer.shape)
    own = Sharding.blocks(shape, program.mesh, agreed([found.access], shape, program.mesh))
    accesses = [access for block in program.blocks() for access in block.accesses if access.buffer.same_as(buffer)]
    inside = all(own.holds(access, dim) for access in accesses for dim in range(len(shape)))
    return own.cuts if own.axes and inside else None


def _widen(func: tirx.PrimFunc, found: Unowned, sharding: Sharding, why: str) -> tirx.PrimFunc:
    """Have the block sum terms that are cast ahead, each on the device that has it."""
    nest, blocks = _nest_of(func, found)
    block = next(other for other in blocks if other.block.same_as(found.block))
    statement, load = block.block, summed(block.block)
    assert load is not None  # what is to be widened is a sum's
    store: tirx.BufferStore = statement.body
    terms = tirx.decl_buffer(sharding.shape, store.buffer.dtype, f"{found.buffer.name}_terms", layout=None)
    before = copy_nest(found.buffer, terms, sharding.mesh, sharding.cuts, why)
    own = tirx.BufferLoad(store.buffer, store.indices)
    changed = s_tir.SBlock(
        statement.iter_vars,
        [element(terms, load.indices)],
        statement.writes,
        statement.name_hint,
        tirx.BufferStore(store.buffer, own + tirx.BufferLoad(terms, load.indices), store.indices),
        statement.init,
        annotations=dict(statement.annotations),
    )
    realize = s_tir.SBlockRealize(block.realize.iter_values, block.realize.predicate, changed)
    return _replaced(func, nest, [before, with_block(nest, block.realize, realize)], [terms])


_CARRIED = (
    "it reads elements of the buffer that other iterations write, and devices do these at the same time; share a loop "
    "whose iterations take nothing from each other"
)
_REMEDIES = {GATHER: _gather, HOLD: _hold, APART: _apart, RELAY: _relay, WIDEN: _widen}


# ---- The function's tree ---------------------------------------------------------------------------------------------


def _nest_of(func: tirx.PrimFunc, found: Unowned | Entangled) -> tuple[tirx.Stmt, list[NestedBlock]]:
    """The nest that holds the block, and its blocks."""
    for nest in statements(func.body.block.body):
        blocks = nested_blocks(nest)
        if any(block.block.same_as(found.block) for block in blocks):
            loops = [loop for block in blocks for loop in block.loops]
            if any(key in loop.annotations for loop in loops for key in (OVERLAP, RING)):
                raise _refused(found, "its stage overlaps others")
            return nest, blocks
    raise found


def _replaced(
    func: tirx.PrimFunc, nest: tirx.Stmt, by: Sequence[tirx.Stmt], allocated: Sequence[tirx.Buffer]
) -> tirx.PrimFunc:
    """The function with other nests in the place of one, and more buffers."""
    nests = [new for old in statements(func.body.block.body) for new in (by if old.same_as(nest) else [old])]
    return _rebuilt(func, nests, allocated)


def _rebuilt(func: tirx.PrimFunc, nests: Sequence[tirx.Stmt], allocated: Sequence[tirx.Buffer]) -> tirx.PrimFunc:
    """The function of these nests, with more buffers."""
    root = func.body.block
    body = nests[0] if len(nests) == 1 else tirx.SeqStmt(nests)
    block = s_tir.SBlock(
        [], [], [], root.name_hint, body, alloc_buffers=[*root.alloc_buffers, *allocated],
        annotations=dict(root.annotations),
    )  # fmt: skip
    realize = s_tir.SBlockRealize([], True, block)
    return s_tir.renew_defs(
        tirx.PrimFunc(list(func.params), realize, func.ret_type).with_attrs(dict(func.attrs.items()))
    )


def _reads(block: NestedBlock, buffer: tirx.Buffer) -> bool:
    return any(region.source.same_as(buffer) for region in reads_of(block.block))


def _writes(block: NestedBlock, buffer: tirx.Buffer) -> bool:
    return any(region.source.same_as(buffer) for region in block.block.writes)


def _is_written_whole(blocks: Sequence[NestedBlock], buffer: tirx.Buffer) -> bool:
    """Whether blocks write all of a buffer and read nothing of it, so that nothing of it has to be there before."""
    shape = [int(extent) for extent in buffer.shape]
    written = [
        reached(block, region, shape)
        for block in blocks
        for region in block.block.writes
        if region.source.same_as(buffer)
    ]
    known = [part for part in written if part is not None]
    return not any(_reads(block, buffer) for block in blocks) and cover(shape, known)


def _in_place(store: tirx.BufferStore) -> bool:
    """Whether the block reads no other element of what it writes than the one that it writes."""
    own = [load for load in loads_in(store.value) if load.source.same_as(store.buffer)]
    return all(alike(load.indices, store.indices) for load in own)


def _refused(found: LowerError, why: str) -> LowerError:
    return LowerError(f"{found}; nothing can be inserted for it, as {why}")
