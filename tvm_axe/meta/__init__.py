"""Tuning: find the fastest schedules of kernels and of programs on a mesh, and keep every measurement in a database."""

from tvm_axe.meta.search.job import TuneResult, tune
from tvm_axe.meta.search.task import TaskResult

__all__ = ["TaskResult", "TuneResult", "tune"]
