"""Tuning kernels: from functions or a model to records of how fast they can be."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.errors import TuneError
from tvm_axe.machines import backend_of
from tvm_axe.meta.fleet.crew import Crew
from tvm_axe.meta.fleet.runner import FleetRunner
from tvm_axe.meta.measure.protocol import Measurer
from tvm_axe.meta.measure.runner import Runner
from tvm_axe.meta.model.model import MODEL, CostModel
from tvm_axe.meta.report.page import write_report
from tvm_axe.meta.result import TuneResult
from tvm_axe.meta.search.loop import Job
from tvm_axe.meta.search.search import Tools, logger
from tvm_axe.meta.search.workloads import workloads_of
from tvm_axe.nests import Values
from tvm_axe.records.files import needed
from tvm_axe.records.folders import target_name

__all__ = ["kernel_tools", "tune_kernels"]


def tune_kernels(
    program: tirx.PrimFunc | IRModule,
    target: Target,
    trials: int,
    patience: int | None,
    work_dir: Path,
    report: Path | None,
    seed: int | None,
    progress: bool,
    pack_weights: bool,
    values: Values | None = None,
    crew: Crew | None = None,
) -> TuneResult:
    """Search for the fastest schedule of each kernel; `tvm_axe.meta.tuner.tune` has the parameters.

    With a `crew`, its machines measure.

    Raises
    ------
    TuneError
        If `work_dir` or `report` cannot be written, there is nothing to tune, this machine has no such device as the
        target's and there is no crew, weights cannot be packed, or what a function says of them is wrong.
    """
    backend = backend_of(target)
    if crew is None and not (backend.on_host or tvm.device(backend.device).exist):
        raise TuneError(
            f"target: candidates for {backend.name} are measured, and this machine has no {backend.device} device; "
            "tune on one that has, or have such machines measure (fleet= and key=)"
        )
    workloads, left_out = workloads_of(program, target, pack_weights, values)
    if not workloads:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items()) or "the module is empty"
        raise TuneError(f"program: no function can be tuned ({reasons})")
    seed = secrets.randbelow(2**31 - 1) if seed is None else seed
    start = time.monotonic()
    page = work_dir / target_name(target) / "report.html" if report is None else report
    with kernel_tools(target, work_dir, seed, crew) as tools:
        job = Job(workloads, tools, target, work_dir, trials, seed=seed, patience=patience)
        try:
            job.run(progress)
        finally:  # what was found before an error or Ctrl-C is on disk, so the page can tell of it
            tasks = tuple(task.result() for task in job.tasks)
            seconds = {**job.seconds, "total": time.monotonic() - start}
            machines = () if crew is None else tuple(crew.machines.values())
            write_report(page, target, tasks, left_out, seconds, machines)
    return TuneResult(target, tasks, left_out, seconds, page, machines=machines)


@contextlib.contextmanager
def kernel_tools(target: Target, work_dir: str | Path, seed: int = 0, crew: Crew | None = None) -> Iterator[Tools]:
    """What tunes kernels for a resolved target, measured here or by a crew.

    Logs are sent to files below `work_dir`. The cost model knows what earlier jobs taught it there, and is kept if it
    has learnt more.
    """
    folder = Path(work_dir) / target_name(target)
    with _quiet(folder):
        model = CostModel(target, seed)
        model.restore(folder / MODEL)
        known = _known(model)
        with contextlib.ExitStack() as stack:
            runner: Measurer
            if crew is not None:
                runner = FleetRunner(crew)
            else:
                runner = stack.enter_context(Runner(target, folder / "logs" / "worker.log", backend_of(target).timeout))
            try:
                yield Tools(runner, model)
            finally:
                if _known(model) > known:
                    model.store(folder / MODEL)


def _known(model: CostModel) -> int:
    return sum(len(samples.rows) for samples in model.samples.values())


@contextlib.contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """Send MetaSchedule's log, which is long, to a file."""
    with needed(folder):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / "logs" / "tuning.log")
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
