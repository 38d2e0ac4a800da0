"""How scripts/bench_gpu.py and those like it time functions on a CUDA GPU: CUDA graphs, in turns, medians, rows."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

Timer = Callable[[float], float]
"""Milliseconds of a call, of as many replays as take so many seconds, and one at least."""

LONGEST = 0.03
"""Seconds that a graph takes at most, unless four calls take longer: a peer may take a hundred times what ours does."""


@dataclass(frozen=True)
class Captured:
    """A CUDA graph that calls a function so many times, and the seconds that a replay took when it was made.

    The tensors of the sets live as long as it does: a graph knows only where they lie.
    """

    graph: Any
    calls: int
    seconds: float
    sets: Sequence[Mapping[str, Any]]

    def replayed(self, replays: int) -> float:
        """Milliseconds of a call, by the GPU's clock."""
        return elapsed(self.graph.replay, replays) / self.calls

    def timed(self, seconds: float) -> float:
        """The same of as many replays as take so long."""
        return self.replayed(max(1, math.ceil(seconds / self.seconds)))


def captured(
    functions: Mapping[str, Callable[[Mapping[str, Any]], object]], sets: Sequence[Mapping[str, Any]], calls: int
) -> dict[str, Captured]:
    """A CUDA graph of each function, which calls it on the input sets in rotation, `calls` times unless it is slow."""
    import torch
    import tvm_ffi

    made = {}
    for name, function in functions.items():
        for tensors in sets:  # what is loaded or chosen at the first call is no part of a graph
            function(tensors)
        once = elapsed(lambda function=function: function(sets[0]), 1) * 1e-3
        own = min(calls, max(4, math.ceil(LONGEST / once)))
        graph = torch.cuda.CUDAGraph()
        with tvm_ffi.use_torch_stream(torch.cuda.graph(graph)):
            for i in range(own):
                function(sets[i % len(sets)])
        graph.replay()
        made[name] = Captured(graph, own, elapsed(graph.replay, 1) * 1e-3, sets)
    return made


def in_turns(timers: Mapping[str, Timer], rounds: int, pause: float, seconds: float) -> dict[str, float]:
    """Median milliseconds of a call by each timer, after `pause` seconds of rest and a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for i in range(rounds):
        for name in list(timers)[:: 1 - 2 * (i % 2)]:
            time.sleep(pause)
            timers[name](seconds / 4)  # warm-up
            times[name].append(timers[name](seconds))
    return {name: statistics.median(series) for name, series in times.items()}


def calls_of(seconds: float) -> int:
    """How many calls make a burst of about 3 ms, of a function that takes so long at best."""
    return max(4, math.ceil(3e-3 / (seconds + 2e-6)))


def size(made: Mapping[str, Any]) -> int:
    """Bytes of all tensors of a set."""
    return sum(tensor.numel() * tensor.element_size() for tensor in made.values())


def elapsed(call: Callable[[], object], times: int) -> float:
    """Milliseconds of a call, by the GPU's clock; what was begun before is over first."""
    import torch

    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / times


def part(text: str) -> slice:
    """Which cases ``K/N`` means: every N-th from the K-th, so that several GPUs share them."""
    first, step = map(int, text.split("/"))
    if not 0 <= first < step:
        raise ValueError(text)
    return slice(first, None, step)


class Series:
    """The rows of a bench: each is printed when it is there, or all as JSON in the end; a case that fails is said."""

    def __init__(self, as_json: bool) -> None:
        self.as_json, self.failed, self.rows = as_json, 0, list[dict[str, Any]]()

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Go on behind this case whatever is raised in it."""
        try:
            yield
        except Exception as error:
            self.failed += 1
            print(f"{name}: {type(error).__name__}: {error}"[:2000], file=sys.stderr, flush=True)

    def add(self, row: dict[str, Any], line: str) -> None:
        """Add a row, which reads so."""
        self.rows.append(row)
        if not self.as_json:
            print(line, flush=True)

    def end(self) -> NoReturn:
        """Print what is left to print, and exit with 1 if a case has failed."""
        if self.as_json:
            print(json.dumps({"rows": self.rows}))
        sys.exit(1 if self.failed else 0)
