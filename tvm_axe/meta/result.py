"""What tuning came to: one type for kernels, models, and programs on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm import s_tir
from tvm.target import Target

from tvm_axe.errors import TuneError
from tvm_axe.lower import Lowered
from tvm_axe.meta.fleet.crew import Machine
from tvm_axe.meta.task import TaskResult
from tvm_axe.notebook import preformatted
from tvm_axe.schedule import Schedule

__all__ = ["Found", "TuneResult"]

_HEAD = f"{'schedule':<44} {'bytes':>13} {'model ms':>9} {'median ms':>10}"


@dataclass(frozen=True)
class Found:
    """One schedule of a program.

    Attributes
    ----------
    notation : str
        As CoCoNet writes it.
    steps : tuple[str, ...]
        The primitives that make it of the program, in words; none of a schedule that an earlier call measured, and this
        one had no reason to enumerate again.
    sch : Schedule
        The schedule; ``sch.trace`` replays on a stock schedule of the function.
    bytes : int
        What the busiest device of each stage receives of its peers, over all stages, those of inserted copies too.
    estimate_ms : float
        What the link model expects, arithmetic left out.
    median_ms : float or None
        Measured; None if it wasn't. One that is faster than the best within noise alone has the best's time
        (`tvm_axe.meta.search.policy`).
    why_not : str
        Why it wasn't measured, or what went wrong; empty if all is well.
    inserted : tuple[str, ...]
        The copies that `tvm_axe.compile` inserts into it where a device touches what it doesn't own, with their bytes.
    """

    notation: str
    steps: tuple[str, ...]
    sch: Schedule
    bytes: int
    estimate_ms: float
    median_ms: float | None
    why_not: str
    inserted: tuple[str, ...]

    def __str__(self) -> str:
        return self.row()

    def row(self, apart: Sequence[str] = ()) -> str:
        """Its line of a table, with the steps ``apart`` that set it apart from others of the same notation."""
        median = self.why_not if self.median_ms is None else f"{self.median_ms:10.3f}"
        line = f"{self.notation:<44} {self.bytes:>13,} {self.estimate_ms:>9.3f} {median}"
        line += f"  by {', '.join(apart)}" if apart else ""
        return "\n".join([line, *(f"  redistributed: {copies}" for copies in self.inserted)])

    def _repr_html_(self) -> str:
        return preformatted("\n".join([_HEAD, str(self), "", *self.steps]).rstrip())

    @classmethod
    def of(
        cls,
        sch: Schedule,
        steps: tuple[str, ...],
        lowered: Lowered,
        estimate: float,
        seconds: float | None,
        why_not: str,
    ) -> Found:
        """What is told of a schedule that was lowered; `estimate` and `seconds`, its median, are in seconds."""
        moved = sum(stage.bytes for stage in lowered.stages)
        median = None if seconds is None else 1e3 * seconds
        return cls(lowered.notation, steps, sch, moved, 1e3 * estimate, median, why_not, lowered.inserted)


@dataclass(frozen=True)
class TuneResult:
    """What a call of `axe.tune` or `axe.search` did.

    Kernels, of a function or a model, have `tasks` and nothing in `schedules`: their best schedules are in the
    databases, where `tvm_axe.compile` and `apply_best` find them. A program on a mesh has its schedules here, too.

    Attributes
    ----------
    target : Target
        What kernels are compiled for, resolved; the records hold for it.
    tasks : tuple[TaskResult, ...]
        One result for each function that there is to tune, in the module's order; equal functions are one. Of a
        program on a mesh: what became of the program, and then of each local kernel that was tuned.
    left_out : dict[str, str]
        Why each other function was not tuned, by name; empty for a program on a mesh.
    seconds : dict[str, float]
        Where this call's time went: ``search``, ``build``, ``run``, and ``total``; for a program on a mesh the first
        three are its schedules', and ``kernels`` is what tuning their kernels took. Builds of kernels run ahead of each
        other, in parallel; the finals, with their builds, count as runs.
    report : Path
        A page with curves, failures and the best schedules; see `tvm_axe.meta.report.page`.
    schedules : tuple[Found, ...]
        Of a program on a mesh: the best first, then the others that were measured, the fastest first, then those that
        failed. `axe.search` has all that are valid; those that weren't measured come last, the most promising first.
    machines : tuple[Machine, ...]
        Those of a fleet that this call had: what each has measured, and what happened to it.
    """

    target: Target
    tasks: tuple[TaskResult, ...]
    left_out: dict[str, str]
    seconds: dict[str, float]
    report: Path
    schedules: tuple[Found, ...] = ()
    machines: tuple[Machine, ...] = ()

    @property
    def best(self) -> Found:
        """The fastest schedule of a program on a mesh.

        Raises
        ------
        TuneError
            If kernels were tuned, each of which has a best schedule; by all that follows from the best, too.
        """
        if not self.schedules:
            names = ", ".join(task.name for task in self.tasks)
            raise TuneError(
                f"best: no program on a mesh was tuned but {names}, each with a best schedule of its own; `tasks` has "
                "their times, and axe.compile or tvm_axe.records.apply_best applies them"
            )
        return self.schedules[0]

    @property
    def schedule(self) -> Schedule:
        """The fastest schedule of a program on a mesh; `tvm_axe.compile` takes it."""
        return self.best.sch

    @property
    def trace(self) -> s_tir.schedule.Trace:
        """The fastest schedule's trace."""
        return self.best.sch.trace

    @property
    def notation(self) -> str:
        """The fastest schedule as CoCoNet writes it."""
        return self.best.notation

    def table(self) -> str:
        """The schedules of a program on a mesh, one a line; of kernels, their times.

        Where several schedules have one notation, a line ends with the steps that not all of them have: the dimension
        that is scattered, the number of chunks.
        """
        if not self.schedules:
            lines = [f"{'function':<44} {'untuned ms':>12} {'best ms':>12} {'trials':>8}"]
            for task in self.tasks:
                cells = " ".join(f"{'-' if ms is None else f'{ms:.3f}':>12}" for ms in (task.before_ms, task.best_ms))
                lines.append(f"{task.name:<44} {cells} {task.trials:>8}")
            return "\n".join(lines)
        return "\n".join([_HEAD, *(found.row(apart) for found, apart in _set_apart(self.schedules))])

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return preformatted(self.table())


def _set_apart(schedules: Sequence[Found]) -> Iterator[tuple[Found, list[str]]]:
    """Each schedule with those of its steps that others of its notation don't have."""
    alike: dict[str, list[set[str]]] = {}
    for found in schedules:
        alike.setdefault(found.notation, []).append(set(found.steps))
    for found in schedules:
        common = set.intersection(*alike[found.notation])
        yield found, [step for step in found.steps if step not in common]
