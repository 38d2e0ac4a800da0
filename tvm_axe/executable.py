"""What `axe.compile` returns: whole numpy arrays in, whole arrays out, on a mesh of workers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import tvm
from tvm.target import Target

from tvm_axe.collective import Argument, Coord, MeshTensor, Program, Timeline, Workers
from tvm_axe.errors import LowerError
from tvm_axe.layout import Layout, Mesh, pack, unpack
from tvm_axe.lower.derive import MESH_KERNEL
from tvm_axe.lower.lowered import Lowered, MeshBuffer, Stage
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.schedule.tiles import choices_in
from tvm_axe.tracing import timeline_of


class Executable:
    """A lowered function, compiled by the workers that run it.

    Attributes
    ----------
    mesh : Mesh
        The devices that it was compiled for.
    target : Target
        What its kernels are compiled for.
    module : IRModule
        What each device runs: ``main``, and a function for each kernel, tuned where the database had a record; the
        blocks that tile kernels compute are annotated with them.
    stages : tuple[Stage, ...]
        What happens in order, with the bytes that each device moves.
    layouts : Mapping[str, Layout]
        Where each buffer lives.
    tuned : Mapping[str, float]
        The kernels that a tuning record was found for, with the seconds it was measured at.
    """

    def __init__(self, lowered: Lowered, module: tvm.IRModule, target: Target, tuned: Mapping[str, float]) -> None:
        self._lowered = lowered
        self.module = module
        self._runnable = with_tile_kernels(module, target)
        self.target = target
        self.tuned = MappingProxyType(dict(tuned))
        self._loaded: weakref.WeakKeyDictionary[Workers, _Loaded] = weakref.WeakKeyDictionary()

    @property
    def mesh(self) -> Mesh:
        return self._lowered.mesh

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self._lowered.stages

    @property
    def notation(self) -> str:
        """The schedule as CoCoNet writes it, such as ``ol(MM, fuse(RS-C-AG))``."""
        return self._lowered.notation

    @property
    def layouts(self) -> Mapping[str, Layout]:
        return self._lowered.layouts

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the arrays that `run` takes, in order."""
        return tuple(buffer.name for buffer in self._lowered.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the arrays that `run` returns, in order."""
        return tuple(buffer.name for buffer in self._lowered.outputs)

    @property
    def bytes(self) -> int | float:
        """Bytes that each device moves to or from its peers in one run."""
        return sum(stage.bytes for stage in self.stages)

    def run(self, workers: Workers, *arrays: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
        """Run once on whole arrays.

        Parameters
        ----------
        workers : Workers
            What `axe.launch` gave, for the same mesh.
        *arrays : numpy.ndarray
            One for each of `inputs`, of its whole shape and dtype.

        Returns
        -------
        outputs : numpy.ndarray or tuple of them
            The whole outputs; one array if there is one output.

        Raises
        ------
        LowerError
            If the number, a shape or a dtype of the arrays is wrong, or the workers are of another mesh.
        WorkerError
            If a worker fails, dies or doesn't answer.
        """
        loaded = self._load(workers, arrays)
        workers.call(loaded.program, loaded.arguments)
        outputs = tuple(loaded.gather(buffer) for buffer in self._lowered.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def time(self, workers: Workers, *arrays: np.ndarray, repeat: int = 20, warmup: int = 3) -> list[float]:
        """Seconds of each of `repeat` runs on `arrays`, the slowest device's, the inputs already in place.

        Raises
        ------
        LowerError, WorkerError
            As `run`.
        """
        loaded = self._load(workers, arrays)
        return workers.time(loaded.program, loaded.arguments, repeat, warmup)

    def trace(self, workers: Workers, *arrays: np.ndarray, warmup: int = 3) -> Timeline:
        """What each device does when in a run on `arrays`, the inputs already in place; `warmup` runs come first.

        Raises
        ------
        LowerError, WorkerError
            As `run`.
        """
        loaded = self._load(workers, arrays)
        recordings = workers.trace(loaded.program, loaded.arguments, len(self._lowered.calls), warmup)
        return timeline_of(self._lowered, recordings)

    def show(self) -> str:
        """Layouts, derived collectives with their bytes, and the module that each device runs."""
        width = max(len(name) for name in self.layouts)
        lines = [f"schedule {self.notation} on mesh {self.mesh}", "", "layouts"]
        lines += [f"  {name:<{width}}  {layout}" for name, layout in self.layouts.items()]
        lines += ["", "stages (bytes a device)"]
        for stage in self.stages:
            over = f" over {stage.axis}" if stage.axis else ""
            notes = []
            if stage.kernel is not None:
                notes += [str(choice) for choice in choices_in(self.module[stage.kernel])]
                if stage.kernel in self.tuned:
                    notes.append(f"tuned: {self.tuned[stage.kernel] * 1e3:.3f} ms")
            note = f"  ({', '.join(notes)})" if notes else ""
            lines.append(f"  {stage.name:<{width + 12}}  {stage.kind + over:<24}  {_count(stage.bytes):>12}{note}")
        lines += [f"  {'in all':<{width + 12}}  {'':<24}  {_count(self.bytes):>12}", "", self.module.script()]
        return "\n".join(lines)

    def _load(self, workers: Workers, arrays: tuple[np.ndarray, ...]) -> _Loaded:
        """The program and its tensors on `workers`, made at the first use, with `arrays` put into place."""
        if workers.mesh != self.mesh:
            raise LowerError(
                f"{self._lowered.name} was compiled for the mesh {self.mesh} ({self.mesh.size} devices); the workers "
                f"are {workers.mesh} ({workers.mesh.size}): launch the mesh that it was compiled for"
            )
        self._check(arrays)
        if workers not in self._loaded:
            self._check_hosts(workers)
            self._loaded[workers] = _Loaded(self._lowered, self._runnable, self.target, workers)
        loaded = self._loaded[workers]
        for buffer, array in zip(self._lowered.inputs, arrays):
            loaded.scatter(buffer, array)
        return loaded

    def _check_hosts(self, workers: Workers) -> None:
        for stage in self.stages:
            if stage.kind == MESH_KERNEL and stage.axis is not None and workers.spans_hosts(stage.axis):
                raise LowerError(
                    f"{self._lowered.name}: stage {stage.name!r} is a kernel that indexes the slabs of its peers over "
                    f"{stage.axis}, and here these are on several machines; leave that axis within a machine, or its "
                    "collectives unfused"
                )

    def _check(self, arrays: tuple[np.ndarray, ...]) -> None:
        name, inputs = self._lowered.name, self._lowered.inputs
        if len(arrays) != len(inputs):
            raise LowerError(f"{name} takes {len(inputs)} arrays ({', '.join(self.inputs)}); got {len(arrays)}")
        for buffer, array in zip(inputs, arrays):
            if not isinstance(array, np.ndarray):
                raise LowerError(f"{name}: {buffer.name} must be a numpy array; got {type(array).__name__}")
            if array.shape != buffer.shape:
                raise LowerError(f"{name}: {buffer.name} has the shape {buffer.shape}; got an array of {array.shape}")
            if str(array.dtype) != buffer.dtype:
                raise LowerError(f"{name}: {buffer.name} is {buffer.dtype}; got an array of {array.dtype}")


class _Loaded:
    """A program on one set of workers, with its mesh tensors; they free them once its executable has gone."""

    def __init__(self, lowered: Lowered, module: tvm.IRModule, target: Target, workers: Workers) -> None:
        self.mesh = lowered.mesh
        self.program: Program = workers.load(module, target)
        self.tensors: dict[str, MeshTensor] = {}
        for buffer in lowered.buffers.values():
            # What devices only read and all hold whole is stored once.
            shared = buffer.is_input and not buffer.is_output and not buffer.sharding.axes
            self.tensors[buffer.name] = workers.mesh_tensor(buffer.sharding.stored, buffer.dtype, shared)
        views = [(self.tensors[name], view) for name, view in lowered.arguments]
        self.arguments: list[Argument] = [*views, *(Coord(axis) for axis in lowered.coordinates)]
        weakref.finalize(self, _discard, weakref.ref(workers), [self.program, *self.tensors.values()])

    def scatter(self, buffer: MeshBuffer, array: np.ndarray) -> None:
        """Put each device's region of the whole `array` into its slab; the padding of an uneven one stays zero."""
        tensor, memory = self.tensors[buffer.name], buffer.sharding.memory
        for device in range(1 if tensor.shared else self.mesh.size):
            share = array[buffer.layout.local_region(buffer.shape, self.mesh, device)]
            share = share.squeeze(tuple(buffer.sharding.partial))
            stored = tensor.slab(device)
            slab = stored if memory is None else np.zeros(buffer.sharding.slab, stored.dtype)
            slab[_corner(share.shape)] = share
            if memory is not None:
                stored[...] = pack(slab, memory)

    def gather(self, buffer: MeshBuffer) -> np.ndarray:
        """The whole array out of the devices' slabs."""
        tensor, sharding = self.tensors[buffer.name], buffer.sharding
        whole = np.empty(buffer.shape, tensor.slab(0).dtype)
        for device in range(self.mesh.size if sharding.axes else 1):
            region = buffer.layout.local_region(buffer.shape, self.mesh, device)
            stored = tensor.slab(device)
            slab = stored if sharding.memory is None else unpack(stored, sharding.memory, sharding.slab)
            whole[region] = slab[_corner(whole[region].shape)]
        return whole


def _count(bytes_: float) -> str:
    return f"{bytes_:,}" if isinstance(bytes_, int) else f"{bytes_:,.1f}"


def _corner(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of a padded slab that the device's share fills."""
    return tuple(slice(extent) for extent in shape)


def _discard(workers: weakref.ref[Workers], items: list[MeshTensor | Program]) -> None:
    alive = workers()
    if alive is not None:
        for item in items:
            alive.discard(item)
