"""A Relax model on a mesh of workers: each device's share of the weights is placed once, and functions are called."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.collective import ALL, Coord, LoadedProgram, MeshTensor, Workers, launch
from tvm_axe.collective import Argument as CallArgument
from tvm_axe.errors import LowerError, WorkerError
from tvm_axe.executable.arguments import Arrays, Input, matched
from tvm_axe.executable.base import Executable
from tvm_axe.executable.sizes import counted, fitted, input_of, sizes_of
from tvm_axe.layout import Layout, Mesh
from tvm_axe.machines import backend_of
from tvm_axe.machines.builder import PROGRAM_BUILDER
from tvm_axe.relax.device import DeviceFunction, DeviceModule, Placed
from tvm_axe.relax.sharing import described, layout_of
from tvm_axe.relax.sizes import names_in, shape_at

__all__ = ["MeshModelExecutable"]


class MeshModelExecutable(Executable):
    """A model that devices share, built by the workers that run it.

    Parameters
    ----------
    shared : DeviceModule
        What each device runs, and how values lie.
    module : IRModule
        The same module as records left it.
    runnable : IRModule
        The same with tile kernels in the place of the blocks that chose one, which workers build.
    target, tuned
        See `Executable`.
    """

    mesh: Mesh

    def __init__(
        self,
        shared: DeviceModule,
        module: tvm.IRModule,
        runnable: tvm.IRModule,
        target: Target,
        tuned: Mapping[str, float],
    ) -> None:
        names = list(shared.functions)
        super().__init__(names[0] if len(names) == 1 else "model", module, target, tuned)
        self.shared, self.runnable, self.mesh = shared, runnable, shared.mesh
        self.layouts: Mapping[str, Layout] = {
            name: layout
            for name, placed in shared.tensors.items()
            if (layout := layout_of(placed.form, placed.shape, shared.mesh, shared.axis)) is not None
        }
        self._loaded: weakref.WeakKeyDictionary[Workers, _Loaded] = weakref.WeakKeyDictionary()
        self._own: tuple[int, Workers] | None = None  # the process that launched them, and its own workers

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the model's functions."""
        return tuple(self.shared.functions)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(placed.name for placed in self._function().results)

    @property
    def bytes(self) -> int:
        return sum(function.chosen.bytes for function in self.shared.functions.values())

    def call(self, workers: Workers, function: str, *arrays: Any, **named: Any) -> Arrays:
        """Run one of the model's functions on whole arrays, of which those that `place` has placed may be left out.

        Raises
        ------
        LowerError
            If there is no such function, or an array is wrong or missing; all that is wrong is listed.
        WorkerError
            If a worker doesn't start, fails, dies or doesn't answer.
        """
        of, loaded = self._function(function), self._on(workers)
        arrays, named = tuple(map(counted, arrays)), {name: counted(value) for name, value in named.items()}
        wanted = [each for each in self._inputs_of(of) if not arrays or each.name not in loaded.placed]
        if not arrays:
            wanted = [each for each in wanted if each.name in named or each.name not in loaded.placed]
        for each, array in zip(wanted, matched(function, wanted, arrays, named)):
            loaded.fill(of, each.name, array)
        return loaded.called(of)

    def place(self, workers: Workers, **weights: Any) -> None:
        """Place parameters of the model on workers, each device's share of them; calls needn't bring them then.

        Raises
        ------
        LowerError
            If no function has a parameter of a name, or an array is of another shape or type.
        """
        loaded = self._on(workers)
        for name, array in weights.items():
            owners = [
                (function, each)
                for function in self.shared.functions.values()
                for each in self._inputs_of(function)
                if each.name == name
            ]
            if not owners:
                known = dict.fromkeys(e.name for f in self.shared.functions.values() for e in f.inputs)
                raise LowerError(f"place: no function of the model takes {name!r}; they take {', '.join(known)}")
            for function, each in owners:
                loaded.fill(function, name, *matched("place", [each], [array], {}))
            loaded.placed.add(name)

    def show(self) -> str:
        lines = [f"model on mesh {self.mesh}", described(self.shared)]
        for function in self.shared.functions.values():
            chosen = function.chosen
            here, there = chosen.weights
            lines += ["", f"{function.name}: weights of {here:,} bytes a device, {there:,} in all", "", "layouts"]
            placed = [tensor for each in function.inputs for tensor in each.tensors] + list(function.results)
            width = max((len(each.name) for each in placed), default=0)
            lines += [f"  {each.name:<{width}}  {each.form}" for each in placed]
            lines += ["", "calls (bytes a device)"]
            for choice in chosen.choices:
                for moved in choice.moves:
                    name = chosen.graph.values[moved.value].name
                    lines.append(
                        f"  {moved.how.kind:<15} {name}: {moved.source} -> {moved.target}  {moved.how.bytes:,}"
                    )
                ins, outs = (", ".join(map(str, forms)) for forms in (choice.strategy.ins, choice.strategy.outs))
                lines.append(f"  {choice.node.name:<15} {ins} -> {outs}")
            lines.append(f"  in all          {chosen.bytes:,}")
        return "\n".join([*lines, "", self.module.script()])

    def close(self) -> None:
        if self._own is not None and self._own[0] == os.getpid():
            self._own[1].close()
        self._own = None

    def save(self, path: object) -> None:
        raise LowerError(f"{self.name}: a model that is shared over a mesh isn't written to a file; compile it again")

    # ---- As functions are called

    def _function(self, name: str | None = None) -> DeviceFunction:
        functions = self.shared.functions
        if name is None and len(functions) == 1:
            return next(iter(functions.values()))
        if name is None or name not in functions:
            names = ", ".join(functions)
            asked = f"there is no {name!r} among them" if name else "name one"
            usage = f'exe.call(workers, "{next(iter(functions))}", ...)'
            raise LowerError(f"the model has {len(functions)} functions ({names}); {asked}: {usage}")
        return functions[name]

    def _inputs(self) -> Sequence[Input]:
        return self._inputs_of(self._function())

    def _inputs_of(self, function: DeviceFunction) -> list[Input]:
        return [input_of(each) for each in function.inputs]

    def _run(self, workers: Workers | None, arrays: Arrays) -> Arrays:
        assert workers is not None  # a mesh has them
        function, loaded = self._function(), self._on(workers)
        for each, array in zip(function.inputs, arrays):
            loaded.fill(function, each.name, array)
        return loaded.called(function)

    def _time(self, workers: Workers | None, arrays: Arrays, repeat: int, warmup: int) -> list[float]:
        assert workers is not None
        self._run(workers, arrays)
        function, loaded = self._function(), self._on(workers)
        return workers.time(loaded.program, loaded.arguments(function), repeat, warmup, function.name)

    def _taken(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Workers | None, Arrays]:
        if arguments and isinstance(arguments[0], Workers):
            self._check(arguments[0])
        return super()._taken(tuple(map(counted, arguments)), {name: counted(each) for name, each in named.items()})

    def _check(self, workers: Workers) -> None:
        if workers.mesh != self.mesh:
            raise LowerError(
                f"{self.name} was compiled for the mesh {self.mesh}; the workers are {workers.mesh}: launch the mesh "
                "that it was compiled for"
            )
        unseen = any(map(workers.is_apart, self.shared.coordinates))
        if unseen and any("_taken" in str(variable.name_hint) for variable, _ in self.module.functions_items()):
            axes = ", ".join(self.shared.coordinates)
            raise LowerError(
                f"{self.name}: what no collective deals out is taken by kernels that index the slabs of peers over "
                f"{axes}, and here these don't see each other's memory; share the model over an axis along which "
                "devices do"
            )

    def _workers(self) -> Workers:
        process = os.getpid()
        if self._own is None or self._own[0] != process or self._own[1].closed:
            on_host = backend_of(self.target).on_host
            workers = launch(self.mesh) if on_host else launch(self.mesh, engine=backend_of(self.target).device)
            weakref.finalize(self, workers.close)
            self._own = process, workers
        return self._own[1]

    def _on(self, workers: Workers) -> _Loaded:
        """The program and its tensors on `workers`, made at the first use."""
        if workers.closed:
            raise WorkerError(f"{self.name}: the workers are closed; launch new ones")
        if workers not in self._loaded:
            self._check(workers)
            self._loaded[workers] = _Loaded(self.shared, self.runnable, self.target, workers)
        return self._loaded[workers]


class _Loaded:
    """A model on one set of workers, with its mesh tensors; they free them once its executable has gone.

    Attributes
    ----------
    placed : set of str
        The parameters that calls needn't bring.
    """

    def __init__(self, shared: DeviceModule, module: tvm.IRModule, target: Target, workers: Workers) -> None:
        self.shared, self.workers = shared, weakref.ref(workers)
        self.mesh, self.axis = shared.mesh, shared.axis
        self.placed: set[str] = set()
        self.program: LoadedProgram = workers.load(module, target, PROGRAM_BUILDER)
        self.tensors: dict[str, MeshTensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the whole arrays that tensors have been given
        self.counts: dict[
            tuple[str, str], tuple[int, ...]
        ] = {}  # the shapes and numbers that functions have been given
        self._items: list[MeshTensor | LoadedProgram] = [self.program]
        weakref.finalize(self, _discard, weakref.ref(workers), self._items)
        for placed in shared.tensors.values():
            if not names_in(placed.shape):
                self._fit(placed, shape_at(placed.shape, {}))
        for placed, constant in shared.constants:
            self._scatter(placed, _tvm.as_array(constant))

    def _fit(self, placed: Placed, shape: tuple[int, ...], most: Mapping[str, int] | None = None) -> None:
        """Have a tensor with slabs of a whole array of a shape."""
        workers, old = self.workers(), self.tensors.pop(placed.name, None)
        assert workers is not None  # who calls has them
        try:
            self.tensors[placed.name] = fitted(old, placed, placed.form.local(shape), most or {}, workers)
        finally:  # where there was no memory the old one is gone
            self._items[:] = [self.program, *self.tensors.values()]

    def arguments(self, function: DeviceFunction) -> list[CallArgument]:
        """What the device's function is called with, where its inputs are in place."""
        shapes = {
            each.name: self.shapes[each.tensors[0].name] if each.tensors else self.counts[function.name, each.name]
            for each in function.inputs
        }
        sizes = sizes_of(function, shapes)
        if sizes:
            given = {placed.name for each in function.inputs for placed in each.tensors}
            for name in dict.fromkeys(name for name, _ in function.arguments if name not in given):
                placed = self.shared.tensors[name]
                if names_in(placed.shape):
                    self._fit(placed, shape_at(placed.shape, sizes), function.most)
        views = [(self.tensors[name], view) for name, view in function.arguments]
        return [*(sizes[name] for name in function.sizes), *views, *map(Coord, self.shared.coordinates)]

    def called(self, function: DeviceFunction) -> Arrays:
        """The results of a call on what is in place."""
        workers = self.workers()
        assert workers is not None  # who calls has them
        workers.call(self.program, self.arguments(function), function.name)
        return tuple(self._gather(placed) for placed in function.results)

    def fill(self, function: DeviceFunction, name: str, array: np.ndarray) -> None:
        """Put a whole array into the tensors of a function's parameter."""
        for each in function.inputs:
            if each.name == name:
                if not each.tensors:
                    self.counts[function.name, name] = tuple(map(int, array.ravel()))
                for placed in each.tensors:
                    self._fit(placed, array.shape, function.most)
                    self._scatter(placed, array)
                    self.shapes[placed.name] = array.shape

    def _coordinate(self, device: int) -> int:
        """The number of a device among those that share."""
        return device if self.axis == ALL else self.mesh.coords(device)[self.axis]

    def _scatter(self, placed: Placed, array: np.ndarray) -> None:
        tensor = self.tensors[placed.name]
        for device in range(self.mesh.size):
            slab, form = tensor.slab(device), placed.form
            if form.share is None or form.dim is None:
                slab[...] = array
                continue
            begin = 0
            for span in form.share.spans(self._coordinate(device)):
                length = span.stop - span.start
                slab[_rows(form.dim, slice(begin, begin + length))] = array[_rows(form.dim, span)]
                begin += length

    def _gather(self, placed: Placed) -> np.ndarray:
        tensor, form = self.tensors[placed.name], placed.form
        if form.share is None or form.dim is None:
            return np.array(tensor.slab(0))
        shape = [tensor.shape[dim] if dim != form.dim else extent for dim, extent in enumerate(placed.shape)]
        whole = np.empty(shape_at(shape, {}), tensor.slab(0).dtype)
        for device in range(self.mesh.size):
            coordinate, slab = self._coordinate(device), tensor.slab(device)
            begin = 0
            for span in form.share.spans(coordinate):
                length = span.stop - span.start
                whole[_rows(form.dim, span)] = slab[_rows(form.dim, slice(begin, begin + length))]
                begin += length
        return whole


def _rows(dim: int, span: slice) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(dim)), span)


def _discard(workers: weakref.ref[Workers], items: list[MeshTensor | LoadedProgram]) -> None:
    alive = workers()
    if alive is not None:
        for item in items:
            alive.discard(item)
