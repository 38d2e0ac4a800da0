"""What a search measured, as a MetaSchedule database: the program is the workload, a schedule's trace the record."""

from __future__ import annotations

import warnings
from pathlib import Path

from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.records import database
from tvm_axe.records.database import with_only_attrs
from tvm_axe.records.folders import MESH
from tvm_axe.schedule import LAYOUTS, Schedule


class Database:
    """The records of one program on one mesh and target, in a folder that other searches may write at the same time.

    Raises
    ------
    TuneError
        If the folder cannot be written; by `commit`, too.
    """

    def __init__(self, folder: Path, seed: Schedule, target: Target) -> None:
        self._target = target
        self._database = database.Database(folder)
        for moved in self._database.repaired:
            warnings.warn(moved, stacklevel=4)
        (func,) = seed.origin.functions.values()
        attrs = {"global_symbol": "main", "s_tir": True, MESH: str(seed.mesh)}
        if func.attrs and LAYOUTS in func.attrs:
            attrs[LAYOUTS] = func.attrs[LAYOUTS]
        self._workload = ms.database.Workload(IRModule({"main": with_only_attrs(func, attrs)}))
        self._seconds = {
            str(record.trace): sorted(float(s) for s in record.run_secs)[len(record.run_secs) // 2]
            for record in self._database.records(self._workload, target)
        }

    def seconds(self, sch: Schedule) -> float | None:
        """What a schedule with this trace took, if one was measured."""
        return self._seconds.get(str(sch.trace))

    def commit(self, sch: Schedule, seconds: list[float]) -> None:
        """Add the runs of a schedule."""
        infos = ms.arg_info.ArgInfo.from_prim_func(self._workload.mod["main"])
        record = ms.database.TuningRecord(sch.trace, self._workload, seconds, self._target, infos)
        self._database.commit_tuning_record(record)
        self._seconds[str(sch.trace)] = sorted(seconds)[len(seconds) // 2]
