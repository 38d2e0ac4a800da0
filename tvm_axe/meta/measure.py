"""Measuring candidates in a process of their own: what one of them does to it costs that candidate only."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.target import Target

from ..errors import TuneError
from ..target import cores
from .worker import MEASURE, PREPARE

__all__ = ["Measurement", "Worker"]

_START_SECONDS = 120.0  # importing the compiler on a busy machine, and running an untuned function
_CALLS = 4  # of a candidate that is as slow as the untuned function, before it is given up
_MAIN = "from tvm_axe.meta.worker import main; main()"


@dataclass(frozen=True)
class Measurement:
    """What became of one candidate.

    Attributes
    ----------
    seconds
        Median time of a call; None if it failed.
    failure
        Why it failed, in one line; None if it didn't.
    build_seconds, run_seconds
        What compiling it, and running it until its median was known, took.
    """

    seconds: float | None
    failure: str | None = None
    build_seconds: float = 0.0
    run_seconds: float = 0.0


class Worker:
    """A process that stays up and builds, checks and times one candidate after the other.

    One candidate at a time: a second process would share caches, memory bandwidth and, on small machines, the cores
    with the one that is being timed. A candidate that crashes or hangs takes the process with it; the next one gets a
    new process, prepared as the old one was.

    Parameters
    ----------
    target
        A resolved target; its ``num-cores`` become the process's ``TVM_NUM_THREADS``.
    log
        File that collects what the process and the kernels print.
    timeout
        Seconds that building, checking and timing one candidate may take, beside a few calls of the untuned function.
    """

    def __init__(self, target: Target, log: Path, timeout: float) -> None:
        self.target, self.log = target, log
        self._overhead = self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._mod: IRModule | None = None
        self._reference: list[np.ndarray] | None = None

    def prepare(self, mod: IRModule) -> Measurement:
        """Run and time the untuned function ``main``; from now on candidates must compute what it computes.

        On failure nothing is prepared and nothing can be measured.
        """
        self._mod, self._reference = mod, None
        status, answer = self._prepare()
        if status == "error":
            self.close()
            return Measurement(None, answer)
        self._reference = answer["reference"]
        self._timeout = self._overhead + _CALLS * answer["median"]
        return Measurement(answer["median"])

    def measure(self, mod: IRModule) -> Measurement:
        """Build, check and time a candidate."""
        if self._process is None:
            status, answer = self._prepare()
            if status == "error":
                raise TuneError(f"a new tuning worker cannot be prepared: {answer}; see {self.log}")
        status, answer = self._ask((MEASURE, tvm.ir.save_json(mod)), self._timeout)
        if status == "error":
            return Measurement(None, answer)
        return Measurement(answer["median"], None, answer["build"], answer["run"])

    def close(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._pipe = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _prepare(self) -> tuple[str, Any]:
        request = (PREPARE, tvm.ir.save_json(self._mod), str(self.target), self._reference)
        return self._ask(request, _START_SECONDS)

    def _ask(self, request: tuple[Any, ...], timeout: float) -> tuple[str, Any]:
        """Send a request and wait for the answer; an end without an answer is an error like the others."""
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(request)
            if self._pipe.poll(timeout):
                return self._pipe.recv()
            reason = f"no result within {timeout:g} s"
        except (EOFError, OSError):
            reason = self._how_it_ended()
        self.close()
        return "error", reason

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        environment = {**os.environ, "TVM_NUM_THREADS": str(cores(self.target))}
        with theirs, open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the tuner, which then ends its worker
            )
        self._pipe = ours

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its pipe without an answer"
        return f"crashed ({signal.Signals(-code).name})" if code < 0 else f"exited ({code})"
