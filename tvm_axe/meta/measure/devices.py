"""Where a candidate runs: its arguments there, and how a call is timed.

Both devices hold every input set in memory of their own, and give the median seconds of a call. What the caches hold
while that is measured is part of the result, and `conditions` says it:

- A CPU's caches are warm. Each repeat calls the kernel on one set for about 15 ms, the next repeat on the next set.
- A GPU's hold what a round over the sets leaves of the last one: the calls of one CUDA graph go through the sets in
  turn. There are as many sets as it takes to exceed the second-level cache twice, at most 8, so that a kernel that
  reads large weights finds them in memory, as in a model, and a small one finds all in cache.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import tvm
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.machines import backend_of
from tvm_axe.meta.measure.child import Fatal
from tvm_axe.meta.measure.cuda_graph import Graph
from tvm_axe.meta.measure.exchange import Params
from tvm_axe.meta.measure.guarded import Guarded

__all__ = ["CANDIDATE_SECONDS", "REPEATS", "Device", "OnCpu", "OnGpu", "Packs", "device_for", "repeats_of"]

REPEATS = 5
_CPU_REPEAT_SECONDS = 0.015  # long against the clock's resolution and a scheduler's tick
_GPU_REPEAT_SECONDS = 0.005
CANDIDATE_SECONDS = 0.3  # a candidate slower than that is timed fewer times: it isn't a winner
_GPU_SETS = 8


class Device(Protocol):
    """Holds the arguments of one function, several sets of them; `inputs` are their contents at first."""

    inputs: Sequence[Sequence[np.ndarray]]

    def fill(self) -> None:
        """Give all the arguments the contents that they were made with; outputs too, which are random at first."""

    def call(self, module: Module, number: int) -> float:
        """Call ``main`` on an input set and wait; the seconds that took."""

    def results(self, number: int) -> list[np.ndarray]:
        """All the arguments of an input set as they are."""

    def damage(self) -> str:
        """What was written that is no argument, in words; empty if nothing was seen."""

    def median(self, module: Module, once: float) -> float:
        """Median seconds of a call of ``main``, which has been called and takes about `once`."""

    def conditions(self) -> dict[str, str | int]:
        """Under what conditions `median` is measured."""


@runtime_checkable
class Packs(Device, Protocol):
    """A device that can have weights packed ahead of a timing."""

    def packed(self, pack: Module, places: Sequence[int], params: Params) -> Device:
        """The same arguments, but for those at `places`: these are what `pack` makes of them as they are now.

        Every input set gets its own, so that they take part in a timing's turns like any other argument.

        Parameters
        ----------
        pack
            Has a function ``main``, which takes the arguments at `places` and then as many outputs.
        params
            Shape and type of each of the outputs.
        """


def repeats_of(once: float) -> tuple[int, int]:
    """How many calls a repeat on a CPU has, of a function that takes `once` seconds, and how many repeats there are."""
    number = max(1, round(_CPU_REPEAT_SECONDS / once))
    return number, min(REPEATS, max(1, int(CANDIDATE_SECONDS / (once * number))))


def device_for(target: Target, inputs: Sequence[Sequence[np.ndarray]]) -> Device:
    """The device that functions for a target run on, with these input sets."""
    return OnCpu(inputs) if backend_of(target).on_host else OnGpu(inputs)


class OnCpu:
    """Arguments between pages that may not be touched."""

    def __init__(self, inputs: Sequence[Sequence[np.ndarray]]) -> None:
        self.inputs = inputs
        self.guarded = [[Guarded(array.shape, array.dtype) for array in arrays] for arrays in inputs]
        self.tensors = [[_tvm.as_tensor(guarded.array) for guarded in own] for own in self.guarded]

    def fill(self) -> None:
        for arrays, own in zip(self.inputs, self.guarded):
            for array, guarded in zip(arrays, own):
                guarded.fill(array)

    def call(self, module: Module, number: int) -> float:
        function, start = module["main"], time.perf_counter()
        function(*self.tensors[number])
        return time.perf_counter() - start

    def results(self, number: int) -> list[np.ndarray]:
        return [guarded.array for guarded in self.guarded[number]]

    def damage(self) -> str:
        found = {n for own in self.guarded for n, guarded in enumerate(own) if not guarded.intact()}
        return "".join(f"writes beyond argument {n}" for n in sorted(found)[:1])

    def packed(self, pack: Module, places: Sequence[int], params: Params) -> OnCpu:
        other = copy.copy(self)
        other.guarded, other.tensors = [list(own) for own in self.guarded], [list(own) for own in self.tensors]
        for given, guarded, tensors in zip(self.tensors, other.guarded, other.tensors):
            made = [Guarded(shape, dtype) for shape, dtype in params]
            for new in made:
                new.array.view("uint8")[...] = 0xFF  # not a number, for what is not written
            outputs = [_tvm.as_tensor(new.array) for new in made]
            pack["main"](*(given[place] for place in places), *outputs)
            for place, new, output in zip(places, made, outputs):
                guarded[place], tensors[place] = new, output
        return other

    def median(self, module: Module, once: float) -> float:
        if once > CANDIDATE_SECONDS:
            return once
        number, repeats = repeats_of(once)
        timer = module.time_evaluator("main", tvm.cpu(), number=number)
        turns = [self.tensors[n % len(self.tensors)] for n in range(repeats)]
        return float(np.median([timer(*tensors).results[0] for tensors in turns]))

    def conditions(self) -> dict[str, str | int]:
        return {"input sets": len(self.tensors), "caches": "warm", "repeats": REPEATS, "statistic": "median"}


class OnGpu:
    """Arguments on the first GPU."""

    def __init__(self, inputs: Sequence[Sequence[np.ndarray]]) -> None:
        self.inputs, self.device = inputs, tvm.cuda()
        size = sum(array.nbytes for array in inputs[0])
        cache = int(self.device.l2_cache_size_bytes or 0)
        count = max(len(inputs), min(_GPU_SETS, -(-2 * cache // size)))
        self.tensors = [
            [tvm.runtime.empty(a.shape, str(a.dtype), self.device) for a in inputs[n % len(inputs)]]
            for n in range(count)
        ]

    def fill(self) -> None:
        for n, tensors in enumerate(self.tensors):
            for array, tensor in zip(self.inputs[n % len(self.inputs)], tensors):
                tensor.copyfrom(array)

    def call(self, module: Module, number: int) -> float:
        function, start = module["main"], time.perf_counter()
        try:
            function(*self.tensors[number])
            self.device.sync()
        except _tvm.UPSTREAM_ERRORS as error:
            self._raise_if_broken(error)
            raise
        return time.perf_counter() - start

    def results(self, number: int) -> list[np.ndarray]:
        return [tensor.numpy() for tensor in self.tensors[number]]

    def damage(self) -> str:
        return ""  # what lies beyond an allocation the hardware refuses; within it the results are compared

    def median(self, module: Module, once: float) -> float:
        if once > CANDIDATE_SECONDS:
            return once
        function, sets = module["main"], len(self.tensors)
        rounds = max(1, round(_GPU_REPEAT_SECONDS / (once * sets)))

        def launch() -> None:
            for _ in range(rounds):
                for tensors in self.tensors:
                    function(*tensors)

        try:
            for tensors in self.tensors:  # what a first call does is no part of a graph
                function(*tensors)
            self.device.sync()
            with Graph(launch, self.device) as graph:
                graph.seconds()
                return float(np.median([graph.seconds() for _ in range(REPEATS)])) / (rounds * sets)
        except _tvm.UPSTREAM_ERRORS as error:
            self._raise_if_broken(error)
            raise

    def conditions(self) -> dict[str, str | int]:
        size = sum(array.nbytes for array in self.inputs[0])
        sets = len(self.tensors)
        caches = f"hold what a round over {sets} sets of {size} bytes leaves"
        return {"input sets": sets, "caches": caches, "repeats": REPEATS, "statistic": "median"}

    def _raise_if_broken(self, error: Exception) -> None:
        """Tell an error that ends all work on the GPU, such as an illegal access, from one of this call alone."""
        try:
            self.device.sync()
        except _tvm.UPSTREAM_ERRORS:
            raise Fatal(f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}") from error
