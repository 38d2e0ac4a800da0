"""compute-sanitizer's verdict on what the package runs on a GPU: programs on a mesh, tile kernels, tile language words.

    python scripts/sanitize.py                       # memcheck, all of it: minutes
    python scripts/sanitize.py mlp moe_ragged grouped_matmul atomics
    python scripts/sanitize.py --tool racecheck matmul

Everything runs small, in one process, since a tool watches one: a mesh's devices are threads that share the first GPU,
and meet on the host. Results are compared with float64, too, and those of words that no kernel has
(`sanitize_words.py`) with the tests' interpreter. Under a tool a kernel is over before the next begins, so kernels that
wait for a peer's, `reduce_norm` and products beside copies, can't be run so: those are named. They are judged by the
interpreter of all devices (`tests/tile/interpreter_mesh.py`) and with delays (`fuzz_delays.py`). Calls of the driver
that fail are not what is asked about: the package's raise what it said, and bindings look for functions that a driver
hasn't.

It prints a line for each program, what the tool found, and the verdict; the exit status is 0 if all is clean.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOUND = 86
"""The exit status that the tool gives a process in which it found something."""
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def tool() -> str | None:
    """The path of compute-sanitizer: on ``PATH``, or where CUDA is."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")


def inside(names: Sequence[str]) -> int:
    """Run what has these names in this process; returns how many were wrong."""
    import numpy as np
    import sanitize_words

    import tvm_axe as axe
    from tvm_axe.errors import WorkerError
    from tvm_axe.layout import Mesh
    from tvm_axe.machines import resolve_target
    from tvm_axe.programs import PROGRAMS
    from tvm_axe.tile.kernels import KERNELS
    from tvm_axe.tile.kernels.check import checked, supported

    wrong = 0

    def say(name: str, fault: str) -> None:
        nonlocal wrong
        wrong += bool(fault)
        print(f"{name}: {fault or 'right'}", flush=True)

    target = resolve_target("cuda")
    for name in names or (*PROGRAMS, *KERNELS, *sanitize_words.WORDS):
        if name in sanitize_words.WORDS:
            say(name, sanitize_words.fault(name, target, np.random.default_rng()))
            continue
        if name in KERNELS:
            for index, problem in enumerate(KERNELS[name].cases):
                if supported(target, problem):
                    say(f"{name} {index}", checked(KERNELS[name], problem, target, np.random.default_rng())[1])
            continue
        mesh = Mesh(dict.fromkeys(PROGRAMS[name].axes, 2))
        program = PROGRAMS[name](mesh, "uneven")
        for schedule in program.schedules:
            exe = axe.compile(program.schedule(schedule), target="cuda", work_dir=None)
            with axe.launch(mesh, engine="cuda", gpus=(0,) * mesh.size, processes=False) as workers:
                arrays = program.inputs(np.random.default_rng())
                try:
                    outputs = exe.run(workers, *arrays)
                except WorkerError as error:
                    if "axe.fork" not in str(error):
                        raise
                    print(f"{name} {schedule}: left out, its kernel waits for a peer's", flush=True)
                    continue
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                error_found = program.error(outputs, program.reference(*arrays))
                fault = "" if error_found <= program.tolerance else f"the error is {error_found:.2e}"
                say(f"{name} {schedule}", fault)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs (tvm-axe programs), kernels (tvm-axe kernels), words")
    parser.add_argument("--tool", choices=TOOLS, default="memcheck")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return int(inside(options.names) > 0)
    found = tool()
    if found is None:
        print("sanitize: there is no compute-sanitizer; it comes with CUDA: set PATH or CUDA_HOME", file=sys.stderr)
        return 1
    command = [found, "--tool", options.tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    command += ["--report-api-errors", "no"] if options.tool == "memcheck" else []
    command += [sys.executable, str(Path(__file__)), "--inside", *options.names]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(ran.stdout, end="")
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", ran.stdout)
    if summary is None:
        print(f"{options.tool}: no verdict, the exit status is {ran.returncode}")
        return 1
    errors = int(next(group for group in summary.groups() if group is not None))
    print(f"{options.tool}: {errors} errors; {'clean' if errors == ran.returncode == 0 else 'not clean'}")
    return int(errors > 0 or ran.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
