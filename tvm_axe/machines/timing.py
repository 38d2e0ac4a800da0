"""Timing a built function in this process, in slices between which Ctrl-C is heard."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import tvm
from tvm.runtime import Module

from tvm_axe.errors import InputError

__all__ = ["timed"]

_SLICE = 0.1  # seconds
_FEWEST = 4  # runs of a slice: upstream's evaluator has one more run before them, which no slice is to be for


def timed(
    module: Module, name: str, device: tvm.runtime.Device, arguments: Sequence[Any], repeat: int, warmup: int
) -> list[float]:
    """Seconds of each of `repeat` runs on the device's own clock, after `warmup` that don't count.

    Upstream's evaluator makes all its runs in C++, where Python hears of no signal; so it is asked for a few at a time.

    Raises
    ------
    InputError
        If `repeat` or `warmup` is too small.
    """
    if repeat < 1 or warmup < 0:
        raise InputError(f"time: repeat must be at least 1 and warmup at least 0, not {repeat} and {warmup}")
    function = module[name]
    for _ in range(warmup):
        function(*arguments)
    seconds: list[float] = []
    while len(seconds) < repeat:
        runs = _FEWEST if not seconds else max(_FEWEST, int(_SLICE / max(statistics.median(seconds), 1e-9)))
        timer = module.time_evaluator(name, device, number=1, repeat=min(runs, repeat - len(seconds)))
        seconds += map(float, timer(*arguments).results)
    return seconds
