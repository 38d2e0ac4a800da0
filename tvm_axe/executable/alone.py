"""A function or a Relax model on one device, which runs in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.directions import directions
from tvm_axe.analysis.parameters import parameters
from tvm_axe.errors import LowerError
from tvm_axe.executable.arguments import Arrays, Input
from tvm_axe.executable.base import Executable
from tvm_axe.machines import backend_of
from tvm_axe.machines.timing import timed

__all__ = ["FunctionExecutable", "Interface", "ModelExecutable", "interfaces"]


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
        return tuple(_fetched(tensor) for tensor, direction in zip(tensors, self._directions) if direction.is_output)

    def _time(self, workers: object, arrays: Arrays, repeat: int, warmup: int) -> list[float]:
        return timed(self.built, "main", _device(self), self._placed(arrays), repeat, warmup)

    def _placed(self, arrays: Arrays) -> list[tvm.runtime.Tensor]:
        """A tensor for each parameter, with the array in it if it is an input."""
        device, given = _device(self), iter(arrays)
        return [
            _tensor(next(given), device)
            if direction.is_input
            else tvm.runtime.empty([int(extent or 0) for extent in each.shape], each.dtype, device)
            for each, direction in zip(self._params, self._directions)
        ]

    def show(self) -> str:
        lines = [f"{self.name} on one device{self._note('main')}", "", "arrays"]
        kinds = {(True, False): "in", (False, True): "out", (True, True): "in and out", (False, False): "unused"}
        for each, direction in zip(self._params, self._directions):
            lines.append(f"  {each.name}: {each.dtype}{list(each.shape)}, {kinds[direction]}")
        return "\n".join([*lines, "", self.module.script()])


class Interface(NamedTuple):
    """What a function of a model takes and returns; None where it takes what is no array."""

    name: str
    inputs: tuple[Input, ...] | None
    outputs: tuple[str, ...]


def interfaces(model: tvm.IRModule) -> tuple[Interface, ...]:
    """Those of the functions of a Relax model, as it was given."""
    found = []
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function):
            inputs = [_input(param) for param in func.params]
            outputs = tuple(_results(func))
            known = tuple(each for each in inputs if each is not None)
            found.append(Interface(str(variable.name_hint), known if len(known) == len(inputs) else None, outputs))
    return tuple(found)


def _results(func: relax.Function) -> list[str]:
    """The names of what a function returns, or numbers where these have none."""
    values = {binding.var: binding.value for block in func.body.blocks for binding in block.bindings}
    found: list[str] = []

    def visit(value: relax.Expr) -> None:
        bound = values.get(value) if isinstance(value, relax.Var) else None
        fields = value if isinstance(value, relax.Tuple) else bound
        if isinstance(fields, relax.Tuple):
            for each in fields.fields:
                visit(each)
        else:
            found.append(str(value.name) if isinstance(value, relax.Var) else f"output_{len(found)}")

    visit(func.body.body)
    return found


def _input(param: relax.Var) -> Input | None:
    """A parameter that is a tensor of a known number of dimensions."""
    if not isinstance(param.ty, relax.TensorType) or not isinstance(param.ty.shape, relax.ShapeExpr):
        return None
    shape = tuple(int(e) if isinstance(e, tirx.IntImm) else None for e in param.ty.shape.values)
    return Input(str(param.name), shape, str(param.ty.dtype))


class ModelExecutable(Executable):
    """A Relax model for upstream's virtual machine; a model of one function is called as a function is.

    Parameters
    ----------
    functions : sequence of Interface
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
        functions: Sequence[Interface],
        packed: bool,
        module: tvm.IRModule,
        runnable: tvm.IRModule,
        built: relax.VMExecutable,
        target: Target,
        tuned: Mapping[str, float],
    ) -> None:
        super().__init__(functions[0].name if len(functions) == 1 else "model", module, target, tuned)
        self.functions, self.packed = tuple(functions), packed
        self.runnable, self._built = runnable, built

    @property
    def vm(self) -> relax.VMExecutable:
        return self._built

    @property
    def outputs(self) -> tuple[str, ...]:
        return self._function().outputs

    def _inputs(self) -> Sequence[Input]:
        inputs = self._function().inputs
        assert inputs is not None  # it would be refused
        return inputs

    def _function(self) -> Interface:
        """The one function that is called with arrays; an error if the model isn't called so."""
        machine = "machine = tvm.relax.VirtualMachine(exe.vm, device)"
        if len(self.functions) != 1:
            names = ", ".join(each.name for each in self.functions)
            raise LowerError(
                f"the model has {len(self.functions)} functions ({names}); call them by name: {machine}, then "
                f'machine["{self.functions[0].name}"](...)'
            )
        (only,) = self.functions
        if self.packed:
            raise LowerError(
                f"{only.name} takes packed weights; pack them once and pass them on: {machine}, then "
                f'machine["{only.name}_transform_params"](weights)'
            )
        if only.inputs is None:
            raise LowerError(f"{only.name} takes what is no array of known dimensions; call it so: {machine}")
        return only

    @cached_property
    def _machine(self) -> relax.VirtualMachine:
        return relax.VirtualMachine(self._built, _device(self))

    def _run(self, workers: object, arrays: Arrays) -> Arrays:
        device = _device(self)
        return tuple(_arrays(self._machine[self.name](*(_tensor(array, device) for array in arrays))))

    def _time(self, workers: object, arrays: Arrays, repeat: int, warmup: int) -> list[float]:
        device = _device(self)
        tensors = [_tensor(array, device) for array in arrays]
        return timed(self._machine.module, self.name, device, tensors, repeat, warmup)

    def _described(self) -> str:
        return "a model compiled for one device"

    def show(self) -> str:
        lines = ["model on one device", "", "functions"]
        for each in self.functions:
            inputs = "what is no array" if each.inputs is None else ", ".join(i.name for i in each.inputs)
            lines.append(f"  {each.name}({inputs}) -> {', '.join(each.outputs)}")
        kernels = [
            str(variable.name_hint)
            for variable, func in self.module.functions_items()
            if isinstance(func, tirx.PrimFunc)
        ]
        lines += ["", "kernels", *(f"  {name}{self._note(name)}" for name in kernels), "", self.module.script()]
        return "\n".join(lines)


# ---- Tensors where an executable runs --------------------------------------------------------------------------------


def _device(exe: Executable) -> tvm.runtime.Device:
    """The device of an executable's target on this machine."""
    backend = backend_of(exe.target)
    device = tvm.device(backend.device)
    if not device.exist:
        raise LowerError(f"{exe.name} was compiled for {backend.name}; this machine has no {backend.device} device")
    return device


def _tensor(array: np.ndarray, device: tvm.runtime.Device) -> tvm.runtime.Tensor:
    """A copy of an array, where an executable runs."""
    host = tvm.runtime.empty(array.shape, str(array.dtype))
    _tvm.as_array(host)[...] = array
    if device == tvm.cpu():
        return host
    tensor = tvm.runtime.empty(array.shape, str(array.dtype), device)
    host.copyto(tensor)
    return tensor


def _fetched(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """A copy of a tensor."""
    host = tvm.runtime.empty(tensor.shape, str(tensor.dtype))
    tensor.copyto(host)
    return _tvm.as_array(host).copy()


def _arrays(result: Any) -> list[np.ndarray]:
    """What a model returned: a tensor, or several."""
    if isinstance(result, tvm.runtime.Tensor):
        return [_fetched(result)]
    return [array for each in result for array in _arrays(each)]
