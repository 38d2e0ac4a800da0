"""Reductions over an axis that isn't the last, and what is pointwise in between: a softmax over channels, say.

    for i, parts of j (parallel):
      for k: for lanes (vectorised): top[i, j] = max(top[i, j], x[i, k, j])
      for k: for lanes (vectorised): y[i, k, j] = exp(x[i, k, j] - top[i, j])
      ..

Each lane reduces a column of its own, so nothing is reduced across lanes. Everything about a part is computed while its
columns are in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import loads_in, uses
from tvm_axe.analysis.patterns import is_pointwise, loads_of
from tvm_axe.machines.target import cores, vector_bits
from tvm_axe.nests.contraction import is_plain_nest
from tvm_axe.nests.rows import inline_cheap, stores_of

__all__ = ["Columns", "column_schedules", "find_columns"]

_VECTORS = (4, 2, 1)  # registers that a part of a column's lanes fills at most
_NARROW = 128  # bits: the least that is worth a vector


@dataclass(frozen=True)
class Columns:
    """A function of columns.

    Attributes
    ----------
    inlined
        Names of the blocks that are inlined first.
    blocks
        Names of the others, in order; the last writes the result.
    shared
        Loops of the last block that the reductions' results have, as these have them; the last is vectorised.
    width
        Extent of that loop.
    bits
        Size of an element of the result.
    """

    inlined: tuple[str, ...]
    blocks: tuple[str, ...]
    shared: tuple[int, ...]
    width: int
    bits: int


def find_columns(sch: s_tir.Schedule) -> Columns | None:
    """The function ``main`` as one of columns, or None.

    But for blocks that are inlined, nests are plain; every block is a reduction into elements whose last dimension is
    also that of what it reads, or pointwise; and what is pointwise has that dimension last too.
    """
    sch = sch.copy()
    inlined = inline_cheap(sch)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    stmts = [sch.get(block) for block in blocks]
    sums = [stmt for stmt in stmts if not is_pointwise(stmt)]
    if not sums or not all(map(_reduces_columns, sums)):
        return None
    for block in blocks:
        loops, realize = [sch.get(loop) for loop in sch.get_loops(block)], _tvm.block_realize(sch, block)
        in_order = len(loops) == len(realize.iter_values) and all(
            loop.loop_var.same_as(value) for loop, value in zip(loops, realize.iter_values)
        )
        if not is_plain_nest(loops, realize) or not in_order:
            return None
    last, rank = stmts[-1], len(stores_of(sums[0])[0].indices)
    shared = _shared(last, sums)
    if shared is None or len(shared) != rank or any(len(stores_of(stmt)[0].indices) != rank for stmt in sums):
        return None
    width = int(last.iter_vars[shared[-1]].dom.extent)
    indices = [_last_index(stmt) for stmt in stmts]
    if any(index is None or int(index.dom.extent) != width for index in indices):
        return None
    bits = np.dtype(str(stores_of(last)[0].buffer.dtype)).itemsize * 8
    return Columns(inlined, tuple(str(stmt.name_hint) for stmt in stmts), shared, width, bits)


def _reduces_columns(block: s_tir.SBlock) -> bool:
    """Whether a block reduces into an element for each of its spatial iterators, reading terms by the last."""
    spatial = [it.var for it in block.iter_vars if it.iter_type == tirx.IterVar.DataPar]
    terms = [it.var for it in block.iter_vars if it.iter_type == tirx.IterVar.CommReduce]
    stores = stores_of(block)
    if block.init is None or not stores or not terms or not spatial:
        return False
    leading = [it.var for it in block.iter_vars[: len(spatial)]]
    for store in stores:
        if len(store.indices) != len(leading) or not all(a.same_as(b) for a, b in zip(store.indices, leading)):
            return False
    reads = [
        load for load in loads_in(block.body) if any(uses(index, term) for index in load.indices for term in terms)
    ]
    return bool(reads) and all(load.indices[-1].same_as(leading[-1]) for load in reads)


def _shared(last: s_tir.SBlock, sums: list[s_tir.SBlock]) -> tuple[int, ...] | None:
    """The iterators by which the last block reads a reduction's result, or writes it."""
    if last.same_as(sums[-1]):
        return tuple(range(len(stores_of(last)[0].indices)))
    own = [it.var for it in last.iter_vars]
    for block in sums:
        for load in loads_of(last, stores_of(block)[0].buffer):
            found = [next((n for n, var in enumerate(own) if var.same_as(index)), None) for index in load.indices]
            if None not in found:
                return tuple(n for n in found if n is not None)
    return None


def _last_index(block: s_tir.SBlock) -> tirx.IterVar | None:
    """The iterator that is the last index of what a block writes."""
    index = stores_of(block)[0].indices[-1]
    return next((it for it in block.iter_vars if it.var.same_as(index)), None)


def column_schedules(match: Columns, target: Target) -> list[partial[None]]:
    """What makes a design space each of a function of columns: the length of vectors, on all cores or on one.

    Each schedules the function in place, by stock instructions only. None where columns are too few for vectors.
    """
    lanes = vector_bits(target) // match.bits
    parts = [max(n for n in range(1, count * lanes + 1) if match.width % n == 0) for count in _VECTORS]
    parts = [part for part in dict.fromkeys(parts) if part * match.bits >= _NARROW]
    threads = (cores(target), 1) if cores(target) > 1 else (1,)
    return [partial(_schedule, match=match, part=part, threads=own) for own in threads for part in parts]


def _schedule(sch: s_tir.Schedule, match: Columns, part: int, threads: int) -> None:
    """Schedule a function of columns as the module's header shows."""
    for name in match.inlined:
        sch.compute_inline(sch.get_sblock(name))
    *before, last = [sch.get_sblock(name) for name in match.blocks]
    loops = sch.get_loops(last)
    shared = [loops[n] for n in match.shared]
    rest = [loop for n, loop in enumerate(loops) if n not in match.shared]
    parts, lanes = sch.split(shared[-1], [None, part])
    sch.reorder(*shared[:-1], parts, *rest, lanes)
    piece = sch.fuse(*shared[:-1], parts)
    if threads > 1:
        sch.parallel(piece)
    sch.vectorize(lanes)
    for block in reversed(before):
        sch.compute_at(block, piece, preserve_unit_loops=True)
        _vectorize_columns(sch, block)
    if sch.get(last).init is not None:
        sch.decompose_reduction(last, rest[0])


def _vectorize_columns(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Vectorise a block in a piece over the columns, innermost."""
    stmt = sch.get(block)
    column = stores_of(stmt)[0].indices[-1]
    loops = sch.get_loops(block)[-len(stmt.iter_vars) :]
    lanes = next(loop for loop, it in zip(loops, stmt.iter_vars) if it.var.same_as(column))
    terms = [loop for loop, it in zip(loops, stmt.iter_vars) if it.iter_type == tirx.IterVar.CommReduce]
    if terms:
        sch.reorder(*terms, lanes)
    sch.vectorize(lanes)
    if terms:
        sch.decompose_reduction(block, terms[0])
