"""Mesh tensors: one tensor, the slabs of all the devices side by side in shared memory."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  (gives numpy its names: bfloat16, float8_e4m3fn, ...)
import numpy as np
import tvm_ffi

from tvm_axe.collective.arena import PAGE, Arena, round_up
from tvm_axe.errors import InputError, WorkerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.layout.arrays import gather, scatter
from tvm_axe.layout.holding import Holding
from tvm_axe.layout.shapes import dense_strides

if TYPE_CHECKING:
    from tvm_axe.collective.mirror import Mirror
    from tvm_axe.collective.workers import Workers

SLAB = "slab"
"""The view of a tensor that is a device's own slab."""
ALL = "*"
"""The view that is the slabs of all devices; those along a mesh axis are the view of the axis's name."""


def slab_stride(shape: Sequence[int], dtype: str, page: int = PAGE) -> int:
    """Return the distance between the slabs of neighbouring devices, in elements: whole pages.

    A program that takes an axis view of a mesh tensor sees, along dimension 0, this times the number of devices between
    two neighbours on the axis (`peers_of`).

    Parameters
    ----------
    shape : sequence of int
        The shape of one device's slab.
    dtype : str
        The type of an element.
    page : int
        Bytes of a page of the devices' memory (`tvm_axe.machines.Backend.page`).
    """
    return round_up(math.prod(shape) * np.dtype(dtype).itemsize, page) // np.dtype(dtype).itemsize


def peers_of(mesh: Mesh, view: str) -> tuple[int, int]:
    """Return how many slabs the view along an axis, or of all, has side by side, and the devices from one to the next.

    >>> peers_of(Mesh({"x": 2, "y": 3}), "x")
    (2, 3)
    """
    if view == ALL:
        return mesh.size, 1
    return mesh[view], dense_strides(mesh.shape)[mesh.names.index(view)]


def check_dtype(dtype: str) -> np.dtype:
    """Return numpy's type of that name if both numpy and the compiler have it, with the same size."""
    try:
        numpy_type, compiler_type = np.dtype(dtype), tvm_ffi.dtype(dtype)
    except (TypeError, ValueError) as error:
        valid = "float32, bfloat16, int8, ..."
        raise InputError(f"dtype {dtype!r} is not a type of tensor elements; valid: {valid}") from error
    if numpy_type.itemsize * 8 != compiler_type.bits or compiler_type.lanes != 1:
        raise InputError(f"dtype {dtype!r}: elements must take whole bytes and have one lane")
    return numpy_type


@dataclass(frozen=True)
class Coord:
    """An argument that is, on each worker, its own coordinate on a mesh axis, as an int."""

    axis: str


@dataclass(frozen=True)
class Inside:
    """An argument that is, on each worker, a tensor within its own slab of a mesh tensor of bytes.

    Attributes
    ----------
    tensor : MeshTensor
        Of which it is a part.
    offset : int
        Where it begins in the slab, in bytes.
    shape, dtype
        What it is.
    """

    tensor: MeshTensor
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def encode(self) -> list[Any]:
        """Say in JSON where it lies, as `MeshTensor.encode` does."""
        view, offset, stride, _, _ = self.tensor.encode(SLAB)
        return [view, offset + self.offset, stride, list(self.shape), self.dtype]


class MeshTensor:
    """A tensor with a slab on each device; made by `Workers.mesh_tensor`.

    Attributes
    ----------
    shape : tuple of int
        The shape of one device's slab.
    dtype : str
        The type of an element.
    shared : bool
        Whether all the devices share one slab, for data that they only read.
    holding : Holding or None
        What each device holds of the whole tensor, if it was made with a layout.
    """

    def __init__(
        self,
        arena: Arena,
        mesh: Mesh,
        shape: Sequence[int],
        dtype: str,
        shared: bool,
        mirror: Mirror | None = None,
        holding: Holding | None = None,
        workers: Workers | None = None,
    ) -> None:
        extents = (0,) if isinstance(shape, int | np.integer) else shape  # a number is no shape
        if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in extents):
            raise InputError(f"mesh_tensor: shape must be a sequence of positive ints, not {shape!r}")
        self.shape = tuple(int(n) for n in shape)
        self.shared = shared
        self._numpy_type = check_dtype(dtype)
        self.dtype = str(tvm_ffi.dtype(dtype))
        self.holding = holding
        self._workers = None if workers is None else weakref.ref(workers)
        self._arena = arena
        self._devices = mesh.size
        self._texts: dict[str, str] = {}
        self._reserved = self.shape
        stride = slab_stride(self.shape, dtype, arena.page) * self._numpy_type.itemsize
        self._stride, self._room = 0 if shared else stride, stride
        # What the host has are copies, taken when they are wanted, if the devices have memory of their own.
        self._offset: int | None = arena.allocate(
            stride if shared else stride * self._devices, take=mirror is None or not mirror.discrete
        )
        self._mirror = mirror
        if mirror is not None:
            try:
                mirror.reserve(self)
            except BaseException:
                if not arena.closed:  # by a fault
                    arena.free(self._offset)
                raise

    @property
    def nbytes(self) -> int:
        """Bytes of one slab."""
        return math.prod(self.shape) * self._numpy_type.itemsize

    def slab(self, device: int) -> np.ndarray:
        """Return the slab of `device` as an array over the shared memory: no copy, writable.

        Of a device on another machine it is a copy that is kept up to date: what is written to it goes to the device
        before the workers' next command, and what they wrote is in it after.

        Raises
        ------
        InputError
            If the mesh has no such device.
        WorkerError
            If the tensor was freed or its workers are closed.
        """
        if device not in range(self._devices):
            raise InputError(f"device must be in [0, {self._devices}), not {device}")
        offset = self._live_offset() + device * self._stride
        if self._mirror is not None:
            self._mirror.fetch(self, device)
        slab = np.ndarray(self.shape, self._numpy_type, buffer=self._arena.map, offset=offset)
        if self._mirror is not None:
            self._mirror.watch(self, device, slab)
        return slab

    @property
    def room(self) -> int:
        """Bytes that a slab may have; see `resize`."""
        return self._room

    def resize(self, shape: Sequence[int]) -> None:
        """Have slabs of another shape in the same memory; what is in them is then anything. Extents may be 0.

        Raises
        ------
        InputError
            If they don't fit into the memory that there is, or the tensor has a layout, which is of one shape.
        WorkerError
            If the tensor was freed or its workers are closed.
        """
        self._live_offset()
        found = tuple(int(n) for n in shape)
        if self.holding is not None or min(found, default=0) < 0:
            raise InputError(f"resize: {self!r} can't have slabs of shape {found}")
        if math.prod(found) * self._numpy_type.itemsize > self._room:
            raise InputError(
                f"resize: slabs of shape {found} don't fit where those of {self._reserved} were; make another"
            )
        if found != self.shape:
            if self._mirror is not None:
                self._mirror.forget(self)
            self._texts.clear()
            self.shape = found

    @property
    def workers(self) -> Workers:
        """Those that it lies on.

        Raises
        ------
        WorkerError
            If they have gone.
        """
        workers = None if self._workers is None else self._workers()
        if workers is None:
            raise WorkerError(f"the workers of the mesh tensor of shape {self.shape} have gone; launch new ones")
        return workers

    @property
    def layout(self) -> Layout:
        """How the whole tensor lies on the mesh.

        Raises
        ------
        InputError
            If it was made of slabs alone.
        """
        return self._held().layout

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole tensor.

        Raises
        ------
        InputError
            If it was made of slabs alone.
        """
        return self._held().shape

    def scatter(self, array: np.ndarray) -> None:
        """Put a whole array's elements where the layout says; of a sum, as its first term, the others zero.

        Raises
        ------
        InputError
            If the tensor was made of slabs alone, or the array has another shape.
        """
        holding = self._held()
        if array.shape != holding.shape:
            raise InputError(f"scatter: the tensor is of shape {holding.shape}, not {array.shape}")
        for device in range(self._devices):
            scatter(array, holding, device, self.slab(device))

    def gather(self) -> np.ndarray:
        """Return the whole array: each element from a device that holds it, of a sum the terms added up.

        Raises
        ------
        InputError
            If the tensor was made of slabs alone.
        """
        return gather(self._held(), self.slab, self._numpy_type)

    def _held(self) -> Holding:
        if self.holding is None:
            raise InputError(f"{self!r} is made of slabs; give mesh_tensor the whole shape and a layout")
        return self.holding

    def encode(self, view: str) -> list[Any]:
        """Say in JSON where the tensor lies and how a worker shall see it."""
        return [view, self._live_offset(), self._stride, list(self.shape), self.dtype]

    def text(self, view: str) -> str:
        """Say the same as text, which is made once."""
        self._live_offset()
        found = self._texts.get(view)
        if found is None:
            found = self._texts[view] = json.dumps(self.encode(view))
        return found

    def release(self) -> None:
        """Give the memory back; the tensor can't be used afterwards."""
        offset = self._live_offset()
        if self._mirror is not None:
            if self.shape != self._reserved:
                self._mirror.forget(self)
                self.shape = self._reserved
            self._mirror.release(self)
        self._offset = None
        self._arena.free(offset)

    def _live_offset(self) -> int:
        if self._offset is None or self._arena.closed:
            raise WorkerError(f"the mesh tensor of shape {self.shape} was freed, or its workers are closed")
        return self._offset

    def __repr__(self) -> str:
        return f"MeshTensor(shape={self.shape}, dtype={self.dtype!r}, shared={self.shared})"


@dataclass(frozen=True)
class View:
    """What a worker sees of a mesh tensor: a strided array, at a place in the memory that slabs are in.

    Attributes
    ----------
    offset : int
        Where its first element is, in bytes.
    shape : tuple of int
        Its shape.
    strides : tuple of int
        The bytes from an element to the next one along each dimension.
    dtype : numpy.dtype
        The type of an element.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    def array(self, arena: Arena) -> np.ndarray:
        """Return the view as an array over an arena's memory."""
        return np.ndarray(self.shape, self.dtype, buffer=arena.map, offset=self.offset, strides=self.strides)


def decode_view(encoded: Sequence[Any], mesh: Mesh, coords: Mapping[str, int], apart: Collection[str] = ()) -> View:
    """Return what the worker at `coords` sees of an encoded tensor: its own slab, its group's along an axis, or all.

    Along the axes in `apart` the peers' slabs are in other machines' memory: the view has the own slab at each index.
    """
    view, offset, stride, shape, dtype = encoded
    numpy_type = np.dtype(dtype)
    device = mesh.device(coords)
    inner = tuple(numpy_type.itemsize * step for step in dense_strides(shape))
    if view == SLAB:
        return View(offset + device * stride, tuple(shape), inner, numpy_type)
    count, distance = peers_of(mesh, view)
    first = 0 if view == ALL else mesh.group(device, view)[0]
    if view in apart or (view == ALL and len(apart)):
        first, distance = device, 0
    return View(offset + first * stride, (count, *shape), (distance * stride, *inner), numpy_type)
