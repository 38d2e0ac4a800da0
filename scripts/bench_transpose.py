"""What a layout of shared memory is worth: a tiled float32 transpose on a CUDA GPU, the tile laid out in three ways.

    python scripts/bench_transpose.py [--size 8192] [--json]

The bound is the traffic, each element read and written once. The peer of each layout is the row-major tile, and, where
PyTorch is installed, ``x.t().contiguous()``. Medians of many runs over buffers larger than the cache, checked first.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from transpose import LAYOUTS, tiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192, help="rows and columns (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device, n = tvm.cuda(0), args.size
    if not device.exist:
        sys.exit("bench_transpose: no CUDA GPU on this machine")
    a = np.random.default_rng(0).standard_normal((n, n)).astype("float32")
    source = tvm.runtime.tensor(a, device)
    milliseconds = {}
    for name, layout in LAYOUTS.items():
        executable = tvm.compile(tiled(n, n, layout).mod, target=tvm.target.Target("cuda", host="llvm"))
        out = tvm.runtime.tensor(np.full((n, n), np.nan, "float32"), device)
        executable["main"](source, out)
        np.testing.assert_array_equal(out.numpy(), a.T)
        timer = executable.mod.time_evaluator("main", device, number=5, repeat=args.repeat)
        milliseconds[name] = 1e3 * statistics.median(timer(source, out).results)
    peers = {"row-major": milliseconds["row-major"]}
    torch_ms = _torch_ms(a, args.repeat)
    if torch_ms is not None:
        peers["torch x.t().contiguous()"] = torch_ms
    rows = [
        {"name": f"transpose {n}x{n}, {name}", "ours_ms": ours, "peer": peer, "peer_ms": ms, "ratio": ms / ours}
        for name, ours in milliseconds.items()
        for peer, ms in peers.items()
    ]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        rate = 8e-9 * n * n / row["ours_ms"]
        print(
            f"{row['name']:<32} {row['ours_ms']:.4f} ms ({rate:.2f} TB/s)  "
            f"{row['peer']:<26} {row['peer_ms']:.4f} ms  ratio {row['ratio']:.2f}"
        )


def _torch_ms(a: np.ndarray, repeat: int) -> float | None:
    """The median time of PyTorch's transpose, or None where there is no PyTorch with CUDA."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    x, times = torch.from_numpy(a).cuda(), []
    for _ in range(repeat):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            x.t().contiguous()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 5)
    return statistics.median(times)


if __name__ == "__main__":
    main()
