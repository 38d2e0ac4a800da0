"""The design spaces of CUDA GPUs: tile kernels for products of matrices, upstream's rules for everything else.

Where every block is a product or the epilogue of one, every kernel that computes the product is a space with its
defaults, and another one with its parameters sampled; the kernel that `matmul_for` would take comes first. What can't
fit a block of threads is refused before it is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.machines import backend_of
from tvm_axe.meta.spaces.mutator import MutateChoice
from tvm_axe.nests.kernels import choose
from tvm_axe.schedule.offers import Offer, offers, preferred
from tvm_axe.schedule.tiles import choice_of
from tvm_axe.tile.kernels import compiles
from tvm_axe.tile.kernels.kernel import Problem, stored
from tvm_axe.tile.targets.cuda.instructions.wgmma import ROWS, WARPGROUP
from tvm_axe.tile.targets.cuda.plan import gpu_of
from tvm_axe.tile.targets.cuda.specialized.plan import REGISTERS, operand_registers, widest_product

__all__ = ["Fits", "cuda_space", "fits"]


def cuda_space(func: tirx.PrimFunc, target: Target) -> ms.SpaceGenerator:
    """The design space of a function named ``main`` on a GPU.

    Parameters
    ----------
    func
        A schedulable function.
    target
        A resolved CUDA target: upstream's rules ask for what `resolve_target` puts in.
    """
    sch = s_tir.Schedule(func)
    offered = [
        offer for offer in preferred(offers(sch, target), target) if compiles(offer.kernel, target, offer.problem)
    ]
    blocks = [str(sch.get(block).name_hint) for block in sch.get_child_blocks(sch.get_sblock("root"))]
    if not {*blocks} <= {name for offer in offered for name in (offer.block, offer.epilogue)}:
        rules = backend_of(target).rules
        return ms.space_generator.PostOrderApply(
            sch_rules=ms.ScheduleRule.create(rules),
            postprocs=ms.Postproc.create(rules),
            mutator_probs=ms.Mutator.create(rules),
        )
    choices = [[offer for offer in offered if offer.block == name] for name in blocks]
    choices = [options for options in choices if options]

    def generate(base: s_tir.Schedule) -> list[s_tir.Schedule]:
        spaces = []
        # Several products take their kernels in step: all combinations would be too many spaces to generate.
        for sampled, n in product((False, True), range(max(map(len, choices)))):
            made = base.copy()
            for options in choices:
                choose(made, options[n % len(options)], sampled)
            spaces.append(made)
        return spaces

    return ms.space_generator.ScheduleFn(
        generate, sch_rules=[], postprocs=[Fits(offered, target)], mutator_probs={MutateChoice(): 0.9}
    )


@derived_object
class Fits(ms.postproc.PyPostproc):
    """Refuses schedules with a kernel whose tiles don't fit a block of threads (see `fits`)."""

    def __init__(self, offered: Sequence[Offer], target: Target) -> None:
        super().__init__()
        self.offered, self.target = offered, target

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        """Nothing of it is needed."""

    def apply(self, sch: s_tir.Schedule) -> bool:
        """Whether all kernels fit."""
        for offer in self.offered:
            choice = choice_of(sch.get(sch.get_sblock(offer.block)))
            if choice and choice.kernel == offer.kernel and not fits(choice.parameters, offer.problem, self.target):
                return False
        return True

    def clone(self) -> Fits:
        """Another one, for another thread."""
        return Fits(self.offered, self.target)


def fits(parameters: Mapping[str, int], problem: Problem, target: Target) -> bool:
    """Whether a product's tiles fit the shared memory and the registers of a block of threads, as far as is plain.

    What this refuses can't be compiled; of what it lets through, a plan of the program refuses a little (memory for
    what is stored, mostly), at a thousand times the cost.
    """
    if "block_m" in parameters:
        rows, columns = parameters["block_m"], parameters["block_n"]
    else:  # transposed, with all of the problem's rows as columns
        rows, columns = parameters["block_n"], math.ceil(problem["m"] / 8) * 8
    size = int(tvm_ffi.dtype(stored(problem["dtype"])).bits) // 8
    ring = max(parameters["stages"], 1) * (rows + columns) * parameters["block_k"] * size
    gpu = gpu_of(target)
    if ring > gpu.shared_bytes:
        return False
    if gpu.tensor_cores != "wgmma" or problem["dtype"] == "float32" or rows % ROWS:
        return True
    groups = max(n for n in REGISTERS if rows % (n * ROWS) == 0)
    return rows * columns // (groups * WARPGROUP) <= operand_registers(groups) and columns <= widest_product(groups)
