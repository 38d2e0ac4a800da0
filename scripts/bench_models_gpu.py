"""Whole models on a CUDA GPU, compiled without records, each beside torch.compile with CUDA graphs in the same run.

    python scripts/bench_models_gpu.py [MODEL ...] [--mode MODE] [--rounds 9] [--breakdown] [--json]
    python scripts/bench_models_gpu.py --compile     only import and compile, which needs no GPU

Models are those of `scripts/models_gpu.py`, random weights in published shapes. Ours are imported by torch.export or
written with `relax.frontend.nn`, as they are served. First each is checked: the error of ours and of torch's is that of
the norm against the same weights in float32. Then both run from CUDA graphs that hold one call, in turns, each time
rested and warmed up; figures are medians by CUDA events with the range behind them, ratio = peer_ms / ours_ms. The
bound is the larger of the products' operations at 800 TFLOP/s and of the weights' and caches' bytes at 4 TB/s.

--breakdown prints the kernels that take the time of a call, ours and torch's, by CUPTI.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import tvm
from models_gpu import CASES, Case, decoder, imported
from timing_gpu import Series, captured
from tvm import tirx

import tvm_axe as axe
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.schedule.tiles import choices_in

REST, REPLAYS = 0.1, 20
FLOPS, BYTES = 8e14, 4e12  # a second
TOLERANCE = {"float16": 1e-2, "bfloat16": 3e-2}


def compiled(case: Case, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, list[torch.Tensor]]:
    """Our executable of a model, and the weights that it takes behind its inputs."""
    if case.decodes is None:
        return axe.compile(imported(module, inputs), target="cuda", work_dir=None), []
    model, names = decoder(*case.decodes)
    weights = module.state_dict()
    return axe.compile(model, target="cuda", work_dir=None), [weights[name] for name in names]


def described(exe: Any) -> list[str]:
    """What each of our kernels is computed by, a line each."""
    lines = []
    for variable, func in exe.module.functions_items():
        if isinstance(func, tirx.PrimFunc):
            whole = func.attrs.get(KERNEL) if func.attrs else None
            found = [str(whole)] if whole is not None else [str(choice) for choice in choices_in(func)]
            lines.append(f"  {variable.name_hint:<60} {', '.join(found) or 'threads'}")
    return lines


def call_of(exe: Any, arguments: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A call of the model on tensors of torch's; gives the first result."""
    machine = tvm.relax.VirtualMachine(exe.vm, tvm.cuda())
    tensors = [tvm.runtime.from_dlpack(each.detach()) for each in arguments]
    function = machine["main"]

    def call() -> torch.Tensor:
        return torch.from_dlpack(first_of(function(*tensors)))

    return call


def first_of(result: Any) -> Any:
    while not hasattr(result, "shape"):
        result = result[0]
    return result


def without_gradients(module: Any, inputs: tuple[Any, ...]) -> Callable[[], torch.Tensor]:
    """A call of a torch module; gives the first result."""

    def call() -> torch.Tensor:
        with torch.no_grad():
            return first_of(module(*inputs))

    return call


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over the norm."""
    if not bool(got.isfinite().all()):
        return float("nan")
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def measured(name: str, case: Case, mode: str, rounds: int, breakdown: bool) -> dict[str, Any]:
    """A row of the table."""
    module, inputs = case.made()
    exe, weights = compiled(case, module, inputs)
    module = module.to("cuda")
    on_gpu = tuple(each.to("cuda") for each in inputs)
    wide = tuple(each.float() if each.is_floating_point() else each.clone() for each in on_gpu)
    exact = without_gradients(module.float(), wide)()
    module = module.to(getattr(torch, case.dtype))
    del wide
    ours = call_of(exe, [*on_gpu, *(each.to("cuda") for each in weights)])
    theirs = without_gradients(torch.compile(module, mode=mode), on_gpu)
    errors = {"ours": error(ours(), exact), "torch": error(theirs(), exact)}
    if breakdown:
        for owner, call in (("ours", ours), ("torch", theirs)):
            print("\n".join([f"{name}: kernels, {owner}", *kernels(call)]), flush=True)
    if not errors["ours"] < TOLERANCE[case.dtype]:
        raise AssertionError(
            f"relative error {errors['ours']:.1e}; torch's is {errors['torch']:.1e}. tests/relax/test_on_gpu.py -m gpu "
            "tells which kernel is wrong"
        )
    graphs = captured({"ours": lambda _: ours(), "torch": lambda _: theirs()}, [{}, {}, {}], 1)
    times: dict[str, list[float]] = {owner: [] for owner in graphs}
    for i in range(rounds):
        for owner in list(graphs)[:: 1 - 2 * (i % 2)]:
            time.sleep(REST)
            graphs[owner].replayed(REPLAYS // 4)
            times[owner].append(graphs[owner].replayed(REPLAYS))
    own, peer = (statistics.median(times[owner]) for owner in ("ours", "torch"))
    return {
        "name": name, "ours_ms": own, "ours_range": [min(times["ours"]), max(times["ours"])],
        "peer": f"torch.compile {mode}", "peer_ms": peer, "peer_range": [min(times["torch"]), max(times["torch"])],
        "ratio": peer / own, "error": errors["ours"], "peer_error": errors["torch"],
        "bound_ms": 1e3 * max(case.flops / FLOPS, case.bytes / BYTES),
    }  # fmt: skip


def kernels(call: Callable[[], object], calls: int = 5) -> list[str]:
    """The kernels of a call by the time that they take, a line each: microseconds a call, launches, name."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent.setdefault(event.name, []).append(event.device_time)
    rows = sorted(((sum(each) / calls, len(each) / calls, name) for name, each in spent.items()), reverse=True)
    total = sum(row[0] for row in rows)
    return [f"{total:10.2f} us together", *(f"{us:10.2f} us {count:6.1f}  {name[:100]}" for us, count, name in rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--mode", default="default", help="torch.compile's, such as max-autotune-no-cudagraphs")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each (default: %(default)s)")
    parser.add_argument("--breakdown", action="store_true", help="which kernels take the time")
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.models) - set(CASES):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    logging.getLogger("torch._inductor").setLevel(logging.CRITICAL)  # what its tuning tries and can't compile
    series = Series(args.json)
    for name, case in CASES.items():
        if args.models and name not in args.models:
            continue
        with series.case(name):
            if args.compile:
                start = time.perf_counter()
                exe, _ = compiled(case, *case.made())
                print(
                    "\n".join([f"{name}: compiled in {time.perf_counter() - start:.1f} s", *described(exe)]), flush=True
                )
                continue
            row = measured(name, case, args.mode, args.rounds, args.breakdown)
            series.add(
                row,
                f"{name:<20} {row['ours_ms'] * 1e3:9.1f} us ({row['ours_range'][0] * 1e3:.1f} to "
                f"{row['ours_range'][1] * 1e3:.1f})  {row['peer']} {row['peer_ms'] * 1e3:9.1f} us "
                f"({row['peer_range'][0] * 1e3:.1f} to {row['peer_range'][1] * 1e3:.1f})  ratio {row['ratio']:.3f}  "
                f"bound {row['bound_ms'] * 1e3:.1f} us  error {row['error']:.1e}, torch's {row['peer_error']:.1e}",
            )
            torch.cuda.empty_cache()
    if not args.compile:
        query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
        print(
            subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True).stdout,
            file=sys.stderr,
        )
    series.end()


if __name__ == "__main__":
    main()
