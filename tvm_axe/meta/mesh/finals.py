"""The finals of a program: the fastest of its schedules, timed again in turns, and which of them is the choice.

A search times one schedule after the other, so that a slow moment of the machine falls on one of them. The fastest few
therefore run again in turns; each gets a further record with the times of all its turns, the median first as readers
of records take that, and the choice is made from these records alone, by `tvm_axe.meta.search.policy`. What has the
right of way is the schedule with the fewest stages, then that with fewer overlapping stages, fewer chunks and fewer
bytes between devices, and then that which was recorded first. So jobs that measure the same but for noise choose the
same.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Sequence
from dataclasses import replace

from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.lower.cost import features_of_program
from tvm_axe.meta.measure.protocol import Measurer
from tvm_axe.meta.mesh.bench import KEPT
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.seeds import bound_axes
from tvm_axe.meta.search.policy import PROGRAMS, winner
from tvm_axe.meta.task import TaskResult
from tvm_axe.records.database import FAILED_SECONDS, Database

__all__ = ["applied", "chosen", "latest", "median_seconds", "run_finals", "with_best"]

TURNS = 5
_FEWEST, _MARGIN = 4, 1.1  # finalists: at least so many, and all up to so many times the fastest's time


def run_finals(
    measurer: Measurer, database: Database, mod: IRModule, target: Target, traces: Container[str] | None = None
) -> None:
    """Time the fastest few of a workload's schedules again in turns, and record these times.

    Parameters
    ----------
    measurer
        Prepared for the workload.
    database, mod, target
        Where its records are.
    traces
        The schedules that take part, by their traces' text; None: all but the program as it is, if that shares nothing.
    """
    records = latest(database.records(database.commit_workload(mod), target))
    if traces is not None:
        records = [record for record in records if str(record.trace) in traces]
    elif not bound_axes(mod["main"]):
        records = [record for record in records if record.trace.insts]
    records.sort(key=median_seconds)
    limit = min(FAILED_SECONDS, _MARGIN * min(map(median_seconds, records), default=0.0))
    near = [record for record in records if median_seconds(record) < limit][:KEPT]
    finalists = near if len(near) > _FEWEST else [r for r in records[:_FEWEST] if median_seconds(r) < FAILED_SECONDS]
    if len(finalists) < 2:
        return
    mods = [applied(record) for record in finalists]
    turns = [list(measurer.measure_all(mods)) for _ in range(TURNS)]
    for record, measured in zip(finalists, zip(*turns)):
        times = sorted(m.seconds for m in measured if m.seconds is not None) or [FAILED_SECONDS]
        times.insert(0, times.pop(len(times) // 2))
        again = ms.database.TuningRecord(record.trace, record.workload, times, target, record.args_info)
        database.commit_tuning_record(again)


def chosen(
    records: Sequence[ms.database.TuningRecord], candidates: Candidates | None = None
) -> ms.database.TuningRecord | None:
    """The best of a workload's records, which are in the order of their commits; None if no schedule could be run.

    Parameters
    ----------
    records
        Of one workload and target.
    candidates
        What is known of its schedules.
    """
    known = Candidates() if candidates is None else candidates
    last = {str(record.trace): n for n, record in enumerate(records)}
    # Times that weren't taken in turns count only as long as they wait for finals.
    settled = max((n for n, record in enumerate(records) if len(record.run_secs) > 1), default=-1)
    pool = [r for r in latest(records) if len(r.run_secs) > 1 or last[str(r.trace)] > settled]
    pool = [record for record in pool if median_seconds(record) < FAILED_SECONDS]
    if not pool:
        return None
    pool.sort(key=lambda record: _complexity(applied(record), known))
    return pool[winner([[float(seconds) for seconds in record.run_secs] for record in pool], PROGRAMS)]


def with_best(result: TaskResult, best_ms: float | None) -> TaskResult:
    """Say what the chosen schedule takes; the program as it was, if faster by noise alone, is said to take as long."""
    before_ms = result.before_ms
    if before_ms is not None and best_ms is not None:
        before_ms = max(before_ms, best_ms)
    return replace(result, before_ms=before_ms, best_ms=best_ms)


def latest(records: Sequence[ms.database.TuningRecord]) -> list[ms.database.TuningRecord]:
    """Of each trace, the record that was committed last; in the order of the first."""
    return list({str(record.trace): record for record in records}.values())


def median_seconds(record: ms.database.TuningRecord) -> float:
    """The median of a record's times."""
    return statistics.median(float(seconds) for seconds in record.run_secs)


def applied(record: ms.database.TuningRecord) -> IRModule:
    """Its workload under the record's schedule."""
    schedule = s_tir.Schedule(record.workload.mod)
    record.trace.apply_to_schedule(schedule, remove_postproc=True)
    return schedule.mod


def _complexity(mod: IRModule, candidates: Candidates) -> tuple[float, ...]:
    features = features_of_program(candidates.lowered(mod))
    return tuple(features[name] for name in ("stages", "overlapping", "chunks", "bytes"))
