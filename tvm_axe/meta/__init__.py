"""Tuning: find the fastest schedules of local kernels, keep them in a database, compile with them."""

from .apply import apply_best
from .search import TaskResult
from .target import resolve_target
from .job import TuneResult, tune

__all__ = ["TaskResult", "TuneResult", "apply_best", "resolve_target", "tune"]
