"""Tuning distributed programs: which loop on which axis, how the collectives run, and each local kernel."""

from tvm_axe.meta.mesh.job import best_schedule, tune_program

__all__ = ["best_schedule", "tune_program"]
