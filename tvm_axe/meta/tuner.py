"""axe.tune: from a program to records of how fast it can be."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import TuneError
from tvm_axe.layout import Mesh
from tvm_axe.machines.target import resolve_target
from tvm_axe.meta.fleet.crew import crew_for
from tvm_axe.meta.fleet.fleet import Fleet, fleet_of
from tvm_axe.meta.mesh.job import tune_program
from tvm_axe.meta.result import TuneResult
from tvm_axe.meta.search.job import tune_kernels
from tvm_axe.nests import Values
from tvm_axe.schedule import Schedule

__all__ = ["tune"]


def tune(
    program: tirx.PrimFunc | IRModule | Schedule,
    *,
    mesh: Mesh | Mapping[str, int] | None = None,
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
    pack_weights: bool = False,
    values: Values | None = None,
    fleet: str | Fleet | None = None,
    key: str | None = None,
    workers: int | None = None,
) -> TuneResult:
    """Search for the fastest schedules, and keep every measurement in a database.

    Candidates are built and run in processes of their own; one that crashes, hangs or computes something else than the
    untuned function is recorded as failed, with the reason. In the end the best few and the default are timed again in
    turns, and what isn't faster than the default beyond noise isn't chosen (`tvm_axe.meta.search.finals`). The call can
    be interrupted at any moment: the next one with the same `work_dir` counts what is there towards `trials`, learns
    from it, and goes on. `tvm_axe.compile` and `apply_best` find the results.

    Parameters
    ----------
    program
        A function; a tile program, whose knobs are tuned (`tvm_axe.tile.knobs`) and which `tvm_axe.tile.compile` then
        finds; a module whose every schedulable function is tuned: one with blocks, whose parameters are buffers; a
        Relax model, whose operators become kernels first; or a program on a mesh, that is a schedule, or a function
        with `mesh`.
    mesh
        For a function on a mesh, whose schedule there is searched for too: `tvm_axe.meta.mesh.tune_program` says how.
    target
        See `resolve_target`. Records hold for the resolved target only.
    trials
        Number of candidates for each function on average, those of earlier calls included. They go to the functions
        from which the time of the whole gains most: the sum over the functions by how often each is called.
    patience
        A function is done when this many candidates in a row have not made its best faster by 1% at least; its trials
        go to the others, and when all are done the job ends. None: never before `trials`.
    work_dir
        Databases are in ``<work_dir>/<target>/<function>/``, the cost model, which the next job on this target starts
        from, beside them. Several jobs may share it.
    report
        Where the page on this call goes; ``<work_dir>/<target>/report.html`` if None.
    seed
        Seed of the search and the model; drawn if None, and recorded. For the same seed, and the same records and model
        to start from, the candidates of the first round are the same, and those of each later one if the times so far
        were: the model learns from times, which differ a little whenever they are measured.
    progress
        Whether to show a bar: trials a minute, the best, its rate, failures, the model's error, time left.
    engine, options, keep
        For a program on a mesh: see `tvm_axe.meta.mesh.tune_program`.
    pack_weights
        For a Relax model on a CPU: whether its weights that are parameters may be stored as the kernels like them best,
        as `tvm_axe.compile` then packs them if it is told so too. Those that are constants always may.
    values
        Representatives of extents that aren't known until a function is called, by the names of their variables, such
        as ``{"n": (1, 16, 128)}``; 1, 16, 128 and 1024 of those that are left out. Each kernel is tuned at each of
        them, and `tvm_axe.compile`, told the same, finds what was the fastest there for the values up to it. On a GPU
        such kernels aren't tuned.
    fleet, key, workers
        The tracker whose machines measure, ``"host:port"``, what they are called there, and how many are used at most;
        or all of it as a `Fleet`. A target that says nothing of a CPU or a GPU, such as ``"llvm"``, is completed by
        the first of them, and `TuneResult.target` is what to compile for then. See the documentation, "A fleet".

    Raises
    ------
    TuneError
        If `trials` or `patience` is not positive, `work_dir` or `report` cannot be written, there is nothing to tune,
        or a module is to be tuned on a mesh; if this machine has no such device as the target's, and no other measures;
        if weights cannot be packed, or what a function says of them is wrong (`tvm_axe.records.packing`); if there is
        no tracker.
    InputError
        If `fleet`, `key` and `workers` name no machines.
    """
    machines = fleet_of(fleet, key, workers)
    for name, value in (("trials", trials), ("patience", patience)):
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise TuneError(f"{name}: at least one candidate is needed, not {value!r}")
    place, page = Path(work_dir), None if report is None else Path(report)
    if mesh is None and isinstance(program, tirx.PrimFunc | IRModule):
        with crew_for(machines, target, place, progress) as crew:
            resolved = resolve_target(target) if crew is None else crew.target
            return tune_kernels(
                program, resolved, trials, patience, place, page, seed, progress, pack_weights, values, crew
            )
    if isinstance(program, IRModule):
        raise TuneError(
            "mesh: a function or a schedule is tuned on a mesh, not a module; for the kernels that a model has "
            "there, tune axe.compile(model, mesh=mesh).module"
        )
    if pack_weights:
        raise TuneError("pack_weights: it is for a Relax model on one device; leave it out")
    if values is not None:
        raise TuneError("values: shapes of a program on a mesh are constant; leave values out, or the mesh")
    return tune_program(
        program,
        mesh,
        target=target,
        trials=trials,
        patience=patience,
        work_dir=place,
        report=page,
        seed=seed,
        progress=progress,
        engine=engine,
        options=options,
        keep=keep,
        fleet=machines,
    )
