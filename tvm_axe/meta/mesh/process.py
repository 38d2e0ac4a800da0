"""The process that runs schedules of a program on a mesh of workers, which it launches and which end with it.

It is a `tvm_axe.meta.measure.child.Child` of `tvm_axe.meta.mesh.runner.MeshRunner`; its requests are:

    (PREPARE, mod, target, work_dir, origin, None)       -> {"reference": Expected, "median": seconds}
    (PREPARE, mod, target, work_dir, origin, reference)  -> {}, in a process that replaces one
    (MEASURE, mod)                                       -> {"median": seconds, "build": seconds, "run": seconds}
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.errors import TuneError
from tvm_axe.lower import Lowered
from tvm_axe.meta.measure.child import serve
from tvm_axe.meta.mesh.bench import ProgramBench, random_inputs
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.space import devices_of

__all__ = ["MEASURE", "PREPARE", "bench_for", "main"]

PREPARE, MEASURE = "prepare", "measure"


def bench_for(mod: IRModule, lowered: Lowered, target: Target, work_dir: Path, origin: tirx.PrimFunc) -> ProgramBench:
    """A bench for schedules of a program's workload, of which `lowered` is the program as it is; on random arrays.

    `origin` is the program before any primitive.
    """
    devices = devices_of(mod, target)
    return ProgramBench(lowered.mesh, devices, target, work_dir, origin, random_inputs(origin, lowered))


class _Handler:
    def __init__(self) -> None:
        self.bench: ProgramBench | None = None
        self.candidates = Candidates()

    def __call__(self, request: tuple[Any, ...]) -> dict[str, Any]:
        kind, mod_json, *more = request
        start = time.perf_counter()
        mod = tvm.ir.load_json(mod_json)
        if kind == PREPARE:
            target, work_dir, origin, reference = more
            where = Target(json.loads(target)), Path(work_dir)
            self.candidates = Candidates(None, devices_of(mod, where[0]))
            self.bench = bench_for(mod, self.candidates.lowered(mod), *where, tvm.ir.load_json(origin))
            if reference is not None:
                self.bench.expect(reference)
                return {}
            median = self.bench.time(self.candidates.lowered(mod))[0]
            return {"reference": self.bench.expected, "median": median}
        if self.bench is None:
            raise TuneError("nothing was prepared")
        lowered = self.candidates.lowered(mod)
        lowering = time.perf_counter() - start
        median, build = self.bench.time(lowered)
        build += lowering
        return {"median": median, "build": build, "run": time.perf_counter() - start - build}


def main(descriptors: Sequence[int]) -> None:
    """Serve the tuner that started this process."""
    serve(descriptors, _Handler())
