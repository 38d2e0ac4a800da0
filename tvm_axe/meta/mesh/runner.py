"""Runners of schedules of a program on a mesh: in a process of their own, and in this one.

`MeshRunner` is for a tuner: what a schedule does to the workers costs that schedule only. `LocalRunner` is for
`axe.search`, which is given the arrays to run on: they go nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.checking.reference import Expected
from tvm_axe.errors import AxeError, TuneError
from tvm_axe.meta.measure.child import Child
from tvm_axe.meta.measure.protocol import Measurement
from tvm_axe.meta.mesh.bench import CONDITIONS, ProgramBench
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.kernels import KernelTuner
from tvm_axe.meta.mesh.process import MEASURE, PREPARE
from tvm_axe.meta.mesh.space import devices_of

__all__ = ["LocalRunner", "MeshRunner", "recorded"]

_ENTRY = "tvm_axe.meta.mesh.process:main"
_START_SECONDS = 180.0  # importing the compiler on a busy machine, launching, and running the program as it is
_CALLS = 30  # of a schedule that is as slow as the program as it is


class MeshRunner:
    """Has a process of its own launch the mesh's workers and run one schedule after the other on them.

    A schedule that crashes or hangs takes that process with it, and the workers; the next one gets new ones. Before
    schedules are measured their local kernels are tuned, by the tuner for kernels, so that each runs as well as it can.

    Parameters
    ----------
    target
        What a device's kernels are compiled for, resolved.
    kernels
        Tunes local kernels, and has their records below its ``work_dir``.
    log
        File that collects what the processes print.
    timeout
        Seconds that compiling, checking and timing one schedule may take, beside its calls.
    origin
        The program before any primitive, which schedules are judged by.
    """

    def __init__(
        self, target: Target, kernels: KernelTuner | _Recorded, log: Path, timeout: float, origin: tirx.PrimFunc
    ) -> None:
        self.target, self.kernels, self._timeout, self._origin = target, kernels, timeout, origin
        self._calls, self.devices = 0.0, ""
        self._child = Child(_ENTRY, log)
        self._mod: IRModule | None = None
        self._reference: Expected | None = None

    @property
    def conditions(self) -> dict[str, str | int]:
        """Under what conditions schedules are measured."""
        return {"devices": self.devices, **CONDITIONS}

    @property
    def machines(self) -> dict[str, Any]:
        """Nothing: this machine alone."""
        return {}

    def prepare(self, mod: IRModule) -> Measurement:
        """Run and time the program as it is, beside the same before any primitive on one device; so are schedules."""
        self._mod, self._reference, self.devices = mod, None, str(devices_of(mod, self.target))
        status, answer = self._prepare()
        if status != "ok":
            return Measurement(None, answer)
        self._reference, self._calls = answer["reference"], _CALLS * answer["median"]
        return Measurement(answer["median"])

    def measure_all(self, mods: Sequence[IRModule]) -> Iterator[Measurement]:
        """Tune the schedules' kernels; then compile, check and time one schedule after the other."""
        self.kernels.tune(mods)
        for mod in mods:
            yield self._measure(mod)

    def close(self) -> None:
        """End the process and the workers."""
        self._child.close()

    def __enter__(self) -> MeshRunner:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _measure(self, mod: IRModule) -> Measurement:
        if self._child.pid is None:
            status, answer = self._prepare()
            if status != "ok":
                raise TuneError(f"a new tuning worker cannot be prepared: {answer}; see {self._child.log}")
        status, answer = self._child.ask((MEASURE, tvm.ir.save_json(mod)), self._timeout + self._calls)
        if status != "ok":
            return Measurement(None, answer)
        return Measurement(answer["median"], None, answer["build"], answer["run"])

    def _prepare(self) -> tuple[str, Any]:
        where = str(self.target), str(self.kernels.work_dir), tvm.ir.save_json(self._origin)
        return self._child.ask((PREPARE, tvm.ir.save_json(self._mod), *where, self._reference), _START_SECONDS)


class _Recorded:
    """In place of a `KernelTuner`: kernels are as their records say."""

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir

    def tune(self, mods: Sequence[IRModule]) -> None:
        """Nothing."""


def recorded(target: Target, work_dir: Path, log: Path, timeout: float, origin: tirx.PrimFunc) -> MeshRunner:
    """A runner that tunes no kernels: for a server, which is sent the records of a job that does."""
    return MeshRunner(target, _Recorded(work_dir), log, timeout, origin)


class LocalRunner:
    """Runs schedules from this process, on the arrays of a bench.

    Parameters
    ----------
    bench
        Compiles, checks and times them.
    candidates
        What is known of the program's schedules.
    kernels
        Tunes their local kernels first; None leaves these as the records say.
    """

    def __init__(self, bench: ProgramBench, candidates: Candidates, kernels: KernelTuner | None) -> None:
        self.bench, self.candidates, self.kernels = bench, candidates, kernels

    @property
    def conditions(self) -> dict[str, str | int]:
        """Under what conditions schedules are measured."""
        runs = {} if self.bench.repeat is None else {"runs": self.bench.repeat}
        return {"devices": str(self.bench.devices), **CONDITIONS, **runs}

    @property
    def machines(self) -> dict[str, Any]:
        """Nothing: this machine alone."""
        return {}

    def prepare(self, mod: IRModule) -> Measurement:
        """Nothing: the program as it is, which may share nothing, isn't run."""
        return Measurement(None)

    def measure_all(self, mods: Sequence[IRModule]) -> Iterator[Measurement]:
        """Tune the schedules' kernels; then compile, check and time one schedule after the other."""
        if self.kernels is not None:
            self.kernels.tune(mods)
        for mod in mods:
            yield self._measure(mod)

    def _measure(self, mod: IRModule) -> Measurement:
        start = time.perf_counter()
        try:
            lowered = self.candidates.lowered(mod)
            median, build = self.bench.time(lowered)
        except AxeError as error:
            return Measurement(None, str(error).splitlines()[0], 0.0, time.perf_counter() - start)
        return Measurement(median, None, build, time.perf_counter() - start - build)
