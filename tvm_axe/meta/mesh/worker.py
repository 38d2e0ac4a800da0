"""The process that runs schedules of a program on a mesh of workers, which it launches and which end with it.

It is a `tvm_axe.meta.measure.child.Child` of `tvm_axe.meta.mesh.measure.MeshWorker`; its requests are:

    (PREPARE, mod, target, work_dir, None)       -> {"reference": arrays, "median": seconds}
    (PREPARE, mod, target, work_dir, reference)  -> {}, in a process that replaces one
    (MEASURE, mod)                               -> {"median": seconds, "build": seconds, "run": seconds}
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.analysis.parameters import parameters
from tvm_axe.collective import Workers, launch
from tvm_axe.compiler import compile
from tvm_axe.executable import Executable
from tvm_axe.lower import Lowered, lower
from tvm_axe.meta.measure.check import difference, random_array, summing_slack
from tvm_axe.meta.measure.child import serve
from tvm_axe.meta.mesh.space import engine_of, mesh_of

__all__ = ["CONDITIONS", "KEPT", "MEASURE", "PREPARE", "main", "random_inputs"]

PREPARE, MEASURE = "prepare", "measure"

_REPEAT, _SECONDS = 20, 0.5  # timed runs, fewer of a schedule that takes longer than this for all of them; at least one

CONDITIONS: dict[str, str | int] = {"input sets": 1, "cache": "warm: the same arrays in every run", "runs": _REPEAT}
"""How a schedule is timed: median of the runs, of each the slowest device's time."""

KEPT = 8  # compiled schedules, for those that are timed again in turns


class MeshBench:
    """Runs schedules of one program on the same arrays."""

    def __init__(self, mod: IRModule, target: Target, work_dir: Path) -> None:
        self.mod, self.target, self.work_dir = mod, target, work_dir
        self.mesh, self.engine = mesh_of(mod), engine_of(mod)
        self.slack = summing_slack(mod["main"])
        self.arrays = random_inputs(lower(mod["main"], self.mesh))
        self.reference: dict[str, np.ndarray] = {}
        self._kept: dict[str, Executable] = {}
        self._workers: Workers | None = None

    def on_one_device(self) -> dict[str, np.ndarray]:
        """What the program computes by itself: compiled for one device, which its annotations mean nothing to."""
        arguments = {
            name: tvm.runtime.tensor(self.arrays.get(name, np.zeros(param.shape, param.dtype)))
            for name, param in parameters(self.mod["main"]).items()
        }
        tvm.compile(self.mod, target="llvm")["main"](*arguments.values())
        return {buffer.name: arguments[buffer.name].numpy() for buffer in lower(self.mod["main"], self.mesh).outputs}

    def time(self, mod_json: str) -> tuple[float, float]:
        """Median seconds of a run, its results checked; and what compiling took."""
        start = time.perf_counter()
        exe = self._compiled(mod_json)
        built = time.perf_counter() - start
        if self._workers is None or self._workers.closed:  # a fault may have taken them along
            self._workers = launch(self.mesh, engine=self.engine)
        arrays = [self.arrays[name] for name in exe.inputs]
        results = exe.run(self._workers, *arrays)
        for name, got in zip(exe.outputs, results if isinstance(results, tuple) else (results,)):
            wrong = difference(got, self.reference[name], self.slack)
            if wrong:
                raise ValueError(f"wrong result: {name} {wrong}")
        once = exe.time(self._workers, *arrays, repeat=1, warmup=0)[0]
        if once > _SECONDS:
            return once, built
        repeat = min(_REPEAT, int(_SECONDS / once))
        return statistics.median(exe.time(self._workers, *arrays, repeat=repeat, warmup=1)), built

    def _compiled(self, mod_json: str) -> Executable:
        exe = self._kept.pop(mod_json, None)
        if exe is None:
            func = tvm.ir.load_json(mod_json)["main"]
            exe = compile(func, self.mesh, target=self.target, work_dir=self.work_dir)
        self._kept[mod_json] = exe
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return exe


def random_inputs(lowered: Lowered) -> dict[str, np.ndarray]:
    """The same random array for each input every time; positive, as optimizers take the root of their state."""
    rng = np.random.default_rng(0)
    return {
        buffer.name: random_array(rng, buffer.shape, np.dtype(buffer.dtype), positive=True) for buffer in lowered.inputs
    }


class _Handler:
    def __init__(self) -> None:
        self.bench: MeshBench | None = None

    def __call__(self, request: tuple[Any, ...]) -> dict[str, Any]:
        kind, mod_json, *more = request
        if kind == PREPARE:
            target, work_dir, reference = more
            self.bench = MeshBench(tvm.ir.load_json(mod_json), Target(json.loads(target)), Path(work_dir))
            if reference is not None:
                self.bench.reference = reference
                return {}
            self.bench.reference = self.bench.on_one_device()
            return {"reference": self.bench.reference, "median": self.bench.time(mod_json)[0]}
        if self.bench is None:
            raise ValueError("nothing was prepared")
        start = time.perf_counter()
        median, build = self.bench.time(mod_json)
        return {"median": median, "build": build, "run": time.perf_counter() - start - build}


def main() -> None:
    """Serve the tuner that started this process."""
    serve(_Handler())
