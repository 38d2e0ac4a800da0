"""Tuning distributed programs: which loop on which axis, how the collectives run, and each local kernel."""

from tvm_axe.meta.mesh.job import ProgramResult, best_schedule, tune_program

__all__ = ["ProgramResult", "best_schedule", "tune_program"]
