"""Time the second start of a program beside its first: a fresh process each, the same cache folder.

    python scripts/bench_starts.py [--only TEXT] [--layers 4] [--turns 3] [--json]

Each row is a program from the start of Python to its first result: a function and a decoder, on one CPU and on two
workers; and the decoder compiled for a GPU (sm_90a), if there is a compiler for CUDA source, which then isn't run. The
peer is the first start, in an empty folder; ours is the second. What counts is the time that the process and all that
it started computed, in seconds, which other programs on the machine don't disturb; the wall time stands beside it.
Medians over the turns. The phases are those of the second start, and in brackets of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[1] / "tests" / "relax" / "shared_models.py"
NAMES = ("function", "function, 2 workers", "model", "model, 2 workers", "model, sm_90a")


def computed() -> float:
    """Seconds that this process and all below it have computed."""
    processes: dict[int, tuple[int, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        processes[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    found = {os.getpid()}
    while more := {pid for pid, (parent, _) in processes.items() if parent in found} - found:
        found |= more
    return sum(processes[pid][1] for pid in found)


def start(name: str, layers: int) -> dict[str, float]:
    """Start a program in this process: the seconds of each phase, computed."""
    phases: dict[str, float] = {}
    last = 0.0  # Python's own start counts

    def done(phase: str) -> None:
        nonlocal last
        now = computed()
        phases[phase], last = now - last, now

    import logging
    import runpy

    import numpy as np
    import tvm  # noqa: F401  (it is the compiler's share of the imports)

    done("imports of the compiler")
    import tvm_axe as axe

    logging.getLogger("tvm_axe").setLevel(logging.ERROR)
    axe.compile, axe.launch  # noqa: B018  (their homes are imported)
    done("imports of the package")
    mesh = axe.Mesh({"dp": 2}) if name.endswith("workers") else None
    if name.startswith("function"):
        from tvm_axe.programs import PROGRAMS

        program = PROGRAMS["adam"](axe.Mesh({"dp": 2}))
        func = program.schedule([*program.schedules][-1]) if mesh else program.func
        done("the program")
        exe: Any = axe.compile(func, work_dir=None)
        arrays = [np.ones([*map(int, each.shape)], each.dtype) for each in exe._inputs()]
    else:
        made = runpy.run_path(str(MODELS))
        model = made["decoder"](layers, d=512, heads=8, kv=4, f=1536, tokens=64, vocab=1000)
        done("the program")
        exe = axe.compile(model, mesh=mesh, target="cuda:sm_90a" if name.endswith("sm_90a") else "llvm", work_dir=None)
        arrays = []
    done("compile")
    if name.endswith("sm_90a"):
        return phases
    if not arrays:
        arrays = made["drawn"](model)
        done("the inputs")
    if mesh is None:
        exe(*arrays)
    else:
        with axe.launch(mesh, engine="processes") as workers:
            done("launch")
            exe.run(workers, *arrays)
            done("load, first call")
            return phases
    done("load, first call")
    return phases


def measured(name: str, layers: int, folder: str) -> dict[str, Any]:
    """A start in a process of its own."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--start", name, "--layers", str(layers)]
    environment = {**os.environ, "TVM_AXE_CACHE": folder, "TVM_AXE_KEEP": "1"}
    # Python keeps its own bytecode, as it does for whoever hasn't turned that off.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir(), f"tvm-axe-bytecode-{os.getuid()}"))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return {"phases": json.loads(done.stdout.splitlines()[-1]), "wall": time.perf_counter() - began}


def row(name: str, layers: int, turns: int) -> dict[str, Any]:
    """The first and the second start of a program."""
    starts: list[list[dict[str, Any]]] = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as folder:
            starts.append([measured(name, layers, folder) for _ in range(2)])
    first, second = ([turn[place] for turn in starts] for place in range(2))
    phases = [
        {phase: statistics.median(each["phases"][phase] for each in some) for phase in some[0]["phases"]}
        for some in (first, second)
    ]
    peer, ours = (statistics.median(sum(each["phases"].values()) for each in some) for some in (first, second))
    walls = [statistics.median(each["wall"] for each in some) for some in (first, second)]
    return {
        "name": name,
        "peer_s": peer,
        "ours_s": ours,
        "ratio": ours / peer,
        "peer_wall_s": walls[0],
        "ours_wall_s": walls[1],
        "peer_phases_s": phases[0],
        "ours_phases_s": phases[1],
    }


def can_compile_cuda() -> bool:
    """Whether there is a compiler for CUDA source; says so if there is none."""
    from tvm_axe.errors import TileError
    from tvm_axe.machines import nvcc

    try:
        nvcc.find_compiler()
    except TileError as error:
        print(f"left out: {error}", file=sys.stderr)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--layers", type=int, default=4, help="of the decoder")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(start(args.start, args.layers)))
        return
    names = [name for name in NAMES if args.only in name]
    if "model, sm_90a" in names and not can_compile_cuda():
        names.remove("model, sm_90a")
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            measured(name, 1, folder)  # bytecode
        rows.append(row(name, args.layers, args.turns))
        if not args.json:
            _print(rows[-1])
    if args.json:
        print(json.dumps({"rows": rows}))


def _print(found: dict[str, Any]) -> None:
    print(
        f"{found['name']:<20} second {found['ours_s']:6.2f} s, first {found['peer_s']:6.2f} s, ratio "
        f"{found['ratio']:.2f}; wall {found['ours_wall_s']:.2f} and {found['peer_wall_s']:.2f} s"
    )
    first = found["peer_phases_s"]
    print("  " + "; ".join(f"{phase} {s:.2f} ({first[phase]:.2f})" for phase, s in found["ours_phases_s"].items()))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
