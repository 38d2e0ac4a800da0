"""Tile programs on workers: every device of a mesh axis runs the program, with its own coordinate, at once. ::

    with launch(Mesh({"tp": 2})) as workers:
        summed = MeshKernel(workers, program)       # compiled by each worker
        summed(x, inbox, flags, y)                  # mesh tensors, in the order of the parameters

A parameter that is a `tvm_axe.tile.mesh_tensor` gets the slabs of the device's group along the axis, any other tensor
the device's own slab, and the device's coordinate is filled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_axe.collective.tensor import SLAB, Coord, MeshTensor, peers_of
from tvm_axe.collective.workers import Argument, LoadedProgram, Workers
from tvm_axe.errors import InputError
from tvm_axe.machines import resolve_target
from tvm_axe.tile.arguments import Parameter, Scalar, parameters
from tvm_axe.tile.assuming import find_broken
from tvm_axe.tile.lowering import emit, plan
from tvm_axe.tile.nodes import Wait
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.reading import read


class MeshKernel:
    """A tile program that all devices along a mesh axis run together.

    Flags are mesh tensors of int32 that are zero to begin with, as `Workers.mesh_tensor` makes them. A call returns
    when all devices have ended; what they have written is in the tensors then.

    Parameters
    ----------
    workers : Workers
        Those that run it.
    program : PrimFunc or TileProgram
        A tile program with mesh tensors among its parameters; its scalars are integers.
    axis : str, optional
        The mesh axis along which its devices lie; the one there is, if there is one.

    Raises
    ------
    InputError
        The mesh has no such axis, or more than one and none is named; the program is of another number of devices,
        takes numbers that are no int32, or waits where workers are threads that share a GPU.
    TileError
        The program is malformed, or the workers' devices cannot run it (`tvm_axe.tile.plan`).
    WorkerError
        It doesn't compile.
    """

    def __init__(self, workers: Workers, program: tirx.PrimFunc | TileProgram, axis: str | None = None) -> None:
        decided = plan(program if isinstance(program, TileProgram) else read(program), resolve_target(workers.target))
        self.workers, self.name = workers, decided.program.name
        self._params, self._assumptions = parameters(decided.program), decided.program.assumptions
        if workers.shares_context and any(isinstance(node, Wait) for node in decided.program.nodes()):
            raise InputError(
                f"{self.name} waits while it runs, and several of the workers are threads that share a GPU, where a "
                "peer's kernel may not start beside one that waits; give each a GPU, or launch processes, which take "
                "turns"
            )
        names = workers.mesh.names
        if axis is None and len(names) != 1:
            raise InputError(f"{self.name}: the mesh has the axes {', '.join(names)}; valid is axis=, one of them")
        self.axis = names[0] if axis is None else axis
        devices = workers.mesh.axis_size(self.axis)
        if devices != decided.program.devices:
            raise InputError(
                f"{self.name} is a program of {decided.program.devices} devices, the number in its mesh tensors' "
                f"shapes; axis {self.axis!r} of the mesh has {devices}"
            )
        for param in self._params:
            if isinstance(param, Scalar) and param.dtype != "int32":
                raise InputError(f"{self.name}: {param} is a parameter; valid for workers are int32 and tensors")
        self._func, self._target = emit(decided, peers_of(workers.mesh, self.axis)[1]), decided.target
        self._programs = {(1, 1): self._load(1, 1)}

    def __call__(self, *arguments: MeshTensor | int) -> None:
        """Run once on every device.

        Parameters
        ----------
        *arguments : MeshTensor or int
            A mesh tensor or a number for each parameter but the device; the slab of a mesh tensor has the shape of the
            parameter without dimension 0.

        Raises
        ------
        InputError
            The number of arguments is wrong, a shape or a type doesn't fit, or a number isn't as the program assumes.
        WorkerError
            A worker failed, or waited too long for a flag; flags may be anything then.
        """
        self.workers.call(self._programs[1, 1], self._bound(arguments))

    def time(
        self,
        *arguments: MeshTensor | int,
        repeat: int,
        warmup: int = 1,
        times: int = 1,
        turns: Sequence[Sequence[MeshTensor | int]] = (),
    ) -> list[float]:
        """Return the seconds of a run in each of `repeat` measurements, on the slowest worker; errors are a call's.

        A measurement is of so many `times`, one behind the other: devices begin it at different times, and a short
        kernel that waits for its peers takes as long as that. Between two runs is a barrier, which counts: a flag that
        is reset must not be set for the next run before.

        With `turns`, arguments of runs that take turns with these, there is no barrier. That is right where runs of
        different arguments have different flags, and none writes what a peer's run before it may still read.
        """
        sets = 1 + len(turns)
        if (times, sets) not in self._programs:
            self._programs[times, sets] = self._load(times, sets)
        bound = [argument for each in (arguments, *turns) for argument in self._bound(each)]
        return [seconds / times for seconds in self.workers.time(self._programs[times, sets], bound, repeat, warmup)]

    def _load(self, times: int, sets: int) -> LoadedProgram:
        return self.workers.load(_module(self.name, self._func, self._params, times, sets), self._target)

    def _bound(self, arguments: Sequence[MeshTensor | int]) -> list[Argument]:
        wanted = [param for param in self._params if not _is_device(param)]
        if len(arguments) != len(wanted):
            raise InputError(
                f"{self.name} takes {len(wanted)} arguments ({', '.join(map(str, wanted))}); got {len(arguments)}"
            )
        numbers = {param.name: value for param, value in zip(wanted, arguments) if isinstance(param, Scalar)}
        given = iter(arguments)
        bound = [Coord(self.axis) if _is_device(param) else self._one(param, next(given)) for param in self._params]
        broken = find_broken(self._assumptions, numbers)
        if broken is not None:
            raise InputError(f"{self.name}: {broken.name} is {numbers[broken.name]}; it has tile.assume({broken})")
        return bound

    def _one(self, param: Parameter | Scalar, value: Any) -> Argument:
        if isinstance(param, Scalar):
            if not isinstance(value, int):
                raise InputError(f"{self.name}: {param.name} is an integer, {param.dtype}; got {type(value).__name__}")
            return value
        if not isinstance(value, MeshTensor):
            raise InputError(f"{self.name}: {param} is a tensor of each device; got {type(value).__name__}")
        shape = param.shape[1:] if param.is_mesh else param.shape
        if tuple(value.shape) != tuple(shape) or value.dtype != param.dtype:
            raise InputError(
                f"{self.name}: a slab of {param.name} is {param.dtype}{list(shape)}; got "
                f"{value.dtype}{list(value.shape)}"
            )
        if param.is_mesh and value.shared:
            raise InputError(f"{self.name}: {param.name} has a slab for each device; got a tensor that they share")
        return value, self.axis if param.is_mesh else SLAB


def _is_device(param: Parameter | Scalar) -> bool:
    """Whether a parameter is the coordinate of the device that runs."""
    return isinstance(param, Scalar) and param.devices is not None


def _module(
    name: str, func: tirx.PrimFunc, params: Sequence[Parameter | Scalar], times: int, sets: int
) -> tvm.IRModule:
    """A program whose ``main`` calls the kernel so many times, with sets of arguments in turns, or barriers between."""
    builder = relax.BlockBuilder()
    kernel = builder.add_func(func.with_attr("global_symbol", name), name)
    arguments = [
        [
            relax.Var(param.name, tvm.ir.PrimType(param.dtype))
            if isinstance(param, Scalar)
            else relax.Var(param.name, relax.TensorType([int(extent) for extent in param.shape], param.dtype))
            for param in params
        ]
        for _ in range(sets)
    ]
    with builder.function("main", [var for each in arguments for var in each], pure=False):
        for run in range(times):
            if run and sets == 1:
                builder.emit(relax.Call(relax.ExternFunc("axe.barrier"), [], ty_args=[relax.TupleType([])]))
            builder.emit(relax.Call(kernel, arguments[run % sets]))
        builder.emit_func_output(relax.Tuple([]))
    return builder.finalize()
