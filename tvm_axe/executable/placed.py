"""The values of a session on one device: tensors of the runtime, and upstream's virtual machine.

Weights that are packed are packed here, one after the other, when they are placed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from tvm_axe.collective import Timeline
from tvm_axe.collective.objects import plain
from tvm_axe.collective.stored import let_go
from tvm_axe.errors import LowerError
from tvm_axe.executable.replayed import Replaying, Replays
from tvm_axe.executable.signatures import Signature
from tvm_axe.executable.tensors import calling, fetched, put
from tvm_axe.executable.weights import Weight
from tvm_axe.machines.timing import timed
from tvm_axe.relax.packing import Packed

__all__ = ["DeviceMemory"]


class DeviceMemory:
    """The `tvm_axe.executable.session.Memory` of a model on one device.

    Parameters
    ----------
    built : VMExecutable
        The model.
    functions : sequence of Signature
        Those of the model as it was given.
    packing : mapping
        What a function takes in the place of its weights, by its name (`tvm_axe.relax.packing.packed_weights`); nothing
        where none are packed.
    device : Device
        Where it runs.
    replayed : sequence of str
        The functions whose calls `graphs` captures and replays.
    graphs : Replaying, optional
        What does so; nothing is replayed without it.
    """

    def __init__(
        self,
        built: relax.VMExecutable,
        functions: Sequence[Signature],
        packing: Mapping[str, Sequence[Packed]],
        device: tvm.runtime.Device,
        replayed: Sequence[str] = (),
        graphs: Replaying | None = None,
    ) -> None:
        self.copied, self.lock = 0, threading.RLock()
        self.held: tuple[int, ...] = (0,)
        self._device, self._signatures, self._packing = device, tuple(functions), packing
        self._machine = relax.VirtualMachine(built, device)
        self._functions = {each.name: self._machine[each.name] for each in functions}
        self._replays = None if graphs is None else Replays(self._machine, device, graphs, replayed)
        self._weights: dict[str, list[Any]] = {}
        self._places: dict[str, list[int]] = {}  # of weights that aren't behind all inputs

    def place(self, weights: Mapping[str, Weight]) -> None:
        self.held = (sum(each.nbytes for w in weights.values() for each in (w if isinstance(w, tuple) else (w,))),)
        taken: dict[str, Sequence[Packed]] = {}
        for function in self._signatures:
            own = [n for n, param in enumerate(function.params) if param.name in weights]
            taken[function.name] = self._packing.get(function.name, [("", (function.params[n].name,)) for n in own])
            if function.name not in self._packing and own != [*range(len(function.params))][-len(own) :]:
                self._places[function.name] = own
        packers: dict[tuple[str, ...], list[str]] = {}
        for packer, names in dict.fromkeys(each for every in taken.values() for each in every):
            packers.setdefault(names, []).append(packer)
        placed: dict[Packed, Any] = {}
        whole: dict[str, Any] = {}
        # First those that some function takes as they are; then one after the other those that are only packed, of
        # which no more than one is there twice.
        for names in sorted(packers, key=lambda names: "" not in packers[names]):
            values = [whole[name] if name in whole else self._placed(weights[name]) for name in names]
            for packer in packers[names]:
                placed[packer, names] = self._machine[packer](*values) if packer else values[0]
            if "" in packers[names]:
                whole[names[0]] = values[0]
        self._weights = {name: [placed[each] for each in every] for name, every in taken.items()}

    def _placed(self, weight: Weight) -> Any:
        return tuple([self._put(each) for each in weight]) if isinstance(weight, tuple) else self._put(weight)

    def put(self, array: np.ndarray, function: str, param: str) -> tvm.runtime.Tensor:
        return self._put(array)

    def _put(self, array: np.ndarray) -> tvm.runtime.Tensor:
        self.copied += array.nbytes
        tensor = put(array, self._device)
        let_go(array)
        return tensor

    def call(self, function: str, arguments: Sequence[Any]) -> Any:
        with calling(function):
            if self._replays is not None:
                return _nested(self._replays.call(function, arguments, self._told(function)))
            return _nested(self._told(function)(arguments))

    def time(self, function: str, arguments: Sequence[Any], repeat: int, warmup: int) -> list[float]:
        with calling(function):
            if self._replays is not None:
                return self._replays.time(function, arguments, self._told(function), repeat, warmup)
            given = self._all(function, arguments)
            return timed(self._machine.module, function, self._device, given, repeat, warmup)

    def trace(self, function: str, arguments: Sequence[Any], warmup: int) -> Timeline:
        raise LowerError(
            f"{function} is on one device, where a call is one thing; time() says what it takes, and what is "
            "compiled for a mesh can be traced"
        )

    def _told(self, function: str) -> Callable[[Sequence[Any]], Any]:
        """What runs a function, of its inputs."""
        return lambda inputs: self._functions[function](*self._all(function, inputs))

    def _all(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        """The inputs and the weights, as the function takes them."""
        given = [*arguments, *self._weights[function]]
        if function in self._places:
            given = list(arguments)
            for place, weight in zip(self._places[function], self._weights[function]):
                given.insert(place, weight)
        return given

    def apply(self, function: str, value: Any, arguments: Sequence[Any]) -> int | float | None:
        found = tvm.get_global_func(function, allow_missing=True)
        if found is None:
            raise LowerError(f"the runtime has no function {function!r}")
        # A cache tells a GPU its pages by a stream of its own, while kernels of calls before may still read the last.
        self._device.sync()
        with calling(function):
            result = found(value, *map(plain, arguments))
        if not isinstance(result, int | float | None):
            raise LowerError(
                f"{function} returned a {type(result).__name__}, and what handle.call gives are numbers; call it with "
                "handle.object"
            )
        return result

    def fetch(self, value: tvm.runtime.Tensor) -> np.ndarray:
        return fetched(value)

    def export(self, value: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
        return value

    def close(self) -> None:
        if self._replays is not None:
            self._replays.close()
        self._weights.clear()
        self._functions.clear()
        del self._machine


def _nested(result: Any) -> Any:
    """What was returned, with tuples of Python's where these are lists of the runtime's."""
    if isinstance(result, tvm.runtime.Tensor):
        return result
    if isinstance(result, tvm_ffi.Array) or type(result) is tuple:
        return tuple([_nested(each) for each in result])
    return result
