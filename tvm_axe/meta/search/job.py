"""axe.tune: from a program to records of how fast its kernels can be."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import TuneError
from tvm_axe.machines import backend_of, resolve_target
from tvm_axe.meta.measure.measurer import Worker
from tvm_axe.meta.model.model import MODEL, CostModel
from tvm_axe.meta.report.page import write_report
from tvm_axe.meta.search.loop import Job
from tvm_axe.meta.search.search import Tools, logger
from tvm_axe.meta.search.task import TaskResult
from tvm_axe.meta.search.workloads import workloads_of
from tvm_axe.records.folders import target_name

if TYPE_CHECKING:
    from tvm_axe.layout import Mesh
    from tvm_axe.meta.mesh import ProgramResult
    from tvm_axe.schedule import Schedule

__all__ = ["TuneResult", "tune"]


@dataclass(frozen=True)
class TuneResult:
    """What a call of `tune` did.

    Attributes
    ----------
    target
        The resolved target, for which the records hold.
    tasks
        One result for each function that there is to tune, in the module's order; equal functions are one.
    left_out
        Why each other function was not tuned, by name.
    seconds
        Where this call's time went: ``search``, ``build``, ``run``, and ``total``. Builds run ahead of each other, in
        parallel; the finals, with their builds, count as runs.
    report
        A page with curves, failures and the best schedules; see `tvm_axe.meta.report.page`.
    """

    target: Target
    tasks: tuple[TaskResult, ...]
    left_out: dict[str, str]
    seconds: dict[str, float]
    report: Path


@overload
def tune(
    program: tirx.PrimFunc | IRModule,
    *,
    mesh: None = None,
    target: str | dict[str, Any] | Target = "llvm",
    trials: int = 64,
    patience: int | None = None,
    work_dir: str | Path = WORK_DIR,
    report: str | Path | None = None,
    seed: int | None = None,
    progress: bool = True,
    pack_weights: bool = False,
) -> TuneResult: ...


@overload
def tune(
    program: tirx.PrimFunc | Schedule,
    *,
    mesh: Mesh | None = None,
    target: str | dict[str, Any] | Target = "llvm",
    trials: int = 64,
    patience: int | None = None,
    work_dir: str | Path = WORK_DIR,
    report: str | Path | None = None,
    seed: int | None = None,
    progress: bool = True,
    engine: str = "processes",
    keep: Collection[str] = (),
) -> ProgramResult: ...


def tune(
    program: tirx.PrimFunc | IRModule | Schedule,
    *,
    mesh: Mesh | None = None,
    target: str | dict[str, Any] | Target = "llvm",
    trials: int = 64,
    patience: int | None = None,
    work_dir: str | Path = WORK_DIR,
    report: str | Path | None = None,
    seed: int | None = None,
    progress: bool = True,
    engine: str = "processes",
    keep: Collection[str] = (),
    pack_weights: bool = False,
) -> TuneResult | ProgramResult:
    """Search for the fastest schedule of each kernel, and keep every measurement in a database.

    Candidates are built and run in processes of their own; one that crashes, hangs or computes something else than the
    untuned function is recorded as failed, with the reason. In the end the best few and the default are timed again in
    turns, and what isn't faster than the default beyond noise isn't chosen (`tvm_axe.meta.search.finals`). The call can
    be interrupted at any moment: the next one with the same `work_dir` counts what is there towards `trials`, learns
    from it, and goes on. `tvm_axe.compile` and `apply_best` find the results.

    Parameters
    ----------
    program
        A function; a module whose every schedulable function is tuned: one with blocks, whose parameters are buffers of
        constant shapes; a Relax model, whose operators become kernels first; or a program on a mesh, that is a
        schedule, or a function with `mesh`.
    mesh
        For a function on a mesh, whose schedule there is searched for too: `tvm_axe.meta.mesh.tune_program` takes over.
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
    engine, keep
        For a program on a mesh: see `tvm_axe.meta.mesh.tune_program`.
    pack_weights
        For a Relax model on a CPU: whether its weights that are parameters may be stored as the kernels like them best,
        as `tvm_axe.compile` then packs them if it is told so too. Those that are constants always may.

    Raises
    ------
    TuneError
        If `trials` or `patience` is not positive, `work_dir` or `report` cannot be written, there is nothing to tune,
        or a module is to be tuned on a mesh; if weights cannot be packed, or what a function says of them is wrong
        (`tvm_axe.records.packing`).
    """
    for name, value in (("trials", trials), ("patience", patience)):
        if value is not None and value < 1:
            raise TuneError(f"{name}: at least one candidate is needed, not {value}")
    if mesh is not None or not isinstance(program, tirx.PrimFunc | IRModule):
        from tvm_axe.meta.mesh import tune_program  # which is made of this module's parts

        if isinstance(program, IRModule):
            raise TuneError(
                "mesh: a function or a schedule is tuned on a mesh, not a module; for the kernels that a model has "
                "there, tune axe.compile(model, mesh=mesh).module"
            )
        if pack_weights:
            raise TuneError("pack_weights: it is for a Relax model on one device; leave it out")
        return tune_program(
            program,
            mesh,
            target=target,
            trials=trials,
            patience=patience,
            work_dir=work_dir,
            report=report,
            seed=seed,
            progress=progress,
            engine=engine,
            keep=keep,
        )
    resolved = resolve_target(target)
    workloads, left_out = workloads_of(program, resolved, pack_weights)
    if not workloads:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items()) or "the module is empty"
        raise TuneError(f"program: no function can be tuned ({reasons})")
    seed = secrets.randbelow(2**31 - 1) if seed is None else seed
    start = time.monotonic()
    folder = Path(work_dir) / target_name(resolved)
    page = folder / "report.html" if report is None else Path(report)
    with kernel_tools(resolved, work_dir, seed) as tools:
        job = Job(workloads, tools, resolved, work_dir, trials, seed=seed, patience=patience)
        try:
            job.run(progress)
        finally:  # what was found before an error or Ctrl-C is on disk, so the page can tell of it
            tasks = tuple(task.result() for task in job.tasks)
            seconds = {**job.seconds, "total": time.monotonic() - start}
            write_report(page, resolved, tasks, left_out, seconds)
    return TuneResult(resolved, tasks, left_out, seconds, page)


@contextlib.contextmanager
def kernel_tools(target: Target, work_dir: str | Path, seed: int = 0) -> Iterator[Tools]:
    """What tunes kernels for a resolved target.

    Logs are sent to files below `work_dir`. The cost model knows what earlier jobs taught it there, and is kept if it
    has learnt more.
    """
    folder = Path(work_dir) / target_name(target)
    with _quiet(folder):
        model = CostModel(target, seed)
        model.restore(folder / MODEL)
        known = _known(model)
        with Worker(target, folder / "logs" / "worker.log", backend_of(target).timeout) as worker:
            try:
                yield Tools(worker, model)
            finally:
                if _known(model) > known:
                    model.store(folder / MODEL)


def _known(model: CostModel) -> int:
    return sum(len(samples.rows) for samples in model.samples.values())


@contextlib.contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """Send MetaSchedule's log, which is long, to a file."""
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / "logs" / "tuning.log")
    except OSError as error:
        raise TuneError(
            f"work_dir: {folder} cannot be used: {error.strerror}; a folder to write in is needed"
        ) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
        handler.close()
