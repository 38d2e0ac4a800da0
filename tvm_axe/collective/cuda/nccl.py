"""NCCL, by NVIDIA's bindings nccl4py: its communicators, on a stream.

NVLink multicast stays off (``NCCL_NVLS_ENABLE=0``). To begin is to wait for all the devices, inside C, so a thread does
it, which is left behind if they don't come. All connections are made then, as one that is made later would wait there
too. Later waits are the stream's: a communicator that is called off ends them.

Source: NCCL User Guide, "Collective Operations", "Point-to-point communication", "Using NCCL with CUDA Graphs",
"Fault Tolerance".
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm_axe.collective.cuda.passing import ADDED, Communicator, Parcel
from tvm_axe.collective.sync import Aborted, Late
from tvm_axe.errors import InputError, WorkerError

__all__ = ["Nccl", "connected", "unique", "version"]

_LOOK = 0.05  # seconds between looks whether to go on waiting


@functools.cache
def _bindings() -> Any:
    """The module of NCCL's calls.

    Raises
    ------
    InputError
        If it isn't installed, or NCCL isn't.
    """
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    try:
        from nccl.bindings import nccl

        nccl.get_version()  # loads the library
    except (ImportError, RuntimeError, OSError) as error:
        raise InputError(
            f"collectives by NCCL need nccl4py and NCCL's library, which aren't here ({error}): "
            'pip install tvm-axe[cuda]; or leave them out: collectives="host"'
        ) from None
    return nccl


def version() -> str:
    """Return the version of NCCL.

    Raises
    ------
    InputError
        If it isn't there.
    """
    number = int(_bindings().get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def unique() -> bytes:
    """Return what all devices of a communicator are told; this process must stay until they have it."""
    return bytes(memoryview(_call("get_unique_id")))


def _call(name: str, *arguments: Any) -> Any:
    nccl = _bindings()
    try:
        return getattr(nccl, name)(*arguments)
    except nccl.NCCLError as error:
        raise WorkerError(f"nccl {name}: {error}") from None


class Nccl(Communicator):
    """A communicator.

    Parameters
    ----------
    comm : Comm
        NCCL's own.
    stream : int
        The stream that is told what it does.
    """

    def __init__(self, comm: Any, stream: int) -> None:
        nccl = _bindings()
        self._comm, self._stream = comm, stream
        self._sum, self._byte = int(nccl.RedOp.Sum), int(nccl.DataType.Uint8)
        self._types = {name: int(getattr(nccl.DataType, name.capitalize())) for name in ADDED}

    def all_reduce(self, source: int, target: int, count: int, dtype: str) -> None:
        _call("all_reduce", source, target, count, self._types[dtype], self._sum, self._comm, self._stream)

    def reduce(self, source: int, target: int, count: int, dtype: str, root: int) -> None:
        _call("reduce", source, target, count, self._types[dtype], self._sum, root, self._comm, self._stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: str) -> None:
        _call("reduce_scatter", source, target, count, self._types[dtype], self._sum, self._comm, self._stream)

    def all_gather(self, source: int, target: int, nbytes: int) -> None:
        _call("all_gather", source, target, nbytes, self._byte, self._comm, self._stream)

    def broadcast(self, source: int, target: int, nbytes: int, root: int) -> None:
        _call("broadcast", source, target, nbytes, self._byte, root, self._comm, self._stream)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        _call("group_start")
        try:
            for peer, address, nbytes in sends:
                _call("send", address, nbytes, self._byte, peer, self._comm, self._stream)
            for peer, address, nbytes in receives:
                _call("recv", address, nbytes, self._byte, peer, self._comm, self._stream)
        finally:
            _call("group_end")

    def split(self, color: int, key: int) -> Nccl:
        """Return that of the devices that say the same color, in the order of their keys; all devices call this."""
        return Nccl(_call("comm_split", self._comm, color, key, 0), self._stream)

    def call_off(self) -> None:
        """End what it is doing, and itself."""
        _call("comm_abort", self._comm)


def connected(
    told: bytes,
    size: int,
    rank: int,
    groups: Mapping[str, tuple[int, int, int]],
    stream: int,
    scratch: int,
    prepare: Callable[[], object],
    finish: Callable[[], object],
    seconds: float,
    is_off: Callable[[], bool],
) -> tuple[Nccl, dict[str, Nccl]]:
    """Return a communicator of all devices, and by axis that of the device's group, with all connections made.

    Parameters
    ----------
    told : bytes
        What `unique` returned to one of them.
    size, rank : int
        How many devices there are, and which this is.
    groups : mapping
        By axis, what the devices of a group have in common, how many they are, and the device's coordinate.
    stream, scratch : int
        The stream, and the address of memory that it may write to: 16 bytes for each device.
    prepare, finish : callable
        What a thread does to use the device, and to wait for the stream.
    seconds : float
        The longest that it waits for the others.
    is_off : callable
        Whether it is to stop waiting.

    Raises
    ------
    InputError
        If NCCL isn't there.
    WorkerError
        If NCCL refuses, as it does two devices on one GPU.
    Late
        If the others don't come in time.
    Aborted
        If it was to stop.
    """
    _bindings()  # or an error now
    found: list[tuple[Nccl, dict[str, Nccl]]] = []
    faults: list[BaseException] = []

    def begin() -> None:
        try:
            prepare()
            comm = _call("comm_init_rank_scalable", size, rank, 1, bytearray(told), 0)
            world = Nccl(comm, stream)
            parts = {axis: world.split(color, key) for axis, (color, _, key) in groups.items()}
            for axis, (_, count, key) in groups.items():
                _warm(parts[axis], count, key, scratch)
            finish()
            found.append((world, parts))
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=begin, name="tvm_axe NCCL", daemon=True)
    thread.start()
    waited = 0.0
    while thread.is_alive():
        thread.join(_LOOK)
        waited += _LOOK
        others = [other for other in range(size) if other != rank]
        if thread.is_alive() and is_off():
            raise Aborted(others)
        if thread.is_alive() and waited > seconds:
            raise Late(others, seconds)
    if faults:
        raise faults[0]
    return found[0]


def _warm(comm: Nccl, count: int, rank: int, scratch: int) -> None:
    """Have a communicator make its connections: in rings or trees, and between any two."""
    comm.all_reduce(scratch, scratch, 1, "float32")
    comm.all_gather(scratch, scratch + 16, 1)
    peers = [peer for peer in range(count) if peer != rank]
    comm.exchange([Parcel(peer, scratch, 1) for peer in peers], [Parcel(peer, scratch + 8 + peer, 1) for peer in peers])
