"""A session with one of upstream's own servers, ``python -m tvm.exec.rpc_server``.

It has a runtime and nothing of this package. So candidates are built here, by the process that holds the connection,
sent as shared libraries, and judged here: results are fetched and compared with those of the function as it is, run
there too. What such a server can't do:

- Nothing lies around the arguments that shows what a candidate writes beyond them.
- A candidate that crashes takes upstream's server with it, which offers itself no more; one that hangs keeps it busy.
- Of its CPU it says its name, if it has the compiler, and no more: not its model, its cores or its clock.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.rpc import RPCSession
from tvm.runtime import Module, Tensor
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.machines import backend_of
from tvm_axe.machines.builder import builder_named
from tvm_axe.machines.target import architecture_of, completed, cores, resolve_target
from tvm_axe.meta.fleet.fingerprint import Fingerprint
from tvm_axe.meta.fleet.session import measured
from tvm_axe.meta.measure.devices import CANDIDATE_SECONDS, REPEATS, repeats_of
from tvm_axe.meta.measure.exchange import Params, exchange_file
from tvm_axe.meta.measure.process import Bench
from tvm_axe.meta.measure.protocol import Measurement

__all__ = ["Plain"]

_SYSTEM_CPU = "target.llvm_get_system_cpu"  # what a server that has the compiler can be asked
_THREADS = "runtime.config_threadpool"
_BIG_CORES_FIRST = 1  # upstream's affinity mode


class Plain:
    """Does a session's work with a server of upstream's.

    Parameters
    ----------
    session
        With the server.
    name
        What to call it.
    """

    def __init__(self, session: RPCSession, name: str) -> None:
        self._session, self._name = session, name
        self._measurer: _Measurer | None = None

    def work(self, kind: str, arguments: Sequence[Any]) -> Iterator[Any]:
        """Do work of a kind; see `tvm_axe.meta.fleet.session.Measuring`."""
        if kind == "look":
            yield [self._name, self._look().encode()]
        elif kind == "open":
            yield self._open(*arguments)
        elif self._measurer is None:
            raise TuneError("nothing was opened")
        else:
            yield from measured(self._measurer, kind, arguments)

    def _look(self) -> Fingerprint:
        """As much as it says of itself."""
        ask = _tvm.rpc_function(self._session, _SYSTEM_CPU)
        gpu = self._session.device("cuda")
        code = architecture_of(gpu)
        name = "" if code is None else str(gpu.device_name)
        cpu = "" if ask is None else str(ask())
        return Fingerprint(cpu, gpu=name, gpu_code=code or "", gpus=int(code is not None))

    def _open(self, target: str, builder: str, timeout: float, devices: int) -> str:
        """Take a target as it is told: of its own, such a server knows its CPU's name alone."""
        if devices > 1:
            raise TuneError("one of upstream's servers runs kernels, and no programs on a mesh")
        seen = self._look()
        resolved = resolve_target(completed(json.loads(target), seen.cpu, seen.gpu_code))
        self._measurer = _Measurer(self._session, resolved, builder)
        return str(resolved)


class _Measurer:
    """Builds here, runs there, one candidate after the other."""

    def __init__(self, session: RPCSession, target: Target, builder: str) -> None:
        self._session, self._target, self._builder = session, target, builder_named(builder)
        self._benches: dict[str, Bench] = {}
        self._digest = ""
        self._numbers = count()
        if backend_of(target).on_host:
            threads = _tvm.rpc_function(session, _THREADS)
            if threads is not None:
                threads(_BIG_CORES_FIRST, cores(target))

    @property
    def conditions(self) -> Mapping[str, str | int]:
        return {} if self._digest not in self._benches else self._bench.prepared.conditions

    def prepare(self, mod: IRModule) -> Measurement:
        self._digest = _tvm.workload_hash(mod)
        if self._digest not in self._benches:
            self._benches.clear()  # one function's arguments are there at a time
            descriptor, path = exchange_file()
            try:
                self._benches[self._digest] = Bench(
                    mod, self._target, self._build, path, None, self._device, as_written=True
                )
            except _tvm.UPSTREAM_ERRORS as error:
                _tvm.raise_own_fault(error)
                return Measurement(None, _reason(error))
            finally:
                os.close(descriptor)
        return Measurement(self._bench.prepared.median)

    def measure_all(self, mods: Sequence[IRModule]) -> Iterator[Measurement]:
        for mod in mods:
            began, built = time.perf_counter(), 0.0
            try:
                built = self._bench.build(0, mod)["build"]
                told = self._bench.run(0)
            except _tvm.UPSTREAM_ERRORS as error:
                _tvm.raise_own_fault(error)
                yield Measurement(None, _reason(error), built, time.perf_counter() - began - built)
            else:
                yield Measurement(told["median"], None, built, told["run"])

    def in_turns(self, mods: Sequence[IRModule], turns: int) -> list[list[float]]:
        for number, mod in enumerate(mods):
            self._bench.build(number, mod)
        return self._bench.turns(len(mods), turns)

    @property
    def _bench(self) -> Bench:
        found = self._benches.get(self._digest)
        if found is None:
            raise TuneError("measure: no function is prepared, or it could not be; prepare one that runs first")
        return found

    def _build(self, mod: IRModule, target: Target) -> Module:
        """Compile here, and load it there."""
        name = f"{next(self._numbers)}.so"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            self._builder(mod, target).export_library(str(path))
            self._session.upload(str(path))
        return self._session.load_module(name)

    def _device(self, target: Target, inputs: Sequence[Sequence[np.ndarray]]) -> _OnServer:
        return _OnServer(self._session.device(backend_of(target).device), inputs)


class _OnServer:
    """Arguments on a server's device; see `tvm_axe.meta.measure.devices.Device`."""

    def __init__(self, device: Any, inputs: Sequence[Sequence[np.ndarray]]) -> None:
        self.inputs, self.device = inputs, device
        self.tensors = [[self._empty(array.shape, array.dtype) for array in arrays] for arrays in inputs]

    def fill(self) -> None:
        for arrays, tensors in zip(self.inputs, self.tensors):
            for array, tensor in zip(arrays, tensors):
                tensor.copyfrom(array)

    def call(self, module: Module, number: int) -> float:
        function, start = module["main"], time.perf_counter()
        function(*self.tensors[number])
        self.device.sync()
        return time.perf_counter() - start

    def results(self, number: int) -> list[np.ndarray]:
        return [tensor.numpy() for tensor in self.tensors[number]]

    def damage(self) -> str:
        return ""  # there is nothing around the arguments to look at

    def packed(self, pack: Module, places: Sequence[int], params: Params) -> _OnServer:
        other = _OnServer.__new__(_OnServer)
        other.inputs, other.device = self.inputs, self.device
        other.tensors = [list(own) for own in self.tensors]
        for given, tensors in zip(self.tensors, other.tensors):
            made = [self._empty(shape, dtype) for shape, dtype in params]
            for tensor, (shape, dtype) in zip(made, params):
                undefined = np.empty(shape, dtype)
                undefined.view("uint8")[...] = 0xFF  # not a number, for what is not written
                tensor.copyfrom(undefined)
            pack["main"](*(given[place] for place in places), *made)
            for place, tensor in zip(places, made):
                tensors[place] = tensor
        return other

    def median(self, module: Module, once: float) -> float:
        if once > CANDIDATE_SECONDS:
            return once
        number, repeats = repeats_of(once)
        timer = module.time_evaluator("main", self.device, number=number)
        turns = [self.tensors[n % len(self.tensors)] for n in range(repeats)]
        return float(np.median([timer(*tensors).results[0] for tensors in turns]))

    def conditions(self) -> dict[str, str | int]:
        about: dict[str, str | int] = {"caches": "warm", "repeats": REPEATS, "statistic": "median"}
        return {"input sets": len(self.tensors), **about, "server": "upstream's"}

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        return tvm.runtime.empty(shape, str(dtype), self.device)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
