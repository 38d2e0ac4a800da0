"""Measuring candidates in processes of their own: what one of them does to its process costs that candidate only."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tvm
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.machines import backend_of
from tvm_axe.machines.target import cores
from tvm_axe.meta.measure.batch import START_SECONDS, Batch, Function, Limits, Slot
from tvm_axe.meta.measure.builder import BUILDER
from tvm_axe.meta.measure.child import Child
from tvm_axe.meta.measure.exchange import exchange_file
from tvm_axe.meta.measure.process import cpus_for
from tvm_axe.meta.measure.protocol import BUILD, PREPARE, TURNS, Measurement

__all__ = ["Runner"]

_CALLS = 4  # of a candidate that is as slow as the reference, before it is given up
_PROCESSES = 16  # at most, also on a machine of many cores: each takes some 300 MB
_KEPT = 8  # functions whose inputs and references are kept, in memory
_ENTRY = "tvm_axe.meta.measure.process:main"


class Runner:
    """Processes that stay up, and build, check and time candidates.

    Several build at once, one for each core; one candidate runs at a time, by the process that built it, and on a CPU
    nothing is built meanwhile, which would share caches, memory bandwidth and cores with it. A candidate that crashes
    or hangs takes its process with it. Another one is prepared then, and what the lost one had built is built again. A
    candidate whose process died is tried once more in another one before that counts against it: an earlier candidate
    may have damaged the process, or somebody else ended it.

    Parameters
    ----------
    target
        A resolved target. On a CPU its ``num-cores`` become the number of a kernel's threads, on as many CPUs, the
        first of those that this process may run on.
    log
        File that collects what the processes and the kernels print.
    timeout
        Seconds that building a candidate may take, and that checking and timing it may take beside a few calls as slow
        as the untuned function's.
    builder
        Name of what compiles candidates; see `tvm_axe.machines.builder.builder_named`.
    """

    def __init__(self, target: Target, log: Path, timeout: float, builder: str = BUILDER) -> None:
        self.target, self.timeout, self.builder = target, timeout, builder
        self._on_cpu = backend_of(target).on_host
        threads = {"TVM_NUM_THREADS": str(cores(target))}
        count = min(_PROCESSES, len(os.sched_getaffinity(0)))
        self._slots = [Slot(Child(_ENTRY, log, threads)) for _ in range(count)]
        self._functions: OrderedDict[str, Function] = OrderedDict()
        self._digest = ""

    @property
    def conditions(self) -> dict[str, str | int]:
        """Under what conditions the times of the function that was prepared last are measured."""
        function = self._functions.get(self._digest)
        where: dict[str, str | int] = {}
        if self._on_cpu:
            where = {"cpus": ",".join(map(str, cpus_for(self.target))), "threads": cores(self.target)}
        return where if function is None else {**where, **function.prepared.conditions}

    @property
    def machines(self) -> dict[str, Any]:
        """Nothing: this machine alone."""
        return {}

    def prepare(self, mod: IRModule) -> Measurement:
        """Run and time the untuned function ``main``; from now on candidates must compute what it computes.

        A function that was prepared before is known still, and is not run again. A GPU can't run an untuned function,
        and one of very many operations would take minutes: its time is None then, without a failure, and what it
        computes is found by other means (see `tvm_axe.meta.measure.reference`).

        On failure nothing is prepared and nothing can be measured.
        """
        self._digest = _tvm.workload_hash(mod)
        function = self._functions.get(self._digest) or self._first(mod)
        if isinstance(function, str):
            return Measurement(None, function)
        self._functions[self._digest] = function
        self._functions.move_to_end(self._digest)
        while len(self._functions) > _KEPT:
            os.close(self._functions.popitem(last=False)[1].descriptor)
        return Measurement(function.prepared.median)

    def measure(self, mod: IRModule) -> Measurement:
        """Build, check and time a candidate."""
        (measured,) = self.measure_all([mod])
        return measured

    def measure_all(self, mods: Sequence[IRModule]) -> Iterator[Measurement]:
        """Build, check and time candidates; gives what became of them in their order, each as soon as it is known.

        Raises
        ------
        TuneError
            If nothing is prepared, or no process can be.
        """
        function = self._prepared()
        limits = Limits(self.timeout, self.timeout + _CALLS * function.prepared.longest, self._on_cpu)
        batch = Batch(self._slots, function, limits, mods)
        try:
            yield from batch.results()
        finally:
            batch.abandon()

    def in_turns(self, mods: Sequence[IRModule], turns: int) -> list[list[float]]:
        """Time candidates that were measured before, one after the other in one process, and all of that `turns` times.

        What the machine does meanwhile, and where the arguments lie, is then the same for all of them.

        Returns
        -------
        list of list of float
            Seconds of each candidate in each turn.

        Raises
        ------
        TuneError
            If nothing is prepared, or one of them can't be built or run.
        """
        function, slot = self._prepared(), self._slots[0]
        once = self.timeout + _CALLS * function.prepared.longest
        if slot.digest != function.digest:
            self._ask(slot, function.request, START_SECONDS)
            slot.digest = function.digest
        for number, mod in enumerate(mods):
            self._ask(slot, (BUILD, number, tvm.ir.save_json(mod)), self.timeout)
        times: list[list[float]] = self._ask(slot, (TURNS, len(mods), turns), once * len(mods))
        return times

    def close(self) -> None:
        """End the processes."""
        for slot in self._slots:
            slot.drop()
        for function in self._functions.values():
            os.close(function.descriptor)
        self._functions.clear()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _prepared(self) -> Function:
        function = self._functions.get(self._digest)
        if function is None:
            raise TuneError("measure: no function is prepared, or it could not be; prepare one that runs first")
        return function

    def _ask(self, slot: Slot, request: tuple[Any, ...], limit: float) -> Any:
        """The answer of a process that does nothing else; it ends if it has none."""
        status, answer = slot.child.ask(request, limit)
        if status != "ok":
            slot.drop()
            raise TuneError(f"{request[0]}: {answer}")
        return answer

    def _first(self, mod: IRModule) -> Function | str:
        """Run a function that wasn't prepared before; gives the reason where that fails."""
        slot, target, encoded = self._slots[0], str(self.target), tvm.ir.save_json(mod)
        descriptor, path = exchange_file()
        slot.digest = ""
        for other in self._slots if not self._on_cpu else ():
            other.child.start()  # to import the compiler while the first one works; on a CPU that would disturb it
        status, answer = slot.child.ask((PREPARE, encoded, target, self.builder, path, None), START_SECONDS)
        if status != "ok":
            os.close(descriptor)
            slot.drop()
            return str(answer)
        slot.digest = self._digest
        return Function(self._digest, encoded, target, self.builder, descriptor, path, answer)
