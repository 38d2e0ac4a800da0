"""What is said between who searches and what measures: the runner's interface, and a process's requests.

A search knows a `Measurer` alone. `tvm_axe.meta.measure.runner.Runner` is one for kernels; it starts processes, each of
which builds candidates and runs those that it built. What it asks of them, modules and targets being JSON:

    (PREPARE, mod, target, builder, exchange, None)      -> `Prepared`; what is wanted of candidates is in the exchange
    (PREPARE, mod, target, builder, exchange, prepared)  -> the same, in every other process
    (BUILD, number, mod)  -> {"build": seconds}; the candidate is kept under its number
    (RUN, number)         -> {"median": seconds, "run": seconds}; the candidate is dropped
    (TURNS, count, turns) -> seconds of each of candidates 0 to count - 1 in each turn; they are dropped

The builder is told by name (`tvm_axe.machines.builder.builder_named`), since a process imports what it calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tvm.ir import IRModule

__all__ = ["BUILD", "PREPARE", "RUN", "TURNS", "Measurement", "Measurer", "Prepared", "TimesInTurns"]

BUILD, PREPARE, RUN, TURNS = "build", "prepare", "run", "turns"


@dataclass(frozen=True)
class Measurement:
    """What became of one candidate.

    Attributes
    ----------
    seconds
        Median time of a call; None if it failed, and of an untuned function that was not run as it stands.
    failure
        Why it failed, in one line; None if it didn't.
    build_seconds, run_seconds
        What compiling it, and running it until its median was known, took.
    machine
        The name of the machine that it ran on; empty if that is this one.
    """

    seconds: float | None
    failure: str | None = None
    build_seconds: float = 0.0
    run_seconds: float = 0.0
    machine: str = ""


class Measurer(Protocol):
    """What builds and runs candidates, one workload's at a time."""

    @property
    def conditions(self) -> Mapping[str, str | int]:
        """Under what conditions the workload that was prepared last is measured, for its provenance."""

    @property
    def machines(self) -> Mapping[str, Any]:
        """What is known of each machine that measured, by name; nothing where that is this one."""

    def prepare(self, mod: IRModule) -> Measurement:
        """Run and time an untuned workload; from now on candidates are of this one.

        Where it can't be run as it is, its time is None without a failure.
        """

    def measure_all(self, mods: Sequence[IRModule]) -> Iterator[Measurement]:
        """Measure candidates in order, each as soon as it is known."""


@runtime_checkable
class TimesInTurns(Protocol):
    """A measurer that can time candidates again."""

    def in_turns(self, mods: Sequence[IRModule], turns: int) -> list[list[float]]:
        """Time candidates of the workload that was prepared last, which were measured before, one after the other.

        Returns
        -------
        list of list of float
            Seconds of each candidate in each turn.

        Raises
        ------
        TuneError
            If any of them can't be.
        """


class Prepared(NamedTuple):
    """What is known of a function whose candidates are to be measured.

    Attributes
    ----------
    median
        Seconds of a call of the function as it stands; None where it wasn't run as it stands.
    longest
        Seconds that a call of the function's reference took.
    written
        Whether each argument is an output.
    conditions
        Under what conditions times are measured.
    """

    median: float | None
    longest: float
    written: tuple[bool, ...]
    conditions: dict[str, str | int]
