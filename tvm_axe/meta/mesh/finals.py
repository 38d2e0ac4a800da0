"""Which of the fastest schedules is the choice: timed again in turns, and the simplest of those that noise can't tell.

A search times one schedule after the other, so that a slow moment of the machine falls on one of them. The fastest few
therefore run again in turns; each gets a further record with the times of all its turns, the median first as readers
of records take that, and the choice is made from these records alone. Schedules whose middle halves of times overlap
with the fastest's are as good, unless their medians say that a twentieth and more would be given away: of them that
with the fewest stages is taken, then that with fewer overlapping stages, fewer chunks and fewer bytes between devices,
and then that which was recorded first. So jobs that measure the same but for noise choose the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.lower import lower
from tvm_axe.lower.cost import features_of_program
from tvm_axe.meta.mesh.seeds import bound_axes
from tvm_axe.meta.mesh.space import mesh_of
from tvm_axe.meta.mesh.worker import KEPT
from tvm_axe.meta.search.search import Measurer
from tvm_axe.records.database import FAILED_SECONDS, Database

__all__ = ["chosen", "run_finals"]

TURNS = 5
_FEWEST, _MARGIN = 4, 1.1  # finalists: at least so many, and all up to so many times the fastest's time
_TIE = 1.05  # times the fastest's median that one as good may take


def run_finals(worker: Measurer, database: Database, mod: IRModule, target: Target) -> None:
    """Time the fastest few of a workload's schedules again in turns, and record these times.

    Parameters
    ----------
    worker
        Prepared for the workload.
    database, mod, target
        Where its records are.
    """
    records = sorted(_latest(database.records(database.commit_workload(mod), target)), key=_seconds)
    if not bound_axes(mod["main"]):  # as it is, it shares nothing, and is no schedule for a mesh
        records = [record for record in records if record.trace.insts]
    limit = min(FAILED_SECONDS, _MARGIN * min(map(_seconds, records), default=0.0))
    near = [record for record in records if _seconds(record) < limit][:KEPT]
    finalists = near if len(near) > _FEWEST else [r for r in records[:_FEWEST] if _seconds(r) < FAILED_SECONDS]
    if len(finalists) < 2:
        return
    mods = [_applied(record) for record in finalists]
    turns = [list(worker.measure_all(mods)) for _ in range(TURNS)]
    for record, measured in zip(finalists, zip(*turns)):
        times = sorted(m.seconds for m in measured if m.seconds is not None) or [FAILED_SECONDS]
        times.insert(0, times.pop(len(times) // 2))
        again = ms.database.TuningRecord(record.trace, record.workload, times, target, record.args_info)
        database.commit_tuning_record(again)


def chosen(records: Sequence[ms.database.TuningRecord]) -> ms.database.TuningRecord | None:
    """The best of a workload's records, which are in the order of their commits; None if no schedule could be run."""
    last = {str(record.trace): n for n, record in enumerate(records)}
    # Times that weren't taken in turns count only as long as they wait for finals.
    settled = max((n for n, record in enumerate(records) if len(record.run_secs) > 1), default=-1)
    pool = [r for r in _latest(records) if len(r.run_secs) > 1 or last[str(r.trace)] > settled]
    pool = [record for record in pool if _seconds(record) < FAILED_SECONDS]
    if not pool:
        return None
    fastest = min(pool, key=_seconds)
    _, slowest = _middle(fastest)
    tied = [r for r in pool if _middle(r)[0] <= slowest and _seconds(r) <= _TIE * _seconds(fastest)]
    return min(tied, key=lambda record: _complexity(_applied(record)))


def _latest(records: Sequence[ms.database.TuningRecord]) -> list[ms.database.TuningRecord]:
    """Of each trace, the record that was committed last; in the order of the first."""
    return list({str(record.trace): record for record in records}.values())


def _seconds(record: ms.database.TuningRecord) -> float:
    return float(record.run_secs[0])


def _middle(record: ms.database.TuningRecord) -> tuple[float, float]:
    """The lower and the upper quartile of a record's times."""
    times = [float(seconds) for seconds in record.run_secs]
    if len(times) == 1:
        return times[0], times[0]
    lower_quartile, _, upper_quartile = statistics.quantiles(times, n=4, method="inclusive")
    return lower_quartile, upper_quartile


def _complexity(mod: IRModule) -> tuple[float, ...]:
    features = features_of_program(lower(mod["main"], mesh_of(mod)))
    return tuple(features[name] for name in ("stages", "overlapping", "chunks", "bytes"))


def _applied(record: ms.database.TuningRecord) -> IRModule:
    """Its workload under the record's schedule."""
    schedule = s_tir.Schedule(record.workload.mod)
    record.trace.apply_to_schedule(schedule, remove_postproc=True)
    return schedule.mod
