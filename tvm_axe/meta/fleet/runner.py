"""The measurer over a crew: what searches know, measured by whoever is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tvm
from tvm.ir import IRModule

from tvm_axe.errors import TuneError
from tvm_axe.meta.fleet.crew import Crew, Preparation
from tvm_axe.meta.fleet.items import Outcome
from tvm_axe.meta.measure.protocol import Measurement

__all__ = ["FleetRunner", "measurement_of"]


class FleetRunner:
    """Has a crew's servers build, check and time candidates, as `tvm_axe.meta.measure.runner.Runner` does here.

    Parameters
    ----------
    crew
        The servers; whoever made it ends it.
    """

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self._preparation: Preparation | None = None
        self._prepared: Outcome | None = None

    @property
    def conditions(self) -> Mapping[str, str | int]:
        """Under what conditions the function that was prepared last is measured."""
        told = {} if self._prepared is None else self._prepared.result["conditions"]
        return {**told, "fleet": self.crew.fleet.key}

    @property
    def machines(self) -> Mapping[str, Any]:
        """What is known of the machines that measured, for the provenance."""
        return {name: machine.encode() for name, machine in self.crew.machines.items()}

    def prepare(self, mod: IRModule) -> Measurement:
        """Run and time the untuned function on a server; from now on candidates must compute what it computes."""
        self._preparation = Preparation("prepare", [tvm.ir.save_json(mod)])
        self._prepared = None
        prepared = self.crew.prepare(self._preparation)
        measured = measurement_of(prepared)
        if measured.failure is None:
            self._prepared = prepared
        return measured

    def measure_all(self, mods: Sequence[IRModule]) -> Iterator[Measurement]:
        """Build, check and time candidates; gives what became of them in their order, each as soon as it is known."""
        encoded = [tvm.ir.save_json(mod) for mod in mods]
        yield from map(measurement_of, self.crew.do(self._is_prepared(), "measure", encoded))

    def in_turns(self, mods: Sequence[IRModule], turns: int) -> list[list[float]]:
        """Time candidates that were measured before, all on one machine; see `Runner.in_turns`."""
        item = [tvm.ir.save_json(mod) for mod in mods], turns
        (outcome,) = self.crew.do(self._is_prepared(), "turns", [item])
        if outcome.failure is not None:
            raise TuneError(outcome.failure)
        return [[seconds * outcome.scale for seconds in own] for own in outcome.result]

    def _is_prepared(self) -> Preparation:
        if self._preparation is None or self._prepared is None:
            raise TuneError("measure: no function is prepared, or it could not be; prepare one that runs first")
        return self._preparation


def measurement_of(outcome: Outcome) -> Measurement:
    """A result, its time on the crew's scale."""
    if outcome.failure is not None:
        return Measurement(None, outcome.failure, machine=outcome.machine)
    told = outcome.result
    seconds = None if told["seconds"] is None else told["seconds"] * outcome.scale
    return Measurement(seconds, told["failure"], told["build"], told["run"], outcome.machine)
