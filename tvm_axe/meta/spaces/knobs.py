"""The design space of a tile program: the values of its knobs, those that the program allows together."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from tvm_axe.analysis.annotations import KNOB
from tvm_axe.errors import InputError
from tvm_axe.meta.spaces.mutator import MutateChoice
from tvm_axe.tile.knobs import check_allowed, declared
from tvm_axe.tile.tunable import BLOCK, knobs_in, program_of

__all__ = ["knob_space"]


def knob_space(func: tirx.PrimFunc) -> ms.SpaceGenerator:
    """The design space of what `tvm_axe.tile.tunable` made of a program: a sample for each knob."""
    program = program_of(func)
    assert program is not None
    knobs = declared(program)

    def generate(sch: s_tir.Schedule) -> list[s_tir.Schedule]:
        block = sch.get_sblock(BLOCK)
        for knob in knobs:
            count = len(knob.values)
            value = sch.sample_categorical(
                list(knob.values), [1 / count] * count, decision=knob.values.index(knob.default)
            )
            sch.annotate(block, f"{KNOB}.{knob.name}", value)
        return [sch]

    return ms.space_generator.ScheduleFn(
        generate, sch_rules=[], postprocs=[Allowed(program)], mutator_probs={MutateChoice(): 0.9}
    )


@derived_object
class Allowed(ms.postproc.PyPostproc):
    """Refuses schedules with values of knobs that the program doesn't allow together."""

    def __init__(self, program: tirx.PrimFunc) -> None:
        super().__init__()
        self.program = program

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        """Nothing of it is needed."""

    def apply(self, sch: s_tir.Schedule) -> bool:
        """Whether the program allows what the schedule says of its knobs."""
        try:
            check_allowed(self.program, knobs_in(sch.mod["main"]))
        except InputError:
            return False
        return True

    def clone(self) -> Allowed:
        """Another one, for another thread."""
        return Allowed(self.program)
