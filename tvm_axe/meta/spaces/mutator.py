"""A mutator for tile kernels: another candidate for one of the parameters that the schedule sampled."""

from __future__ import annotations

import random

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from tvm_axe import _tvm

__all__ = ["MutateChoice"]


@derived_object
class MutateChoice(ms.mutator.PyMutator):
    """Draws one of a trace's categorical samples anew, among the values that it doesn't have."""

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.random = random.Random(context.rand_state)

    def apply(self, trace: Trace, _state: int) -> Trace | None:
        """The trace with another decision; None where there is nothing to decide."""
        samples = [each for each in _tvm.drawn(trace, "SampleCategorical") if len(each.attrs[0]) > 1]
        if not samples:
            return None
        chosen = self.random.choice(samples)
        own, count = int(trace.get_decision(chosen)), len(chosen.attrs[0])
        other = self.random.choice([n for n in range(count) if n != own])
        return trace.with_decision(chosen, other, remove_postproc=True)

    def clone(self) -> MutateChoice:
        """Another one, for another thread."""
        return MutateChoice()
