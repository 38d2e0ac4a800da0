"""Calls of a model's functions on one GPU as CUDA graphs: told once, captured the second time, replayed from then on.

A graph holds addresses. So a call's inputs are copied into buffers that stay, and what the function allocates while it
is captured is held for as long as the graph is; results are copied out of it, so that a call's are its own. Other
shapes are another graph, and the one that was used longest ago goes when there are too many.

What the host decides meanwhile would be decided once and for all. So a function is replayed only if all that it calls
are kernels that were compiled with it, and what is left is said (`why_told`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import ir, relax

__all__ = ["ROOM", "Replaying", "Replays", "why_told"]

ROOM = 8
"""Graphs of a session: each holds what its function allocates."""

_TOLD_ALIKE = {"relax.call_tir", "relax.call_tir_inplace", "relax.reshape"}
"""Operators that are left in a compiled module, and have the host decide nothing."""


class Replaying(Protocol):
    """What captures and replays, `tvm_axe.collective.cuda.graphs.Graphs`."""

    def run(self, key: Hashable, tell: Callable[[], object]) -> bool:
        """Have done what `tell` tells, which is the same each time for one key; whether a graph did it."""

    def __contains__(self, key: Hashable) -> bool:
        """Whether it knows of a key."""

    def close(self) -> None:
        """Drop all graphs."""


@dataclass
class _Call:
    """A function with inputs of certain shapes."""

    inputs: list[Any]
    results: Any = None
    held: list[Any] = field(default_factory=list)
    runs: int = 0


class Replays:
    """The graphs of a session's functions.

    Parameters
    ----------
    machine : VirtualMachine
        What runs the functions; it says what it allocates from now on.
    device : Device
        Where that is.
    graphs : Replaying
        What captures and replays.
    functions : sequence of str
        The functions that may be replayed.
    """

    def __init__(
        self,
        machine: relax.VirtualMachine,
        device: tvm.runtime.Device,
        graphs: Replaying,
        functions: Sequence[str],
    ) -> None:
        self.functions = frozenset(functions)
        self._device, self._graphs = device, graphs
        self._calls: dict[Hashable, _Call] = {}
        self._current: _Call | None = None
        machine.set_instrument(self._seen)

    def call(self, function: str, arguments: Sequence[Any], run: Callable[[Sequence[Any]], Any]) -> Any:
        """What `run` makes of the arguments, tensors of the device and numbers; results are new tensors."""
        said = [_said(each) for each in arguments]
        if function not in self.functions or None in said:
            return run(arguments)
        key = (function, *said)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call([_like(each) for each in arguments])
        for fixed, given in zip(call.inputs, arguments):
            if isinstance(given, tvm.runtime.Tensor):
                given.copyto(fixed)
        call.runs += 1

        def tell() -> None:
            call.held.clear()
            call.results = run(call.inputs)

        self._current = call
        try:
            if call.runs == 2:
                # What is captured next keeps all that it allocates, and must find as much free: none is to be had while
                # it is captured. Others may have taken what the first run gave back, and the machine lets go of its
                # last result only when there is another: of two runs at least one's memory is free behind them.
                run(call.inputs)
                run(call.inputs)
                call.held.clear()
            replayed = self._graphs.run(key, tell)
        except BaseException:
            del self._calls[key]
            raise
        finally:
            self._current = None
        results = _copied(call.results)
        if not replayed:
            call.results = None
            call.held.clear()
        for each in [each for each in self._calls if each not in self._graphs]:
            del self._calls[each]
        return results

    def time(
        self, function: str, arguments: Sequence[Any], run: Callable[[Sequence[Any]], Any], repeat: int, warmup: int
    ) -> list[float]:
        """Seconds of each of `repeat` calls by the host's clock, with their copies, until the device has done all."""
        seconds = []
        for turn in range(-warmup, repeat):
            self._device.sync()
            start = time.perf_counter()
            self.call(function, arguments, run)
            self._device.sync()
            if turn >= 0:
                seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        """Let go of all."""
        self._graphs.close()
        self._calls.clear()

    def _seen(self, _function: Any, _name: str, before: bool, result: Any, *_arguments: Any) -> None:
        """Hold what the machine has allocated, for as long as the graph that uses it."""
        if self._current is not None and not before and isinstance(result, tvm_ffi.core.Object):
            self._current.held.append(result)


def why_told(module: ir.IRModule, function: str) -> str | None:
    """Why a function of a compiled module can't be replayed, in words; None if it can be.

    Parameters
    ----------
    module : IRModule
        What was built, its operators kernels.
    function : str
        The name of a Relax function.
    """
    found: list[str] = []
    seen: set[str] = set()

    def look(name: str) -> None:
        seen.add(name)
        relax.analysis.post_order_visit(module[name], visit)

    def visit(node: ir.Expr) -> None:
        if isinstance(node, relax.If):
            found.append("it branches")
        elif isinstance(node, relax.ExternFunc):
            found.append(f"it calls {node.global_symbol}, which isn't compiled with it")
        elif isinstance(node, relax.Call):
            if isinstance(node.op, ir.Op) and str(node.op.name) not in _TOLD_ALIKE:
                found.append(f"the host does {node.op.name}")
            elif isinstance(node.op, ir.GlobalVar) and str(node.op.name_hint) not in seen:
                look(str(node.op.name_hint))

    look(function)
    return ", ".join(dict.fromkeys(found)) or None


def _said(value: Any) -> Hashable:
    """What tells a value's graph from others; None of what can't be told."""
    if isinstance(value, tvm.runtime.Tensor):
        return "tensor", tuple(map(int, value.shape)), str(value.dtype)
    if isinstance(value, tvm_ffi.Shape):
        return "shape", tuple(map(int, value))
    return (type(value).__name__, value) if isinstance(value, int | float | str) else None


def _like(value: Any) -> Any:
    if not isinstance(value, tvm.runtime.Tensor):
        return value
    return tvm.runtime.empty(value.shape, str(value.dtype), value.device)


def _copied(value: Any) -> Any:
    if isinstance(value, tvm.runtime.Tensor):
        fresh = _like(value)
        value.copyto(fresh)
        return fresh
    if isinstance(value, tvm_ffi.Array | tuple):
        return tuple(map(_copied, value))
    return value
