"""A limit of time for what may hang: the fuzzers' cases, and blocks of tests."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["limited"]


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer; in a process's main thread only."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"this takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
