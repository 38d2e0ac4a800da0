"""Tuning a distributed program: its schedule on the mesh, and the local kernels of the schedules that are tried."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import LowerError, TuneError
from tvm_axe.layout import Mesh
from tvm_axe.lower import lower
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.meta.mesh.finals import chosen, run_finals
from tvm_axe.meta.mesh.kernels import KernelTuner
from tvm_axe.meta.mesh.measure import MeshWorker
from tvm_axe.meta.mesh.model import ProgramModel
from tvm_axe.meta.mesh.seeds import sharings
from tvm_axe.meta.mesh.space import program_space, program_workload
from tvm_axe.meta.mesh.strategy import Ranking
from tvm_axe.meta.report.page import write_report
from tvm_axe.meta.search.job import kernel_tools
from tvm_axe.meta.search.loop import Job
from tvm_axe.meta.search.search import Tools
from tvm_axe.meta.search.task import TaskResult, Workload
from tvm_axe.records.database import Database
from tvm_axe.records.folders import folder_for, target_name
from tvm_axe.schedule import Schedule

__all__ = ["ProgramResult", "best_schedule", "tune_program"]

_BATCH = 4  # schedules between two updates of the model
_TIMEOUT = 60.0  # seconds for one schedule, which every device compiles


@dataclass(frozen=True)
class ProgramResult:
    """What a call of `tune_program` did.

    Attributes
    ----------
    target
        What a device's kernels are compiled for; the records hold for it.
    schedule
        The fastest schedule; `tvm_axe.compile` takes it.
    notation
        It as CoCoNet writes it.
    tasks
        What became of the program, and then of each local kernel that was tuned.
    seconds
        Where this call's time went: ``search``, ``build`` and ``run`` of the program's schedules, ``kernels`` for
        tuning these, and ``total``.
    report
        A page on the program's schedules; see `tvm_axe.meta.report.page`.
    """

    target: Target
    schedule: Schedule
    notation: str
    tasks: tuple[TaskResult, ...]
    seconds: dict[str, float]
    report: Path


def tune_program(
    program: tirx.PrimFunc | Schedule,
    mesh: Mesh | None = None,
    *,
    target: str | dict[str, Any] | Target = "llvm",
    trials: int = 64,
    patience: int | None = None,
    work_dir: str | Path = WORK_DIR,
    report: str | Path | None = None,
    seed: int | None = None,
    progress: bool = True,
    engine: str = "processes",
    keep: Collection[str] = (),
) -> ProgramResult:
    """Search for the fastest way for a program to compute and communicate on a mesh, and keep every measurement.

    The program is one more workload in MetaSchedule's kind of database; its design spaces are what the communication
    primitives make of it, and what is measured is a run on the mesh. Before a schedule is measured, its local kernels
    are tuned as `tvm_axe.tune` tunes any function. The search ends when its model hopes of no other schedule that it
    beats the best. The fastest few then run again in turns (`tvm_axe.meta.mesh.finals`). The call can be interrupted at
    any moment; the next one goes on.

    Parameters
    ----------
    program
        A function over whole tensors; or a schedule of one, or a function so scheduled. What is shared over the mesh
        already stays so; else which loop goes on which axis is searched too (`tvm_axe.meta.mesh.seeds.sharings`).
    mesh
        The devices; taken from the schedule where one is given.
    target
        What to compile each device's kernels for: see `tvm_axe.compile`.
    trials
        Schedules to measure at most, and candidates for each of their kernels on average; those of earlier calls
        included.
    patience
        The search for the schedule ends, too, when this many in a row haven't made the best faster by 1% at least.
    work_dir
        Where databases are, of programs and kernels alike.
    report
        Where the page on the program's schedules goes; beside their records if None.
    seed
        Of the search for kernels; drawn if None. That for the program's schedule draws nothing.
    progress
        Whether to show bars.
    engine
        What the devices are: see `tvm_axe.launch`. Part of the workload, as times differ.
    keep
        Output parameters that may stay sharded, as an optimizer's state does.

    Raises
    ------
    TuneError
        If `trials` is not positive, `work_dir` cannot be used, or no schedule could be run.
    LowerError
        If no mesh is given, or the program itself can't be lowered.
    ScheduleError
        If a function has nothing to share, or nothing that can be.
    """
    if trials < 1:
        raise TuneError(f"trials: at least one candidate is needed, not {trials}")
    base = _base(program, mesh)
    mod, resolved = _workload(base, engine, keep), _resolved(base, target)
    lower(mod["main"], base.mesh)  # an error in the program itself is the caller's
    next(sharings(mod["main"], base.mesh))
    start, work_dir = time.monotonic(), Path(work_dir)
    model = ProgramModel()
    seed = secrets.randbelow(2**31 - 1) if seed is None else seed
    with kernel_tools(resolved, work_dir, seed) as tools:
        kernels = KernelTuner(tools, resolved, work_dir, trials, seed, progress)
        log = work_dir / target_name(resolved) / "logs" / "mesh.log"
        with MeshWorker(resolved, kernels, log, _TIMEOUT) as worker:
            own = Tools(worker, model, _space, lambda: Ranking(model, _BATCH), opening=0)
            job = Job([Workload(_name(base), mod)], own, resolved, work_dir, trials, seed, patience)
            (result,) = job.run(progress)
            (task,) = job.tasks
            if len(task.seconds) > len(task.earlier):
                run_finals(worker, Database(result.folder), mod, resolved)
    best = _best(base, mod, resolved, work_dir)
    if best is None:
        reasons = "; ".join(dict.fromkeys(result.failures)) or "the search found none"
        raise TuneError(f"program: no schedule of {_name(base)} could be run on {base.mesh}: {reasons}")
    seconds = {**job.seconds, "kernels": sum(kernels.seconds.values()), "total": time.monotonic() - start}
    schedule, best_seconds = best
    notation = lower(schedule.mod["main"], schedule.mesh).notation
    result = replace(result, best_ms=best_seconds * 1e3)
    page = result.folder / "report.html" if report is None else Path(report)
    write_report(page, resolved, (result,), {}, seconds)
    return ProgramResult(resolved, schedule, notation, (result, *kernels.results.values()), seconds, page)


def best_schedule(
    program: tirx.PrimFunc | Schedule,
    mesh: Mesh | None = None,
    *,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path = WORK_DIR,
    engine: str = "processes",
    keep: Collection[str] = (),
) -> Schedule | None:
    """The fastest schedule that `tune_program` recorded, applied to the program; None if there is no record.

    Parameters
    ----------
    program, mesh, target, work_dir, engine, keep
        As `tune_program` took them.

    Raises
    ------
    LowerError
        If no mesh is given.
    TuneError
        If the database cannot be read, or its record doesn't apply as the program names blocks in another way.
    """
    base = _base(program, mesh)
    found = _best(base, _workload(base, engine, keep), _resolved(base, target), Path(work_dir))
    return None if found is None else found[0]


def _best(base: Schedule, mod: IRModule, target: Target, work_dir: Path) -> tuple[Schedule, float] | None:
    """The schedule that its records make the choice, and its seconds."""
    database = Database(folder_for(work_dir, target, _name(base), mod))
    best = chosen(database.records(database.commit_workload(mod), target))
    if best is None:
        return None
    schedule = base.copy()
    try:
        best.trace.apply_to_schedule(schedule, remove_postproc=True)
    except Exception as error:  # upstream raises whatever its C++ side throws
        reason = _tvm.schedule_error_reason(error)
        raise TuneError(
            f"program: the record of {_name(base)} in {database.folder} does not apply to this function, which has "
            f"other names for its blocks, perhaps ({reason}); tune it in another work_dir"
        ) from error
    return schedule, float(best.run_secs[0])


def _space(func: tirx.PrimFunc, target: Target) -> ms.SpaceGenerator:
    return program_space(IRModule({"main": func}))


def _base(program: tirx.PrimFunc | Schedule, mesh: Mesh | None) -> Schedule:
    if isinstance(program, Schedule):
        if mesh is not None and mesh != program.mesh:
            raise LowerError(f"tune: the schedule is for the mesh {program.mesh}, not {mesh}; leave mesh out")
        return program
    if mesh is None:
        raise LowerError('tune: name the mesh, for example mesh=axe.Mesh({"tp": 2})')
    return Schedule(program, mesh=mesh)


def _workload(base: Schedule, engine: str, keep: Collection[str]) -> IRModule:
    return program_workload(base.mod["main"], base.mesh, engine, keep)


def _resolved(base: Schedule, target: str | dict[str, Any] | Target) -> Target:
    return resolve_target(target, threads=cores_per_device(base.mesh))


def _name(base: Schedule) -> str:
    (func,) = base.origin.functions.values()
    return str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "main"
