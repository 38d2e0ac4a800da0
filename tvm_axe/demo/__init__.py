"""The demo: one MLP block on two workers under three schedules, untuned and tuned, beside numpy.

It says for each schedule how far its result is from numpy's in float64, how long it takes, and how many bytes a device
communicates; and which schedule is the fastest on this machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tvm_axe as axe
from tvm_axe import defaults
from tvm_axe.collective import Workers
from tvm_axe.demo import baseline, block
from tvm_axe.executable import Executable
from tvm_axe.meta import tune
from tvm_axe.notebook import preformatted

__all__ = ["DemoReport", "DemoRow", "run"]

WORK_DIR = Path(defaults.WORK_DIR, "demo")
TARGET = "llvm"
# Enough for the local matmul's best schedule within a minute; the other kernels' spaces are small.
TRIALS = 48
# Every candidate is timed once a round, so that a slow moment of the machine falls on all of them. A run that takes
# longer than this, as an untuned matmul does, is not repeated within a round.
ROUNDS, REPEAT, SLOW = 3, 10, 0.3


@dataclass(frozen=True)
class DemoRow:
    """One schedule, with or without tuning of its local kernels."""

    schedule: str
    tuned: bool
    relative_error: float
    """Largest absolute difference from the float64 result, over the largest absolute value of that."""
    median_ms: float
    bytes: int
    """What the busiest device of each stage receives in one run."""


@dataclass(frozen=True)
class DemoReport:
    """The demo's results; as JSON they have the same names."""

    rows: list[DemoRow]
    chosen: str
    numpy_ms: float
    numpy_all_reduce_ms: float

    def table(self) -> str:
        """Return the report for people."""
        lines = [f"{'schedule':<18} {'tuned':<5} {'relative error':>14} {'median ms':>10} {'bytes a device':>15}"]
        lines += [
            f"{row.schedule:<18} {'yes' if row.tuned else 'no':<5} {row.relative_error:>14.1e} {row.median_ms:>10.2f} "
            f"{row.bytes:>15,}"
            for row in self.rows
        ]
        best = min(row.median_ms for row in self.rows)
        for name, ms in [
            ("numpy, one process", self.numpy_ms),
            ("numpy, two processes and an all-reduce", self.numpy_all_reduce_ms),
        ]:
            lines.append(f"{name:<39} {ms:>10.2f} ms, {ms / best:.2f} times the chosen schedule's time")
        return "\n".join([*lines, f"chosen: {self.chosen}"])

    def _repr_html_(self) -> str:
        return preformatted(self.table())


def run(trials: int, work_dir: Path) -> DemoReport:
    """Compile, tune, check and time all the schedules, and time numpy.

    Parameters
    ----------
    trials : int
        Measurements for each local kernel, those already in `work_dir` counted.
    work_dir : Path
        The folder of the tuning records.
    """
    problem = baseline.Problem.random(block.TOKENS, block.INNER, block.OUTER, seed=0)
    candidates: dict[tuple[str, bool], Executable] = {}
    for name in block.SCHEDULES:
        untuned = _compile(name, None)
        _say(f"{name}: tuning the local kernels")
        tune(untuned.module, target=untuned.target, trials=trials, work_dir=work_dir, seed=0)
        candidates[name, False] = untuned
        candidates[name, True] = _compile(name, work_dir)
    with axe.launch(block.mesh) as workers, baseline.AllReduce(problem) as all_reduce:
        _say("comparing the results with numpy's in float64")
        reference = problem.reference()
        errors = {
            key: _relative_error(np.asarray(exe.run(workers, *problem)), reference) for key, exe in candidates.items()
        }
        _say("timing")
        seconds = _in_rounds(
            {
                **{key: _timer(exe, workers, problem) for key, exe in candidates.items()},
                "numpy": lambda: baseline.time_one_process(problem, REPEAT),
                "numpy_all_reduce": lambda: all_reduce.time(REPEAT),
            }
        )
    milliseconds = {key: 1e3 * statistics.median(values) for key, values in seconds.items()}
    rows = [
        DemoRow(name, tuned, errors[name, tuned], milliseconds[name, tuned], exe.bytes)
        for (name, tuned), exe in candidates.items()
    ]
    chosen = min(rows, key=lambda row: row.median_ms).schedule
    return DemoReport(rows, chosen, milliseconds["numpy"], milliseconds["numpy_all_reduce"])


def _compile(name: str, work_dir: Path | None) -> Executable:
    """Compile the block under the named schedule, its local kernels as the best records of `work_dir` have them."""
    sch = axe.Schedule(block.block, mesh=block.mesh)
    block.SCHEDULES[name](sch)
    return axe.compile(sch, target=TARGET, work_dir=work_dir)


def _relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """Return the relative error as `DemoRow` has it; NaN anywhere gives NaN."""
    return float(np.abs(out - reference).max() / np.abs(reference).max())


def _timer(exe: Executable, workers: Workers, problem: baseline.Problem) -> Callable[[], list[float]]:
    """Return a function that times some runs of `exe`; the one that checked its result has warmed it up."""

    def timer() -> list[float]:
        first = exe.time(workers, *problem, repeat=1, warmup=0)
        return first if first[0] > SLOW else exe.time(workers, *problem, repeat=REPEAT)

    return timer


def _in_rounds(timers: dict[object, Callable[[], list[float]]]) -> dict[object, list[float]]:
    """Return all the seconds that each timer gave over all the rounds."""
    seconds: dict[object, list[float]] = {key: [] for key in timers}
    for _ in range(ROUNDS):
        for key, timer in timers.items():
            # BLAS and TVM threads spin for some milliseconds after their last job; the next one mustn't pay for that.
            time.sleep(0.05)
            seconds[key] += timer()
    return seconds


def _say(text: str) -> None:
    """Progress, apart from the report."""
    print(f"demo: {text}", file=sys.stderr, flush=True)
