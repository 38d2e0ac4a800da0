"""Tuning a distributed program: its schedule on the mesh, and the local kernels of the schedules that are tried."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.directions import directions
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import LowerError, TuneError
from tvm_axe.layout import Mesh
from tvm_axe.lower.cost import estimate
from tvm_axe.meta.fleet.crew import Crew, crew_for
from tvm_axe.meta.fleet.fleet import Fleet
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.devices import Devices
from tvm_axe.meta.mesh.finals import applied, chosen, latest, median_seconds, run_finals, with_best
from tvm_axe.meta.mesh.kernels import KernelTuner
from tvm_axe.meta.mesh.model import ProgramModel
from tvm_axe.meta.mesh.on_fleet import FleetMeshRunner
from tvm_axe.meta.mesh.runner import MeshRunner
from tvm_axe.meta.mesh.seeds import bound_axes, sharings
from tvm_axe.meta.mesh.space import program_space, program_target, program_workload
from tvm_axe.meta.mesh.strategy import Ranking
from tvm_axe.meta.report.page import write_report
from tvm_axe.meta.result import Found, TuneResult
from tvm_axe.meta.search.job import kernel_tools
from tvm_axe.meta.search.loop import Job
from tvm_axe.meta.search.search import Tools
from tvm_axe.meta.task import Workload
from tvm_axe.records.database import FAILED_SECONDS, Database
from tvm_axe.records.folders import folder_for, target_name
from tvm_axe.records.trials import key_of, read_trials
from tvm_axe.relax.fuse import is_model
from tvm_axe.schedule import Schedule

__all__ = ["base_of", "best_schedule", "in_order", "name_of", "outcomes", "tune_program"]

_BATCH = 4  # schedules between two updates of the model
_TIMEOUT = 60.0  # seconds for one schedule, which every device compiles


def tune_program(
    program: tirx.PrimFunc | Schedule,
    mesh: Mesh | Mapping[str, int] | None = None,
    *,
    target: str | dict[str, Any] | Target = "llvm",
    trials: int = 64,
    patience: int | None = None,
    work_dir: str | Path = WORK_DIR,
    report: str | Path | None = None,
    seed: int | None = None,
    progress: bool = True,
    engine: str | None = None,
    options: Mapping[str, Any] | None = None,
    keep: Collection[str] = (),
    fleet: Fleet | None = None,
) -> TuneResult:
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
        What the devices are: see `tvm_axe.launch`; the first engine that runs the target's code if None. Part of the
        workload, as times differ.
    options
        What `tvm_axe.launch` takes beside, such as ``{"gpus": (0, 1)}``; part of the workload too.
    keep
        Output parameters that may stay sharded, as an optimizer's state does.
    fleet
        Machines that measure instead of this one, each of which has all of the mesh's devices.

    Raises
    ------
    TuneError
        If `trials` is not positive, `work_dir` cannot be used, `keep` names what is no output, the engine's devices
        don't run the target's code, or no schedule could be run.
    LowerError
        If no mesh is given, or the program itself can't be lowered.
    ScheduleError
        If a function has nothing to share, or nothing that can be.
    """
    if trials < 1:
        raise TuneError(f"trials: at least one candidate is needed, not {trials}")
    base = base_of("tune", program, mesh, lambda func, mesh: Schedule(func, mesh=mesh))
    with crew_for(fleet, target, Path(work_dir), progress, base.mesh.size) as crew:
        return _tune(
            base, crew, target, trials, patience, Path(work_dir), report, seed, progress, engine, options, keep
        )


def _tune(
    base: Schedule,
    crew: Crew | None,
    target: str | dict[str, Any] | Target,
    trials: int,
    patience: int | None,
    work_dir: Path,
    report: str | Path | None,
    seed: int | None,
    progress: bool,
    engine: str | None,
    options: Mapping[str, Any] | None,
    keep: Collection[str],
) -> TuneResult:
    """Tune a program, measured here or by a crew; `tune_program` has the parameters."""
    resolved = program_target(base.mesh, target) if crew is None else crew.target
    devices = Devices.of(resolved, engine, options)
    check_keep(base, keep)
    mod = program_workload(base.mod["main"], base.mesh, devices, keep)
    candidates = Candidates(None, devices)
    candidates.lowered(mod)  # an error in the program itself is the caller's
    next(sharings(mod["main"], base.mesh))
    start = time.monotonic()
    model = ProgramModel(candidates)
    seed = secrets.randbelow(2**31 - 1) if seed is None else seed
    with kernel_tools(resolved, work_dir, seed, crew) as tools:
        kernels = KernelTuner(candidates, tools, resolved, work_dir, trials, seed, progress)
        log = work_dir / target_name(resolved) / "logs" / "mesh.log"
        (origin,) = base.origin.functions.values()
        runner = (
            MeshRunner(resolved, kernels, log, _TIMEOUT, origin)
            if crew is None
            else FleetMeshRunner(crew, kernels, origin)
        )
        with runner:
            own = Tools(
                runner,
                model,
                lambda func, _: program_space(IRModule({"main": func}), candidates),
                lambda: Ranking(model, _BATCH),
                opening=0,
            )
            job = Job([Workload(name_of(base), mod)], own, resolved, work_dir, trials, seed, patience)
            (result,) = job.run(progress)
            (task,) = job.tasks
            if len(task.seconds) > len(task.earlier):
                finals = runner.on_one_machine() if isinstance(runner, FleetMeshRunner) else runner
                run_finals(finals, Database(result.folder), mod, resolved)
    records = _records(base, mod, resolved, work_dir)
    best = chosen(records, candidates)
    if best is None:
        reasons = "; ".join(dict.fromkeys(result.failures)) or "the search found none"
        raise TuneError(f"program: no schedule of {name_of(base)} could be run on {base.mesh}: {reasons}")
    seconds = {**job.seconds, "kernels": sum(kernels.seconds.values()), "total": time.monotonic() - start}
    schedules = in_order(_measured(base, records, result.folder, candidates), best)
    result = with_best(result, schedules[0].median_ms)
    page = result.folder / "report.html" if report is None else Path(report)
    machines = () if crew is None else tuple(crew.machines.values())
    write_report(page, resolved, (result,), {}, seconds, machines)
    return TuneResult(resolved, (result, *kernels.results.values()), {}, seconds, page, schedules, machines)


def best_schedule(
    program: tirx.PrimFunc | Schedule,
    mesh: Mesh | Mapping[str, int] | None = None,
    *,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path = WORK_DIR,
    engine: str | None = None,
    options: Mapping[str, Any] | None = None,
    keep: Collection[str] = (),
) -> Schedule | None:
    """The fastest schedule that `tune_program` recorded, applied to the program; None if there is no record.

    Parameters
    ----------
    program, mesh, target, work_dir, engine, options, keep
        As `tune_program` took them.

    Raises
    ------
    LowerError
        If no mesh is given.
    TuneError
        If the database cannot be read, or its record doesn't apply as the program names blocks in another way.
    """
    base = base_of("tune", program, mesh, lambda func, mesh: Schedule(func, mesh=mesh))
    resolved = program_target(base.mesh, target)
    devices = Devices.of(resolved, engine, options)
    mod = program_workload(base.mod["main"], base.mesh, devices, keep)
    best = chosen(_records(base, mod, resolved, Path(work_dir)), Candidates(None, devices))
    return None if best is None else _applied_to(base, best, folder_for(work_dir, resolved, name_of(base), mod))


def base_of(
    primitive: str,
    program: tirx.PrimFunc | Schedule,
    mesh: Mesh | Mapping[str, int] | None,
    schedule: Callable[[tirx.PrimFunc, Mesh], Schedule],
) -> Schedule:
    """The schedule that a search of a program starts from: the one given, or what `schedule` makes of a function.

    Raises
    ------
    LowerError
        If no mesh is given, or another one than the schedule's.
    TuneError
        If it is a Relax model, or no program at all.
    """
    if isinstance(program, IRModule) and is_model(program):
        raise TuneError(
            f"{primitive}: the schedules of a function are searched, and a Relax model has many functions: "
            "axe.compile(model, mesh=mesh) chooses by cost how they are shared (exe.show() says how, pins= and memory= "
            "decide otherwise), and axe.tune(exe.module) tunes the kernels of a device"
        )
    mesh = None if mesh is None else Mesh.of(mesh)
    if isinstance(program, Schedule):
        if mesh is not None and mesh != program.mesh:
            raise LowerError(f"{primitive}: the schedule is for the mesh {program.mesh}, not {mesh}; leave mesh out")
        return program
    if not isinstance(program, tirx.PrimFunc | IRModule):
        given = f"{program!r}, a {type(program).__name__}"
        raise TuneError(f"{primitive}: {given}, is no program; valid are a function of TensorIR and a schedule")
    if mesh is None:
        raise LowerError(f'{primitive}: name the mesh, for example mesh=axe.Mesh({{"tp": 2}})')
    return schedule(program, mesh)


def check_keep(base: Schedule, keep: Collection[str]) -> None:
    """Refuse names of outputs that may stay sharded where the program has no such output.

    Raises
    ------
    TuneError
        If there is such a name.
    """
    if isinstance(keep, str):
        raise TuneError(f"keep: a collection of names, such as {[keep]!r}, not {keep!r}")
    (func,) = base.origin.functions.values()
    outputs = [str(param.name) for param, is_one in zip(func.params, directions(func)) if is_one.is_output]
    unknown = [name for name in keep if name not in outputs]
    if unknown:
        raise TuneError(f"keep: the program has no output {', '.join(unknown)}; its outputs are {', '.join(outputs)}")


def name_of(base: Schedule) -> str:
    """What a program is called."""
    (func,) = base.origin.functions.values()
    return str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "main"


def outcomes(records: Sequence[ms.database.TuningRecord], folder: Path) -> dict[str, tuple[float | None, str]]:
    """What became of each schedule in the end, by its trace's text: its median seconds, or None and why it has none.

    Parameters
    ----------
    records
        In the order of their commits.
    folder
        Of their database, with its log of trials.
    """
    failures = {trial.record: trial.failure for trial in read_trials(folder)}
    found: dict[str, tuple[float | None, str]] = {}
    for record in latest(records):
        seconds = median_seconds(record)
        failed = seconds >= FAILED_SECONDS
        why = (failures.get(key_of(_tvm.record_json(record))) or "it failed") if failed else ""
        found[str(record.trace)] = None if failed else seconds, why
    return found


def in_order(found: Iterable[Found], best: ms.database.TuningRecord) -> tuple[Found, ...]:
    """Schedules as a result has them: the best, then by their time, then those that have none by the link model.

    What is faster than the best is so within noise alone, and gets its time.
    """
    least, trace = 1e3 * median_seconds(best), str(best.trace)
    told = [f if f.median_ms is None else replace(f, median_ms=max(f.median_ms, least)) for f in found]
    return tuple(
        sorted(told, key=lambda f: (f.median_ms is None, f.median_ms or f.estimate_ms, str(f.sch.trace) != trace))
    )


def _measured(
    base: Schedule, records: Sequence[ms.database.TuningRecord], folder: Path, candidates: Candidates
) -> Iterator[Found]:
    """The schedules that have a record."""
    became = outcomes(records, folder)
    for record in latest(records):
        mod = applied(record)
        lowered = candidates.lowered_or_none(mod)
        if lowered is None or (not record.trace.insts and not bound_axes(mod["main"])):
            continue  # the program as it is shares nothing
        seconds, why = became[str(record.trace)]
        sch = _applied_to(base, record, folder)
        yield Found.of(sch, candidates.steps(mod), lowered, estimate(lowered, candidates.devices.rates), seconds, why)


def _records(base: Schedule, mod: IRModule, target: Target, work_dir: Path) -> list[ms.database.TuningRecord]:
    database = Database(folder_for(work_dir, target, name_of(base), mod))
    return database.records(database.commit_workload(mod), target)


def _applied_to(base: Schedule, record: ms.database.TuningRecord, folder: Path) -> Schedule:
    """A recorded schedule of the program as the caller names its blocks."""
    schedule = base.copy()
    try:
        record.trace.apply_to_schedule(schedule, remove_postproc=True)
    except _tvm.UPSTREAM_ERRORS as error:
        reason = _tvm.why_refused(error)
        raise TuneError(
            f"program: the record of {name_of(base)} in {folder} does not apply to this function, which has "
            f"other names for its blocks, perhaps ({reason}); tune it in another work_dir"
        ) from error
    return schedule
