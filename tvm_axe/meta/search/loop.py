"""The job around the searches: it gives trials to tasks, measures, and puts every result on disk at once.

Upstream commits results a round at a time, which loses a round when it is interrupted; here each is committed as soon
as it is there, so the loop over the rounds is written out.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tvm.target import Target

from tvm_axe.errors import TuneError
from tvm_axe.meta.measure.protocol import TimesInTurns
from tvm_axe.meta.report.progress import Progress
from tvm_axe.meta.search.finals import Finals
from tvm_axe.meta.search.scheduler import expected_gain, stalled
from tvm_axe.meta.search.search import ROUND, Search, Tools
from tvm_axe.meta.task import Task, TaskResult, Workload

__all__ = ["Job"]


class Job:
    """One call's tuning of some workloads with the same tools.

    Parameters
    ----------
    workloads
        At least one.
    tools
        What measures, what learns, and what the design spaces are.
    target
        A resolved target.
    work_dir
        Where databases are.
    trials, patience
        As `tvm_axe.tune` takes them.
    seed
        Of the search; drawn if None.

    Attributes
    ----------
    tasks
        The state of each workload.
    seconds
        Where the time went: ``search``, ``build``, ``run``.
    """

    def __init__(
        self,
        workloads: Sequence[Workload],
        tools: Tools,
        target: Target,
        work_dir: str | Path,
        trials: int,
        seed: int | None = None,
        patience: int | None = None,
    ) -> None:
        self._began: float | None = time.monotonic()
        self._tools, self._trials, self._patience = tools, trials, patience
        self._seed = secrets.randbelow(2**31 - 1) if seed is None else seed
        self.tasks = [Task(workload, target, work_dir, self._seed, trials) for workload in workloads]
        self._searches: dict[Path, Search] = {}
        self._prepared: Task | None = None
        self.seconds = {"search": 0.0, "build": 0.0, "run": 0.0}

    def run(self, progress: bool) -> tuple[TaskResult, ...]:
        """Measure until the tasks have their trials, or no task has anything left to try; then confirm what is best."""
        budget, done = self._trials * len(self.tasks), sum(len(task.seconds) for task in self.tasks)
        active = [task for task in self.tasks if not self._is_stalled(task)]
        with Progress(budget, done, progress and done < budget) as bar:
            while done < budget and active:
                task = max(active, key=lambda task: expected_gain(task.weight, task.before, task.seconds))
                since, self._began = self._began, None  # the first task's time includes the start of the job
                with task.attention(since):
                    failure = self._prepare(task) or self._open(task)
                    measured = 0 if failure else self._round(task, budget - done, bar)
                done += measured
                if failure:
                    task.failures.append(failure)
                    lost = max(0, self._trials - len(task.seconds))
                    budget -= lost
                    bar.shorten(lost)
                if not measured or self._is_stalled(task):
                    active.remove(task)
            for task in self.tasks:
                self._confirm(task, bar)
        return tuple(task.result() for task in self.tasks)

    def _confirm(self, task: Task, bar: Progress) -> None:
        """Time the best candidates again in turns with the default, unless that was done or the measurer can't."""
        measurer = self._tools.measurer
        if not isinstance(measurer, TimesInTurns) or not (finals := Finals(task)).due:
            return
        bar.confirm(task)
        start = time.monotonic()
        with task.attention():
            failure = self._prepare(task)
            try:
                if failure is None:
                    finals.run(measurer)
            except TuneError as error:
                failure = f"its best could not be timed again: {error}"
        self.seconds["run"] += time.monotonic() - start
        if failure is not None:
            task.failures.append(failure)
        task.note(self._tools.measurer.machines)

    def _is_stalled(self, task: Task) -> bool:
        return self._patience is not None and stalled(task.seconds, self._patience)

    def _prepare(self, task: Task) -> str | None:
        """Have the worker measure this task's candidates from now on; gives the reason if it can't."""
        if self._prepared is task:
            return None
        self._prepared = None
        untuned = self._tools.measurer.prepare(task.mod)
        if untuned.failure is None:
            self._prepared = task
            task.commit_untuned(untuned.seconds, self._tools.measurer.conditions)
        return None if untuned.failure is None else f"the untuned function: {untuned.failure}"

    def _open(self, task: Task) -> str | None:
        """Begin the search unless it was; gives the reason if it can't."""
        if task.folder not in self._searches:
            with self._clock():
                try:
                    self._searches[task.folder] = Search(task, self._tools, self._seed)
                except TuneError as error:
                    return str(error)
        return None

    def _round(self, task: Task, left: int, bar: Progress) -> int:
        """Search, measure, learn; gives the number of candidates measured, 0 if there is none left."""
        search = self._searches[task.folder]
        with self._clock():
            # A first round leaves the other functions at least one of theirs.
            candidates = search.propose(min(ROUND, left if task.seconds else self._trials))
        if not candidates:
            return 0
        before = len(task.seconds)
        try:
            mods = [candidate.sch.mod for candidate in candidates]
            for candidate, measured in zip(candidates, self._tools.measurer.measure_all(mods)):
                self.seconds["build"] += measured.build_seconds
                self.seconds["run"] += measured.run_seconds
                task.commit(candidate, measured)
                bar.advance(task, search.model_error)
        finally:
            task.note(self._tools.measurer.machines)
        with self._clock():
            search.learn(candidates, task.seconds[before:])
        return len(candidates)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds["search"] += time.monotonic() - start
