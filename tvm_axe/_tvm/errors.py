"""Whose fault an error is that passed through upstream's C++, and what it says."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import tvm
import tvm_ffi
from tvm.error import DiagnosticError

# Ctrl-C is raised in whatever Python runs then, and that is often what upstream's C++ has called, for a walk over a
# function, say. It would come out as a RuntimeError, which is taken for upstream's refusal of a candidate.
tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)


def schedule_error_reason(error: Exception) -> str:
    """The sentence of a schedule error that says what was wrong, without the rendered module before it."""
    _, found, reason = str(error).rpartition("Error message:")
    if "No matched reducer" in reason:  # what follows is the block's body, without its names
        return (
            "upstream's rfactor knows no reduction of this kind that begins so; valid are a sum from 0, a product from "
            "1, a maximum from T.min_value(dtype) and a minimum from T.max_value(dtype)"
        )
    return " ".join(reason.split()).removeprefix("ScheduleError: ") if found else str(error)


UPSTREAM_ERRORS = (RuntimeError, ValueError, TypeError, IndexError)
"""What upstream's C++ raises at a candidate or a record that it can't take; `why_refused` tells it from a fault.

Its ``InternalError`` and ``ScheduleError`` are of the first, our own `tvm_axe.errors.AxeError` of the first two.
"""

_REFUSALS = (RuntimeError, ValueError, MemoryError, OSError)


def is_own_fault(error: BaseException) -> bool:
    """Whether an error is a fault of the code, and says nothing of the candidate or the file that was being looked at.

    A RuntimeError, ValueError, MemoryError or OSError is none, nor is what upstream's C++ raises, or Python of its own
    below that. An error of another class that passes through its C++ becomes a plain RuntimeError; so such a one, if it
    was raised in Python that isn't upstream's, is a fault too.
    """
    crossed = getattr(error, "__tvm_ffi_error__", None)
    if crossed is None:
        return not isinstance(error, _REFUSALS)
    raised = re.match(r'\s*File "(.+\.py)", line', str(crossed.backtrace))
    if raised is None or Path(raised[1]).is_relative_to(Path(tvm.__file__).parent):
        return False
    return type(error) is RuntimeError or not isinstance(error, _REFUSALS)


def raise_own_fault(error: Exception) -> None:
    """Raise an error that was caught again if it is a fault of the code (`is_own_fault`), which is nobody's result."""
    if is_own_fault(error):
        raise error


def why_refused(error: Exception) -> str:
    """Why upstream refuses a candidate or a record, in one sentence; a fault of the code is raised again."""
    raise_own_fault(error)
    return schedule_error_reason(error)


def is_of_naming(error: BaseException) -> bool:
    """Whether an error that leaves a ``with`` of TVMScript was met in naming what that yields, and not in its body."""
    passed = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    return "eval_assign" in passed and "visit_body" not in passed


def is_unsaid(error: BaseException) -> bool:
    """Whether the error is a parser's, of which upstream's hook for uncaught exceptions prints no word."""
    return isinstance(error, DiagnosticError) and not tvm._should_print_backtrace()
