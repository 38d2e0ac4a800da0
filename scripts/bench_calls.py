"""What a call of a model's function takes beside its kernels: in sessions on two workers, and on one device.

The model is a decoder of tiny widths, whose kernels take next to nothing. The least of many calls counts, in wall time,
which other programs on the machine disturb, and in the time that the calling thread computed, which they don't. Beside
them stand what is in it: a command that does nothing, the function as the slower worker runs it, by its own clock, the
bytes that a call copies, and the arguments that are bound and that are said each time.

Run `python scripts/bench_calls.py [--layers 2 8 32] [--calls N]`.
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

import tvm_axe as axe
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
    options = parser.parse_args()
    main(options.layers, options.calls)
