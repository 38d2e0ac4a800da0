"""What a worker computes on: where its slabs are, and who does what it is told to do with them.

A worker of the engines of one machine, and a rank of an MPI job, computes on its cores, in memory that all of them see
(`Cores`). The devices of a `discrete.DiscreteSession` have memory of their own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import tvm
import tvm_ffi

from tvm_axe import _tvm
from tvm_axe.collective import ops, side
from tvm_axe.collective.arena import Arena
from tvm_axe.collective.merging import Held
from tvm_axe.collective.staging import Copies, HostCopies
from tvm_axe.collective.tensor import View


class Device(ABC):
    """What one worker computes on; used by one thread at a time.

    Attributes
    ----------
    runtime : tvm.runtime.Device
        What the virtual machine runs programs on.
    meets : bool
        Whether it meets its peers by itself, `arrive` and `wait`, without its worker. Devices that see each other's
        memory do, where a communicator is all that is between them and others.
    in_arena : bool
        Whether its slabs are in the arena, and not in memory of its own.
    """

    runtime: tvm.runtime.Device
    meets = False
    in_arena = False

    @abstractmethod
    def start(self, threads: int, cores: Sequence[int]) -> None:
        """Begin to be used by the calling thread, whose kernels may have so many threads on the host's `cores`."""

    @abstractmethod
    def tensor(self, view: View) -> tvm_ffi.Tensor:
        """Return what a program sees of a mesh tensor."""

    @abstractmethod
    def collective(
        self, name: str, source: tvm_ffi.Tensor, target: tvm_ffi.Tensor, numbers: Sequence[int], rank: int
    ) -> None:
        """Do a worker's part of a collective on the views that it sees (`tvm_axe.collective.plan`)."""

    def between(
        self,
        name: str,
        source: tvm_ffi.Tensor,
        target: tvm_ffi.Tensor,
        numbers: Sequence[int],
        rank: int,
        holds: Held,
    ) -> None:
        """Do the same, behind a barrier and before one, if the device `meets`."""
        if holds.behind:
            self.arrive()
            self.wait(0)
        self.collective(name, source, target, numbers, rank)
        if holds.before:
            self.arrive()
            self.wait(0)

    def beside(
        self, name: str, source: tvm_ffi.Tensor, target: tvm_ffi.Tensor, numbers: Sequence[int], rank: int
    ) -> None:
        """Do the same on the side stream, if there is one, or now."""
        self.collective(name, source, target, numbers, rank)

    def connect(
        self,
        unique: bytes,
        size: int,
        rank: int,
        groups: Mapping[str, tuple[int, int, int]],
        seconds: float,
        is_off: Callable[[], bool],
    ) -> None:
        """Have a communicator with the devices of a group along each of some axes from now on; waits for all devices.

        Parameters
        ----------
        unique : bytes
            What all `size` devices are told, of which this is the one of that `rank`.
        groups : mapping
            By axis, a number that the devices of a group have in common, how many they are, and its coordinate.
        seconds : float
            The longest that it waits for its peers, now and later.
        is_off : callable
            Whether it is to stop waiting for them.
        """
        raise NotImplementedError

    def passes(self, axis: str) -> bool:
        """Whether it has a communicator along a mesh axis, by which it does all collectives there."""
        return False

    def passed(
        self,
        name: str,
        source: tvm_ffi.Tensor,
        target: tvm_ffi.Tensor,
        numbers: Sequence[int],
        rank: int,
        axis: str,
    ) -> None:
        """Do a collective along such an axis, on views or slabs of which only the own slab is touched."""
        raise NotImplementedError

    @abstractmethod
    def step(self, name: str, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        """Do a step of the side stream on the views that it sees (`tvm_axe.collective.side`)."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all that the device was told is done, and seen by its peers."""

    def follow(self) -> None:
        """Return when all that the device was told is done, unless some of it may wait for what it is told next."""
        self.finish()

    def repeat(self, key: Hashable, tell: Callable[[], object]) -> None:
        """Tell the device what `tell` does, which is always the same for one key, until `forget` is called."""
        tell()

    def forget(self) -> None:  # noqa: B027
        """Take nothing that was told before for what a key stands for now."""

    def hold(self) -> None:  # noqa: B027
        """Have the device begin what it is told next a little later, so that by then it is told what is behind that."""

    def timed(self, key: Hashable, tell: Callable[[], object]) -> float:
        """Do the same, and return the seconds that it took, by the device's clock."""
        start = time.perf_counter()
        self.repeat(key, tell)
        self.finish()
        return time.perf_counter() - start

    def arrive(self) -> None:
        """Have peers see that what the device was told until now is done, if it `meets`."""
        raise NotImplementedError

    def wait(self, behind: int) -> None:
        """Have the device wait until its peers have arrived as often as it less `behind` times, if it `meets`."""
        raise NotImplementedError

    def missing(self) -> list[int]:
        """Return the peers that the device has stopped waiting for, once it has finished."""
        return []

    def meet(self, view: View, peers: Sequence[int], rank: int, seconds: float) -> None:
        """Meet peers by itself from now on, as device `rank`, waiting no longer than so many seconds.

        Parameters
        ----------
        view : View
            Their slabs of a tensor that is for this alone.
        peers : sequence of int
            The devices that meet: those that see each other's memory, itself among them.
        rank, seconds
            As above.
        """
        raise NotImplementedError

    def call_off(self) -> None:  # noqa: B027
        """Have the peers leave their meetings with it."""

    def settle(self) -> None:  # noqa: B027
        """Forget the meetings of a command that failed; no peer may be in one."""

    @abstractmethod
    def reserve(self, offset: int, nbytes: int) -> None:
        """Get memory of zeros for a slab of its own."""

    @abstractmethod
    def release(self, offset: int, nbytes: int) -> None:
        """Give the memory of a slab back, or let go of a peer's."""

    def lent(self, offset: int) -> int:
        """Return a descriptor of the memory of a slab of its own, for peers; the same each time, and not to be closed.

        Raises
        ------
        NotImplementedError
            If the slab is in the host's memory.
        """
        raise NotImplementedError

    def share(self, offset: int, nbytes: int, descriptor: int) -> None:
        """See a peer's slab, of whose memory this is a descriptor.

        Raises
        ------
        NotImplementedError
            If the slab is in the host's memory.
        """
        raise NotImplementedError

    @abstractmethod
    def copies(self, memory: np.ndarray) -> Copies:
        """Return what copies between its slabs and memory of the host's, which stays where it is until it is closed."""

    def usable(self) -> bool:
        """Whether it can still be used, after an error."""
        return True

    def move(self, offset: int, array: np.ndarray, home: bool) -> None:
        """Copy a slab to what the host has of it, if it goes `home`, or from there; never of the host's own memory.

        Raises
        ------
        NotImplementedError
            If the slab is in the host's memory.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Give everything back; of the host's there is nothing to give."""


class Cores(Device):
    """The host's cores, and slabs in the memory that workers of this machine share.

    Parameters
    ----------
    arena : Arena
        The memory.
    """

    in_arena = True

    def __init__(self, arena: Arena) -> None:
        self.runtime = tvm.cpu()
        self._arena = arena

    def start(self, threads: int, cores: Sequence[int]) -> None:
        _tvm.use_threads(threads, cores)

    def tensor(self, view: View) -> tvm_ffi.Tensor:
        return _tvm.as_tensor(view.array(self._arena))

    def collective(
        self, name: str, source: tvm_ffi.Tensor, target: tvm_ffi.Tensor, numbers: Sequence[int], rank: int
    ) -> None:
        ops.collective(name, _tvm.as_array(source), _tvm.as_array(target), *numbers, rank=rank)

    def step(self, name: str, tensors: Sequence[tvm_ffi.Tensor], numbers: Sequence[int], rank: int) -> None:
        side.step(name, [_tvm.as_array(tensor) for tensor in tensors], numbers, rank)

    def copies(self, memory: np.ndarray) -> Copies:
        return HostCopies()

    def finish(self) -> None:
        """Nothing is left to wait for."""

    def reserve(self, offset: int, nbytes: int) -> None:
        self._arena.take(offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        self._arena.drop(offset, nbytes)
