"""Taking a scheduled function apart: what its blocks touch on which device, and what no program of a mesh may do."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.blocks import NestedBlock, ranges_of, statements, stays_in
from tvm_axe.analysis.expressions import alike, loads_in, substitute, unconditional_loads, uses
from tvm_axe.analysis.patterns import REDUCE
from tvm_axe.analysis.sharing import bound_axis, root_of
from tvm_axe.analysis.writing import first_unwritten
from tvm_axe.collective.arena import PAGE
from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.lower.pieces import linear, own_pieces, renumbered
from tvm_axe.lower.program import Access, Block, LocalIterator, Overlap, ScheduledProgram, ScheduledStage
from tvm_axe.schedule import OVERLAP, RING


@functools.lru_cache(maxsize=4)  # inserting, lowering and the cost model ask for one function in turn
def parse_program(func: tirx.PrimFunc, mesh: Mesh, page: int = PAGE) -> ScheduledProgram:
    """Take the scheduled `func` apart, for devices whose memory has pages of so many bytes.

    Raises
    ------
    LowerError
        If a parameter isn't a buffer of a fixed shape; a loop is bound to an axis that the mesh lacks or that has
        another number of devices; a nest holds more than loops and blocks; an iterator isn't in contiguous pieces; or
        a block reads what nothing has written.
    """
    name = str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "main"
    for param in func.params:
        if not tirx.is_buffer_var(param):
            raise LowerError(
                f"{name}: parameter {param.name!r} is not a buffer; a scheduled function takes buffers only"
            )
    if not isinstance(func.body, s_tir.SBlockRealize):
        raise LowerError(f"{name}: not a schedulable function; write it with @T.prim_func(s_tir=True)")
    root = func.body.block
    for buffer in (*func.params, *root.alloc_buffers):
        if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
            raise LowerError(
                f"{name}: buffer {buffer.name!r} has the shape {buffer.shape}; every extent must be a number"
            )
    coordinates = {axis: tirx.Var(axis, "int32") for axis in mesh.names}
    nests = [renumbered(nest, mesh) for nest in statements(root.body)]
    stages = tuple(ScheduledStage(nest, tuple(_blocks(nest, (), mesh, coordinates)), _overlap(nest)) for nest in nests)
    program = ScheduledProgram(name, mesh, tuple(func.params), tuple(root.alloc_buffers), stages, coordinates, page)
    _check_written(program)
    return program


def _check_order(within: tirx.Stmt) -> None:
    """Check that no loop within that over the chunks is over chunks or the ring, too."""
    loops: list[tirx.For] = []
    tvm_ffi.structural_walk(within, (tirx.For, loops.append))
    for loop in loops:
        if RING in loop.annotations or OVERLAP in loop.annotations:
            raise LowerError(
                f"loop {loop.loop_var.name!r} is {'around the ring' if RING in loop.annotations else 'over chunks'}, "
                "and within the loop over the chunks of its stage; leave these in the order in which overlap has them, "
                "the ring around the chunks"
            )


def _check_written(program: ScheduledProgram) -> None:
    """Check that what is read is there: an element of a parameter, or one that a block before has written."""
    nested = [NestedBlock(block.realize, block.loops) for block in program.blocks()]
    found = first_unwritten(nested, program.parameters)
    if found is None:
        return
    block, buffer, part = found.reader.block, found.buffer, found.part
    if not part:
        known = any(buffer.same_as(each) for each in program.intermediates)
        raise LowerError(
            f"block {block.name_hint!r} reads {buffer.name!r}, which "
            f"{'nothing has written by then' if known else 'nobody allocates'}, as upstream's cache_write of a block "
            "that updates its buffer, or its reverse_compute_inline of one of several readers, leaves it; apply them "
            "to others"
        )
    element = f"{buffer.name}[{', '.join(map(str, part))}]"
    if found.within:
        raise LowerError(
            f"block {block.name_hint!r} reads {element}, which nothing has written in that iteration of "
            f"{' and '.join(repr(str(loop.loop_var.name)) for loop in found.within)}; what one nest alone touches "
            "upstream keeps no longer than that, and its reverse_compute_at leaves such reads where the writer is "
            "masked: move the block to an outer loop, or split in pieces that divide"
        )
    raise LowerError(
        f"block {block.name_hint!r} reads {element}, which nothing has written by "
        "then, as upstream's rfactor of a reduction under a mask leaves it; split in pieces that divide, or "
        "leave rfactor out"
    )


def _overlap(nest: tirx.Stmt) -> Overlap | None:
    """What the annotations of the nest's outermost loops say of chunks."""
    ring, axis = None, None
    while isinstance(nest, tirx.For):
        if RING in nest.annotations:
            ring, axis = nest, str(nest.annotations[RING])
        if OVERLAP in nest.annotations:
            _check_order(nest.body)
            return Overlap(str(nest.annotations[OVERLAP]), nest, ring, axis)
        nest = nest.body
    return None


def _blocks(
    stmt: tirx.Stmt, loops: tuple[tirx.For, ...], mesh: Mesh, coordinates: Mapping[str, tirx.Var]
) -> list[Block]:
    if isinstance(stmt, tirx.For):
        return _blocks(stmt.body, (*loops, stmt), mesh, coordinates)
    if isinstance(stmt, tirx.SeqStmt):
        return [block for part in stmt.seq for block in _blocks(part, loops, mesh, coordinates)]
    if isinstance(stmt, s_tir.SBlockRealize):
        return [_block(stmt, loops, mesh, coordinates)]
    raise LowerError(
        f"a nest holds a {type(stmt).__name__}; a scheduled function is made of loops and blocks: schedule for the "
        "mesh first, each device's kernels afterwards"
    )


def _block(
    realize: s_tir.SBlockRealize, loops: tuple[tirx.For, ...], mesh: Mesh, coordinates: Mapping[str, tirx.Var]
) -> Block:
    block = realize.block
    if block.match_buffers or block.alloc_buffers or not isinstance(block.body, tirx.BufferStore):
        raise LowerError(
            f"block {block.name_hint!r}: its body is not one store; schedule for the mesh first (before blockize, "
            "tensorize or decompose_reduction), each device's kernels afterwards, and write a block for each store"
        )
    _check_domains(realize, loops)
    _check_indices(realize, loops)
    device, peers = _bound_loops(realize, loops, mesh)
    if root_of(block) is not None and not set(peers).isdisjoint(device):
        raise LowerError(
            f"block {block.name_hint!r} is reduced to one device (axe.root), and the devices of "
            f"{', '.join(sorted(set(peers).intersection(device)))} share its loops; leave one of the two out"
        )
    analyzer = Analyzer()
    for loop in loops:
        analyzer.bind(loop.loop_var, ir.Range(0, loop.extent))
    for axis, coordinate in coordinates.items():
        analyzer.bind(coordinate, ir.Range(0, mesh.axis_size(axis)))
    iterators, ranges = [], ranges_of(loops)
    for iv, value in zip(block.iter_vars, realize.iter_values):
        iterators.append(
            _local_iterator(str(block.name_hint), iv, value, device, coordinates, ranges, realize.predicate, analyzer)
        )
    for iterator in iterators:
        if iterator.local is not None:
            analyzer.bind(iterator.local.var, iterator.local.dom)
    substitution = {iterator.whole.var: iterator.replacement for iterator in iterators}
    told = [*realize.iter_values, realize.predicate]  # a mask may be all that tells devices apart
    shared = frozenset(axis for axis, loop in device.items() if uses(told, loop.loop_var))
    accesses = []
    for buffer, indices, is_write in _touched(block):
        local = tuple(analyzer.simplify(substitute(index, substitution)) for index in indices)
        found = [own_pieces(index, coordinates, device, mesh, analyzer) for index in local]
        pieces = {dim: own for dim, own in enumerate(found) if own}
        accesses.append(Access(buffer, local, pieces, shared, is_write))
    return Block(realize, loops, device, peers, tuple(iterators), tuple(accesses), analyzer)


def _check_domains(realize: s_tir.SBlockRealize, loops: Sequence[tirx.For]) -> None:
    """Check that iterators stay in their domains: what is beyond lies in another row, or on another device."""
    for loop in loops:
        if not (isinstance(loop.min, tirx.IntImm) and isinstance(loop.extent, tirx.IntImm)):
            raise LowerError(
                f"block {realize.block.name_hint!r}: its loop {loop.loop_var.name!r} runs from {loop.min} over "
                f"{loop.extent}; a loop of a mesh program runs over a number of iterations: keep blocks apart that "
                "upstream moves into others' masked loops"
            )
    if loads_in(realize.predicate):
        raise LowerError(
            f"block {realize.block.name_hint!r} is masked by what it loads ({realize.predicate}), as upstream's "
            "inlining of a copy into a store at a loaded index leaves it; keep the copy"
        )
    for iv, value in zip(realize.block.iter_vars, realize.iter_values):
        if not stays_in(value, iv.dom, ranges_of(loops), realize.predicate):
            masked = "" if isinstance(realize.predicate, tirx.IntImm) else f" where {realize.predicate}"
            raise LowerError(
                f"block {realize.block.name_hint!r}: iterator {iv.var.name!r} = {value}{masked} is not seen to stay "
                f"below its extent {iv.dom.extent}; upstream's cache_write, for one, drops the mask behind a split "
                "that doesn't divide: split in pieces that do, or split last"
            )


def _check_indices(realize: s_tir.SBlockRealize, loops: Sequence[tirx.For]) -> None:
    """Check that a block stays in its buffers: what is beyond belongs to another device.

    What is read on a condition isn't looked at, nor is an index that is loaded, which only the caller knows.
    """
    block = realize.block
    domains = {iv.var: iv.dom for iv in block.iter_vars}
    bound = {iv.var: value for iv, value in zip(block.iter_vars, realize.iter_values)}
    touched = [
        (block.body.buffer, block.body.indices),
        *((load.source, load.indices) for load in unconditional_loads(block.body)),
    ]
    for buffer, indices in touched:
        for index, extent in zip(indices, buffer.shape):
            domain = ir.Range(0, extent)
            if loads_in(index) or stays_in(index, domain, domains):
                continue
            if not stays_in(substitute(index, bound), domain, ranges_of(loops), realize.predicate):
                raise LowerError(
                    f"block {block.name_hint!r}: index {index} of {buffer.name!r} is not seen to stay below the extent "
                    f"{extent}; what lies beyond is another row, or another device's"
                )


def _bound_loops(
    realize: s_tir.SBlockRealize, loops: Sequence[tirx.For], mesh: Mesh
) -> tuple[dict[str, tirx.For], dict[str, tirx.For]]:
    """The block's device loops and peer loops by mesh axis; an axis of one device binds nothing."""
    device: dict[str, tirx.For] = {}
    peers: dict[str, tirx.For] = {}
    name = realize.block.name_hint
    for loop in loops:
        axis = bound_axis(loop)
        if axis is None:
            continue
        if axis not in mesh.names:
            raise LowerError(
                f"block {name!r}: loop {loop.loop_var.name!r} is bound to {axis!r}, which the mesh "
                f"({mesh}) doesn't have; compile for the mesh that it was scheduled for"
            )
        if int(loop.extent) != mesh.axis_size(axis):
            raise LowerError(
                f"block {name!r}: loop {loop.loop_var.name!r} has {loop.extent} iterations and is bound to {axis!r}, "
                f"which has {mesh.axis_size(axis)} devices; compile for the mesh that it was scheduled for"
            )
        if mesh.axis_size(axis) == 1:
            continue
        pairs = zip(realize.block.iter_vars, realize.iter_values)
        kinds = {iv.iter_type for iv, value in pairs if uses(value, loop.loop_var)}
        found = peers if kinds == {REDUCE} else device
        if axis in found:
            raise LowerError(f"block {name!r} has two loops bound to {axis!r} of one kind; bind one of them")
        found[axis] = loop
    return device, peers


def _local_iterator(
    name: str,
    iv: tirx.IterVar,
    value: tirx.Expr,
    device: Mapping[str, tirx.For],
    coordinates: Mapping[str, tirx.Var],
    ranges: Mapping[tirx.Var, ir.Range],
    predicate: tirx.Expr,
    analyzer: Analyzer,
) -> LocalIterator:
    bound = [(axis, loop.loop_var) for axis, loop in device.items() if uses(value, loop.loop_var)]
    if not bound:
        local = tirx.IterVar(iv.dom, tirx.Var(iv.var.name, iv.var.ty), iv.iter_type)
        return LocalIterator(iv, local, value, local.var)
    base, steps = value, list[int]()
    for _, loop_var in bound:
        step, base = linear(base, loop_var)
        steps.append(step or 0)
    piece = min(steps)
    if piece < 1 or not stays_in(base, ir.Range(0, piece), ranges, predicate):
        raise LowerError(
            f"block {name!r}: iterator {iv.var.name!r} = {value} is not shared over "
            f"{' and '.join(repr(axis) for axis, _ in bound)} in contiguous pieces; shard its loop with tvm_axe's shard"
        )
    terms = [coordinates[axis] if step == 1 else coordinates[axis] * step for (axis, _), step in zip(bound, steps)]
    start = functools.reduce(operator.add, terms)
    if piece == 1:
        return LocalIterator(iv, None, base, start)
    local = tirx.IterVar(ir.Range(0, piece), tirx.Var(iv.var.name, iv.var.ty), iv.iter_type)
    return LocalIterator(iv, local, base, start + local.var)


def _touched(block: s_tir.SBlock) -> list[tuple[tirx.Buffer, Sequence[tirx.Expr], bool]]:
    """Every load and store of the block; a sum's own running value is the store's, not a load."""
    store = block.body
    found: list[tuple[tirx.Buffer, Sequence[tirx.Expr], bool]] = [(store.buffer, store.indices, True)]
    for load in loads_in([store.value, list(store.indices)]):
        running = load.source.same_as(store.buffer) and alike(load.indices, store.indices)
        if not (running and block.init is not None):
            found.append((load.source, load.indices, False))
    return found
