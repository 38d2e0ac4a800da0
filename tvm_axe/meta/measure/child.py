"""Processes that work for a tuner and may die of it: what one of them does to itself is an answer like any other.

The tuner's side is `Child`, the process's own is `serve`. Over a pipe goes, always from the tuner first::

    request (any tuple)  ->  ("ok", answer)
                         ->  ("error", one line)    the request failed, and the process is as good as before
                         ->  ("fatal", one line)    it failed, and the process ends: its GPU context is broken, say
                         ->  ("fault", traceback)   the code that handles requests is wrong, and the process ends
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.processes import Process, start

__all__ = ["Child", "Fatal", "Fault", "serve"]

_MESSAGE = 300  # characters of an error, from its end: the compiler's can hold whole modules, and ends with the reason
_END = 5.0  # seconds that a process which has closed its pipe may take to end
_FIRST_TO_GO = "1000"  # the highest score there is


class Fault(Exception):
    """A fault of the code that a process runs, which is no candidate's result; the message has its traceback there."""


class Fatal(Exception):
    """Raised by a handler after which the process is of no more use; the message is the reason, in words."""


class Child:
    """A process that answers requests; started when it is first asked, and again after it died.

    Parameters
    ----------
    entry
        A function that calls `serve`, as ``"package.module:function"``, of a module that is imported once for all of
        this process's children; see `tvm_axe.processes`.
    log
        File that collects what the process and all that it runs print.
    environment
        Environment variables to set.
    """

    def __init__(self, entry: str, log: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self.entry, self.log, self.environment = entry, log, environment
        self._process: Process | None = None
        self._pipe: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None while there is no process."""
        return None if self._process is None else self._process.pid

    @property
    def connection(self) -> Connection | None:
        """What an answer, or the end of the process, makes readable; for `multiprocessing.connection.wait`."""
        return self._pipe

    def ask(self, request: tuple[Any, ...], timeout: float) -> tuple[str, Any]:
        """Send a request and wait for what became of it.

        Returns
        -------
        status, answer
            ``"ok"`` and the answer; ``"error"`` and why there is none; or ``"died"`` and how, where the process ended
            without an answer. A process that doesn't answer within `timeout` seconds is killed, which is an error. If
            there is no process afterwards, the next request goes to a new one.

        Raises
        ------
        TuneError
            If no process can be started.
        Fault
            If the process's own code is at fault; it has ended then.
        """
        self.send(request)
        return self.receive(timeout)

    def start(self) -> None:
        """Start the process if there is none, so that it is up by the time that something is sent."""
        if self._process is None:
            self._start()

    def send(self, request: tuple[Any, ...]) -> None:
        """Send a request; `receive` says what became of it, also if the process is gone."""
        self.start()
        assert self._pipe is not None
        try:
            self._pipe.send(request)
        except OSError:
            return  # the pipe's other end is closed, which `receive` finds too

    def receive(self, timeout: float) -> tuple[str, Any]:
        """What became of the request that was sent; see `ask`."""
        assert self._pipe is not None
        try:
            if self._pipe.poll(timeout):
                status, answer = self._pipe.recv()
                if status in ("fatal", "fault"):
                    self.close()
                if status == "fault":
                    raise Fault(f"in a tuning worker:\n{answer}")
                return "ok" if status == "ok" else "error", answer
            found = "error", f"no result within {timeout:g} s"
        except (EOFError, OSError):
            found = "died", self._how_it_ended()
        self.close()
        return found

    def close(self) -> None:
        """End the process and all that it started."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._pipe = None

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        try:
            with theirs, open(self.log, "ab") as log:
                descriptors = [theirs.fileno()]
                self._process = start(self.entry, {}, descriptors, self.environment, output=log.fileno())
        except OSError as error:
            ours.close()
            raise TuneError(f"no tuning worker can be started: {error}") from error
        self._pipe = ours

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=_END)
        except TimeoutError:
            return "closed its pipe without an answer"
        if code == -signal.SIGKILL:
            return "killed (SIGKILL): by the system for want of memory, or from outside"
        return f"crashed ({signal.Signals(-code).name})" if code < 0 else f"exited ({code})"


def serve(descriptors: Sequence[int], handle: Callable[[tuple[Any, ...]], Any]) -> None:
    """Be a `Child`, with its pipe: answer requests by what `handle` gives or raises, until the tuner closes that."""
    # Where memory runs out it is the candidate's doing, so it isn't the tuner that the system is to kill.
    Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO, encoding="ascii")
    (descriptor,) = descriptors
    pipe = Connection(descriptor)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            answer = "ok", handle(request)
        except Fatal as error:
            pipe.send(("fatal", str(error)))
            return
        # What a candidate makes the compiler raise is that candidate's result, not this process's end.
        except Exception as error:
            if _tvm.is_own_fault(error):
                pipe.send(("fault", traceback.format_exc()))
                return
            answer = "error", f"{type(error).__name__}: {' '.join(str(error).split())[-_MESSAGE:]}"
        pipe.send(answer)
