"""The package's own errors: what a caller did wrong or what went wrong outside, said in one message.

Each message names the argument, the block or the worker, the rule, what was seen and what would be valid, so that the
command line can print it as it is. Any other exception that leaves the package is a fault of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_axe.checking.report import CheckReport

__all__ = [
    "AxeError",
    "CheckError",
    "InputError",
    "LayoutError",
    "LowerError",
    "ScheduleError",
    "StreamError",
    "TileError",
    "TileWarning",
    "TuneError",
    "WorkerError",
]


class AxeError(Exception):
    """Base of every error that the package raises on purpose."""


class LayoutError(AxeError, ValueError):
    """A mesh or a layout that is malformed, or that doesn't fit a shape."""


class ScheduleError(AxeError, ValueError):
    """A schedule primitive applied where its validity rule doesn't hold."""


class LowerError(AxeError, ValueError):
    """A scheduled function that cannot be lowered, or something compiled that is used as it can't be."""


class InputError(AxeError, ValueError):
    """A file or an argument that cannot be used: a missing function, a wrong shape, another launch's tensor."""


class WorkerError(AxeError, RuntimeError):
    """A worker that failed, died or didn't answer in time; the message names it."""


class TuneError(AxeError, RuntimeError):
    """A tuning job that cannot be set up or carried on: a bad target, a directory in use, an unusable function."""


class TileError(AxeError, ValueError):
    """A tile program that is malformed, or that a target cannot run."""


class TileWarning(UserWarning):
    """A tile program that is right, and slow for a reason that its author can take away."""


class StreamError(AxeError, ValueError):
    """A streaming program that is malformed, that cannot run on a machine, or inputs that don't fit it."""


class CheckError(AxeError, RuntimeError):
    """A schedule that computes something else than its function; the message is the report of `tvm_axe.check`.

    Attributes
    ----------
    report : CheckReport
        What was run, and what was found.
    """

    def __init__(self, report: CheckReport) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[CheckError], tuple[CheckReport]]:
        return CheckError, (self.report,)
