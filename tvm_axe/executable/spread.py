"""Values on a mesh: tensors of which each device has its share, in a form along each axis (`tvm_axe.relax.forms`)."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tvm
from tvm.target import Target

from tvm_axe.collective import SLAB, Coord, LoadedProgram, MeshTensor, Workers
from tvm_axe.collective.stored import Box, Piece, sliced
from tvm_axe.collective.workers import Item
from tvm_axe.errors import WorkerError
from tvm_axe.executable.on_mesh import discard
from tvm_axe.machines.builder import program_builder
from tvm_axe.relax.conversion import Conversion, conversion
from tvm_axe.relax.device import DeviceModule, Placed
from tvm_axe.relax.forms import Forms, are_whole, spots
from tvm_axe.relax.workspace import Workspace

__all__ = ["ModelProgram", "Pool", "Spread"]


class ModelProgram:
    """A model on one set of workers, which drop it once it has gone; its sessions there share it.

    Parameters
    ----------
    shared : DeviceModule
        What each device runs, and how values lie.
    module : IRModule
        The same module as workers build it.
    workspaces : mapping
        What its functions are called with behind what `shared` says, by their names.
    target, workers
        For whom.
    kept : bool
        Whether what workers compile is kept on disk.
    """

    def __init__(
        self,
        shared: DeviceModule,
        module: tvm.IRModule,
        workspaces: Mapping[str, Workspace],
        target: Target,
        workers: Workers,
        kept: bool,
    ) -> None:
        self.shared, self.target, self.workers, self.workspaces = shared, target, weakref.ref(workers), workspaces
        self.module = module
        self.loaded = workers.load(module, target, program_builder(kept))
        self._conversions: dict[tuple[object, ...], tuple[Conversion, LoadedProgram] | None] = {}
        self._items: list[Item] = [self.loaded]
        weakref.finalize(self, discard, self.workers, self._items)

    def on(self) -> Workers:
        """The workers; an error if they have gone."""
        workers = self.workers()
        if workers is None or workers.closed:
            raise WorkerError("the workers are closed; launch new ones, and load the model again")
        return workers

    def convert(self, value: Spread, target: MeshTensor, placed: Placed) -> None:
        """Put a value into a tensor that is `placed` in other forms, on the devices.

        It goes through the host where these see no peers, and what is to be moved along several axes.
        """
        workers, shared = self.on(), self.shared
        forms = placed.forms
        shape = tuple(extent if isinstance(extent, int) else None for extent in placed.shape)
        key = shape, value.dtype, value.forms, forms
        if key not in self._conversions:
            made, found = conversion(*key, shared.mesh, workers.page), None
            if made is not None and (made.view == SLAB or not workers.is_apart(made.axis)):
                found = made, workers.load(made.module, self.target)
                self._items.append(found[1])
            self._conversions[key] = found
        found = self._conversions[key]
        if found is None:
            self.scatter(target, forms, self.gather(value))
            return
        made, program = found
        workers.call(program, [(value.tensor, made.view), (target, SLAB), Coord(made.axis)])

    # ---- Whole arrays

    def scatter(self, tensor: MeshTensor, forms: Forms, array: np.ndarray) -> int:
        """Put each device's share of an array into its slab; returns the bytes that were copied."""
        if tensor.shared:
            tensor.slab(0)[...] = array
            return tensor.nbytes
        for device, pieces in enumerate(self.pieces(forms, array.shape)):
            slab = tensor.slab(device)
            for target, source in pieces:
                slab[sliced(target)] = array[sliced(source)]
        return tensor.nbytes * self.shared.mesh.size

    def gather(self, value: Spread) -> np.ndarray:
        """The whole array of a value."""
        tensor = value.tensor
        if are_whole(value.forms):
            return np.array(tensor.slab(0))
        whole = np.empty(value.shape, tensor.slab(0).dtype)
        for device, pieces in enumerate(self.pieces(value.forms, value.shape)):
            slab = tensor.slab(device)
            for target, source in pieces:
                whole[sliced(source)] = slab[sliced(target)]
        return whole

    def pieces(self, forms: Forms, shape: Sequence[int]) -> Iterator[list[Piece]]:
        """Of each device, the boxes of its slab and what they are of the whole."""
        mesh = self.shared.mesh
        for device in range(mesh.size):
            found = spots(forms, shape, mesh.coords(device))
            yield [(_box(local), _box(whole)) for whole, local in found]


def _box(index: tuple[slice, ...]) -> Box:
    return tuple((each.start, each.stop) for each in index)


class Pool:
    """The tensors of a session; those of values that have gone are used again."""

    def __init__(self, workers: Workers) -> None:
        self._workers = weakref.ref(workers)
        self._all: list[MeshTensor] = []
        self._kinds: dict[MeshTensor, _Kind] = {}
        self._free: defaultdict[_Kind, deque[MeshTensor]] = defaultdict(deque)
        weakref.finalize(self, discard, self._workers, self._all)

    def take(self, shape: Sequence[int], dtype: str, shared: bool = False, room: int | None = None) -> MeshTensor:
        """A tensor with slabs of a shape, with anything in it; with `room` for so many elements, to be used for others.

        Tensors with as much room serve shapes of all kinds.
        """
        kind = _Kind(tuple(shape) if room is None else (room,), dtype, shared, room is None)
        free = self._free[kind]
        if free:
            tensor = free.pop()
        else:
            workers = self._workers()
            assert workers is not None  # whoever asks has them
            tensor = workers.mesh_tensor(kind.shape, dtype, shared)
            self._all.append(tensor)
            self._kinds[tensor] = kind
        if room is not None:
            tensor.resize(shape)
        return tensor

    def give(self, tensor: MeshTensor) -> None:
        """Take a tensor back that nobody uses any more; in any thread, also while another closes the pool."""
        kind = self._kinds.get(tensor)
        if kind is not None:
            self._free[kind].append(tensor)

    def trim(self) -> None:
        """Free what nobody uses."""
        workers = self._workers()
        assert workers is not None  # whoever asks has them
        for free in self._free.values():
            while free:
                tensor = free.pop()
                self._all.remove(tensor)
                del self._kinds[tensor]
                workers.free(tensor)

    def close(self) -> None:
        """Free all."""
        self._kinds.clear()  # what is given back from here on is nobody's
        self._free.clear()
        workers = self._workers()
        while self._all:
            tensor = self._all.pop()
            if workers is not None and not workers.closed:
                workers.free(tensor)


class _Kind(NamedTuple):
    """What a tensor of a pool is taken for: slabs of this shape, or any that have room in one."""

    shape: tuple[int, ...]
    dtype: str
    shared: bool
    is_fixed: bool


class Spread:
    """A value on a mesh; its tensor is used again once it has gone.

    Attributes
    ----------
    shape, dtype
        Of the whole.
    forms : Forms
        How devices hold it.
    tensor : MeshTensor
        Where.
    """

    __slots__ = ("_pool", "dtype", "forms", "shape", "tensor")

    def __init__(self, shape: tuple[int, ...], dtype: str, forms: Forms, tensor: MeshTensor, pool: Pool) -> None:
        self.shape, self.dtype, self.forms, self.tensor, self._pool = shape, dtype, forms, tensor, pool

    def __del__(self) -> None:
        self._pool.give(self.tensor)
