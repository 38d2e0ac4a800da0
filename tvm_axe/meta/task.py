"""One workload for one target: its records on disk, what became of each candidate, and when."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.meta.measure.protocol import Measurement
from tvm_axe.records.database import FAILED_SECONDS, Database, Record, choose_records
from tvm_axe.records.folders import folder_for
from tvm_axe.records.provenance import Provenance
from tvm_axe.records.trials import Trial, add_missing, key_of, now, read_trials, revise_trials, write_trial

__all__ = ["Task", "TaskResult", "Workload"]


@dataclass(frozen=True)
class Workload:
    """A function to tune.

    Attributes
    ----------
    name
        What it is called in its module; the first of its names where it stands there several times.
    mod
        Normalised (`tvm_axe.records.database.normalize`).
    weight
        How often one call of the whole calls it.
    folder
        Its database; None: the one of its own below the job's folder (`tvm_axe.records.folders.folder_for`).
    exact
        Whether earlier records count only where they name its blocks as `mod` does and have a time; others are measured
        again, and recorded by the names of `mod`. Else the search takes the names that the records have.
    """

    name: str
    mod: IRModule
    weight: int = 1
    folder: Path | None = None
    exact: bool = False


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
        Time of the untuned function and of what is kept: the best candidate, or the untuned function where none is
        faster. None if it could not be run, or no candidate was good.
    gflops
        Rate of what is kept in 1e9 operations a second, as upstream counts them; None where there are none.
    failures
        The reason of each candidate that failed in this call.
    weight
        How often one call of the whole calls it.
    folder
        Its database; see `tvm_axe.records.trials` for what is beside the records.
    """

    name: str
    trials: int
    before_ms: float | None
    best_ms: float | None
    gflops: float | None
    failures: tuple[str, ...]
    weight: int
    folder: Path


class Task:
    """The state of one workload's tuning; opening it repairs and reads what earlier calls left.

    Parameters
    ----------
    workload
        The function.
    target
        A resolved target.
    work_dir
        Where databases are.
    seed, trials
        Of this call, for its provenance.

    Attributes
    ----------
    mod
        The workload as the database has it, to search on: traces go by its names of blocks.
    memory
        A database in memory with the same records, from which upstream's search takes its population.
    earlier
        Records of earlier calls, without the untuned function's.
    before
        Seconds of the untuned function; None as long as it wasn't run, or if it can't be, such as on a GPU.
    seconds
        Those of each candidate in the order of measuring, `FAILED_SECONDS` for one that failed.
    failures
        The reasons of this call's failures.
    """

    def __init__(self, workload: Workload, target: Target, work_dir: str | Path, seed: int, trials: int) -> None:
        self.name, self.weight, self.target = workload.name, workload.weight, target
        self.folder = workload.folder or folder_for(work_dir, target, workload.name, workload.mod)
        self.database = Database(self.folder)
        for moved in self.database.repaired:
            warnings.warn(moved, stacklevel=2)
        self._provenance = Provenance(self.folder, target, seed, trials)
        self._workload = (
            ms.database.Workload(workload.mod) if workload.exact else self.database.commit_workload(workload.mod)
        )
        self.mod = self._workload.mod
        self._digest = _tvm.workload_hash(self.mod)
        self.operations = _tvm.flops(self.mod)
        self.memory = ms.database.MemoryDatabase()
        self.memory.commit_workload(self.mod)
        records = self.database.records(self._workload, target)
        if workload.exact:
            own = (record for record in records if record.workload.same_as(self._workload))
            records = [record for record in own if float(record.run_secs[0]) < FAILED_SECONDS]
        # The function as it is has a record too, with an empty trace, so that `apply_best` never picks a worse one.
        untuned = [record for record in records if not record.trace.insts]
        self.before = float(untuned[0].run_secs[0]) if untuned else None
        self.earlier = [record for record in records if record.trace.insts]
        self.seconds = [float(record.run_secs[0]) for record in self.earlier]
        self._keys = [key_of(_tvm.record_json(record)) for record in self.earlier]
        add_missing(self.folder, zip(self._keys, self.seconds))
        self.failures: list[str] = []
        self._elapsed = max((trial.elapsed or 0.0 for trial in read_trials(self.folder)), default=0.0)
        self._since: float | None = None

    @property
    def best(self) -> float | None:
        """Seconds of the best candidate; None if none is good."""
        best = min(self.seconds, default=FAILED_SECONDS)
        return best if best < FAILED_SECONDS else None

    @property
    def kept(self) -> float | None:
        """Seconds of what is kept, the untuned function where no good candidate is faster; None if none is good."""
        best = self.best
        return best if best is None or self.before is None else min(best, self.before)

    @property
    def elapsed(self) -> float:
        """Seconds that went into this task, over all calls that left a record."""
        return self._elapsed + (0.0 if self._since is None else time.monotonic() - self._since)

    @contextmanager
    def attention(self, since: float | None = None) -> Iterator[None]:
        """Time spent within counts as this task's; it began at `since` of `time.monotonic` if that is given."""
        self._since = time.monotonic() if since is None else since
        try:
            yield
        finally:
            self._elapsed, self._since = self.elapsed, None

    def commit_untuned(self, seconds: float | None, conditions: Mapping[str, str | int]) -> None:
        """Put the time of the function as it is, if there is one, on disk, unless an earlier call has.

        `conditions` are those of all this call's measurements, for its provenance.
        """
        if self.before is None and seconds is not None:
            self.before = seconds
            self._commit(s_tir.Schedule(self.mod).trace, ms.arg_info.ArgInfo.from_entry_func(self.mod), seconds)
        self._provenance.record(
            self._digest, name=self.name, before_ms=_milliseconds(self.before), failures=[], conditions={**conditions}
        )

    def commit(self, candidate: ms.MeasureCandidate, measured: Measurement) -> None:
        """Put a measurement on disk: its record, then its line in the log of trials."""
        seconds = FAILED_SECONDS if measured.seconds is None else measured.seconds
        record = self._commit(candidate.sch.trace, candidate.args_info, seconds)
        self.memory.commit_tuning_record(record)
        self.seconds.append(seconds)
        if measured.failure is not None:
            self.failures.append(measured.failure)
        key, spent = key_of(_tvm.record_json(record)), round(self.elapsed, 3)
        self._keys.append(key)
        times = round(measured.build_seconds, 3), round(measured.run_seconds, 3)
        machine = measured.machine or platform.node()
        write_trial(self.folder, Trial(key, now(), spent, measured.seconds, measured.failure, *times, machine=machine))

    def records(self) -> dict[str, tuple[Record, IRModule]]:
        """All the task's records by key, by all jobs so far, each with the workload by whose names its trace goes."""
        return {
            key_of(record.entry): (record, its.mod) for record, its in self.database.lines(self._workload, self.target)
        }

    def confirmed(self) -> set[str]:
        """Keys of the records whose times were taken again in turns with others."""
        return {trial.record for trial in read_trials(self.folder) if trial.turns}

    def revise(self, seconds: Mapping[str, float], turns: Mapping[str, int]) -> None:
        """Give records other times; all at once, so that a process that is killed leaves all or none of them.

        Parameters
        ----------
        seconds
            New times, by key.
        turns
            In how many turns those were taken that were taken so, by key.

        Raises
        ------
        TuneError
            If it cannot be written.
        """
        new = {}
        for key, (record, _) in self.records().items():
            if key in seconds:
                trace, _, *rest = record.entry
                new[key] = replace(record, seconds=seconds[key], entry=[trace, [seconds[key]], *rest])
        keys = {key: key_of(record.entry) for key, record in new.items()}
        told = {trial.record: trial for trial in read_trials(self.folder) if trial.record in new}
        lines = {
            key: replace(trial, record=keys[key], seconds=seconds[key], turns=turns.get(key))
            for key, trial in told.items()
        }
        revise_trials(self.folder, lines, keep=True)
        choose_records(self.folder, lambda records: [new.get(key_of(record.entry), record) for record in records])
        revise_trials(self.folder, lines, keep=False)
        self.seconds = [seconds.get(key, known) for key, known in zip(self._keys, self.seconds)]
        self._keys = [keys.get(key, key) for key in self._keys]
        self.before = next((record.seconds for record in new.values() if not record.trace[0]), self.before)

    def note(self, machines: Mapping[str, Any]) -> None:
        """Write this call's state into the provenance, once something was measured in it, and on which machines."""
        self._provenance.run |= {"machines": machines} if machines else {}
        times = {"before_ms": _milliseconds(self.before), "best_ms": _milliseconds(self.kept)}  # finals revise both
        self._provenance.record(self._digest, failures=self.failures, trials=len(self.seconds), **times)

    def result(self) -> TaskResult:
        """The state as `tune` reports it."""
        kept = self.kept
        return TaskResult(
            name=self.name,
            trials=len(self.seconds),
            before_ms=_milliseconds(self.before),
            best_ms=_milliseconds(kept),
            gflops=self.operations / kept / 1e9 if kept is not None and self.operations else None,
            failures=tuple(self.failures),
            weight=self.weight,
            folder=self.folder,
        )

    def _commit(
        self, trace: s_tir.schedule.Trace, infos: list[ms.arg_info.ArgInfo], seconds: float
    ) -> ms.database.TuningRecord:
        record = ms.database.TuningRecord(trace, self._workload, [seconds], self.target, infos)
        self.database.commit_tuning_record(record)
        return record


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
