"""Tuning: find the fastest schedules of local kernels, keep them in a database, compile with them."""

from ..target import resolve_target
from .apply import apply_best
from .job import TuneResult, tune
from .packing import Packing, split_packing
from .task import TaskResult

__all__ = ["Packing", "TaskResult", "TuneResult", "apply_best", "resolve_target", "split_packing", "tune"]
