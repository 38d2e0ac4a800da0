"""A layer as wide as those of Llama-3-8B on a mesh of GPUs, beside tensor parallelism by PyTorch and NCCL in one run.

    python scripts/bench_models_mesh_gpu.py [--devices 2] [--rows PREFIX ...] [--breakdown] [--json]
    python scripts/bench_models_mesh_gpu.py --compile           only compile and build ours, which needs no GPU
    python scripts/bench_models_mesh_gpu.py --engine threads    our results alone, at tiny widths, on CPU workers

Ours is compiled for a mesh, without records, and called in a session: weights and caches are in place, each device has
its share. Theirs has a process for each GPU with Megatron's cut: rows of the weights of queries, keys, values, gate and
up, columns of those of the output and of down, an all-reduce behind each of these two. It runs as PyTorch has it and as
torch.compile makes it, each captured as a CUDA graph; the faster one is the peer. Multicast is off.

First results are checked: an error is the norm of the difference from float32 over the norm, ours beside theirs. Then
the sides take turns, with rests between; a time is that of the slowest device by the devices' clock. Clocks, power and
throttling are printed before and after each row. --breakdown prints what of ours takes the time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_mesh_gpu import captured, power, refusal
from bench_mesh_pairs import Peer, Theirs
from bench_models_gpu import TOLERANCE, described, error, first_of, without_gradients
from models_gpu import Case, Llama, decode_case, decoder, imported, prefill_case

import tvm_axe as axe
from tvm_axe.collective import Workers
from tvm_axe.collective.repeating import repeats
from tvm_axe.executable.session import Session
from tvm_axe.machines.builder import PROGRAM_BUILDER, builder_named

CACHED = 2048
WIDE, TINY = Llama(), Llama(width=64, heads=8, kv_heads=4, hidden=192, dim=16, dtype="float32")
WITHIN = {**TOLERANCE, "float32": 1e-5}
WARMUP = 3  # a call is told, captured, and launched as a graph from then on


class Row(NamedTuple):
    """A line of the table: its name, and what `case_of` makes of `kind` and `size`."""

    name: str
    kind: str
    size: tuple[int, ...]

    def case(self, sizes: Llama = WIDE) -> Case:
        """The layer, with its weights and inputs."""
        return case_of(self.kind, self.size, sizes)


def case_of(kind: str, size: Sequence[int], sizes: Llama) -> Case:
    """A ``prefill`` of so many tokens, or ``decode`` of a token of so many sequences over so long caches."""
    return prefill_case(*size, sizes) if kind == "prefill" else decode_case(*size, sizes)


def table(tiny: bool) -> list[Row]:
    """The rows: of the published sizes, or of tiny ones."""
    tokens, batches, cached = (32, (1, 4), 32) if tiny else (2048, (1, 64), CACHED)
    decodes = [Row(f"decode {batch}, cache of {cached}", "decode", (batch, cached)) for batch in batches]
    return [Row(f"prefill {tokens}", "prefill", (tokens,)), *decodes]


# ---- Ours ------------------------------------------------------------------------------------------------------------


def compiled(case: Case, module: torch.nn.Module, inputs: tuple[Any, ...], mesh: axe.Mesh, target: Any) -> Any:
    """Our executable of a layer on a mesh, its weights parameters."""
    model = imported(module, inputs, params=True) if case.decodes is None else decoder(*case.decodes)[0]
    return axe.compile(model, mesh=mesh, target=target, work_dir=None)


class Ours:
    """A layer in a session on workers.

    Parameters
    ----------
    exe : MeshModelExecutable
        It.
    workers : Workers
        Where.
    module, inputs
        As torch has them, on the CPU.
    """

    def __init__(self, exe: Any, workers: Workers, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs
        self.session: Session = exe.load(workers, module.state_dict())
        (self.name,) = self.session.functions
        how = "replayed as graphs" if repeats(exe.runnable) else "told to the devices anew, one kernel after the other"
        print(f"  ours: {exe.bytes:,} bytes to a device; weights of {max(self.session.held):,}; calls are {how}")

    def result(self) -> torch.Tensor:
        """The layer's result."""
        return torch.from_numpy(np.asarray(first_of(self.session[self.name](*self.inputs))).astype("float32"))

    def run(self, reps: int) -> list[float]:
        """Seconds of each of so many calls, behind the pause in which inputs are put into place again."""
        return self.session[self.name].time(*self.inputs, repeat=reps, warmup=WARMUP)


def exact(module: torch.nn.Module, inputs: tuple[Any, ...], device: str) -> torch.Tensor:
    """The result in float32, on the CPU; the module stays float32."""
    wide = tuple((each.float() if each.is_floating_point() else each.clone()).to(device) for each in inputs)
    return first_of(without_gradients(module.to(device).float(), wide)()).cpu()


# ---- Theirs ----------------------------------------------------------------------------------------------------------


class Reduced(torch.nn.Module):
    """A product of which each device has some of the terms, and the sum over devices behind it."""

    def __init__(self, product: torch.nn.Linear, add: Callable[[Any], Any]) -> None:
        super().__init__()
        self.product, self.add = product, add

    def forward(self, x: Any) -> Any:
        """The product of [..., terms]."""
        return self.add(self.product(x))


def share(whole: torch.nn.Module, rank: int, devices: int, add: Callable[[Any], Any]) -> torch.nn.Module:
    """What a device has of a layer by Megatron's cut."""
    sizes: Llama = whole.sizes  # type: ignore[assignment]
    own = replace(
        sizes, heads=sizes.heads // devices, kv_heads=sizes.kv_heads // devices, hidden=sizes.hidden // devices
    )
    weights = {}
    for name, weight in whole.state_dict().items():
        dim = None if "norm" in name else int(name.startswith(("out", "down")))
        weights[name] = weight if dim is None else weight.chunk(devices, dim)[rank]
    part = type(whole)(own).to(dtype=next(whole.parameters()).dtype)  # type: ignore[call-arg]
    part.load_state_dict(weights)
    part.out, part.down = (Reduced(each, add) for each in (part.out, part.down))  # type: ignore[arg-type]
    return part.eval()


class Parallel(Peer):
    """A layer by PyTorch and NCCL: in its own kernels and by torch.compile, each captured as a CUDA graph."""

    def made(self, kind: str, size: Sequence[int]) -> dict[str, Callable[[], Any]]:
        import torch.distributed._functional_collectives as functional

        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        group = self.dist.group.WORLD

        def in_place(x: Any) -> Any:
            self.dist.all_reduce(x)
            return x

        def traced(x: Any) -> Any:
            return functional.all_reduce(x, "sum", group)

        whole, inputs = case_of(kind, size, WIDE).made()
        mine = [each.chunk(self.devices, 1)[self.rank].contiguous() if each.ndim == 4 else each for each in inputs]
        own = tuple(each.to(self.device) for each in mine)
        parts = {
            "PyTorch and NCCL": share(whole, self.rank, self.devices, in_place).to(self.device),
            "torch.compile and NCCL": torch.compile(share(whole, self.rank, self.devices, traced).to(self.device)),
        }
        wanted = exact(whole, inputs, str(self.device))
        del whole
        torch.cuda.empty_cache()
        ops = {}
        for name, part in parts.items():
            told = without_gradients(part, own)
            try:
                self.errors[name] = error(told().cpu(), wanted)
                ops[name] = captured(torch, told, 1)
            except Exception as fault:
                if name.startswith("PyTorch"):
                    raise
                print(f"  {name}: left out, {type(fault).__name__}: {str(fault)[:500]}", file=sys.stderr)
        return ops


# ---- Both ------------------------------------------------------------------------------------------------------------


def measured(row: Row, peers: Theirs | None, args: argparse.Namespace) -> dict[str, Any]:
    """A row: ours and theirs in turns; ours alone without `peers`."""
    on_gpus, mesh = args.engine == "cuda", axe.Mesh({"tp": args.devices})
    print(f"{row.name}\n  before: {power()}" if on_gpus else row.name, flush=True)
    case = row.case() if on_gpus else row.case(TINY)
    module, inputs = case.made()
    if peers is not None:
        peers.make(Parallel, row.kind, row.size)
    with axe.launch(mesh, engine=args.engine) as workers:
        start = time.perf_counter()
        exe = compiled(case, module, inputs, mesh, workers.target)
        ours = Ours(exe, workers, module, inputs)
        errors = {"ours": error(ours.result(), exact(module, inputs, "cuda" if on_gpus else "cpu"))}
        errors |= {} if peers is None else peers.errors
        took = f"compiled, loaded and called once in {time.perf_counter() - start:.1f} s"
        print(f"  {took}; errors: " + ", ".join(f"{name} {each:.1e}" for name, each in errors.items()), flush=True)
        if not errors["ours"] < WITHIN[case.dtype]:
            raise RuntimeError(f"{row.name}: the error is {errors['ours']:.2e}, beyond {WITHIN[case.dtype]:.0e}")
        if on_gpus:
            torch.cuda.empty_cache()
        taken: dict[str, list[float]] = {name: [] for name in ["ours", *(peers.names if peers else ())]}
        for turn in range(args.rounds + 1):  # one to warm up
            for name, seconds in taken.items():
                found = ours.run(args.reps) if name == "ours" or peers is None else peers.run(name, args.reps)
                seconds += found if turn else []
        if args.breakdown:
            print("\n".join(("\n".join(described(exe)), ours.session[ours.name].trace(*inputs).text())))
    medians = {name: 1e3 * statistics.median(seconds) for name, seconds in taken.items()}
    for name, seconds in taken.items():
        span = f"({1e3 * min(seconds):.4f} to {1e3 * max(seconds):.4f})"
        print(f"  {name:<24} {medians[name]:9.4f} ms  {span}", flush=True)
    if on_gpus:
        print(f"  after: {power()}")
    rivals = {name: medians[name] for name in medians if name != "ours"}
    peer = min(rivals, key=lambda name: rivals[name]) if rivals else None
    return {
        "name": f"{row.name}, {case.dtype}, tp={args.devices}",
        "ours_ms": medians["ours"],
        "peer": peer,
        "peer_ms": None if peer is None else rivals[peer],
        "ratio": None if peer is None else rivals[peer] / medians["ours"],
        "ranges_ms": {name: [1e3 * min(seconds), 1e3 * max(seconds)] for name, seconds in taken.items()},
        "errors": errors,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[""], metavar="PREFIX", help="of the names of rows (default: all)")
    parser.add_argument("--engine", default="cuda", choices=["cuda", "threads", "processes"])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--breakdown", action="store_true", help="what of ours takes the time")
    parser.add_argument("--compile", action="store_true", help="build ours for GPUs, say what computes it, and end")
    parser.add_argument("--json", action="store_true", help="print one object at the end")
    args = parser.parse_args(arguments)
    rows = [row for row in table(args.engine != "cuda") if row.name.startswith(tuple(args.rows))]
    if args.compile:
        for row in rows:
            case, start = row.case(), time.perf_counter()
            exe = compiled(case, *case.made(), axe.Mesh({"tp": args.devices}), "cuda")
            told = "replayed" if repeats(exe.runnable) else "told anew"
            builder_named(PROGRAM_BUILDER)(exe.runnable, exe.target)  # which is what workers do
            print(f"{row.name}: built in {time.perf_counter() - start:.1f} s, {exe.bytes:,} bytes, calls are {told}")
            print("\n".join(described(exe)), flush=True)
        return 0
    why = refusal(False) if args.engine == "cuda" else None
    if why is not None:
        told = "--engine threads tries our side on CPUs, --compile compiles it"
        print(f"bench_models_mesh_gpu: nothing is measured: {why}; {told}", file=sys.stderr)
        return 1
    peers = Theirs(args.devices) if args.engine == "cuda" else None
    found = []
    try:
        for row in rows:
            try:
                found.append(measured(row, peers, args))
            except Exception as fault:  # the others are measured whatever one does
                print(f"{row.name}: {type(fault).__name__}: {str(fault)[:3000]}", file=sys.stderr, flush=True)
    finally:
        if peers is not None:
            peers.close()
    for each in found:
        beside = "" if each["peer"] is None else f", {each['peer']} {each['peer_ms']:.4f} ms, {each['ratio']:.3f}"
        print(f"{each['name']}: {each['ours_ms']:.4f} ms{beside}")
    if args.json:
        print(json.dumps({"engine": args.engine, "devices": args.devices, "rows": found}))
    return 0 if len(found) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
