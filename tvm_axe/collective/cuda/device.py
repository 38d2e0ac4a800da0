"""A GPU as one worker uses it: its stream, the slabs in its range of addresses, and its part of the collectives.

Source: CUDA Driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tvm
import tvm_ffi

from tvm_axe import _tvm
from tvm_axe.collective.algorithms import phases
from tvm_axe.collective.arena import round_up
from tvm_axe.collective.choice import Table
from tvm_axe.collective.cuda.copying import StreamCopies
from tvm_axe.collective.cuda.driver import call, done, enum, ready, struct
from tvm_axe.collective.cuda.graphs import Graphs
from tvm_axe.collective.cuda.linked import Linked
from tvm_axe.collective.cuda.meeting import Meeting
from tvm_axe.collective.cuda.moving import Mover
from tvm_axe.collective.cuda.side import SideStream
from tvm_axe.collective.device import Device
from tvm_axe.collective.merging import Held
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.tensor import View
from tvm_axe.errors import WorkerError

_DESCRIPTOR = ("CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")

_HOLD = 300_000  # nanoseconds, in which the host tells a GPU to meet, and what it does behind that

_here: Counter[int] = Counter()  # the workers of this process, by GPU
_counting = threading.Lock()


class _Slab(NamedTuple):
    """Memory in the range: how long it is, and the descriptor that was made of it, if it is this worker's own."""

    nbytes: int
    descriptor: int | None


class CudaDevice(Device):
    """A GPU.

    Parameters
    ----------
    told : mapping
        ``gpu`` is its number, ``page`` the bytes that its memory comes in, ``room`` how many blocks may wait at once
        on each of the GPUs, ``collectives`` the table of algorithms (`choice.Table.encode`).
    size : int
        Bytes of the range of addresses.
    """

    def __init__(self, told: Mapping[str, Any], size: int) -> None:
        self._gpu: int = told["gpu"]
        self._page: int = told["page"]
        self._room: int = told["room"]
        self._table = Table.decode(told["collectives"])
        self._size = size
        self._slabs: dict[int, _Slab] = {}
        self._meeting: Meeting | None = None
        self._linked: Linked | None = None
        self.runtime = tvm.cuda(self._gpu)

    def start(self, threads: int, cores: Sequence[int]) -> None:
        self._device = call("cuDeviceGet", self._gpu)
        self._context = call("cuDevicePrimaryCtxRetain", self._device)
        call("cuCtxSetCurrent", self._context)
        self._stream = call("cuStreamCreate", int(enum("CUstream_flags", "CU_STREAM_NON_BLOCKING")))
        self.runtime.set_raw_stream(int(self._stream))
        self._base = int(call("cuMemAddressReserve", self._size, 0, 0, 0))
        self._mover = Mover(self._arch(), self._stream, self._room)
        self._graphs = Graphs(self._stream)
        self._side = SideStream(self._stream)
        self._mover_beside = self._mover.on(self._side.stream)
        self._events = [call("cuEventCreate", 0) for _ in range(2)]
        with _counting:
            _here[self._gpu] += 1

    def _arch(self) -> str:
        named = [f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}" for part in ("MAJOR", "MINOR")]
        major, minor = (call("cuDeviceGetAttribute", enum("CUdevice_attribute", name), self._device) for name in named)
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def tensor(self, view: View) -> tvm_ffi.Tensor:
        return _tvm.device_tensor(self._base + view.offset, view.shape, view.strides, view.dtype, self.runtime)

    def collective(
        self, name: str, source: tvm_ffi.Tensor, target: tvm_ffi.Tensor, numbers: Sequence[int], rank: int
    ) -> None:
        self._move(self._mover, name, source, target, numbers, rank)

    def beside(
        self, name: str, source: tvm_ffi.Tensor, target: tvm_ffi.Tensor, numbers: Sequence[int], rank: int
    ) -> None:
        self._move(self._mover_beside, name, source, target, numbers, rank)

    def between(
        self,
        name: str,
        source: tvm_ffi.Tensor,
        target: tvm_ffi.Tensor,
        numbers: Sequence[int],
        rank: int,
        holds: Held,
    ) -> None:
        self._move(self._mover, name, source, target, numbers, rank, holds)

    def _move(
        self,
        mover: Mover,
        name: str,
        source: tvm_ffi.Tensor,
        target: tvm_ffi.Tensor,
        numbers: Sequence[int],
        rank: int,
        holds: Held = Held(),  # noqa: B008, it is a tuple
    ) -> None:
        one, other = (mover.side(tensor, is_view) for tensor, is_view in zip((source, target), VIEWS[name]))
        parts = len(one.slabs if VIEWS[name][0] else other.slabs)
        algorithm = self._table.chosen(name, max(one.nbytes, other.nbytes), in_place=one.slabs == other.slabs)
        shapes = one.shape, other.shape
        told = phases(name, algorithm, *shapes, [int(number) for number in numbers], parts, rank)
        mover.run(told, one, other, self._meeting, holds)

    def step(self, name: str, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        if name == "fork" and numbers[0]:
            self._check_room(numbers[0])
        self._side.step(name, tensors, numbers, rank)

    def _check_room(self, blocks: int) -> None:
        """Check that so many blocks run at once, and that no peer's kernel must start in this context while they wait.

        Processes take turns on a GPU. Within one, what is loaded for a kernel's first launch waits for kernels that
        run, and these would wait for it.
        """
        attribute = enum("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")
        processors, sharing = int(call("cuDeviceGetAttribute", attribute, self._device)), _here[self._gpu]
        if sharing > 1:
            raise WorkerError(
                f"axe.fork: {sharing} workers of this process share GPU {self._gpu}, and the kernel beside copies "
                "waits for what kernels of the peers make, which may not start beside it; give each a GPU, or launch "
                "processes, which take turns, or leave its stages out of overlap"
            )
        if blocks > processors:
            raise WorkerError(
                f"axe.fork: GPU {self._gpu} has {processors} multiprocessors, and the kernel beside copies has "
                f"{blocks} blocks, which wait for what blocks on the peers make and so must all be running; leave its "
                "stages out of overlap"
            )

    def connect(
        self,
        unique: bytes,
        size: int,
        rank: int,
        groups: Mapping[str, tuple[int, int, int]],
        seconds: float,
        is_off: Callable[[], bool],
    ) -> None:
        of = self._context, self._stream, self._mover
        self._linked = Linked(*of, size, rank, seconds, is_off, self._graphs.clear)
        self._linked.connect(unique, groups)

    def passes(self, axis: str) -> bool:
        return self._linked is not None and axis in self._linked.axes

    def passed(
        self,
        name: str,
        source: tvm_ffi.Tensor,
        target: tvm_ffi.Tensor,
        numbers: Sequence[int],
        rank: int,
        axis: str,
    ) -> None:
        assert self._linked is not None  # it passes
        one, other = (Mover.side(tensor, is_view) for tensor, is_view in zip((source, target), VIEWS[name]))
        self._linked.collective(axis, name, one, other, [int(number) for number in numbers])

    def finish(self) -> None:
        if self._linked is not None:
            self._linked.finish()
        call("cuStreamSynchronize", self._stream)

    def follow(self) -> None:
        if not self._side.forked:
            self.finish()

    def meet(self, view: View, peers: Sequence[int], rank: int, seconds: float) -> None:
        place, at = self._base + view.offset, peers.index(rank)
        self._meeting = Meeting(self._arch(), self._stream, place, view.strides[0], at, len(peers), seconds)
        self._peers, self.meets = peers, True

    def arrive(self) -> None:
        assert self._meeting is not None  # it meets
        self._meeting.meet(True, None)

    def wait(self, behind: int) -> None:
        assert self._meeting is not None  # it meets
        self._meeting.meet(False, behind)

    def missing(self) -> list[int]:
        found = [] if self._meeting is None else [self._peers[each] for each in self._meeting.missing()]
        return found if found or self._linked is None else self._linked.missing()

    def call_off(self) -> None:
        if self._linked is not None and not done("cuStreamQuery", self._stream):
            self._linked.call_off()  # peers that wait in one look for themselves
        if self._meeting is not None:
            self._meeting.call_off()

    def settle(self) -> None:
        self._side.settle()
        if self._meeting is not None:
            self._meeting.settle()

    def repeat(self, key: Hashable, tell: Callable[[], object]) -> None:
        if self.meets and key is not None:  # else it may be the host that waits
            self._graphs.run(key, tell)
        else:
            tell()

    def forget(self) -> None:
        self._graphs.clear()

    def hold(self) -> None:
        if self._meeting is not None:
            self._meeting.hold(_HOLD)

    def timed(self, key: Hashable, tell: Callable[[], object]) -> float:
        start, stop = self._events
        call("cuEventRecord", start, self._stream)
        self.repeat(key, tell)
        call("cuEventRecord", stop, self._stream)
        self.finish()
        return float(call("cuEventElapsedTime", start, stop)) * 1e-3

    def copies(self, memory: np.ndarray) -> StreamCopies:
        return StreamCopies(self._stream, memory)

    def usable(self) -> bool:
        return ready("cuStreamQuery", self._stream) and (self._linked is None or self._linked.usable)

    def reserve(self, offset: int, nbytes: int) -> None:
        length = self._whole(nbytes)
        wanted = struct("CUmemAllocationProp")
        wanted.type = enum("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_PINNED")
        wanted.location.type = enum("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE")
        wanted.location.id = self._gpu
        wanted.requestedHandleTypes = enum(*_DESCRIPTOR)
        try:
            handle = call("cuMemCreate", length, wanted, 0)
        except WorkerError as error:
            free, total = (int(number) for number in call("cuMemGetInfo"))
            raise WorkerError(
                f"no memory for a slab of {length >> 20} MiB on GPU {self._gpu}, which has {free >> 20} MiB left of "
                f"{total >> 20}: {error}"
            ) from None
        try:
            descriptor = int(call("cuMemExportToShareableHandle", handle, enum(*_DESCRIPTOR), 0))
            self._map(offset, length, handle, descriptor)
        finally:
            call("cuMemRelease", handle)  # a mapping keeps it
        call("cuMemsetD8Async", self._base + offset, 0, length, self._stream)
        self.finish()

    def lent(self, offset: int) -> int:
        descriptor = self._slabs[offset].descriptor
        assert descriptor is not None  # it is its own
        return descriptor

    def share(self, offset: int, nbytes: int, descriptor: int) -> None:
        handle = call("cuMemImportFromShareableHandle", descriptor, enum(*_DESCRIPTOR))
        try:
            self._map(offset, self._whole(nbytes), handle, None)
        finally:
            call("cuMemRelease", handle)

    def _map(self, offset: int, length: int, handle: Any, descriptor: int | None) -> None:
        call("cuMemMap", self._base + offset, length, 0, handle, 0)
        self._slabs[offset] = _Slab(length, descriptor)
        access = struct("CUmemAccessDesc")
        access.location.type = enum("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE")
        access.location.id = self._gpu
        access.flags = enum("CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
        call("cuMemSetAccess", self._base + offset, length, [access], 1)

    def release(self, offset: int, nbytes: int) -> None:
        self.forget()
        slab = self._slabs.pop(offset, None)
        if slab is not None:
            if slab.descriptor is not None:
                os.close(slab.descriptor)
            call("cuMemUnmap", self._base + offset, slab.nbytes)

    def move(self, offset: int, array: np.ndarray, home: bool) -> None:
        place, host = self._base + offset, array.ctypes.data
        if home:
            call("cuMemcpyDtoHAsync", host, place, array.nbytes, self._stream)
        else:
            call("cuMemcpyHtoDAsync", place, host, array.nbytes, self._stream)
        self.finish()

    def close(self) -> None:
        with _counting:
            _here[self._gpu] -= 1
        if self._linked is not None:
            self._linked.close()
        if not self.usable():
            return
        self.finish()
        if self._meeting is not None:
            self._meeting.close()
        for offset in list(self._slabs):
            self.release(offset, 0)
        self._mover.close()
        self._side.close()
        for event in self._events:
            call("cuEventDestroy", event)
        call("cuMemAddressFree", self._base, self._size)
        self.runtime.set_raw_stream(0)
        call("cuStreamDestroy", self._stream)
        call("cuDevicePrimaryCtxRelease", self._device)

    def _whole(self, nbytes: int) -> int:
        return round_up(nbytes, self._page)
