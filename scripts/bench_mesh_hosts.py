"""Collectives between two "hosts" of one machine, beside NCCL's alone, whose GPUs don't see each other.

Ours is a job of ranks, some of which are taken for a host (`TVM_AXE_RANKS_PER_HOST`), theirs PyTorch's with NCCL, and
peer access is switched off in NCCL for both (`NCCL_P2P_DISABLE`), so that bytes go through the machine's memory. Runs
of one collective and of several, one behind the other, are measured by the clock of rank 0, between meetings of all:
ours call a program of so many, theirs are told as many and wait for the stream. The difference over how many more there
are is the time of one. So what it takes to call a program counts on neither side; it is printed. The sides take turns;
medians count.

With a GPU to a host, the mesh is `tp=2`. With two (`--per-host 2`) it is `dp=2,tp=2`, along `dp`, both groups at once,
and `tp=4`, an axis that has two devices on each host.

Results are checked first. Run `python scripts/bench_mesh_hosts.py [--per-host N] [--sizes MIB ...] [--rounds N]
[--reps N] [--json]` where so many GPUs are. `--engine ranks` runs our side alone, on CPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

COLLECTIVES = ("all_reduce", "all_gather")
FEW, MANY = 1, 9
"""Collectives of a run."""
WARMUP = 3
HOSTS = 2


class Form(NamedTuple):
    """A mesh over the hosts, and the axis that collectives go along."""

    mesh: dict[str, int]
    axis: str

    @property
    def ranks(self) -> int:
        """How many devices there are."""
        return math.prod(self.mesh.values())

    def group(self, rank: int) -> list[int]:
        """The ranks that a rank does collectives with, in the order of the axis."""
        numbers = np.arange(self.ranks).reshape(tuple(self.mesh.values()))
        along = list(self.mesh).index(self.axis)
        rows = np.moveaxis(numbers, along, -1).reshape(-1, self.mesh[self.axis])
        return next(list(map(int, row)) for row in rows if rank in row)

    def __str__(self) -> str:
        return ",".join(f"{axis}={extent}" for axis, extent in self.mesh.items()) + f" along {self.axis}"


def forms(per_host: int) -> list[Form]:
    """The meshes of two hosts of so many GPUs."""
    if per_host == 1:
        return [Form({"tp": HOSTS}, "tp")]
    return [Form({"dp": HOSTS, "tp": per_host}, "dp"), Form({"tp": HOSTS * per_host}, "tp")]


# ---- A rank of either side -------------------------------------------------------------------------------------------


def ours(engine: str, form: Form) -> None:
    """Be a rank of ours: rank 0 answers what it is asked, the others serve."""
    import tvm_axe as axe
    from tvm_axe.collective.measuring import chain
    from tvm_axe.collective.plan import VIEWS
    from tvm_axe.collective.tensor import SLAB
    from tvm_axe.layout import Mesh
    from tvm_axe.machines import resolve_target

    axis, parts = form.axis, form.mesh[form.axis]
    with axe.launch(Mesh(form.mesh), engine=engine) as workers:

        def taken(name: str, nbytes: int, reps: int) -> dict[int, list[float]]:
            chains = {times: chain(name, nbytes, axis, parts, times) for times in (FEW, MANY)}
            slabs = chains[FEW].source, chains[FEW].target
            source, target = (workers.mesh_tensor(slab, "float32") for slab in slabs)
            rng = np.random.default_rng()
            given = [rng.integers(-99, 99, slabs[0]).astype("float32") for _ in range(form.ranks)]
            for rank, array in enumerate(given):
                source.slab(rank)[...] = array
            arguments = [(each, axis if is_view else SLAB) for each, is_view in zip((source, target), VIEWS[name])]
            found = dict[int, list[float]]()
            for times, made in chains.items():
                program = workers.load(made.module, resolve_target(workers.target))
                for rank in range(form.ranks):
                    target.slab(rank)[...] = np.nan
                workers.call(program, arguments)
                for rank in range(form.ranks):
                    group = [given[other] for other in form.group(rank)]
                    wanted = sum(group) if name == "all_reduce" else np.concatenate(group)
                    if not np.array_equal(target.slab(rank), wanted):
                        raise RuntimeError(f"{name} of {nbytes} bytes: rank {rank} has other numbers")
                found[times] = timed(lambda program=program: workers.call(program, arguments), reps)
                workers.free(program)
            for item in (source, target):
                workers.free(item)
            return found

        answering(taken)


def theirs(form: Form) -> None:
    """Be a rank of theirs.

    Each reads what all are asked: one that waited for it by NCCL would keep its GPU from ours meanwhile.
    """
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    one = torch.ones(1, device=device)
    groups = {tuple(form.group(each)) for each in range(form.ranks)}
    made = {ranks: dist.new_group(list(ranks)) for ranks in sorted(groups)}  # by all, each
    group = made[tuple(form.group(rank))]

    def taken(name: str, nbytes: int, reps: int) -> dict[int, list[float]]:
        whole = torch.randn(nbytes // 4, device=device)
        part = torch.randn(nbytes // 4 // form.mesh[form.axis], device=device)

        def run(times: int) -> None:
            for _ in range(times):
                if name == "all_reduce":
                    dist.all_reduce(whole, group=group)
                else:
                    dist.all_gather_into_tensor(whole, part, group=group)
            torch.cuda.synchronize()

        def meet() -> None:
            dist.all_reduce(one)
            torch.cuda.synchronize()

        return {times: timed(lambda times=times: run(times), reps, meet) for times in (FEW, MANY)}

    answering(taken)
    dist.destroy_process_group()


def timed(run: Callable[[], object], reps: int, meet: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds of runs, each behind a meeting."""
    found = []
    for turn in range(-WARMUP, reps):
        meet()
        start = time.perf_counter()
        run()
        found += [time.perf_counter() - start] if turn >= 0 else []
    return found


def answering(taken: Callable[[str, int, int], dict[int, list[float]]]) -> None:
    """Answer what comes on the standard input, a line of JSON each, until it ends."""
    for line in sys.stdin:
        print(json.dumps(taken(*json.loads(line))), flush=True)


# ---- Both ------------------------------------------------------------------------------------------------------------


class Job:
    """The ranks of a side, of which rank 0 is asked for times."""

    def __init__(self, side: str, engine: str, per_host: int, number: int) -> None:
        from bench_mesh_pairs import free_port  # here, as it imports what their ranks shall not

        ranks = HOSTS * per_host
        told = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        told |= {"TVM_AXE_RANKS_PER_HOST": str(per_host), "NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
        command = [sys.executable, __file__, "--side", side, "--engine", engine]
        command += ["--per-host", str(per_host), "--form", str(number)]
        self.ranks = [
            subprocess.Popen(
                command,
                env=os.environ | told | _place(side, rank, per_host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(ranks)
        ]

    def times(self, name: str, nbytes: int, reps: int) -> dict[int, list[float]]:
        """Seconds of so many runs, by how many collectives each has."""
        for process in self.ranks:
            print(json.dumps([name, nbytes, reps]), file=process.stdin, flush=True)
        line = self.ranks[0].stdout.readline()
        if not line:
            raise RuntimeError(f"rank 0 ended with {self.ranks[0].wait()}")
        return {int(times): seconds for times, seconds in json.loads(line).items()}

    def close(self) -> None:
        """End the ranks."""
        for process in self.ranks:
            process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _place(side: str, rank: int, per_host: int) -> dict[str, str]:
    """Where a rank is: for PyTorch all are of one host, on which each has a GPU."""
    local, count = (rank % per_host, per_host) if side == "ours" else (rank, HOSTS * per_host)
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(count)}


def measured(jobs: dict[str, Job], form: Form, name: str, nbytes: int, rounds: int, reps: int) -> dict[str, Any]:
    """A row: both sides in turns."""
    taken: dict[str, list[float]] = {side: [] for side in jobs}
    for _ in range(rounds):
        for side, job in jobs.items():
            found = job.times(name, nbytes, reps)
            one = statistics.median(found[FEW])
            taken[side] += [(seconds - one) / (MANY - FEW) for seconds in found[MANY]]
            print(f"  {side:<7} {1e3 * one:9.4f} ms with a call", flush=True)
    medians = {side: 1e3 * statistics.median(seconds) for side, seconds in taken.items()}
    for side, seconds in taken.items():
        print(
            f"  {side:<7} {medians[side]:9.4f} ms  ({1e3 * min(seconds):.4f} to {1e3 * max(seconds):.4f})", flush=True
        )
    peer_ms = medians.get("theirs")
    return {
        "name": f"{name} between hosts, {form}, {nbytes >> 20} MiB",
        "ours_ms": medians["ours"],
        "peer": None if peer_ms is None else "NCCL",
        "peer_ms": peer_ms,
        "ratio": None if peer_ms is None else peer_ms / medians["ours"],
    }


def refusal(per_host: int) -> str | None:
    """Why nothing can be measured here, if so."""
    from tvm_axe.collective.cuda import driver
    from tvm_axe.errors import InputError

    try:
        gpus = driver.gpus()
        import torch  # noqa: F401, asks whether it is there
    except (InputError, ImportError) as error:
        return str(error)
    if gpus >= HOSTS * per_host:
        return None
    return f"this process sees {gpus} GPU{'s' * (gpus != 1)}, and each of {HOSTS} hosts is to have {per_host}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-host", type=int, default=1, choices=[1, 2], help="GPUs of each host")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64], metavar="MIB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--engine", default="cuda", choices=["cuda", "ranks"])
    parser.add_argument("--json", action="store_true", help="print one object at the end")
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--form", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.side is not None:
        form = forms(args.per_host)[args.form]
        ours(args.engine, form) if args.side == "ours" else theirs(form)
        return 0
    why = refusal(args.per_host) if args.engine == "cuda" else None
    if why is not None:
        print(f"bench_mesh_hosts: nothing is measured: {why}; --engine ranks tries our side on CPUs", file=sys.stderr)
        return 1
    rows = []
    for number, form in enumerate(forms(args.per_host)):
        jobs: dict[str, Job] = {}
        try:
            for side in ("ours", "theirs") if args.engine == "cuda" else ("ours",):
                jobs[side] = Job(side, args.engine, args.per_host, number)
            for name in COLLECTIVES:
                for size in args.sizes:
                    print(f"{name}, {form}, {size} MiB")
                    rows.append(measured(jobs, form, name, size << 20, args.rounds, args.reps))
        finally:
            for job in jobs.values():
                job.close()
    if args.json:
        print(json.dumps({"engine": args.engine, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
