"""CoCoNet's programs on two worker processes: what fusing and overlapping are worth.

    python scripts/bench_coconet.py [--trials 48] [--work-dir tuning_logs/local/coconet] [--json]

| row | ours | peer |
|---|---|---|
| adam | fuse(RS-C-AG), 2^24 parameters | AR-C through the same engine |
| adam beside MPI | the same | MPI's all-reduce of the gradients, then Adam in numpy, in two processes |
| mlp | ol(MM, fuse(RS-C-AG)), 4096 tokens, 3072 to 768 | MM-RS-C-AG, local kernels tuned alike |
| mlp, fused only | MM-fuse(RS-C-AG) | MM-RS-C-AG |

Results are compared with numpy's in float64 first. Then all run in turns, and each figure is the median of its runs;
MPI's, which would spin beside the others, before and after them. ratio = peer_ms / ours_ms.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tvm_axe as axe
from tvm_axe.collective import Workers
from tvm_axe.defaults import WORK_DIR
from tvm_axe.executable import Executable
from tvm_axe.meta import tune
from tvm_axe.programs import PROGRAMS, DistributedProgram

ROUNDS, REPEAT = 9, 5

_MPI = """
import json, sys, time
import numpy as np
from mpi4py import MPI
rows, width = int(sys.argv[1]), int(sys.argv[2])
shape, comm, rng = (rows, width), MPI.COMM_WORLD, np.random.default_rng(MPI.COMM_WORLD.rank)
g, p, m, v = (rng.random(shape, dtype="float32") for _ in range(4))
out, work = np.empty(shape, "float32"), np.empty(shape, "float32")
seconds = []
for _ in range(int(sys.argv[3]) + 1):
    comm.Barrier()
    start = time.perf_counter()
    comm.Allreduce(g, out)
    out *= np.float32(1 / comm.size)
    # In place and through one spare array, as one writes numpy that shall be fast.
    m *= np.float32(0.9); np.multiply(out, np.float32(0.1), out=work); m += work
    v *= np.float32(0.999); np.multiply(out, out, out=work); work *= np.float32(0.001); v += work
    np.multiply(v, np.float32(1 / (1 - 0.999)), out=work); np.sqrt(work, out=work); work += np.float32(1e-8)
    np.divide(m, work, out=work); work *= np.float32(1e-3 / (1 - 0.9)); p -= work
    comm.Barrier()
    seconds.append(time.perf_counter() - start)
seconds = comm.gather(seconds[1:])
if comm.rank == 0:
    print(json.dumps([max(each) for each in zip(*seconds)]))
"""


def mpi_adam(program: DistributedProgram) -> list[float] | None:
    """Seconds of each of some steps, of the slower process; None where there is no MPI."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    starter = str(mpiexec) if mpiexec.exists() else shutil.which("mpiexec")
    if starter is None:
        return None
    (rows, width), _ = program.reduced
    command = [starter, "-n", "2", sys.executable, "-c", _MPI, str(rows), str(width), str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        print(f"MPI failed, its row is left out: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return list(json.loads(done.stdout))


def compiled(program: DistributedProgram, name: str, trials: int, work_dir: Path) -> Executable:
    """The program under a schedule, its local kernels tuned if `trials` is not 0."""
    exe = axe.compile(program.schedule(name), work_dir=work_dir)
    if trials:
        tune(exe.module, target=exe.target, trials=trials, work_dir=work_dir, seed=0)
        exe = axe.compile(program.schedule(name), work_dir=work_dir)
    return exe


def medians(
    program: DistributedProgram, names: Sequence[str], workers: Workers, trials: int, work_dir: Path
) -> dict[str, float]:
    """Median milliseconds of each schedule, run in turns, once each result was found right."""
    arrays = program.inputs(np.random.default_rng(0))
    expected = program.reference(*arrays)
    executables = {name: compiled(program, name, trials, work_dir) for name in names}
    for name, exe in executables.items():
        outputs = exe.run(workers, *arrays)
        error = program.error(outputs if isinstance(outputs, tuple) else (outputs,), expected)
        if not error <= program.tolerance:
            raise SystemExit(f"{program.name}, {name}: the relative error is {error:.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, exe in executables.items():
            seconds[name] += exe.time(workers, *arrays, repeat=REPEAT, warmup=1)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Run all and print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=48, help="candidates for each local kernel of the MLP")
    parser.add_argument("--work-dir", type=Path, default=Path(WORK_DIR, "coconet"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []

    def row(name: str, ours: float, peer: str, peer_ms: float) -> None:
        rows.append({"name": name, "ours_ms": ours, "peer": peer, "peer_ms": peer_ms, "ratio": peer_ms / ours})

    adam = PROGRAMS["adam"](axe.Mesh({"dp": 2}), "bench")
    before = mpi_adam(adam)
    with axe.launch(adam.mesh) as workers:
        ms = medians(adam, ("AR-C", "fuse(RS-C-AG)"), workers, 0, args.work_dir)
    after = mpi_adam(adam) if before is not None else None
    row("adam fuse(RS-C-AG)", ms["fuse(RS-C-AG)"], "AR-C", ms["AR-C"])
    if before is not None and after is not None:
        row("adam fuse(RS-C-AG)", ms["fuse(RS-C-AG)"], "MPI all-reduce, numpy", 1e3 * statistics.median(before + after))
    else:
        print("no MPI here (pip install tvm-axe[mpi]); the row beside it is left out", file=sys.stderr)
    mlp = PROGRAMS["mlp"](axe.Mesh({"tp": 2}), "bench")
    names = ("MM-RS-C-AG", "MM-fuse(RS-C-AG)", "ol(MM, fuse(RS-C-AG))")
    with axe.launch(mlp.mesh) as workers:
        ms = medians(mlp, names, workers, args.trials, args.work_dir)
    for name in names[1:]:
        row(f"mlp {name}", ms[name], names[0], ms[names[0]])
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    for each in rows:
        name, ours, peer, peer_ms, ratio = each.values()
        print(f"{name:<28} {ours:8.2f} ms  {peer:<22} {peer_ms:8.2f} ms  {ratio:.2f}")


if __name__ == "__main__":
    main()
