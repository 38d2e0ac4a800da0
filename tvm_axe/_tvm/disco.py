"""Disco, and what the runtime knows of its workers: sessions, functions by name, threads and cores."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm.runtime.disco import _ffi_api as _disco_ffi

DISCO_EXECUTE = "axe.execute"  # the one function that a session calls: (launch, sequence, command) -> None
_DISCO_POOL = "axe.process_pool"


def register_functions(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Make Python functions known to the runtime by their names; compiled programs may then call them."""
    for name, function in functions.items():
        tvm_ffi.register_global_func(name, function, override=True)


# Upstream fills this module in before the library with its functions is loaded, that is, with nothing.
tvm_ffi.init_ffi_api("runtime.disco", _disco_ffi.__name__)


def _process_pool(num_workers: int, num_groups: int, pipes: str) -> Callable[[int], Any]:
    """Upstream's hook for starting processes: ours run already, `pipes` is JSON of their (read, write) descriptors."""
    descriptors = json.loads(pipes)
    return lambda worker: tvm_ffi.Shape(descriptors[worker - 1]) if worker else None


register_functions({_DISCO_POOL: _process_pool})


class DiscoSession:
    """A Disco session that calls `DISCO_EXECUTE` on all its workers and never waits for one in C++.

    Parameters
    ----------
    size : int
        The number of workers. Worker 0 is a thread of this process.
    pipes : list of (int, int), optional
        For each of the other workers, which run as processes, the descriptors to read from and to write to it. They
        must stay open, and the worker's ends too, for as long as the session lives: it ends this process when a write
        fails, and it writes until it is gone. Without, all the workers are threads of this process.
    """

    def __init__(self, size: int, pipes: Sequence[tuple[int, int]] | None = None) -> None:
        if pipes is None:
            self._session = _disco_ffi.SessionThreaded(size, 1)
        else:
            self._session = _disco_ffi.SessionProcess(size, 1, _DISCO_POOL, json.dumps(pipes))
        self._execute = self._session.get_global_func(DISCO_EXECUTE)

    def send(self, launch: str, sequence: int, command: str) -> None:
        """Have every worker run a command; returns at once."""
        self._session.call_packed(self._execute, launch, sequence, command)

    def sync(self, threads: Sequence[int]) -> None:
        """Wait until `threads`, workers of this process that have answered their commands, are back from Python."""
        for rank in threads:
            self._session._sync_worker(rank)

    def close(self, threads: Sequence[int]) -> None:
        """Tell the workers to stop and wait for `threads`, those of this process, which must have done their commands.

        The session's destructor waits for the threads too, but with the interpreter locked; a thread that has yet to
        return from Python would never come out. It also writes to the descriptors, so it runs now, whoever else has a
        reference to the session's object in Python: the traceback of what was interrupted, say. Later their numbers
        would be other files'.
        """
        self.sync(threads)
        for held in (self._execute, self._session):
            kind: Any = type(held)
            taken = kind.__new__(kind)
            taken.__move_handle_from__(held)
            del taken
        del self._execute, self._session

    def leak(self) -> None:
        """Never destroy the session, because a thread of it can't be waited for."""
        for held in (self._execute, self._session):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def disco_serve(rank: int, size: int, read: int, write: int) -> None:
    """Be worker `rank` of a session in another process until it is closed."""
    tvm_ffi.get_global_func("runtime.disco.WorkerProcess")(rank, size, 1, read, write)


def disco_rank() -> int:
    """The rank of the Disco worker that the calling thread is."""
    return tvm_ffi.get_global_func("runtime.disco.worker_rank")()


def use_threads(count: int, cores: Sequence[int]) -> None:
    """Give the calling thread `count` threads for parallel loops (itself one of them), on any of the `cores`.

    Left alone, upstream would bind the n-th thread of every pool to the n-th core and, with one thread, the caller to
    core 0: the workers of a machine would share its first cores while the others idle.
    """
    share = -3  # threading::ThreadGroup::kSpecifyThreadShareAllCore
    configure = tvm_ffi.get_global_func("runtime.config_threadpool")
    names = [str(core) for core in cores]
    configure(share, count, names[:count], count)  # the first call makes the pool, with a thread for each core named
    configure(share, count, names, count)
    os.sched_setaffinity(0, cores)
