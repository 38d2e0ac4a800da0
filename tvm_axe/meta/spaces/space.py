"""The design spaces that are searched, for each function and target.

On a CPU: register tiles where the function is made of contractions (`tvm_axe.meta.spaces.registers`), planes where it
is a convolution with too few channels for these (`tvm_axe.meta.spaces.planes`), rows or columns where it is made of
reductions along the last axis or another (`tvm_axe.meta.spaces.rows`, `.columns`), all beside upstream's rules, which
are all there is for anything else. Products that a tile kernel computes (`tvm_axe.meta.spaces.kernels`) have these
beside register tiles instead: on them upstream's rules reach half the speed. On a GPU: `tvm_axe.meta.spaces.cuda`.

What changes the shape of a trace (the register tile, packed or in place) makes a design space each, the most promising
first and with promising decisions. What can be sampled (the pieces of work, the unrolling) is sampled by
`sample_perfect_tile`, so that upstream's mutators can act on it.

Parameters that the function lets be stored in another layout (`tvm_axe.records.packing`) are packed ahead of all else,
by blocks that can be split off: into the panels that a register tile reads, or as upstream's `RewriteLayout` has it
behind upstream's rules. Tile kernels pack for themselves: what they copy to a core's cache they copy anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.analysis.patterns import is_pointwise
from tvm_axe.machines import Gpu, backend_of, machine_of
from tvm_axe.machines.target import cores, vector_bits
from tvm_axe.meta.spaces.around import inline_made
from tvm_axe.meta.spaces.columns import column_schedules, find_columns
from tvm_axe.meta.spaces.contraction import Contraction, find_contractions
from tvm_axe.meta.spaces.cuda import cuda_space
from tvm_axe.meta.spaces.kernels import choose
from tvm_axe.meta.spaces.mutator import MutateChoice
from tvm_axe.meta.spaces.planes import find_plane, plane_schedules
from tvm_axe.meta.spaces.postproc import RewriteFreeLayouts
from tvm_axe.meta.spaces.registers import lanes_of, register_tile, tiles
from tvm_axe.meta.spaces.rows import find_rows, row_schedules
from tvm_axe.records.packing import layout_free
from tvm_axe.schedule.offers import Offer, offers

__all__ = ["space_for"]

_Generate = Callable[[s_tir.Schedule], list[s_tir.Schedule]]


def space_for(func: tirx.PrimFunc, target: Target) -> ms.SpaceGenerator:
    """The design space of a function named ``main``."""
    if isinstance(machine_of(target), Gpu):
        return cuda_space(func, target)
    sch = s_tir.Schedule(func)
    blocks = {str(sch.get(b).name_hint): sch.get(b) for b in sch.get_child_blocks(sch.get_sblock("root"))}
    pointwise = {name for name, block in blocks.items() if is_pointwise(block)}
    contractions = [match for match in find_contractions(sch) if tiles(match, target)]
    if not contractions or {*blocks} != {match.block for match in contractions} | pointwise:
        contractions = []
    rows = None if contractions else find_rows(sch, target)
    wide = any(lanes_of(match, target) * match.bits == vector_bits(target) for match in contractions)
    plane = None if wide or rows else find_plane(sch)
    columns = None if contractions or rows or plane else find_columns(sch)
    offered = offers(sch, target) if rows is None else []  # a dot product is a product too, of one row and column
    if not offered or {*blocks} != {offer.block for offer in offered} | pointwise:
        offered = []

    def generate(base: s_tir.Schedule) -> list[s_tir.Schedule]:
        registers = _register_spaces(base, contractions, blocks, target)
        kernels = _kernel_spaces(base, offered, blocks, target)
        others = _possible(base, row_schedules(rows, target)) if rows else []
        others += _possible(base, plane_schedules(plane, target)) if plane else []
        others += _possible(base, column_schedules(columns, target)) if columns else []
        # A candidate starts in a space drawn at random: as often in one of the kernels' as of the register tiles'.
        return [*kernels[:1], *registers, *kernels * max(1, len(registers) // max(1, len(kernels))), *others]

    postprocs, rules = _postprocs(func), backend_of(target).rules
    if not generate(sch):
        return _upstreams(postprocs, rules)
    if offered:
        mutators = {ms.mutator.MutateTileSize(): 0.5, MutateChoice(): 0.5}
        return ms.space_generator.ScheduleFn(generate, sch_rules=[], postprocs=[], mutator_probs=mutators)
    return _beside_upstreams(generate, postprocs, rules)


def _upstreams(postprocs: list[ms.Postproc], rules: str) -> ms.SpaceGenerator:
    # Named, and not left to the target: for a CPU with VNNI upstream's choice needs tensor intrinsics that take 13 s to
    # import.
    return ms.space_generator.PostOrderApply(
        sch_rules=ms.ScheduleRule.create(rules), postprocs=postprocs, mutator_probs=ms.Mutator.create(rules)
    )


def _beside_upstreams(generate: _Generate, postprocs: list[ms.Postproc], rules: str) -> ms.SpaceGenerator:
    ours = ms.space_generator.ScheduleFn(generate, sch_rules=[], postprocs=[], mutator_probs={})
    return ms.space_generator.SpaceGeneratorUnion(
        [ours, _upstreams(postprocs, rules)],
        sch_rules=[],
        postprocs=postprocs,
        mutator_probs={**ms.Mutator.create(rules), MutateChoice(): 0.1},
    )


def _postprocs(func: tirx.PrimFunc) -> list[ms.Postproc]:
    return [
        ms.postproc.DisallowDynamicLoop(),
        ms.postproc.RewriteParallelVectorizeUnroll(),
        ms.postproc.RewriteReductionBlock(),
        *([RewriteFreeLayouts()] if layout_free(func) else []),
    ]


def _register_spaces(
    base: s_tir.Schedule, matches: list[Contraction], blocks: Mapping[str, s_tir.SBlock], target: Target
) -> list[s_tir.Schedule]:
    """The register tiles; several contractions take theirs in step: all combinations would be too many spaces."""
    choices = [tiles(match, target) for match in matches]

    def schedule(sch: s_tir.Schedule, n: int) -> None:
        taken = inline_made(sch)
        for match, options in zip(matches, choices):
            taken |= register_tile(sch, match, target, options[n % len(options)])
        for name in [name for name in blocks if name not in taken]:
            _vectorize(sch, name, target)

    return _possible(base, [partial(schedule, n=n) for n in range(max(map(len, choices), default=0))])


def _kernel_spaces(
    base: s_tir.Schedule, offered: list[Offer], blocks: Mapping[str, s_tir.SBlock], target: Target
) -> list[s_tir.Schedule]:
    """The kernels with their defaults, and with sampled parameters; several blocks take their kernels in step."""
    choices = [[offer for offer in offered if offer.block == name] for name in blocks]
    choices = [options for options in choices if options]

    def schedule(sch: s_tir.Schedule, n: int, sampled: bool) -> None:
        chosen = [options[n % len(options)] for options in choices]
        for offer in chosen:
            choose(sch, offer, sampled)
        covered = {name for offer in chosen for name in (offer.block, offer.epilogue)}
        for name in [name for name in blocks if name not in covered]:
            _vectorize(sch, name, target)

    steps = product(range(max(map(len, choices), default=0)), (False, True))
    return _possible(base, [partial(schedule, n=n, sampled=sampled) for n, sampled in steps])


def _possible(base: s_tir.Schedule, changes: Sequence[Callable[[s_tir.Schedule], None]]) -> list[s_tir.Schedule]:
    """A schedule for each change, but for those that a primitive refuses: what is around a block decides on that."""
    made = []
    for change in changes:
        sch = base.copy()
        try:
            change(sch)
        except s_tir.ScheduleError:
            continue
        made.append(sch)
    return made


def _vectorize(sch: s_tir.Schedule, name: str, target: Target) -> None:
    """Schedule an elementwise block: vectors innermost, pieces of work in parallel outermost."""
    fused = sch.fuse(*sch.get_loops(sch.get_sblock(name)))
    pieces, vectors = sch.split(fused, [None, vector_bits(target) // 32])
    if cores(target) > 1:
        sch.parallel(sch.split(pieces, [cores(target), None])[0])
    sch.vectorize(vectors)
