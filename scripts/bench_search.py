"""What the search finds beside the schedules that each program is known by, on two devices an axis.

    python scripts/bench_search.py [--programs adam,mlp] [--size bench] [--engine processes] [--json]

For each program the search starts from the function, where it can share that by itself, else from the first known
schedule. What it finds and the known schedules then run in turns; a figure is the median of its runs, the peer is the
fastest known schedule, ratio = peer_ms / ours_ms. Local kernels are as they are recorded in
tuning_logs/local, or untuned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile

import numpy as np

import tvm_axe as axe
from tvm_axe.executable import Executable
from tvm_axe.meta import TuneResult
from tvm_axe.programs import PROGRAMS, DistributedProgram

ROUNDS, REPEAT = 5, 4


def kept(known: dict[str, Executable]) -> set[str]:
    """The outputs that some known schedule leaves sharded."""
    return {name for exe in known.values() for name in exe.outputs if exe.layouts[name].R == ()}


def found(
    program: DistributedProgram, known: dict[str, Executable], arrays: tuple[np.ndarray, ...], engine: str
) -> TuneResult:
    """What the search finds."""
    with tempfile.TemporaryDirectory() as work_dir:
        options = {"keep": kept(known), "inputs": arrays, "engine": engine, "work_dir": work_dir, "progress": False}
        try:
            return axe.search(program.func, program.mesh, **options)
        except (axe.ScheduleError, axe.LowerError):
            return axe.search(program.schedule(next(iter(program.schedules))), **options)


def bench(name: str, size: str, engine: str) -> dict[str, object]:
    """The row of one program."""
    builder = PROGRAMS[name]
    program = builder(axe.Mesh(dict.fromkeys(builder.axes, 2)), size)
    arrays = program.inputs(np.random.default_rng(0))
    known = {schedule: axe.compile(program.schedule(schedule)) for schedule in program.schedules}
    result = found(program, known, arrays, engine)
    candidates = {"ours": axe.compile(result.best.sch), **known}
    expected = program.reference(*arrays)
    seconds: dict[str, list[float]] = {key: [] for key in candidates}
    with axe.launch(program.mesh, engine=engine) as workers:
        for key, exe in candidates.items():
            outputs = exe.run(workers, *arrays)
            error = program.error(outputs if isinstance(outputs, tuple) else (outputs,), expected)
            if not error <= program.tolerance:
                raise SystemExit(f"{name}, {key}: the relative error is {error:.1e}")
        for _ in range(ROUNDS):
            for key, exe in candidates.items():
                seconds[key] += exe.time(workers, *arrays, repeat=REPEAT, warmup=1)
    ms = {key: 1e3 * statistics.median(times) for key, times in seconds.items()}
    ours = ms.pop("ours")
    peer = min(ms, key=lambda key: ms[key])
    schedule = f"{result.best.notation} of {len(result.schedules)}"
    return {"name": f"{name}: {schedule}", "ours_ms": ours, "peer": peer, "peer_ms": ms[peer], "ratio": ms[peer] / ours}


def main() -> None:
    """Run and print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--size", default="bench")
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for name in args.programs.split(","):
        print(f"bench_search: {name}", file=sys.stderr, flush=True)
        rows.append(bench(name, args.size, args.engine))
        if not args.json:
            text, ours, peer, peer_ms, ratio = rows[-1].values()
            print(f"{text:<60} {ours:9.3f} ms  {peer:<26} {peer_ms:9.3f} ms  {ratio:.2f}", flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
