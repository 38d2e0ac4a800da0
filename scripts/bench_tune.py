"""What tuning is worth: float32 matmuls, tuned by `tvm_axe.meta`, against plain compilation and against numpy.

    python scripts/bench_tune.py [--threads 1] [--trials 64] [--work-dir tuning_logs] [--json]

Each shape is tuned first (a finished work directory is used as it is). Then all three run in turn in this process with
the same number of threads, and each figure is the median of its rounds; ratio = peer_ms / ours_ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

SHAPES = {"matmul 512x512x512": (512, 512, 512), "local matmul 512x768x1536": (512, 768, 1536)}
ROUNDS = 7
ROUND_SECONDS = 0.1


def medians(calls: dict[str, Callable[[], object]], nap: float) -> dict[str, float]:
    """Median seconds of each call, taken in turn; in a nap the other libraries' idle threads stop spinning."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            time.sleep(nap)
            call()
            start, count = time.perf_counter(), 0
            while count == 0 or time.perf_counter() - start < ROUND_SECONDS:
                call()
                count += 1
            times[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(series) for name, series in times.items()}


def bench(name: str, shape: tuple[int, int, int], args: argparse.Namespace) -> list[dict[str, object]]:
    """Tune one shape and compare; every result is checked against float64 first."""
    import numpy as np
    import tvm
    from tvm.script import tirx as T

    from tvm_axe.meta import apply_best, resolve_target, tune

    m, n, k = shape

    @T.prim_func(s_tir=True)
    def mm(A: T.Buffer((m, k), "float32"), W: T.Buffer((k, n), "float32"), C: T.Buffer((m, n), "float32")):
        T.func_attr({"global_symbol": "mm", "tirx.noalias": True})
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm_rf"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]

    target, mod = resolve_target("llvm", threads=args.threads), tvm.IRModule({"mm": mm})
    result = tune(mod, target=target, trials=args.trials, work_dir=args.work_dir, seed=0, progress=not args.json)
    print(f"{name}: {result.tasks[0].trials} trials, this call took {result.seconds}", file=sys.stderr)
    rng = np.random.default_rng(0)
    a, w = rng.standard_normal((m, k), dtype="float32"), rng.standard_normal((k, n), dtype="float32")
    out, want = np.empty((m, n), "float32"), a.astype("float64") @ w
    calls: dict[str, Callable[[], object]] = {f"numpy, {args.threads} thread(s)": lambda: np.matmul(a, w, out=out)}
    for kind, module in {"tuned": apply_best(mod, target, args.work_dir)[0], "untuned": mod}.items():
        tensors = [tvm.runtime.tensor(x) for x in (a, w, np.full((m, n), np.nan, "float32"))]
        kernel = tvm.compile(module, target=target)["mm"]
        kernel(*tensors)
        error = np.abs(tensors[-1].numpy() - want).max() / np.abs(want).max()
        if not error < 1e-5:
            raise SystemExit(f"{name}: the {kind} kernel is wrong: relative error {error}")
        calls[kind] = lambda kernel=kernel, tensors=tensors: kernel(*tensors)
    seconds = medians(calls, nap=0.25 if args.threads > 1 else 0.0)
    ours = seconds.pop("tuned")
    return [
        {"name": name, "ours_ms": ours * 1e3, "peer": peer, "peer_ms": s * 1e3, "ratio": s / ours}
        for peer, s in seconds.items()
    ]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of every contestant (default: 1)")
    parser.add_argument("--trials", type=int, default=64, help="candidates for each shape (default: 64)")
    parser.add_argument("--work-dir", default="tuning_logs", help="where records are kept (default: tuning_logs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    # Both are read when the library is loaded, which is why `bench` imports them.
    os.environ["TVM_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)
    rows = [row for name, shape in SHAPES.items() for row in bench(name, shape, args)]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(
            f"{row['name']:28} ours {row['ours_ms']:8.3f} ms   {row['peer']:18} {row['peer_ms']:8.3f} ms   "
            f"ratio {row['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
