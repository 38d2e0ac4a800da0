"""Compiling with what tuning found: the best recorded schedule of each function that has one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from .. import _tvm
from ..errors import TuneError
from ..target import resolve_target
from .database import FAILED_SECONDS, Record, find_databases, normalize, read_records, read_workloads, with_only_attrs
from .shipped import shipped_folders, stand_ins

__all__ = ["apply_best"]


def apply_best(
    mod: IRModule, target: str | dict[str, Any] | Target, work_dir: str | Path = "tuning_logs"
) -> tuple[IRModule, dict[str, float]]:
    """Replace every function that was tuned for this target by its fastest schedule.

    A function is recognised by what it computes, not by its name or its module; it keeps its name, its attributes and
    its signature. A record whose trace no longer applies is passed over with a warning that names it. Of a
    Relax model only kernels count: see `tvm_axe.relax.compile_model`.

    Parameters
    ----------
    mod
        The module; it isn't changed. Functions that aren't TensorIR are passed through.
    target
        What `tune` was given, or what `resolve_target` made of it.
    work_dir
        A folder of `tune`, or one above several. One that doesn't exist has no records. What it has no record of is
        looked up in those that come with the package, for this target or a generic one of the same kind
        (`tvm_axe.meta.shipped`).

    Returns
    -------
    mod : IRModule
        The module with scheduled functions.
    seconds : dict
        The recorded time of each function that has a usable record, by its name in `mod`, on the machine that it was
        measured on. Where nothing beat the function as it was, that is its own time and it is unchanged.
    """
    resolved = resolve_target(target)
    kernels = {
        variable: func
        for variable, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and func.attrs and func.attrs.get("s_tir")
    }
    wanted = {variable: _tvm.workload_hash(normalize(func)) for variable, func in kernels.items()}
    found = _records(find_databases(Path(work_dir)), resolved, {*wanted.values()})
    for other in stand_ins(resolved):
        missing = {*wanted.values()} - found.keys()
        found |= _records([folder for digest in missing for folder in shipped_folders(other, digest)], other, missing)
    functions, seconds = dict(mod.functions_items()), {}
    for variable, digest in wanted.items():
        for record, workload in found.get(digest, []):
            scheduled = _schedule(record, workload, kernels[variable])
            if scheduled is not None:
                functions[variable] = scheduled
                seconds[str(variable.name_hint)] = record.seconds
                break
    return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos), seconds


def _records(folders: list[Path], target: Target, wanted: set[str]) -> dict[str, list[tuple[Record, tuple[str, str]]]]:
    """The records of the wanted workloads for this target, each with its workload's line, the fastest first."""
    found: dict[str, list[tuple[Record, tuple[str, str]]]] = {}
    for folder in folders if wanted else []:
        workloads = read_workloads(folder)
        if not any(workload and workload[0] in wanted for workload in workloads):
            continue
        for record in read_records(folder, workloads):
            workload = workloads[record.workload]
            if workload and workload[0] in wanted and record.seconds < FAILED_SECONDS and record.is_for(target):
                found.setdefault(workload[0], []).append((record, workload))
    return {digest: sorted(records, key=lambda pair: pair[0].seconds) for digest, records in found.items()}


def _schedule(record: Record, workload: tuple[str, str], func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The function as the record schedules it, or None, with a warning, if it doesn't apply.

    The trace names blocks and buffers as the recorded workload does, so that one is scheduled; `func` is equal to it up
    to names and attributes.
    """
    mod = ms.database.Workload.from_json(list(workload)).mod
    if not _tvm.structural_equal(mod, normalize(func)):
        warnings.warn(f"{record.place}: the recorded workload has the same hash but is another one", stacklevel=3)
        return None
    try:
        sch = record.schedule(mod)
    except TuneError as error:
        warnings.warn(f"skipped {error}", stacklevel=3)
        return None
    return with_only_attrs(sch.mod["main"], dict(func.attrs.items()))
