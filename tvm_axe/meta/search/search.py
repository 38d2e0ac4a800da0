"""The search for one function: the design spaces' own candidates first, then upstream's evolutionary search.

Candidates are the same every time for the same seed, design space, records and, as the cost model learns from them,
measured times. For this the search runs on one thread: upstream's threads draw from states of their own, and which of
them takes which candidate is chance.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.meta.measure.protocol import Measurer
from tvm_axe.meta.spaces.space import space_for
from tvm_axe.meta.task import Task
from tvm_axe.records.database import FAILED_SECONDS

__all__ = ["ROUND", "Search", "Tools", "evolution"]

ROUND = 16  # candidates between two updates of the model, after the opening
_IN_VAIN = 8  # rounds without a new candidate until the space counts as exhausted

logger = logging.getLogger("tvm.s_tir.meta_schedule")  # upstream's own, which `tune` sends to a file


def evolution() -> ms.SearchStrategy:
    """Upstream's evolutionary search, with small populations: a round mustn't take longer than its measurements."""
    return ms.search_strategy.EvolutionarySearch(
        population_size=64, init_min_unmeasured=32, genetic_num_iters=2, eps_greedy=0.15
    )


@dataclass(frozen=True)
class Tools:
    """What tuning takes that depends on what is tuned.

    Attributes
    ----------
    measurer
        What builds and runs candidates.
    model
        The cost model, shared by the tasks of a job.
    space, strategy
        Make a function's design spaces and what searches them.
    opening
        How many spaces are measured as they were generated before the model first learns.
    """

    measurer: Measurer
    model: ms.CostModel
    space: Callable[[tirx.PrimFunc, Target], ms.SpaceGenerator] = space_for
    strategy: Callable[[], ms.SearchStrategy] = evolution
    opening: int = 8


class Search:
    """Proposes candidates for a task and learns from what becomes of them.

    It starts where the records of earlier calls left the task: they are its population, its model has seen them, and
    none of them is proposed again.

    Attributes
    ----------
    model_error
        Root mean square error of the model's scores, which are best time over own time, of the last candidates; None
        as long as it hasn't foreseen any.

    Raises
    ------
    TuneError
        If the function's design space cannot be generated.
    """

    def __init__(self, task: Task, tools: Tools, seed: int) -> None:
        self._task, self._model = task, tools.model
        # A job that goes on must not draw the candidates again that it started with.
        done = len(task.seconds)
        seed = 1 + (seed + done) % (2**31 - 2)
        self._space = tools.space(task.mod["main"], task.target)
        self._context = _tvm.tune_context(
            task.mod, task.target, self._space, tools.strategy(), task.name, seed, 1, logger
        )
        self._seen: set[str] = set()
        self.model_error: float | None = None
        self._predicted: np.ndarray | None = None
        self._replay()
        try:
            spaces = self._context.generate_design_space()
        except _tvm.UPSTREAM_ERRORS as error:
            reason = _tvm.why_refused(error)
            raise TuneError(f"its design space could not be generated: {reason}") from error
        self._openers = list(spaces[: max(0, tools.opening - done)])
        # How many there will be is not known here, and of no consequence: `propose` is told each time.
        self._context.pre_tuning(2**30, ROUND, spaces, task.memory, self._model)

    def propose(self, count: int) -> list[ms.MeasureCandidate]:
        """At most `count` candidates that were never proposed before; none if the search has come to its end."""
        found = self._new(self._opened(), count)
        for _ in range(_IN_VAIN):
            if found:
                break
            candidates = self._context.generate_measure_candidates()
            if candidates is None:
                break
            found = self._new(candidates, count)
        trained = bool(found) and self._model.trained
        self._predicted = self._model.predict(self._context, found) if trained else None
        return found

    def learn(self, candidates: Sequence[ms.MeasureCandidate], seconds: Sequence[float]) -> None:
        """Tell model and search what the proposed candidates came to, `FAILED_SECONDS` for those that failed."""
        if self._predicted is not None:
            wanted = min(self._task.seconds) / np.array(seconds)
            self.model_error = float(np.sqrt(np.mean((self._predicted[: len(wanted)] - wanted) ** 2)))
        results = [_result(s) for s in seconds]
        self._model.update(self._context, candidates, results)
        self._context.notify_runner_results(candidates, results)

    def _opened(self) -> Iterator[ms.MeasureCandidate]:
        """The first design spaces with the decisions that they were generated with, once."""
        while self._openers:
            opener = self._openers.pop(0).copy()
            if self._postprocess(opener):
                yield ms.MeasureCandidate(opener, ms.arg_info.ArgInfo.from_entry_func(self._task.mod))

    def _new(self, candidates: Iterable[ms.MeasureCandidate], count: int) -> list[ms.MeasureCandidate]:
        found: list[ms.MeasureCandidate] = []
        for candidate in candidates:
            digest = _tvm.workload_hash(candidate.sch.mod)
            if digest not in self._seen:
                self._seen.add(digest)
                found.append(candidate)
            if len(found) == count:  # an opener that is left is for the next round
                break
        return found

    def _replay(self) -> None:
        """Give what earlier calls measured to population and model, without what no longer applies."""
        candidates, results = [], []
        for record, seconds in zip(self._task.earlier, self._task.seconds):
            sch = s_tir.Schedule(self._task.mod)
            try:
                record.trace.apply_to_schedule(sch, remove_postproc=True)
                applies = self._postprocess(sch)
            except _tvm.UPSTREAM_ERRORS as error:  # traces come from a file
                reason = _tvm.why_refused(error)
                warnings.warn(
                    f"{self._task.name}: a record that no longer applies is not learnt from: {reason}", stacklevel=2
                )
                continue
            self._seen.add(_tvm.workload_hash(sch.mod))
            if applies:  # or the search, which applies it again, would end the process
                self._task.memory.commit_tuning_record(record)
                candidates.append(ms.MeasureCandidate(sch, record.args_info))
                results.append(_result(seconds))
        self._model.update(self._context, candidates, results)

    def _postprocess(self, sch: s_tir.Schedule) -> bool:
        sch.enter_postproc()
        return all(postproc.apply(sch) for postproc in self._space.postprocs or [])


def _result(seconds: float) -> ms.runner.RunnerResult:
    failed = seconds >= FAILED_SECONDS
    return ms.runner.RunnerResult(None if failed else [seconds], "failed" if failed else None)
