"""MPI's own beginning, which waits for all the ranks inside C: nothing of Python's runs meanwhile.

A clock in C ends the process if the others don't come in time; Ctrl-C ends it at once, as it does any C program; and a
script beside it (`init_watch`) says what happened and takes away what is left behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tvm_axe.collective.init_watch import mpich_files, take_name_off
from tvm_axe.errors import InputError

_WATCH = Path(__file__).with_name("init_watch.py")


def load_mpi() -> Any:
    """Return mpi4py's MPI, which is not started by that.

    Raises
    ------
    InputError
        If mpi4py or an MPI library isn't there.
    """
    started = "mpi4py.MPI" in sys.modules
    try:
        import mpi4py

        if not started:
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"launch: engine 'mpi' needs mpi4py and an MPI library ({error}): pip install tvm-axe[mpi]"
        ) from error
    return MPI


def start_mpi(timeout: float) -> tuple[Any, bool]:
    """Return mpi4py's MPI, started, and whether it is ours to end.

    The process ends with status 1 and a message if not all the ranks have come within `timeout` seconds.

    Raises
    ------
    InputError
        If mpi4py or an MPI library isn't there, or MPI was started without MPI_THREAD_MULTIPLE.
    """
    MPI = load_mpi()
    ours = not MPI.Is_initialized()
    if ours:
        with _clocked(timeout), _killed_by_ctrl_c():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise InputError("launch: engine 'mpi' needs MPI_THREAD_MULTIPLE; start MPI with it, or leave that to launch")
    take_name_off(mpich_files(os.getpid()))  # all the ranks have it open; with a name it would outlive a killed job
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        with contextlib.suppress(ValueError):  # only the main thread may
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # MPICH's mpiexec may send it when a rank dies
    return MPI, ours


@contextlib.contextmanager
def _clocked(timeout: float) -> Iterator[None]:
    """End the process, with a message, if the block takes longer than so many seconds."""
    message = (
        f"tvm_axe: launch: MPI did not start within {timeout:g} s, which takes all the ranks of the job: another rank "
        f"has ended, or doesn't launch; this was process {os.getpid()}"
    )
    watch = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_WATCH), str(os.getpid()), str(time.monotonic() + timeout), message],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert watch.stdin is not None
    try:
        with open(os.devnull, "w") as nowhere:  # else the clock prints all the threads' tracebacks
            faulthandler.dump_traceback_later(timeout, exit=True, file=nowhere)
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()
    finally:
        with contextlib.suppress(BrokenPipeError), watch.stdin:
            watch.stdin.write(b"\0")
        watch.wait()


@contextlib.contextmanager
def _killed_by_ctrl_c() -> Iterator[None]:
    """Have Ctrl-C end the process, as Python's own handler isn't run inside MPI."""
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
