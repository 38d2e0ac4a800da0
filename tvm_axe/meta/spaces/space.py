"""The design spaces that are searched, for each function and target.

On a CPU: register tiles where the function is made of contractions (`tvm_axe.nests.registers`), planes where it is a
convolution with too few channels for these (`tvm_axe.nests.planes`), rows or columns where it is made of reductions
along the last axis or another (`tvm_axe.nests.rows`, `.columns`), all beside upstream's rules, which are all there is
for anything else. Products that a tile kernel computes (`tvm_axe.nests.kernels`) have these beside register tiles
instead: on them upstream's rules reach half the speed. On a GPU: `tvm_axe.meta.spaces.cuda`. Of a tile program, on any
target, its knobs: `tvm_axe.meta.spaces.knobs`.

What changes the shape of a trace (the register tile, packed or in place) makes a design space each, the most promising
first and with promising decisions. What can be sampled (the pieces of work, the unrolling) is sampled by
`sample_perfect_tile`, so that upstream's mutators can act on it.

Parameters that the function lets be stored in another layout (`tvm_axe.records.packing`) are packed ahead of all else,
by blocks that can be split off: into the panels that a register tile reads, or as upstream's `RewriteLayout` has it
behind upstream's rules. Tile kernels pack for themselves: what they copy to a core's cache they copy anyway.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.analysis.annotations import PROGRAM
from tvm_axe.machines import Gpu, backend_of, machine_of
from tvm_axe.meta.spaces.cuda import cuda_space
from tvm_axe.meta.spaces.knobs import knob_space
from tvm_axe.meta.spaces.mutator import MutateChoice
from tvm_axe.meta.spaces.postproc import RewriteFreeLayouts
from tvm_axe.nests.forms import forms_of, possible
from tvm_axe.records.packing import layout_free

__all__ = ["space_for"]

_Generate = Callable[[s_tir.Schedule], list[s_tir.Schedule]]


def space_for(func: tirx.PrimFunc, target: Target) -> ms.SpaceGenerator:
    """The design space of a function named ``main``."""
    if PROGRAM in (func.attrs or {}):
        return knob_space(func)
    if isinstance(machine_of(target), Gpu):
        return cuda_space(func, target)
    sch = s_tir.Schedule(func)
    forms = forms_of(sch, target)
    offered = forms.offered

    def generate(base: s_tir.Schedule) -> list[s_tir.Schedule]:
        registers = list(possible(base, forms.registers()))
        kernels = list(possible(base, forms.kernels()))
        others = list(possible(base, forms.others()))
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
