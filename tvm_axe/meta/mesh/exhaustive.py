"""axe.search: enumerate a program's schedules, leave out what the link model rules out, measure the rest."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tvm import s_tir, tirx
from tvm.target import Target

from tvm_axe.collective import Workers, launch
from tvm_axe.compiler import compile
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import AxeError, LowerError, TuneError
from tvm_axe.executable import Executable
from tvm_axe.layout import Link, Mesh
from tvm_axe.lower import Lowered, lower
from tvm_axe.lower.cost import SHARED_MEMORY, estimate
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.meta import tune
from tvm_axe.meta.measure.check import difference, summing_slack
from tvm_axe.meta.mesh.database import Database
from tvm_axe.meta.mesh.moves import Candidate, schedules
from tvm_axe.meta.mesh.seeds import seed_schedule
from tvm_axe.meta.mesh.worker import random_inputs
from tvm_axe.progress import counted
from tvm_axe.schedule import Schedule

__all__ = ["Found", "SearchResult", "search"]

_FINALISTS, _TURNS = 4, 3


@dataclass(frozen=True)
class Found:
    """One schedule of a program.

    Attributes
    ----------
    notation : str
        As CoCoNet writes it.
    steps : tuple[str, ...]
        The primitives that make it of the program, in words.
    sch : Schedule
        The schedule; ``sch.trace`` replays on a stock schedule of the function.
    bytes : int or float
        What a device moves to or from its peers.
    estimate_ms : float
        What the link model expects, arithmetic left out.
    median_ms : float or None
        Measured; None if it wasn't.
    why_not : str
        Why it wasn't measured, or what went wrong; empty if all is well.
    """

    notation: str
    steps: tuple[str, ...]
    sch: Schedule
    bytes: int | float
    estimate_ms: float
    median_ms: float | None
    why_not: str


@dataclass(frozen=True)
class SearchResult:
    """What a search found; `schedules` are all that are valid, the fastest first, then the unmeasured."""

    schedules: tuple[Found, ...]

    @property
    def best(self) -> Found:
        """The fastest schedule."""
        return self.schedules[0]

    @property
    def trace(self) -> s_tir.schedule.Trace:
        """The fastest schedule's trace."""
        return self.best.sch.trace

    def table(self) -> str:
        """The schedules, one a line."""
        lines = [f"{'schedule':<44} {'bytes':>13} {'model ms':>9} {'median ms':>10}"]
        for found in self.schedules:
            median = found.why_not if found.median_ms is None else f"{found.median_ms:10.3f}"
            lines.append(f"{found.notation:<44} {found.bytes:>13,} {found.estimate_ms:>9.3f} {median}")
        return "\n".join(lines)


def search(
    program: tirx.PrimFunc | Schedule,
    mesh: Mesh | None = None,
    target: str | dict[str, Any] | Target = "llvm",
    *,
    keep: Collection[str] = (),
    inputs: Sequence[np.ndarray] | None = None,
    engine: str = "processes",
    measure: int = 12,
    slack: float = 1.5,
    chunks: Sequence[int] = (2, 4),
    link: Link = SHARED_MEMORY,
    trials: int = 0,
    work_dir: str | Path = WORK_DIR,
    repeat: int = 10,
    progress: bool = True,
) -> SearchResult:
    """Find the fastest way for a program to compute and communicate.

    Every schedule that the primitives' rules allow is enumerated; those that the link model expects to take longer than
    `slack` times the best are left out; the rest are run, their results compared with the first one's, and timed, the
    fastest few of them in turns. Everything measured goes into a MetaSchedule database, and is not measured again.

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
    engine : str
        What the devices are: see `launch`.
    measure : int
        How many schedules to run at most.
    slack : float
        At least 1.
    chunks : sequence of int
        Into how many chunks overlapping stages may cut a device's slice.
    link : Link
        The link model's latency and bandwidth.
    trials : int
        Tune each schedule's local kernels with so many candidates first; 0 takes what `work_dir` has.
    work_dir : path
        Tuning records of local kernels, and, in its folder ``schedules``, of what this search measures.
    repeat : int
        Timed runs of each schedule.
    progress : bool
        Whether to show a bar.

    Raises
    ------
    TuneError
        If a number is out of range, or no schedule of the program could be run.
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
    seed = _seed(program, mesh)
    resolved = resolve_target(target, threads=cores_per_device(seed.mesh))
    lower(seed.mod["main"], seed.mesh)  # an error in the program itself is the caller's
    candidates = [(c, lowered) for c in schedules(seed, keep, chunks) if (lowered := _lowered(c)) is not None]
    costs = [estimate(lowered, link) for _, lowered in candidates]
    order = sorted(range(len(candidates)), key=costs.__getitem__)
    chosen = [n for n in order if costs[n] <= slack * costs[order[0]]][:measure]
    database = Database(Path(work_dir) / "schedules", seed, resolved)
    timed = {n: database.seconds(candidates[n][0].sch) for n in chosen}
    arrays = list(random_inputs(candidates[0][1]).values()) if inputs is None else list(inputs)
    job = _Job(seed.mesh, engine, resolved, trials, Path(work_dir), repeat, progress)
    failures: dict[int, str] = {}
    for n, outcome in job.run({n: candidates[n][0].sch for n in chosen if timed[n] is None}, arrays).items():
        if isinstance(outcome, str):
            failures[n] = outcome
        else:
            timed[n] = statistics.median(outcome)
            database.commit(candidates[n][0].sch, outcome)
    found = []
    for n in order:
        candidate, lowered = candidates[n]
        seconds = timed.get(n)
        why = failures.get(
            n, "" if n in timed else f"the model expects {costs[n] / costs[order[0]]:.1f} times the best"
        )
        if not why and seconds is None:
            why = "not measured"
        moved = sum(stage.bytes for stage in lowered.stages)
        median = None if seconds is None else seconds * 1e3
        found.append(Found(lowered.notation, candidate.steps, candidate.sch, moved, costs[n] * 1e3, median, why))
    found.sort(key=lambda f: (f.median_ms is None, f.median_ms or f.estimate_ms))
    if found[0].median_ms is None:
        raise TuneError(f"search: no schedule could be run; the first: {found[0].notation}: {found[0].why_not}")
    return SearchResult(tuple(found))


def _seed(program: tirx.PrimFunc | Schedule, mesh: Mesh | None) -> Schedule:
    if isinstance(program, Schedule):
        if mesh is not None and mesh != program.mesh:
            raise LowerError(f"search: the schedule is for the mesh {program.mesh}, not {mesh}; leave mesh out")
        return program
    if mesh is None:
        raise LowerError('search: name the mesh, for example mesh=axe.Mesh({"tp": 2})')
    return seed_schedule(program, mesh)


def _lowered(candidate: Candidate) -> Lowered | None:
    """The candidate lowered, or None where the lowering refuses it: it is no schedule then."""
    try:
        return lower(candidate.sch.mod["main"], candidate.sch.mesh)
    except LowerError:
        return None


class _Job:
    """Runs schedules on one set of workers."""

    def __init__(
        self, mesh: Mesh, engine: str, target: Target, trials: int, work_dir: Path, repeat: int, progress: bool
    ) -> None:
        self.mesh, self.engine, self.target = mesh, engine, target
        self.trials, self.work_dir, self.repeat, self.progress = trials, work_dir, repeat, progress

    def run(self, chosen: Mapping[int, Schedule], arrays: Sequence[np.ndarray]) -> dict[int, list[float] | str]:
        """The seconds of each schedule's runs, or what went wrong with it.

        Each is timed alone first; the fastest few then run in turns, so that a slow moment of the machine falls on all
        of them, and those times count.
        """
        outcomes: dict[int, list[float] | str] = {}
        compiled: dict[int, Executable] = {}
        expected: list[np.ndarray] | None = None
        workers: Workers | None = None
        try:
            for n, sch in counted(chosen.items(), "search", self.progress):
                if workers is None or workers.closed:  # a fault may have taken them along
                    workers = launch(self.mesh, engine=self.engine)
                try:
                    exe = self._compiled(sch)
                    results = exe.run(workers, *arrays)
                    outputs = list(results) if isinstance(results, tuple) else [results]
                    slack = summing_slack(sch.mod["main"])
                    wrong = "" if expected is None else _difference(outputs, expected, slack)
                    expected = expected or outputs
                    outcomes[n] = wrong or exe.time(workers, *arrays, repeat=self.repeat)
                    compiled[n] = exe
                except AxeError as error:
                    outcomes[n] = str(error).splitlines()[0]
            if workers is not None and not workers.closed:
                outcomes |= self._finals(workers, outcomes, compiled, arrays)
        finally:
            if workers is not None:
                workers.close()
        return outcomes

    def _finals(
        self,
        workers: Workers,
        outcomes: Mapping[int, list[float] | str],
        compiled: Mapping[int, Executable],
        arrays: Sequence[np.ndarray],
    ) -> dict[int, list[float]]:
        """The times of the fastest few, taken in turns."""
        medians = {n: statistics.median(times) for n, times in outcomes.items() if not isinstance(times, str)}
        finalists = sorted(medians, key=medians.__getitem__)[:_FINALISTS]
        seconds: dict[int, list[float]] = {n: [] for n in finalists}
        for _ in range(_TURNS if len(finalists) > 1 else 0):
            for n in finalists:
                seconds[n] += compiled[n].time(workers, *arrays, repeat=self.repeat, warmup=1)
        return {n: times for n, times in seconds.items() if times}

    def _compiled(self, sch: Schedule) -> Executable:
        exe = compile(sch, target=self.target, work_dir=self.work_dir)
        if self.trials:
            tune(exe.module, target=exe.target, trials=self.trials, work_dir=self.work_dir / "kernels", progress=False)
            exe = compile(sch, target=self.target, work_dir=self.work_dir)
        return exe


def _difference(outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray], slack: float) -> str:
    """What is wrong with `outputs`: more than another order of summing explains."""
    wrongs = (difference(got, want, slack) for got, want in zip(outputs, expected))
    return next((f"output {n}, beside the first schedule's, {wrong}" for n, wrong in enumerate(wrongs) if wrong), "")
