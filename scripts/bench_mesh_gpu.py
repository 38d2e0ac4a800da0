"""What a mesh of GPUs does, row by row, beside NCCL, cuBLAS and PyTorch: collectives, norm, optimizer, pairs, experts.

Ours runs on workers of the engine, a run being a launch of a CUDA graph on each device; theirs in a process a GPU
(`bench_mesh_pairs`). Both are measured by the device's clock, the slowest device counts, the sides take turns in one
run with rests between, and medians with their ranges are printed. Ours is checked first, on fresh random data: in
float64, or exactly. Clocks, power and throttling are printed before and after each row: a run that was capped is no
figure.

Of a collective and of the norm, two graphs are measured on either side, of as many operations (20 and 60 where they are
small), and the difference over 40 is the time of one. So it counts on neither side what it takes to launch a graph and
to begin on all devices, nor, of the norm, a barrier between two runs, which take turns with two sets of flags.

Run `python scripts/bench_mesh_gpu.py [--rows PREFIX ...] [--rounds N] [--reps N] [--json]` where two GPUs are, or more.
`--engine threads` runs our side alone, at tiny sizes, on CPU workers, and `--shared` on devices that share the first
GPU: they say whether results are right, not how fast anything is. `--phases` says where the time of a small all-reduce
goes, by samples in its kernel (`bench_mesh_phases`); with `--shared` or `--devices 1` on a single GPU. `--collectives`
has one algorithm do all of ours that it is offered for, at all sizes, instead of those of the machine's table.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import bench_mesh_pairs as pairs
import bench_mesh_phases
import numpy as np

import tvm_axe as axe
from tvm_axe.collective import MeshKernel, Workers
from tvm_axe.collective.algorithms import Algorithm
from tvm_axe.collective.cuda import driver
from tvm_axe.collective.measuring import chain
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.tensor import SLAB
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh
from tvm_axe.lower import pairs as lower_pairs
from tvm_axe.machines import resolve_target
from tvm_axe.programs.moe_ragged import Extents, moe_ragged
from tvm_axe.programs.optimizers import adam_f16
from tvm_axe.programs.program import DistributedProgram
from tvm_axe.schedule import Schedule
from tvm_axe.tile.kernels import REDUCE_NORM
from tvm_axe.tile.kernels.check import judged
from tvm_axe.tile.kernels.kernel import TOLERANCE

COLUMNS, DTYPE = 8192, "bfloat16"
MODELS = {"Llama-3.1-8B": (4096, 14336), "Llama-3.1-70B": (8192, 28672), "Qwen3-32B": (5120, 25600)}  # hidden, inner
TOKENS = (128, 512, 2048, 8192)
EXPERTS = Extents(4096, 2048, 768, 128, 8)  # of Qwen3-30B-A3B, of all devices
EXPERTS_AS = "A2A-fuse(MM-C)-MM-A2A"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
FORMS = ("ours", pairs.APART, pairs.ALONE)  # of a pair
MANY = ", many"  # what the name of a graph of many ends with
WORST = 5e-2  # of an error of 16-bit types, largest over largest
SAMPLE = 256  # rows, of a program whose reference in float64 would take minutes and a hundred gigabytes

Run = Callable[[int], list[float]]
"""What gives the seconds of so many runs, each on the slowest device."""


class Row(NamedTuple):
    """A line of the table: its name, what its peers make of `kind` and `size`, and what prepares and checks ours.

    Ours may have several forms, by name, of which the one that is ``ours`` is compared. It compiles `schedules`.
    """

    name: str
    kind: str
    size: tuple[int, ...]
    ours: Callable[[Workers], Run | dict[str, Run]]
    peer: type[pairs.Peer]
    axis: str = "tp"
    schedules: Callable[[], list[Schedule]] = list


# ---- Ours ------------------------------------------------------------------------------------------------------------


def in_a_graph(nbytes: int) -> tuple[int, int]:
    """Of how many operations on messages of so many bytes the two graphs are that are compared, on either side."""
    few = max(1, min(20, int(4e7 / nbytes)))
    return few, 3 * few


def one_more(counts: tuple[int, int], few: Sequence[float], many: Sequence[float]) -> list[float]:
    """The seconds of an operation among others, from those of a graph of few and of one of many."""
    return [(more - less) / (counts[1] - counts[0]) for less, more in zip(few, many, strict=True)]


def collective(name: str, nbytes: int, workers: Workers) -> Run:
    """A collective of messages of so many bytes, each device's share of a run of many."""
    (axis,), counts = workers.mesh.names, in_a_graph(nbytes)
    parts = workers.mesh.size
    chains = [chain(name, nbytes, axis, parts, times) for times in counts]
    made = chains[0]
    source, target = (workers.mesh_tensor(slab, "float32") for slab in (made.source, made.target))
    rng = np.random.default_rng()
    given = [rng.integers(-99, 99, made.source).astype("float32") for _ in range(parts)]
    for device, array in enumerate(given):
        source.slab(device)[...] = array
        target.slab(device)[...] = np.nan
    programs = [workers.load(each.module, resolve_target(workers.target)) for each in chains]
    arguments = [(tensor, axis if is_view else SLAB) for tensor, is_view in zip((source, target), VIEWS[name])]
    workers.call(programs[0], arguments)
    for device in range(parts):
        found, whole = target.slab(device), np.zeros(made.target, "float32")
        if name == "all_reduce":
            whole = np.sum(given, axis=0)
        elif name == "all_gather":
            whole = np.concatenate(given)[: made.target[0]]
        elif name == "reduce_scatter":
            share = np.sum(given, axis=0)[device * made.target[0] :][: made.target[0]]
            found, whole = found[: len(share)], share
        else:  # the columns of a device, a row from each
            step = made.target[1]
            share = np.concatenate(given)[:, device * step : (device + 1) * step]
            found, whole = found[:, : share.shape[1]], share
        if not np.array_equal(found, whole):
            raise RuntimeError(f"{name} of {nbytes} bytes: device {device} has other numbers")
    return lambda reps: one_more(counts, *(workers.time(each, arguments, reps, 3) for each in programs))


def norm(rows: int, columns: int, dtype: str, workers: Workers) -> Run:
    """RMSNorm of an all-reduce and a residual, in one kernel; runs take turns with two sets of flags."""
    problem = {"devices": workers.mesh.size, "rows": rows, "columns": columns, "dtype": dtype}
    target = resolve_target(workers.target)
    share = REDUCE_NORM.parameters(target, problem)["share"][0]
    (program,) = REDUCE_NORM.recipe(target, problem, share=share).programs
    kernel, arrays = MeshKernel(workers, program), REDUCE_NORM.inputs(np.random.default_rng(), problem)

    def made(param: Any) -> Any:
        return workers.mesh_tensor(param.shape[1:] if param.is_mesh else param.shape, param.dtype)

    def filled(name: str) -> None:
        for device in range(workers.mesh.size):
            own = name in ("x", "flags")
            tensors[name].slab(device)[...] = np.nan if name == "out" else arrays[name][device] if own else arrays[name]

    tensors = {param.name: made(param) for param in program.params}
    others = tensors | {param.name: made(param) for param in program.params if param.name == "flags"}
    expected = REDUCE_NORM.reference(problem, arrays)

    def taken(times: int, reps: int) -> list[float]:
        found = kernel.time(*tensors.values(), repeat=reps, warmup=3, times=times, turns=[list(others.values())])
        return [seconds * times for seconds in found]

    for name in tensors:
        filled(name)
    counts = in_a_graph(rows * columns)
    for run in (lambda: kernel(*tensors.values()), lambda: taken(counts[0], 1)):
        filled("out")
        run()
        for device in range(workers.mesh.size):
            _, fault = judged({"out": tensors["out"].slab(device)}, expected, TOLERANCE[dtype])
            if fault:
                raise RuntimeError(f"norm of {rows} rows on device {device}: {fault}")
    return lambda reps: one_more(counts, *(taken(times, reps) for times in counts))


def program(made: DistributedProgram, schedule: str, workers: Workers, by_rows: bool = False) -> Run:
    """A program as one of its schedules has it; checked on `SAMPLE` rows drawn at random if it treats each alone."""
    exe = axe.compile(made.schedule(schedule), target=workers.target, work_dir=None)
    rng = np.random.default_rng()
    arrays = made.inputs(rng)
    found = exe.run(workers, *arrays)
    found = found if isinstance(found, tuple) else (found,)
    if by_rows:
        rows, columns = found[0].shape
        chosen = rng.integers(0, rows, SAMPLE)
        arrays, found = (
            tuple(each[..., chosen, :] if each.shape[-2:] == (rows, columns) else each for each in group)
            for group in (arrays, found)
        )
    error = made.error(found, made.reference(*arrays))
    if not error < WORST:
        raise RuntimeError(f"{made.name}: the error is {error:.2e}, which is beyond {WORST:.0e}")
    return lambda reps: exe.time_again(workers, repeat=reps, warmup=1)


def pair(kind: str, size: Sequence[int], workers: Workers) -> dict[str, Run]:
    """A product and the collective that it overlaps, one behind the other, and the product alone."""
    found: dict[str, Run] = {}
    errors: dict[str, float] = {}
    for form in FORMS:
        ours = pairs.Ours(kind, workers, size, form)
        errors[form] = ours.check(again=form == "ours")
        found[form] = ours.run
    print(f"  errors in float64: {pairs.said_errors(errors)}")
    return found


# ---- Theirs ----------------------------------------------------------------------------------------------------------


class Chained(pairs.Peer):
    """Operations in CUDA graphs, of as few and as many as ours."""

    def chained(self, name: str, told: Callable[[], Any], nbytes: int) -> dict[str, Callable[[], Any]]:
        """What launches either graph."""
        few, many = (captured(self.torch, told, times) for times in in_a_graph(nbytes))
        return {name: few, name + MANY: many}


class Moved(Chained):
    """NCCL's collectives of float32, captured in a CUDA graph."""

    def made(self, kind: str, size: Sequence[int]) -> dict[str, Callable[[], Any]]:
        torch, dist, n = self.torch, self.dist, self.devices
        whole = torch.randn(size[0] // 4 // n * n, device=self.device)
        part = torch.empty(len(whole) // n, device=self.device)
        other = torch.empty_like(whole)
        told = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "all_to_all": lambda: dist.all_to_all_single(other, whole),
        }[kind]
        return self.chained("NCCL", told, size[0])


class Normed(Chained):
    """NCCL's all-reduce, PyTorch's sum and RMSNorm, captured in a CUDA graph."""

    def made(self, kind: str, size: Sequence[int]) -> dict[str, Callable[[], Any]]:
        torch, dist = self.torch, self.dist
        x, residual = (torch.randn(*size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        weight = torch.ones(size[1], device=self.device, dtype=torch.bfloat16)

        def told() -> Any:
            dist.all_reduce(x)
            return torch.nn.functional.rms_norm(x + residual, (size[1],), weight)

        return self.chained("NCCL and PyTorch", told, size[0] * size[1])


class Stepped(pairs.Peer):
    """NCCL's all-reduce of f16 gradients, and PyTorch's fused Adam."""

    def made(self, kind: str, size: Sequence[int]) -> dict[str, Callable[[], Any]]:
        torch, dist = self.torch, self.dist
        p = torch.randn(size[0], device=self.device).requires_grad_()
        half = torch.randn(size[0], device=self.device).to(torch.float16)
        p.grad = torch.empty_like(p)
        adam = torch.optim.Adam([p], fused=True)

        def told() -> None:
            dist.all_reduce(half)
            p.grad.copy_(half)
            adam.step()
            half.copy_(p.detach())

        return {"NCCL and PyTorch's Adam": told}


class Routed(pairs.Peer):
    """An all-to-all of tokens each way, as many as the routing says, and PyTorch's grouped products between."""

    def made(self, kind: str, size: Sequence[int]) -> dict[str, Callable[[], Any]]:
        torch, dist, n = self.torch, self.dist, self.devices
        tokens, hidden, inner, experts, choices = size
        w1 = torch.randn(experts, hidden, inner, device=self.device, dtype=torch.bfloat16) * hidden**-0.5
        w2 = torch.randn(experts, inner, hidden, device=self.device, dtype=torch.bfloat16) * inner**-0.5
        x = torch.randn(tokens, hidden, device=self.device, dtype=torch.bfloat16)
        chosen = torch.rand(tokens, n * experts, device=self.device).argsort(1)[:, :choices].reshape(-1)
        order = chosen.argsort()
        counts = torch.bincount(chosen, minlength=n * experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, got = (each.reshape(n, experts).sum(1).tolist() for each in (counts, theirs))
        by_expert = theirs.reshape(n, experts)
        whose = torch.arange(experts, device=self.device).repeat(n).repeat_interleave(by_expert.reshape(-1))
        sort = whose.argsort(stable=True)
        back, ends = sort.argsort(), by_expert.sum(0).cumsum(0).to(torch.int32)
        gate = torch.rand(tokens, choices, device=self.device, dtype=torch.bfloat16)

        def told() -> Any:
            rows = x[order // choices]
            there = torch.empty(sum(got), hidden, device=self.device, dtype=torch.bfloat16)
            dist.all_to_all_single(there, rows, got, sent)
            up = torch.relu(torch._grouped_mm(there[sort], w1, offs=ends))
            down = torch._grouped_mm(up, w2, offs=ends)[back]
            dist.all_to_all_single(rows, down, sent, got)
            home = torch.empty_like(rows)
            home[order] = rows
            return (home.reshape(tokens, choices, hidden) * gate[..., None]).sum(1)

        return {"NCCL and grouped_mm": told}


def captured(torch: Any, told: Callable[[], Any], times: int) -> Callable[[], Any]:
    """What launches a CUDA graph of so many operations, one behind the other."""
    for _ in range(3):
        told()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            told()
    return lambda: graph.replay()


# ---- The table -------------------------------------------------------------------------------------------------------


def table(devices: int, tiny: bool, on_gpus: bool = False) -> list[Row]:
    """The rows: of the sizes that are published, or of tiny ones, which are less tiny `on_gpus`."""
    found = []
    columns, dtype = (64, "float32") if tiny else (COLUMNS, DTYPE)
    large = [4096] if tiny else [4 << 20, 16 << 20, 64 << 20, 256 << 20]
    for name in COLLECTIVES:
        rows_of = (1, 8, 16, 32, 64, 128) if name == "all_reduce" else (8, 64)
        for nbytes in (*(rows * columns * (4 if tiny else 2) for rows in rows_of), *large):
            run = lambda workers, name=name, nbytes=nbytes: collective(name, nbytes, workers)  # noqa: E731
            found.append(Row(f"{name}, {nbytes:,} bytes", name, (nbytes,), run, Moved))
    for rows in (1, 8, 64):
        size = (rows, columns)
        run = lambda workers, size=size: norm(*size, dtype, workers)  # noqa: E731
        found.append(Row(f"norm of all-reduce and residual, {rows} x {columns} {dtype}", "norm", size, run, Normed))
    bucket = "test" if tiny else "large"
    mesh = Mesh({"dp": devices})
    step = lambda workers: program(adam_f16(mesh, bucket), "fuse(RS-C-AG)", workers, by_rows=True)  # noqa: E731
    schedules = lambda: [adam_f16(mesh, bucket).schedule("fuse(RS-C-AG)")]  # noqa: E731
    found.append(Row("fuse(RS-C-AG) of adam_f16", "adam", (1 << 28,), step, Stepped, "dp", schedules))
    side = 256 * devices if on_gpus else 32
    shapes = {"tiny": (side, 2 * side)} if tiny else MODELS
    for model, (hidden, inner) in shapes.items():
        for tokens in (side,) if tiny else TOKENS:
            for kind in pairs.KINDS:
                # Rows of the hidden width are gathered, and summed; the weights of the inner width are shared.
                found.append(product(f"{kind} of {model}, {tokens} tokens", kind, (tokens, hidden, inner), devices))
    if not tiny:
        for kind in pairs.KINDS:
            found.append(product(f"{kind}, {' x '.join(map(str, pairs.SIZE))}", kind, pairs.SIZE, devices))
    extents = Extents(4, 8, 6, 2, 2) if tiny else EXPERTS
    if not tiny:
        extents = extents._replace(tokens=extents.tokens // devices, experts=extents.experts // devices)
    experts = Mesh({"ep": devices})
    run = lambda workers: program(moe_ragged(experts, extents, dtype), EXPERTS_AS, workers)  # noqa: E731
    schedules = lambda: [moe_ragged(experts, extents, dtype).schedule(EXPERTS_AS)]  # noqa: E731
    found.append(Row("dispatch, experts, combine", "experts", extents, run, Routed, "ep", schedules))
    return found


def product(name: str, kind: str, size: Sequence[int], devices: int) -> Row:
    """The row of a product and its collective."""
    mesh = Mesh({"tp": devices})
    schedules = lambda: [pairs.scheduled(kind, mesh, size, form) for form in FORMS]  # noqa: E731
    return Row(name, kind, tuple(size), lambda workers: pair(kind, size, workers), pairs.Products, schedules=schedules)


def compile_all(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Compile what the rows run on GPUs, in as many processes as there are cores: they find it on disk."""
    wanted = [row.name for row in rows if row.schedules is not list]
    if args.engine != "cuda" or args.shared or not wanted:
        return
    with multiprocessing.get_context("spawn").Pool(max(1, min(os.cpu_count() or 1, len(wanted)))) as pool:
        pool.starmap(compile_row, [(args.devices, name) for name in wanted], chunksize=1)


def compile_row(devices: int, name: str) -> None:
    """Compile a row of the published sizes."""
    (row,) = (row for row in table(devices, tiny=False) if row.name == name)
    for schedule in row.schedules():
        axe.compile(schedule, target=resolve_target("cuda"), work_dir=None)


def power() -> str:
    """What GPUs run at now, by nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi: clocks, power and throttling are not known"
    asked = "index,clocks.sm,power.draw,temperature.gpu,clocks_throttle_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    return "; ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines())


def measured(row: Row, peers: pairs.Theirs | None, args: argparse.Namespace) -> dict[str, Any]:
    """A row: ours and theirs in turns; ours alone without `peers`."""
    engine, devices, rounds, reps = args.engine, args.devices, args.rounds, args.reps
    print(f"{row.name}\n  before: {power()}" if engine == "cuda" else row.name)
    options = {**options_of(args), **({"gpus": (0,) * devices} if args.shared else {})}
    if peers is not None:
        peers.make(row.peer, row.kind, row.size)
    with axe.launch(Mesh({row.axis: devices}), engine=engine, **options) as workers:
        made = row.ours(workers)
        if peers is not None and peers.errors:
            print(f"  errors in float64: {pairs.said_errors(peers.errors)}")
        ours = made if isinstance(made, dict) else {"ours": made}
        names = [name for name in (peers.names if peers else ()) if not name.endswith(MANY)]
        taken: dict[str, list[float]] = {name: [] for name in [*ours, *names]}
        for turn in range(rounds + 1):  # one to warm up
            for name, seconds in taken.items():
                found = ours[name](reps) if name in ours or peers is None else rival(peers, name, row, reps)
                seconds += found if turn else []
    medians = {name: 1e6 * statistics.median(seconds) for name, seconds in taken.items()}
    for name, seconds in taken.items():
        span = f"({1e6 * min(seconds):.2f} to {1e6 * max(seconds):.2f})"
        print(f"  {name:<27} {medians[name]:10.2f} us  {span}", flush=True)
    if engine == "cuda":
        print(f"  after: {power()}")
    rivals = {name: medians[name] for name in names if name != "cuBLAS alone"}
    peer = min(rivals, key=lambda name: rivals[name]) if rivals else None
    return {
        "name": row.name,
        "ours_us": medians["ours"],
        "peer": peer,
        "peer_us": None if peer is None else rivals[peer],
        "ratio": None if peer is None else rivals[peer] / medians["ours"],
        "all_us": medians,
    }


def rival(peers: pairs.Theirs, name: str, row: Row, reps: int) -> list[float]:
    """Seconds of theirs, measured as ours are."""
    found = peers.run(name, reps)
    if name + MANY not in peers.names:
        return found
    return one_more(in_a_graph(math.prod(row.size)), found, peers.run(name + MANY, reps))


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """What launches are told besides the mesh."""
    return {} if args.collectives is None else {"collectives": args.collectives}


def refusal(shared: bool) -> str | None:
    """Why nothing can be measured here, if so."""
    try:
        devices = driver.gpus()
        if shared and devices:
            return None
        import torch  # noqa: F401, asks whether it is there
    except (InputError, ImportError) as error:
        return str(error)
    return (
        None
        if devices > 1
        else f"this process sees {devices} GPU{'s' * (devices != 1)}, and the rows are for two or more"
    )


def of_phases(args: argparse.Namespace) -> int:
    """Where the time of small all-reduces goes."""
    wanted = 1 if args.shared else args.devices
    try:
        gpus = driver.gpus()
        why = None if gpus >= wanted else f"this process sees {gpus} GPU{'s' * (gpus != 1)} of {wanted}"
    except InputError as error:
        why = str(error)
    if why is not None:
        print(f"bench_mesh_gpu: no phases are measured: {why}", file=sys.stderr)
        return 1
    print(f"before: {power()}")
    found = bench_mesh_phases.measured(args.devices, args.shared, collective, options_of(args))
    print(f"after: {power()}")
    if args.json:
        print(json.dumps({"devices": args.devices, "shared": args.shared, "phases": found}))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[""], metavar="PREFIX", help="of the names of rows (default: all)")
    parser.add_argument("--engine", default="cuda", choices=["cuda", "threads", "processes"])
    parser.add_argument("--shared", action="store_true", help="devices share the first GPU; ours alone, tiny sizes")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--collectives", choices=list(map(str, Algorithm)), help="what does ours on GPUs, if it can")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--phases", action="store_true", help="say where a small all-reduce's time goes, and end")
    parser.add_argument("--json", action="store_true", help="print one object at the end")
    args = parser.parse_args(arguments)
    if args.collectives is not None and args.engine != "cuda":
        parser.error("--collectives is for --engine cuda, as others do each collective in one way")
    if args.phases:
        return of_phases(args)
    why = refusal(args.shared) if args.engine == "cuda" else None
    if why is not None:
        print(f"bench_mesh_gpu: nothing is measured: {why}; --engine threads tries our side on CPUs", file=sys.stderr)
        return 1
    pairs.DTYPE = pairs.DTYPE if args.engine == "cuda" else "float16"  # CPUs' chunks add in it
    tiny = args.shared or args.engine != "cuda"
    if args.shared:
        lower_pairs.WAVES = 0  # tiny products are pairs, too
    rows = [row for row in table(args.devices, tiny, args.shared) if row.name.startswith(tuple(args.rows))]
    compile_all(args, rows)
    # NCCL has a GPU for one device only, so where devices share one ours is alone.
    peers = pairs.Theirs(args.devices) if args.engine == "cuda" and not args.shared else None
    try:
        found = [measured(row, peers, args) for row in rows]
    finally:
        if peers is not None:
            peers.close()
    for row in found:
        beside = "" if row["peer"] is None else f", {row['peer']} {row['peer_us']:.2f} us, {row['ratio']:.3f}"
        print(f"{row['name']}: {row['ours_us']:.2f} us{beside}")
    if args.json:
        print(json.dumps({"engine": args.engine, "devices": args.devices, "rows": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
