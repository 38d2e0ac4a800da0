"""Copies between a GPU's slabs and buffers of the host, by its copy engines, beside what its own stream does.

One stream fetches and another stores, since a bus carries both ways at once. The buffers are pinned, or every copy
would wait for one of the driver's own and hold its thread.

Source: CUDA Driver API, "Memory Management", cuMemHostRegister, cuMemcpy2DAsync.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tvm_ffi

from tvm_axe.collective.cuda.driver import call, enum, struct
from tvm_axe.collective.plan import Corner
from tvm_axe.collective.staging import Copies
from tvm_axe.errors import WorkerError
from tvm_axe.layout.shapes import dense_strides

__all__ = ["StreamCopies"]

_LOG = logging.getLogger("tvm_axe")
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for the contexts of all GPUs


class StreamCopies(Copies):
    """Copies of one GPU.

    Parameters
    ----------
    stream : CUstream
        What the device is told goes there.
    memory : numpy.ndarray
        The host's memory, dense.
    """

    def __init__(self, stream: Any, memory: np.ndarray) -> None:
        self._stream = stream
        beside = int(enum("CUstream_flags", "CU_STREAM_NON_BLOCKING"))
        self._out, self._in = (call("cuStreamCreate", beside) for _ in range(2))
        self._told = call("cuEventCreate", int(enum("CUevent_flags", "CU_EVENT_DISABLE_TIMING")))
        self._pinned = memory.ctypes.data
        _pin(self._pinned, memory.nbytes)

    def begin(self) -> None:
        call("cuEventRecord", self._told, self._stream)
        for stream in (self._out, self._in):
            call("cuStreamWaitEvent", stream, self._told, 0)

    def fetch(self, slab: tvm_ffi.Tensor, corner: Corner, box: tuple[int, ...], array: np.ndarray) -> None:
        host, row = array.ctypes.data, 0
        for start, rows, pitch, nbytes in _runs(corner, box, array.itemsize):
            device = slab.data_ptr() + start
            if rows == 1:
                call("cuMemcpyDtoHAsync", host + row * nbytes, device, nbytes, self._out)
            else:
                copy = _plane("src", "DEVICE", device, pitch, "dst", "HOST", host + row * nbytes, nbytes)
                _send(copy, rows, nbytes, self._out)
            row += rows

    def fetched(self) -> None:
        call("cuStreamSynchronize", self._out)

    def store(self, slab: tvm_ffi.Tensor, corner: Corner, box: tuple[int, ...], array: np.ndarray) -> None:
        host, row = array.ctypes.data, 0
        for start, rows, pitch, nbytes in _runs(corner, box, array.itemsize):
            device = slab.data_ptr() + start
            if rows == 1:
                call("cuMemcpyHtoDAsync", device, host + row * nbytes, nbytes, self._in)
            else:
                copy = _plane("dst", "DEVICE", device, pitch, "src", "HOST", host + row * nbytes, nbytes)
                _send(copy, rows, nbytes, self._in)
            row += rows

    def stored(self) -> None:
        call("cuStreamSynchronize", self._in)

    def close(self) -> None:
        self.fetched()
        self.stored()
        _unpin(self._pinned)
        call("cuEventDestroy", self._told)
        for stream in (self._out, self._in):
            call("cuStreamDestroy", stream)


def _plane(
    own: str, kind: str, device: int, pitch: int, other: str, other_kind: str, host: int, other_pitch: int
) -> Any:
    """What a copy of rows is told: of both sides, where they are and how far it is from a row to the next."""
    copy = struct("CUDA_MEMCPY2D")
    for side, memory, place, step in ((own, kind, device, pitch), (other, other_kind, host, other_pitch)):
        setattr(copy, f"{side}MemoryType", enum("CUmemorytype", f"CU_MEMORYTYPE_{memory}"))
        setattr(copy, f"{side}{'Device' if memory == 'DEVICE' else 'Host'}", place)
        setattr(copy, f"{side}Pitch", step)
    return copy


def _send(copy: Any, rows: int, nbytes: int, stream: Any) -> None:
    copy.WidthInBytes, copy.Height = nbytes, rows
    call("cuMemcpy2DAsync", copy, stream)


def _runs(corner: Corner, box: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a box of a slab into rows that lie evenly apart: where the first begins, how many, how far, a row's bytes.

    >>> list(_runs(Corner((0,), (4, 6), (1, 2)), (3, 4), 2))
    [(16, 3, 12, 8)]
    >>> list(_runs(Corner((0,), (4, 6), (1, 0)), (2, 6), 2))
    [(12, 1, 24, 24)]
    >>> list(_runs(Corner((0,), (2, 3, 4), (0, 1, 0)), (2, 2, 2), 1))
    [(4, 2, 4, 2), (16, 2, 4, 2)]
    """
    steps = dense_strides(corner.shape)
    inner = next(dim for dim in range(len(box)) if box[dim + 1 :] == corner.shape[dim + 1 :])
    nbytes = math.prod(box[inner:]) * itemsize  # what is within these dimensions is contiguous
    rows, pitch = (box[inner - 1], steps[inner - 1] * itemsize) if inner else (1, nbytes)
    for outer in itertools.product(*map(range, box[: max(0, inner - 1)])):
        start = corner.start + sum(at * step for at, step in zip(outer, steps))
        yield start * itemsize, rows, pitch, nbytes


_lock = threading.Lock()
_pins: dict[int, int] = {}  # by how many of this process's devices, which may be threads, memory is pinned


def _pin(place: int, nbytes: int) -> None:
    """Keep memory where it is for the GPUs' sake; where that can't be, copies are slower."""
    with _lock:
        if place not in _pins:
            try:
                call("cuMemHostRegister", place, nbytes, _PORTABLE)
            except WorkerError as error:
                _LOG.warning("the buffers of devices that don't see each other's memory aren't pinned: %s", error)
                return
        _pins[place] = _pins.get(place, 0) + 1


def _unpin(place: int) -> None:
    with _lock:
        if place in _pins:
            _pins[place] -= 1
            if not _pins[place]:
                del _pins[place]
                call("cuMemHostUnregister", place)
