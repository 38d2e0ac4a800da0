"""Keeping Ctrl-C's exception out of the few lines that it must not come between."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back what Python makes of Ctrl-C until the block is done; in other threads than the main one there is none.

    For blocks that are short. What is asked of MPI and what is written down of it belong together, as MPI goes on to
    use memory that nobody keeps otherwise. And workers that are ended are ended whole: what was left half done would
    never be given back, and an exception in what Disco's destructor calls is the end of the process.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda *given: caught.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])
