"""The process in which candidates are built and run.

It imports the compiler once and stays up, so that a candidate costs its own compilation and timing and nothing else
(upstream's builder starts new processes for every round and imports every tensor intrinsic in each). It is started,
fed and replaced by `tvm_axe.meta.measure.Worker`. What is said on the pipe, always by the other side first:

    (PREPARE, mod, target, None)      -> ("ok", {"reference": arrays, "median": seconds}), the untuned function's
    (PREPARE, mod, target, reference) -> ("ok", {}), in a process that replaces one
    (MEASURE, mod)                    -> ("ok", {"median": seconds, "build": seconds, "run": seconds})
    any                               -> ("error", one line)
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.lower.tiles import with_tile_kernels

PREPARE, MEASURE = "prepare", "measure"

_REPEATS = 5
_REPEAT_SECONDS = 0.015  # long against the clock's resolution and a scheduler's tick
_CANDIDATE_SECONDS = 0.3  # a candidate slower than that is timed fewer times: it isn't a winner
_MESSAGE = 300  # characters of an error, from its end: the compiler's can hold whole modules, and ends with the reason
_PR_SET_PDEATHSIG = 1


class Bench:
    """Builds and runs candidates of one function on the same random arguments."""

    def __init__(self, mod: IRModule, target: Target) -> None:
        self.target = target
        infos = ms.arg_info.ArgInfo.from_prim_func(mod["main"])
        rng = np.random.default_rng(0)
        self.arguments = [_random(rng, tuple(map(int, i.shape)), np.dtype(str(i.dtype))) for i in infos]
        self.reference: list[np.ndarray] = []

    def build(self, mod: IRModule) -> tvm.runtime.Executable:
        return tvm.compile(with_tile_kernels(mod, self.target), target=self.target)

    def run(self, executable: tvm.runtime.Executable) -> list[tvm.runtime.Tensor]:
        """Run once on fresh arguments; give all of them as they are afterwards.

        An output starts as random numbers like everything else, so what a kernel forgets to write doesn't agree with
        the reference, and a kernel that updates a buffer starts from the same one as the reference.
        """
        arguments = [tvm.runtime.tensor(a) for a in self.arguments]
        executable["main"](*arguments)
        return arguments

    def check(self, arguments: list[tvm.runtime.Tensor]) -> None:
        """Raise where a result is not the untuned function's, by more than a reordered sum explains."""
        for n, (got, want) in enumerate(zip(arguments, self.reference)):
            error, bound = _difference(got.numpy(), want)
            if not error <= bound:
                raise ValueError(f"wrong result: argument {n} is off by {error:.2g} of its largest value")

    def time(self, executable: tvm.runtime.Executable, arguments: list[tvm.runtime.Tensor]) -> float:
        """Median seconds of a call. Caches are warm: the same arguments every time, nothing flushed in between.

        The first call, which links the code and starts the threads, has been made.
        """
        start = time.perf_counter()
        executable["main"](*arguments)
        once = time.perf_counter() - start
        if once > _CANDIDATE_SECONDS:
            return once
        number = max(1, round(_REPEAT_SECONDS / once))
        repeats = min(_REPEATS, max(1, int(_CANDIDATE_SECONDS / (once * number))))
        timer = executable.mod.time_evaluator("main", tvm.cpu(), number=number, repeat=repeats)
        return float(np.median(timer(*arguments).results))


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Random contents; integers are 0 or 1, which are also valid as indices into anything."""
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _difference(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """The largest difference relative to the largest wanted value, and how much of it is rounding."""
    if want.dtype.kind != "f":
        return float((got != want).any()), 0.0
    if np.array_equal(got, want, equal_nan=True):
        return 0.0, 0.0
    wide = want.astype("float64")
    scale = np.abs(wide).max(initial=0.0) or 1.0
    return float(np.abs(got.astype("float64") - wide).max() / scale), float(np.sqrt(np.finfo(want.dtype).eps))


def _prepare(mod_json: str, target: str, reference: list[np.ndarray] | None) -> tuple[Bench, dict[str, Any]]:
    mod = tvm.ir.load_json(mod_json)
    bench = Bench(mod, Target(json.loads(target)))
    if reference is not None:
        bench.reference = reference
        return bench, {}
    executable = bench.build(mod)
    arguments = bench.run(executable)
    bench.reference = [argument.numpy().copy() for argument in arguments]
    return bench, {"reference": bench.reference, "median": bench.time(executable, arguments)}


def _measure(bench: Bench, mod_json: str) -> dict[str, float]:
    start = time.perf_counter()
    executable = bench.build(tvm.ir.load_json(mod_json))
    built = time.perf_counter()
    arguments = bench.run(executable)
    bench.check(arguments)
    median = bench.time(executable, arguments)
    return {"median": median, "build": built - start, "run": time.perf_counter() - built}


def serve(pipe: Connection) -> None:
    """Answer requests until the other side closes the pipe."""
    bench: Bench | None = None
    while True:
        try:
            kind, *request = pipe.recv()
        except EOFError:
            return
        try:
            if kind == PREPARE:
                bench, answer = _prepare(*request)
            elif bench is not None:
                answer = _measure(bench, *request)
            else:
                raise ValueError("nothing was prepared")
            pipe.send(("ok", answer))
        # Whatever a candidate makes the compiler raise is that candidate's result, not this process's end.
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {' '.join(str(error).split())[-_MESSAGE:]}"))


def main() -> None:
    """Serve the connection whose file descriptor is the first argument, for the process whose id is the second."""
    # A tuner that is killed can't stop its worker, which may be in a kernel that never returns.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):  # it was killed before that call
        return
    serve(Connection(int(sys.argv[1])))
