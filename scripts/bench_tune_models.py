"""What tuning is worth on the operators that importers bring: beside stock MetaSchedule with as many trials.

    python scripts/bench_tune_models.py [SUITE ...] [--only NAME,...] [--trials N] [--threads N] [--work-dir D] [--json]

Suites (default: all), float32 as PyTorch and ONNX importers give them to Relax, and as Relax legalizes them:

convolutions   data [N, C, H, W], weights [O, I, kh, kw], bias, relu: shapes of ResNet-50, MobileNet and ResNeXt
norms          rms_norm, layer_norm, softmax and log_softmax, over the last axis and another

Tuning comes first; what a work directory holds already is used as it is. Then the contestants run in turn in one
process on the same data (`scripts/bench_tune.py` says how); ratio = peer_ms / ours_ms. Every result is checked against
the function compiled without a schedule.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_tune import contestant, medians, prepared, row, tune_ours, tune_stock

from tvm_axe.defaults import WORK_DIR

# Input channels, size of the image, output channels, size of the kernel, stride, groups.
CONVOLUTIONS = {
    "3x3 64 at 56": (64, 56, 64, 3, 1, 1),
    "3x3 128 at 28": (128, 28, 128, 3, 1, 1),
    "3x3 256 at 14": (256, 14, 256, 3, 1, 1),
    "3x3 512 at 7": (512, 7, 512, 3, 1, 1),
    "1x1 64 to 256 at 56": (64, 56, 256, 1, 1, 1),
    "1x1 1024 to 256 at 14": (1024, 14, 256, 1, 1, 1),
    "1x1 512 to 2048 at 7": (512, 7, 2048, 1, 1, 1),
    "3x3 128 at 56 by 2": (128, 56, 128, 3, 2, 1),
    "1x1 256 to 512 at 56 by 2": (256, 56, 512, 1, 2, 1),
    "7x7 3 to 64 at 224 by 2": (3, 224, 64, 7, 2, 1),
    "3x3 128 at 28 in 32 groups": (128, 28, 128, 3, 1, 32),
    "3x3 96 at 56 depthwise": (96, 56, 96, 3, 1, 96),
    "3x3 96 at 112 depthwise by 2": (96, 112, 96, 3, 2, 96),
    "3x3 17 at 13": (17, 13, 17, 3, 1, 1),
}
# Operator, shape, axis.
NORMS = {
    "rms_norm 1x4096": ("rms_norm", (1, 4096), -1),
    "rms_norm 128x4096": ("rms_norm", (128, 4096), -1),
    "layer_norm 128x768": ("layer_norm", (128, 768), -1),
    "layer_norm 1024x1024": ("layer_norm", (1024, 1024), -1),
    "softmax 384x384": ("softmax", (384, 384), -1),
    "softmax 8x128x64 by 1": ("softmax", (8, 128, 64), 1),
    "log_softmax 64x1000": ("log_softmax", (64, 1000), -1),
}
SUITES = ("convolutions", "norms")


def convolution(channels: int, size: int, out: int, kernel: int, stride: int, groups: int) -> Any:
    """``relu(conv2d(x, w) + b)`` of one image, as Relax legalizes and fuses it."""
    from tvm import relax

    def build(bb: Any, x: Any, w: Any, b: Any) -> Any:
        y = bb.emit(relax.op.nn.conv2d(x, w, strides=stride, padding=kernel // 2, groups=groups))
        return relax.op.nn.relu(bb.emit(relax.op.add(y, b)))

    shapes = [(1, channels, size, size), (out, channels // groups, kernel, kernel), (1, out, 1, 1)]
    return legalized(shapes, build)


def norm(operator: str, shape: tuple[int, ...], axis: int) -> Any:
    """A norm or a softmax, as Relax legalizes it."""
    from tvm import relax

    columns = (shape[axis],)
    if operator == "rms_norm":
        return legalized([shape, columns], lambda _, x, w: relax.op.nn.rms_norm(x, w, axes=[axis]))
    if operator == "layer_norm":
        return legalized([shape, columns, columns], lambda _, x, w, b: relax.op.nn.layer_norm(x, w, b, axes=[axis]))
    return legalized([shape], lambda _, x: getattr(relax.op.nn, operator)(x, axis=axis))


def legalized(shapes: list[tuple[int, ...]], build: Callable[..., Any]) -> Any:
    """The one kernel of a model that is `build` of parameters with these shapes."""
    from tvm import relax

    from tvm_axe.machines.target import resolve_target
    from tvm_axe.meta.search.workloads import workloads_of

    bb = relax.BlockBuilder()
    params = [relax.Var(f"x{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(shapes)]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(build(bb, *params))
        bb.emit_func_output(out)
    (workload,), _ = workloads_of(bb.get(), resolve_target("llvm"))
    return workload.mod["main"]


def compare(name: str, func: Any, args: argparse.Namespace, target: Any) -> dict[str, Any]:
    """Tune a function by both and time their best: a row of the result."""
    import numpy as np
    from tvm.s_tir import meta_schedule as ms

    folder = name.replace(" ", "-")
    ours, stock = args.work_dir / "ours" / folder, args.work_dir / "stock" / folder
    tune_stock(func, target, args.trials, stock)
    tune_ours(func, target, args.trials, ours)
    rng = np.random.default_rng(0)
    infos = ms.arg_info.ArgInfo.from_prim_func(func)
    arrays = [rng.standard_normal(tuple(map(int, info.shape)), dtype="float32") for info in infos]
    tensors, want = prepared(func, arrays, None)
    peer = f"stock, {args.trials} trials"
    folders = {"ours": ours, peer: stock}
    seconds = medians({who: contestant(path, target, tensors, want, name) for who, path in folders.items()}, nap=0.0)
    return row(name, seconds["ours"], peer, seconds[peer])


def main() -> None:
    """Parse; tune and time; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)} (default: all)")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...", help="rows of the suites")
    parser.add_argument("--trials", type=int, default=64, help="candidates for each function (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of a kernel (default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, default=Path(WORK_DIR, "bench-models"), help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    unknown = set(args.suites) - set(SUITES)
    if unknown:
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    os.environ["TVM_NUM_THREADS"] = str(args.threads)  # read when the library is loaded
    from tvm_axe.machines.target import resolve_target

    target, rows = resolve_target("llvm", threads=args.threads), []
    for suite in args.suites or SUITES:
        cases: dict[str, Callable[[], Any]] = (
            {name: lambda case=case: convolution(*case) for name, case in CONVOLUTIONS.items()}
            if suite == "convolutions"
            else {name: lambda case=case: norm(*case) for name, case in NORMS.items()}
        )
        for name in [name for name in cases if not args.only or name in args.only]:
            rows.append(compare(name, cases[name](), args, target))
            print(f"{name} {rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    if len(rows) > 1:
        mean = math.exp(statistics.fmean(math.log(r["ratio"]) for r in rows))
        own, peers = (math.exp(statistics.fmean(math.log(r[key]) for r in rows)) for key in ("ours_ms", "peer_ms"))
        rows.append(row("geometric mean", own / 1e3, rows[0]["peer"], peers / 1e3) | {"ratio": mean})
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    for r in rows:
        print(
            f"{r['name']:32} ours {r['ours_ms']:10.4f} ms   {r['peer']:18} {r['peer_ms']:10.4f} ms   "
            f"ratio {r['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
