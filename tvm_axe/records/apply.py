"""Compiling with what tuning found: the best recorded schedule of each function that has one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm import ir, tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.tree import with_functions
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import TuneError
from tvm_axe.machines.cache import key
from tvm_axe.machines.target import resolve_target
from tvm_axe.records.database import (
    FAILED_SECONDS,
    RECORDS,
    WORKLOADS,
    Record,
    find_databases,
    normalize,
    read_records,
    read_workloads,
    with_only_attrs,
)
from tvm_axe.records.devices import named_as, on_first_device
from tvm_axe.records.packing import LAYOUT_FREE, split_packing
from tvm_axe.records.shipped import all_shipped, shipped_folders, stand_ins

__all__ = ["apply_best", "records_key", "records_of"]


def apply_best(
    mod: IRModule, target: str | dict[str, Any] | Target, work_dir: str | Path = WORK_DIR
) -> tuple[IRModule, dict[str, float]]:
    """Replace every function that was tuned for this target by its fastest schedule.

    A function is recognised by what it computes, not by its name or its module; it keeps its name, its attributes and
    its signature, and where it is scheduled gets ``tirx.noalias``: its buffers may not overlap then. A record whose
    trace no longer applies is passed over with a warning that names it. Of a Relax model only kernels count: see
    `tvm_axe.relax.compile_model`.

    A function that lets parameters be stored in another layout (`tvm_axe.records.packing`) says by that that their
    packing will be split off. So it takes the fastest record of itself, which may pack, and of itself without the
    attribute, which doesn't; the time of a record that packs is without the packing. A function without the attribute
    never packs ahead.

    Parameters
    ----------
    mod
        The module; it isn't changed. Functions that aren't TensorIR are passed through.
    target
        What `tune` was given, or what `resolve_target` made of it.
    work_dir
        A folder of `tune`, or one above several. One that doesn't exist has no records. What it has no record of is
        looked up in those that come with the package, for this target or a generic one of the same kind
        (`tvm_axe.records.shipped`).

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
    forms = {variable: _forms(func) for variable, func in kernels.items()}
    scheduled_as, seconds = dict[ir.GlobalVar, tirx.PrimFunc](), {}
    for (variable, own), records in zip(forms.items(), _found(list(forms.values()), resolved, Path(work_dir))):
        for record, workload in records:
            scheduled = _schedule(record, workload, own[workload[0]], kernels[variable])
            if scheduled is not None:
                scheduled_as[variable] = scheduled
                seconds[str(variable.name_hint)] = record.seconds
                break
    return with_functions(mod, scheduled_as), seconds


def records_of(
    functions: Sequence[tirx.PrimFunc], target: Target, work_dir: str | Path
) -> list[list[tuple[Record, IRModule]]]:
    """The records that serve each function, the fastest first, each with the workload by whose names its trace goes.

    Parameters
    ----------
    functions
        Functions of known extents.
    target, work_dir
        As `apply_best` takes them; the target is resolved.
    """
    forms = [_forms(func) for func in functions]
    return [
        [(record, ms.database.Workload.from_json(list(workload)).mod) for record, workload in records]
        for records in _found(forms, target, Path(work_dir))
    ]


def _found(
    forms: Sequence[Mapping[str, IRModule]], target: Target, work_dir: Path
) -> list[list[tuple[Record, tuple[str, str]]]]:
    """The records that serve each function, the fastest first: the user's, or what ships with the package."""
    found = _records(find_databases(work_dir), target, {digest for own in forms for digest in own})
    for other in stand_ins(target):
        missing = {digest for own in forms if not found.keys() & own for digest in own}
        found |= _records([folder for digest in missing for folder in shipped_folders(other, digest)], other, missing)
    return [
        sorted((pair for digest in own for pair in found.get(digest, [])), key=lambda pair: pair[0].seconds)
        for own in forms
    ]


def records_key(target: Target, work_dir: Path) -> str:
    """What records say that `apply_best` may find for a resolved target, as a hash: of all there are, found or not.

    Raises
    ------
    TuneError
        As `tvm_axe.records.database.find_databases`.
    """
    shipped = [folder for other in stand_ins(target) for folder in all_shipped(other)]
    files = [folder / name for folder in (*find_databases(work_dir), *shipped) for name in (WORKLOADS, RECORDS)]
    return key(*(file.read_bytes() for file in files if file.is_file()))


def _forms(func: tirx.PrimFunc) -> dict[str, IRModule]:
    """The workloads whose records serve a function, by hash: itself, and itself with all its weights as they are.

    Of a kernel that asks which device it runs on, it is the first one's.
    """
    func = on_first_device(func)
    mods = [normalize(func), normalize(func.without_attr(LAYOUT_FREE))]
    return {_tvm.workload_hash(mod): mod for mod in mods}


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


def _schedule(record: Record, workload: tuple[str, str], wanted: IRModule, func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The function as the record schedules it, or None, with a warning, if it doesn't apply.

    The trace names blocks and buffers as the recorded workload does, so that one is scheduled; `wanted` is equal to it
    up to names, and so is `func`, up to attributes too.
    """
    mod = ms.database.Workload.from_json(list(workload)).mod
    if not _tvm.structural_equal(mod, wanted):
        warnings.warn(f"{record.place}: the recorded workload has the same hash but is another one", stacklevel=3)
        return None
    first = on_first_device(func)
    scheduled = mod if first is func else _of_any_device(func, mod)
    if scheduled is None:
        return None
    try:
        sch = record.schedule(scheduled)
    except TuneError as error:
        warnings.warn(f"skipped {error}", stacklevel=3)
        return None
    try:
        split_packing(sch.mod["main"])  # its time is that of a function whose packing is split off
    except TuneError as error:
        warnings.warn(f"{record.place}: skipped a record that packs its weights for nobody: {error}", stacklevel=3)
        return None
    # A schedule takes for granted that buffers don't overlap, and was measured as code that does. Unless LLVM is told,
    # a product can take three times as long.
    attrs = {**dict(func.attrs.items()), **({"tirx.noalias": True} if record.trace[0] else {})}
    return with_only_attrs(sch.mod["main"], attrs)


def _of_any_device(func: tirx.PrimFunc, recorded: IRModule) -> IRModule | None:
    """A kernel that asks which device it runs on, with the names that the trace of what was recorded of it knows."""
    named = named_as(func, recorded["main"])
    return None if named is None else normalize(named)
