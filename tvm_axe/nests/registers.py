"""Register tiles: contractions by vector multiply-adds whose sums stay in registers.

With mr rows times nv vectors of accumulators::

    for batches, rows, columns (parallel):    # pieces of work; here A is padded
      for column tiles:                       # here W's panel is packed: every sum's terms by nv vectors
        for row tiles:
          for phases (unrolled):              # where A is zero at every other point
            for reductions, the last partly unrolled:
              for mr rows, nv vectors (unrolled), lanes (vectorised):
                C_local[mr, nv, lanes] += A[row, ..] * panel[.., column]
            write the tile, through the pointwise blocks that follow

Where j isn't C's last dimension, a tile is stored transposed: LLVM does that four by four.

Where a convolution's panel is large and a tile has few rows, the terms are cut into parts: between column and row tiles
is then a loop over these, so that a part of a panel, and what of A it meets, is in the first cache for all rows of the
piece. Sums lie in memory in between, and are in registers for a part.

Once rows and vectors are unrolled every access to C_local has a constant index, so LLVM keeps the tile in vector
registers for the whole sum. What a tile doesn't divide is padded (`pad_einsum`) where every index is an iterator alone,
and masked elsewhere; loop partitioning confines what either costs to the last tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from tvm_axe.analysis.patterns import is_move
from tvm_axe.machines.narrowing import HINT
from tvm_axe.machines.target import cores
from tvm_axe.nests.around import epilogue, producer_of
from tvm_axe.nests.contraction import Contraction
from tvm_axe.nests.panels import copy_ahead, copy_in_nest, moved_last, pack_ahead
from tvm_axe.nests.tiles import Tile, divisors, lanes_of, outermost, terms_of
from tvm_axe.schedule import query

__all__ = ["register_tile"]

_PIECES = 4  # of work for each core
_MAX_UNROLL = 4  # terms of a sum in a loop's body: more only cost instruction cache
_MAX_TILES = 1 << 20  # `sample_perfect_tile` wants a bound on its innermost factor; here any will do
_CACHED = 1 << 19  # bytes: what stays in a core's own cache while other things go through it


def register_tile(sch: s_tir.Schedule, match: Contraction, target: Target, tile: Tile) -> set[str]:
    """Schedule one contraction of ``main`` as the module's header shows, in place, by stock instructions only.

    Returns
    -------
    set of str
        The blocks that it took: its own, and those before and after it that it computes in its nest.
    """
    lanes = lanes_of(match, target)
    stage = _stage(sch, match, tile, lanes)
    block = stage.block
    loops = sch.get_loops(block)
    factors, steps = dict(tile.rows), {}
    inner: list[LoopRV] = []
    for n in match.rows:
        loops[n], steps[n] = _phase(sch, loops[n], match.phases.get(n))
        if n in factors:
            loops[n], row = sch.split(loops[n], [None, factors[n]])
            inner.append(row)
    for n in match.reductions:
        loops[n], steps[n] = _phase(sch, loops[n], match.phases.get(n))
    vectors, j, v = sch.split(loops[match.vector], [None, tile.vectors, lanes])
    split = outermost(match, factors)
    *others, last = terms_of(match, tile.rows)
    cut = _pieces(sch, match, tile, stage, loops[split], vectors, target)
    parts: list[LoopRV] = []
    if tile.parts > 1:
        part, loops[last] = sch.split(loops[last], [tile.parts, None])
        parts.append(part)
    terms = _extent(sch, loops[last])
    unroll = max(n for n in range(1, _MAX_UNROLL + 1) if terms % n == 0)
    mo, loops[split] = _cut(sch, loops[split], cut[0], _MAX_TILES)
    no, nt = _cut(sch, vectors, cut[1], _MAX_TILES)
    ko, ki = _cut(sch, loops[last], terms // unroll, _MAX_UNROLL) if last not in match.open else (loops[last], None)
    batches, columns = [loops[n] for n in match.batches], [loops[n] for n in match.columns]
    phases = [steps[n] for n in match.rows if steps[n] is not None]
    rows = [loops[n] for n in match.rows]
    sums = [loops[n] for n in others] + [steps[n] for n in match.reductions if steps[n] is not None]
    if stage.operand is None or tile.apart:
        batches, columns = [*batches, *columns], []  # pieces of work too
    sch.reorder(
        *batches, mo, no, *columns, nt, *parts, *rows, *phases, *sums, ko, *([] if ki is None else [ki]), *inner, j, v
    )
    outer = sch.fuse(*batches, mo, no)
    if cores(target) > 1:
        sch.parallel(outer)
    if stage.operand is not None:
        if not tile.apart:
            sch.compute_at(stage.operand, outer, preserve_unit_loops=True)
        elif cores(target) > 1:
            sch.parallel(sch.fuse(*sch.get_loops(stage.operand)[:-1]))
        _vectorize_last(sch, stage.operand, lanes)
    sch.reverse_compute_at(stage.store, nt if parts else rows[-1], preserve_unit_loops=True)
    stored = sch.get_loops(stage.store)[-len(match.extents) + len(match.reductions) :]
    sj, sv = sch.split(stored.pop(match.out_dim), [None, lanes])
    if match.transposed:
        sch.reorder(sj, *stored, sv)
    unrolled, vectors = [*phases, *([] if ki is None else [ki]), *inner, j, *([] if parts else stored), sj], [v, sv]
    unrolled += [steps[n] for n in match.reductions if steps[n] is not None]
    if stage.panel is not None and not tile.ahead:
        sch.compute_at(stage.panel, nt, preserve_unit_loops=True)
        if match.weights_dim == match.weights_rank - 1:
            pj, pv = sch.split(sch.get_loops(stage.panel)[-1], [None, lanes])
            unrolled, vectors = [*unrolled, pj], [*vectors, pv]
        else:  # innermost too: the lines that are read stay in the cache until all of them is
            rest = sch.get_loops(stage.panel)[-match.weights_rank :]
            pj, pv = sch.split(rest.pop(match.weights_dim), [None, lanes])
            sch.reorder(pj, *rest, pv)
            vectors.append(pv)
    for loop in unrolled:
        sch.unroll(loop)
    for loop in vectors:
        sch.vectorize(loop)
    for loop in () if match.open else (nt, *rows):  # upstream partitions no loops where an extent isn't known
        sch.annotate(loop, HINT, 1)
    sch.decompose_reduction(block, [*parts, *sums, ko][0])
    return stage.taken


@dataclass(frozen=True)
class _Stage:
    """The blocks of a nest: the sum, what writes C from registers, W's panel, what computes A; all that are in it."""

    block: SBlockRV
    store: SBlockRV
    panel: SBlockRV | None
    operand: SBlockRV | None
    taken: set[str]


def _stage(sch: s_tir.Schedule, match: Contraction, tile: Tile, lanes: int) -> _Stage:
    """Pad to whole tiles, inline what is before and after, and give the blocks that are left."""
    a, w, c = match.buffers
    block = sch.get_sblock(match.block)
    taken = {match.block}
    step = {**dict(tile.rows), match.vector: tile.vectors * lanes}
    row_tail, column_tail = (
        match.plain
        and any(step[loop] > 1 if loop in match.open else match.extents[loop] % step[loop] for loop in loops)
        for loops in ([loop for loop, _ in tile.rows], [match.vector])
    )
    after = epilogue(sch, block)
    before = {name: producer for name in (a, w) if (producer := producer_of(sch, block, name)) is not None}
    taken |= {query.name_of(sch, b) for b in (*after, *before.values())}
    panel = None
    if tile.ahead:
        panel = copy_ahead(sch, match, block, step[match.vector] if column_tail else None)
    if row_tail or column_tail:
        sch.pad_einsum(block, [step.get(loop, 1) for loop in match.iterators])
    # Loops are partitioned where extents are known alone: elsewhere whole tiles are copied, so that nothing is masked.
    copied = sch.get_sblock(f"{a}_pad") if row_tail and match.open else None
    if row_tail and copied is None:
        sch.compute_inline(sch.get_sblock(f"{a}_pad"))
    if panel is not None:
        pack_ahead(sch, match, panel, lanes, column_tail)
    elif tile.packed:
        panel = copy_in_nest(sch, match, block, column_tail)
    if row_tail or column_tail:
        sch.set_scope(block, 0, "local")
        store = sch.get_sblock(f"{c}_pad")
        if after:
            sch.compute_inline(store)
    elif after:
        sch.set_scope(block, 0, "local")
    else:
        store = sch.cache_write(block, 0, "local")
    if match.transposed:
        sch.transform_layout(block, ("write", 0), lambda *dims: moved_last(dims, match.out_dim))
    for pointwise in after[:-1]:
        sch.compute_inline(pointwise)
    if after:
        store = after[-1]
    operand = copied
    for name, producer in before.items():
        if name == a and operand is None and not is_move(sch.get(producer)):
            operand = producer
        else:
            sch.compute_inline(producer)
    return _Stage(block, store, panel, operand, taken)


def _phase(sch: s_tir.Schedule, loop: LoopRV, step: int | None) -> tuple[LoopRV, LoopRV | None]:
    """Split off the phases of a loop, if it has any."""
    if step is None:
        return loop, None
    whole, phase = sch.split(loop, [None, step])
    return whole, phase


def _extent(sch: s_tir.Schedule, loop: LoopRV) -> int:
    """The extent of a loop; 1, into which nothing cuts it, where it isn't known."""
    extent = sch.get(loop).extent
    return int(extent) if isinstance(extent, tirx.IntImm) else 1


def _cut(sch: s_tir.Schedule, loop: LoopRV, outer: int, bound: int) -> list[LoopRV]:
    """Split a loop in two by a sample, which starts with `outer`; one of an unknown extent is all in the second."""
    if not isinstance(sch.get(loop).extent, tirx.IntImm):
        return list(sch.split(loop, [1, None]))
    decision = [outer, _extent(sch, loop) // outer]
    return list(sch.split(loop, sch.sample_perfect_tile(loop, 2, bound, decision=decision)))


def _pieces(
    sch: s_tir.Schedule, match: Contraction, tile: Tile, stage: _Stage, rows: LoopRV, columns: LoopRV, target: Target
) -> tuple[int, int]:
    """Into how many pieces to cut the rows and the columns to begin with: what moves the fewest bytes.

    A few for each core, as many for all; one core may have all in one. Within a piece all of its rows go through a
    panel before the next panel is read. So A is read for every panel unless a piece's part of it stays in the cache,
    and W for every piece of the rows unless all of it does. Every piece packs and pads for itself, within the nest.
    """
    block, batches = stage.block, prod(match.extents[n] for n in match.batches)
    wanted = _PIECES * cores(target) if cores(target) > 1 else 1
    reads = [region.source for region in sch.get(block).reads]
    w = reads.pop(match.weights)
    bytes_a = _elements(reads[0], match, {*match.rows, *match.reductions, *match.batches}) * match.bits // 8 / batches
    bytes_w = _elements(w, match, {*match.reductions, *match.columns, match.vector}) * match.bits // 8 / batches
    padded = stage.operand is not None and not tile.apart
    counts = _extent(sch, rows), _extent(sch, columns)

    def key(cut: tuple[int, int]) -> tuple[float, bool, float, int]:
        r, n = cut
        moved = bytes_a * (1 if bytes_a / r <= _CACHED else counts[1]) + bytes_w * (1 if bytes_w <= _CACHED else r)
        moved += 2 * (bytes_w * r * tile.packed + bytes_a * n * padded)
        pieces = r * n * batches
        return max(0, wanted - pieces), pieces % cores(target) != 0, moved, pieces

    return min(product(divisors(counts[0]), divisors(counts[1])), key=key)


def _elements(buffer: tirx.Var, match: Contraction, loops: set[int]) -> int:
    """The elements of an operand that has these loops; a dimension that isn't known is one of its open loops."""
    known = prod(int(extent) for extent in buffer.shape if isinstance(extent, tirx.IntImm))
    return known * prod(match.extents[n] for n in match.open & loops)


def _vectorize_last(sch: s_tir.Schedule, block: SBlockRV, lanes: int) -> None:
    """Vectorise a block's innermost loop where whole vectors go into it."""
    loop = sch.get_loops(block)[-1]
    extent = sch.get(loop).extent
    if isinstance(extent, tirx.IntImm) and int(extent) % lanes == 0:
        sch.vectorize(sch.split(loop, [None, lanes])[1])
