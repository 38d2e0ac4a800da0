"""What a job shows while it runs: one line with trials, the current task's best, throughput, model error, time left."""

from __future__ import annotations

import time
from types import TracebackType

from tvm_axe.meta.task import Task
from tvm_axe.progress import Bar

__all__ = ["Progress"]


class Progress:
    """A bar over all the trials of a job; where stderr isn't a terminal, a line a minute. ::

        matmul:  41%|####      | 26/64 [00:09<00:13, 171 trials a minute, best 0.512 ms, 524.3 GFLOP/s, 0 failed]

    Parameters
    ----------
    total, done
        Trials, of which some were done before.
    shown
        Whether there is a bar at all.
    """

    def __init__(self, total: int, done: int, shown: bool) -> None:
        self._bar = Bar(total, done, shown)
        self._start, self._done = time.monotonic(), 0

    def advance(self, task: Task, model_error: float | None) -> None:
        """Count a trial of this task and show how it stands."""
        self._done += 1
        minutes = (time.monotonic() - self._start) / 60
        words = [f"{self._done / minutes:.0f} trials a minute"]
        best = task.best
        words.append("none good" if best is None else f"best {best * 1e3:.3f} ms")
        if best is not None and task.operations:
            words.append(f"{task.operations / best / 1e9:.1f} GFLOP/s")
        if model_error is not None:
            words.append(f"model error {model_error:.2f}")
        words.append(f"{len(task.failures)} failed")
        self._bar.advance(task.name, ", ".join(words))

    def confirm(self, task: Task) -> None:
        """Show that a task's best candidates are being timed again."""
        self._bar.rename(f"{task.name}, the best again")

    def shorten(self, trials: int) -> None:
        """Take trials out of the total that will not be made."""
        self._bar.shorten(trials)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.__exit__()
