"""A function or a Relax model on one device, which runs in this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property

import tvm
from tvm import relax, tirx
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe.analysis.directions import directions
from tvm_axe.analysis.parameters import parameters
from tvm_axe.collective.cuda.graphs import OwnGraphs
from tvm_axe.errors import LowerError
from tvm_axe.executable.arguments import Arrays, Input
from tvm_axe.executable.base import Executable
from tvm_axe.executable.functions import Model
from tvm_axe.executable.placed import DeviceMemory
from tvm_axe.executable.replayed import ROOM, why_told
from tvm_axe.executable.session import Session
from tvm_axe.executable.signatures import Signature
from tvm_axe.executable.tensors import all_fetched, calling, device_of, fetched, put
from tvm_axe.executable.weights import matched_weights
from tvm_axe.machines import backend_of
from tvm_axe.machines.timing import timed
from tvm_axe.nests import ranges_of
from tvm_axe.relax.operators_of_attention import APART
from tvm_axe.relax.packing import attached, packed_weights

__all__ = ["FunctionExecutable", "ModelExecutable"]

_LOG = logging.getLogger("tvm_axe")


class FunctionExecutable(Executable):
    """A function, built.

    Parameters
    ----------
    name : str
        The function's name.
    module : IRModule
        ``main`` as records left it.
    runnable : IRModule
        The same with tile kernels in the place of the blocks that chose one.
    built : Module
        What that was built to.
    target, tuned
        See `Executable`.
    """

    def __init__(
        self,
        name: str,
        module: tvm.IRModule,
        runnable: tvm.IRModule,
        built: Module,
        target: Target,
        tuned: Mapping[str, float],
    ) -> None:
        super().__init__(name, module, target, tuned)
        self.runnable, self.built = runnable, built
        params = parameters(module["main"])
        self._params = [Input(*param) for param in params.values()]
        self._directions = directions(module["main"])

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(each.name for each, direction in zip(self._params, self._directions) if direction.is_output)

    def _inputs(self) -> Sequence[Input]:
        return [each for each, direction in zip(self._params, self._directions) if direction.is_input]

    def _run(self, workers: object, arrays: Arrays) -> Arrays:
        tensors = self._placed(arrays)
        self.built["main"](*tensors)
        return tuple(fetched(tensor) for tensor, direction in zip(tensors, self._directions) if direction.is_output)

    def _time(self, workers: object, arrays: Arrays, repeat: int, warmup: int) -> list[float]:
        return timed(self.built, "main", device_of(self.name, self.target), self._placed(arrays), repeat, warmup)

    def _placed(self, arrays: Arrays) -> list[tvm.runtime.Tensor]:
        """A tensor for each parameter, with the array in it if it is an input."""
        device, given = device_of(self.name, self.target), iter(arrays)
        return [
            put(next(given), device)
            if direction.is_input
            else tvm.runtime.empty(
                [extent if isinstance(extent, int) else 0 for extent in each.shape], each.dtype, device
            )
            for each, direction in zip(self._params, self._directions)
        ]

    def show(self) -> str:
        lines = [f"{self.name} on one device{self._note('main')}", "", "arrays"]
        kinds = {(True, False): "in", (False, True): "out", (True, True): "in and out", (False, False): "unused"}
        for each, direction in zip(self._params, self._directions):
            lines.append(f"  {each.name}: {each.dtype}{list(each.shape)}, {kinds[direction]}")
        return "\n".join([*lines, "", self.module.script()])


class ModelExecutable(Model):
    """A Relax model for upstream's virtual machine; a model of one function is called as a function is.

    Parameters
    ----------
    functions : sequence of Signature
        Of the model as it was given.
    packed : bool
        Whether its functions take weights that another function has packed.
    module : IRModule
        The model as records left it.
    runnable : IRModule
        The same as it was built.
    built : VMExecutable
        What it was built to.
    target, tuned
        See `Executable`.
    """

    def __init__(
        self,
        functions: Sequence[Signature],
        packed: bool,
        module: tvm.IRModule,
        runnable: tvm.IRModule,
        built: relax.VMExecutable,
        target: Target,
        tuned: Mapping[str, float],
    ) -> None:
        super().__init__(functions, packed, module, target, tuned)
        self.runnable, self._built = runnable, built

    @property
    def vm(self) -> relax.VMExecutable:
        return self._built

    @cached_property
    def _machine(self) -> relax.VirtualMachine:
        return relax.VirtualMachine(self._built, device_of(self.name, self.target))

    def _run(self, workers: object, arrays: Arrays) -> Arrays:
        device = device_of(self.name, self.target)
        with calling(self.name):
            return tuple(all_fetched(self._machine[self.name](*(put(array, device) for array in arrays))))

    def _time(self, workers: object, arrays: Arrays, repeat: int, warmup: int) -> list[float]:
        device = device_of(self.name, self.target)
        tensors = [put(array, device) for array in arrays]
        with calling(self.name):
            return timed(self._machine.module, self.name, device, tensors, repeat, warmup)

    def _session(self, params: object, workers: object, graphs: bool) -> Session:
        if workers is not None:
            raise LowerError(f"{self.name} was compiled for one device and runs in this process, without workers")
        if params is None:
            params = attached(self.module) or None
        weights = matched_weights(self.functions, params)
        replayed = self._replayed() if graphs else []
        device = device_of(self.name, self.target)
        own = OwnGraphs(device, ROOM) if graphs else None
        memory = DeviceMemory(self._built, self.functions, packed_weights(self.runnable), device, replayed, own)
        return Session(self.name, self.functions, weights, memory)

    def _replayed(self) -> list[str]:
        """The functions that can be captured; says of the others why not."""
        if backend_of(self.target).on_host:
            raise LowerError(f"{self.name}: graphs are of GPUs, and this is compiled for a CPU; leave graphs out")
        why = {each.name: why_told(self.runnable, each.name) for each in self.functions}
        told = "; ".join(f"{name}: {reason}" for name, reason in why.items() if reason is not None)
        if None not in why.values():
            raise LowerError(f"{self.name}: no function can be replayed as a graph ({told}); leave graphs out")
        if told:
            _LOG.warning("not replayed as a graph: %s", told)
        return [name for name, reason in why.items() if reason is None]

    def _described(self) -> str:
        return "a model compiled for one device"

    def show(self) -> str:
        lines = ["model on one device", "", "functions"]
        for each in self.functions:
            lines.append(
                f"  {each.name}({', '.join(param.name for param in each.params)}) -> {', '.join(each.outputs)}"
            )
            lines += [f"    block by block {text}" for text in (self.module[each.name].attrs or {}).get(APART) or ()]
        kernels = [
            str(variable.name_hint)
            for variable, func in self.module.functions_items()
            if isinstance(func, tirx.PrimFunc)
        ]
        lines += ["", "kernels"]
        for name in kernels:
            lines += [f"  {name}{self._note(name)}", *(f"    {line}" for line in ranges_of(self.module[name]))]
        lines += ["", self.module.script()]
        return "\n".join(lines)
