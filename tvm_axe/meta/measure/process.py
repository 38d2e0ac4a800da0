"""The process in which candidates are built and run.

It imports the compiler once and stays up, so that a candidate costs its own compilation and timing and nothing else
(upstream's builder starts new processes for every round and imports every tensor intrinsic in each). It is started,
fed and replaced by `tvm_axe.meta.measure.runner.Runner`; `tvm_axe.meta.measure.protocol` says what it is asked.

A candidate is run by the process that built it, so nothing compiled is ever written to a file and linked. What packs a
candidate's weights (`tvm_axe.records.packing`) is built apart, and run once on each input set before that is timed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.checking.comparing import difference, is_float, random_array, same_bytes, summing_slack
from tvm_axe.checking.inputs import index_values, indices_of
from tvm_axe.machines import backend_of
from tvm_axe.machines.builder import builder_named
from tvm_axe.machines.target import cores
from tvm_axe.meta.measure.builder import Build, Built, build_candidate, params_of
from tvm_axe.meta.measure.child import serve
from tvm_axe.meta.measure.devices import Device, Packs, device_for
from tvm_axe.meta.measure.exchange import Exchange
from tvm_axe.meta.measure.protocol import BUILD, PREPARE, TURNS, Prepared
from tvm_axe.meta.measure.reference import reference_for

__all__ = ["Bench", "cpus_for", "main"]

_SETS = 2  # of inputs, with contents of their own
_LARGE = 1 << 26  # bytes of a set of which there is one: a second shows little that so many numbers don't


class Bench:
    """Builds and runs the candidates of one function.

    Parameters
    ----------
    mod, target, build
        The function, what it is compiled for, and what compiles.
    exchange, prepared
        Inputs and wanted results; made here if nothing is known of the function yet.
    device
        Makes what candidates run on.
    as_written
        Whether the function as it is says what is wanted, however slow it may be (`reference_for`).
    """

    def __init__(
        self,
        mod: IRModule,
        target: Target,
        build: Build,
        exchange: Path,
        prepared: Prepared | None,
        device: Callable[[Target, Sequence[Sequence[np.ndarray]]], Device] = device_for,
        as_written: bool = False,
    ) -> None:
        self.target, self.slack, self._build, self._device = target, summing_slack(mod["main"]), build, device
        params = params_of(mod["main"])
        size = sum(prod(shape) * dtype.itemsize for shape, dtype in params)
        sets = _SETS if size <= _LARGE else 1
        self.exchange = Exchange(exchange, params, sets, writable=prepared is None)
        self.built: dict[int, Built] = {}
        found = indices_of(mod["main"])
        self._most = [found.most.get(param.name) for param in mod["main"].params]  # of arguments that index others
        if prepared is not None:
            self.prepared = prepared
            return
        reference = reference_for(mod, target, build, as_written)
        for positive in (False, True):
            self._draw(positive)
            self.device.fill()
            results = [reference.compute(self.device, number) for number in range(sets)]
            # The root of a negative number, say, isn't finite, and agrees with that of any other negative number.
            if all(np.isfinite(array).all() for arrays in results for array in arrays if is_float(array.dtype)):
                break
        changed = [
            [not same_bytes(after, before) for before, after in zip(given, got)]
            for given, got in zip(self.exchange.inputs, results)
        ]
        written = tuple(map(any, zip(*changed)))
        for wanted, got in zip(self.exchange.wanted, results):
            for output, array, after in zip(written, wanted, got):
                if output:
                    array[...] = after
        self.prepared = Prepared(*reference.seconds(self.device), written, self.device.conditions())

    @cached_property
    def device(self) -> Device:
        """Made at the first run, when nothing else runs: to open a GPU disturbs what is timed on it."""
        return self._device(self.target, self.exchange.inputs)

    def build(self, number: int, mod: IRModule) -> dict[str, float]:
        """Compile a candidate and keep it."""
        start = time.perf_counter()
        self.built[number] = build_candidate(mod, self.target, self._build)
        return {"build": time.perf_counter() - start}

    def run(self, number: int) -> dict[str, float]:
        """Run a candidate on every input set, check what it leaves, and time it.

        An output starts as random numbers like everything else, so what a kernel forgets to write doesn't agree with
        the reference, and a kernel that updates a buffer starts from the same one as the reference.

        Raises
        ------
        ValueError
            If a result isn't the reference's, by more than a reordered sum explains.
        """
        start, candidate = time.perf_counter(), self.built.pop(number)
        self.device.fill()
        device, sets = self._packed(candidate), range(len(self.exchange.inputs))
        packed = [{place: device.results(n)[place].copy() for place in candidate.places} for n in sets]
        for n in sets:
            device.call(candidate.module, n)
        damage = self.device.damage() or device.damage()
        if damage:
            raise ValueError(f"wrong result: it {damage}")
        for n in sets:
            for place, array in packed[n].items():
                if not same_bytes(device.results(n)[place], array):
                    raise ValueError(f"wrong result: it changes argument {place} as packed")
            self._check(n)
        median = device.median(candidate.module, device.call(candidate.module, 0))
        return {"median": median, "run": time.perf_counter() - start}

    def _check(self, number: int) -> None:
        """Compare what an input set is now with what is wanted of it."""
        given, wanted = self.exchange.inputs[number], self.exchange.wanted[number]
        for place, got in enumerate(self.device.results(number)):
            output = self.prepared.written[place]
            wrong = difference(got, (wanted if output else given)[place], self.slack if output else 0.0)
            if wrong:
                raise ValueError(f"wrong result: argument {place} {wrong}")

    def turns(self, count: int, turns: int) -> list[list[float]]:
        """Time candidates that were checked before one after the other, and all of that `turns` times."""
        candidates = [self.built.pop(number) for number in range(count)]
        self.device.fill()
        pairs = [(candidate.module, self._packed(candidate)) for candidate in candidates]
        for module, device in pairs:  # what a first call does is no part of a turn
            device.call(module, 0)
        found = [[device.median(module, device.call(module, 0)) for module, device in pairs] for _ in range(turns)]
        return [list(times) for times in zip(*found)]

    def _packed(self, candidate: Built) -> Device:
        """The device with a candidate's packed weights in the places of the others."""
        if candidate.pack is None:
            return self.device
        assert isinstance(self.device, Packs)  # no space of a GPU's packs ahead
        return self.device.packed(candidate.pack, candidate.places, candidate.params)

    def _draw(self, positive: bool) -> None:
        rng = np.random.default_rng(0)
        for arrays in self.exchange.inputs:
            for array, most in zip(arrays, self._most):
                if most is None:
                    array[...] = random_array(rng, array.shape, array.dtype, positive)
                else:
                    array[...] = index_values(array.shape, most, rng)


class _Process:
    """What answers the requests: the bench of the function that was prepared last, and where it runs."""

    def __init__(self) -> None:
        self.bench: Bench | None = None
        self.everywhere = os.sched_getaffinity(0)
        self.pinned: list[int] = []

    def handle(self, request: tuple[Any, ...]) -> Any:
        kind, *arguments = request
        if kind == PREPARE:
            return self._prepare(*arguments)
        if self.bench is None:
            raise ValueError("nothing was prepared")
        if kind == BUILD:
            os.sched_setaffinity(0, self.everywhere)
            number, mod = arguments
            return self.bench.build(number, tvm.ir.load_json(mod))
        if self.pinned:
            os.sched_setaffinity(0, self.pinned)
        return self.bench.turns(*arguments) if kind == TURNS else self.bench.run(*arguments)

    def _prepare(self, mod: str, target: str, builder: str, exchange: Path, prepared: Prepared | None) -> Prepared:
        resolved = Target(json.loads(target))
        if backend_of(resolved).on_host and not self.pinned:
            self.pinned = cpus_for(resolved)
            _tvm.use_threads(cores(resolved), self.pinned)
        self.bench = None  # lets go of what the last one held before there is another
        self.bench = Bench(tvm.ir.load_json(mod), resolved, builder_named(builder), exchange, prepared)
        return self.bench.prepared


def cpus_for(target: Target) -> list[int]:
    """The CPUs that kernels for a (resolved) CPU target run on: as many as its cores, the first of this process's."""
    return sorted(os.sched_getaffinity(0))[: cores(target)]


def main(descriptors: Sequence[int]) -> None:
    """Be a child of a tuner."""
    serve(descriptors, _Process().handle)
