"""Measuring schedules of a program on a mesh: what one of them does to the workers costs that schedule only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.errors import TuneError
from tvm_axe.meta.measure.child import Child
from tvm_axe.meta.measure.measurer import Measurement
from tvm_axe.meta.mesh.kernels import KernelTuner
from tvm_axe.meta.mesh.space import engine_of
from tvm_axe.meta.mesh.worker import CONDITIONS, MEASURE, PREPARE

__all__ = ["MeshWorker"]

_MAIN = "from tvm_axe.meta.mesh.worker import main; main()"
_START_SECONDS = 180.0  # importing the compiler on a busy machine, launching, and running the program as it is
_CALLS = 30  # of a schedule that is as slow as the program as it is


class MeshWorker:
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
    """

    def __init__(self, target: Target, kernels: KernelTuner, log: Path, timeout: float) -> None:
        self.target, self.kernels, self._timeout = target, kernels, timeout
        self._calls, self.engine = 0.0, ""
        self._child = Child(_MAIN, log)
        self._mod: IRModule | None = None
        self._reference: dict[str, np.ndarray] | None = None

    @property
    def conditions(self) -> dict[str, str | int]:
        """Under what conditions schedules are measured."""
        return {"devices": self.engine, **CONDITIONS}

    def prepare(self, mod: IRModule) -> Measurement:
        """Run and time the program as it is; from now on schedules must compute what it computes on one device."""
        self._mod, self._reference, self.engine = mod, None, engine_of(mod)
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

    def __enter__(self) -> MeshWorker:
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
        where = str(self.target), str(self.kernels.work_dir)
        return self._child.ask((PREPARE, tvm.ir.save_json(self._mod), *where, self._reference), _START_SECONDS)
