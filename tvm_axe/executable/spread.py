"""Values on a mesh: tensors of which each device has its share, in a form (`tvm_axe.relax.forms`)."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tvm
from tvm.target import Target

from tvm_axe.collective import ALL, SLAB, Coord, LoadedProgram, MeshTensor, Workers
from tvm_axe.collective.stored import Piece, sliced
from tvm_axe.collective.workers import Item
from tvm_axe.errors import WorkerError
from tvm_axe.executable.on_mesh import discard
from tvm_axe.machines.builder import PROGRAM_BUILDER
from tvm_axe.relax.conversion import conversion
from tvm_axe.relax.device import DeviceModule
from tvm_axe.relax.forms import Form
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
    """

    def __init__(
        self,
        shared: DeviceModule,
        module: tvm.IRModule,
        workspaces: Mapping[str, Workspace],
        target: Target,
        workers: Workers,
    ) -> None:
        self.shared, self.target, self.workers, self.workspaces = shared, target, weakref.ref(workers), workspaces
        self.module = module
        self.loaded = workers.load(module, target, PROGRAM_BUILDER)
        self._conversions: dict[tuple[object, ...], tuple[str, LoadedProgram]] = {}
        self._items: list[Item] = [self.loaded]
        weakref.finalize(self, discard, self.workers, self._items)

    def on(self) -> Workers:
        """The workers; an error if they have gone."""
        workers = self.workers()
        if workers is None or workers.closed:
            raise WorkerError("the workers are closed; launch new ones, and load the model again")
        return workers

    def convert(self, value: Spread, target: MeshTensor, form: Form) -> None:
        """Put a value into a tensor in another form, on the devices; through the host where these see no peers."""
        workers, shared = self.on(), self.shared
        key = value.shape, value.dtype, value.form, form
        if key not in self._conversions:
            view, module = conversion(*key, shared.mesh, shared.axis, workers.page)
            if view != SLAB and any(map(workers.is_apart, shared.coordinates)):
                self.scatter(target, form, self.gather(value))
                return
            self._conversions[key] = view, workers.load(module, self.target)
            self._items.append(self._conversions[key][1])
        view, program = self._conversions[key]
        workers.call(program, [(value.tensor, view), (target, SLAB), *map(Coord, shared.coordinates)])

    # ---- Whole arrays

    def scatter(self, tensor: MeshTensor, form: Form, array: np.ndarray) -> int:
        """Put each device's share of an array into its slab; returns the bytes that were copied."""
        if tensor.shared:
            tensor.slab(0)[...] = array
            return tensor.nbytes
        for device, pieces in enumerate(self.pieces(form, array.shape)):
            slab = tensor.slab(device)
            for target, source in pieces:
                slab[sliced(target)] = array[sliced(source)]
        return tensor.nbytes * self.shared.mesh.size

    def gather(self, value: Spread) -> np.ndarray:
        """The whole array of a value."""
        tensor = value.tensor
        if value.form.share is None:
            return np.array(tensor.slab(0))
        whole = np.empty(value.shape, tensor.slab(0).dtype)
        for device, pieces in enumerate(self.pieces(value.form, value.shape)):
            slab = tensor.slab(device)
            for target, source in pieces:
                whole[sliced(source)] = slab[sliced(target)]
        return whole

    def pieces(self, form: Form, shape: Sequence[int]) -> Iterator[list[Piece]]:
        """Of each device, the boxes of its slab and what they are of the whole."""
        mesh, axis = self.shared.mesh, self.shared.axis
        for device in range(mesh.size):
            at = device if axis == ALL else mesh.coords(device)[axis]
            whole = tuple((0, extent) for extent in shape)
            if form.share is None or form.dim is None:
                yield [(whole, whole)]
                continue
            found: list[Piece] = []
            begin = 0
            for span in form.share.spans(at):
                ends = (begin, begin + span.stop - span.start), (span.start, span.stop)
                found.append(tuple((*whole[: form.dim], own, *whole[form.dim + 1 :]) for own in ends))  # type: ignore[arg-type]
                begin = ends[0][1]
            yield found


class Pool:
    """The tensors of a session; those of values that have gone are used again."""

    def __init__(self, workers: Workers) -> None:
        self._workers = weakref.ref(workers)
        self._all: list[MeshTensor] = []
        self._free: defaultdict[tuple[tuple[int, ...], str, bool], deque[MeshTensor]] = defaultdict(deque)
        self.closed = False
        weakref.finalize(self, discard, self._workers, self._all)

    def take(self, shape: tuple[int, ...], dtype: str, shared: bool = False) -> MeshTensor:
        """A tensor with slabs of a shape, with anything in it."""
        free = self._free[shape, dtype, shared]
        if free:
            return free.pop()
        workers = self._workers()
        assert workers is not None  # whoever asks has them
        tensor = workers.mesh_tensor(shape, dtype, shared)
        self._all.append(tensor)
        return tensor

    def give(self, tensor: MeshTensor, dtype: str) -> None:
        """Take a tensor back that nobody uses any more; in any thread."""
        if not self.closed:
            self._free[tensor.shape, dtype, tensor.shared].append(tensor)

    def close(self) -> None:
        """Free all."""
        self.closed = True
        self._free.clear()
        workers = self._workers()
        while self._all:
            tensor = self._all.pop()
            if workers is not None and not workers.closed:
                workers.free(tensor)


class Spread:
    """A value on a mesh; its tensor is used again once it has gone.

    Attributes
    ----------
    shape, dtype
        Of the whole.
    form : Form
        How devices hold it.
    tensor : MeshTensor
        Where.
    """

    __slots__ = ("_pool", "dtype", "form", "shape", "tensor")

    def __init__(self, shape: tuple[int, ...], dtype: str, form: Form, tensor: MeshTensor, pool: Pool) -> None:
        self.shape, self.dtype, self.form, self.tensor, self._pool = shape, dtype, form, tensor, pool

    def __del__(self) -> None:
        self._pool.give(self.tensor, self.dtype)
