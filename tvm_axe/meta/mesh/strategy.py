"""The searches over a program's schedules: by rank, for as long as one may be better; and all of them, one by one."""

from __future__ import annotations

from itertools import product

from tvm import s_tir
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from tvm_axe import _tvm
from tvm_axe.meta.mesh.model import ProgramModel

__all__ = ["Exhaustive", "Ranking"]


@derived_object
class Ranking(ms.search_strategy.PySearchStrategy):
    """Proposes those schedules of the design spaces that the model hopes most of.

    Where a kernel has too many schedules to look at, and upstream's evolutionary search looks at some, a program has
    tens: so none is overlooked by chance, no time goes into drawing one again, and the search knows when it is done:
    when the model hopes of no other schedule that it beats the best. The program as it is shared, with nothing fused,
    overlapped or split, is among the first in any case, so that what is chosen is never slower.

    Parameters
    ----------
    model
        What `tvm_axe.meta.search.search.Search` has measurements learnt by.
    batch
        Schedules between two updates of the model.
    """

    def __init__(self, model: ProgramModel, batch: int) -> None:
        super().__init__()
        self.model, self.batch = model, batch

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.mod, self.postprocs = context.mod, list(context.space_generator.postprocs)
        self.infos = ms.arg_info.ArgInfo.from_entry_func(context.mod)

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: list[s_tir.Schedule],
        database: ms.database.Database | None = None,
        cost_model: ms.CostModel | None = None,
    ) -> None:
        """Make every schedule of the spaces."""
        schedules = [sch for space in design_spaces for sch in self._decided(space)]
        self.candidates = [ms.MeasureCandidate(sch, self.infos) for sch in schedules]
        self.begun = False

    def post_tuning(self) -> None:
        """Nothing is held."""

    def generate_measure_candidates(self) -> list[ms.MeasureCandidate] | None:
        """The best few that weren't measured yet; None if none of the others is hoped to be the best."""
        steps = self.model.candidates.steps
        # A job that goes on has measured an unfused one.
        self.begun |= any(self.model.has(each) and not steps(each.sch.mod) for each in self.candidates)
        self.candidates = [candidate for candidate in self.candidates if not self.model.has(candidate)]
        if not self.candidates:
            return None
        hopes = self.model.hopes(self.candidates)
        unfused = [n for n, each in enumerate(self.candidates) if not steps(each.sch.mod)]
        first = [] if self.begun else sorted(unfused, key=lambda n: -hopes[n])[:1]
        self.begun = True
        order = [n for _, n in sorted((-hope, n) for n, hope in enumerate(hopes) if hope > 1) if n not in first]
        chosen = [self.candidates[n] for n in [*first, *order][: self.batch]]
        self.candidates = [candidate for candidate in self.candidates if candidate not in chosen]
        return chosen or None

    def notify_runner_results(
        self, measure_candidates: list[ms.MeasureCandidate], results: list[ms.runner.RunnerResult]
    ) -> None:
        """The model has them."""

    def clone(self) -> Ranking:
        """Another one, for another thread."""
        return Ranking(self.model, self.batch)

    def _decided(self, space: s_tir.Schedule) -> list[s_tir.Schedule]:
        """The space with each decision of its samples, where the postprocs allow it."""
        samples = _tvm.drawn(space.trace, "SampleCategorical")
        found = []
        for decisions in product(*(range(len(inst.attrs[0])) for inst in samples)):
            trace = space.trace
            for inst, decision in zip(samples, decisions):
                trace = trace.with_decision(inst, decision, remove_postproc=True)
            sch = s_tir.Schedule(self.mod)
            trace.apply_to_schedule(sch, remove_postproc=True)
            sch.enter_postproc()
            if all(postproc.apply(sch) for postproc in self.postprocs):
                found.append(sch)
        return found


@derived_object
class Exhaustive(ms.search_strategy.PySearchStrategy):
    """Proposes every design space as it was generated, in their order, once.

    What is worth measuring is for the spaces to say; `axe.search` leaves out what its link model rules out.
    """

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.infos = ms.arg_info.ArgInfo.from_entry_func(context.mod)
        self.left: list[ms.MeasureCandidate] = []

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: list[s_tir.Schedule],
        database: ms.database.Database | None = None,
        cost_model: ms.CostModel | None = None,
    ) -> None:
        """Take the spaces for candidates."""
        self.left = [ms.MeasureCandidate(sch, self.infos) for sch in design_spaces]

    def post_tuning(self) -> None:
        """Nothing is held."""

    def generate_measure_candidates(self) -> list[ms.MeasureCandidate] | None:
        """All that are left; None if there are none."""
        proposed, self.left = self.left, []
        return proposed or None

    def notify_runner_results(
        self, measure_candidates: list[ms.MeasureCandidate], results: list[ms.runner.RunnerResult]
    ) -> None:
        """No result changes what is measured."""

    def clone(self) -> Exhaustive:
        """Another one, for another thread."""
        return Exhaustive()
