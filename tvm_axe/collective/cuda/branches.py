"""Branches of a stream: what is told to them goes on beside each other, and is back before the stream goes on.

What a copy waits for, and the copy itself, take some microseconds to begin. So what is for one peer doesn't wait for
what is for another (`tvm_axe.collective.side.Branching` says what is on which).

Source: CUDA Driver API, "Stream Management", cuStreamWaitEvent.
"""

from __future__ import annotations

from typing import Any

from tvm_axe.collective.cuda.driver import call, enum


class Branches:
    """Further streams beside one, made as they are asked for.

    Parameters
    ----------
    stream : CUstream
        The one, which `join` has wait for the others.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._event = new_event()
        self._begin: Any = None
        self._streams: list[Any] = []
        self._used: set[int] = set()

    def begin(self, event: Any) -> None:
        """Let branches that aren't in use begin behind an event; before the first is asked for."""
        self._begin = event

    def at(self, number: int) -> Any:
        """Return the stream of a branch, from 0 on."""
        while len(self._streams) <= number:
            self._streams.append(new_stream())
        if number not in self._used:
            self._used.add(number)
            call("cuStreamWaitEvent", self._streams[number], self._begin, 0)
        return self._streams[number]

    def join(self) -> None:
        """Have the stream wait for what its branches were told."""
        for number in sorted(self._used):
            call("cuEventRecord", self._event, self._streams[number])
            call("cuStreamWaitEvent", self._stream, self._event, 0)
        self._used.clear()

    def settle(self) -> None:
        """Take them for joined, after a failure."""
        self._used.clear()

    def close(self) -> None:
        """Give back what it has."""
        call("cuEventDestroy", self._event)
        for stream in self._streams:
            call("cuStreamDestroy", stream)


def new_stream() -> Any:
    """Return a stream that waits for no other."""
    return call("cuStreamCreate", int(enum("CUstream_flags", "CU_STREAM_NON_BLOCKING")))


def new_event() -> Any:
    """Return an event that says when, but not for how long."""
    return call("cuEventCreate", int(enum("CUevent_flags", "CU_EVENT_DISABLE_TIMING")))
