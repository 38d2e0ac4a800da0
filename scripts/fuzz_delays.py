"""Workers and GPUs that stumble: random delays round all that programs call, and at every wait and signal of kernels.

    python scripts/fuzz_delays.py                                  # all programs on CPU workers, ten times
    python scripts/fuzz_delays.py --engine cuda --devices 3 mlp    # on a GPU each, if there are as many
    python scripts/fuzz_schedules.py --delays                      # random programs and schedules

Kernels, collectives, barriers and the waits between chunks are all calls of the virtual machine, which takes an
instrument: what it is to call before and after each. Sleeps there move every stage of every worker against the others,
in compiled barriers too, so that a barrier that is missing shows as a wrong answer. On GPUs, whose graphs a host's
sleeps don't reach, each wait and signal that kernels do is put behind a delay, in the CUDA source of tile programs as
in that of collectives and meetings, and so is each step of the side stream.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tvm_axe.collective import discrete, local, serving, worker
from tvm_axe.collective.cuda import driver
from tvm_axe.machines import nvcc

LONGEST = 0.004
"""Seconds on a host."""
LONGEST_ON_GPUS = 40_000
"""Nanoseconds."""
RUNS = 10

_MEETS = re.compile(
    r"^[^\n;#]*__device__[^;{()]*\b(axe_wait|axe_signal\w*|axe_tell|axe_await)\s*\([^{;]*\)\s*\{", re.MULTILINE
)
"""The head of a function by which a kernel meets others."""

_STUMBLE = f"""
__forceinline__ __device__ void axe_stumble() {{
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  unsigned drawn = static_cast<unsigned>(clock64()) ^ blockIdx.x * 40503u ^ blockIdx.y * 9176u ^ threadIdx.x * 26699u;
  drawn = (drawn ^ drawn >> 15) * 2246822519u;
  drawn ^= drawn >> 13;
  if (drawn & 1) return;
  unsigned long long end = now + (drawn >> 1) % {LONGEST_ON_GPUS};
  while (now < end) {{
    __nanosleep(200);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  }}
}}
"""

_ALONE = f"""{_STUMBLE}
extern "C" __global__ void stumble() {{ axe_stumble(); }}
"""


class _Stumbler:
    """An instrument that sleeps now and then."""

    def __init__(self, rank: int) -> None:
        self.rng = random.Random(rank)

    def __call__(self, function: Any, name: str, before: bool, result: Any, *arguments: Any) -> None:
        if not name.startswith("vm.builtin") and self.rng.random() < 0.5:
            time.sleep(self.rng.random() * LONGEST)


_load = worker.COMMANDS["load"]
_cubin = nvcc.cubin


def _stumbling_load(self: worker.Worker, program: int, *arguments: Any) -> None:
    _load(self, program, *arguments)
    self._programs[program].set_instrument(_Stumbler(self.rank))


def stumbling(source: str) -> str:
    """CUDA source whose waits and signals come after a delay; itself where it has none."""
    first = _MEETS.search(source)
    if first is None:
        return source
    changed = _MEETS.sub(lambda head: f"{head.group(0)} axe_stumble();", source[first.start() :])
    return source[: first.start()] + _STUMBLE + changed


def _stumbling_cubin(source: str, target: Any, store: Any) -> bytes:
    return _cubin(stumbling(source), target, store)


def _stumbling_stream() -> None:
    """Put a delay on the side stream before each step, and on a device's stream around each collective."""
    from tvm_axe.collective.cuda import moving, side
    from tvm_axe.collective.cuda.driver import call
    from tvm_axe.machines import cache
    from tvm_axe.machines.target import resolve_target

    loaded: dict[int, Any] = {}

    def delay(stream: Any) -> None:
        context = int(call("cuCtxGetCurrent"))
        if context not in loaded:
            module = call("cuModuleLoadData", _cubin(_ALONE, resolve_target("cuda"), cache.Cache()))
            loaded[context] = call("cuModuleGetFunction", module, b"stumble")
        call("cuLaunchKernel", loaded[context], 1, 1, 1, 1, 1, 1, 0, stream, ctypes.c_void_p(0), 0)

    step, run = side.SideStream.step, moving.Mover.run

    def stumbling_step(self: Any, *arguments: Any) -> None:
        if arguments[0] != "fork":  # the stream isn't the program's yet
            delay(self.stream)
        step(self, *arguments)

    def stumbling_run(self: Any, *arguments: Any) -> None:
        delay(self._stream)
        run(self, *arguments)

    side.SideStream.step = stumbling_step  # type: ignore[method-assign]
    moving.Mover.run = stumbling_run  # type: ignore[method-assign]


def _patch(gpus: bool) -> None:
    worker.COMMANDS["load"] = _stumbling_load
    if gpus:
        nvcc.cubin = _stumbling_cubin
        _stumbling_stream()


def install(gpus: bool = False) -> None:
    """Have the workers of this process stumble, and those that it starts; `gpus`: their kernels, too."""
    _patch(gpus)
    local._ENTRY = f"{__name__}:serve"
    if gpus:
        discrete._ENTRY = f"{__name__}:serve_discrete"
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


def serve(*arguments: Any, **named: Any) -> None:
    """Be a worker that stumbles, alone in this process."""
    _patch(gpus=False)
    serving.serve(*arguments, **named)


def serve_discrete(*arguments: Any, **named: Any) -> None:
    """Be one whose device has memory of its own."""
    _patch(gpus=True)
    discrete.serve(*arguments, **named)


# ---- The package's programs ------------------------------------------------------------------------------------------


def launches(engine: str, devices: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is launched, and how that is called: on GPUs once with devices that meet, and once with their workers."""
    if engine != "cuda":
        yield engine, {"engine": engine}
        return
    gpus = driver.gpus_for(devices)
    for barriers in ("device", "host"):
        yield f"cuda, {barriers} barriers", {"engine": engine, "gpus": gpus, "barriers": barriers}


def faults(name: str, devices: int, how: dict[str, Any], runs: int, target: str) -> Iterator[tuple[str, str]]:
    """What was wrong with each of a program's schedules, if anything."""
    import numpy as np

    import tvm_axe as axe
    from tvm_axe.layout import Mesh
    from tvm_axe.programs import PROGRAMS

    first, *others = PROGRAMS[name].axes
    mesh = Mesh({**dict.fromkeys(others, 1), first: devices})
    program = PROGRAMS[name](mesh, "uneven")
    with axe.launch(mesh, timeout=60.0, **how) as workers:
        for schedule in program.schedules:
            exe = axe.compile(program.schedule(schedule), target=target, work_dir=None)
            worst = 0.0
            for _ in range(runs):
                arrays = program.inputs(np.random.default_rng())
                exe.fill(workers, lambda buffer: np.nan if "float" in buffer.dtype else None)
                outputs = exe.run(workers, *arrays)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                worst = float(np.max([worst, program.error(outputs, program.reference(*arrays))]))
            yield schedule, "" if worst <= program.tolerance else f"the error is {worst:.2e}"


def main(arguments: Sequence[str] | None = None) -> int:
    from tvm_axe.programs import PROGRAMS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs (default: all)")
    parser.add_argument("--engine", default="threads", choices=("threads", "processes", "cuda"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--runs", type=int, default=RUNS, help="of each schedule (default: %(default)s)")
    options = parser.parse_args(arguments)
    install(options.engine == "cuda")
    wrong = 0
    for name in options.names or PROGRAMS:
        for called, how in launches(options.engine, options.devices):
            target = "cuda" if options.engine == "cuda" else "llvm"
            for schedule, fault in faults(name, options.devices, how, options.runs, target):
                wrong += bool(fault)
                print(f"{name} {schedule}, {called}: {fault or f'right {options.runs} times'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    import fuzz_delays  # what workers are told by name

    sys.exit(fuzz_delays.main())
