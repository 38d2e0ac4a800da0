"""The fixtures of `tuning_workloads` that these tests take; it lies beside this folder and is imported by name."""

from tuning_workloads import matmul

__all__ = ["matmul"]
