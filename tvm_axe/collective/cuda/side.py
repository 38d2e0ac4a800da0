"""The side stream of a GPU: copies by copy engines, waits for counters and flags of peers, beside the GPU's kernels.

What it waits for is memory that a kernel on the other stream counts in, and a flag is written behind the copies before
it; neither takes a processor, so that a kernel which fills all of them may wait for flags. A graph holds waits, copies
and writes as it does kernels; the fork and the join are events.

Source: CUDA Driver API, "Stream Memory Operations"; "Stream Management", cuStreamWaitEvent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm_ffi

from tvm_axe.collective.cuda.driver import call, enum, struct
from tvm_axe.collective.side import COUNTERS, FLAGS, rectangle
from tvm_axe.collective.tensor import check_dtype


class SideStream:
    """A second stream of a GPU.

    Parameters
    ----------
    stream : CUstream
        The stream of its kernels.

    Attributes
    ----------
    forked : bool
        Whether it was forked, and not joined yet.
    """

    def __init__(self, stream: Any) -> None:
        self._main = stream
        self._own = call("cuStreamCreate", int(enum("CUstream_flags", "CU_STREAM_NON_BLOCKING")))
        timing = int(enum("CUevent_flags", "CU_EVENT_DISABLE_TIMING"))
        self._events = [call("cuEventCreate", timing) for _ in range(2)]
        self.forked = False

    def step(self, name: str, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        """Tell the stream a step (`tvm_axe.collective.side`)."""
        _STEPS[name](self, tensors, numbers, rank)

    def _fork(self, *_: object) -> None:
        self._behind(self._events[0], self._main, self._own)
        self.forked = True

    def _join(self, *_: object) -> None:
        self._behind(self._events[1], self._own, self._main)
        self.forked = False

    @staticmethod
    def _behind(event: Any, first: Any, second: Any) -> None:
        """Have what the second stream is told next wait for what the first was told."""
        call("cuEventRecord", event, first)
        call("cuStreamWaitEvent", second, event, 0)

    def _wait_count(self, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        (words,), (shift, group, least) = tensors, numbers
        devices = int(words.shape[1])
        place = _place(words, (COUNTERS, (rank + shift) % devices, group))
        at_least = int(enum("CUstreamWaitValue_flags", "CU_STREAM_WAIT_VALUE_GEQ"))
        call("cuStreamWaitValue32", self._own, place, least, at_least)

    def _flag(self, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        (words,), (shift, group) = tensors, numbers
        peer = (rank + shift) % int(words.shape[0])
        # Without a flag of its own the write is behind all that the stream has written (cuStreamWriteValue32).
        call("cuStreamWriteValue32", self._own, _place(words, (peer, FLAGS, rank, group)), 1, 0)

    def _copy(self, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        source, target = tensors
        slabs = tuple(source.shape), tuple(target.shape)[1:]
        moved = rectangle(*slabs, int(target.shape[0]), rank, *numbers)
        itemsize = check_dtype(str(source.dtype)).itemsize
        pitch, width = slabs[0][-1] * itemsize, (moved.stop - moved.first) * itemsize
        begin = moved.first * itemsize
        to = _place(target, (moved.peer, *(0 for _ in slabs[1]))) + moved.target * pitch + begin
        taken = source.data_ptr() + moved.source * pitch + begin
        if width == pitch:
            call("cuMemcpyDtoDAsync", to, taken, pitch * moved.rows, self._own)
            return
        shape = struct("CUDA_MEMCPY2D")
        shape.srcMemoryType = shape.dstMemoryType = enum("CUmemorytype", "CU_MEMORYTYPE_UNIFIED")
        shape.srcDevice, shape.dstDevice = taken, to
        shape.srcPitch = shape.dstPitch = pitch
        shape.WidthInBytes, shape.Height = width, moved.rows
        call("cuMemcpy2DAsync", shape, self._own)

    def close(self) -> None:
        """Give back what it has."""
        for event in self._events:
            call("cuEventDestroy", event)
        call("cuStreamDestroy", self._own)


_STEPS: Mapping[str, Callable[..., None]] = {
    "fork": SideStream._fork,
    "wait_count": SideStream._wait_count,
    "copy": SideStream._copy,
    "flag": SideStream._flag,
    "join": SideStream._join,
}


def _place(tensor: tvm_ffi.Tensor, index: Sequence[int]) -> int:
    """The address of an element."""
    elements = sum(at * int(step) for at, step in zip(index, tensor.strides))
    return int(tensor.data_ptr()) + elements * check_dtype(str(tensor.dtype)).itemsize
