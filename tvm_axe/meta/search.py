"""The search for one function: upstream's evolutionary search and XGBoost model, measurements committed one by one."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm
from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from .. import _tvm
from ..errors import TuneError
from .database import FAILED_SECONDS
from .measure import Measurement, Worker
from .provenance import Provenance
from .space import space_for

__all__ = ["Search", "TaskResult"]

_BATCH = 16  # candidates between two updates of the model

logger = logging.getLogger("tvm.s_tir.meta_schedule")  # upstream's own, which `tune` sends to a file


@dataclass(frozen=True)
class TaskResult:
    """What tuning one function came to.

    Attributes
    ----------
    name
        The function's name in its module.
    trials
        Candidates measured for it so far, over all calls with this `work_dir`.
    before_ms, best_ms
        Time of the untuned function and of the best candidate; None if it could not be run, or none was good.
    gflops
        Rate of the best candidate in 1e9 operations a second, as upstream counts them; None where there are none.
    failures
        The reason of each candidate that failed in this call.
    """

    name: str
    trials: int
    before_ms: float | None
    best_ms: float | None
    gflops: float | None
    failures: tuple[str, ...]


class Search:
    """Tunes one function after the other, with one database, cost model and worker for all.

    Upstream commits results a round at a time, which loses a round when it is interrupted; here each is committed as
    soon as it is there, so the loop over the rounds is written out.

    Attributes
    ----------
    seconds
        Where the time went: ``search``, ``build``, ``run``.
    """

    def __init__(
        self, target: Target, folder: Path, trials: int, seed: int, worker: Worker, provenance: Provenance
    ) -> None:
        self.target, self.trials, self.seed = target, trials, seed
        self.worker, self.provenance = worker, provenance
        try:
            self.database = ms.database.JSONDatabase(work_dir=str(folder))
        except (RuntimeError, ValueError) as error:
            raise TuneError(f"work_dir: the database in {folder} cannot be read: {error}") from error
        # Upstream's default predicts at random for the first 100 candidates, more than most jobs have.
        self.model = ms.cost_model.XGBModel(num_warmup_samples=_BATCH, num_tuning_cores=1)
        self.seconds = {"search": 0.0, "build": 0.0, "run": 0.0}

    def tune(self, name: str, mod: IRModule, progress: bool) -> TaskResult:
        """Measure candidates until the database has as many as were asked for; `mod` is a normalised workload."""
        task = _Task(name, mod, self.database, self.target)
        done = len(task.seconds)
        if done >= self.trials:
            return task.result([])
        untuned = self.worker.prepare(mod)
        if untuned.seconds is None:
            return task.result([f"the untuned function: {untuned.failure}"])
        task.commit_untuned(untuned.seconds)
        self.provenance.record(task.digest, name=name, before_ms=untuned.seconds * 1e3, failures=[])
        with tqdm(total=self.trials, initial=done, desc=name, unit="trial", disable=not progress) as bar:
            failures = self._fill(task, bar)
        result = task.result(failures)
        self.provenance.record(task.digest, best_ms=result.best_ms, trials=result.trials)
        return result

    def _fill(self, task: _Task, bar: tqdm) -> list[str]:
        """Search and measure; the database grows with each candidate, model and population learn from each batch."""
        failures: list[str] = []
        with self._clock():
            context = self._context(task)
        while True:
            with self._clock():
                candidates = context.generate_measure_candidates()
                predicted = self.model.predict(context, candidates) if candidates and self.model.booster else None
            if candidates is None:
                return failures
            results = []
            for candidate in candidates:
                measured = self.worker.measure(candidate.sch.mod)
                self.seconds["build"] += measured.build_seconds
                self.seconds["run"] += measured.run_seconds
                results.append(task.commit(candidate, measured))
                if measured.failure is not None:
                    failures.append(measured.failure)
                    self.provenance.record(task.digest, failures=failures)
                bar.set_postfix_str(task.summary(len(failures)), refresh=False)
                bar.update()
            if predicted is not None:
                task.grade(predicted)
            with self._clock():
                self.model.update(context, candidates, results)
                context.notify_runner_results(candidates, results)

    def _context(self, task: _Task) -> ms.TuneContext:
        """A search that stands where the earlier calls left it."""
        # Small populations: what is searched is small too, and a round must not take longer than its measurements.
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=64, init_min_unmeasured=32, genetic_num_iters=2, eps_greedy=0.15
        )
        # A job that goes on must not draw the candidates again that it started with.
        done = len(task.seconds)
        seed = 1 + (self.seed + done) % (2**31 - 2)
        space = space_for(task.mod["main"], self.target)
        # All cores search; the worker, which has the cores while it measures, waits meanwhile.
        threads = len(os.sched_getaffinity(0))
        context = _tvm.tune_context(task.mod, self.target, space, strategy, task.name, seed, threads, logger)
        self.model.update(context, *task.replay())
        spaces = context.generate_design_space()
        context.pre_tuning(self.trials - done, min(_BATCH, self.trials - done), spaces, task.memory, self.model)
        return context

    @contextmanager
    def _clock(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds["search"] += time.perf_counter() - start


class _Task:
    """One workload for one target: what was measured of it so far, here and before."""

    def __init__(self, name: str, mod: IRModule, database: ms.database.Database, target: Target) -> None:
        self.name, self.mod, self.database, self.target = name, mod, database, target
        self.digest = _tvm.workload_hash(mod)
        self.workload = database.commit_workload(mod)
        # The search reads its population from a database of its own: the one on disk mixes the targets.
        self.memory = ms.database.MemoryDatabase()
        self.memory.commit_workload(mod)
        records = [
            record
            for record in database.get_all_tuning_records()
            if record.workload.same_as(self.workload) and str(record.target) == str(target)
        ]
        # The function as it is has a record too, with an empty trace, so that `apply_best` never picks a worse one.
        untuned = [record for record in records if not record.trace.insts]
        self.before = float(untuned[0].run_secs[0]) if untuned else None
        self.earlier = [record for record in records if record.trace.insts]
        self.seconds = [float(record.run_secs[0]) for record in self.earlier]
        self.operations = _tvm.flops(mod)
        self.model_error: float | None = None

    def replay(self) -> tuple[list[ms.MeasureCandidate], list[ms.runner.RunnerResult]]:
        """What earlier calls measured, for the population and the model, without records that no longer apply."""
        candidates, results = [], []
        for record, seconds in zip(self.earlier, self.seconds):
            # Traces come from a file, and upstream raises whatever its C++ side throws.
            try:
                candidates.append(record.as_measure_candidate())
            except Exception as error:
                reason = _tvm.schedule_error_reason(error)
                warnings.warn(
                    f"{self.name}: a record that no longer applies is not learnt from: {reason}", stacklevel=2
                )
                continue
            self.memory.commit_tuning_record(record)
            results.append(_result(seconds))
        return candidates, results

    def commit_untuned(self, seconds: float) -> None:
        """Put the time of the function as it is on disk, unless an earlier call has."""
        if self.before is None:
            self.before = seconds
            trace, infos = s_tir.Schedule(self.mod).trace, ms.arg_info.ArgInfo.from_entry_func(self.mod)
            self.database.commit_tuning_record(
                ms.database.TuningRecord(trace, self.workload, [seconds], self.target, infos)
            )

    def commit(self, candidate: ms.MeasureCandidate, measured: Measurement) -> ms.runner.RunnerResult:
        """Put a measurement on disk."""
        self.seconds.append(FAILED_SECONDS if measured.seconds is None else measured.seconds)
        record = ms.database.TuningRecord(
            candidate.sch.trace, self.workload, self.seconds[-1:], self.target, candidate.args_info
        )
        self.database.commit_tuning_record(record)
        self.memory.commit_tuning_record(record)
        return _result(self.seconds[-1])

    def grade(self, predicted: np.ndarray) -> None:
        """Compare the model's scores of the last candidates with what they came to: best time over own time."""
        measured = min(self.seconds) / np.array(self.seconds[-len(predicted) :])
        self.model_error = float(np.sqrt(np.mean((predicted - measured) ** 2)))

    def summary(self, failed: int) -> str:
        """The state in a few words, for the progress bar."""
        best = min(self.seconds)
        words = [f"best {best * 1e3:.3f} ms"] if best < FAILED_SECONDS else ["none good"]
        if best < FAILED_SECONDS and self.operations:
            words.append(f"{self.operations / best / 1e9:.1f} GFLOP/s")
        if self.model_error is not None:
            words.append(f"model error {self.model_error:.2f}")
        return ", ".join([*words, f"{failed} failed"])

    def result(self, failures: list[str]) -> TaskResult:
        best = min(self.seconds, default=FAILED_SECONDS)
        good = best < FAILED_SECONDS
        return TaskResult(
            name=self.name,
            trials=len(self.seconds),
            before_ms=None if self.before is None else self.before * 1e3,
            best_ms=best * 1e3 if good else None,
            gflops=self.operations / best / 1e9 if good and self.operations else None,
            failures=tuple(failures),
        )


def _result(seconds: float) -> ms.runner.RunnerResult:
    failed = seconds >= FAILED_SECONDS
    return ms.runner.RunnerResult(None if failed else [seconds], "failed" if failed else None)
