"""Products and the collectives that they overlap on a mesh of GPUs, beside NCCL after cuBLAS and PyTorch's fused ones.

Ours: the schedule that cores run in chunks, `overlap` of the two stages, compiled for GPUs (`tvm_axe.lower.pairs`); a
run is a launch of a CUDA graph on each device, and takes as long as on the slowest. Theirs: a process a GPU, everything
enqueued behind a sleeping kernel and an all-reduce, which all devices leave at once. The sides take turns in one run,
with rests between; medians count. Multicast is off on both sides.

Results are checked first: ours and those of cuBLAS and NCCL in float64 on some rows, others of theirs against NCCL's.
Both errors are printed, norm over norm, each on its own data of the same distribution. Two runs of ours have the same
bits.

Run `python scripts/bench_mesh_pairs.py [--rounds N] [--reps N] [--size M N K] [--json]` where two GPUs are, or more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective import Workers
from tvm_axe.collective.cuda import driver
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.errors import InputError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule, with_layouts

SIZE = (8192, 8192, 28672)
DTYPE = "bfloat16"
KINDS = ("GEMM + reduce-scatter", "GEMM + all-reduce", "all-gather + GEMM")
CHUNKS = 4
CORES = len(os.sched_getaffinity(0))
CHECKED = 16  # rows that are computed in float64
WORST = 6e-3  # of the error of a result of bfloat16, norm over norm
REST = 0.02  # seconds before a run, so that the power stays below its limit
SLEEP = 6_000_000  # clocks, until all is enqueued
APART, ALONE = "ours, one behind the other", "our product alone"
"""What else of ours is timed beside a pair."""

# ---- Ours ------------------------------------------------------------------------------------------------------------


def product(m: int, n: int, k: int) -> Any:
    """C = A B over whole tensors."""

    @T.prim_func(s_tir=True)
    def product(A: T.Buffer((m, k), DTYPE), B: T.Buffer((k, n), DTYPE), C: T.Buffer((m, n), DTYPE)) -> None:
        for i, l, j in T.grid(m, k, n):
            with T.sblock("mm"):
                vi, vk, vj = T.axis.remap("SRS", [i, l, j])
                with T.init():
                    C[vi, vj] = T.cast(0, DTYPE)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]

    return product


def scheduled(kind: str, mesh: Mesh, size: Sequence[int], form: str = "ours") -> Schedule:
    """The schedule of a row; before a gather, columns of B are shared, otherwise the terms that are summed.

    With `APART` the product and its collective are one behind the other, with `ALONE` the product is all there is.
    """
    m, n, k = size
    if form == ALONE:
        columns, terms = (k // mesh.size, n) if kind == "all-gather + GEMM" else (n, k // mesh.size)
        return Schedule(product(m, columns, terms), mesh=mesh)
    if kind == "all-gather + GEMM":
        shared = {"A": Layout.sharded((m, n), mesh, {0: "tp"}), "C": Layout.sharded((m, k), mesh, {1: "tp"})}
        sch = Schedule(with_layouts(product(m, k, n), shared), mesh=mesh)
        mm = sch.get_sblock("mm")
        sch.shard(sch.get_loops(mm)[2], "tp")
        gather = sch.redistribute(mm, "A", "tp")
        if form != APART:
            sch.overlap((gather, mm), "tp", CHUNKS)
        return sch
    scatters = kind == "GEMM + reduce-scatter"
    shared = {"C": Layout.sharded((m, n), mesh, {0: "tp"})} if scatters else {}
    sch = Schedule(with_layouts(product(m, n, k), shared), mesh=mesh)
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "tp")
    if scatters:
        sch.shard(sch.get_loops(reduce)[0], "tp")
    if form == APART:
        return sch
    if not scatters:
        reduce, gather = sch.split_collective(reduce)
        sch.fuse_collective([reduce, gather])
    sch.overlap([partial, reduce], "tp", CHUNKS)
    return sch


@lru_cache(maxsize=2)
def drawn(shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    """Normally distributed matrices of a product, which the forms of a row share: drawn by rows, on all cores."""
    found = [np.empty(shape, check_dtype(DTYPE)) for shape in shapes]
    scales = np.float32([1.0, shapes[1][0] ** -0.5])

    def draw(array: np.ndarray, scale: np.float32, rng: np.random.Generator) -> None:
        array[...] = rng.standard_normal(array.shape, dtype=np.float32) * scale

    with ThreadPoolExecutor(CORES) as pool:
        for array, scale in zip(found, scales):
            parts = np.array_split(array, CORES)
            list(pool.map(draw, parts, [scale] * CORES, np.random.default_rng().spawn(CORES)))
    return found


@lru_cache(maxsize=2)
def wanted_of(shapes: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Rows drawn at random, and what the product of such matrices has there, in float64."""
    a, b = drawn(shapes)
    rows = np.random.default_rng().choice(len(a), CHECKED, replace=False)
    taken = a[rows].astype("float64")
    with ThreadPoolExecutor(CORES) as pool:
        parts = pool.map(lambda part: taken @ part.astype("float64"), np.array_split(b, CORES, axis=1))
        return rows, np.concatenate(list(parts), axis=1)


class Ours:
    """A row's program on workers, which `check` puts inputs into place for."""

    def __init__(self, kind: str, workers: Workers, size: Sequence[int], form: str = "ours") -> None:
        self.kind, self.workers = kind, workers
        self.exe = axe.compile(scheduled(kind, workers.mesh, size, form), target=workers.target, work_dir=None)
        print(f"{kind}, {form}: {'; '.join(self.exe.lowered.forms) or self.exe.notation}")
        shapes = [tuple(map(int, buffer.shape)) for buffer in self.exe.lowered.inputs]
        self.shapes = tuple(shapes)
        self.arrays = drawn(self.shapes)

    def check(self, again: bool = False) -> float:
        """The error of rows drawn at random, against float64; `again`, of a second run that has the same bits."""
        first = self.exe.run(self.workers, *self.arrays) if again else None
        self.exe.run(self.workers, *(np.full_like(array, np.nan) for array in self.arrays))
        found = self.exe.run(self.workers, *self.arrays)
        if first is not None and not np.array_equal(first.view("uint8"), found.view("uint8")):
            raise RuntimeError(f"{self.kind}: two runs differ")
        rows, wanted = wanted_of(self.shapes)
        error = float(np.linalg.norm(found[rows].astype("float64") - wanted) / np.linalg.norm(wanted))
        if not error < WORST:
            raise RuntimeError(f"{self.kind}: the error is {error:.2e}, which is beyond {WORST:.0e}")
        return error

    def run(self, reps: int) -> list[float]:
        """Seconds of each of so many runs, behind a pause, on what `check` has put into place."""
        time.sleep(REST)
        return self.exe.time_again(self.workers, repeat=reps, warmup=1)


# ---- Theirs ----------------------------------------------------------------------------------------------------------


def theirs(rank: int, devices: int, port: int, pipe: Connection) -> None:
    """Be one process of theirs: make the operations of a row, or run one by name, until told to end."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    peer: Peer | None = None
    while (asked := pipe.recv()) is not None:
        try:
            if isinstance(asked[0], str):
                assert peer is not None  # operations are made first
                name, reps = asked
                pipe.send([peer.timed(name) for _ in range(reps)])
            else:
                maker, kind, size = asked
                peer = None  # what it holds of the GPU is free for the next
                peer = maker(rank, devices, port, kind, size)
                pipe.send((list(peer.ops), peer.errors))
        except Exception:
            pipe.send(traceback.format_exc())
    os._exit(0)  # taking a group down takes long


class Peer:
    """What a GPU of theirs can do, by name: `ops`, as `made` has them, with `errors` of those whose it tells."""

    def __init__(self, rank: int, devices: int, port: int, kind: str, size: Sequence[int]) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank, self.devices = torch, dist, rank, devices
        device = torch.device("cuda", rank)
        if dist.is_initialized():
            torch.cuda.empty_cache()
        else:
            torch.cuda.set_device(rank)
            dist.init_process_group(
                "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=devices, device_id=device
            )
        self.device, self.one = device, torch.ones(1, device=device)
        self.errors: dict[str, float] = {}
        self.ops: dict[str, Callable[[], Any]] = self.made(kind, size)

    def made(self, kind: str, size: Sequence[int]) -> dict[str, Callable[[], Any]]:
        """What is timed of a row, by name."""
        raise NotImplementedError

    def timed(self, name: str) -> float:
        """The seconds that an operation takes here, where all begin at once."""
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        time.sleep(REST)
        self.dist.all_reduce(self.one)
        self.torch.cuda._sleep(SLEEP)
        self.dist.all_reduce(self.one)
        begin.record()
        self.ops[name]()
        end.record()
        self.torch.cuda.synchronize()
        self.one.fill_(1)
        return float(begin.elapsed_time(end)) * 1e-3


class Products(Peer):
    """The products of a row: cuBLAS and NCCL, PyTorch's fused operator, and the product alone."""

    def made(self, kind: str, size: Sequence[int]) -> dict[str, Callable[[], Any]]:
        torch, dist, device, devices = self.torch, self.dist, self.device, self.devices
        m, n, k = size

        def random(*shape: int, scale: float = 1.0) -> Any:
            return (torch.randn(*shape, device=device) * scale).to(torch.bfloat16)

        def empty(*shape: int) -> Any:
            return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)

        gathers = kind == "all-gather + GEMM"
        a = random(m // devices, n) if gathers else random(m, k // devices)
        b = random(n, k // devices, scale=n**-0.5) if gathers else random(k // devices, n, scale=k**-0.5)
        whole = empty(m, n) if gathers else None
        c = empty(m, b.shape[1])
        out = empty(m // devices, n)

        def sequential() -> Any:
            if gathers:
                dist.all_gather_into_tensor(whole, a)
                return torch.matmul(whole, b, out=c)
            torch.matmul(a, b, out=c)
            if kind == "GEMM + all-reduce":
                dist.all_reduce(c)
                return c
            dist.reduce_scatter_tensor(out, c)
            return out

        ops: dict[str, Callable[[], Any]] = {"cuBLAS and NCCL": sequential}
        fused = self._fused(kind, a, b)
        if fused is not None:
            ops["PyTorch's fused"] = fused
        ops["cuBLAS alone"] = lambda: torch.matmul(whole if gathers else a, b, out=c)
        expected = sequential().float().clone()
        self.errors["cuBLAS and NCCL"] = self._error(kind, expected, whole if gathers else a, b)
        for name, op in list(ops.items())[1:-1]:
            error = ((op().float() - expected).norm() / expected.norm()).item()
            if not error < 2 * WORST:
                raise RuntimeError(f"{kind}: {name} differs from NCCL's by {error:.2e}")
        return ops

    def _error(self, kind: str, found: Any, a: Any, b: Any) -> float:
        """The error of some rows of a result that this device has, against float64, norm over norm."""
        if kind == "all-gather + GEMM":
            rows = own = self.torch.arange(CHECKED, device=self.device) * (len(found) // CHECKED)
            wanted = a[rows].double() @ b.double()
        else:  # all devices add their parts of the same rows, of which each may have a share
            rows = self.torch.arange(CHECKED * self.devices, device=self.device) * (len(a) // (CHECKED * self.devices))
            wanted = a[rows].double() @ b.double()
            self.dist.all_reduce(wanted)
            first = self.rank * len(found) if len(found) < len(a) else 0
            is_here = (rows >= first) & (rows < first + len(found))
            own, wanted = rows[is_here] - first, wanted[is_here]
        return ((found[own].double() - wanted).norm() / wanted.norm()).item()

    def _fused(self, kind: str, a: Any, b: Any) -> Callable[[], Any] | None:
        """PyTorch's fused operator, where it has one."""
        if kind == "GEMM + all-reduce":
            return None
        import torch.distributed._symmetric_memory  # noqa: F401, has the operators

        group, ops = self.dist.group.WORLD.group_name, self.torch.ops.symm_mem
        if kind == "all-gather + GEMM":
            return lambda: ops.fused_all_gather_matmul(a, [b], 0, group)[1][0]
        return lambda: ops.fused_matmul_reduce_scatter(a, b, "sum", 0, group)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Theirs:
    """Their processes, one a GPU, which `make` what is timed of a row and `run` it."""

    def __init__(self, devices: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        port = free_port()
        for rank in range(devices):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=theirs, args=(rank, devices, port, there), daemon=True))
            self.processes[-1].start()
            self.pipes.append(here)
        self.names: list[str] = []
        self.errors: dict[str, float] = {}

    def make(self, maker: type[Peer], kind: str, size: Sequence[int]) -> None:
        """Have the operations of a row made, whose `names` these processes have then, and `errors` of some."""
        self.names, self.errors = self._all((maker, kind, size))[0]

    def run(self, name: str, reps: int) -> list[float]:
        """Seconds of each of so many runs, on the slowest device."""
        return [max(each) for each in zip(*self._all((name, reps)))]

    def _all(self, asked: tuple[object, ...]) -> list[Any]:
        """What each process answers."""
        for pipe in self.pipes:
            pipe.send(asked)
        found = [pipe.recv() for pipe in self.pipes]
        failed = [each for each in found if isinstance(each, str)]
        if failed:
            raise RuntimeError(f"a process of theirs failed:\n{failed[0]}")
        return found

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes):
            if process.is_alive():
                pipe.send(None)
            process.join(20)
            if process.is_alive():
                process.kill()


# ---- Both ------------------------------------------------------------------------------------------------------------


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of products: ours and theirs in turns, each a dict with ``name``, ``ours_ms``, ``peer``, ``peer_ms``.

    `args` may have ``rounds``, ``reps`` and ``size``. Where there are less than two GPUs, or no PyTorch, nothing is
    measured, and a line says why.
    """
    try:
        devices = driver.gpus()
        import torch  # noqa: F401, asks whether it is there
    except (InputError, ImportError) as error:
        print(f"products and collectives: left out, {error}")
        return []
    if devices < 2:
        print(f"products and collectives: left out, they are for two GPUs or more, and this machine has {devices}")
        return []
    rounds, reps = getattr(args, "rounds", 5), getattr(args, "reps", 5)
    size = tuple(getattr(args, "size", None) or SIZE)
    if any(extent % devices for extent in size):
        print(f"products and collectives: left out, {devices} GPUs don't divide {size}")
        return []
    peers = Theirs(devices)
    try:
        with axe.launch(Mesh({"tp": devices}), engine="cuda") as workers:
            return [_row(kind, workers, peers, size, rounds, reps) for kind in KINDS]
    finally:
        peers.close()


def said_errors(errors: Mapping[str, float]) -> str:
    """Errors by whose they are."""
    return ", ".join(f"{name} {error:.2e}" for name, error in errors.items())


def _row(kind: str, workers: Workers, peers: Theirs, size: Sequence[int], rounds: int, reps: int) -> dict[str, Any]:
    ours, devices = Ours(kind, workers, size), workers.mesh.size
    peers.make(Products, kind, size)
    print(f"{kind}: errors in float64: {said_errors({'ours': ours.check(again=True), **peers.errors})}")
    taken: dict[str, list[float]] = {"ours": [], **{name: [] for name in peers.names}}
    for turn in range(rounds + 1):  # one to warm up
        for name in taken:
            seconds = ours.run(reps) if name == "ours" else peers.run(name, reps)
            taken[name] += seconds if turn else []
    medians = {name: 1e3 * statistics.median(seconds) for name, seconds in taken.items()}
    for name, seconds in taken.items():
        print(f"  {name:<18} {medians[name]:8.4f} ms  ({1e3 * min(seconds):.4f} to {1e3 * max(seconds):.4f})")
    rivals = {name: medians[name] for name in medians if name not in ("ours", "cuBLAS alone")}
    peer = min(rivals, key=lambda name: rivals[name])
    shape = (
        f"{size[0]} x {size[2]}/{devices} x {size[1]}"
        if "all-gather" in kind
        else (f"{size[0]} x {size[1]} x {size[2]}/{devices}")
    )
    return {
        "name": f"{kind}, {shape}, {DTYPE}",
        "ours_ms": medians["ours"],
        "peer": peer,
        "peer_ms": medians[peer],
        "ratio": medians[peer] / medians["ours"],
        "product_ms": medians["cuBLAS alone"],
        "others_ms": rivals,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--size", type=int, nargs=3, default=SIZE, metavar=("M", "N", "K"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = rows(args)
    for row in found:
        print(f"{row['name']}: {row['ours_ms']:.4f} ms, {row['peer']} {row['peer_ms']:.4f} ms, {row['ratio']:.3f}")
    if args.json:
        print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
