"""Tile programs on this machine's CPU beside numpy (OpenBLAS for products), with the same number of threads.

    python scripts/bench_cpu.py [--threads 2] [--only matmul] [--rounds 9] [--json]

Every result is checked against float64 first. Then numpy and ours run in turn in this process, and each figure is the
median of the rounds; ratio = peer_ms / ours_ms.

The bound of a product is the multiply-add units: on a core with two of 512 bits, 2 * 2 * 16 = 64 operations a cycle of
float32, which is 269 GFLOP/s a core at 4.2 GHz (32 a cycle with two of 256 bits). That of softmax and RMSNorm is
memory: every element is read and written once. OpenBLAS takes 256-bit kernels on a CPU that is newer than itself;
OPENBLAS_CORETYPE=SkylakeX in the environment makes it take those of 512 bits, the stronger peer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

MATMULS = ((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (512, 3072, 768), (497, 1003, 301))
NAP, WARM, BLOCK = 0.25, 0.05, 0.12  # seconds; in a nap the other library's idle threads stop spinning


def problems() -> Iterator[tuple[str, str, dict[str, Any], Callable[..., Any]]]:
    """(row, kernel, problem, the same in numpy)."""
    import numpy as np

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = np.matmul(q, k.swapaxes(-1, -2))
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores * np.float32(q.shape[-1] ** -0.5), out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return np.matmul(scores, v)

    def softmax(x: Any) -> Any:
        y = np.exp(x - x.max(axis=1, keepdims=True))
        y /= y.sum(axis=1, keepdims=True)
        return y

    def rms_norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(1e-6)) * weight

    for m, n, k in MATMULS:
        sizes = {"m": m, "n": n, "k": k, "dtype": "float32"}
        yield f"matmul {m}x{n}x{k}", "matmul", {**sizes, "transpose_b": False}, lambda a, b: a @ b
    sizes = {"m": 512, "n": 3072, "k": 768, "dtype": "float32"}
    yield "matmul 512x3072x768, B transposed", "matmul", sizes, lambda a, b: a @ b.T
    heads = {"batch": 1, "heads": 8, "kv_heads": 8, "queries": 1024, "keys": 1024, "dim": 64, "dtype": "float32"}
    yield "attention 8 heads of 1024x1024x64", "attention", heads, attention
    rows = {"rows": 4096, "columns": 4096, "dtype": "float32"}
    yield "softmax 4096x4096", "softmax", rows, softmax
    yield "rms_norm 4096x4096", "rms_norm", rows, rms_norm


def bench(name: str, kernel_name: str, problem: dict[str, Any], peer: Callable[..., Any], args: Any) -> dict[str, Any]:
    """Compile, check and time one row."""
    import numpy as np
    import tvm

    from tvm_axe.machines.target import resolve_target
    from tvm_axe.tile import compile
    from tvm_axe.tile.kernels import KERNELS

    target, kernel, rng = resolve_target("llvm", threads=args.threads), KERNELS[kernel_name], np.random.default_rng()
    recipe = kernel.recipe(target, problem)
    (program,), (output,) = recipe.programs, recipe.outputs
    arrays = kernel.inputs(rng, problem)
    want = kernel.reference(problem, arrays)[output].value
    tensors = [tvm.runtime.tensor(array) for array in (*arrays.values(), np.full(want.shape, np.nan, "float32"))]
    run = compile(program, target)
    run(*tensors)
    error = np.abs(tensors[-1].numpy() - want).max() / np.abs(want).max()
    if not error < 1e-5:
        raise SystemExit(f"{name}: the result is wrong: relative error {error}")
    seconds = medians({"ours": lambda: run(*tensors), "numpy": lambda: peer(*arrays.values())}, args.rounds)
    row = {"name": name, "ours_ms": 1e3 * seconds["ours"], "peer": f"numpy, {args.threads} thread(s)"}
    row |= {"peer_ms": 1e3 * seconds["numpy"], "ratio": seconds["numpy"] / seconds["ours"]}
    if kernel_name == "matmul":
        row["gflops"] = 2e-9 * problem["m"] * problem["n"] * problem["k"] / seconds["ours"]
    return row


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each call, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in list(calls.items()) * rounds:
        time.sleep(NAP)
        for budget in (WARM, BLOCK):
            start, count = time.perf_counter(), 0
            while count == 0 or time.perf_counter() - start < budget:
                call()
                count += 1
        times[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(series) for name, series in times.items()}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of every contestant (default: 2)")
    parser.add_argument("--rounds", type=int, default=9, help="medians are over so many (default: 9)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the rows whose name has it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    # Both are read when the library is loaded, which is why `bench` imports them.
    os.environ["TVM_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)
    rows = [bench(*problem, args) for problem in problems() if args.only in problem[0]]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        rate = f"{row['gflops']:7.1f} GFLOP/s" if "gflops" in row else " " * 15
        print(
            f"{row['name']:34} ours {row['ours_ms']:8.3f} ms {rate}   {row['peer']} {row['peer_ms']:8.3f} ms   "
            f"ratio {row['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
