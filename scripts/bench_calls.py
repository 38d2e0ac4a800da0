"""What calls take beside kernels: of a model's function, on two workers and on one device, and of tile programs.

The model is a decoder of tiny widths, whose kernels take next to nothing. The least of many calls counts, in wall time,
which other programs on the machine disturb, and in the time that the calling thread computed, which they don't. Beside
them stand what is in it: a command that does nothing, the function as the slower worker runs it, by its own clock, the
bytes that a call copies, and the arguments that are bound and that are said each time.

The tile program adds two small tensors of PyTorch, on the CPU and on a GPU if there is one: called, called with what
was bound before, and beside `torch.add(a, b, out=c)`. On a GPU, whose kernels run behind the host, a call is one of a
hundred in a row.

Run `python scripts/bench_calls.py [--layers 2 8 32] [--calls N]`, or `--tile` for tile programs alone.
"""

from __future__ import annotations

import argparse
import logging
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe import tile
from tvm_axe.executable import Session

MODELS = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "relax" / "shared_models.py"))


def least(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Milliseconds of the fastest call, and that the calling thread computed in the one where it did so least."""
    walls, computed = [], []
    for _ in range(calls):
        wall, own = time.perf_counter(), time.thread_time()
        call()
        walls.append(time.perf_counter() - wall)
        computed.append(time.thread_time() - own)
    return min(walls) * 1e3, min(computed) * 1e3


def measured(where: str, layers: int, session: Session, inputs: list[np.ndarray], calls: int, more: str = "") -> None:
    """Print a line of a session."""
    function = session.forward
    function(*inputs)
    before = session.copied
    function(*inputs)
    copied = session.copied - before
    wall, own = least(lambda: function(*inputs), calls)
    inside = min(function.time(*inputs, repeat=calls)) * 1e3
    print(
        f"{where:<10} {layers:>3} layers: a call {wall:.3f} ms, the caller computes {own:.3f}; the function "
        f"{inside:.3f}; {copied} bytes copied{more}",
        flush=True,
    )


@T.prim_func
def add(A: T.Buffer((64, 64), "float32"), B: T.Buffer((64, 64), "float32"), C: T.Buffer((64, 64), "float32")) -> None:
    """C = A + B, by one block."""
    with tile.kernel(1):
        a = tile.fragment((64, 64), "float32")
        b = tile.fragment((64, 64), "float32")
        tile.copy(A, a)
        tile.copy(B, b)
        with tile.parallel(64, 64) as (i, j):
            a[i, j] = a[i, j] + b[i, j]
        tile.copy(a, C)


def tile_calls(device: str, calls: int) -> None:
    """Print a line of a tile program's calls on a device."""
    import torch

    executable = tile.compile(add, "cuda" if device == "cuda" else "llvm")
    flat = torch.randn(3 * 64 * 64 + 16, device=device)
    first = -flat.data_ptr() % 64 // 4  # where a multiple of 64 bytes begins
    a, b, c = flat[first : first + 3 * 64 * 64].reshape(3, 64, 64)
    executable(a, b, c)
    if not torch.equal(c, a + b):
        raise AssertionError(f"add on {device} is wrong")
    row = 100 if device == "cuda" else 1
    of = {
        "a call": lambda: executable(a, b, c),
        "bound": executable.bind(a, b, c),
        "torch.add": lambda: torch.add(a, b, out=c),
    }
    found = {}
    for name, call in of.items():
        best = float("inf")
        for _ in range(calls):
            start = time.perf_counter()
            for _ in range(row):
                call()
            best = min(best, (time.perf_counter() - start) / row)
            if device == "cuda":
                torch.cuda.synchronize()
        found[name] = f"{name} {best * 1e6:.2f} us"
    print(f"tile program on {device}: {', '.join(found.values())}", flush=True)


def main(layers: list[int], calls: int) -> None:
    """Measure models of so many layers each."""
    logging.getLogger("tvm_axe").setLevel(logging.ERROR)
    mesh = axe.Mesh({"tp": 2})
    for count in layers:
        model = MODELS["decoder"](count, d=8, heads=2, kv=2, f=8, tokens=1, vocab=8)
        arrays = MODELS["drawn"](model)
        names = [str(param.name) for param in model["forward"].params]
        inputs, weights = arrays[:4], dict(zip(names[4:], arrays[4:]))
        with axe.compile(model, work_dir=None).load(weights) as session:
            measured("one device", count, session, inputs, calls)
        exe: Any = axe.compile(model, mesh=mesh, work_dir=None)
        for engine in ("threads", "processes"):
            with axe.launch(mesh, engine=engine) as workers, exe.load(workers, weights) as session:
                nothing, _ = least(lambda: workers._session.run("start"), calls)
                bound = session._memory._functions["forward"]
                said = f"; {len(bound.arguments) - len(bound.open)} arguments bound, {len(bound.open)} said; a command "
                measured(engine, count, session, inputs, calls, f"{said}{nothing:.3f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--tile", action="store_true", help="tile programs alone")
    options = parser.parse_args()
    if not options.tile:
        main(options.layers, options.calls)
    try:
        import torch
    except ImportError:
        print("tile programs are called with tensors of PyTorch, which isn't there")
    else:
        for where in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            tile_calls(where, options.calls)
