"""Messages between the ranks of a job, none of which is ever waited for inside: by MPI (`mpi_messages`) or TCP (`tcp`).

A message has a tag, and comes behind those that the same rank sent before with the same one. What is sent or received
is asked of its request, with naps between the looks, so that who waits can be interrupted, has a deadline, and notices
when a rank is gone.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

__all__ = ["Deadline", "Messages", "Nap", "Request"]

_LOOKS = 20  # looks before the first nap
_SHORTEST = 2e-5  # seconds of that


class Nap:
    """Ever longer naps between the looks at something that nothing wakes one for."""

    def __init__(self, longest: float = 1e-3) -> None:
        self._longest = longest
        self._count, self._next = 0, min(longest, _SHORTEST)

    def take(self) -> None:
        """Let others run; the first times for no longer than that."""
        self._count += 1
        if self._count <= _LOOKS:
            os.sched_yield()
        else:
            time.sleep(self._next)
            self._next = min(self._longest, 1.1 * self._next)


class Deadline:
    """A point in time that several waits share.

    Parameters
    ----------
    seconds : float
        How far away it is.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether it is past."""
        return self.left <= 0

    @property
    def left(self) -> float:
        """Seconds until it, at least 0."""
        return max(0.0, self._end - time.monotonic())


class Request(Protocol):
    """A message on its way, by the names that mpi4py has for it."""

    def Test(self) -> bool:
        """Whether it is sent, received or taken back, so that its memory is free."""

    def Cancel(self) -> None:
        """Begin to take back what was to be received."""


class Messages(ABC):
    """How this rank sends to the others and receives from them.

    Attributes
    ----------
    rank, size : int
        This rank's number, and how many there are.
    tags : int
        How many tags there are, from 0 on.
    """

    rank: int
    size: int
    tags: int

    @abstractmethod
    def send(self, rank: int, tag: int, content: Any) -> Request:
        """Send bytes, which stay as they are until that is done; returns at once."""

    @abstractmethod
    def receive(self, rank: int, tag: int, into: Any) -> Request:
        """Receive a message of as many bytes as there is room `into`; returns at once."""

    @abstractmethod
    def take(self, tag: int, rank: int | None = None) -> tuple[int, bytes | bytearray] | None:
        """Return a message of any length that has come, from `rank` or any, and from whom; None if there is none."""

    @abstractmethod
    def another(self) -> tuple[Messages, Request]:
        """Return others among the same ranks that are never taken for these, and what says that all have them."""

    def gone(self) -> Sequence[int]:
        """Return the ranks that are known to be gone, by what they could say themselves."""
        return ()

    @abstractmethod
    def finish(self, whoever_began: bool = False) -> None:
        """End by agreement: all have sent and received what they will; also if the caller's script `began` them."""

    @abstractmethod
    def abort(self, status: int) -> NoReturn:
        """End this process with an exit status, and with it all of the job that can be reached."""
