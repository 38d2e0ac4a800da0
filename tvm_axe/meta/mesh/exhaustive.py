"""axe.search: enumerate a program's schedules, leave out what the link model rules out, measure the rest."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tvm import tirx
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import TuneError
from tvm_axe.layout import Link, Mesh
from tvm_axe.lower import Lowered
from tvm_axe.lower.cost import estimate
from tvm_axe.meta.mesh.bench import ProgramBench, random_inputs
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.devices import Devices
from tvm_axe.meta.mesh.finals import chosen, median_seconds, run_finals, with_best
from tvm_axe.meta.mesh.job import base_of, check_keep, in_order, name_of, outcomes
from tvm_axe.meta.mesh.kernels import KernelTuner
from tvm_axe.meta.mesh.model import ProgramModel
from tvm_axe.meta.mesh.moves import Candidate, schedules
from tvm_axe.meta.mesh.runner import LocalRunner
from tvm_axe.meta.mesh.seeds import seed_schedule
from tvm_axe.meta.mesh.space import program_target, program_workload
from tvm_axe.meta.mesh.strategy import Exhaustive
from tvm_axe.meta.report.page import write_report
from tvm_axe.meta.result import Found, TuneResult
from tvm_axe.meta.search.job import kernel_tools
from tvm_axe.meta.search.loop import Job
from tvm_axe.meta.search.search import Tools
from tvm_axe.meta.task import Workload
from tvm_axe.records.database import FAILED_SECONDS, Database
from tvm_axe.schedule import Schedule

__all__ = ["search"]

_FOLDER = "schedules"  # of the work_dir: the records of all programs' schedules


def search(
    program: tirx.PrimFunc | Schedule,
    mesh: Mesh | Mapping[str, int] | None = None,
    target: str | dict[str, Any] | Target = "llvm",
    *,
    keep: Collection[str] = (),
    inputs: Sequence[np.ndarray] | None = None,
    engine: str | None = None,
    options: Mapping[str, Any] | None = None,
    measure: int = 12,
    slack: float = 1.5,
    chunks: Sequence[int] = (2, 4),
    link: Link | None = None,
    trials: int = 0,
    work_dir: str | Path = WORK_DIR,
    repeat: int = 10,
    progress: bool = True,
) -> TuneResult:
    """Find the fastest way for a program to compute and communicate.

    Every schedule that the primitives' rules allow is enumerated; those that the link model expects to take longer than
    `slack` times the best are left out; the rest are run, their results judged as `tvm_axe.check` judges them, and
    timed, the fastest few of them in turns (`tvm_axe.meta.mesh.finals`). Everything measured goes into a MetaSchedule
    database, and is not measured again; what failed is tried again by the next call. This is the job of
    `tvm_axe.meta.mesh.tune_program` by another strategy (`tvm_axe.meta.mesh.strategy.Exhaustive`), in this process.

    Parameters
    ----------
    program : PrimFunc or Schedule
        A function over whole tensors; or a schedule that shares it over the mesh, where more than one way to do that is
        possible (see `seed_schedule` for what is done with a function).
    mesh : Mesh, optional
        The devices; taken from the schedule where one is given.
    target : str, dict or Target
        What to compile each device's kernels for.
    keep : collection of str
        Output parameters that may stay sharded, as an optimizer's state does.
    inputs : sequence of numpy.ndarray, optional
        Whole arrays to run on; random ones if left out.
    engine : str, optional
        What the devices are: see `launch`. The first engine that runs the target's code, if left out.
    options : mapping, optional
        What `launch` takes beside, such as ``{"gpus": (0, 1)}``.
    measure : int
        How many schedules to run at most.
    slack : float
        At least 1.
    chunks : sequence of int
        Into how many chunks overlapping stages may cut a device's slice.
    link : Link, optional
        The link model's latency and bandwidth; as the engine says if left out.
    trials : int
        Tune each schedule's local kernels with so many candidates first; 0 takes what `work_dir` has.
    work_dir : path
        Tuning records of local kernels, and, in its folder ``schedules``, of what this search measures, with a log of
        trials and a report beside them.
    repeat : int
        Timed runs of each schedule.
    progress : bool
        Whether to show a bar.

    Raises
    ------
    TuneError
        If a number is out of range, `keep` names what is no output, the engine's devices don't run the target's code,
        or no schedule of the program could be run.
    LowerError
        If no mesh is given, or the program itself can't be lowered.
    ScheduleError
        If a function has nothing to share, or nothing that can be.
    """
    for name, number, least in (
        ("measure", measure, 1),
        ("slack", slack, 1),
        ("trials", trials, 0),
        ("repeat", repeat, 1),
    ):
        if number < least:
            raise TuneError(f"{name}: must be at least {least}, not {number}")
    start, work_dir = time.monotonic(), Path(work_dir)
    seed = base_of("search", program, mesh, seed_schedule)
    check_keep(seed, keep)
    resolved = program_target(seed.mesh, target)
    devices = Devices.of(resolved, engine, options)
    rates = devices.rates if link is None else devices.rates._replace(link=link)
    known = Candidates(seed.mesh, devices)
    known.lowered(seed.mod)  # an error in the program itself is the caller's
    enumerated = (known.with_lowered(candidate) for candidate in schedules(seed, keep, chunks))
    costs = [(estimate(_lowered(c), rates), c) for c in enumerated if c is not None]
    costs.sort(key=lambda pair: pair[0])
    limit = slack * costs[0][0]
    worth = [candidate for cost, candidate in costs if cost <= limit][:measure]
    traces = {str(candidate.sch.trace) for candidate in worth}
    (func,) = seed.origin.functions.values()
    workload = Workload(name_of(seed), program_workload(func, seed.mesh), folder=work_dir / _FOLDER, exact=True)
    arrays = _arrays(inputs, func, known.lowered(seed.mod))
    bench = ProgramBench(seed.mesh, devices, resolved, work_dir, func, arrays, repeat)
    before = [record for record in _records(workload, resolved) if median_seconds(record) < FAILED_SECONDS]
    timed, done = {str(record.trace) for record in before}, sum(bool(record.trace.insts) for record in before)
    todo = [candidate.sch for candidate in worth if str(candidate.sch.trace) not in timed]
    space = ms.space_generator.ScheduleFn(lambda _: todo, sch_rules=[], postprocs=[], mutator_probs={})
    with _kernels(known, trials, resolved, work_dir) as kernels, contextlib.closing(bench):
        runner = LocalRunner(bench, known, kernels)
        tools = Tools(runner, ProgramModel(known, rates), lambda *_: space, Exhaustive, opening=0)
        job = Job([workload], tools, resolved, work_dir, done + len(todo), seed=0)
        (result,) = job.run(progress)
        if todo:
            run_finals(runner, Database(result.folder), workload.mod, resolved, traces)
    records = [record for record in _records(workload, resolved) if str(record.trace) in traces]
    best = chosen(records, known)
    told = list(_found(costs, outcomes(records, result.folder)))
    if best is None:
        raise TuneError(f"search: no schedule could be run; the first: {told[0].notation}: {told[0].why_not}")
    found = in_order(told, best)
    tuned = {} if kernels is None else kernels.results
    spent = 0.0 if kernels is None else sum(kernels.seconds.values())
    seconds = {**job.seconds, "kernels": spent, "total": time.monotonic() - start}
    result = with_best(result, found[0].median_ms)
    page = result.folder / "report.html"
    write_report(page, resolved, (result,), {}, seconds)
    return TuneResult(resolved, (result, *tuned.values()), {}, seconds, page, found)


def _found(costs: Sequence[tuple[float, Candidate]], became: Mapping[str, tuple[float | None, str]]) -> Iterator[Found]:
    """What is told of all candidates, of which some were to be measured."""
    for cost, candidate in costs:
        seconds, why = became.get(
            str(candidate.sch.trace), (None, f"the model expects {cost / costs[0][0]:.1f} times the best")
        )
        yield Found.of(candidate.sch, candidate.steps, _lowered(candidate), cost, seconds, why)


def _records(workload: Workload, target: Target) -> list[ms.database.TuningRecord]:
    """A program's records that name its blocks as it does."""
    assert workload.folder is not None
    database, own = Database(workload.folder), ms.database.Workload(workload.mod)
    for moved in database.repaired:
        warnings.warn(moved, stacklevel=3)
    return [record for record in database.records(own, target) if record.workload.same_as(own)]


def _lowered(candidate: Candidate) -> Lowered:
    assert candidate.lowered is not None
    return candidate.lowered


def _arrays(inputs: Sequence[np.ndarray] | None, func: tirx.PrimFunc, lowered: Lowered) -> dict[str, np.ndarray]:
    """What the program is run on, by name."""
    if inputs is None:
        return random_inputs(func, lowered)
    names = [buffer.name for buffer in lowered.inputs]
    if len(inputs) != len(names):
        raise TuneError(f"inputs: the program takes {', '.join(names)}, {len(names)} arrays, not {len(inputs)}")
    return dict(zip(names, inputs))


@contextlib.contextmanager
def _kernels(candidates: Candidates, trials: int, target: Target, work_dir: Path) -> Iterator[KernelTuner | None]:
    """What tunes local kernels with so many candidates each; None where they are taken as recorded."""
    if trials == 0:
        yield None
        return
    with kernel_tools(target, work_dir / "kernels") as tools:
        yield KernelTuner(candidates, tools, target, work_dir / "kernels", trials, seed=0)
