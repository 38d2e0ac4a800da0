"""What nccl4py's low-level module has of what is called of it, on memory of the host: the ranks are threads."""

from __future__ import annotations

import queue
import random
import threading
import time
from enum import IntEnum
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from test_algorithms import bytes_at

from tvm_axe.collective.ops import summed

PATIENCE = 20.0

# The numbers are NCCL's own (nccl.h).
DataType = IntEnum(
    "DataType",
    {
        "Int8": 0,
        "Uint8": 1,
        "Int32": 2,
        "Uint32": 3,
        "Int64": 4,
        "Uint64": 5,
        "Float16": 6,
        "Float32": 7,
        "Float64": 8,
        "Bfloat16": 9,
    },
)
RedOp = IntEnum("RedOp", {"Sum": 0, "Prod": 1})


class NCCLError(Exception):
    """What the calls raise."""


class _Group:
    """The ranks of a communicator: what each brings to a call, and how they meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.brought: list[Any] = [None] * size
        self.parcels: dict[tuple[int, int], queue.Queue[np.ndarray]] = {
            (sender, receiver): queue.Queue() for sender in range(size) for receiver in range(size)
        }
        self.parts: dict[tuple[int, int], _Group] = {}
        self.splits = 0


class _Comm:
    def __init__(self, group: _Group, rank: int) -> None:
        self.group, self.rank, self.splits, self.alive = group, rank, 0, True

    def together(self, what: Any) -> list[Any]:
        """What all ranks bring; nobody goes on before all have seen it."""
        assert self.alive
        time.sleep(random.random() * 1e-4)
        self.group.brought[self.rank] = what
        self.group.barrier.wait(PATIENCE)
        found = list(self.group.brought)
        self.group.barrier.wait(PATIENCE)
        return found


def _dtype(number: int) -> np.dtype:
    name = DataType(number).name.lower()
    return np.dtype(getattr(ml_dtypes, name, name))


class FakeNccl(ModuleType):
    """The module; a new one for each test."""

    DataType, RedOp, NCCLError = DataType, RedOp, NCCLError

    def __init__(self) -> None:
        super().__init__("nccl")
        self._worlds: dict[bytes, _Group] = {}
        self._lock = threading.Lock()
        self._grouped = threading.local()
        self._given = 0
        self.called: list[str] = []
        self.absent = 0  # ranks that nobody will be

    def get_version(self) -> int:
        return 23007

    def get_unique_id(self) -> bytearray:
        self._given += 1
        return bytearray(self._given.to_bytes(128, "little"))

    def comm_init_rank_scalable(self, size: int, rank: int, count: int, ids: bytearray, config: int) -> _Comm:
        assert count == 1 and len(ids) == 128 and config == 0 and 0 <= rank < size
        with self._lock:
            group = self._worlds.setdefault(bytes(ids), _Group(size))
        comm = _Comm(group, rank)
        assert all(each == size for each in comm.together(size))
        return comm

    def comm_split(self, comm: _Comm, color: int, key: int, config: int) -> _Comm:
        said = comm.together((color, key))
        members = sorted((other, rank) for rank, (each, other) in enumerate(said) if each == color)
        comm.splits += 1
        with self._lock:
            group = comm.group.parts.setdefault((comm.splits, color), _Group(len(members)))
        return _Comm(group, members.index((key, comm.rank)))

    def comm_abort(self, comm: _Comm) -> None:
        comm.alive = False
        comm.group.barrier.abort()

    def comm_destroy(self, comm: _Comm) -> None:
        comm.alive = False

    def _summed(self, name: str, comm: _Comm, here: int, count: int, dtype: int, op: int, skip: int = 1) -> Any:
        """The sum of what all ranks have, once all have looked."""
        assert op == RedOp.Sum and count > 0
        self.called.append(name)
        kind = _dtype(dtype)
        said = comm.together((name, here, count, dtype))
        assert len({(one, several, number) for one, _, several, number in said}) == 1
        with np.errstate(all="ignore"):
            total = summed([bytes_at(place, skip * count * kind.itemsize).view(kind).copy() for _, place, _, _ in said])
        comm.together(None)
        return total

    def all_reduce(self, here: int, there: int, count: int, dtype: int, op: int, comm: _Comm, stream: int) -> None:
        total = self._summed("all_reduce", comm, here, count, dtype, op)
        bytes_at(there, total.nbytes)[:] = total.view("uint8")

    def reduce(
        self, here: int, there: int, count: int, dtype: int, op: int, root: int, comm: _Comm, stream: int
    ) -> None:
        total = self._summed("reduce", comm, here, count, dtype, op)
        if comm.rank == root:
            bytes_at(there, total.nbytes)[:] = total.view("uint8")

    def reduce_scatter(self, here: int, there: int, count: int, dtype: int, op: int, comm: _Comm, stream: int) -> None:
        total = self._summed("reduce_scatter", comm, here, count, dtype, op, skip=comm.group.size)
        own = total.reshape(comm.group.size, count)[comm.rank].copy()
        bytes_at(there, own.nbytes)[:] = own.view("uint8")

    def all_gather(self, here: int, there: int, count: int, dtype: int, comm: _Comm, stream: int) -> None:
        assert dtype == DataType.Uint8 and count > 0
        self.called.append("all_gather")
        pieces = [bytes_at(place, count).copy() for place in comm.together(here)]
        comm.together(None)
        bytes_at(there, count * comm.group.size)[:] = np.concatenate(pieces)

    def broadcast(self, here: int, there: int, count: int, dtype: int, root: int, comm: _Comm, stream: int) -> None:
        assert dtype == DataType.Uint8 and count > 0
        self.called.append("broadcast")
        piece = bytes_at(comm.together(here)[root], count).copy()
        comm.together(None)
        bytes_at(there, count)[:] = piece

    def group_start(self) -> None:
        self._grouped.sends, self._grouped.receives = [], []

    def send(self, here: int, count: int, dtype: int, peer: int, comm: _Comm, stream: int) -> None:
        assert dtype == DataType.Uint8 and count > 0 and peer != comm.rank and 0 <= peer < comm.group.size
        self._grouped.sends.append((here, count, peer, comm))

    def recv(self, there: int, count: int, dtype: int, peer: int, comm: _Comm, stream: int) -> None:
        assert dtype == DataType.Uint8 and count > 0 and peer != comm.rank and 0 <= peer < comm.group.size
        self._grouped.receives.append((there, count, peer, comm))

    def group_end(self) -> None:
        """All of it at the same time, but that messages between two ranks are in order."""
        self.called.append("exchange")
        sends, receives = self._grouped.sends, self._grouped.receives
        time.sleep(random.random() * 1e-4)
        for here, count, peer, comm in sends:
            comm.group.parcels[comm.rank, peer].put(bytes_at(here, count).copy())
        for there, count, peer, comm in receives:
            piece = comm.group.parcels[peer, comm.rank].get(timeout=PATIENCE)
            assert len(piece) == count
            bytes_at(there, count)[:] = piece
