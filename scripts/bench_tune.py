"""What tuning is worth: beside stock MetaSchedule with as many trials, and beside numpy.

    python scripts/bench_tune.py [SUITE ...] [--only NAME,...] [--trials N] [--work-dir DIR] [--json]

Suites (default: all), each in a process of its own with its number of threads:

matmul      float32 products on two threads, 64 trials, beside `tune_tir` and numpy, and the time of the search until
            it had what stock's search found in all
operators   upstream's `te_workload` set, its first size of each, on two threads, 128 trials, beside `tune_tir`
mlp         an MLP through Relax on one thread, 64 trials a function, beside numpy; its weights as they are in every
            call, and packed once

Tuning comes first; what a work directory holds already is used as it is. Stock is `tune_tir` with its defaults (its
builder and runner, 64 candidates a round). Then the contestants run in turn in one process on the same data, each
figure the median of its rounds; ratio = peer_ms / ours_ms. Of both tuners the best three recorded schedules are timed
again first, and the fastest of them is the contestant: with as noisy a machine as it was tuned on, a tuner's first is
not always its best. Every result is checked, products and the MLP against float64, operators against the function
compiled without a schedule. OpenBLAS takes 256-bit kernels on a CPU that is newer than itself;
OPENBLAS_CORETYPE=SkylakeX in the environment makes it take those of 512 bits, the stronger peer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from tvm_axe.defaults import WORK_DIR

MATMULS = ((512, 512, 512), (1024, 1024, 1024), (512, 3072, 768))
OPERATORS = ("C1D", "C2D", "C3D", "CAP", "DEP", "DIL", "GMM", "GRP", "T2D", "CBR", "TBG", "NRM", "SFM")
MLPS = {"MLP 32x256-512-64": (256, 512, 64), "MLP 32x256-512-512-64": (256, 512, 512, 64)}
BATCH = 32
SUITES = {"matmul": (2, 64), "operators": (2, 128), "mlp": (1, 64)}  # threads, trials
CANDIDATES, ROUNDS, ROUND_SECONDS, NAP = 3, 11, 0.1, 0.25

Call = Callable[[], float]  # runs a contestant some times and gives the seconds of one


def repeated(function: Callable[[], object]) -> Call:
    """A contestant that is a Python function."""

    def call() -> float:
        function()
        start, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - start < ROUND_SECONDS:
            function()
            count += 1
        return (time.perf_counter() - start) / count

    return call


def compiled(executable: Any, tensors: list[Any]) -> Call:
    """A contestant that is a compiled ``main``."""
    import tvm

    executable["main"](*tensors)
    once = executable.mod.time_evaluator("main", tvm.cpu(), number=3)(*tensors).mean
    timer = executable.mod.time_evaluator("main", tvm.cpu(), number=max(1, int(ROUND_SECONDS / once)))
    return lambda: float(timer(*tensors).mean)


def medians(calls: dict[str, Call], nap: float) -> dict[str, float]:
    """Median seconds of each call, taken in turn; in a nap the other libraries' idle threads stop spinning."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            time.sleep(nap)
            times[name].append(call())
    return {name: statistics.median(series) for name, series in times.items()}


def row(name: str, ours: float, peer: str, seconds: float) -> dict[str, Any]:
    """A row of the result, from seconds."""
    return {"name": name, "ours_ms": ours * 1e3, "peer": peer, "peer_ms": seconds * 1e3, "ratio": seconds / ours}


def records_below(folder: Path) -> list[Any]:
    """What stock reads of the databases below a folder, the fastest first."""
    from tvm.s_tir import meta_schedule as ms

    found = [
        record
        for path in sorted(folder.rglob("database_tuning_record.json"))
        for record in ms.database.JSONDatabase(work_dir=str(path.parent)).get_all_tuning_records()
        if record.trace.insts
    ]
    return sorted(found, key=lambda record: float(record.run_secs[0]))


def contestant(folder: Path, target: Any, tensors: list[Any], want: list[Any], name: str) -> Call:
    """The fastest of a tuner's best schedules, as they are timed here."""
    import numpy as np

    from tvm_axe.pipeline import build

    calls = []
    for record in records_below(folder)[:CANDIDATES]:
        scheduled = record.as_measure_candidate().sch.mod
        executable = build(scheduled, target)
        tensors[-1].copyfrom(np.full(want[-1].shape, np.nan, want[-1].dtype))
        executable["main"](*tensors)
        error = np.abs(tensors[-1].numpy() - want[-1]).max() / np.abs(want[-1]).max()
        if not error < 1e-4:
            raise SystemExit(f"{name}: a schedule in {folder} is wrong: relative error {error}")
        calls.append(compiled(executable, tensors))
    if not calls:
        raise SystemExit(f"{name}: no schedule in {folder}")
    return min(calls, key=lambda call: min(call(), call(), call()))


def tune_stock(func: Any, target: Any, trials: int, folder: Path) -> None:
    """Tune by `tune_tir`, unless that was done; its rounds, with the time since its start, are kept beside."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    if (folder / "done.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    start, rounds = time.perf_counter(), []

    @derived_object
    class Clock(ms.measure_callback.PyMeasureCallback):
        def apply(self, _scheduler: Any, _task: int, _candidates: Any, _builds: Any, results: Any) -> None:
            good = [float(min(r.run_secs)) for r in results or [] if r.run_secs]
            rounds.append([time.perf_counter() - start, min(good, default=math.inf)])

    callbacks = [*ms.MeasureCallback.create("default"), Clock()]
    with contextlib.redirect_stdout(sys.stderr):  # its log is long
        ms.tune_tir(
            func, target, str(folder), max_trials_global=trials, num_tuning_cores=2, seed=1, measure_callbacks=callbacks
        )
    (folder / "done.json").write_text(json.dumps({"rounds": rounds}))


def tune_ours(func: Any, target: Any, trials: int, folder: Path, **options: bool) -> None:
    """Tune by this package."""
    import tvm_axe as axe

    axe.tune(func, target=target, trials=trials, work_dir=folder, seed=1, progress=False, **options)


def prepared(func: Any, arrays: list[Any], want: Any | None) -> tuple[list[Any], list[Any]]:
    """Tensors for a call, and arrays after it: `want` as the output, or what the function without a schedule leaves."""
    import tvm

    tensors = [tvm.runtime.tensor(array) for array in arrays]
    if want is None:
        tvm.compile(tvm.IRModule({"main": func}), target="llvm")["main"](*tensors)
        want = tensors[-1].numpy()
    return tensors, [*arrays[:-1], want]


def product(m: int, n: int, k: int) -> Any:
    """``C = A @ B`` in float32."""
    from tvm import te

    a, b, r = (
        te.placeholder((m, k), "float32", "A"),
        te.placeholder((k, n), "float32", "B"),
        te.reduce_axis((0, k), "r"),
    )
    return te.create_prim_func([a, b, te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), "C")])


def matmuls(args: argparse.Namespace, target: Any) -> list[dict[str, Any]]:
    """The suite of products."""
    import numpy as np

    rows, rng = [], np.random.default_rng(0)
    for m, n, k in MATMULS:
        name = f"matmul {m}x{n}x{k}"
        if args.only and name not in args.only:
            continue
        func = product(m, n, k)
        ours, stock = args.work_dir / "ours" / name.replace(" ", "-"), args.work_dir / "stock" / name.replace(" ", "-")
        tune_stock(func, target, args.trials, stock)
        tune_ours(func, target, args.trials, ours)
        a, b = rng.standard_normal((m, k), dtype="float32"), rng.standard_normal((k, n), dtype="float32")
        out = np.empty((m, n), "float32")
        tensors, want = prepared(func, [a, b, out], a.astype("float64") @ b)
        calls = {
            "ours": contestant(ours, target, tensors, want, name),
            f"stock, {args.trials} trials": contestant(stock, target, tensors, want, name),
            "numpy": repeated(lambda a=a, b=b, out=out: np.matmul(a, b, out=out)),
        }
        seconds = medians(calls, NAP)
        own = seconds.pop("ours")
        rows += [row(name, own, peer, s) for peer, s in seconds.items()]
        rows += time_to_best(name, ours, stock)
    return rows


def time_to_best(name: str, ours: Path, stock: Path) -> list[dict[str, Any]]:
    """How long each search took to the time that stock's came to; ours as its log of trials says."""
    rounds = json.loads((stock / "done.json").read_text())["rounds"]
    best = min(seconds for _, seconds in rounds)
    theirs = next(elapsed for elapsed, seconds in rounds if seconds == best)
    trials = [json.loads(line) for log in ours.rglob("trials.jsonl") for line in log.read_text().splitlines()]
    own = [trial["elapsed"] for trial in trials if trial["seconds"] is not None and trial["seconds"] <= best]
    return [row(f"{name}: search to stock's best", min(own), "stock", theirs)] if own else []


def operators(args: argparse.Namespace, target: Any) -> list[dict[str, Any]]:
    """The suite of upstream's workloads, and the geometric mean of its ratios."""
    import numpy as np
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload

    rows, rng = [], np.random.default_rng(0)
    for name in OPERATORS:
        if args.only and name not in args.only:
            continue
        func = create_te_workload(name, 0)
        ours, stock = args.work_dir / "ours" / name, args.work_dir / "stock" / name
        tune_stock(func, target, args.trials, stock)
        tune_ours(func, target, args.trials, ours)
        infos = ms.arg_info.ArgInfo.from_prim_func(func)
        arrays = [rng.standard_normal(tuple(map(int, info.shape)), dtype="float32") for info in infos]
        tensors, want = prepared(func, arrays, None)
        peer = f"stock, {args.trials} trials"
        seconds = medians(
            {
                "ours": contestant(ours, target, tensors, want, name),
                peer: contestant(stock, target, tensors, want, name),
            },
            nap=0.0,
        )
        rows.append(row(name, seconds["ours"], peer, seconds[peer]))
        print(f"{name} {rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    if len(rows) > 1:
        mean = math.exp(statistics.fmean(math.log(r["ratio"]) for r in rows))
        total = [math.exp(statistics.fmean(math.log(r[key]) for r in rows)) for key in ("ours_ms", "peer_ms")]
        rows.append({"name": "geometric mean", "ours_ms": total[0], "peer": peer, "peer_ms": total[1], "ratio": mean})
    return rows


def mlps(args: argparse.Namespace, target: Any) -> list[dict[str, Any]]:
    """The suite of models."""
    import numpy as np
    import tvm
    from tvm import relax
    from tvm.relax.frontend import nn

    import tvm_axe as axe

    class MLP(nn.Module):
        def __init__(self, widths: tuple[int, ...]) -> None:
            self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            for layer in self.layers[:-1]:
                x = nn.op.relu(layer(x))
            return self.layers[-1](x)

    rows, rng = [], np.random.default_rng(0)
    for name, widths in MLPS.items():
        if args.only and name not in args.only:
            continue
        model, _ = MLP(widths).export_tvm({"forward": {"x": nn.spec.Tensor([BATCH, widths[0]], "float32")}})
        shapes = [[int(extent) for extent in param.ty.shape] for param in model["forward"].params]
        arrays = [rng.standard_normal(s, dtype="float32") / np.float32(math.sqrt(s[-1])) for s in shapes]
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        folder = args.work_dir / "ours" / name.replace(" ", "-")
        machines = {}
        for packed in (False, True):
            tune_ours(model, target, args.trials, folder, pack_weights=packed)
            executable = axe.compile(model, target=target, work_dir=folder, pack_weights=packed).vm
            machines[packed] = relax.VirtualMachine(executable, tvm.cpu())
        weights = machines[True]["forward_transform_params"](tensors[1:])
        runs: dict[str, Callable[[], Any]] = {
            name: lambda vm=machines[False], t=tensors: vm["forward"](*t),
            f"{name}, weights packed once": lambda vm=machines[True], x=tensors[0], w=weights: vm["forward"](x, *w),
        }

        def numpy_mlp(arrays: list[Any] = arrays) -> Any:
            x, *params = arrays
            for n in range(0, len(params), 2):
                x = x @ params[n].T + params[n + 1]
                if n + 2 < len(params):
                    np.maximum(x, 0, out=x)
            return x

        want = numpy_mlp([array.astype("float64") for array in arrays])
        for kind, run in runs.items():
            error = np.abs(run().numpy() - want).max() / np.abs(want).max()
            if not error < 1e-5:
                raise SystemExit(f"{kind}: the model is wrong: relative error {error}")
        seconds = medians({**{k: repeated(run) for k, run in runs.items()}, "numpy": repeated(numpy_mlp)}, nap=0.0)
        rows += [row(kind, seconds[kind], "numpy", seconds["numpy"]) for kind in runs]
    return rows


def run_suite(suite: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One suite, in a process that has its threads."""
    from tvm_axe.machines.target import resolve_target

    threads, trials = SUITES[suite]
    args.trials = args.trials or trials
    return {"matmul": matmuls, "operators": operators, "mlp": mlps}[suite](
        args, resolve_target("llvm", threads=threads)
    )


def main() -> None:
    """Parse; give each suite a process; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)} (default: all)")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...", help="rows of the suites")
    parser.add_argument("--trials", type=int, help="candidates for each function (default: the suite's)")
    parser.add_argument("--work-dir", type=Path, default=Path(WORK_DIR, "bench"), help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    unknown = set(args.suites) - set(SUITES)
    if unknown:
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    rows: list[dict[str, Any]] = []
    for suite in args.suites or SUITES:
        # Both are read when the library is loaded.
        os.environ["TVM_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(SUITES[suite][0])
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            rows += process.submit(run_suite, suite, args).result()
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    for r in rows:
        print(
            f"{r['name']:44} ours {r['ours_ms']:10.4f} ms   {r['peer']:18} {r['peer_ms']:10.4f} ms   "
            f"ratio {r['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
