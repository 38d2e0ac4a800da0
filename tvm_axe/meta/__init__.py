"""Tuning: find the fastest schedules of local kernels, keep them in a database, compile with them."""

from .apply import apply_best
from .job import TuneResult, tune
from .search import TaskResult
from .target import resolve_target

__all__ = ["TaskResult", "TuneResult", "apply_best", "resolve_target", "tune"]
