"""The side stream of a GPU: copies by copy engines, waits for counters and flags of peers, beside the GPU's kernels.

What it waits for is memory that a kernel on the other stream counts in, and a flag is written behind the copies before
it; neither takes a processor, so that a kernel which fills all of them may wait for flags. A graph holds waits, copies
and writes as it does kernels; the fork and the join are events.

Branches (`tvm_axe.collective.side`) are streams: the first is the side stream itself, others branch off at a fork and
are back at its end.

Source: CUDA Driver API, "Stream Memory Operations"; "Stream Management", cuStreamWaitEvent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm_ffi

from tvm_axe.collective.cuda.branches import Branches, new_event, new_stream
from tvm_axe.collective.cuda.driver import call, enum, struct
from tvm_axe.collective.side import COUNTERS, FLAGS, Branching, rectangle
from tvm_axe.collective.tensor import check_dtype


class SideStream:
    """A second stream of a GPU, with a branch for each peer but the nearest.

    Parameters
    ----------
    stream : CUstream
        The stream of its kernels.

    Attributes
    ----------
    stream : CUstream
        This one.
    """

    def __init__(self, stream: Any) -> None:
        self._main = stream
        self.stream = new_stream()
        self._forked = new_event()
        self._branches = Branches(self.stream)
        self._branching = Branching()
        self._free: list[Any] = []  # events
        # The event behind what it was told from each fork on, until that is joined; None while it isn't recorded.
        self._ends: list[Any | None] = []

    @property
    def forked(self) -> bool:
        """Whether it was forked, and not joined yet."""
        return bool(self._ends)

    def step(self, name: str, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        """Tell the stream a step (`tvm_axe.collective.side`)."""
        _STEPS[name](self, tensors, numbers, rank)

    def _of(self, name: str, numbers: Sequence[int]) -> Any:
        """The stream of a step, behind the last fork."""
        branch = self._branching.branch(name, numbers)
        return self._branches.at(branch - 1) if branch else self.stream

    def _fork(self, *_: object) -> None:
        self._end(len(self._ends) - 1)
        call("cuEventRecord", self._forked, self._main)
        call("cuStreamWaitEvent", self.stream, self._forked, 0)
        self._branches.begin(self._forked)
        self._ends.append(None)

    def _join(self, _: object, numbers: Sequence[int], *__: object) -> None:
        (left,) = numbers
        count = len(self._ends) - left
        if count > 0:
            call("cuStreamWaitEvent", self._main, self._end(count - 1), 0)
            self._free += [self._end(at) for at in range(count)]
            del self._ends[:count]

    def _end(self, at: int) -> Any:
        """The event behind what the stream was told from a fork on; of the last fork, until now."""
        if at < 0:
            return None
        if self._ends[at] is None:
            self._branches.join()
            self._ends[at] = self._free.pop() if self._free else new_event()
            call("cuEventRecord", self._ends[at], self.stream)
        return self._ends[at]

    def settle(self) -> None:
        """Take it for joined, after a failure."""
        self._free += [event for event in self._ends if event is not None]
        self._ends.clear()
        self._branches.settle()

    def _wait_count(self, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        (words,), (shift, group, least) = tensors, numbers
        devices = int(words.shape[1])
        place = _place(words, (COUNTERS, (rank + shift) % devices, group))
        at_least = int(enum("CUstreamWaitValue_flags", "CU_STREAM_WAIT_VALUE_GEQ"))
        call("cuStreamWaitValue32", self._of("wait_count", numbers), place, least, at_least)

    def _flag(self, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        (words,), (shift, group) = tensors, numbers
        peer = (rank + shift) % int(words.shape[0])
        # Without a flag of its own the write is behind all that the stream has written (cuStreamWriteValue32).
        call("cuStreamWriteValue32", self._of("flag", numbers), _place(words, (peer, FLAGS, rank, group)), 1, 0)

    def _copy(self, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        source, target = tensors
        stream = self._of("copy", numbers)
        slabs = tuple(source.shape), tuple(target.shape)[1:]
        moved = rectangle(*slabs, int(target.shape[0]), rank, *numbers)
        itemsize = check_dtype(str(source.dtype)).itemsize
        pitch, width = slabs[0][-1] * itemsize, (moved.stop - moved.first) * itemsize
        begin = moved.first * itemsize
        to = _place(target, (moved.peer, *(0 for _ in slabs[1]))) + moved.target * pitch + begin
        taken = source.data_ptr() + moved.source * pitch + begin
        if width == pitch:
            call("cuMemcpyDtoDAsync", to, taken, pitch * moved.rows, stream)
            return
        shape = struct("CUDA_MEMCPY2D")
        shape.srcMemoryType = shape.dstMemoryType = enum("CUmemorytype", "CU_MEMORYTYPE_UNIFIED")
        shape.srcDevice, shape.dstDevice = taken, to
        shape.srcPitch = shape.dstPitch = pitch
        shape.WidthInBytes, shape.Height = width, moved.rows
        call("cuMemcpy2DAsync", shape, stream)

    def close(self) -> None:
        """Give back what it has."""
        self.settle()
        self._branches.close()
        for event in (self._forked, *self._free):
            call("cuEventDestroy", event)
        call("cuStreamDestroy", self.stream)


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
