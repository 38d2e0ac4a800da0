"""The process that runs schedules of a program on a mesh of workers, which it launches and which end with it.

It is a `tvm_axe.meta.measure.child.Child` of `tvm_axe.meta.mesh.runner.MeshRunner`; its requests are:

    (PREPARE, mod, target, work_dir, None)       -> {"reference": arrays, "median": seconds}
    (PREPARE, mod, target, work_dir, reference)  -> {}, in a process that replaces one
    (MEASURE, mod)                               -> {"median": seconds, "build": seconds, "run": seconds}
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.analysis.parameters import parameters
from tvm_axe.errors import TuneError
from tvm_axe.lower import Lowered
from tvm_axe.checking.comparing import summing_slack
from tvm_axe.meta.measure.child import serve
from tvm_axe.meta.mesh.bench import ProgramBench, random_inputs
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.space import engine_of

__all__ = ["MEASURE", "PREPARE", "bench_for", "main", "on_one_device"]

PREPARE, MEASURE = "prepare", "measure"


def bench_for(mod: IRModule, lowered: Lowered, target: Target, work_dir: Path) -> ProgramBench:
    """A bench for schedules of a program's workload, of which `lowered` is the program as it is; on random arrays."""
    return ProgramBench(lowered.mesh, engine_of(mod), target, work_dir, random_inputs(lowered))


def on_one_device(mod: IRModule, lowered: Lowered, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a program computes by itself: compiled for one device, which its annotations mean nothing to."""
    arguments = {
        name: tvm.runtime.tensor(arrays.get(name, np.zeros(param.shape, param.dtype)))
        for name, param in parameters(mod["main"]).items()
    }
    tvm.compile(mod, target="llvm")["main"](*arguments.values())
    return {buffer.name: arguments[buffer.name].numpy() for buffer in lowered.outputs}


class _Handler:
    def __init__(self) -> None:
        self.bench: ProgramBench | None = None
        self.slack = 0.0
        self.candidates = Candidates()

    def __call__(self, request: tuple[Any, ...]) -> dict[str, Any]:
        kind, mod_json, *more = request
        start = time.perf_counter()
        mod = tvm.ir.load_json(mod_json)
        lowered = self.candidates.lowered(mod)
        if kind == PREPARE:
            target, work_dir, reference = more
            self.slack = summing_slack(mod["main"])
            self.bench = bench_for(mod, lowered, Target(json.loads(target)), Path(work_dir))
            if reference is not None:
                self.bench.expect(reference)
                return {}
            reference = on_one_device(mod, lowered, self.bench.arrays)
            self.bench.expect(reference)
            return {"reference": reference, "median": self.bench.time(lowered, self.slack)[0]}
        if self.bench is None:
            raise TuneError("nothing was prepared")
        lowering = time.perf_counter() - start
        median, build = self.bench.time(lowered, self.slack)
        build += lowering
        return {"median": median, "build": build, "run": time.perf_counter() - start - build}


def main() -> None:
    """Serve the tuner that started this process."""
    serve(_Handler())
