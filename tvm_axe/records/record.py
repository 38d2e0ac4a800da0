"""One line of a database: a measured candidate."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.records.folders import target_name

__all__ = ["FAILED_SECONDS", "Record", "parse_record"]

FAILED_SECONDS = 1e10  # upstream's time of a candidate that failed


@dataclass(frozen=True)
class Record:
    """A measured candidate.

    Attributes
    ----------
    workload
        Number of its workload: the line in the other file, from 0.
    seconds
        Its time, the median of what was measured; `FAILED_SECONDS` or more if it has none.
    entry
        What the file says of it: trace, run_secs, target, args, as JSON.
    place
        File and line, for messages.
    """

    workload: int
    seconds: float
    entry: list[Any]
    place: str

    @property
    def trace(self) -> Any:
        """The schedule's trace, as `Trace.apply_json_to_schedule` takes it."""
        return self.entry[0]

    @property
    def target(self) -> dict[str, Any]:
        """The target's JSON object."""
        return self.entry[2]

    def is_for(self, target: Target) -> bool:
        """Whether it was measured for exactly this target."""
        return self.target == json.loads(str(target))

    def schedule(self, mod: IRModule) -> s_tir.Schedule:
        """Its workload `mod` under its trace.

        Raises
        ------
        TuneError
            If the trace doesn't apply to it.
        """
        sch = s_tir.Schedule(mod)
        try:
            s_tir.schedule.Trace.apply_json_to_schedule(self.trace, sch)
        except _tvm.UPSTREAM_ERRORS as error:  # traces come from a file
            raise self._no_longer_applies(error) from error
        return sch

    def load(self, workload: ms.database.Workload) -> ms.database.TuningRecord:
        """The record as upstream has it, which keeps no trace that doesn't apply.

        Raises
        ------
        TuneError
            If upstream cannot make one of it. It then refuses to open the database.
        """
        try:
            return ms.database.TuningRecord.from_json(self.entry, workload)
        except _tvm.UPSTREAM_ERRORS as error:
            self.schedule(workload.mod)  # which says why, where it is the trace's fault
            raise self._no_longer_applies(error) from error

    def _no_longer_applies(self, error: Exception) -> TuneError:
        return TuneError(f"{self.place}: a record that no longer applies: {_tvm.why_refused(error)}")


def parse_record(line: str, workloads: Container[int], place: str) -> Record | None:
    """A line ``[n, [trace, run_secs, target, args]]`` on one of these workloads; None if it isn't such a line."""
    try:
        workload, entry = json.loads(line)
        (insts, decisions), run_secs, target, args = entry
        seconds = sorted(float(s) for s in run_secs)[len(run_secs) // 2]
        shaped = all(isinstance(part, list) for part in (insts, decisions, run_secs, args))
    except (ValueError, TypeError, IndexError, RecursionError, OverflowError):
        return None
    known = type(workload) is int and workload in workloads
    named = isinstance(target, dict) and _is_target(json.dumps(target))
    if not known or not shaped or not named or not math.isfinite(seconds):
        return None
    return Record(workload, seconds, entry, place)


@functools.cache
def _is_target(config: str) -> bool:
    """Whether upstream makes a target of this JSON that LLVM knows; else it refuses the whole database that has it."""
    try:
        target_name(Target(json.loads(config)))
    except _tvm.UPSTREAM_ERRORS as error:
        _tvm.raise_own_fault(error)
        return False
    return True
