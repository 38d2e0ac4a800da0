"""Schedules of a program on a mesh, measured on the machines of a fleet, each of which is a whole mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import IRModule

from tvm_axe.errors import TuneError
from tvm_axe.meta.fleet.crew import Crew, Preparation
from tvm_axe.meta.fleet.runner import measurement_of
from tvm_axe.meta.measure.protocol import Measurement
from tvm_axe.meta.mesh.kernels import KernelTuner
from tvm_axe.meta.mesh.space import devices_of

__all__ = ["FleetMeshRunner"]

_MEASURER = "tvm_axe.meta.mesh.runner:recorded"


class FleetMeshRunner:
    """Has a crew's servers run schedules of a program, as `tvm_axe.meta.mesh.runner.MeshRunner` does here.

    Parameters
    ----------
    crew
        Servers of which each has the mesh's devices.
    kernels
        Tunes local kernels first, and has their records, which go along with each schedule.
    origin
        The program before any primitive, which schedules are judged by.
    together
        Whether the schedules of one call all run on one machine.
    """

    def __init__(self, crew: Crew, kernels: KernelTuner, origin: tirx.PrimFunc, together: bool = False) -> None:
        self.crew, self.kernels, self._origin, self._together = crew, kernels, origin, together
        self._preparation: Preparation | None = None
        self._conditions: Mapping[str, str | int] = {}

    @property
    def conditions(self) -> Mapping[str, str | int]:
        """Under what conditions schedules are measured."""
        return self._conditions

    @property
    def machines(self) -> Mapping[str, Any]:
        """What is known of the machines that measured, for the provenance."""
        return {name: machine.encode() for name, machine in self.crew.machines.items()}

    def on_one_machine(self) -> FleetMeshRunner:
        """The same, prepared for the same program, with all schedules of one call on one machine: for finals."""
        other = FleetMeshRunner(self.crew, self.kernels, self._origin, together=True)
        other._preparation, other._conditions = self._preparation, self._conditions
        return other

    def prepare(self, mod: IRModule) -> Measurement:
        """Run and time the program as it is on a server, beside the same before any primitive on one device."""
        preparation = Preparation("prepare program", [_MEASURER, tvm.ir.save_json(mod), tvm.ir.save_json(self._origin)])
        self._preparation = None
        outcome = self.crew.prepare(preparation)
        measured = measurement_of(outcome)
        if measured.failure is None:
            devices = str(devices_of(mod, self.crew.target))
            self._preparation = preparation
            self._conditions = {**outcome.result["conditions"], "devices": devices, "fleet": self.crew.fleet.key}
        return measured

    def measure_all(self, mods: Sequence[IRModule]) -> Iterator[Measurement]:
        """Tune the schedules' kernels; then have each compiled, checked and timed."""
        if self._preparation is None:
            raise TuneError("measure: no program is prepared, or it could not be; prepare one that runs first")
        self.kernels.tune(mods)
        parts = [[tvm.ir.save_json(mod), self._records(mod)] for mod in mods]
        items = [parts] if self._together else [[part] for part in parts]
        for outcome, item in zip(self.crew.do(self._preparation, "programs", items), items):
            told = [None] * len(item) if outcome.failure is not None else outcome.result
            yield from (measurement_of(outcome._replace(result=one)) for one in told)

    def close(self) -> None:
        """Nothing: the crew is its maker's."""

    def __enter__(self) -> FleetMeshRunner:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _records(self, mod: IRModule) -> dict[str, str]:
        """The databases of a schedule's kernels: their files' texts by their names below the folder of all."""
        files: dict[str, str] = {}
        for folder in self.kernels.folders(mod):
            for path in sorted(Path(folder).glob("database_*.json")):
                files[str(path.relative_to(self.kernels.work_dir))] = path.read_text(encoding="utf-8")
        return files
