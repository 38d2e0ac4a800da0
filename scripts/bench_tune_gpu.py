"""What tuning is worth on a CUDA GPU: products of a decoder's layers, tuned, beside the kernels' defaults and cuBLAS.

    python scripts/bench_tune_gpu.py [--trials 40] [--work-dir tuning_logs/local] [--only TEXT] [--rounds 9] [--json]
    python scripts/bench_tune_gpu.py --compile       only compile what would be measured, which needs no GPU

Ten bf16 products C = A B^T with weights B of (out, in), drawn by a fixed seed from the layers of public decoders and
numbers of tokens below, are tuned one after the other; a work directory that has the trials is used as it is. Then each
is checked against PyTorch, on fresh random data with the output poisoned, and the three run in turns from CUDA graphs
over several input sets, as in bench_gpu.py: medians by CUDA events of bursts of a few milliseconds on a rested GPU. A
ratio is the peer's time over the tuned one's. Where the tuner chose the default itself, that is measured once, and its
ratio is 1. The bound is reading and writing everything once at 3.9 TB/s, or 750 TFLOP/s, what an H200 sustains.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import tvm
import tvm_ffi
from timing_gpu import calls_of, captured, in_turns, size
from tvm import s_tir, tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe.defaults import WORK_DIR
from tvm_axe.machines.target import resolve_target
from tvm_axe.meta.search.job import kernel_tools
from tvm_axe.meta.search.loop import Job
from tvm_axe.meta.task import Workload
from tvm_axe.nests.kernels import choose, offers
from tvm_axe.pipeline import build
from tvm_axe.records import apply_best
from tvm_axe.records.database import normalize
from tvm_axe.schedule.tiles import choices_in
from tvm_axe.tile.kernels import matmul_for

DECODERS = {
    "llama3-8b": (4096, 32, 8, 128, 14336),
    "llama3-70b": (8192, 64, 8, 128, 28672),
    "qwen3-8b": (4096, 32, 8, 128, 12288),
    "qwen3-32b": (5120, 64, 8, 128, 25600),
    "mistral-7b": (4096, 32, 8, 128, 14336),
    "gemma2-9b": (3584, 16, 8, 256, 14336),
    "gemma2-27b": (4608, 32, 16, 128, 36864),
}
"""Width, heads, heads of keys and of values, a head's width, width of the feed-forward layer."""

SHARES = {"llama3-8b": (1, 8), "llama3-70b": (1, 8)}
"""Over how many devices a decoder's layers are spread (tensor parallelism); one where nothing is said."""

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000, 1024, 2048, 4096)

COUNT, SEED = 10, 0

TOLERANCE = 1e-2  # relative error of the norm, in bf16


def products() -> dict[str, tuple[int, int, int]]:
    """Tokens, columns and depth of every layer with weights in every decoder, for every number of tokens."""
    found = {}
    for decoder, (width, heads, kept, head, wide) in DECODERS.items():
        for share in SHARES.get(decoder, (1,)):
            layers = {
                "qkv": ((heads + 2 * kept) * head // share, width),
                "out": (width, heads * head // share),
                "up": (2 * wide // share, width),  # and the gate
                "down": (width, wide // share),
            }
            spread = f"/{share}" if share > 1 else ""
            found |= {f"{decoder}{spread} {layer} {m}": (m, *nk) for layer, nk in layers.items() for m in TOKENS}
    return found


def drawn() -> dict[str, tuple[int, int, int]]:
    """The products that are measured."""
    return dict(random.Random(SEED).sample(list(products().items()), COUNT))


def product(m: int, n: int, k: int) -> tirx.PrimFunc:
    """C = A B^T, summed in float32 and rounded once."""

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((m, k), "bfloat16"), B: T.Buffer((n, k), "bfloat16"), C: T.Buffer((m, n), "bfloat16")):
        D = T.sblock_alloc_buffer((m, n), "float32")
        for i, j, l in T.grid(m, n, k):
            with T.sblock("product"):
                vi, vj, vl = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    D[vi, vj] = T.float32(0)
                D[vi, vj] = D[vi, vj] + T.cast(A[vi, vl], "float32") * T.cast(B[vj, vl], "float32")
        for i, j in T.grid(m, n):
            with T.sblock("round"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = T.cast(D[vi, vj], "bfloat16")

    return main


def default(m: int, n: int, k: int, target: Target) -> tvm.IRModule:
    """The product computed by the kernel that `matmul_for` names, with its default parameters."""
    sch = s_tir.Schedule(normalize(product(m, n, k)))
    (offer,) = [o for o in offers(sch, target) if o.kernel == matmul_for(target, o.problem).name]
    choose(sch, offer, sampled=False)
    return sch.mod


def compiled(mod: tvm.IRModule, target: Target) -> Callable[..., None]:
    """The module's ``main``, with tile kernels where they were chosen."""
    return build(mod, target)["main"]


def chosen(mod: tvm.IRModule) -> str:
    """The kernel of a schedule of a product, in words."""
    return ", ".join(map(str, choices_in(mod["main"])))


def tensors(m: int, n: int, k: int) -> dict[str, Any]:
    """Fresh random operands, and a result of NaN."""
    import torch

    made = {name: torch.randn(shape, device="cuda").bfloat16() for name, shape in {"A": (m, k), "B": (n, k)}.items()}
    return made | {"C": torch.full((m, n), math.nan, device="cuda", dtype=torch.bfloat16)}


def check(run: Callable[[Mapping[str, Any]], object], made: Mapping[str, Any]) -> float:
    """The relative error of the norm against float32 in PyTorch."""
    made["C"].fill_(math.nan)
    run(made)
    expected = made["A"].float() @ made["B"].float().T
    error = float((made["C"].double() - expected.double()).norm() / expected.double().norm())
    if not error <= TOLERANCE:
        raise AssertionError(f"relative error {error:.1e}")
    return error


def measured(
    name: str, shape: tuple[int, int, int], mods: Mapping[str, tvm.IRModule], target: Target, rounds: int
) -> dict[str, Any]:
    """The row of one shape: `mods` has its default and its tuned schedule."""
    import torch

    m, n, k = shape
    functions: dict[str, Callable[[Mapping[str, Any]], object]] = {}
    same = chosen(mods["default"]) == chosen(mods["tuned"])
    for kind, mod in mods.items():
        if not (same and kind == "tuned"):
            main = compiled(mod, target)
            functions[kind] = lambda t, main=main: main(*map(tvm_ffi.from_dlpack, t.values()))
    functions["cublas"] = lambda t: torch.matmul(t["A"], t["B"].T, out=t["C"])
    first = tensors(m, n, k)
    errors = {kind: check(function, first) for kind, function in functions.items()}
    sets = [first, *(tensors(m, n, k) for _ in range(3))]
    bound = max(2 * m * n * k / 7.5e14, size(first) / 3.9e12)
    graphs = captured(functions, sets, calls_of(bound))
    ms = in_turns({kind: graph.timed for kind, graph in graphs.items()}, rounds, 0.1, 0.0)
    ours = ms.get("tuned", ms["default"])
    return {
        "name": f"{name} {m}x{n}x{k}", "ours_ms": ours, "peer": "default", "peer_ms": ms["default"],
        "ratio": ms["default"] / ours, "cublas_ms": ms["cublas"], "cublas_ratio": ms["cublas"] / ours,
        "bound_ms": bound * 1e3, "error": max(errors.values()), "default": chosen(mods["default"]),
        "kernel": "the default" if same else chosen(mods["tuned"]),
    }  # fmt: skip


def tuned(
    shapes: Mapping[str, tuple[int, int, int]], target: Target, trials: int, work_dir: str, limit: float
) -> dict[str, float]:
    """Tune the products one after the other, in the same processes; the seconds that each took.

    None is begun later than `limit` seconds from now.
    """
    start, seconds = time.perf_counter(), {}
    with kernel_tools(target, work_dir, seed=SEED) as tools:
        for name, shape in shapes.items():
            began = time.perf_counter()
            if began - start > limit:
                break
            workload = Workload(name.replace(" ", "_").replace("/", "_"), normalize(product(*shape)))
            job = Job([workload], tools, target, work_dir, trials, seed=SEED)
            (task,) = job.run(progress=False)
            seconds[name] = time.perf_counter() - began
            spent = ", ".join(f"{key} {value:.1f}" for key, value in job.seconds.items())
            print(
                f"{name}: {task.trials} trials, {len(task.failures)} failed, best {task.best_ms} ms; "
                f"{seconds[name]:.1f} s: {spent}",
                file=sys.stderr,
                flush=True,
            )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40, help="candidates for each shape (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="no shape is begun later (default: %(default)s)")
    parser.add_argument("--work-dir", default=WORK_DIR, help="where records are kept (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose name has this text")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile what is recorded and the defaults, and stop")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target, start = resolve_target("cuda"), time.perf_counter()
    shapes = {name: shape for name, shape in drawn().items() if args.only in name}
    seconds = {} if args.compile else tuned(shapes, target, args.trials, args.work_dir, args.seconds)
    total, rows, failed = time.perf_counter() - start, [], 0
    for name, shape in shapes.items():
        best, _ = apply_best(normalize(product(*shape)), target, args.work_dir)
        if not choices_in(best["main"]) and not args.compile:
            failed += 1
            print(f"{name}: no record in {args.work_dir}: it was not begun within --seconds", file=sys.stderr)
            continue
        mods = {"default": default(*shape, target), "tuned": best}
        try:
            if args.compile:
                for mod in mods.values():
                    if choices_in(mod["main"]):
                        compiled(mod, target)
                continue
            rows.append(measured(name, shape, mods, target, args.rounds))
        except Exception as error:  # the others are measured whatever one does
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}"[:2000], file=sys.stderr, flush=True)
            continue
        row = rows[-1]
        if not args.json:
            print(
                f"{row['name']:<44} {row['peer_ms'] * 1e3:8.2f} us -> {row['ours_ms'] * 1e3:8.2f} us  ratio "
                f"{row['ratio']:.3f}  to cublas {row['cublas_ratio']:.3f}  bound {row['bound_ms'] * 1e3:7.2f} us  "
                f"error {row['error']:.1e}  {row['default']} -> {row['kernel']}",
                flush=True,
            )
    if rows and args.json:
        print(json.dumps({"rows": rows, "tuning_seconds": total, "seconds": seconds}))
    elif rows:
        mean, least = statistics.geometric_mean(row["ratio"] for row in rows), min(row["ratio"] for row in rows)
        print(f"geometric mean {mean:.3f}, least {least:.3f}; tuned in {total:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
