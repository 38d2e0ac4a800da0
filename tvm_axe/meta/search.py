"""The search for one function: upstream's evolutionary search and XGBoost model, measurements committed one by one."""

from __future__ import annotations

import logging
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from .. import _tvm
from .database import FAILED
from .measure import Measurement, Worker
from .provenance import Provenance
from .space import space_for

__all__ = ["Search", "TaskResult"]

_BATCH = 16  # candidates between two updates of the model
_FAILED_SECONDS = 1e10  # upstream's time of a candidate that failed


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
    """

    def __init__(
        self, target: Target, folder: Path, trials: int, seed: int, worker: Worker, provenance: Provenance
    ) -> None:
        self.target, self.trials, self.seed = target, trials, seed
        self.worker, self.provenance = worker, provenance
        self.database = ms.database.JSONDatabase(work_dir=str(folder))
        # Upstream's default predicts at random for the first 100 candidates, more than most jobs have.
        self.model = ms.cost_model.XGBModel(num_warmup_samples=_BATCH, num_tuning_cores=1)
        self.seconds: dict[str, float] = defaultdict(float)
        self.logger = logging.getLogger("tvm.s_tir.meta_schedule")

    def tune(self, name: str, mod: IRModule, progress: bool) -> TaskResult:
        """Measure candidates until the database has as many as were asked for; `mod` is a normalised workload."""
        digest = _tvm.workload_hash(mod)
        workload = self.database.commit_workload(mod)
        # The search reads its population from a database of its own: the one on disk mixes the targets.
        memory = ms.database.MemoryDatabase()
        memory.commit_workload(mod)
        records = [r for r in self.database.get_all_tuning_records() if self._is_for(r, workload)]
        seconds = [_seconds(record) for record in records]
        before = self.provenance.untuned_ms(digest)
        failures: list[str] = []
        if len(records) < self.trials:
            untuned = self.worker.prepare(mod)
            if untuned.seconds is None:
                return self._result(name, mod, seconds, None, [f"the untuned function: {untuned.failure}"])
            before = untuned.seconds * 1e3
            self.provenance.record(digest, name=name, untuned_ms=before)
            with tqdm(total=self.trials, initial=len(records), desc=name, disable=not progress) as bar:
                for candidate, measurement in self._measurements(mod, memory, records, bar):
                    seconds.append(measurement.seconds or _FAILED_SECONDS)
                    record = ms.database.TuningRecord(
                        candidate.sch.trace, workload, [seconds[-1]], self.target, candidate.args_info
                    )
                    self.database.commit_tuning_record(record)
                    memory.commit_tuning_record(record)
                    if measurement.failure is not None:
                        failures.append(measurement.failure)
                    bar.set_postfix_str(self._postfix(mod, seconds, failures), refresh=False)
                    bar.update()
        result = self._result(name, mod, seconds, before, failures)
        if len(seconds) > len(records):
            self.provenance.record(digest, best_ms=result.best_ms, trials=result.trials, failures=failures)
        return result

    def _measurements(
        self, mod: IRModule, memory: ms.database.Database, records: list[ms.database.TuningRecord]
    ) -> Iterator[tuple[ms.MeasureCandidate, Measurement]]:
        """Search and measure; the model and the population learn from each batch."""
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=64, init_min_unmeasured=32, genetic_num_iters=3, eps_greedy=0.15
        )
        # A job that goes on must not draw the candidates again that it started with.
        seed = 1 + (self.seed + len(records)) % (2**31 - 2)
        context = _tvm.tune_context(mod, self.target, space_for(mod["main"], self.target), strategy, seed, self.logger)
        with self._clock("search"):
            self._learn(context, memory, records)
            context.pre_tuning(
                self.trials - len(records), min(_BATCH, self.trials), context.generate_design_space(), memory, self.model
            )
        while True:
            with self._clock("search"):
                candidates = context.generate_measure_candidates()
            if candidates is None:
                break
            results = []
            for candidate in candidates:
                measurement = self.worker.measure(candidate.sch.mod)
                self.seconds["build"] += measurement.build_seconds
                self.seconds["run"] += measurement.run_seconds
                yield candidate, measurement
                seconds = None if measurement.seconds is None else [measurement.seconds]
                results.append(ms.runner.RunnerResult(seconds, measurement.failure))
            with self._clock("search"):
                self.model.update(context, candidates, results)
                context.notify_runner_results(candidates, results)
        context.post_tuning()
