"""A GPU's communicators: that of each mesh axis, and what becomes of a stream that waits in them for a peer.

NCCL says nothing of who is missing, and its kernels wait for ever. So who waits for the stream looks whether the
command was called off, and how long it takes: a communicator that is given up ends its kernels, and can't be used any
more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm_axe.collective.cuda import nccl
from tvm_axe.collective.cuda.driver import call, done
from tvm_axe.collective.cuda.moving import Mover, Side
from tvm_axe.collective.cuda.passing import Passing, Scratch
from tvm_axe.collective.messages import Deadline, Nap
from tvm_axe.errors import WorkerError

_LONGEST = 5e-5  # seconds of a nap between looks at the stream


class Linked:
    """The communicators of a GPU, on its stream.

    Parameters
    ----------
    context, stream : CUcontext, CUstream
        Those of the device.
    mover : Mover
        What moves within its memory.
    size, rank : int
        How many devices there are, and which this is.
    seconds : float
        The longest that the stream may take to do what it was told, as most of it may be a wait.
    is_off : callable
        Whether the command that it is told of was called off.
    forget : callable
        What drops the graphs that the stream's runs were captured in: to give a communicator up is to wait, in NCCL,
        until none holds what it was told.

    Attributes
    ----------
    axes : set of str
        The mesh axes that have one.
    usable : bool
        Whether they weren't given up.
    """

    def __init__(
        self,
        context: Any,
        stream: Any,
        mover: Mover,
        size: int,
        rank: int,
        seconds: float,
        is_off: Callable[[], bool],
        forget: Callable[[], object],
    ) -> None:
        self._context, self._stream, self._mover = context, stream, mover
        self._size, self._rank, self._seconds, self._is_off, self._forget = size, rank, seconds, is_off, forget
        self._memory: list[Any] = []
        self._scratch = Scratch(self._get)
        self._world: nccl.Nccl | None = None
        self._parts: dict[str, nccl.Nccl] = {}
        self._passing: dict[str, Passing] = {}
        self._missing: list[int] = []
        self.usable = True

    @property
    def axes(self) -> set[str]:
        """The mesh axes that have one."""
        return set(self._passing)

    def _get(self, nbytes: int) -> int:
        self._memory.append(call("cuMemAlloc", nbytes))
        return int(self._memory[-1])

    def connect(self, unique: bytes, groups: Mapping[str, tuple[int, int, int]]) -> None:
        """Wait for all devices, and have communicators with them; see `nccl.connected`."""
        self._world, self._parts = nccl.connected(
            unique,
            self._size,
            self._rank,
            groups,
            int(self._stream),
            self._scratch.take(16 * max(2, self._size)),
            lambda: call("cuCtxSetCurrent", self._context),
            lambda: call("cuStreamSynchronize", self._stream),
            self._seconds,
            self._is_off,
        )
        for axis, (_, count, at) in groups.items():
            self._passing[axis] = Passing(self._parts[axis], self._mover, self._scratch, count, at)

    def collective(self, axis: str, name: str, source: Side, target: Side, numbers: Sequence[int]) -> None:
        """Tell the stream a collective.

        Raises
        ------
        WorkerError
            If the communicators were given up.
        """
        if not self.usable:
            raise WorkerError("NCCL's communicators were given up with a command that failed; launch new workers")
        self._passing[axis].collective(name, source, target, numbers)

    def finish(self) -> None:
        """Wait for the stream; give up if the command is called off, or after the time limit."""
        deadline, nap = Deadline(self._seconds), Nap(_LONGEST)
        while self.usable and not done("cuStreamQuery", self._stream):
            if self._is_off() or deadline.passed:
                self._missing = [rank for rank in range(self._size) if rank != self._rank]
                self.call_off()
                return
            nap.take()

    def missing(self) -> list[int]:
        """Return whom it has given up waiting for: any of them, as NCCL doesn't say whom."""
        found, self._missing = self._missing, []
        return found

    def call_off(self) -> None:
        """Give the communicators up."""
        if self.usable and self._world is not None:
            self.usable = False
            self._forget()
            for communicator in (*self._parts.values(), self._world):
                communicator.call_off()

    def close(self) -> None:
        """Give back what it has; without waiting for peers, which may be gone."""
        self.call_off()
        for memory in self._memory:
            call("cuMemFree", memory)
        self._memory.clear()
