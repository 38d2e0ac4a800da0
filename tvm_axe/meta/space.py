"""The design spaces that are searched: tile kernels and register-tiled matmuls, upstream's rules for everything else.

A product of matrices may be computed by a tile kernel (`tvm_axe.meta.kernels`). On a CPU a matmul may also become, with
mr x nv accumulators, nr = nv * lanes::

    for mo, no (parallel):                    # pieces of work
      for nt:                                 # column tiles; here B's K x nr panel is packed
        for mt:                               # row tiles
          for ko, ki (unrolled):
            for mr rows, nv vectors (unrolled), lanes (vectorised):
              C_local[mr, nv, lanes] += A[row, k] * panel[k, column]
          write the tile

Once rows and vectors are unrolled every access to C_local has a constant index, so LLVM keeps the tile in vector
registers across the whole k loop. Extents that don't divide are padded (`pad_einsum`) and loop partitioning confines
what that costs to the last tiles.

What changes the shape of a trace (mr, nv, packed or in place) makes a design space each. What can be sampled (the
pieces of work, the unrolling of k) is sampled by `sample_perfect_tile`, so that upstream's mutators can act on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from ..target import cores, vector_bits, vector_registers
from .kernels import Offer, choose, offers
from .matmul import Matmul, find_matmuls
from .mutator import MutateChoice

__all__ = ["Tile", "register_tile", "space_for", "tiles"]

_MAX_UNROLL_K = 4  # a longer body only costs instruction cache
_MAX_TILES = 1 << 20  # `sample_perfect_tile` wants a bound on its innermost factor; here any will do


def space_for(func: tirx.PrimFunc, target: Target) -> ms.SpaceGenerator:
    """The design space of a function named ``main``.

    Tile kernels where every block is a product that they compute, or elementwise; register tiles where these are
    matmuls as `find_matmuls` defines them; upstream's rules where neither applies.
    """
    sch = s_tir.Schedule(func)
    matmuls = find_matmuls(sch)
    offered = offers(sch, target)
    blocks = {str(sch.get(b).name_hint): sch.get(b) for b in sch.get_child_blocks(sch.get_sblock("root"))}
    tiled, taken = {match.block for match in matmuls}, {offer.block for offer in offered}
    spatial = {name for name, block in blocks.items() if _is_spatial(block)}
    by_registers = bool(tiled) and {*blocks} == tiled | spatial
    by_kernels = bool(taken) and {*blocks} == taken | spatial
    if not by_registers and not by_kernels:
        return ms.space_generator.PostOrderApply(
            # Named, and not left to the target: for a CPU with VNNI upstream's choice needs tensor intrinsics that take
            # 13 s to import. `RewriteLayout` is left out because a function keeps its signature.
            sch_rules=ms.ScheduleRule.create("llvm"),
            postprocs=[
                ms.postproc.DisallowDynamicLoop(),
                ms.postproc.RewriteParallelVectorizeUnroll(),
                ms.postproc.RewriteReductionBlock(),
            ],
            mutator_probs=ms.Mutator.create("llvm"),
        )

    def generate(base: s_tir.Schedule) -> list[s_tir.Schedule]:
        registers = _register_spaces(base, matmuls, blocks, target) if by_registers else []
        kernels = _kernel_spaces(base, offered, blocks, target) if by_kernels else []
        # A candidate starts in a space drawn at random: as often in one of the kernels' as of the register tiles'.
        return registers + kernels * max(1, len(registers) // max(1, len(kernels)))

    return ms.space_generator.ScheduleFn(
        generate, sch_rules=[], postprocs=[], mutator_probs={ms.mutator.MutateTileSize(): 0.5, MutateChoice(): 0.5}
    )


def _register_spaces(
    base: s_tir.Schedule, matmuls: list[Matmul], blocks: Mapping[str, s_tir.SBlock], target: Target
) -> list[s_tir.Schedule]:
    choices = [tiles(match, target) for match in matmuls]
    spaces = []
    # Several matmuls take their tiles in step: all combinations would be too many spaces to generate.
    for n in range(max(map(len, choices))):
        sch = base.copy()
        for match, options in zip(matmuls, choices):
            register_tile(sch, match, target, options[n % len(options)])
        for name in [name for name in blocks if name not in {match.block for match in matmuls}]:
            _vectorize(sch, name, target)
        spaces.append(sch)
    return spaces


def _kernel_spaces(
    base: s_tir.Schedule, offered: list[Offer], blocks: Mapping[str, s_tir.SBlock], target: Target
) -> list[s_tir.Schedule]:
    """The kernels with their defaults, and with sampled parameters; several blocks take their kernels in step."""
    choices = [[offer for offer in offered if offer.block == name] for name in blocks]
    choices = [options for options in choices if options]
    spaces = []
    for n, sampled in product(range(max(map(len, choices))), (False, True)):
        sch = base.copy()
        chosen = [options[n % len(options)] for options in choices]
        for offer in chosen:
            choose(sch, offer, sampled)
        covered = {name for offer in chosen for name in (offer.block, offer.epilogue)}
        for name in [name for name in blocks if name not in covered]:
            _vectorize(sch, name, target)
        spaces.append(sch)
    return spaces


@dataclass(frozen=True)
class Tile:
    """What fixes the shape of a matmul's trace.

    Attributes
    ----------
    rows, vectors
        Accumulators that stay in registers, `rows` times `vectors` of them.
    packed
        Whether each thread copies the K x nr panel of B that it is about to use into a buffer of its own.
    """

    rows: int
    vectors: int
    packed: bool


def tiles(match: Matmul, target: Target) -> list[Tile]:
    """The tiles worth trying.

    With B's vectors and one of A they fit the register file; they keep at least half as many multiply-adds in flight
    as the best of them; and they don't exceed the matrix. B is always packed where its columns need padding.
    """
    lanes, registers = _lanes(match, target), vector_registers(target)
    rows, columns = match.extents[match.row], match.extents[match.column]
    shapes = [
        (mr, nv)
        for nv in (1, 2, 3, 4, 6)
        for mr in (1, 2, 4, 6, 8, 12, 14)
        if mr * nv + nv + 1 <= registers and mr <= rows and nv <= -(-columns // lanes)
    ]
    busiest = max(mr * nv for mr, nv in shapes)
    return [
        Tile(mr, nv, packed)
        for mr, nv in shapes
        for packed in (False, True)
        if 2 * mr * nv >= busiest and (packed or columns % (nv * lanes) == 0)
    ]


def register_tile(sch: s_tir.Schedule, match: Matmul, target: Target, tile: Tile) -> None:
    """Schedule one matmul of ``main`` as the module's header shows, in place, by stock instructions only."""
    lanes = _lanes(match, target)
    block, store, panel = _stage(sch, match, tile, lanes)
    loops = sch.get_loops(block)
    row, column, reduce = (loops[n] for n in (match.row, match.column, match.reduce))
    batches = [loop for n, loop in enumerate(loops) if n not in (match.row, match.column, match.reduce)]
    rows, i = sch.split(row, [None, tile.rows])
    columns, j, v = sch.split(column, [None, tile.vectors, lanes])
    mo, mt = sch.split(rows, sch.sample_perfect_tile(rows, 2, _MAX_TILES))
    no, nt = sch.split(columns, sch.sample_perfect_tile(columns, 2, _MAX_TILES))
    ko, ki = sch.split(reduce, sch.sample_perfect_tile(reduce, 2, _MAX_UNROLL_K))
    sch.reorder(*batches, mo, no, nt, mt, ko, ki, i, j, v)
    outer = sch.fuse(*batches, mo, no)
    if cores(target) > 1:
        sch.parallel(outer)
    sch.reverse_compute_at(store, mt, preserve_unit_loops=True)
    si, sj = sch.get_loops(store)[-2:]
    sj, sv = sch.split(sj, [None, lanes])
    unrolled, vectors = [ki, i, j, si, sj], [v, sv]
    if panel is not None:
        sch.compute_at(panel, nt, preserve_unit_loops=True)
        pj, pv = sch.split(sch.get_loops(panel)[-1], [None, lanes])
        unrolled, vectors = [*unrolled, pj], [*vectors, pv]
    for loop in unrolled:
        sch.unroll(loop)
    for loop in vectors:
        sch.vectorize(loop)
    for loop in (nt, mt):
        sch.annotate(loop, "pragma_loop_partition_hint", 1)
    sch.decompose_reduction(block, ko)


def _stage(sch: s_tir.Schedule, match: Matmul, tile: Tile, lanes: int) -> tuple[SBlockRV, SBlockRV, SBlockRV | None]:
    """Pad to whole tiles; give the block, the one that writes C from registers, and the one that fills B's panel."""
    a, b, c = match.buffers
    block = sch.get_sblock(match.block)
    step = {match.row: tile.rows, match.column: tile.vectors * lanes}
    row_tail, column_tail = (match.extents[loop] % size != 0 for loop, size in step.items())
    if row_tail or column_tail:
        sch.pad_einsum(block, [step.get(loop, 1) for loop in match.iterators])
    if row_tail:
        sch.compute_inline(sch.get_sblock(f"{a}_pad"))
    panel = None
    if tile.packed:  # padding is a copy already
        panel = sch.get_sblock(f"{b}_pad") if column_tail else sch.cache_read(block, match.right, "global")
    if row_tail or column_tail:
        sch.set_scope(block, 0, "local")
        store = sch.get_sblock(f"{c}_pad")
    else:
        store = sch.cache_write(block, 0, "local")
    return block, store, panel


def _lanes(match: Matmul, target: Target) -> int:
    """Elements of C in a vector: a register's worth, or the power of two below a narrower matrix."""
    columns = match.extents[match.column]
    return min(vector_bits(target) // match.bits, 1 << (columns.bit_length() - 1))


def _is_spatial(block: s_tir.SBlock) -> bool:
    return block.init is None and all(it.iter_type == tirx.IterVar.DataPar for it in block.iter_vars)


def _vectorize(sch: s_tir.Schedule, name: str, target: Target) -> None:
    """Schedule an elementwise block: vectors innermost, pieces of work in parallel outermost."""
    fused = sch.fuse(*sch.get_loops(sch.get_sblock(name)))
    pieces, vectors = sch.split(fused, [None, vector_bits(target) // 32])
    if cores(target) > 1:
        sch.parallel(sch.split(pieces, [cores(target), None])[0])
    sch.vectorize(vectors)
