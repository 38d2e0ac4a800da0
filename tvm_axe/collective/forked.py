"""The processes of a launch's workers: starting them, seeing that they live, ending them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tvm_axe import processes

# numpy's own threads would compete with those that the kernels use; and a process with threads can't be forked.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Forked:
    """Workers that are processes of this machine, by rank."""

    def __init__(self) -> None:
        self._processes: dict[int, processes.Process] = {}
        self._words: dict[int, processes.LastWords] = {}

    def start(self, rank: int, entry: str, arguments: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Start the process of a worker, which gets the descriptors and behind them standard error, if it is open.

        Raises
        ------
        OSError
            If there can be none.
        """
        self._words[rank] = words = processes.LastWords()
        errors = [2] if processes.is_open(2) else []
        self._processes[rank] = processes.start(
            entry, arguments, [*descriptors, *errors], ENVIRONMENT, errors=words.descriptor if errors else None
        )

    def started(self) -> None:
        """Take note that all are up: from now on they speak for themselves."""
        for words in self._words.values():
            words.close()

    def dead(self) -> tuple[int, str] | None:
        """Return a worker whose process has ended, and how it did; None if all live."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
                return rank, f"{how}{self._words[rank].read()}"
        return None

    def pid(self, rank: int) -> int | None:
        """The process id of a worker; None if it has none."""
        process = self._processes.get(rank)
        return process.pid if process else None

    def kill(self) -> None:
        """Kill all, without waiting."""
        for process in self._processes.values():
            process.kill()

    def end(self, seconds: float) -> None:
        """Wait for all to end; those that haven't within so many seconds are killed."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(TimeoutError):
                process.wait(max(0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        for words in self._words.values():
            words.close()


def speak(descriptors: Sequence[int]) -> None:
    """In a worker's process, once it is up: have standard error go where it goes, and what was said until now too.

    Parameters
    ----------
    descriptors : sequence of int
        That of standard error, or none.
    """
    for descriptor in descriptors:
        sys.stderr.flush()
        said = os.pread(2, os.fstat(2).st_size, 0)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        with open(2, "wb", closefd=False) as file:
            file.write(said)
