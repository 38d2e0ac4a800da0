"""Collectives between two "hosts" of a GPU each, beside NCCL's alone: on one machine, whose GPUs don't see each other.

Ours is a job of two ranks that takes each for a host (`TVM_AXE_RANKS_PER_HOST`), theirs PyTorch's with NCCL, and peer
access is switched off in NCCL for both (`NCCL_P2P_DISABLE`), so that bytes go through the machine's memory. A time is
that of a collective between meetings of both ranks, by the clock of rank 0, as a program on a mesh has it: ours meets
by messages, theirs by an all-reduce of one number and a wait for the stream. The sides take turns; medians count.

Results are checked first. Run `python scripts/bench_mesh_hosts.py [--sizes MIB ...] [--rounds N] [--reps N] [--json]`
where two GPUs are. `--engine ranks` runs our side alone, on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

COLLECTIVES = ("all_reduce", "all_gather")
WARMUP = 3
HOSTS = 2

# ---- A rank of either side -------------------------------------------------------------------------------------------


def ours(engine: str, answer: Callable[[Callable[[str, int, int], list[float]]], None]) -> None:
    """Be a rank of ours: rank 0 answers what it is asked, the other serves."""
    import tvm_axe as axe
    from tvm_axe.collective.measuring import chain
    from tvm_axe.collective.plan import VIEWS
    from tvm_axe.collective.tensor import SLAB
    from tvm_axe.layout import Mesh
    from tvm_axe.machines import resolve_target

    with axe.launch(Mesh({"tp": HOSTS}), engine=engine) as workers:

        def taken(name: str, nbytes: int, reps: int) -> list[float]:
            made = chain(name, nbytes, "tp", HOSTS, 1)
            source, target = (workers.mesh_tensor(slab, "float32") for slab in (made.source, made.target))
            rng = np.random.default_rng()
            given = [rng.integers(-99, 99, made.source).astype("float32") for _ in range(HOSTS)]
            for rank, array in enumerate(given):
                source.slab(rank)[...], target.slab(rank)[...] = array, np.nan
            wanted = sum(given) if name == "all_reduce" else np.concatenate(given)
            program = workers.load(made.module, resolve_target(workers.target))
            arguments = [(each, "tp" if is_view else SLAB) for each, is_view in zip((source, target), VIEWS[name])]
            workers.call(program, arguments)
            for rank in range(HOSTS):
                if not np.array_equal(target.slab(rank), wanted):
                    raise RuntimeError(f"{name} of {nbytes} bytes: rank {rank} has other numbers")
            found = []
            for turn in range(-WARMUP, reps):
                start = time.perf_counter()
                workers.call(program, arguments)
                found += [time.perf_counter() - start] if turn >= 0 else []
            for item in (program, source, target):
                workers.free(item)
            return found

        answer(taken)


def theirs(answer: Callable[[Callable[[str, int, int], list[float]]], None]) -> None:
    """Be a rank of theirs: both do what rank 0 is asked."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    one = torch.ones(1, device=device)

    def taken(name: str, nbytes: int, reps: int) -> list[float]:
        told = [COLLECTIVES.index(name), nbytes, reps]
        dist.broadcast(torch.tensor(told, device=device), 0)
        return both(name, nbytes, reps)

    def both(name: str, nbytes: int, reps: int) -> list[float]:
        whole = torch.randn(nbytes // 4, device=device)
        part = torch.randn(nbytes // 4 // HOSTS, device=device)
        found = []
        for turn in range(-WARMUP, reps):
            dist.all_reduce(one)
            torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(whole) if name == "all_reduce" else dist.all_gather_into_tensor(whole, part)
            dist.all_reduce(one)
            torch.cuda.synchronize()
            found += [time.perf_counter() - start] if turn >= 0 else []
        return found

    if rank == 0:
        answer(taken)
        dist.broadcast(torch.tensor([-1, 0, 0], device=device), 0)
        return
    told = torch.empty(3, dtype=torch.int64, device=device)
    while dist.broadcast(told, 0) is None and int(told[0]) >= 0:
        both(COLLECTIVES[int(told[0])], int(told[1]), int(told[2]))


def answering(taken: Callable[[str, int, int], list[float]]) -> None:
    """Answer what comes on the standard input, a line of JSON each, until it ends."""
    for line in sys.stdin:
        print(json.dumps(taken(*json.loads(line))), flush=True)


# ---- Both ------------------------------------------------------------------------------------------------------------


class Job:
    """The ranks of a side, of which rank 0 is asked for times."""

    def __init__(self, side: str, engine: str) -> None:
        from bench_mesh_pairs import free_port  # here, as it imports what their ranks shall not

        told = {"WORLD_SIZE": str(HOSTS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        told |= {"TVM_AXE_RANKS_PER_HOST": "1", "NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
        command = [sys.executable, __file__, "--side", side, "--engine", engine]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # What the runtime is told of GPUs holds for a process, so each rank of ours sees the one that it is to have.
        self.ranks = [
            subprocess.Popen(command, env=os.environ | told | _own_gpu(side, rank), **(pipes if rank == 0 else {}))  # type: ignore[call-overload]
            for rank in range(HOSTS)
        ]

    def times(self, name: str, nbytes: int, reps: int) -> list[float]:
        """Seconds of so many runs."""
        first = self.ranks[0]
        print(json.dumps([name, nbytes, reps]), file=first.stdin, flush=True)
        line = first.stdout.readline()
        if not line:
            raise RuntimeError(f"rank 0 ended with {first.wait()}")
        return [float(each) for each in json.loads(line)]

    def close(self) -> None:
        """End the ranks."""
        self.ranks[0].stdin.close()
        for process in self.ranks:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _own_gpu(side: str, rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": "0" if side == "ours" else str(rank), "LOCAL_WORLD_SIZE": "1"} | (
        {"CUDA_VISIBLE_DEVICES": str(rank)} if side == "ours" else {}
    )


def measured(jobs: dict[str, Job], name: str, nbytes: int, rounds: int, reps: int) -> dict[str, Any]:
    """A row: both sides in turns."""
    taken: dict[str, list[float]] = {side: [] for side in jobs}
    for _ in range(rounds):
        for side, job in jobs.items():
            taken[side] += job.times(name, nbytes, reps)
    medians = {side: 1e3 * statistics.median(seconds) for side, seconds in taken.items()}
    for side, seconds in taken.items():
        print(
            f"  {side:<7} {medians[side]:9.4f} ms  ({1e3 * min(seconds):.4f} to {1e3 * max(seconds):.4f})", flush=True
        )
    peer_ms = medians.get("theirs")
    return {
        "name": f"{name} between hosts, {nbytes >> 20} MiB",
        "ours_ms": medians["ours"],
        "peer": None if peer_ms is None else "NCCL",
        "peer_ms": peer_ms,
        "ratio": None if peer_ms is None else peer_ms / medians["ours"],
    }


def refusal() -> str | None:
    """Why nothing can be measured here, if so."""
    from tvm_axe.collective.cuda import driver
    from tvm_axe.errors import InputError

    try:
        gpus = driver.gpus()
        import torch  # noqa: F401, asks whether it is there
    except (InputError, ImportError) as error:
        return str(error)
    return None if gpus >= HOSTS else f"this process sees {gpus} GPU{'s' * (gpus != 1)}, and each host is to have one"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64], metavar="MIB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--engine", default="cuda", choices=["cuda", "ranks"])
    parser.add_argument("--json", action="store_true", help="print one object at the end")
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.side == "ours":
        ours(args.engine, answering)
        return 0
    if args.side == "theirs":
        theirs(answering)
        return 0
    why = refusal() if args.engine == "cuda" else None
    if why is not None:
        print(f"bench_mesh_hosts: nothing is measured: {why}; --engine ranks tries our side on CPUs", file=sys.stderr)
        return 1
    jobs: dict[str, Job] = {}
    rows = []
    try:
        for side in ("ours", "theirs") if args.engine == "cuda" else ("ours",):
            jobs[side] = Job(side, args.engine)
        for name in COLLECTIVES:
            for size in args.sizes:
                print(f"{name}, {size} MiB")
                rows.append(measured(jobs, name, size << 20, args.rounds, args.reps))
    finally:
        for job in jobs.values():
            job.close()
    if args.json:
        print(json.dumps({"engine": args.engine, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
