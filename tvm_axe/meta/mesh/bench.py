"""Where schedules of a program run: on workers of a mesh, all on the same arrays, each checked before it is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tvm import tirx
from tvm.target import Target

from tvm_axe.checking.inputs import distinct_values, indices_of
from tvm_axe.checking.reference import Expected, Reference
from tvm_axe.collective import Workers
from tvm_axe.compiler import compile
from tvm_axe.errors import TuneError
from tvm_axe.executable import Executable
from tvm_axe.layout import Mesh
from tvm_axe.lower import Lowered
from tvm_axe.meta.mesh.devices import Devices

__all__ = ["CONDITIONS", "KEPT", "ProgramBench", "random_inputs"]

_REPEAT, _SECONDS = 20, 0.5  # timed runs, fewer of a schedule that takes longer than this for all of them; at least one

CONDITIONS: dict[str, str | int] = {"input sets": 1, "cache": "warm: the same arrays in every run", "runs": _REPEAT}
"""How a schedule is timed: median of the runs, of each the slowest device's time."""

KEPT = 8  # compiled schedules, for those that are timed again in turns


class ProgramBench:
    """Compiles, checks and times schedules of one program.

    Workers are launched when the first schedule runs, and again where a fault has taken them along. The last few
    schedules stay compiled.

    Parameters
    ----------
    mesh, devices
        The devices, and what they are.
    target
        What their kernels are compiled for, resolved.
    work_dir
        Where records of kernels are.
    origin
        The program before any primitive, which all schedules must compute the same as (`tvm_axe.check` has the rule).
    arrays
        Whole arrays by name, for the inputs.
    repeat
        Timed runs of each schedule; None: as many as go into half a second, 20 at most.

    Attributes
    ----------
    expected
        What a schedule must compute. None until the first one runs, or until it is said: then the program before any
        primitive is run on one device, once.
    """

    def __init__(
        self,
        mesh: Mesh,
        devices: Devices,
        target: Target,
        work_dir: Path,
        origin: tirx.PrimFunc,
        arrays: Mapping[str, np.ndarray],
        repeat: int | None = None,
    ) -> None:
        self.mesh, self.devices, self.target, self.work_dir = mesh, devices, target, work_dir
        self.origin, self.arrays, self.repeat = origin, arrays, repeat
        self.expected: Expected | None = None
        self._kept: dict[int, tuple[Lowered, Executable]] = {}
        self._workers: Workers | None = None

    def expect(self, expected: Expected) -> None:
        """Have every schedule compute this, which was found before."""
        self.expected = expected

    def time(self, lowered: Lowered) -> tuple[float, float]:
        """Median seconds of a run, its results checked; and what compiling took.

        Parameters
        ----------
        lowered
            The schedule; the very same object is compiled once, as long as it is kept.

        Raises
        ------
        AxeError
            If it can't be compiled, a worker fails, or the results are wrong.
        """
        start = time.perf_counter()
        exe = self._compiled(lowered)
        built = time.perf_counter() - start
        if self._workers is None or self._workers.closed:
            self._workers = self.devices.launch(self.mesh)
        arrays = [self.arrays[name] for name in exe.inputs]
        results = exe.run(self._workers, *arrays)
        self._check(dict(zip(exe.outputs, results if isinstance(results, tuple) else (results,))))
        repeat = self.repeat
        if repeat is None:
            once = exe.time(self._workers, *arrays, repeat=1, warmup=0)[0]
            if once > _SECONDS:
                return once, built
            repeat = min(_REPEAT, int(_SECONDS / once))
        return statistics.median(exe.time(self._workers, *arrays, repeat=repeat, warmup=1)), built

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()

    def _check(self, got: Mapping[str, np.ndarray]) -> None:
        if self.expected is None:
            self.expected = Reference(self.origin)(self.arrays).of(got)
        for name, array in got.items():
            wrong = self.expected.fault(name, array)
            if wrong:
                raise TuneError(f"wrong result: {name} {wrong}")

    def _compiled(self, lowered: Lowered) -> Executable:
        key = id(lowered)  # which is no other's as long as it is kept here
        _, exe = self._kept.pop(key, (lowered, None))
        if exe is None:
            exe = compile(lowered, target=self.target, work_dir=self.work_dir, keep=False)
        self._kept[key] = lowered, exe
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return exe


def random_inputs(origin: tirx.PrimFunc, lowered: Lowered) -> dict[str, np.ndarray]:
    """The same random array for each input every time; positive, as optimizers take the root of their state."""
    drawn = distinct_values(origin, indices_of(origin), 1, np.random.default_rng(0), positive=True)
    return {buffer.name: drawn[buffer.name] for buffer in lowered.inputs}
