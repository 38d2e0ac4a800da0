"""Messages by MPI.

No call here waits inside MPI, where a thread could neither be interrupted nor notice that a rank is gone: messages are
sent and probed for without blocking, and Ctrl-C's exception comes before or behind a call of MPI's and never within
what belongs to it. The exceptions are MPI's own beginning (`initialize`) and end, which is agreed on first.
"""

from __future__ import annotations

import copy
import os
import threading
from typing import Any, NoReturn

from tvm_axe.collective.initialize import start_mpi
from tvm_axe.collective.messages import Messages, Request
from tvm_axe.interrupts import uninterrupted

__all__ = ["MpiMessages"]


class MpiMessages(Messages):
    """Messages of a communicator.

    Parameters
    ----------
    mpi : module
        mpi4py.MPI.
    comm : mpi4py.MPI.Comm
        The communicator.
    finalizes : bool
        Whether MPI is ours to end.
    """

    def __init__(self, mpi: Any, comm: Any, finalizes: bool) -> None:
        self._mpi, self._comm, self._finalizes = mpi, comm, finalizes
        self._inbox: list[tuple[int, int, Any, bytearray]] = []  # tags and sources, requests with their memory
        self._using = threading.Lock()
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.tags: int = comm.Get_attr(mpi.TAG_UB)

    @staticmethod
    def started(timeout: float) -> MpiMessages:
        """Return those of all the ranks of the job; see `initialize.start_mpi`."""
        mpi, finalizes = start_mpi(timeout)
        return MpiMessages(mpi, mpi.COMM_WORLD, finalizes)

    def send(self, rank: int, tag: int, content: Any) -> Request:
        with uninterrupted():
            request: Request = self._comm.Isend([content, self._mpi.BYTE], rank, tag)
        return request

    def receive(self, rank: int, tag: int, into: Any) -> Request:
        request: Request = self._comm.Irecv([into, self._mpi.BYTE], rank, tag)
        return request

    def take(self, tag: int, rank: int | None = None) -> tuple[int, bytes | bytearray] | None:
        with uninterrupted(), self._using:
            status = self._mpi.Status()
            message = self._comm.Improbe(self._mpi.ANY_SOURCE if rank is None else rank, tag, status)
            if message is not None:
                content = bytearray(status.Get_count(self._mpi.BYTE))
                self._inbox.append((tag, status.Get_source(), message.Irecv([content, self._mpi.BYTE]), content))
            for entry in self._inbox:
                found, source, request, content = entry
                if found == tag and rank in (None, source) and request.Test():
                    self._inbox.remove(entry)
                    return source, content
        return None

    def another(self) -> tuple[Messages, Request]:
        with uninterrupted():
            comm, request = self._comm.Idup()
        other = copy.copy(self)
        other._comm, other._inbox, other._using = comm, [], threading.Lock()
        return other, request

    def finish(self, whoever_began: bool = False) -> None:
        if self._finalizes or whoever_began:
            self._mpi.Finalize()

    def abort(self, status: int) -> NoReturn:
        self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)  # it doesn't return
