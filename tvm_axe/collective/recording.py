"""Recording what a program calls when: a worker's part of a timeline.

The virtual machine calls a `Recorder` before and after each of its calls. That takes about a microsecond, in which the
worker does nothing else, and can't be taken off again: a run that is recorded has a virtual machine of its own, and no
other is slowed down.

Times are those of `time.perf_counter_ns`, which is CLOCK_MONOTONIC on Linux: one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvm_axe import _tvm
from tvm_axe.errors import InputError

_BUILTIN = "vm.builtin."  # what the virtual machine calls for its own purposes: to check arguments, to allocate
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CALL = 256  # bytes that a call takes, its name included; more than most do


class Called(NamedTuple):
    """A call: of what, and the nanoseconds in which it began and was over."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Recording:
    """A run of a program on one worker.

    Attributes
    ----------
    calls : tuple of Called
        In the order in which they began.
    start, stop : int
        The nanoseconds in which this worker's part of the run began and was over.
    left : int
        The nanosecond in which it knew that all the workers' were over.
    clock : str
        Whose nanoseconds these are; those of different clocks can't be compared.
    """

    calls: tuple[Called, ...]
    start: int
    stop: int
    left: int
    clock: str

    @staticmethod
    def room(calls: int) -> int:
        """Bytes for a recording of so many calls."""
        return _CALL * (calls + 1)

    def write(self, memory: np.ndarray) -> None:
        """Write the recording to an array of bytes.

        Raises
        ------
        InputError
            If it is too long.
        """
        text = json.dumps([self.calls, self.start, self.stop, self.left, self.clock]).encode()
        if len(text) > len(memory):
            raise InputError(
                f"trace: the program makes {len(self.calls)} calls, which take {len(text)} bytes to write down; there "
                f"is room for {len(memory)}: expect more calls"
            )
        memory[:] = ord(" ")
        memory[: len(text)] = np.frombuffer(text, "uint8")

    @classmethod
    def read(cls, memory: np.ndarray) -> Recording:
        """Read what `write` wrote."""
        calls, *others = json.loads(memory.tobytes())
        return cls(tuple(Called(*call) for call in calls), *others)


class Recorder:
    """What a virtual machine is to call before and after each of its calls.

    Parameters
    ----------
    finish : Callable
        What returns when the device has done all that it was told, so that a call is over when its work is.

    Attributes
    ----------
    calls : list of Called
        In the order in which they began; to be cleared between runs.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self.calls: list[Called] = []
        self._open: list[int] = []

    def __call__(self, function: Any, name: str, before: bool, result: Any, *arguments: Any) -> None:
        self._finish()
        now = time.perf_counter_ns()
        if name.startswith(_BUILTIN) and not name.startswith(_tvm.PAGED):
            return
        if before:
            self._open.append(len(self.calls))
            self.calls.append(Called(name, now, now))
        else:
            at = self._open.pop()
            self.calls[at] = self.calls[at]._replace(stop=now)


def clock() -> str:
    """The clock that `time.perf_counter_ns` reads in this process: the start of its machine."""
    return _BOOT.read_text().strip()


def aligned(recordings: Sequence[Recording]) -> list[Recording]:
    """The recordings with one zero, the start of the run on the first worker to start it.

    Machines whose clocks differ are taken to have started at the same time: all workers leave a barrier then, some tens
    of microseconds apart.
    """
    zeros: dict[str, int] = {}
    for recording in recordings:
        zeros[recording.clock] = min(recording.start, zeros.get(recording.clock, recording.start))
    return [_earlier(recording, zeros[recording.clock]) for recording in recordings]


def _earlier(recording: Recording, zero: int) -> Recording:
    calls = tuple(Called(call.name, call.start - zero, call.stop - zero) for call in recording.calls)
    start, stop, left = (at - zero for at in (recording.start, recording.stop, recording.left))
    return Recording(calls, start, stop, left, recording.clock)
