"""Any block by itself: vectors along what lies side by side in memory, the loops around them in parallel.

    for outer loops (parallel):
      for vectors of the innermost:                  # the last, which may not be whole, is peeled off
        for reductions:
          for lanes (vectorised):
            C[.., lanes] += ..

A reduction along what lies side by side has a few vectors of partial results instead, as in rows
(`tvm_axe.nests.rows`). Extents may be symbolic, but for those of vectors. What one block leaves another goes through
memory, so this is for functions that no other form takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import mul

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.sym import Analyzer
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import is_choice, is_zero, loads_in, substitute, uses
from tvm_axe.analysis.patterns import REDUCE, SPATIAL
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.machines.narrowing import HINT
from tvm_axe.machines.target import cores, vector_bits
from tvm_axe.nests.contraction import is_own_nest
from tvm_axe.nests.rows import reduce_in_row

__all__ = ["is_loops", "loop_schedules"]

_PARTIALS = 4  # vectors of partial results
_SEVERAL = 4  # vectors that the innermost loops have, before more of them are fused


def is_loops(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether a block can be scheduled by itself: one store in a nest as it was written."""
    stmt, loops = sch.get(block), [sch.get(loop) for loop in sch.get_loops(block)]
    kinds = {iterator.iter_type for iterator in stmt.iter_vars}
    return bool(
        loops
        and isinstance(stmt.body, tirx.BufferStore)
        and kinds <= {SPATIAL, REDUCE}
        and is_own_nest(loops, _tvm.block_realize(sch, block))
    )


def loop_schedules(sch: s_tir.Schedule, name: str, target: Target) -> list[partial[None]]:
    """What may be made of a block for which `is_loops` holds, the best first; the last is always possible.

    Each schedules the block in place, by stock instructions only.
    """
    stmt = sch.get(sch.get_sblock(name))
    spatial = [n for n, iterator in enumerate(stmt.iter_vars) if iterator.iter_type == SPATIAL]
    reduced = [n for n, iterator in enumerate(stmt.iter_vars) if iterator.iter_type == REDUCE]
    by_elements = partial(_by_elements, name=name, spatial=spatial, reduced=reduced, target=target)
    elements = [by_elements, *([partial(by_elements, fuses=False)] if _has_unknown(stmt, spatial) else [])]
    dtypes = [str(stmt.body.buffer.dtype), *(str(load.source.dtype) for load in loads_in(stmt.body))]
    most = vector_bits(target) // max(32, *map(dtype_bits, dtypes))
    # A last vector that isn't whole upstream peels off only where all extents are known.
    whole = any(not isinstance(n, tirx.IntImm) for buffer in _buffers(sch) for n in buffer.shape)
    for lanes in (most, *((most // 2, most // 4) if whole else ())):
        vectors = _vectors(stmt, spatial, bool(reduced), lanes)
        if vectors and not (whole and _extent(stmt, vectors) % lanes):
            change = partial(_by_vectors, name=name, vectors=vectors, reduced=reduced, lanes=lanes, target=target)
            return [change, *elements]
        along = not vectors and reduced and spatial and _goes_along(stmt, reduced[-1], lanes)
        if along and _tvm.has_partials(dtypes[0]) and not (whole and _extent(stmt, reduced) % lanes):
            change = partial(_by_partials, name=name, spatial=spatial, reduced=reduced, lanes=lanes, target=target)
            return [change, *elements]
    return elements


def _buffers(sch: s_tir.Schedule) -> list[tirx.Buffer]:
    return [buffer for buffer in sch.mod["main"].params if tirx.is_buffer_var(buffer)]


def _extent(stmt: s_tir.SBlock, loops: Sequence[int]) -> int:
    """Iterations of these loops together; 1, which no vector divides, of symbolic ones."""
    extents = [stmt.iter_vars[n].dom.extent for n in loops]
    return reduce(mul, map(int, extents), 1) if all(isinstance(n, tirx.IntImm) for n in extents) else 1


def _has_unknown(stmt: s_tir.SBlock, loops: Sequence[int]) -> bool:
    """Whether several of these are unknown: fusing them upstream may fail at their indices."""
    return sum(not isinstance(stmt.iter_vars[n].dom.extent, tirx.IntImm) for n in loops) > 1


def _by_vectors(
    sch: s_tir.Schedule, name: str, vectors: Sequence[int], reduced: Sequence[int], lanes: int, target: Target
) -> None:
    """Vectors along the loops of these positions, which are the last ones of the result."""
    block = sch.get_sblock(name)
    loops = sch.get_loops(block)
    outer = [loop for n, loop in enumerate(loops) if n not in vectors and n not in reduced]
    sums = [loops[n] for n in reduced]
    sch.reorder(*outer, *(loops[n] for n in vectors), *sums)
    inner = sch.fuse(*(loops[n] for n in vectors))
    whole = int(sch.get(inner).extent) % lanes == 0
    turns, lane = sch.split(inner, [None, lanes])
    if sums:
        sch.reorder(turns, *sums, lane)
    sch.vectorize(lane)
    if not whole and _is_of_loops(sch.get(block)):
        sch.annotate(turns, HINT, 1)
    _in_parallel(sch, outer if _are_many(sch, outer, target) or not whole else [*outer, turns], target)
    if sums:
        sch.decompose_reduction(block, sums[0])


def _is_of_loops(stmt: s_tir.SBlock) -> bool:
    """Whether every index is made of the block's iterators alone.

    Of what is loaded or given, a row's number or a device's, where it is read or stored, upstream keeps 64 bits where
    it has made loops of 32, and its partitioning of loops fails to compare them.
    """
    iterators = {iterator.var for iterator in stmt.iter_vars}
    found: list[tirx.Var] = []
    for indices in (stmt.body.indices, *(load.indices for load in loads_in(stmt.body))):
        for index in indices:
            if loads_in(index):
                return False
            tvm_ffi.structural_walk(index, (tirx.Var, found.append))
    return iterators.issuperset(found)


def _by_partials(
    sch: s_tir.Schedule, name: str, spatial: Sequence[int], reduced: Sequence[int], lanes: int, target: Target
) -> None:
    """Vectors of partial results."""
    block = sch.get_sblock(name)
    loops = sch.get_loops(block)
    count = _extent(sch.get(block), reduced)
    sch.reorder(*(loops[n] for n in (*spatial, *reduced)))
    row = sch.fuse(*(loops[n] for n in spatial))
    if count % lanes == 0:
        if cores(target) > 1:
            sch.parallel(row)
        several = next((n for n in range(_PARTIALS, 1, -1) if count % (n * lanes) == 0), 1)
        reduce_in_row(sch, block, row, 1, several * lanes, lanes)
        return
    # Upstream's `compute_at` loses the condition that the last vector isn't whole, so that the nests stay apart.
    turns, lane = sch.split(sch.fuse(*(loops[n] for n in reduced)), [None, lanes])
    first = sch.rfactor(lane, len(sch.get(block).body.indices))
    *rows, turns, lane = sch.get_loops(first)
    sch.vectorize(lane)
    sch.annotate(turns, HINT, 1)
    _in_parallel(sch, rows, target)
    sch.decompose_reduction(first, turns)
    _in_parallel(sch, sch.get_loops(block)[:-1], target)


def _by_elements(
    sch: s_tir.Schedule,
    name: str,
    spatial: Sequence[int],
    reduced: Sequence[int],
    target: Target,
    fuses: bool = True,
) -> None:
    """Elements in parallel, one after the other; only those of the first loop where upstream can't fuse them."""
    loops = sch.get_loops(sch.get_sblock(name))
    if spatial and reduced:
        sch.reorder(*(loops[n] for n in (*spatial, *reduced)))
    outer = [loops[n] for n in (spatial if fuses else spatial[:1])]
    _in_parallel(sch, outer[:-1] if _are_many(sch, outer[:-1], target) else outer, target)
    if any(not isinstance(sch.get(loops[n]).extent, tirx.IntImm) for n in reduced):
        # A sum of no terms is set, too.
        sch.decompose_reduction(sch.get_sblock(name), loops[reduced[0]])


def _are_many(sch: s_tir.Schedule, loops: Sequence[LoopRV], target: Target) -> bool:
    """Whether loops have iterations for all cores."""
    extents = [sch.get(loop).extent for loop in loops]
    constant = [int(extent) for extent in extents if isinstance(extent, tirx.IntImm)]
    return len(constant) < len(extents) or reduce(mul, constant, 1) >= cores(target)


def _in_parallel(sch: s_tir.Schedule, loops: Sequence[LoopRV], target: Target) -> None:
    if loops and cores(target) > 1:
        sch.parallel(sch.fuse(*loops))


def _vectors(stmt: s_tir.SBlock, spatial: Sequence[int], reduces: bool, lanes: int) -> list[int]:
    """The last spatial loops, fused to one along which vectors go; none where no vector is side by side in memory."""
    indices = [index for index in stmt.body.indices if not isinstance(index, tirx.IntImm)]
    found: list[int] = []
    for n in reversed(spatial):
        trailing = [n, *found]
        if not isinstance(stmt.iter_vars[n].dom.extent, tirx.IntImm):
            break
        if not indices or not indices.pop().same_as(stmt.iter_vars[n].var) or not _side_by_side(stmt, trailing, lanes):
            break
        found = trailing
        if reduces or _extent(stmt, found) >= _SEVERAL * lanes:
            break
    return found if _extent(stmt, found) >= lanes else []


def _goes_along(stmt: s_tir.SBlock, reduced: int, lanes: int) -> bool:
    """Whether a reduction's last loop is long enough for vectors, and all that it reads lies side by side or is the
    same."""
    return _extent(stmt, [reduced]) >= 2 * lanes and _side_by_side(stmt, [reduced], lanes)


def _side_by_side(stmt: s_tir.SBlock, loops: Sequence[int], lanes: int) -> bool:
    """Whether the elements of a vector along some loops, fused, are side by side, or the same, wherever it is.

    What is chosen by a condition has to be chosen for all of a vector.
    """
    analyzer = Analyzer()
    dtype = stmt.iter_vars[loops[-1]].var.ty
    turn, lane = tirx.Var("turn", dtype), tirx.Var("lane", dtype)
    analyzer.bind(lane, ir.Range(tirx.const(0, str(dtype)), tirx.const(lanes, str(dtype))))
    at: tirx.Expr = turn * lanes + lane
    values: dict[tirx.Var, tirx.Expr] = {}
    for n in reversed(loops):
        extent = stmt.iter_vars[n].dom.extent
        values[stmt.iter_vars[n].var] = at if n == loops[0] else at % extent
        at = at // extent

    def moves(value: tirx.Expr) -> tirx.Expr:
        moved = substitute(value, values)
        return analyzer.simplify(moved - substitute(moved, {lane: tirx.const(0, str(dtype))}))

    body = stmt.body
    stored = _offset(body.buffer, body.indices)
    accesses = [stored, *(_offset(load.source, load.indices) for load in loads_in(body))]
    steps = [moves(offset) for offset in accesses]
    conditions: list[ir.Call] = []
    tvm_ffi.structural_walk(body.value, (ir.Call, lambda call: conditions.append(call) if is_choice(call) else None))
    return all(is_zero(step) or step.same_as(lane) for step in steps) and not any(
        uses(analyzer.simplify(substitute(call.args[0], values)), lane) for call in conditions
    )


def _offset(buffer: tirx.Buffer, indices: Sequence[tirx.Expr]) -> tirx.Expr:
    """The number of an element of a dense buffer; of one with strides, what tells its neighbours apart as well."""
    offset: tirx.Expr = tirx.const(0, str(indices[0].ty)) if indices else tirx.const(0, "int32")
    for dim, index in enumerate(indices):
        offset = offset * buffer.shape[dim] + index
    return offset
