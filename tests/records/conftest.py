"""The fixtures of `tuning_workloads`, which lies beside this folder and is imported by name, as what lies in it is."""

from tuning_workloads import commit, dense, matmul, packed_error, target

__all__ = ["commit", "dense", "matmul", "packed_error", "target"]
