"""Functions of rows: sums or maxima over the last dimensions and what is pointwise in between (softmax, norms).

    for rows (parallel):
      for k (vectors): partial[lanes] = max(partial[lanes], x[row, k])      # a reduction, with several partials
      reduce the partials
      for j (vectors): y[j] = exp(x[row, j] - top)                          # a pointwise block
      ..

Everything about a row is computed while it is in the cache. Cheap blocks (copies, casts, squares) are inlined first, so
that a norm as Relax legalizes it reads a row once for each reduction and once for the result. Where there are fewer
rows than cores, one reduction's terms are shared out among the cores first; several are left to one core.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from math import gcd, prod

import numpy as np
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import loads_in, uses
from tvm_axe.analysis.patterns import is_pointwise, stays_small
from tvm_axe.machines.target import cores, vector_bits
from tvm_axe.nests.contraction import is_plain_nest
from tvm_axe.schedule import query

__all__ = ["Rows", "find_rows", "inline_cheap", "reduce_in_row", "row_schedules", "stores_of"]

_PARTIALS = (4, 8, 5, 6, 2, 3, 1)  # vectors of partial results: enough to hide the latency of an addition
_COUNTS = 4  # of them that are tried
_NARROW = 128  # bits: the least of a vector that rows of an uneven length are cut into
_PIECES = (1, 2, 4)  # of work for each thread


@dataclass(frozen=True)
class Rows:
    """A function of rows.

    Attributes
    ----------
    inlined
        Names of the blocks that are inlined first.
    reductions, pointwise
        Names of the others.
    output
        Name of the last block, which is pointwise or the one reduction.
    rows
        Extents of the rows' loops, which are the first of every block.
    scalars
        Whether the result is one element for each row.
    terms
        Terms of a reduction.
    lanes
        Elements of a vector: a register's worth of the widest type that is reduced, or less where that doesn't divide
        the terms.
    open
        Whether the number of rows isn't known until the function is called; `rows` has one that it may be.
    """

    inlined: tuple[str, ...]
    reductions: tuple[str, ...]
    pointwise: tuple[str, ...]
    output: str
    rows: tuple[int, ...]
    scalars: bool
    terms: int
    lanes: int
    open: bool = False


def find_rows(sch: s_tir.Schedule, target: Target) -> Rows | None:
    """The function ``main`` as one of rows, or None.

    But for those that are inlined, every block has a plain nest that starts with the rows' loops; reductions go over as
    many terms as each other, in whole vectors.
    """
    sch = sch.copy()
    inlined = inline_cheap(sch)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    stmts = [sch.get(block) for block in blocks]
    nests = [[sch.get(loop) for loop in sch.get_loops(block)] for block in blocks]
    if not all(is_plain_nest(nest, _tvm.block_realize(sch, block)) for nest, block in zip(nests, blocks)):
        return None
    extents = [tuple(int(loop.extent) for loop in nest) for nest in nests]
    sums = [n for n, stmt in enumerate(stmts) if _is_reduction(stmt)]
    if not sums or not all(n in sums or is_pointwise(stmt) for n, stmt in enumerate(stmts)):
        return None
    depth = len(stores_of(stmts[sums[0]])[0].indices)
    rows, terms = extents[sums[0]][:depth], prod(extents[sums[0]][depth:])
    reduced = [str(store.buffer.dtype) for n in sums for store in stores_of(stmts[n])]
    if not all(map(_tvm.has_partials, reduced)):
        return None
    bits = 8 * max(np.dtype(dtype).itemsize for dtype in reduced)
    lanes = gcd(terms, vector_bits(target) // bits)
    same = all(shape[:depth] == rows for shape in extents) and all(prod(extents[n][depth:]) == terms for n in sums)
    if not same or lanes * bits < _NARROW:
        return None
    names = [str(stmt.name_hint) for stmt in stmts]
    pointwise = tuple(name for n, name in enumerate(names) if n not in sums)
    scalars = extents[-1] == rows or len(names) - 1 in sums
    return Rows(inlined, tuple(names[n] for n in sums), pointwise, names[-1], rows, scalars, terms, lanes)


def inline_cheap(sch: s_tir.Schedule, kept: Collection[str] = ()) -> tuple[str, ...]:
    """Inline the pointwise blocks that cost no more than reading what they write, but for some; returns their names."""
    found = []
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        stmt = sch.get(block)
        if str(stmt.name_hint) in kept:
            continue
        if not is_pointwise(stmt) or query.is_parameter(sch, stmt.body.buffer) or not _is_cheap(stmt.body.value):
            continue
        if not all(stays_small(stmt, sch.get(reader)) for reader in sch.get_consumers(block)):
            continue
        try:
            sch.compute_inline(block)
        except s_tir.ScheduleError:  # as of one whose reader wants a region of it
            continue
        found.append(str(stmt.name_hint))
    return tuple(found)


def _is_cheap(value: tirx.Expr) -> bool:
    """Whether an expression has neither functions nor divisions."""
    dear: list[object] = []
    tvm_ffi.structural_walk(value, ((ir.Call, tirx.Div), dear.append))
    return not dear


def row_schedules(match: Rows, target: Target) -> list[partial[None]]:
    """What makes a design space each of a function of rows: a number of partial results, on all cores or on one.

    Each schedules the function in place, by stock instructions only.
    """
    lanes = match.lanes
    few = prod(match.rows) < cores(target)
    share = few and len(match.reductions) == 1 and match.scalars
    if not match.rows and not share:
        return []  # one row has no loop to compute the others' blocks in
    threads = (cores(target), 1) if cores(target) > 1 and (share or not few) else (1,)
    counts = [n for n in _PARTIALS if match.terms % (n * lanes) == 0][:_COUNTS]
    return [
        partial(_share_out if share else _by_rows, match=match, partials=n * lanes, lanes=lanes, threads=own)
        for own in threads
        for n in counts
        if not share or _choices(match.terms // (n * lanes), own)
    ]


def _by_rows(sch: s_tir.Schedule, match: Rows, partials: int, lanes: int, threads: int) -> None:
    """Compute everything about a row in one iteration of a loop over the rows."""
    _inline(sch, match)
    depth = len(match.rows)
    output = sch.get_sblock(match.output)
    row = sch.fuse(*sch.get_loops(output)[:depth])
    choices = [] if match.open else _choices(prod(match.rows), threads)
    if threads > 1 and choices:
        # One loop for both would have LLVM see less: the softmax takes half as long again.
        chunk, row = _cut(sch, row, choices)
        sch.parallel(chunk)
    elif threads > 1:
        sch.parallel(row)
    outer = 2 if threads > 1 and choices else 1
    order = [str(sch.get(block).name_hint) for block in sch.get_child_blocks(sch.get_sblock("root"))]
    if match.output in match.pointwise:
        _vectorize(sch, sch.get_loops(output)[outer:], lanes)
    for name in reversed([name for name in order if name != match.output]):
        block = sch.get_sblock(name)
        parts = _reduce(sch, block, depth, partials, lanes) if name in match.reductions else []
        sch.compute_at(block, row, preserve_unit_loops=True)
        if name in match.pointwise:
            _vectorize(sch, sch.get_loops(block)[outer + depth :], lanes)
        for part in parts:
            _at_row(sch, part, row, lanes)
    if match.output in match.reductions:
        reduce_in_row(sch, output, row, outer, partials, lanes)


def _share_out(sch: s_tir.Schedule, match: Rows, partials: int, lanes: int, threads: int) -> None:
    """Cut the terms of the one reduction into pieces, and reduce each as a row."""
    _inline(sch, match)
    depth = len(match.rows)
    block = sch.get_sblock(match.reductions[0])
    terms = sch.fuse(*sch.get_loops(block)[depth:])
    vectors, _ = sch.split(terms, [None, partials])
    pieces, _ = _cut(sch, vectors, _choices(match.terms // partials, threads))
    piece = sch.rfactor(pieces, depth)
    loops = sch.get_loops(piece)
    sch.reorder(loops[depth], *loops[:depth])
    row = sch.fuse(*sch.get_loops(piece)[: depth + 1])
    if threads > 1:
        sch.parallel(row)
    reduce_in_row(sch, piece, row, 1, partials, lanes)


def _inline(sch: s_tir.Schedule, match: Rows) -> None:
    for name in match.inlined:
        sch.compute_inline(sch.get_sblock(name))


def _choices(extent: int, threads: int) -> list[int]:
    """Into how many pieces a loop may be cut: as many for each thread, and each of several iterations.

    A loop of one iteration is lost on the way, and with it the trace's way of counting loops.
    """
    return [n * threads for n in _PIECES if extent % (n * threads) == 0 and extent > n * threads]


def _cut(sch: s_tir.Schedule, loop: LoopRV, choices: list[int]) -> list[LoopRV]:
    """Cut a loop into a number of pieces that is sampled, to begin with the first choice."""
    several = len(choices) > 1
    chances = [1 / len(choices)] * len(choices)
    pieces = sch.sample_categorical(choices, chances, decision=0) if several else choices[0]
    return list(sch.split(loop, [pieces, None]))


def reduce_in_row(sch: s_tir.Schedule, block: SBlockRV, row: LoopRV, depth: int, partials: int, lanes: int) -> None:
    """Reduce a block's terms, the loops behind the first `depth`, in its loop `row` by vectors of partial results."""
    for part in _reduce(sch, block, depth, partials, lanes):
        _at_row(sch, part, row, lanes)


def _reduce(sch: s_tir.Schedule, block: SBlockRV, depth: int, partials: int, lanes: int) -> list[SBlockRV]:
    """Have a reduction go over vectors of partial results; returns the blocks before it, the last first.

    The partials are reduced to one vector, vectorised too, and only that one lane by lane.
    """
    terms = sch.fuse(*sch.get_loops(block)[depth:])
    _, inner = sch.split(terms, [None, partials])
    last = len(stores_of(sch.get(block))[0].indices)  # of the partials' dimensions
    first = sch.rfactor(inner, last)
    if partials == lanes:
        return [first]
    inner = sch.get_loops(block)[depth:][0]
    _, lane = sch.split(inner, [None, lanes])
    return [sch.rfactor(lane, last), first]


def _at_row(sch: s_tir.Schedule, part: SBlockRV, row: LoopRV, lanes: int) -> None:
    """Compute partial results in a row's iteration, vectorised over the lanes and unrolled over the vectors."""
    sch.compute_at(part, row, preserve_unit_loops=True)
    block = sch.get(part)
    loops = sch.get_loops(part)
    inner = loops[len(loops) - len(block.iter_vars) :]
    # `rfactor` puts the iterator of the partials first.
    partials, rest = inner[0], [n for n, it in zip(inner, block.iter_vars) if it.iter_type == tirx.IterVar.CommReduce]
    vectors, lane = sch.split(partials, [None, lanes])
    sch.reorder(*rest, vectors, lane)
    sch.unroll(vectors)
    sch.vectorize(lane)
    sch.decompose_reduction(part, rest[0])


def _vectorize(sch: s_tir.Schedule, loops: list[LoopRV], lanes: int) -> None:
    """Vectorise a row of a pointwise block where whole vectors go into it."""
    if loops and prod(int(sch.get(loop).extent) for loop in loops) % lanes == 0:
        sch.vectorize(sch.split(sch.fuse(*loops), [None, lanes])[1])


def stores_of(block: s_tir.SBlock) -> list[tirx.BufferStore]:
    """What a block's body writes, where it is a store, or several of values that are bound before (a sum and a sum of
    squares); else none."""
    if isinstance(block.body, tirx.BufferStore):
        return [block.body]
    parts = list(block.body.seq) if isinstance(block.body, tirx.SeqStmt) else []
    stores = [part for part in parts if isinstance(part, tirx.BufferStore)]
    return stores if all(isinstance(part, tirx.BufferStore | tirx.Bind) for part in parts) else []


def _is_reduction(block: s_tir.SBlock) -> bool:
    """Whether the block reduces into one element for each of its spatial iterators, which come first and in order."""
    spatial = [it.var for it in block.iter_vars if it.iter_type == tirx.IterVar.DataPar]
    stores = stores_of(block)
    if block.init is None or not stores or any(len(store.indices) != len(spatial) for store in stores):
        return False
    terms = [it for it in block.iter_vars if it.iter_type != tirx.IterVar.DataPar]
    last = next((it.var for it in reversed(terms) if int(it.dom.extent) > 1), terms[-1].var)
    # Vectors of terms are to be vectors in memory.
    if any(uses(index, last) for load in loads_in(block.body) for index in load.indices[:-1]):
        return False
    in_order = [it.var for it in block.iter_vars[: len(spatial)]]
    return all(a.same_as(b) and b.same_as(c) for store in stores for a, b, c in zip(store.indices, spatial, in_order))
